"""The trained ends of a language model: embedding, positions and readout."""

from __future__ import annotations

from typing import ClassVar

import torch

from .batch import Batch
from .ends import Ends, Read, Tables
from .norm import Norm
from .products import on_any_threads
from .units import Units

# Where in depth the ends stand.
DEPTHS = {"embedding": 0.0, "position": 0.0, "readout": 1.0}


class Embedding(Units):
    """The vectors of the vocabulary, each a unit: E of x_i(0) = E[id_i] + position_i."""

    matrices: ClassVar = {"embedding": "one d"}
    noun = "embeddings"


class Position(Units):
    """The vectors of the places in a context, each a unit."""

    matrices: ClassVar = {"position": "one d"}
    noun = "positions"


class Readout(Units):
    """The vectors that logits are products with, each a unit: U of logits_i = U norm(x_i(1))."""

    matrices: ClassVar = {"readout": "one d"}
    noun = "readouts"


FAMILIES = {"embedding": Embedding, "position": Position, "readout": Readout}


class TokenEnds(Ends):
    """x_i(0) = E[id_i] + position_i, and the cross-entropy of softmax(U norm(x_i(1))).

    The rows of E and U are units of weight 1 / V, those of the positions of weight 1 / N, so that
    the rule has gradients of order 1 whatever V, N, B, L and H are:

        g_E = V dJ/dE        g_position = N dJ/dposition        g_U = V dJ/dU

    and with one table for both (no readout of its own) the sum of the first and the last.

    Parameters
    ----------
    tables : dict of name to tensor (rows, d)
        Without "readout" where the embedding reads, too.
    norm : Norm or None
    lead : leading dimensions, (seeds,) or ()
    """

    def __init__(self, tables: Tables, norm: Norm | None, lead: tuple[int, ...] = ()):
        self.norm, self.depths = norm, DEPTHS
        self.families = {}
        for name, table in tables.items():
            packed = table.mT.expand(*lead, *table.mT.shape).contiguous()
            weights = packed.new_full((*lead, len(table)), 1.0 / len(table))
            layout = FAMILIES[name].make_layout(one=1, d=table.shape[1])
            self.families[name] = Units.from_packed(packed, weights, layout)

    @property
    def reader(self) -> str:
        """Which of the tables reads."""
        return "readout" if "readout" in self.families else "embedding"

    def enter(self, inputs: torch.Tensor) -> torch.Tensor:
        embedding, position = (self._table(name) for name in ("embedding", "position"))
        return embedding[..., inputs, :] + position[..., None, : inputs.shape[-1], :]

    @on_any_threads
    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """(..., B, N, V) of x (..., B, N, d)."""
        rows = [y @ u.mT for y, u in zip(*self._by_seed(x), strict=True)]
        return torch.stack(rows).reshape(*x.shape[:-1], rows[0].shape[-1])

    @on_any_threads
    def losses(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        seeds = zip(*self._by_seed(x), strict=True)
        rows = [_losses((y @ u.mT).log_softmax(-1), batch.targets) for y, u in seeds]
        return torch.stack(rows).reshape(x.shape[:-2])

    @on_any_threads
    def read(self, x: torch.Tensor, batch: Batch) -> Read:
        labels = batch.targets.reshape(-1, 1)
        losses, costates, gradients = [], [], []
        for y, u in zip(*self._by_seed(x), strict=True):
            # a seed by itself, so that no product rounds with the seeds beside it
            log = (y @ u.mT).log_softmax(-1)
            losses.append(_losses(log, batch.targets))
            # d/dlogits of N l_b: softmax less the label's unit vector
            error = log.exp_()
            error.scatter_add_(-1, labels, error.new_full(labels.shape, -1.0))
            costates.append(error @ u)
            gradients.append((y.mT @ error) * (len(u) / len(labels)))
        loss = torch.stack(losses).reshape(x.shape[:-2]).mean(-1)
        costate = torch.stack(costates).reshape(x.shape)
        if self.norm is not None:
            costate = self.norm.pull(x, costate)
        gradient = torch.stack(gradients).reshape(*x.shape[:-3], *gradients[0].shape)
        return Read(loss, costate, {self.reader: gradient})

    def pull(self, inputs: torch.Tensor, p: torch.Tensor) -> Tables:
        rows = self.families["embedding"].count
        found = [
            torch.ops.aten.embedding_dense_backward(seed, inputs, rows, -1, False).mT
            for seed in p.reshape(-1, *p.shape[-3:])
        ]
        embedding = torch.stack(found).reshape(*p.shape[:-3], *found[0].shape)
        position = p.mean(-3).mT
        absent = self.families["position"].count - position.shape[-1]
        return {
            "embedding": embedding * (rows / inputs.numel()),
            "position": torch.nn.functional.pad(position, (0, absent)),
        }

    def _table(self, name: str) -> torch.Tensor:
        return self.families[name].packed.mT

    def _by_seed(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of every seed the normed tokens (seeds, B N, d) and the readout (seeds, V, d)."""
        y = x if self.norm is None else self.norm(x)
        readout = self._table(self.reader)
        rows = y.shape[-3] * y.shape[-2]
        return y.reshape(-1, rows, y.shape[-1]), readout.reshape(-1, *readout.shape[-2:])


def _losses(log: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of every context (B,), of log probabilities (B N, V) and targets (B, N)."""
    return -log.gather(-1, targets.reshape(-1, 1)).view(targets.shape).mean(-1)
