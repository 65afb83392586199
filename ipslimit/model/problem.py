"""What is trained: contexts, targets, the initial law of the heads, the loss."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..checks import require_tensor, shown
from .batch import Batch
from .blocks import Block
from .context_loss import ContextLoss
from .ends import GivenTokens
from .laws import Law
from .losses import MeanPooledSquaredError
from .sight import sight_of
from .training_problem import TrainingProblem


class Problem(TrainingProblem):
    """A training problem, shared by the particle transformer and the limit.

    Parameters
    ----------
    contexts : tensor, shape (n, N, d)
        Training contexts X(0).
    targets : tensor, shape (n, d)
        Or whatever the loss expects, with first dimension n.
    law : Atoms, XavierUniform or TruncatedNormal, or one's own `Law`; or a `Block`
        Initial law of the heads (or other units) of every layer.
    causal : bool
        Token i attends to tokens j <= i only.
    probes : (contexts, targets[, token_weights[, positions]]), optional
        Contexts on which trajectories are compared but which are not trained on; their number may
        differ, N and d may not.
    loss : callable, optional
        `loss(x, y) -> (..., B)`, or `loss(x, y, weights)` with those of the tokens, (B, N) of sum
        1, with x (..., B, N, d), of differentiable torch operations, each context by itself;
        `MeanPooledSquaredError()` by default, see `ipslimit.losses`.
    batch : int, optional
        Contexts that a step sees, drawn without replacement from (batch_seed, k) alone, so that
        particles and limit see the same; by default all of them.
    batch_seed : int >= 0
    tied : bool
        One draw of the units for all layers, which are trained as one: the rate is then
        L^-1 + H^-1/2.
    token_weights : tensor, shape (n, N) or (N,), optional
        omega: a context is the measure sum_j omega_j delta_{x_j}, of sum 1; 1/N each by default.
        A token of weight 0, a tracer, is moved and moves nobody. With these `p` is
        (1 / omega_i) dl/dx_i, and of a tracer the same in the limit of small weights.
    positions : integers, shape (n, N) or (N,), optional
        With a mask a token sees those of positions up to its own; 0..N-1 by default. Copies of a
        token and tracers share its position. Without a mask they change nothing.

    Attributes
    ----------
    B, N, d : int
        B is the number of contexts that a step sees.
    block : Block
        The law, as the block that it is or makes.

    Raises
    ------
    TypeError, ValueError
        For shapes and dtypes that do not fit, non-finite entries, and a loss that does not return
        one finite number per context.
    """

    def __init__(
        self,
        contexts: torch.Tensor,
        targets: torch.Tensor,
        law: Law | Block,
        causal: bool = False,
        probes: tuple[torch.Tensor, ...] | None = None,
        loss: Callable[..., torch.Tensor] | None = None,
        *,
        batch: int | None = None,
        batch_seed: int = 0,
        tied: bool = False,
        token_weights: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ):
        self._set(law, causal, batch, batch_seed, tied)
        self.loss = MeanPooledSquaredError() if loss is None else loss
        self._loss = ContextLoss(self.loss)
        given = contexts, targets, token_weights, positions
        self.contexts, self.targets, self._examples = self._checked("contexts", *given)
        self.probes = self._probe_examples = None
        if probes is not None:
            try:
                probe_contexts, probe_targets, *more = probes
                probe_weights, probe_positions = [*more, None, None][: max(2, len(more))]
            except (TypeError, ValueError):
                raise TypeError(
                    f"probes must be a pair (contexts, targets), or with token_weights and "
                    f"positions; got {type(probes).__name__}. "
                    "Give targets too: the costate on probes needs them."
                ) from None
            given = probe_contexts, probe_targets, probe_weights, probe_positions
            *pair, self._probe_examples = self._checked("probes", *given)
            self.probes = tuple(pair)
            if self.probes[0].shape[1:] != self.contexts.shape[1:]:
                raise ValueError(
                    f"probes must have N, d = {tuple(self.contexts.shape[1:])} as contexts have; "
                    f"got {tuple(self.probes[0].shape[1:])}. Only the number of contexts may vary."
                )
            if self.probes[0].dtype != self.contexts.dtype:
                raise TypeError(
                    f"probes must have the dtype of contexts ({self.contexts.dtype}); got "
                    f"{self.probes[0].dtype}. Convert them with .to(contexts.dtype)."
                )
        self._require_batch()

    def _checked(
        self, name: str, contexts, targets, token_weights, positions
    ) -> tuple[torch.Tensor, torch.Tensor, Batch]:
        """Contexts and targets as they were given, and both as layers take them."""
        contexts = require_tensor(name, contexts, finite=True).detach().clone()
        if contexts.ndim != 3 or 0 in contexts.shape or contexts.shape[-1] != self.block.d:
            raise ValueError(
                f"{name} must have shape (B, N, d) with B, N >= 1 and d={self.block.d} as in "
                f"{self.law!r}; got {tuple(contexts.shape)}. A single context needs x[None]."
            )
        norm = self.block.norm
        if norm is not None:
            norm.require_directed(name, contexts)
        prefix = "" if name == "contexts" else "probes' "
        seen = sight_of(self.causal, token_weights, positions, contexts, prefix)
        sight = seen[0]
        if not sight.plain:
            self.require_seeing(
                f"{prefix}{'positions' if sight.ends is not None else 'weights'} of tokens"
            )
        examples = Batch(contexts, contexts, *seen)
        omega = examples.token_weights
        try:
            targets = self._checked_targets(contexts, targets)
            self._loss.require_weighted(omega, f"{prefix}token_weights")
            self._loss.check(contexts, targets, omega)
        except (TypeError, ValueError) as error:
            if name == "probes":
                error.args = (f"probes: {error}",)
            raise
        return contexts, targets, Batch(examples.ordered(contexts), targets, *seen)

    def _checked_targets(self, contexts: torch.Tensor, targets: object) -> torch.Tensor:
        try:
            y = torch.as_tensor(targets).detach().to(contexts.device, copy=True)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(
                f"targets must be a tensor or an array of numbers; got {shown(targets)}. "
                "Pass torch.tensor(...)."
            ) from None
        check_targets = getattr(self.loss, "check_targets", None)
        if check_targets:
            return check_targets(contexts, y)
        if y.shape[:1] != contexts.shape[:1]:
            raise ValueError(
                f"targets must have first dimension B={contexts.shape[0]}; got shape "
                f"{tuple(y.shape)}. Give one target per context."
            )
        return y

    @property
    def examples(self) -> Batch:
        return self._examples

    @property
    def probe_examples(self) -> Batch:
        return self._probe_examples

    def make_ends(self, lead: tuple[int, ...], device: object) -> GivenTokens:
        return GivenTokens(self)

    def told(self) -> dict[str, object]:
        return {
            "contexts": self.contexts,
            "targets": self.targets,
            "probes": self.probes,
            "loss": self.loss,
            **self._told_of_tokens("", self._examples),
            **({} if self.probes is None else self._told_of_tokens("probe_", self._probe_examples)),
        }

    @staticmethod
    def _told_of_tokens(name: str, examples: Batch) -> dict[str, object]:
        """Their weights and whom they see, where that is not the same for all problems."""
        told = {"token_weights": examples.token_weights, "positions": examples.sight.ends}
        if told["positions"] is None:
            told["positions"] = examples.order
        elif examples.order is not None:
            told["positions"] = (examples.sight.ends, examples.order)
        return {f"{name}{key}": value for key, value in told.items() if value is not None}

    @property
    def count(self) -> int:
        return len(self.contexts)

    @property
    def probe_count(self) -> int:
        return 0 if self.probes is None else len(self.probes[0])

    @property
    def N(self) -> int:
        return self.contexts.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.contexts.dtype

    def losses(
        self, x: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """l(X_b(1), y_b) of every context, (..., B) of x (..., B, N, d), for tokens' weights."""
        return self._loss.losses(x, targets, weights)

    def loss_and_costate(
        self, x: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """J (...,) and N dl_b/dx (..., B, N, d) at x = X(1): the costate of equal tokens."""
        return self._loss.with_costate(x, targets, weights)

    def tracer_costate(
        self, x: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        self._loss.require_weighted(weights, "weights of tokens")
        return self._loss.tracer_costate(x, targets, weights)

    def __repr__(self) -> str:
        probes = f", {self.probes[0].shape[0]} probes" if self.probes else ""
        of = "" if self.batch is None else f" of {len(self.contexts)}"
        return (
            f"Problem(B={self.B}{of}, N={self.N}, d={self.d}, {self.law!r}, causal={self.causal}"
            f"{', tied' if self.tied else ''}{probes}, {self.loss!r})"
        )
