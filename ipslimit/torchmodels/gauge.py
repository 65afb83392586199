"""GaugeAdamW: AdamW whose every step is the same in every gauge of the symmetry pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from ..checks import require_bool
from ..model import rules
from .adam import adamw_
from .arguments import require_kind, require_rate
from .eagerly import eagerly
from .gauge_plan import Plan
from .pairs import as_pairs
from .param_groups import refuse_sparse
from .rehearsal import Rehearsed
from .saggs import refuse_missing

# of the rule that ipslimit.GaugeAdamW applies to heads, which knows what they may be
SHARED = ("betas", "eps", "weight_decay")
OPTIONS = ("lr", *SHARED, "maximize", "foreach")
# what torch's Adam and AdamW have besides, and what it may not be here
_ADAMS = {"amsgrad": True, "capturable": None, "fused": None, "decoupled_weight_decay": False}


class GaugeAdamW(Rehearsed, Optimizer):
    """AdamW on what the gauge leaves as it is: a step commutes with every rescaling of a pair.

    Of a pair (A | B), with s = (|A|_F / |B|_F)^(1/2), which turns into c s where A <- c A and
    B <- B / c,

        g_A' = s g_A            exp_avg, exp_avg_sq of g', as AdamW      u = Adam's direction
        A <- (1 - lr wd) A - lr s u_A

    and B with 1 / s in the place of s. Two models that differ by the scale of pairs train alike, to
    the last bit where they differ by powers of two, and nothing is balanced: `SAGGS` moves the
    parameters, this the step alone. Biases go with their matrix; parameters in no pair are left to
    torch.optim.AdamW.

    In general a matrix M has the factor |M|_F / max(G, lr |1|_F), with the geometric mean G of the
    norms of all matrices that pairs connect (a deep ReLU network is one chain), |1|_F the root of
    the number of M's entries, and lr the largest of all groups: so no matrix moves by much more
    than its own norm where another one is nearly zero. A single matrix of norm zero (the B of a
    fresh LoRA, an output projection that starts at zero) takes the factor that its partners leave
    for it, lr |1|_F / |A|_F in a pair. Where two norms of a chain are zero, or one is not finite,
    there is no such factor: its parameters are left to the decay, and counted in `skipped`.

    Parameters
    ----------
    params : iterable of parameters or of param groups
        As in torch.optim.AdamW.
    pairs : list of ((A, bias or None), (B, bias or None))
        Parameters or `Part`s of them, or what `find_pairs(model)` gives.
    lr : float or tensor of one entry, >= 0
    betas : (float, float), each in [0, 1)
    eps : float >= 0
    weight_decay : float >= 0
    maximize : bool
    foreach : bool or None
        All parameters of a group at once, which takes less time on a card and more memory; None
        does so on a card. For parameters in no pair, as in `SBOAdamW`.

    Attributes
    ----------
    pairs : list of Pair
    skipped : dict of str to int
        At how many steps a chain was left alone, by the names of its pairs.

    Raises
    ------
    TypeError, ValueError
        For bad arguments, trained parameters of pairs that are not in `params`, sharded ones
        (DTensor), and pairs that close a ring or share parts of a matrix.

    Notes
    -----
    Exact for scalar factors, one a pair (or one for each head: `find_pairs(model, per="head")`);
    not for matrices, of which attention allows more. Our own construction; compare *Dead-Direction
    Conditioners*, arXiv:2606.29176.

    A step reads the norms, and so waits for the gradients to be there. The half of a pair that is
    frozen counts in s. State of every parameter: that of AdamW, in which the averages are of g' and
    do not scale with the parameter. A state dict of torch.optim.AdamW can be loaded, after the
    parameters it belongs to: its averages are brought to g'.

    Examples
    --------
    >>> model = torch.nn.TransformerEncoderLayer(16, 4, 32, activation="relu")
    >>> optimizer = GaugeAdamW(model.parameters(), find_pairs(model), lr=1e-3)
    """

    # for rescale_pair: averages of what does not scale
    state_exponents = {"step": 0, "exp_avg": 0, "exp_avg_sq": 0}  # noqa: RUF012

    def __init__(
        self,
        params: Iterable,
        pairs: Iterable,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
    ):
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "foreach": foreach,
        }
        self.pairs = as_pairs(pairs)
        self._plan = Plan.of(self.pairs)
        self.skipped: dict[str, int] = {}
        super().__init__(params, defaults)
        refuse_missing(self, self.pairs)

    def add_param_group(self, param_group: dict) -> None:
        """Add a group, with options of its own; pairs stay as they are."""
        require_kind("param_group", param_group, dict, "a dict", "Pass {'params': ...}.")
        _check_options(self.defaults | param_group)
        super().add_param_group(param_group)

    @eagerly
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step; `closure`, if given, reevaluates the model and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            refuse_sparse(group["params"], type(self).__name__)
        if self._rehearsing():
            return loss
        scales = self._scales(count=True)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            plain = [p for p in params if p not in scales]
            states = [self._state_of(p) for p in plain]
            adamw_(plain, states, group, group["weight_decay"])
            pieces = [piece for p in params if p in scales for piece in self._pieces(p, scales[p])]
            for together in _in_turn(pieces, group["foreach"]):
                _gauge_adamw(group, together)
        return loss

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a state dict of this class, or of AdamW for the parameters as they are now."""
        remedy = "Pass what state_dict() returned."
        require_kind("state_dict", state_dict, Mapping, "a dict", remedy)
        groups = [dict(group) for group in state_dict.get("param_groups", ())]
        foreign = any("amsgrad" in group for group in groups)
        for number, group in enumerate(groups):
            _refuse_foreign(number, group)
            for name in _ADAMS:
                group.pop(name, None)
        super().load_state_dict({**state_dict, "param_groups": groups} if groups else state_dict)
        if foreign:
            for p, scales in self._scales().items():
                state = self.state.get(p, {})
                for name, power in (("exp_avg", 1), ("exp_avg_sq", 2)):
                    for rows, scale in scales if name in state else ():
                        state[name][rows].mul_(scale**power)

    @torch.no_grad()
    def _scales(self, count: bool = False) -> dict[torch.Tensor, list[tuple]]:
        """(rows, factor) of every parameter in a pair: a number, or a tensor that broadcasts.

        count : whether chains that are left alone are counted
        """
        lr = max(float(group["lr"]) for group in self.param_groups)
        factors, left_alone = self._plan.factors(lr)
        if count:
            for name in left_alone:
                self.skipped[name] = self.skipped.get(name, 0) + 1
        table = torch.tensor(factors, dtype=torch.float64)
        return {
            p: [
                (rows, factors[where] if isinstance(where, int) else table[where].to(p))
                for rows, where in places
            ]
            for p, places in self._plan.places.items()
        }

    def _pieces(self, p: torch.Tensor, scales: list[tuple]) -> list[_Piece]:
        """What of a parameter has one factor, with the count of this step."""
        state = self._state_of(p)
        state["step"] += 1
        tensors = p, p.grad, state["exp_avg"], state["exp_avg_sq"]
        k = float(state["step"])
        if len(scales) == 1:
            return [_Piece(*tensors, scales[0][1], k)]
        return [_Piece(*(t[rows] for t in tensors), scale, k) for rows, scale in scales]

    def __getstate__(self) -> dict:
        own = {name: self.__dict__[name] for name in ("pairs", "skipped")}
        return super().__getstate__() | own

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        if "pairs" in state:  # a copy, whose parameters are others
            self._plan = Plan.of(self.pairs)
        self._drop_unknown()


