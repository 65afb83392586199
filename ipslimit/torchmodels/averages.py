"""Averages of a model, which have to follow what moves its parameters and not its function.

z = S (x - c) + beta is one function for every c, and so is a pair of matrices c A, B / c. An
average of parameters that were moved so in between is one of coordinates in different frames, and
computes something else. In one frame the average is right, and any frame will do: so whatever
moves the model moves its averages along.
"""

from __future__ import annotations

import dataclasses
import gc
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from ..checks import shown
from .maps import is_centred
from .pairs import Pair, Part
from .shards import local, original_class
from .wrappers import named_modules, plain_name, uncompiled

Tensors = Callable[[], Iterable[torch.Tensor]]


def carry_moves(model: nn.Module, average: nn.Module | Tensors) -> Carried:
    """Let an average of a model follow every move of the model that leaves its function as it is.

        average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn())
        carry_moves(model, average)

    From then on `Recentring`, `calibrate_centres` and `CenteredLinear.recentre_` move the centres
    of both, and `SAGGS`, `balance` and `rescale_pair` scale the pairs of both by the same factors.
    Neither function changes by that, and what is averaged has one meaning throughout: the average
    is that of S and of the invariant beta - S c, and that of A and B in the balance of the moment.

    Call it right after the average is made, before anything moves. A copy of the model and its
    average needs a call of its own. Without it a move warns of what looks like an average: copies
    of a `CenteredLinear` that are written to without gradients; modules of the same parameters
    inside another one, as torch's AveragedModel has it; and, from the second balancing of a
    `SAGGS` on, any copy of the model that is written to and that no optimizer has. Averages that
    are no modules, lists of tensors say, cannot be seen.

    Parameters
    ----------
    model : nn.Module
        What is trained.
    average : nn.Module, or function () -> iterable of tensors
        A copy of the model, by itself or as the `module` of what averages (torch's AveragedModel
        and whatever has one: Lightning's WeightAveraging in `_average_model`; timm's ModelEma).
        Or a function that gives tensors in the order of `model.parameters()`, for averages that
        keep such: ``lambda: ema.shadow_params``. A module is not kept alive, a function is.

    Returns
    -------
    Carried
        With `remove()`, after which the average follows no more.

    Raises
    ------
    TypeError, ValueError
        If the average has not the model's parameters, or the layers of one are centred and those
        of the other are not.

    Notes
    -----
    Averages of state dicts need none of this: that of a `CenteredLinear` has the invariant bias
    too, and an average of them is loaded by it.
    """
    [(_, model), *_] = named_modules(model)
    if isinstance(average, nn.Module):
        found = _by_name(model, average)
    elif callable(average):
        found = _by_place(model, average)
    else:
        raise TypeError(
            "average must be a module, or a function that gives its tensors; got "
            f"{shown(average)}. Pass the AveragedModel, or e.g. lambda: ema.shadow_params."
        )
    for parameter, follower in found:
        others = _FOLLOWERS.setdefault(parameter, [])
        if follower not in others:  # twice is once
            others.append(follower)
    for holder in list(_HOLDERS):
        if holder is average or holder._modules["module"] is average:
            del _HOLDERS[holder]
    return Carried([(weakref.ref(parameter), follower) for parameter, follower in found])


@dataclasses.dataclass(frozen=True, eq=False)
class Carried:
    """What `carry_moves` has arranged: `remove()` ends it."""

    followers: list[tuple[weakref.ref, Follower]] = dataclasses.field(repr=False)

    def remove(self) -> None:
        """From now on the average follows no more."""
        for reference, follower in self.followers:
            found = [] if (parameter := reference()) is None else _FOLLOWERS.get(parameter, [])
            if follower in found:
                found.remove(follower)


@dataclasses.dataclass(frozen=True)
class Follower:
    """Where the average of a parameter is, looked up when it is needed: tensors are replaced.

    Attributes
    ----------
    owner : weak reference of a module, or function () -> iterable of tensors
    place : its name in the module, or its number
    """

    owner: weakref.ref | Tensors
    place: str | int

    @property
    def module(self) -> nn.Module | None:
        """The module that has it; None for a function, and after its end."""
        return self.owner() if isinstance(self.owner, weakref.ref) else None

    @property
    def tensor(self) -> torch.Tensor | None:
        """The average; None after the end of the module that has it."""
        if isinstance(self.owner, weakref.ref):
            module = self.owner()
            return None if module is None else module._parameters[self.place]
        return list(self.owner())[self.place]


