"""Symmetry pairs: what is found leaves the function unchanged, what is none is refused by name."""

import pytest
import torch
from modules import GroupedAttention, NormedAttention, PlainMLP, SwiGLU, seeded
from torch import nn

from ipslimit.optim import Pair, Part, Side, find_pairs, rescale_pair, verify_pairs

X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
MEMORY = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(1))


def relu_squared(x):
    return torch.relu(x) ** 2


def encoder(activation="relu", **options):
    return nn.TransformerEncoderLayer(
        16, 4, 24, dropout=0.1, activation=activation, batch_first=True, **options
    )


def attention(**options):
    return nn.MultiheadAttention(16, 4, batch_first=True, **options)


# (module, inputs, pairs per matrix, pairs per head)
MODELS = {
    "attention": (attention, (X, X, X), 2, 8),
    "attention without biases": (lambda: attention(bias=False), (X, X, X), 2, 8),
    "attention with other widths": (
        lambda: attention(kdim=7, vdim=6),
        (X, MEMORY[..., :7], MEMORY[..., :6]),
        2,
        8,
    ),
    "attention with appended biases": (
        lambda: attention(add_bias_kv=True, add_zero_attn=True),
        (X, X, X),
        2,
        8,
    ),
    "encoder": (encoder, (X,), 3, 9),
    "encoder, norm first": (lambda: encoder(norm_first=True), (X,), 3, 9),
    "encoder with LeakyReLU": (lambda: encoder(nn.LeakyReLU(0.1)), (X,), 3, 9),
    "decoder": (
        lambda: nn.TransformerDecoderLayer(16, 4, 24, batch_first=True),
        (X, MEMORY),
        5,
        17,
    ),
    "stack": (lambda: nn.TransformerEncoder(encoder(), 2), (X,), 6, 18),
    "SwiGLU": (SwiGLU, (X,), 1, 1),
    "SwiGLU with biases": (lambda: SwiGLU(bias=True), (X,), 1, 1),
    "grouped queries": (GroupedAttention, (X,), 2, 4),
    "grouped queries with biases": (lambda: GroupedAttention(bias=True), (X,), 2, 4),
    "one key head": (lambda: GroupedAttention(kv_heads=1), (X,), 2, 2),
    "plain MLP": (lambda: PlainMLP(nn.PReLU(24)), (X[:, 0],), 1, 1),
    "deep ReLU network": (
        lambda: nn.Sequential(
            nn.Linear(16, 8),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(8, 9),
            nn.LeakyReLU(),
            nn.Linear(9, 3),
        ),
        (X,),
        2,
        2,
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("per", ["matrix", "head"])
def test_what_is_found_is_a_symmetry(name, per):
    make, inputs, matrices, heads = MODELS[name]
    model = seeded(0, make).double().eval()
    inputs = [x.double() for x in inputs]
    pairs = find_pairs(model, per)
    assert len(pairs) == (matrices if per == "matrix" else heads)
    assert len({pair.name for pair in pairs}) == len(pairs)
    before = model(*inputs)
    for i, pair in enumerate(pairs):
        rescale_pair(pair, 3.0 + i)
    after = model(*inputs)
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (before, after)), strict=True):
        # rounding of a chain of products, times the factors that amplify it in between
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_pairs_of_a_matrix_cover_the_pairs_of_its_heads(name):
    """Rescaling all heads alike is rescaling the matrix."""
    make = MODELS[name][0]
    whole, split = seeded(0, make), seeded(0, make)
    for model, per in ((whole, "matrix"), (split, "head")):
        for pair in find_pairs(model, per):
            rescale_pair(pair, 2.0)
    for a, b in zip(whole.parameters(), split.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_layer_used_twice_is_one_site():
    shared = encoder()
    model = nn.ModuleList([shared, shared])
    assert len(find_pairs(model)) == 3


def test_layers_that_share_all_their_weights_are_one_site():
    model = nn.ModuleList([SwiGLU(), SwiGLU()])
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(model[1], name).weight = getattr(model[0], name).weight
    assert len(find_pairs(model)) == 1


def test_a_module_can_declare_its_pairs():
    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))

        def symmetry_pairs(self, name, per):
            pair = Pair(Side(Part(self.a)), Side(Part(self.b)), f"{name} product")
            return {"mlp": [pair], "qk": "there is no attention"}

    assert [pair.name for pair in find_pairs(Product(), kinds="mlp")] == ["Product product"]
    with pytest.raises(ValueError, match=r"Product \(qk\): there is no attention"):
        find_pairs(Product())


def tied_across():
    model = nn.ModuleList([SwiGLU(), SwiGLU()])
    model[1].up_proj.weight = model[0].up_proj.weight
    return model


