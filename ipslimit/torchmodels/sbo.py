"""SBO-AdamW: shape and boundary of every affine layer, each with an Adam of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

from .adam import adamw_, move_
from .arguments import require_kind
from .eagerly import eagerly
from .inputs import InputMeans, Masked, refuse_unseen
from .joining import JoinsMeans
from .maps import AffineMap
from .param_groups import (
    as_groups,
    check_options,
    modules_of,
    refuse_shared_biases,
    refuse_sparse,
    visible_maps,
    warn_without_maps,
    with_params,
)
from .rehearsal import Rehearsed
from .states import centres_kept, forget_ways_to_compute, refuse_foreign


class SBOAdamW(Masked, Rehearsed, torch.optim.Optimizer, JoinsMeans):
    r"""AdamW whose weight updates do not move the boundary of affine layers.

    For z = W x + b with input mean c, the gradient in the shape of the layer (the weight at fixed
    mean output beta = b + W c) and the update are

        g_S = g_W - g_b c^T        u_S = Adam(g_S)        u_b = Adam(g_b)
        dW = -lr u_S - lr wd W     db = -lr u_b - dW c    so that    db + dW c = -lr u_b

    where c is the mean over all rows that entered the layer in the passes whose gradients were
    accumulated (over all processes, with `torch.distributed`). Everything else is trained by
    AdamW: layers without bias, other modules, a weight whose bias is frozen. Biases of affine
    layers, and beta of a `CenteredLinear`, are never decayed.

    Affine layers have a bias and are `nn.Linear` or compute the same (GPT-2's Conv1D), `nn.Conv1d`
    (rows are its windows) and the input projections of `nn.MultiheadAttention`; a model without any
    gets a warning. The output projection of that is refused by name, for it is applied without
    being called, so nobody sees its input: exclude it.

    Parameters
    ----------
    model : nn.Module, or list of dicts
        A dict is a param group: it has "modules", a module or a list of modules all of whose
        parameters it takes, or "params" (trained by AdamW alone), and options of its own.
        `DistributedDataParallel` and compiled models are looked into. transformers' Trainer makes
        it of the model with optimizer_cls_and_kwargs=(SBOAdamW, {"model": model, "lr": 1e-3}).
    lr : float >= 0
        Or a tensor of one entry, which is read at every step.
    betas : (float, float), each in [0, 1)
    eps : float >= 0
    weight_decay : float >= 0
    centre : {"batch", "ema", "fixed"}
        c: the mean of the step's rows (the paper's choice); an exponential average of those
        means, the step's included; or the mean of the first step, or of `calibrate`, for good.
    centre_decay : float in [0, 1)
        c <- centre_decay c + (1 - centre_decay) mean for "ema"; the first mean is taken whole.
    compensate : bool
        Leave the -dW c out of db where False: an ablation, in which the weight moves the boundary
        although its gradient has no part in that.
    maximize : bool
    foreach : bool or None
        True and False as in torch.optim.AdamW. None takes the fastest there is: on a CPU, in
        float32 and float64, torch's fused kernel, and for weights of 2^18 entries or more
        together one compiled pass (compiled at the first step, and kept on disk).
    exclude : patterns or modules
        Affine layers to be trained by AdamW, with all they contain ("*.out_proj", model.head).
        Names are those of before torch.compile: "mlp.0" for "mlp._orig_mod.0".
    process_group : torch process group, None or False
        Where rows are added up; None is the default group if there is one, False is none (for
        processes that train models of their own).

    Attributes
    ----------
    maps : list of AffineMap
        What is trained as an affine layer.
    row_mask : bool tensor, function or None
        Which rows count in the means, so that padding does not: see its own docstring.
    means : InputMeans
        The hooks that see the inputs. They go when the optimizer does, or with `means.remove()`.

    Raises
    ------
    TypeError, ValueError
        On bad arguments, and on output projections of `nn.MultiheadAttention` with a bias that
        are not excluded.
    RuntimeError
        By `step`, where a layer has a gradient but none of its inputs was seen: its weight was
        used without calling it, or the model, or another one of its architecture, was compiled and
        run before the optimizer was made (`torch.compiler.reset()` helps).

    Notes
    -----
    *Hidden Boundary Motion in Transformer Optimization*, arXiv:2607.22927; our reading, as its
    full text was not to be had. "ema" and "fixed" are ours.

    A compiled step (`torch.compile(optimizer.step)`) runs as it is. Gradients that are not zeroed
    after a step are added to, and the rows they came from count on with them.

    State of every parameter p, all but `step` of p's shape: `step`, `exp_avg` (scales with the
    gradient, so like 1/a when p is rescaled to a p), `exp_avg_sq` (like 1/a^2). The weight of an
    affine layer with a stored centre ("ema", "fixed") has `centre` too, in the units of the
    layer's input, of shape (groups, inputs of a group): one group, 3 for a packed projection, or
    those of a convolution; in float32 where p has less. A weight tied to several biases has
    `centre_1`, `centre_2`, ... for the others, in the order of `maps`.

    Models may be sharded by FSDP2 (`fully_shard`) before the optimizer is made. Layers sharded
    otherwise are refused. With batches that run out, use `Join([parallel_model, optimizer])`.

    `SAGGS` can wrap it: centres are rescaled with what feeds them (`rescale_input`).

    A layer that received no rows and no gradient in a step (all zeros, after
    `zero_grad(set_to_none=False)`) is left alone where it has no stored centre.
    """

    # for SAGGS: powers of a parameter's own factor; centres are in units of the input
    state_exponents = {"step": 0, "exp_avg": -1, "exp_avg_sq": -2, "centre": 0}  # noqa: RUF012

    def __init__(
        self,
        model: nn.Module | Iterable[dict],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        centre: str = "batch",
        *,
        centre_decay: float = 0.99,
        compensate: bool = True,
        maximize: bool = False,
        foreach: bool | None = None,
        exclude: Sequence[str | nn.Module] = (),
        process_group: object = None,
    ):
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "centre": centre,
            "centre_decay": centre_decay,
            "compensate": compensate,
            "maximize": maximize,
            "foreach": foreach,
        }
        check_options(defaults)
        groups = [{"modules": model}] if isinstance(model, nn.Module) else as_groups(model)
        self.means = InputMeans(process_group=process_group)
        self._undecayed: set[nn.Parameter] = set()
        self._distinct: dict[AffineMap, str] = {}  # one of each set of tied maps: its centre's name
        modules = [m for group in groups for m in modules_of(group)]
        found = visible_maps(modules, exclude)
        super().__init__([with_params(group) for group in groups], defaults)
        self._adopt(found)
        warn_without_maps(modules, found)

    def add_param_group(self, param_group: dict, exclude: Sequence[str | nn.Module] = ()) -> None:
        """Add a group with "modules" or "params" (see the class); `exclude` is for its modules."""
        remedy = "Pass e.g. {'modules': model.head, 'lr': 1e-4}."
        require_kind("param_group", param_group, dict, "a dict", remedy)
        check_options(self.defaults | param_group)
        if "modules" not in param_group:
            super().add_param_group(with_params(param_group))
            return
        modules = modules_of(param_group)
        found = visible_maps(modules, exclude)
        super().add_param_group(with_params(param_group))
        self._adopt(found)

    @property
    def maps(self) -> list[AffineMap]:
        """What is trained as an affine layer, by this rule."""
        return self.means.maps

    def _adopt(self, maps: list[AffineMap]) -> None:
        """Take maps under this optimizer's rule."""
        ours = [m for m in maps if not m.centred]
        refuse_shared_biases(self.maps, ours)
        self.means.add(ours)
        self._undecayed |= {m.bias for m in maps}
        known = {m.key for m in self._distinct}
        for m in ours:
            if m.key not in known:
                known.add(m.key)
                place = sum(other.weight is m.weight for other in self._distinct)
                self._distinct[m] = f"centre_{place}" if place else "centre"

    @eagerly
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step; `closure`, if given, reevaluates the model and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            refuse_sparse(group["params"])
        if self._rehearsing():
            return loss
        moving, skipped = self._moving()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None and p not in skipped]
            self._adamw(group, [p for p in params if p not in moving])
            weights = [p for p in params if p in moving]
            states = [self._state_of(weight) for weight in weights]
            move_(weights, states, [moving[weight] for weight in weights], group)
        self.means.stepped()
        return loss

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a state dict of this class or of `torch.optim.AdamW`, fused or not."""
        with centres_kept(self):
            super().load_state_dict(state_dict)

    @torch.no_grad()
    def rescale_input(self, weight: nn.Parameter, columns: slice, factor: float) -> None:
        """Follow a change of scale of what enters a layer, in its stored centre and the rows seen.

        `columns` of the input of `weight` are multiplied by `factor` from now on.
        """
        for name, centre in self.state.get(weight, {}).items():
            if name.startswith("centre"):
                centre[:, columns].mul_(factor)
        self.means.rescale(weight, columns, factor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, and the rows that were seen with them."""
        super().zero_grad(set_to_none)
        self.means.reset()

    @contextlib.contextmanager
    def calibrate(self) -> Iterator[None]:
        """Set the stored centres ("ema", "fixed") to the means over forward passes made inside.

            with optimizer.calibrate(), torch.no_grad():
                for batch in batches:
                    model(batch)

        Every forward pass counts, with or without gradient; gradients are not touched.

        Raises
        ------
        RuntimeError
            If a layer with a stored centre saw no rows.
        """
        if all(group["centre"] == "batch" for group in self.param_groups):
            raise ValueError(
                "calibrate() sets stored centres, and every group has centre='batch'. Use "
                "centre='fixed' or 'ema'."
            )
        with self.means.counting_everything():
            yield
        means = self.means.gather()
        self.means.reset()
        options = self._options()
        for m, name in self._distinct.items():
            if options[m.weight]["centre"] == "batch":
                continue
            if means[m] is None:
                raise RuntimeError(
                    f"calibrate() saw no input of {m.name}. Call the model inside the with "
                    "block, or exclude the layer."
                )
            self._state_of(m.weight)[name] = means[m].clone()

    def _moving(self) -> tuple[dict, set]:
        """The weights that move together with a bias, and what does not move.

        Returns
        -------
        moving : dict
            Weight -> list of (map, centre), one for every bias it has.
        skipped : set of parameters of layers that no row entered
        """
        options = self._options()
        means = self.means.gather()
        live = {
            m: means[m]
            for m in self._distinct
            if m.weight.grad is not None and m.bias.grad is not None
        }
        refuse_unseen(live, "the optimizer", "exclude the layer")
        moving, skipped = {}, set()
        for m, mean in live.items():
            centre = self._centre(m, mean, options[m.weight])
            if centre is None:
                skipped |= {m.weight, m.bias}
            else:
                moving.setdefault(m.weight, []).append((m, centre))
        return moving, skipped

    def _centre(self, m: AffineMap, mean: torch.Tensor | None, group: dict):
        """c of this step, and the stored one brought up to date; None if there is none."""
        if group["centre"] == "batch":
            return mean
        state = self._state_of(m.weight)
        name = self._distinct[m]
        if name not in state:
            if mean is None:
                return None
            state[name] = mean.clone()
        elif group["centre"] == "ema" and mean is not None:
            state[name].lerp_(mean, 1.0 - group["centre_decay"])
        return state[name]

    def _options(self) -> dict[nn.Parameter, dict]:
        return {p: group for group in self.param_groups for p in group["params"]}

    def _further_state(self) -> list[tuple[nn.Parameter, str, tuple[int, int]]]:
        options, stored = self._options(), self._distinct.items()
        found = [(m.weight, name, m.mean_shape) for m, name in stored]
        return [entry for entry in found if options[entry[0]]["centre"] != "batch"]

    def _adamw(self, group: dict, params: list) -> None:
        """AdamW on parameters of a group that move by themselves."""
        for decays in (False, True):
            some = [p for p in params if (p not in self._undecayed) == decays]
            states = [self._state_of(p) for p in some]
            adamw_(some, states, group, group["weight_decay"] if decays else 0.0)

    def __getstate__(self):
        own = ("means", "_undecayed", "_distinct")
        return super().__getstate__() | {name: self.__dict__[name] for name in own}

    def __setstate__(self, state) -> None:
        # load_state_dict comes here last, after its hooks and before any harm
        refuse_foreign(state)
        super().__setstate__(state)
        for group in self.param_groups:
            for name in self.defaults.keys() - {"differentiable"}:  # which torch adds
                group.setdefault(name, self.defaults[name])  # a state of torch.optim.AdamW
        self._drop_unknown()
        forget_ways_to_compute(self)
