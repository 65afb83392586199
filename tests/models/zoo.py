"""Small models of public libraries, with what to call them with; built from configs."""

import functools
import warnings

import torch
from torch import nn

LAYERS, HEADS, KEY_HEADS = 2, 4, 2
# every size by any name that a config may have for it
SIZES = {
    ("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"): 32,
    ("num_hidden_layers", "num_layers", "n_layer", "n_layers"): LAYERS,
    ("encoder_layers", "decoder_layers", "num_decoder_layers"): LAYERS,
    ("encoder_num_hidden_layers", "decoder_num_hidden_layers"): LAYERS,
    ("num_attention_heads", "n_head", "n_heads", "num_heads"): HEADS,
    ("encoder_attention_heads", "decoder_attention_heads"): HEADS,
    ("encoder_num_attention_heads", "decoder_num_attention_heads"): HEADS,
    ("num_key_value_heads", "num_kv_heads"): KEY_HEADS,
    ("encoder_num_key_value_heads", "decoder_num_key_value_heads"): KEY_HEADS,
    ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"): 48,
    ("d_ff", "n_inner", "ffn_hidden_size", "hidden_dim"): 48,
    ("moe_intermediate_size", "shared_expert_intermediate_size"): 24,
    ("d_kv", "head_dim"): 8,
    ("vocab_size",): 60,
    ("max_position_embeddings", "n_positions"): 64,
    ("rotary_dim",): 4,
    ("num_local_experts", "num_experts", "n_routed_experts"): 3,
    ("num_experts_per_tok",): 2,
    ("pad_token_id",): 0,
    ("bos_token_id", "decoder_start_token_id"): 1,
    ("eos_token_id",): 2,
}
ACTIVATIONS = ("hidden_act", "activation_function", "activation", "hidden_activation")
ACTIVATIONS += ("encoder_hidden_act", "decoder_hidden_act", "dense_act_fn", "feed_forward_proj")


def transformer(kind, activation="relu", **options):
    """AutoModel of a model type, in float64, with vectors that are not all 0 or 1."""
    from transformers import AutoConfig, AutoModel

    known = AutoConfig.for_model(kind)
    chosen = {name: size for names, size in SIZES.items() for name in names}
    chosen |= dict.fromkeys(ACTIVATIONS, activation)
    chosen = {
        name: value
        for name, value in chosen.items()
        if isinstance(getattr(known, name, value), (int, str, type(None)))
        and hasattr(known, name)
        and not isinstance(getattr(type(known), name, None), property)
    }
    config = AutoConfig.for_model(kind, **(chosen | options))
    config._experts_implementation = "eager"  # the others have no float64
    return AutoModel.from_config(config, attn_implementation="eager")


def vision(name, **options):
    """A model of timm."""
    import timm

    return timm.create_model(name, pretrained=False, **options)


def decoder(**options):
    """A decoder of x-transformers."""
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=LAYERS, heads=HEADS, attn_dim_head=8, **options)
    return TransformerWrapper(num_tokens=60, max_seq_len=16, attn_layers=layers)


def seeded(make, *args, **kwargs):
    """The model, the same on every call, in float64 and evaluation mode."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = make(*args, **kwargs)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                nn.init.normal_(parameter, mean=0.5, std=0.3)
    return model.double().eval()


@functools.cache
def inputs(sort):
    """What models of a sort are called with."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 60, (2, 9), generator=generator)

    def numbers(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "tokens": {"input_ids": tokens},
        "both": {"input_ids": tokens, "decoder_input_ids": tokens},
        "image": {"pixel_values": numbers(2, 3, 32, 32)},
        "speech": {"input_features": numbers(2, 80, 64), "decoder_input_ids": tokens},
        "sound": {"input_values": numbers(2, 4000), "decoder_input_ids": tokens},
        "x": {"x": tokens},
        "timm": {"x": numbers(2, 3, 32, 32)},
    }[sort]
