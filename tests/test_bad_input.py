"""Bad input: one clear line that names the argument and the remedy, before anything is done.

That any value for any argument works or is refused by name is held by test_generated_arguments.py,
and what numbers, flags and tensors must be by test_argument_kinds.py; here, what cannot work in a
way of its own, with the reason and the remedy.
"""

import math

import numpy as np
import pytest
import torch
from builders import F64, normal, random_heads, random_parts, small_problem
from test_generated_arguments import CALLS, HEADS, X, Y

from ipslimit import SGD, AdamW, Atoms, Heads, Problem, XavierUniform, attention_field
from ipslimit.model.losses import MeanPooledSquaredError, ReadoutCrossEntropy


def call(name, **changed):
    """One of CALLS, otherwise as it works."""
    if name == "entropy":  # classes for targets
        name, changed = "Problem", {"loss": ReadoutCrossEntropy(normal(5, 3))} | changed
    function, arguments = CALLS[name]
    return function(**arguments | changed)


def refused(name, changed, exception, words):
    with pytest.raises(exception) as caught:
        call(name, **changed)
    assert caught.type is exception
    message = str(caught.value)
    assert "\n" not in message, f"more than one line: {message}"
    assert message[-1] in ".)", message
    for word in words:
        assert word in message, f"{word!r} is missing in: {message}"


def spoilt(tensor, value=math.nan):
    tensor = tensor.clone()
    tensor[(-1,) * tensor.ndim] = value
    return tensor


def changed(**parts):
    return Heads(**random_parts() | parts)


def squares(x, y):
    return (x.mean(dim=-2) - y).square().sum(dim=-1)


def mixes_contexts(x, y):
    residual = x.mean(dim=-2) - y
    return (residual - residual.mean(dim=-2, keepdim=True)).square().sum(dim=-1)


def counts_axes_from_the_front(x, y):
    return (x.mean(dim=1) - y).square().sum(dim=1)


def near_seven(x, y):
    return squares(x, y) / (x[..., 0, 0] - 7)


def of_tokens(x, y):
    return (x - y[..., None, :]).square().sum(-1)


def mean_of(x, y):
    return x.mean((-1, -2))


def mean_of_contexts(x, y):
    return squares(x, y).mean()


def never_finite(x, y):
    return squares(x, y).log() * math.inf


def labels(*classes):
    return torch.tensor(classes)


def ones(*shape):
    return torch.ones(*shape, dtype=F64)


OPTIMIZER = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
CALLS = CALLS | {"wide nodes": (XavierUniform(200, 200).nodes, {})}

