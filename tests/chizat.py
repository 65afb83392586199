"""The ResNets of Chizat (arXiv:2509.10167) in his own notation, apart from the package.

h_0 = W_E x, h_{l+1} = h_l + V_l tanh(U_l^T h_l / D) / (L M), o = W_U^T h_L / D, with N inputs x of
R^d_in and outputs of R^d_out; U, V are (D, M) for each of L layers, and one update is

    dU_l = -eta H_l (tanh'(P_l) * Q_l)^T,    dV_l = -eta B_{l+1} tanh(P_l)^T,
    P_l = U_l^T H_l / D,    Q_l = V_l^T B_{l+1} / D,    B_L = W_U (o - Y) / (N d_in),
    B_l = B_{l+1} + U_l (tanh'(P_l) * Q_l) / (L M),

with states H_l and B_l as (D, N). B_L is D/2 times the gradient of J = sum |o - Y|^2 / (N d_in).

In the package's notation these are perceptrons of inner size 1 on contexts of one token, with
w_in = U^T / D and w_out = V, and g = L M dJ/dtheta. Since dJ/dh = 2 B / D,

    g of w_out = (2/D) B tanh(P)^T = -(2/D) dV / eta,
    g of w_in = D L M dJ/dU^T = 2 (tanh'(P) * Q) H^T = -2 dU^T / eta = -2 D dw_in / eta,

so his eta is gradient descent at the rates eta D / 2 for w_out and eta / (2 D) for w_in.
"""

import dataclasses
import math

import torch

F64 = torch.float64


@dataclasses.dataclass
class Chizat:
    """Normal data X, Y and ends W_E, W_U, of variances 1, 1, 1/d_in and d_out."""

    D: int
    data_seed: int
    N: int = 10
    d_in: int = 5
    d_out: int = 5

    def __post_init__(self):
        gen = torch.Generator().manual_seed(self.data_seed)

        def normal(*shape):
            return torch.randn(*shape, generator=gen, dtype=F64)

        self.X, self.Y = normal(self.d_in, self.N), normal(self.d_out, self.N)
        self.W_E = normal(self.D, self.d_in) / math.sqrt(self.d_in)
        self.W_U = math.sqrt(self.d_out) * normal(self.D, self.d_out)

    def draw(self, L, M, seed, dtype=F64):
        """U and V (L, D, M) before training: normal, of variance D."""
        gen = torch.Generator().manual_seed(seed)
        shape = (2, L, self.D, M)
        return math.sqrt(self.D) * torch.randn(shape, generator=gen, dtype=dtype)

    def output(self, h):
        """o of states h (.., D, N)."""
        return self.W_U.T @ h / self.D

    def train(self, U, V, steps, eta=1.0, record=()):
        """States {k: (L+1, D, N)} after k updates and losses (steps+1,), for U, V (L, D, M).

        In the dtype of U and V, which are trained in place.
        """
        L, D, M = U.shape
        X, Y, W_E, W_U = (t.to(U.dtype) for t in (self.X, self.Y, self.W_E, self.W_U))
        states, losses = {}, []
        for k in range(steps + 1):
            H, P = [W_E @ X], []
            for l in range(L):
                P.append(U[l].T @ H[l] / D)
                H.append(H[l] + V[l] @ torch.tanh(P[l]) / (L * M))
            output = W_U.T @ H[L] / D
            losses.append(float(((output - Y) ** 2).sum() / (self.N * self.d_in)))
            if k in record:
                states[k] = torch.stack(H)
            if k == steps:
                return states, torch.tensor(losses, dtype=F64)
            B = W_U @ (output - Y) / (self.N * self.d_in)
            for l in reversed(range(L)):
                Q = V[l].T @ B / D
                S = Q / torch.cosh(P[l]) ** 2
                V[l] -= eta * B @ torch.tanh(P[l]).T
                B = B + U[l] @ S / (L * M)
                U[l] -= eta * H[l] @ S.T
        raise AssertionError("unreachable")
