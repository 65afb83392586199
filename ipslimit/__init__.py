"""Interacting-particle transformers, their optimizer rules, and how fast they reach the limit."""

import importlib as _importlib
import os as _os

# Matrix products must not round differently with the batch or the place in memory, or a seed's
# numbers would depend on its batch mates. MKL reads this before its first product in a process.
# Not AUTO: with AVX-512 its strict mode still sums thin products otherwise in larger batches.
_os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")

from ._version import __version__
from .measure.rates import fit_rates
from .model.attention import attention_field, attention_vjp
from .model.heads import Heads
from .model.laws import Atoms, Law, SampledLaw, TruncatedNormal, XavierUniform
from .model.particles import train_particles
from .model.problem import Problem
from .model.rules import (
    SGD,
    AdamW,
    BlockAdamW,
    ElementwiseRule,
    Lion,
    Muon,
    Rebalance,
    Rule,
    SBOAdamW,
)
from .model.runs import ParticleRun
from .model.units import Units

__all__ = [
    "SGD",
    "AdamW",
    "Atoms",
    "BlockAdamW",
    "BoundaryProbe",
    "ElementwiseRule",
    "Heads",
    "Law",
    "Lion",
    "Muon",
    "ParticleRun",
    "Problem",
    "Rebalance",
    "Rule",
    "SBOAdamW",
    "SampledLaw",
    "TruncatedNormal",
    "Units",
    "XavierUniform",
    "__version__",
    "attention_field",
    "attention_vjp",
    "fit_rates",
    "train_particles",
]

# What only torch models need is imported on first use.
_LAZY = {"BoundaryProbe": "torchmodels.probe", "nn": "", "optim": "", "torchmodels": ""}


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _importlib.import_module(f".{_LAZY[name] or name}", __name__)
    return getattr(module, name) if _LAZY[name] else module


def __dir__():
    return sorted({*globals(), *_LAZY})