# call, what is changed of it, T(ypeError) or V(alueError), and what its message holds, cut by dots
TABLE = {
    "Heads": [
        (dict(q=normal(2, 3)), "V: q must have shape (..., H, m, d) … q[None]"),
        (dict(q=normal(0, 2, 3)), "V: q must … H, m, d >= 1"),
        (dict(k=normal(4, 2, 3)), "V: k must have shape (3, 2, 3) … (4, 2, 3)"),
        (dict(k=normal(5, 3, 2, 3)), "V: k must have shape (3, 2, 3)"),
        (dict(v=normal(3, 3, 2)), "V: v must have shape (3, 2, 3) … (3, 3, 2)"),
        (dict(o=normal(3, 2, 3)), "V: o must have shape (3, 3, 2) … o is (..., H, d, m)"),
        (dict(bq=normal(3, 3)), "V: bq must have shape (3, 2) … (3, 3)"),
        (dict(bo=normal(3, 2)), "V: bo must have shape (3, 3) … (3, 2)"),
        (dict(weights=normal(4)), "V: weights must have shape … H=3 … out"),
        (dict(weights=torch.tensor(1.0, dtype=F64)), "V: weights must … (..., H)"),
        (
            dict(**random_parts((2,)) | {"weights": normal(5, 3)}),
            "V: weights must broadcast to (2, 3) … (5, 3)",
        ),
        (dict(v=normal(3, 2, 3).float()), "T: v must have the dtype of q … v.to(q.dtype)"),
        (dict(weights=normal(3).float()), "T: weights must have the dtype of q"),
        (dict(o=normal(3, 3, 2).to("meta")), "T: o must have the device of q … o.to(q.device)"),
    ],
    "attention_field": [
        (dict(heads=HEADS.q), "T: heads must be ipslimit.Heads … Tensor"),
        (dict(heads=Atoms(HEADS)), "T: heads must … Atoms"),
        (dict(x=HEADS, heads=X), "T: heads must be"),
        (dict(x=X[0]), "V: x must have shape (..., B, N, d) … x[None]"),
        (dict(x=normal(2, 4, 5)), "V: x must … d=3 … (2, 4, 5)"),
        (dict(x=X[:, :0]), "V: x must … B, N >= 1"),
        (dict(x=X[:0]), "V: x must … B, N >= 1"),
        (
            dict(x=normal(5, 2, 4, 3), heads=random_heads((4,))),
            "V: leading dimensions of x and heads must broadcast … (5,) … (4,) … size 1",
        ),
        (dict(x=X.float()), "T: dtype of x … heads.to(x.dtype)"),
        (dict(x=X.to("meta")), "T: device of x … heads.to(x.device)"),
        (dict(x=X.numpy()), "T: x must be a tensor … torch"),
        (dict(x=X.tolist()), "T: x must be a tensor"),
    ],
    "attention_vjp": [
        (dict(cotangent=X.numpy()), "T: cotangent must be a tensor"),
        (dict(cotangent=X.tolist()), "T: cotangent must be a tensor"),
        (
            dict(cotangent=X[:, :3]),
            "V: cotangent must broadcast to the field's shape (2, 4, 3) … (2, 3, 3)",
        ),
        (dict(cotangent=normal(5, 2, 4, 3)), "V: cotangent must broadcast"),
        (
            dict(cotangent=X.float()),
            "T: cotangent must have the dtype of x … cotangent.to(x.dtype)",
        ),
    ],
    "Atoms": [
        (dict(heads=X), "T: heads must be ipslimit.Heads … Tensor"),
        (dict(heads=random_heads((2,))), "V: heads of Atoms … leading … flatten"),
        (dict(heads=changed(k=spoilt(normal(3, 2, 3)))), "V: heads must be finite … first at"),
        (dict(heads=changed(weights=spoilt(normal(3)))), "V: weights must be finite"),
        (dict(heads=changed(weights=ones(3))), "V: weights of Atoms … sum to 1 … sum 3 … Divide"),
        (
            dict(heads=changed(weights=torch.tensor([1.5, -0.5, 0.0], dtype=F64))),
            "V: weights of Atoms must be non-negative … -0.5",
        ),
    ],
    "nodes": [(dict(n=7), "V: nodes must be even in number … 7 … Use 8")],
    "wide nodes": [(dict(n=8), "V: d*m must be at most … Atoms")],
    "TruncatedNormal": [(dict(bound=math.inf), "V: bound must")],
    "Problem": [
        (dict(law=Atoms), "T: law must … Atoms(heads)"),
        (dict(law=HEADS), "T: law must … Heads … Atoms(heads)"),
        (dict(law=None), "T: law must … NoneType"),
        (dict(contexts=X[0]), "V: contexts must have shape (B, N, d) … x[None]"),
        (dict(contexts=normal(2, 4, 5)), "V: contexts must … d=3 … (2, 4, 5)"),
        (dict(contexts=X[:0]), "V: contexts must … B, N >= 1"),
        (dict(contexts=X[:, :0]), "V: contexts must … B, N >= 1"),
        (
            dict(contexts=spoilt(X)),
            "V: contexts must be finite … 1 NaN or infinite entries of 24 … (1, 3, 2)",
        ),
        (dict(contexts=spoilt(X, math.inf)), "V: contexts must be finite"),
        (dict(targets=Y[:1]), "V: targets must have shape (B, d) = (2, 3) … (1, 3)"),
        (dict(targets=X), "V: targets must have shape (B, d)"),
        (
            dict(targets=Y.float()),
            "T: targets must have the dtype of contexts … targets.to(contexts.dtype)",
        ),
        (dict(targets=labels(0, 1)), "T: targets must be float32 or float64 … int64"),
        (dict(targets=spoilt(Y)), "V: targets must be finite"),
        (dict(probes=(X,)), "T: probes must be a pair (contexts, targets)"),
        (dict(probes=3), "T: probes must be a pair … int"),
        (dict(probes=(normal(2, 5, 3), Y)), "V: probes must have N, d = (4, 3) … (5, 3)"),
        (dict(probes=(normal(2, 4, 2), Y)), "V: probes must have shape … d=3"),
        (dict(probes=(X, Y[:1])), "V: probes … (2, 3) … (1, 3)"),
        (
            dict(probes=(X.float(), Y.float())),
            "T: probes must have the dtype of contexts … .to(contexts.dtype)",
        ),
        (dict(probes=(spoilt(X), Y)), "V: probes must be finite"),
        (dict(loss="mse"), "T: loss must be callable … str"),
        (dict(loss=MeanPooledSquaredError), "T: loss must … called first"),
        (dict(loss=lambda x: x), "T: loss must … loss(x, y)"),
        (
            dict(loss=mean_of_contexts),
            "V: loss must return one value per context … (2,) … Do not average",
        ),
        (dict(loss=of_tokens), "V: loss must return one value per context … (2, 4)"),
        (dict(loss=lambda x, y: 1.0), "V: loss must return one value … float"),
        (dict(loss=never_finite), "V: loss must be finite … contexts … Check targets"),
        (dict(loss=near_seven, probes=(X * 0 + 7, Y)), "V: loss must be finite … probes"),
        (dict(loss=counts_axes_from_the_front), "V: loss must … leading"),
        (
            dict(loss=counts_axes_from_the_front, contexts=normal(3, 3, 3), targets=normal(3, 3)),
            "V: loss must … leading",
        ),
        (dict(loss=mixes_contexts), "V: loss must … context"),
        (dict(loss=lambda x, y: squares(x.detach(), y)), "V: loss must … different"),
        (dict(loss=lambda x, y: squares(x, y).long()), "V: loss must … float"),
        (dict(loss=lambda x, y: squares(x, y).cfloat()), "V: loss must … float"),
        (dict(loss=mean_of, targets=["a", "b"]), "T: targets must"),
        (dict(loss=mean_of, targets=None), "T: targets must"),
        (dict(loss=squares, targets=Y[:1]), "V: targets must … B … (1, 3)"),
    ],
    "ReadoutCrossEntropy": [
        (dict(readout=normal(3)), "V: readout must have shape (C, d)"),
        (dict(readout=normal(1, 3)), "V: readout must … C >= 2"),
        (dict(readout=spoilt(normal(2, 3))), "V: readout must be finite"),
    ],
    "entropy": [
        (
            dict(targets=labels(0, 1), loss=ReadoutCrossEntropy(normal(5, 2))),
            "V: readout must have shape (C, d) with d=3 … (5, 2)",
        ),
        (dict(targets=labels(0, 5)), "V: targets must lie in 0..4 … 0..5 … Relabel"),
        (dict(targets=labels(-1, 2)), "V: targets must lie in 0..4 … -1..2"),
        (dict(targets=labels(0.0, 1.0)), "V: targets … int64 … targets.long()"),
        (dict(targets=labels(0, 1, 2)), "V: targets must be 2 class indices … (3,)"),
        (dict(targets=Y), "V: targets must be 2 class indices"),
        (dict(targets=["a", "b"]), "T: targets must"),
    ],
    "AdamW": [
        (dict(betas=0.9), "T: betas must be a pair … (0.9, 0.999)"),
        (dict(betas=(0.9, 0.9, 0.9)), "T: betas must be a pair"),
        (dict(betas=(0.9, 1.0)), "V: betas[1] must … [0, 1)"),
        (dict(betas=(-0.1, 0.9)), "V: betas[0] must … [0, 1)"),
    ],
    "SBOAdamW": [(dict(centre="median"), "V: centre must be one of batch … 'median'")],
    "SGD": [(dict(lr=normal(4, 4)), "T: lr must be a real number")],
    "train_particles": [
        (dict(problem=X), "T: problem must be ipslimit.Problem"),
        (dict(problem=Problem), "T: problem must be ipslimit.Problem"),
        (dict(problem=SGD(0.1), rule=small_problem()), "T: problem must … SGD"),
        (dict(rule=AdamW), "T: rule must … called first"),
        (dict(rule="adamw"), "T: rule must … ipslimit.AdamW(lr=0.02)"),
        (dict(rule=None), "T: rule must … None"),
        (dict(rule=OPTIMIZER), "T: rule must … a torch optimizer is not a rule"),
        (dict(heads=math.inf), "T: heads must be an integer … inf"),
        (dict(heads=10**19), "V: heads must be at"),
        (dict(seeds=[]), "V: seeds must … at least one"),
        (dict(seeds=[1, 2, 1]), "V: seeds must be distinct … [1, 2, 1]"),
        (dict(seeds=[0, -1]), "V: seeds must be at least 0 … -1"),
        (dict(seeds=[0.0]), "T: seeds must be an integer … 0.0"),
        (dict(seeds="12"), "T: seeds must be an integer … '12'"),
        (dict(seeds=torch.tensor(3)), "T: seeds must be … tensor(3)"),
        (dict(seeds=np.array(3)), "T: seeds must be … array(3)"),
        (dict(record=[0, 2]), "V: record must name … 0..1 … [0, 2] … Raise steps"),
        (dict(record=[-1]), "V: record must be at least 0"),
        (dict(record=1), "T: record must be a sequence … [0, 1]"),
        (dict(record="01"), "T: record must be a sequence … '01'"),
        (dict(record=[0.0]), "T: record must be an integer … 0.0"),
        (dict(record=torch.tensor(1)), "T: record must be … tensor(1)"),
        (dict(device="gpu"), "V: device must be … 'gpu' … 'auto'"),
        (dict(device=None), "V: device must be … None … 'auto'"),
        (dict(device="meta"), "V: device must be … 'auto'"),
        (dict(device="mps"), "V: device must be … 'auto'"),
        (
            dict(problem=small_problem(XavierUniform(3, 2)), heads=None, nodes=7),
            "V: nodes must be even in number … Use 8",
        ),
    ],
    "solve_limit": [
        (dict(problem="toy"), "T: problem must be"),
        (dict(rule=SGD), "T: rule must be an optimizer rule … called first"),
        (dict(record=[3]), "V: record must … Raise steps"),
        (dict(record=[]), "V: record must name at least one step"),
        (dict(max_elements=7), "V: max_elements must be at least 4 … = 8 … Raise"),
        (dict(method="euler"), "V: method must … 'euler' … Use 'auto'"),
        (dict(device="abacus"), "V: device must … Use"),
        (dict(quadrature_tol=0.0), "V: quadrature_tol must … Choose"),
        (dict(quadrature_tol=math.nan), "V: quadrature_tol must … Choose"),
    ],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name, changed, said", [(name, *row) for name, rows in TABLE.items() for row in rows]
)
def test_what_cannot_work_is_refused_with_the_reason_and_the_remedy(name, changed, said):
    kind, words = said.split(": ", 1)
    refused(name, changed, {"T": TypeError, "V": ValueError}[kind], words.split(" … "))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_card_it_is_said_so():
    refused("train_particles", {"device": "cuda"}, ValueError, ["device='cpu'", "be available"])