class _Piece(NamedTuple):
    """A parameter, or rows of it, with its gradient, averages, factor and count of steps."""

    p: torch.Tensor
    g: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    scale: float | torch.Tensor
    step: float


def _in_turn(pieces: list[_Piece], foreach: bool | None) -> list[list[_Piece]]:
    """The pieces taken at once; on a processor one by one, while each is in the cache."""
    together: dict[object, list[_Piece]] = {}
    for number, piece in enumerate(pieces):
        alone = isinstance(piece.scale, torch.Tensor)
        alone = alone or not (piece.p.is_cuda if foreach is None else foreach)
        kind = number if alone else (piece.p.device, piece.p.dtype)
        together.setdefault(kind, []).append(piece)
    return list(together.values())


def _gauge_adamw(group: dict, pieces: list[_Piece]) -> None:
    """The step with factors: numbers of several pieces, or of one piece a number or a tensor."""
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    sign = -1.0 if group["maximize"] else 1.0
    p, g, m, v, scales, steps = map(list, zip(*pieces, strict=True))
    if len(pieces) == 1 and isinstance(scales[0], float):  # the factor goes along in other passes
        m[0].mul_(beta1).add_(g[0], alpha=(1 - beta1) * sign * scales[0])
        v[0].mul_(beta2).addcmul_(g[0], g[0], value=(1 - beta2) * scales[0] ** 2)
    else:
        g = torch._foreach_mul(g, [sign * s for s in scales])
        torch._foreach_lerp_(m, g, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, g, g, 1 - beta2)
    del g  # in the memory of which the roots may be
    # the corrections of both averages go into numbers, which is a pass less than torch's
    first, second = ([1 - beta**k for k in steps] for beta in (beta1, beta2))
    roots = torch._foreach_sqrt(v)
    floors = zip(roots, second, strict=True)
    floors = [group["eps"] * b**0.5 or torch.finfo(r.dtype).tiny for r, b in floors]
    torch._foreach_add_(roots, floors)
    if group["weight_decay"]:
        torch._foreach_mul_(p, 1 - lr * group["weight_decay"])
    sizes = [-lr * b2**0.5 / b1 for b1, b2 in zip(first, second, strict=True)]
    if isinstance(scales[0], torch.Tensor):
        roots[0].div_(scales[0])  # infinite, and so without a step, where there is no factor
    else:
        sizes = [size * s for size, s in zip(sizes, scales, strict=True)]
    torch._foreach_addcdiv_(p, m, roots, sizes)


def _check_options(options: dict) -> None:
    """Refuse bad values in a param group with all its options."""
    require_rate(options["lr"])
    rules.GaugeAdamW(**{name: options[name] for name in SHARED})
    require_bool("maximize", options["maximize"])
    if options["foreach"] is not None:
        require_bool("foreach", options["foreach"])


def _refuse_foreign(number: int, group: Mapping) -> None:
    """Refuse param groups of optimizers whose averages are of something else."""
    must = "state_dict must be one of GaugeAdamW or of torch.optim.AdamW"
    missing = [name for name in OPTIONS if name not in group]
    if missing or "centre" in group or "momentum_decay" in group:
        raise ValueError(
            f"{must}; its param group {number} is another optimizer's. Load the model alone, and "
            "start the optimizer anew."
        )
    for name, bad in _ADAMS.items():
        decays = name != "decoupled_weight_decay" or group["weight_decay"]
        if bad is not None and group.get(name, not bad) is bad and decays:
            raise ValueError(
                f"{must}, without {name}={bad}; its param group {number} has it. Load the model "
                "alone, and start the optimizer anew."
            )
