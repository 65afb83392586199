"""Units and laws as a user would write them in a file of his own; see test_units and test_laws."""

import dataclasses

import numpy as np
import torch

import ipslimit


class Tanh(ipslimit.Units):
    """f(x_i; theta) = W_out tanh(W_in x_i)."""

    matrices = {"w_in": "n d", "w_out": "d n"}  # noqa: RUF012
    mirror = ("w_out",)

    @staticmethod
    def unit_field(x, causal, w_in, w_out):
        return torch.tanh(x @ w_in.mT) @ w_out.mT


@dataclasses.dataclass
class TanhLaw(ipslimit.SampledLaw):
    """Entries uniform in +-size."""

    d: int
    n: int
    size: float = 1.0
    """Largest entry."""

    units = Tanh

    def quantile(self, u):
        return self.size * (2 * u - 1)


class Relu(ipslimit.Units):
    """f(x_i; theta) = W_out relu(W_in x_i + b_in) + b_out, with all that a rule may ask of it."""

    matrices = {"w_in": "n d", "w_out": "d n"}  # noqa: RUF012
    biases = {"b_in": "n", "b_out": "d"}  # noqa: RUF012
    transposed = ("w_in",)
    mirror = ("w_out", "b_out")
    pairs = ((("w_in", "b_in"), ("w_out",)),)
    maps = {"w_in": ("b_in", "x"), "w_out": ("b_out", "hidden")}  # noqa: RUF012
    inputs = {"hidden": ("n", "w_in")}  # noqa: RUF012

    @staticmethod
    def unit_field(x, causal, w_in, w_out, b_in=0.0, b_out=0.0):
        hidden = torch.relu(x @ w_in.mT + b_in)
        return hidden @ w_out.mT + b_out, hidden


@dataclasses.dataclass
class Mixture(ipslimit.SampledLaw):
    """Heads of two kinds: of some, all entries are several times as large."""

    d: int
    m: int
    share: float = 0.25
    """Of the larger ones."""
    factor: float = 4.0
    """How many times as large they are."""
    biases: bool = False

    symmetric = True

    @property
    def uniforms(self):
        return self.layout.matrix_rows + 1

    def entries(self, u):
        large = u[..., :1, :] < self.share
        return 0.3 * (2 * u[..., 1:, :] - 1) * np.where(large, self.factor, 1.0)


@dataclasses.dataclass
class Squares(ipslimit.SampledLaw):
    """Entries u^2 of uniform u: positive, of mean 1/3, and not symmetric."""

    d: int
    m: int

    def quantile(self, u):
        return u**2