def test_an_unknown_kernel_is_refused_with_those_there_are(monkeypatch):
    monkeypatch.setenv("IPSLIMIT_KERNEL", "quick")
    with pytest.raises(
        ValueError, match=r"^IPSLIMIT_KERNEL must be eager, fused, triton or.*Unset"
    ):
        attention_field(X, HEADS)


# --- and what is not bad -----------------------------------------------------------------------


def test_a_loss_that_works_in_place_cannot_change_the_contexts():
    contexts = X.clone()
    try:
        call("Problem", contexts=contexts, loss=lambda x, y: squares(x.mul_(2), y))
    except (TypeError, ValueError, RuntimeError):
        pass
    assert torch.equal(contexts, X)


def test_what_is_refused_is_refused_before_anything_is_trained():
    calls = []

    class Recorder(SGD):
        def init(self, heads):
            calls.append(heads)
            return super().init(heads)

    for bad in ({"steps": -1}, {"record": [7]}, {"seeds": [1, 1]}, {"device": "gpu"}):
        with pytest.raises((TypeError, ValueError)):
            call("train_particles", rule=Recorder(0.1), **bad)
    assert not calls


def test_numpy_integers_and_floats_are_good_input():
    run = call(
        "train_particles",
        depth=np.int64(2),
        heads=np.int32(2),
        steps=np.int64(1),
        seeds=np.arange(2),
        record=np.arange(2),
        rule=SGD(np.float32(0.1)),
        root_seed=np.uint8(1),
        residual_exponent=np.float64(1.0),
    )
    assert run.seeds == (0, 1)
    assert list(run.x) == [0, 1]
    assert all(type(seed) is int for seed in run.seeds)


def test_a_generator_of_seeds_or_steps_is_good_input():
    run = call("train_particles", seeds=(s for s in (4, 2)), record=(k for k in (1, 0)))
    assert run.seeds == (4, 2)
    assert list(run.x) == [0, 1]
