"""Bad input: one clear line that names the argument and the remedy, before anything is done."""

import math

import numpy as np
import pytest
import torch
from builders import F64, normal, random_heads, random_parts, small_atoms, small_problem

from ipslimit import (
    SGD,
    AdamW,
    Atoms,
    BlockAdamW,
    Heads,
    Problem,
    SBOAdamW,
    TruncatedNormal,
    XavierUniform,
    attention_field,
    attention_vjp,
    train_particles,
)
from ipslimit.model.losses import MeanPooledSquaredError, ReadoutCrossEntropy

X, Y = normal(2, 4, 3), normal(2, 3, seed=1)
LAW = small_atoms()
HEADS = random_heads()


def heads(**changed):
    return Heads(**random_parts() | changed)


def atoms(**changed):
    return Atoms(heads(**changed))


def problem(**changed):
    return Problem(**{"contexts": X, "targets": Y, "law": LAW} | changed)


def train(**changed):
    arguments = {"problem": small_problem(), "rule": SGD(0.1), "depth": 2, "heads": 2, "steps": 1}
    return train_particles(**arguments | {"device": "cpu"} | changed)


def entropy(targets, contexts=X, readout=None, **options):
    loss = ReadoutCrossEntropy(normal(5, 3) if readout is None else readout)
    return problem(contexts=contexts, targets=targets, loss=loss, **options)


def user_loss(function, targets=Y, **options):
    return problem(loss=function, targets=targets, **options)


def spoilt(tensor, value=math.nan):
    tensor = tensor.clone()
    tensor[(-1,) * tensor.ndim] = value
    return tensor


def squares(x, y):
    return (x.mean(dim=-2) - y).square().sum(dim=-1)


def optimizer():
    return torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)


# name: (what is done, exception, words that its message must hold)
HEADS_CASES = {
    "q without an axis of heads": (
        lambda: heads(q=normal(2, 3)),
        ValueError,
        ["q must have shape (..., H, m, d)", "q[None]"],
    ),
    "q empty": (lambda: heads(q=normal(0, 2, 3)), ValueError, ["q must", "H, m, d >= 1"]),
    "k of other H": (
        lambda: heads(k=normal(4, 2, 3)),
        ValueError,
        ["k must have shape (3, 2, 3)", "(4, 2, 3)"],
    ),
    "v transposed": (
        lambda: heads(v=normal(3, 3, 2)),
        ValueError,
        ["v must have shape (3, 2, 3)", "(3, 3, 2)"],
    ),
    "o transposed": (
        lambda: heads(o=normal(3, 2, 3)),
        ValueError,
        ["o must have shape (3, 3, 2)", "o is (..., H, d, m)"],
    ),
    "k with leading dimensions that q lacks": (
        lambda: heads(k=normal(5, 3, 2, 3)),
        ValueError,
        ["k must have shape (3, 2, 3)"],
    ),
    "bq of length d": (
        lambda: heads(bq=normal(3, 3)),
        ValueError,
        ["bq must have shape (3, 2)", "(3, 3)"],
    ),
    "bo of length m": (
        lambda: heads(bo=normal(3, 2)),
        ValueError,
        ["bo must have shape (3, 3)", "(3, 2)"],
    ),
    "weights of other H": (
        lambda: heads(weights=normal(4)),
        ValueError,
        ["weights must have shape", "H=3", "out"],
    ),
    "weights that do not broadcast": (
        lambda: Heads(**random_parts((2,)) | {"weights": normal(5, 3)}),
        ValueError,
        ["weights must broadcast to (2, 3)", "(5, 3)", "one weight per head"],
    ),
    "weight a number": (
        lambda: heads(weights=torch.tensor(1.0, dtype=F64)),
        ValueError,
        ["weights must", "(..., H)"],
    ),
    "mixed dtypes": (
        lambda: heads(v=normal(3, 2, 3).float()),
        TypeError,
        ["v must have the dtype of q", "float64", "float32", "v.to(q.dtype)"],
    ),
    "weights of another dtype": (
        lambda: heads(weights=normal(3).float()),
        TypeError,
        ["weights must have the dtype of q"],
    ),
    "mixed devices": (
        lambda: heads(o=normal(3, 3, 2).to("meta")),
        TypeError,
        ["o must have the device of q", "o.to(q.device)"],
    ),
    "integers": (
        lambda: heads(q=torch.ones(3, 2, 3, dtype=torch.int64)),
        TypeError,
        ["q must be float32 or float64", "int64", "q.to(torch.float64)"],
    ),
    "half precision": (
        lambda: heads(q=normal(3, 2, 3).half()),
        TypeError,
        ["q must be float32 or float64"],
    ),
    "complex numbers": (
        lambda: heads(q=normal(3, 2, 3).cfloat()),
        TypeError,
        ["q must be float32 or float64"],
    ),
    "text": (lambda: heads(q="abc"), TypeError, ["q must be a tensor", "str", "torch.tensor"]),
    "None": (lambda: heads(q=None), TypeError, ["q must be a tensor", "NoneType"]),
    "ragged list": (lambda: heads(q=[[1.0], [1.0, 2.0]]), TypeError, ["q must be a tensor"]),
}