def tied_module():
    model = nn.ModuleList([SwiGLU(), SwiGLU()])
    model[1].up_proj = model[0].up_proj
    return model


def tied_to_embedding():
    model = nn.ModuleDict({"mlp": SwiGLU(16, 24), "embedding": nn.Embedding(24, 16)})
    model["embedding"].weight = model["mlp"].up_proj.weight
    return model


def tied_halves():
    model = GroupedAttention(kv_heads=4)
    model.k_proj.weight = model.q_proj.weight
    return model


def repeated_linear():
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    return nn.Sequential(a, nn.ReLU(), b, nn.ReLU(), a)


def repeated_activation():
    gelu = nn.GELU()
    return nn.Sequential(nn.Linear(4, 4), gelu, nn.Linear(4, 4), gelu, nn.Linear(4, 4))


def normalised_weight():
    model = SwiGLU()
    nn.utils.parametrizations.weight_norm(model.up_proj)
    return model


def with_other_projection():
    model = GroupedAttention()
    model.q_proj = nn.Sequential(model.q_proj, nn.Tanh())
    return model


class NormedSwiGLU(SwiGLU):
    def __init__(self):
        super().__init__()
        self.inner = self.between()

    def between(self):
        return nn.RMSNorm(24)

    def forward(self, x):
        return self.down_proj(self.inner(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


class Property(nn.Module):
    def forward(self, x, scale):
        return x


class PropertySwiGLU(NormedSwiGLU):
    """It cannot be called as it stands."""

    def between(self):
        return Property()


class OtherAttention(nn.MultiheadAttention):
    def forward(self, x):
        return x


def renamed():
    model = GroupedAttention(kv_heads=4)
    for new, old in zip(("query", "key", "value", "out"), "qkvo", strict=True):
        setattr(model, new, getattr(model, f"{old}_proj"))
        delattr(model, f"{old}_proj")
    del model.head_dim
    model.heads = 4
    return model


def test_heads_are_seen_by_their_size_or_their_number():
    assert len(find_pairs(renamed(), "head")) == 8


def headless():
    model = GroupedAttention()
    del model.head_dim
    return model


REFUSED = {
    "GELU": (lambda: encoder("gelu"), "matrix", r"activation gelu is not homogeneous"),
    "SiLU": (lambda: PlainMLP(nn.SiLU()), "matrix", "activation SiLU is not homogeneous"),
    "ReLU6": (lambda: PlainMLP(nn.ReLU6()), "matrix", "activation ReLU6 is not homogeneous"),
    "Softplus": (lambda: PlainMLP(nn.Softplus()), "matrix", "Softplus is not homogeneous"),
    "ReLU^2": (
        lambda: encoder(relu_squared),
        "matrix",
        r"relu_squared is homogeneous of degree 2.*exponent of its own.*B over c\^2",
    ),
    "ReLU^2 as a cube": (lambda: PlainMLP(lambda x: torch.relu(x) ** 3), "matrix", "degree 3"),
    "norm between": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)),
        "matrix",
        "between 0 and 2, the activation LayerNorm could not be evaluated",
    ),
    "GELU used twice": (repeated_activation, "matrix", "between 0 and 2.*between 2 and 4"),
    "Linear used twice": (repeated_linear, "matrix", r"0\.weight is used 2 times \(0, 4; tied"),
    "QK-norm": (NormedAttention, "matrix", r"\(qk\): q_norm normalises.*QK-norm"),
    "tied across layers": (tied_across, "matrix", "0.up_proj.weight is used 2 times"),
    "tied modules": (tied_module, "matrix", "is used 2 times.*0.up_proj, 1.up_proj"),
    "tied to the embedding": (tied_to_embedding, "matrix", r"\(mlp.up_proj, embedding; tied"),
    "tied halves": (tied_halves, "matrix", r"halves share some \(tied weights\)"),
    "weight_norm": (normalised_weight, "matrix", "up_proj is Parametrized|by a parametrization"),
    "wrapped projection": (with_other_projection, "matrix", "q_proj is Sequential, not nn.Linear"),
    "a norm inside": (NormedSwiGLU, "matrix", r"by .* of its size: it holds inner \(RMSNorm\)"),
    "a rope in the name of another": (
        PropertySwiGLU,
        "matrix",
        r"holds inner \(Property\).*not be tried",
    ),
    "another forward": (
        lambda: OtherAttention(16, 4),
        "matrix",
        "OtherAttention overrides the forward",
    ),
    "unknown heads": (headless, "head", "size of its heads .* cannot be seen"),
    "broken heads": (
        lambda: GroupedAttention(heads=3, kv_heads=2),
        "head",
        "are no whole heads of 4",
    ),
    "unseen activation": (
        lambda: PlainMLP("relu"),
        "matrix",
        "activation between fc1 and fc2 cannot be seen",
    ),
    "lazy": (
        lambda: nn.Sequential(nn.LazyLinear(3), nn.ReLU(), nn.Linear(3, 3)),
        "matrix",
        "LazyLinear, not nn.Linear|not initialised",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_symmetry_is_refused_with_the_reason(case):
    make, per, reason = REFUSED[case]
    with pytest.raises(ValueError, match=f"(?s)must have exact symmetries.*(?:{reason})"):
        find_pairs(make(), per)


def test_refusals_can_be_skipped_and_are_told():
    pairs = find_pairs(encoder("gelu"), refused="skip")
    assert [pair.feeds for pair in pairs] == [False, True]
    assert len(pairs.refused) == 1 and "gelu is not homogeneous" in pairs.refused[0]
    assert find_pairs(encoder("gelu"), kinds=("qk", "vo")).refused == []
    normed = seeded(0, NormedAttention).double()
    value_output = find_pairs(normed, refused="skip")
    assert [pair.name for pair in value_output] == ["NormedAttention value/output"]
    x = torch.randn(2, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert verify_pairs(normed, value_output, x) == 0.0  # powers of two do not round


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((torch.eye(2),), TypeError, "model must be an nn.Module"),
        ((SwiGLU(), "neuron"), ValueError, "per must be out of matrix, head; got"),
        ((SwiGLU(), "matrix", ("mpl",)), ValueError, "kinds must be out of qk, vo, mlp"),
        ((SwiGLU(), "matrix", ()), ValueError, "kinds must be out of"),
        ((SwiGLU(), "matrix", "mlp", "ignore"), ValueError, "refused must be out of raise, skip"),
        ((nn.Linear(2, 2),), ValueError, "model must have symmetry pairs; none of qk, vo, mlp"),
        ((SwiGLU(), "matrix", "qk"), ValueError, "none of qk were found in SwiGLU"),
    ],
)
def test_bad_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        find_pairs(*arguments)


