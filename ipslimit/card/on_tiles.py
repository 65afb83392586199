"""Field and transpose of attention of larger heads on tensors, without matrices over pairs.

The same flat interface as `model.eager`, of which all is that is no attention: projections, and
what becomes of outputs and cotangents, are products of torch's.
"""

from __future__ import annotations

import functools

import torch

from ..model import eager
from . import tiles
from .on_tensors import addresses
from .sizes import tile_shape


class _Tiled(eager.Block):
    """`eager.Block` with the kernels of `tiles`."""

    def attend(self, keep: bool = False) -> None:
        """Whether matrices would be kept or not: there are none."""
        self.z, self.statistics = self._room()
        self._by_queries(self.q, self.q)

    def pull_back(self, c: torch.Tensor) -> torch.Tensor:
        known = self.z is not None
        if not known:
            self.z, self.statistics = self._room()
        dz = self._to_outputs(c)
        dqkv = dz.new_empty(3, *dz.shape)
        self._by_queries(dz, dqkv[0], back=True, known=known)
        self._launch(tiles.by_keys, dz, (self.statistics, *dqkv[1:]), back=True)
        return self._columns(dqkv)

    def _by_queries(self, dz: torch.Tensor, dq: torch.Tensor, **options: bool) -> None:
        self._launch(tiles.by_queries, dz, (self.z, self.statistics, dq), **options)

    def _room(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For outputs (r h b, N, m) and statistics (3, r h b, N)."""
        return self.q.new_empty(self.q.shape), self.q.new_empty(3, *self.q.shape[:2])

    def _launch(self, kernel, dz: torch.Tensor, out: tuple, **options: bool) -> None:
        matrices, N, m = self.q.shape
        shape = tile_shape(m, self.q.dtype, self.sight, **options)
        pieces = -(-N // shape.rows)
        given = self.q, self.k, self.v, dz, addresses(self.sight, self.q)
        counts = self.sizes[1], N, pieces, matrices, self.q.stride(1)
        options = {"num_warps": shape.warps, "num_stages": 1, "enable_fp_fusion": True}
        kernel[(matrices * pieces,)](*given, *out, *counts, shape, **options)


# `field` keeps for `vjp` what both need, outputs and statistics too.
KEEPS = eager.KEEPS
field = functools.partial(eager.field, kind=_Tiled)
vjp = functools.partial(eager.vjp, kind=_Tiled)