ATTENTION_CASES = {
    "heads a tensor": (
        lambda: attention_field(X, HEADS.q),
        TypeError,
        ["heads must be ipslimit.Heads", "Tensor"],
    ),
    "a law for heads": (lambda: attention_field(X, LAW), TypeError, ["heads must", "Atoms"]),
    "arguments swapped": (lambda: attention_field(HEADS, X), TypeError, ["heads must be"]),
    "a single context": (
        lambda: attention_field(X[0], HEADS),
        ValueError,
        ["x must have shape (..., B, N, d)", "x[None]"],
    ),
    "other d": (
        lambda: attention_field(normal(2, 4, 5), HEADS),
        ValueError,
        ["x must", "d=3", "(2, 4, 5)"],
    ),
    "no tokens": (lambda: attention_field(X[:, :0], HEADS), ValueError, ["x must", "B, N >= 1"]),
    "no contexts": (lambda: attention_field(X[:0], HEADS), ValueError, ["x must", "B, N >= 1"]),
    "leading dimensions that do not broadcast": (
        lambda: attention_field(normal(5, 2, 4, 3), random_heads((4,))),
        ValueError,
        ["leading dimensions of x and heads must broadcast", "(5,)", "(4,)", "size 1"],
    ),
    "x of another dtype": (
        lambda: attention_field(X.float(), HEADS),
        TypeError,
        ["dtype of x", "heads.to(x.dtype)"],
    ),
    "x on another device": (
        lambda: attention_field(X.to("meta"), HEADS),
        TypeError,
        ["device of x", "heads.to(x.device)"],
    ),
    "x of integers": (
        lambda: attention_field(torch.ones(2, 4, 3, dtype=torch.int64), HEADS),
        TypeError,
        ["x must be float32 or float64", "x.to(torch.float64)"],
    ),
    "causal a number": (
        lambda: attention_field(X, HEADS, 1),
        TypeError,
        ["causal must be True or False", "1"],
    ),
    "cotangent of another shape": (
        lambda: attention_vjp(X, HEADS, X[:, :3]),
        ValueError,
        ["cotangent must broadcast to the field's shape (2, 4, 3)", "(2, 3, 3)"],
    ),
    "cotangent with more leading dimensions": (
        lambda: attention_vjp(X, HEADS, normal(5, 2, 4, 3)),
        ValueError,
        ["cotangent must broadcast"],
    ),
    "cotangent of another dtype": (
        lambda: attention_vjp(X, HEADS, X.float()),
        TypeError,
        ["cotangent must have the dtype of x", "cotangent.to(x.dtype)"],
    ),
    "unknown kernel": (
        lambda: with_kernel("quick"),
        ValueError,
        ["IPSLIMIT_KERNEL", "eager, fused or auto", "Unset"],
    ),
}