COMPILED = {
    "a layer": (encoder, ()),
    "its attention": (encoder, ("self_attn",)),
    "its Linears and their activation": (
        lambda: encoder(nn.ReLU()),
        ("linear1", "linear2", "activation"),
    ),
    "a gated MLP inside": (lambda: nn.ModuleDict({"mlp": SwiGLU(), "a": encoder()}), ("mlp",)),
    "an attention of projections": (GroupedAttention, ()),
    "its projections": (GroupedAttention, ("q_proj", "o_proj")),
    "a Sequential": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
        ("0", "1"),
    ),
}


@pytest.mark.parametrize("case", COMPILED)
@pytest.mark.parametrize("per", ["matrix", "head"])
def test_what_is_compiled_is_looked_through(case, per):
    make, compiled = COMPILED[case]
    model = make()
    expected = find_pairs(model, per)
    wrapped = model if compiled else torch.compile(model)
    for name in compiled:
        child = nn.ReLU() if name == "activation" else model._modules[name]
        setattr(model, name, torch.compile(child))
    found = find_pairs(wrapped, per)
    assert [pair.name for pair in found] == [pair.name for pair in expected]
    assert [pair.key() for pair in found] == [pair.key() for pair in expected]
    names = {part.name for pair in found for part in pair.parts}
    assert names == {part.name for pair in expected for part in pair.parts}


def test_ties_are_seen_through_what_is_compiled():
    model = tied_module()
    model[1].up_proj = torch.compile(model[0].up_proj)
    with pytest.raises(ValueError, match=r"is used 2 times.*0.up_proj, 1.up_proj"):
        find_pairs(model)
    model = nn.ModuleList([SwiGLU()])
    model.append(torch.compile(model[0]))  # the site itself, used twice
    assert len(find_pairs(model)) == 1
    with pytest.raises(ValueError, match="none of qk, vo, mlp were found in Linear"):
        find_pairs(torch.compile(nn.Linear(2, 2)))


@pytest.mark.parametrize(
    "name", ["RotaryEmbedding", "LlamaRotary", "RoPE", "rope", "Rope2d", "my_rope"]
)
def test_rotary_positions_commute_with_a_scale(name):
    model = GroupedAttention()
    model.positions = type(name, (nn.Module,), {})()
    assert len(find_pairs(model)) == 2


def test_probing_an_activation_leaves_the_random_state_alone():
    model = nn.Sequential(nn.Linear(3, 3), nn.RReLU(), nn.Dropout(), nn.Linear(3, 3))
    state = torch.get_rng_state()
    find_pairs(model)
    assert torch.equal(state, torch.get_rng_state())