@torch.no_grad()
def carry_scale(factors: list[tuple[Part, float]]) -> None:
    """Some parts, those of a pair, have been multiplied by factors."""
    _warn_of_holders([(part.name, part.parameter) for part, _ in factors])
    for part, factor in factors:
        for follower in _FOLLOWERS.get(part.parameter, ()):
            if (average := follower.tensor) is not None:
                part.of(average).mul_(factor)


@torch.no_grad()
def carry_centre(layer: nn.Module, moved: torch.Tensor) -> None:
    """The centre of a layer has been moved by `moved`, (inputs,)."""
    _warn_of_copies(layer)
    for follower in _FOLLOWERS.get(layer.beta, ()):
        if (module := follower.module) is not None:
            module.recentre_unchecked_(layer.centre.to(module.centre))
        elif not isinstance(follower.owner, weakref.ref):
            [weight] = (f.tensor for f in _FOLLOWERS[layer.weight] if f.owner is follower.owner)
            moved = moved.to(weight.device, weight.dtype)
            local(follower.tensor).addmv_(local(weight), moved)


# parameter -> where its averages are
_FOLLOWERS: MutableMapping[torch.Tensor, list[Follower]] = WeakTensorKeyDictionary()
# modules that hold another as their `module`, as averages do -> ids of parameters unlike theirs
_HOLDERS: MutableMapping[nn.Module, set[int]] = WeakIdKeyDictionary()


# a parameter -> how often averages of it were sought, and how often each had been written to
_SOUGHT: MutableMapping[torch.Tensor, tuple[list[int], MutableMapping]] = WeakTensorKeyDictionary()
# averages that were warned of
_TOLD: MutableMapping[torch.Tensor, bool] = WeakTensorKeyDictionary()