def with_kernel(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPSLIMIT_KERNEL", name)
        return attention_field(X, HEADS)


LAW_CASES = {
    "atoms not heads": (lambda: Atoms(X), TypeError, ["heads must be ipslimit.Heads", "Tensor"]),
    "atoms with layers": (
        lambda: Atoms(random_heads((2,))),
        ValueError,
        ["heads of Atoms", "leading", "flatten"],
    ),
    "atoms not finite": (
        lambda: atoms(k=spoilt(normal(3, 2, 3))),
        ValueError,
        ["heads must be finite", "first at index"],
    ),
    "weights not finite": (
        lambda: atoms(weights=spoilt(normal(3))),
        ValueError,
        ["weights must be finite"],
    ),
    "weights that do not sum to one": (
        lambda: atoms(weights=torch.ones(3, dtype=F64)),
        ValueError,
        ["weights of Atoms", "sum to 1", "sum 3", "Divide"],
    ),
    "a negative weight": (
        lambda: atoms(weights=torch.tensor([1.5, -0.5, 0.0], dtype=F64)),
        ValueError,
        ["weights of Atoms must be non-negative", "-0.5"],
    ),
    "d zero": (lambda: XavierUniform(0, 2), ValueError, ["d must be at least 1", "larger"]),
    "m a float": (lambda: XavierUniform(3, 2.0), TypeError, ["m must be an integer", "2.0"]),
    "d a bool": (lambda: XavierUniform(True, 2), TypeError, ["d must be an integer", "True"]),
    "gain zero": (
        lambda: XavierUniform(3, 2, 0.0),
        ValueError,
        ["gain must", "(0, inf)", "inside"],
    ),
    "gain NaN": (lambda: XavierUniform(3, 2, math.nan), ValueError, ["gain must be a finite"]),
    "std negative": (lambda: TruncatedNormal(3, 2, -1.0, 1.0), ValueError, ["std must"]),
    "bound infinite": (lambda: TruncatedNormal(3, 2, 1.0, math.inf), ValueError, ["bound must"]),
    "std text": (lambda: TruncatedNormal(3, 2, "1", 1.0), TypeError, ["std must be a real number"]),
    "nodes odd": (
        lambda: XavierUniform(3, 2).nodes(7),
        ValueError,
        ["nodes must be even in number", "7", "Use 8"],
    ),
    "nodes none": (lambda: XavierUniform(3, 2).nodes(0), ValueError, ["n must be at least 2"]),
    "nodes a float": (lambda: XavierUniform(3, 2).nodes(8.0), TypeError, ["n must be an integer"]),
    "seed negative": (
        lambda: XavierUniform(3, 2).nodes(8, -1),
        ValueError,
        ["seed must be at least"],
    ),
    "too many dimensions for Sobol": (
        lambda: XavierUniform(200, 200).nodes(8),
        ValueError,
        ["d*m must be at most", "Atoms"],
    ),
}

PROBLEM_CASES = {
    "law a class": (lambda: problem(law=Atoms), TypeError, ["law must", "Atoms(heads)"]),
    "law heads": (lambda: problem(law=HEADS), TypeError, ["law must", "Heads", "Atoms(heads)"]),
    "law None": (lambda: problem(law=None), TypeError, ["law must", "NoneType"]),
    "causal a number": (lambda: problem(causal=1), TypeError, ["causal must be True or False"]),
    "contexts of two dimensions": (
        lambda: problem(contexts=X[0]),
        ValueError,
        ["contexts must have shape (B, N, d)", "x[None]"],
    ),
    "contexts of other d": (
        lambda: problem(contexts=normal(2, 4, 5)),
        ValueError,
        ["contexts must", "d=3", "(2, 4, 5)"],
    ),
    "no contexts": (lambda: problem(contexts=X[:0]), ValueError, ["contexts must", "B, N >= 1"]),
    "no tokens": (lambda: problem(contexts=X[:, :0]), ValueError, ["contexts must", "B, N >= 1"]),
    "contexts NaN": (
        lambda: problem(contexts=spoilt(X)),
        ValueError,
        ["contexts must be finite", "1 NaN or infinite entries of 24", "(1, 3, 2)", "Clean"],
    ),
    "contexts infinite": (
        lambda: problem(contexts=spoilt(X, math.inf)),
        ValueError,
        ["contexts must be finite"],
    ),
    "contexts of integers": (
        lambda: problem(contexts=torch.ones(2, 4, 3, dtype=torch.int64)),
        TypeError,
        ["contexts must be float32 or float64", "contexts.to(torch.float64)"],
    ),
    "contexts None": (lambda: problem(contexts=None), TypeError, ["contexts must be a tensor"]),
    "targets of another shape": (
        lambda: problem(targets=Y[:1]),
        ValueError,
        ["targets must have shape (B, d) = (2, 3)", "(1, 3)"],
    ),
    "targets per token": (
        lambda: problem(targets=X),
        ValueError,
        ["targets must have shape (B, d)"],
    ),
    "targets of another dtype": (
        lambda: problem(targets=Y.float()),
        TypeError,
        ["targets must have the dtype of contexts", "targets.to(contexts.dtype)"],
    ),
    "integer targets for the squared error": (
        lambda: problem(targets=torch.tensor([0, 1])),
        TypeError,
        ["targets must be float32 or float64", "int64", "targets.to(torch.float64)"],
    ),
    "targets NaN": (lambda: problem(targets=spoilt(Y)), ValueError, ["targets must be finite"]),
    "targets None": (lambda: problem(targets=None), TypeError, ["targets must be a tensor"]),
    "probes without targets": (
        lambda: problem(probes=(X,)),
        TypeError,
        ["probes must be a pair (contexts, targets)"],
    ),
    "probes a number": (lambda: problem(probes=3), TypeError, ["probes must be a pair", "int"]),
    "probes of other N": (
        lambda: problem(probes=(normal(2, 5, 3), Y)),
        ValueError,
        ["probes must have N, d = (4, 3)", "(5, 3)"],
    ),
    "probes of other d": (
        lambda: problem(probes=(normal(2, 4, 2), Y)),
        ValueError,
        ["probes must have shape", "d=3"],
    ),
    "probes of another dtype": (
        lambda: problem(probes=(X.float(), Y.float())),
        TypeError,
        ["probes must have the dtype of contexts", ".to(contexts.dtype)"],
    ),
    "probes NaN": (lambda: problem(probes=(spoilt(X), Y)), ValueError, ["probes must be finite"]),
    "loss not callable": (lambda: problem(loss="mse"), TypeError, ["loss must be callable", "str"]),
    "loss averages over contexts": (
        lambda: user_loss(lambda x, y: squares(x, y).mean()),
        ValueError,
        ["loss must return one value per context", "(2,)", "Do not average"],
    ),
    "loss keeps tokens": (
        lambda: user_loss(lambda x, y: (x - y[..., None, :]).square().sum(-1)),
        ValueError,
        ["loss must return one value per context", "(2, 4)"],
    ),
    "loss not a tensor": (
        lambda: user_loss(lambda x, y: 1.0),
        ValueError,
        ["loss must return one value", "float"],
    ),
    "loss not finite": (
        lambda: user_loss(lambda x, y: squares(x, y).log() * math.inf),
        ValueError,
        ["loss must be finite", "contexts", "Check targets"],
    ),
    "loss of probes not finite": (
        lambda: user_loss(lambda x, y: squares(x, y) / (x[..., 0, 0] - 7), probes=(X * 0 + 7, Y)),
        ValueError,
        ["loss must be finite", "probes"],
    ),
    "readout a vector": (
        lambda: ReadoutCrossEntropy(normal(3)),
        ValueError,
        ["readout must have shape (C, d)"],
    ),
    "readout of one class": (
        lambda: ReadoutCrossEntropy(normal(1, 3)),
        ValueError,
        ["readout must", "C >= 2"],
    ),
    "readout NaN": (
        lambda: ReadoutCrossEntropy(spoilt(normal(2, 3))),
        ValueError,
        ["readout must be finite"],
    ),
    "readout of other d": (
        lambda: entropy(torch.tensor([0, 1]), readout=normal(5, 2)),
        ValueError,
        ["readout must have shape (C, d) with d=3", "(5, 2)"],
    ),
    "class labels too large": (
        lambda: entropy(torch.tensor([0, 5])),
        ValueError,
        ["targets must lie in 0..4", "0..5", "Relabel"],
    ),
    "class labels negative": (
        lambda: entropy(torch.tensor([-1, 2])),
        ValueError,
        ["targets must lie in 0..4", "-1..2"],
    ),
    "class labels as floats": (
        lambda: entropy(torch.tensor([0.0, 1.0])),
        ValueError,
        ["targets", "int64", "targets.long()"],
    ),
    "class labels of other number": (
        lambda: entropy(torch.tensor([0, 1, 2])),
        ValueError,
        ["targets must be 2 class indices", "(3,)"],
    ),
    "vectors for class labels": (
        lambda: entropy(Y),
        ValueError,
        ["targets must be 2 class indices"],
    ),
}

RULE_CASES = {
    "lr zero": (lambda: SGD(0.0), ValueError, ["lr must", "(0, inf)", "inside"]),
    "lr negative": (lambda: AdamW(-1e-3), ValueError, ["lr must", "-0.001"]),
    "lr NaN": (lambda: BlockAdamW(math.nan), ValueError, ["lr must be a finite number"]),
    "lr text": (lambda: AdamW("fast"), TypeError, ["lr must be a real number", "'fast'"]),
    "lr a bool": (lambda: AdamW(True), TypeError, ["lr must be a real number", "True"]),
    "lr a tensor": (lambda: AdamW(torch.tensor(0.1)), TypeError, ["lr must be a real number"]),
    "momentum one": (lambda: SGD(0.1, 1.0), ValueError, ["momentum must", "[0, 1)"]),
    "momentum negative": (lambda: SGD(0.1, -0.1), ValueError, ["momentum must", "[0, 1)"]),
    "weight decay negative": (lambda: SGD(0.1, 0.0, -1.0), ValueError, ["weight_decay must"]),
    "eps negative": (lambda: AdamW(eps=-1e-8), ValueError, ["eps must", "[0, inf)"]),
    "one beta": (lambda: AdamW(betas=0.9), TypeError, ["betas must be a pair", "(0.9, 0.999)"]),
    "three betas": (lambda: AdamW(betas=(0.9, 0.9, 0.9)), TypeError, ["betas must be a pair"]),
    "beta one": (lambda: AdamW(betas=(0.9, 1.0)), ValueError, ["betas[1] must", "[0, 1)"]),
    "beta negative": (lambda: AdamW(betas=(-0.1, 0.9)), ValueError, ["betas[0] must", "[0, 1)"]),
    "centre unknown": (
        lambda: SBOAdamW(centre="median"),
        ValueError,
        ["centre must be one of batch", "'median'"],
    ),
    "centre decay one": (lambda: SBOAdamW(centre_decay=1.0), ValueError, ["centre_decay must"]),
    "transport a number": (lambda: SBOAdamW(transport=1), TypeError, ["transport must be True"]),
    "mean a number": (lambda: BlockAdamW(mean=1), TypeError, ["mean must be True or False"]),
}

TRAINING_CASES = {
    "problem a tensor": (lambda: train(problem=X), TypeError, ["problem must be ipslimit.Problem"]),
    "problem a class": (
        lambda: train(problem=Problem),
        TypeError,
        ["problem must be ipslimit.Problem"],
    ),
    "rule a class": (lambda: train(rule=AdamW), TypeError, ["rule must", "called first"]),
    "rule a name": (
        lambda: train(rule="adamw"),
        TypeError,
        ["rule must", "ipslimit.AdamW(lr=0.02)"],
    ),
    "rule None": (lambda: train(rule=None), TypeError, ["rule must", "None"]),
    "rule and problem swapped": (
        lambda: train(problem=SGD(0.1), rule=small_problem()),
        TypeError,
        ["problem must", "SGD"],
    ),
    "depth zero": (lambda: train(depth=0), ValueError, ["depth must be at least 1", "0", "larger"]),
    "depth negative": (lambda: train(depth=-3), ValueError, ["depth must be at least 1", "-3"]),
    "depth a float": (lambda: train(depth=4.0), TypeError, ["depth must be an integer", "4.0"]),
    "depth a bool": (lambda: train(depth=True), TypeError, ["depth must be an integer", "True"]),
    "depth None": (lambda: train(depth=None), TypeError, ["depth must be an integer", "None"]),
    "heads zero": (lambda: train(heads=0), ValueError, ["heads must be at least 1"]),
    "heads a bool": (lambda: train(heads=True), TypeError, ["heads must be an integer"]),
    "heads infinite": (
        lambda: train(heads=math.inf),
        TypeError,
        ["heads must be an integer", "inf"],
    ),
    "steps negative": (lambda: train(steps=-1), ValueError, ["steps must be at least 0", "-1"]),
    "steps a float": (lambda: train(steps=1.5), TypeError, ["steps must be an integer", "1.5"]),
    "steps a bool": (lambda: train(steps=False), TypeError, ["steps must be an integer", "False"]),
    "no seeds": (lambda: train(seeds=0), ValueError, ["seeds must be at least 1"]),
    "an empty list of seeds": (lambda: train(seeds=[]), ValueError, ["seeds must", "at least one"]),
    "seeds twice": (
        lambda: train(seeds=[1, 2, 1]),
        ValueError,
        ["seeds must be distinct", "[1, 2, 1]"],
    ),
    "seed negative": (lambda: train(seeds=[0, -1]), ValueError, ["seeds must be at least 0", "-1"]),
    "seed a float": (lambda: train(seeds=[0.0]), TypeError, ["seeds must be an integer", "0.0"]),
    "seeds text": (lambda: train(seeds="12"), TypeError, ["seeds must be an integer", "'12'"]),
    "seeds a bool": (lambda: train(seeds=True), TypeError, ["seeds must be an integer", "True"]),
    "root seed negative": (
        lambda: train(root_seed=-1),
        ValueError,
        ["root_seed must be at least 0"],
    ),
    "record beyond the last step": (
        lambda: train(record=[0, 2]),
        ValueError,
        ["record must name", "0..1", "[0, 2]", "Raise steps"],
    ),
    "record negative": (lambda: train(record=[-1]), ValueError, ["record must be at least 0"]),
    "record nothing": (
        lambda: train(record=[]),
        ValueError,
        ["record must name at least one step"],
    ),
    "record a number": (
        lambda: train(record=1),
        TypeError,
        ["record must be a sequence", "[0, 1]"],
    ),
    "record text": (lambda: train(record="01"), TypeError, ["record must be a sequence", "'01'"]),
    "record floats": (lambda: train(record=[0.0]), TypeError, ["record must be an integer", "0.0"]),
    "residual exponent NaN": (
        lambda: train(residual_exponent=math.nan),
        ValueError,
        ["residual_exponent must be a finite"],
    ),
    "residual exponent text": (
        lambda: train(residual_exponent="1"),
        TypeError,
        ["residual_exponent must be a real number"],
    ),
    "unknown device": (
        lambda: train(device="gpu"),
        ValueError,
        ["device must be", "'gpu'", "'auto'"],
    ),
    "device None": (lambda: train(device=None), ValueError, ["device must be", "None", "'auto'"]),
    "odd number of nodes": (
        lambda: train(problem=small_problem(XavierUniform(3, 2)), heads=None, nodes=7),
        ValueError,
        ["must be even", "Use 8"],
    ),
}
if not torch.cuda.is_available():
    TRAINING_CASES["no CUDA here"] = (
        lambda: train(device="cuda"),
        ValueError,
        ["device must be available", "device='cpu'"],
    )


def mixes_contexts(x, y):
    residual = x.mean(dim=-2) - y
    return (residual - residual.mean(dim=-2, keepdim=True)).square().sum(dim=-1)


def counts_axes_from_the_front(x, y):
    return (x.mean(dim=1) - y).square().sum(dim=1)


# What easily slips through, or ends in an error from inside torch, numpy or Python, or in a message
# of many lines.
SLIPPERY_CASES = {
    "x an array": (
        lambda: attention_field(X.numpy(), HEADS),
        TypeError,
        ["x must be a tensor", "torch"],
    ),
    "x a list": (lambda: attention_field(X.tolist(), HEADS), TypeError, ["x must be a tensor"]),
    "cotangent an array": (
        lambda: attention_vjp(X, HEADS, X.numpy()),
        TypeError,
        ["cotangent must be a tensor"],
    ),
    "cotangent a list": (
        lambda: attention_vjp(X, HEADS, X.tolist()),
        TypeError,
        ["cotangent must be a tensor"],
    ),
    "with_heads text": (
        lambda: attention_vjp(X, HEADS, X, with_heads="no"),
        TypeError,
        ["with_heads must be True or"],
    ),
    "causal a tensor": (
        lambda: attention_field(X, HEADS, torch.ones(4, 4).tril() > 0),
        TypeError,
        ["causal must be"],
    ),
    "lr too large for a float": (lambda: SGD(10**400), ValueError, ["lr must be a finite number"]),
    "lr a large tensor": (lambda: SGD(normal(4, 4)), TypeError, ["lr must be a real number"]),
    "rule a torch optimizer": (
        lambda: train(rule=optimizer()),
        TypeError,
        ["rule must", "a torch optimizer is not a rule"],
    ),
    "loss a class": (
        lambda: user_loss(MeanPooledSquaredError),
        TypeError,
        ["loss must", "called first"],
    ),
    "loss of one argument": (
        lambda: user_loss(lambda x: x),
        TypeError,
        ["loss must", "loss(x, y)"],
    ),
    "loss that only fits three dimensions": (
        lambda: user_loss(counts_axes_from_the_front),
        ValueError,
        ["loss must", "leading"],
    ),
    "loss that takes seeds for contexts": (  # trains silently on something else
        lambda: user_loss(
            counts_axes_from_the_front, contexts=normal(3, 3, 3), targets=normal(3, 3)
        ),
        ValueError,
        ["loss must", "leading"],
    ),
    "loss that mixes contexts": (
        lambda: user_loss(mixes_contexts),
        ValueError,
        ["loss must", "context"],
    ),
    "loss without a derivative": (
        lambda: user_loss(lambda x, y: squares(x.detach(), y)),
        ValueError,
        ["loss must", "different"],
    ),
    "loss of integers": (
        lambda: user_loss(lambda x, y: squares(x, y).long()),
        ValueError,
        ["loss must", "float"],
    ),
    "loss of complex numbers": (
        lambda: user_loss(lambda x, y: squares(x, y).cfloat()),
        ValueError,
        ["loss must", "float"],
    ),
    "targets of text for a loss of the user's": (
        lambda: user_loss(lambda x, y: x.mean((-1, -2)), targets=["a", "b"]),
        TypeError,
        ["targets must"],
    ),
    "targets None for a loss of the user's": (
        lambda: user_loss(lambda x, y: x.mean((-1, -2)), targets=None),
        TypeError,
        ["targets must"],
    ),
    "targets of another number for a loss of the user's": (
        lambda: user_loss(squares, targets=Y[:1]),
        ValueError,
        ["targets must", "B", "(1, 3)"],
    ),
    "class labels of text": (lambda: entropy(["a", "b"]), TypeError, ["targets must"]),
    "targets of probes of another shape": (
        lambda: problem(probes=(X, Y[:1])),
        ValueError,
        ["probes", "(2, 3)", "(1, 3)"],
    ),
    "device without numbers": (
        lambda: train(device="meta"),
        ValueError,
        ["device must be", "'auto'"],
    ),
    "device of another kind": (
        lambda: train(device="mps"),
        ValueError,
        ["device must be", "'auto'"],
    ),
    "seeds a tensor of no dimension": (
        lambda: train(seeds=torch.tensor(3)),
        TypeError,
        ["seeds must be", "tensor(3)"],
    ),
    "seeds an array of no dimension": (
        lambda: train(seeds=np.array(3)),
        TypeError,
        ["seeds must be", "array(3)"],
    ),
    "record a tensor of no dimension": (
        lambda: train(record=torch.tensor(1)),
        TypeError,
        ["record must be", "tensor(1)"],
    ),
    "more heads than can be counted": (
        lambda: train(heads=10**19),
        ValueError,
        ["heads must be at"],
    ),
    "residual exponent out of range": (
        lambda: train(residual_exponent=-5000),
        ValueError,
        ["residual_exponent must be"],
    ),
    "nodes that are not used": (lambda: train(nodes=-3), ValueError, ["nodes must be at least"]),
}


def table(cases):
    rows = [pytest.param(*case, id=name.replace(" ", "-")) for name, case in cases.items()]
    return pytest.mark.parametrize("action,exception,words", rows)


def check(action, exception, words):
    with pytest.raises(exception) as caught:
        action()
    assert caught.type is exception
    message = str(caught.value)
    assert "\n" not in message, f"more than one line: {message}"
    assert message[-1] in ".)", message
    for word in words:
        assert word in message, f"{word!r} is missing in: {message}"


@table(HEADS_CASES)
def test_heads_refuse(action, exception, words):
    check(action, exception, words)


@table(ATTENTION_CASES)
def test_attention_refuses(action, exception, words):
    check(action, exception, words)


@table(LAW_CASES)
def test_laws_refuse(action, exception, words):
    check(action, exception, words)


@table(PROBLEM_CASES)
def test_problems_refuse(action, exception, words):
    check(action, exception, words)


@table(RULE_CASES)
def test_rules_refuse(action, exception, words):
    check(action, exception, words)


@table(TRAINING_CASES)
def test_training_refuses(action, exception, words):
    check(action, exception, words)


@pytest.mark.filterwarnings("ignore")
@table(SLIPPERY_CASES)
def test_no_bad_input_slips_through(action, exception, words):
    check(action, exception, words)


def test_a_loss_that_works_in_place_cannot_change_the_contexts():
    contexts = X.clone()
    try:
        problem(contexts=contexts, loss=lambda x, y: squares(x.mul_(2), y))
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
            train(rule=Recorder(0.1), **bad)
    assert not calls


def test_numpy_integers_and_floats_are_good_input():
    run = train(
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
    run = train(seeds=(s for s in (4, 2)), record=(k for k in (1, 0)))
    assert run.seeds == (4, 2)
    assert list(run.x) == [0, 1]
