"""Initial laws of perceptrons."""

from __future__ import annotations

import dataclasses

from ..checks import require_bool
from .entries import TruncatedNormalEntries, XavierEntries
from .laws import Atoms, Law, SampledLaw
from .perceptrons import Perceptrons


class _OfPerceptrons(SampledLaw):
    """What laws of perceptrons have in common: they are gated or not, as a field says."""

    units = Perceptrons

    @property
    def optional(self) -> tuple[str, ...]:
        return ("w_gate",) if require_bool("gated", self.gated) else ()


@dataclasses.dataclass(eq=False, repr=False)
class XavierPerceptrons(XavierEntries, _OfPerceptrons):
    """Entries uniform in +-gain sqrt(6 / (d + n))."""

    d: int
    """Token dimension."""
    n: int
    """Neurons of a unit."""
    gain: float = 1.0
    """Of the uniform law +-gain sqrt(6 / (d + n))."""
    biases: bool = False
    """Whether units have biases b_in and b_out, which start at zero."""
    gated: bool = False
    """Whether units have a gate, w_gate."""
    activation: str = "gelu"
    """Of the neurons: gelu, gelu_tanh, relu, silu or tanh."""


@dataclasses.dataclass(eq=False, repr=False)
class TruncatedNormalPerceptrons(TruncatedNormalEntries, _OfPerceptrons):
    """Entries normal with standard deviation `std` before truncation to [-bound, bound]."""

    d: int
    """Token dimension."""
    n: int
    """Neurons of a unit."""
    std: float
    """Standard deviation of an entry, before truncation."""
    bound: float
    """Entries beyond +-bound do not occur."""
    biases: bool = False
    """Whether units have biases b_in and b_out, which start at zero."""
    gated: bool = False
    """Whether units have a gate, w_gate."""
    activation: str = "gelu"
    """Of the neurons: gelu, gelu_tanh, relu, silu or tanh."""


# By the names that a command line has for them.
PERCEPTRON_LAWS: dict[str, type[Law]] = {
    "xavier": XavierPerceptrons,
    "truncated-normal": TruncatedNormalPerceptrons,
    "atoms": Atoms,
}