def _note(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    if name == "module" and submodule is not None:
        _HOLDERS[module] = set()


register_module_module_registration_hook(_note)


class Copies:
    """The copies of a layer whose centre moves, so that averages among them can be told of.

    It is an attribute of the layer, and copied with it. A layer out of a pickle is no copy.
    """

    def __init__(self):
        self._copies: weakref.WeakSet[Copies] = weakref.WeakSet()
        self._layer: Callable[[], nn.Module | None] = lambda: None
        self._writes = -1
        self._told = True

    def __deepcopy__(self, memo: dict) -> Copies:
        made = Copies()
        self._copies.add(made)
        return made

    def __reduce__(self):
        return Copies, ()

    def copied(self, layer: nn.Module) -> None:
        """This belongs to `layer`, a copy just made; or it was given the state of another."""
        self._layer, self._writes, self._told = weakref.ref(layer), layer.weight._version, False

    def moved(self) -> Iterator[nn.Module]:
        """The layer has moved its centre: its copies that look like averages, each once.

        Something has written to their weights, and no backward pass to their gradients; and they
        have no moves of their own.
        """
        self._told = True
        for copy in list(self._copies):
            layer = copy._layer()
            if layer is None or copy._told or layer.weight._version == copy._writes:
                continue
            if layer.weight.grad is None:
                copy._told = True
                yield layer


def _warn_of_copies(layer: nn.Module) -> None:
    """Warn once of what looks like an average of a layer, and does not follow it."""
    carried = [follower.module for follower in _FOLLOWERS.get(layer.beta, ())]
    for copy in layer.copies.moved():
        if not any(copy is module for module in carried):
            warnings.warn(
                "a copy of a CenteredLinear looks like an average and does not follow the motion "
                f"of its centre, {_REMEDY}",
                stacklevel=2,
            )


def seek_averages(pairs: list[Pair]) -> None:
    """At the first, second, fourth, .. balancing of pairs warn of averages that do not follow.

    They are copies of the model, whoever has them: modules with parameters of the same names and
    shapes, which no optimizer has, and which were written to since the time before. To look at all
    that is alive takes some hundredths of a second.
    """
    named = {part.name: part.parameter for pair in pairs for part in pair.parts}
    first = next(iter(named))
    calls, written = _SOUGHT.setdefault(named[first], ([0], WeakTensorKeyDictionary()))
    calls[0] += 1
    if calls[0] & (calls[0] - 1):
        return
    kinds = nn.Module, torch.optim.Optimizer
    classes = {id(cls) for kind in kinds for cls in _derived_from(kind)}
    alive = [found for found in gc.get_objects() if id(type(found)) in classes]
    modules, optimizers = ([found for found in alive if isinstance(found, kind)] for kind in kinds)
    groups = [group for found in optimizers for group in getattr(found, "param_groups", ())]
    trained = {id(p) for group in groups for p in group["params"]}
    for module in modules:
        average = _parameter(module, first)
        if average is None or average is named[first] or id(average) in trained:
            continue
        copies = ((_parameter(module, name), p) for name, p in named.items())
        alike = all(copy is not None and copy.shape == p.shape for copy, p in copies)
        carried = any(f.tensor is average for f in _FOLLOWERS.get(named[first], ()))
        if carried or not alike:
            continue
        before, now = written.get(average), average._version
        written[average] = now
        if before is not None and now > before and average not in _TOLD:
            _TOLD[average] = True
            _warn_of_scale(module)


def _derived_from(kind: type) -> set[type]:
    """A class and all classes derived from it."""
    return {kind}.union(*map(_derived_from, type.__subclasses__(kind)))


def _parameter(module: nn.Module, name: str) -> torch.Tensor | None:
    """The parameter of a plain name, if there is one; the module may be in the making.

    Names of pairs begin with the model's class where the model itself is what has them.
    """
    *path, last = name.removeprefix(f"{original_class(module).__name__}.").split(".")
    for part in path:
        module = vars(uncompiled(module)).get("_modules", {}).get(part)
        if module is None:
            return None
    return vars(uncompiled(module)).get("_parameters", {}).get(last)


def _warn_of_scale(module: nn.Module) -> None:
    warnings.warn(
        f"a copy of the model ({type(module).__name__}) looks like an average and does not follow "
        f"the rescaling of pairs, {_REMEDY}",
        stacklevel=3,
    )


def _warn_of_holders(moved: list[tuple[str, torch.Tensor]]) -> None:
    """Warn once of what looks like an average of the parameters moved, and does not follow."""
    for holder, others in list(_HOLDERS.items()):
        first, held = moved[0][1], holder._modules["module"]
        if id(first) in others:
            continue
        if any(p is first for p in held.parameters()):  # no copy: DistributedDataParallel, say
            del _HOLDERS[holder]
        elif not _alike(held, moved):
            others.add(id(first))
        else:
            del _HOLDERS[holder]
            _TOLD.update(dict.fromkeys(held.parameters(), True))
            _warn_of_scale(holder)


_REMEDY = (
    "so that its function will be no average. Call ipslimit.optim.carry_moves(model, average) "
    "right after making it."
)


def _alike(held: nn.Module, moved: list[tuple[str, torch.Tensor]]) -> bool:
    """Whether all that was moved has its like in a module: by name and shape, or by shape."""
    named = {plain_name(name): p.shape for name, p in held.named_parameters()}
    shapes = set(named.values())
    return all(named[name] == p.shape if name in named else p.shape in shapes for name, p in moved)


def _by_name(model: nn.Module, average: nn.Module) -> list[tuple[torch.Tensor, Follower]]:
    """Every parameter of the model, and where the average has one of its name."""
    own = {plain_name(name): p for name, p in model.named_parameters()}
    held: nn.Module | None = average
    while held is not None:
        inside = dict(named_modules(held))
        [held, *_] = inside.values()
        places = {
            f"{name}.{place}".removeprefix("."): (module, place)
            for name, module in inside.items()
            for place, p in module._parameters.items()
            if p is not None
        }
        lacking = [name for name in own if name not in places]
        if not lacking:
            break
        held = held._modules.get("module")
    else:
        raise ValueError(
            "average must have the parameters of the model, by their names, or as its module; got "
            f"{type(average).__name__} without {shown(lacking[0])}. Pass the average of this "
            "very model."
        )
    found = []
    for name, p in own.items():
        module, place = places[name]
        other = module._parameters[place]
        _require_copy(name, p, other)
        found.append((p, Follower(weakref.ref(module), place)))
    for name, module in named_modules(model):
        if is_centred(module):
            other = inside[name]
            other.recentre_unchecked_(module.centre.to(other.centre))
    return found


def _by_place(model: nn.Module, average: Tensors) -> list[tuple[torch.Tensor, Follower]]:
    """Every parameter of the model, and its number among the tensors of the average."""
    own, tensors = dict(model.named_parameters()), list(average())
    if len(own) != len(tensors):
        raise ValueError(
            "average must give as many tensors as the model has parameters; got "
            f"{len(tensors)} for {len(own)}. Give them in the order of model.parameters()."
        )
    for (name, p), other in zip(own.items(), tensors, strict=True):
        _require_copy(plain_name(name), p, other)
    return [(p, Follower(average, i)) for i, p in enumerate(own.values())]


def _require_copy(name: str, parameter: torch.Tensor, average: object) -> None:
    if average is parameter:
        raise ValueError(
            f"average must be a copy of the model; got the model's own {name}. Pass the average."
        )
    if not isinstance(average, torch.Tensor) or average.shape != parameter.shape:
        raise ValueError(
            f"average must have the shapes of the model; got {shown(getattr(average, 'shape', 0))} "
            f"for {name} {tuple(parameter.shape)}. Pass the average of this very model."
        )
