"""Pairs of public models by name: how many there are, and that each is a symmetry of the model."""

import re

import pytest
import torch
from zoo import HEADS, KEY_HEADS, LAYERS, decoder, inputs, seeded, transformer, vision

from ipslimit.optim import find_pairs, verify_pairs

pytest.importorskip("transformers")
pytest.importorskip("timm")
pytest.importorskip("x_transformers")
N, H, G, E = LAYERS, HEADS, KEY_HEADS, 3

# model type -> (sort of inputs, (qk, vo, mlp) pairs per matrix, heads of a pair per head, options)
FULL = (N, N, N)
WHISPER = {"max_source_positions": 32, "num_key_value_heads": H}
MOONSHINE = {"encoder_num_key_value_heads": H, "decoder_num_key_value_heads": H}
TRANSFORMERS = {
    "bert": ("tokens", FULL, H, {}),
    "roberta": ("tokens", FULL, H, {}),
    "electra": ("tokens", FULL, H, {}),
    "distilbert": ("tokens", FULL, H, {}),
    "albert": ("tokens", (1, 1, 1), H, {}),  # layers are one
    "mpnet": ("tokens", FULL, H, {}),
    "modernbert": ("tokens", FULL, H, {}),
    "deberta": ("tokens", (N * H, N * H, N), 1, {}),
    "deberta-v2": ("tokens", FULL, H, {}),
    "gpt2": ("tokens", FULL, H, {}),
    "gpt_neo": ("tokens", FULL, H, {"attention_types": [[["global", "local"], 1]]}),
    "gptj": ("tokens", FULL, H, {}),
    "codegen": ("tokens", (N * H, N * H, N), 1, {}),
    "gpt_bigcode": ("tokens", FULL, 1, {}),
    "gpt_neox": ("tokens", (N * H, N * H, N), 1, {}),
    "bloom": ("tokens", (N * H, N * H, 0), 1, {}),
    "mpt": ("tokens", (N, N, 0), H, {}),
    "falcon": ("tokens", FULL, 1, {}),
    "phi": ("tokens", FULL, G, {}),
    "phi3": ("tokens", FULL, G, {}),
    "opt": ("tokens", FULL, H, {}),
    "llama": ("tokens", FULL, G, {}),
    "mistral": ("tokens", FULL, G, {}),
    "qwen2": ("tokens", FULL, G, {}),
    "qwen3": ("tokens", (0, N, N), G, {}),
    "gemma": ("tokens", FULL, G, {}),
    "gemma2": ("tokens", FULL, G, {}),
    "olmo": ("tokens", FULL, G, {}),
    "olmo2": ("tokens", (0, N, N), G, {}),
    "glm": ("tokens", FULL, G, {}),
    "cohere": ("tokens", FULL, G, {}),
    "stablelm": ("tokens", FULL, G, {}),
    "starcoder2": ("tokens", FULL, G, {}),
    "mixtral": ("tokens", (N, N, N * E), G, {}),
    "qwen3_moe": ("tokens", (0, N, N * E), G, {}),
    "granitemoe": ("tokens", (N, N, N * E), G, {}),
    "t5": ("both", (3 * N, 3 * N, 2 * N), H, {}),
    "umt5": ("both", (3 * N, 3 * N, 2 * N), H, {"feed_forward_proj": "gated-gelu"}),
    "bart": ("both", (3 * N, 3 * N, 2 * N), H, {}),
    "pegasus": ("both", (3 * N, 3 * N, 2 * N), H, {}),
    "whisper": ("speech", (3 * N, 3 * N, 2 * N), H, WHISPER),
    "moonshine": ("sound", (3 * N, 3 * N, 2 * N), H, MOONSHINE),
    "moshi": ("tokens", FULL, G, {}),
    "vit": ("image", FULL, H, {"image_size": 32, "patch_size": 8}),
    "beit": ("image", FULL, H, {"image_size": 32, "patch_size": 8}),
    "dinov2": ("image", FULL, H, {"image_size": 32, "patch_size": 8}),
    "swin": (
        "image",
        FULL,
        H,
        {
            "image_size": 32,
            "patch_size": 4,
            "window_size": 4,
            "embed_dim": 32,
            "depths": [N],
            "num_heads": [H],
        },
    ),
}
VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_heads": H, "depth": N}
OTHERS = {
    "timm ViT": ("timm", (N, N, 0), H, vision, ("vit_tiny_patch16_224",), VIT),
    "timm ViT, ReLU": (
        "timm",
        FULL,
        H,
        vision,
        ("vit_tiny_patch16_224",),
        VIT | {"act_layer": torch.nn.ReLU},
    ),
    "timm EVA-02": ("timm", FULL, H, vision, ("eva02_tiny_patch14_224",), VIT),
    "timm BEiT": ("timm", (N, N, 0), H, vision, ("beit_base_patch16_224",), VIT),
    "timm Swin": (
        "timm",
        (N, N, 0),
        H,
        vision,
        ("swin_tiny_patch4_window7_224",),
        {"img_size": 32, "window_size": 4, "embed_dim": 32, "depths": (N,), "num_heads": (H,)},
    ),
    "x-transformers": ("x", (N, N, 0), H, decoder, (), {}),
    "x-transformers, GLU": ("x", FULL, 1, decoder, (), {"ff_glu": True, "attn_kv_heads": 1}),
    "x-transformers, ReLU^2": ("x", (N, N, 0), H, decoder, (), {"ff_relu_squared": True}),
}


def kinds(pairs):
    def count(pattern):
        return sum(bool(re.search(pattern, pair.name)) for pair in pairs)

    qk, vo = count("query/key"), count("value/output")
    return qk, vo, len(pairs) - qk - vo


def check(model, sort, per_matrix, heads):
    """Count, and rescale one after the other; powers of two change no bit of any output."""
    for per in ("matrix", "head"):
        pairs = find_pairs(model, per, refused="skip")
        times = heads if per == "head" else 1
        qk, vo, mlp = per_matrix
        assert kinds(pairs) == (times * qk, times * vo, mlp), (per, pairs.refused, pairs.unseen)
        for pair in pairs:
            assert verify_pairs(model, [pair], **inputs(sort)) == 0.0
        for reason in pairs.refused:
            assert re.search("homogeneous|QK-norm", reason), reason


@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_pairs_of_transformers(kind):
    sort, per_matrix, heads, options = TRANSFORMERS[kind]
    check(seeded(transformer, kind, **options), sort, per_matrix, heads)


@pytest.mark.parametrize("shared", [True, False])
def test_positions_that_keys_meet_besides_the_queries(shared):
    """Where positions go through the same matrices the pair stands; else there is none."""
    options = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
    options |= {"share_att_key": shared, "max_relative_positions": 8}
    model = seeded(transformer, "deberta-v2", **options)
    pairs = find_pairs(model, refused="skip")
    assert verify_pairs(model, pairs, **inputs("tokens")) == 0.0
    qk = [reason for reason in pairs.refused if "(qk)" in reason]
    assert kinds(pairs) == (N * shared, N, N) and len(qk) == N * (not shared), pairs.refused


@pytest.mark.parametrize("name", OTHERS)
def test_pairs_of_timm_and_x_transformers(name):
    sort, per_matrix, heads, make, args, options = OTHERS[name]
    check(seeded(make, *args, **options), sort, per_matrix, heads)
