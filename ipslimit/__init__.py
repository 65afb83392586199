"""Interacting-particle transformers, their optimizer rules, and how fast they reach the limit."""

import importlib as _importlib
import os as _os

# Matrix products must not round differently with the batch or the place in memory, or a seed's
# numbers would depend on its batch mates. MKL reads this before its first product in a process.
# Not AUTO: with AVX-512 its strict mode still sums thin products otherwise in larger batches.
_os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")

from ._version import __version__

# Module -> its names that are this package's too. They are imported on first use: torch takes a
# second, and `ipslimit --help` needs none.
_NAMES = {
    "measure.errors": "bias_table error_table quadrature_table",
    "measure.rates": "fit_rates",
    "model.attention": "attention_field attention_vjp",
    "model.blocks": "Block",
    "model.depth_law": "AlongDepth",
    "model.heads": "Heads",
    "model.laws": "Atoms Law SampledLaw TruncatedNormal XavierUniform",
    "model.particles": "train_particles",
    "model.perceptron_laws": "TruncatedNormalPerceptrons XavierPerceptrons",
    "model.perceptrons": "Perceptrons",
    "model.problem": "Problem",
    "model.rules": (
        "SGD AdamW BlockAdamW Clip ElementwiseRule GaugeAdamW LearningRate Lion Muon Rebalance "
        "Rule SBOAdamW by_depth warmup_cosine"
    ),
    "model.runs": "ParticleRun",
    "model.token_laws": "BallTokens GaussianTokens TokenLaw",
    "model.token_problem": "TokenProblem",
    "model.units": "Units",
    "torchmodels.probe": "BoundaryProbe",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
# Rooms of the package, which need not be imported by themselves.
_ROOMS = "checks compilation cpu measure model nn optim torchmodels".split()

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str):
    if name in _HOMES:
        value = getattr(_importlib.import_module(f".{_HOMES[name]}", __name__), name)
    elif name in _ROOMS:
        value = _importlib.import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, value)


def __dir__():
    return sorted({*globals(), *_HOMES, *_ROOMS})
