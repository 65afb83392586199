"""A card that is none: tensors of real values on the CPU that say that they are on cuda:0.

What is made on the device cuda, or copied to it, is a `CardTensor`. Every operation on one is seen
before it is computed, on the CPU: one that meets a CPU tensor fails as it would on a card, and what
would be launched there, or make the host wait, is counted, with the line of ours that asked for it.
"""

from __future__ import annotations

import collections
import contextlib
import traceback
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode

from ipslimit import devices

CARD = torch.device("cuda", 0)
NAME, MEMORY = "Stand-in", 80 * 2**30

# Views and mere room: nothing is launched for them.
FREE = set(
    "view expand permute transpose slice select unsqueeze squeeze split t as_strided _unsafe_view "
    "unbind alias detach _reshape_alias lift_fresh unfold diagonal empty new_empty empty_like "
    "empty_strided new_empty_strided split_with_sizes chunk narrow".split()
)
# What waits for the card, whatever it is given: the host must know a value or a size.
WAITS = set(
    "_local_scalar_dense nonzero masked_select equal unique _unique2 unique_consecutive unique_dim "
    "bincount is_nonzero linalg_inv_ex allclose".split()
)
# These may look at tensors of both: indices on the CPU are copied over, and so is a source.
MIXING = {"index", "index_put", "index_put_", "_index_put_impl_", "copy_", "_to_copy"}


class Log:
    """What was asked of the card: numbers by name, and by name and line."""

    def __init__(self):
        self.launches: collections.Counter[str] = collections.Counter()
        self.waits: collections.Counter[str] = collections.Counter()

    def wait(self, what: str) -> None:
        self.waits[f"{what} {_line()}"] += 1

    def __repr__(self) -> str:
        waits = "\n".join(f"{n} x {what}" for what, n in self.waits.most_common())
        return f"{self.launches.total()} launches, {self.waits.total()} waits\n{waits}"


_logs: list[Log] = []


class CardTensor(torch.Tensor):
    """See the module."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: CARD)
    is_cuda, is_cpu = property(lambda self: True), property(lambda self: False)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        name, tensors = function.__name__.split(".")[0], []

        def taken(t: torch.Tensor) -> torch.Tensor:
            tensors.append(t)
            return _plain(t)

        given = _mapped(taken, args)
        named = {key: _mapped(taken, value) for key, value in (kwargs or {}).items()}
        strangers = [t for t in tensors if not isinstance(t, CardTensor) and t.ndim > 0]
        if strangers and name not in MIXING:
            raise RuntimeError(
                f"Expected all tensors to be on the same device: {name} of cuda:0 and cpu, "
                f"{_line()}"
            )
        _note(name, args, strangers)
        found = function(*given, **named)
        if name == "copy_" and not isinstance(args[0], CardTensor):
            return args[0]
        written = [t for t in tensors if isinstance(t, CardTensor)]

        def back(t: torch.Tensor) -> torch.Tensor:
            for given in written:
                if t is given.plain:  # written in place
                    return given
            return on_card(t)

        return _mapped(back, found)

    def numpy(self, *args, **kwargs):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu().")

    def __array__(self, *args, **kwargs):
        return self.numpy()

    def tolist(self):
        _each(Log.wait, "tolist")
        return self.plain.tolist()

    def __repr__(self):
        return f"CardTensor({tuple(self.shape)}, {self.dtype})"

    def __reduce_ex__(self, protocol):
        return _plain(self).__reduce_ex__(protocol)


def on_card(t: torch.Tensor) -> CardTensor:
    """The same numbers, of the same memory."""
    if isinstance(t, CardTensor):
        return t
    made = torch.Tensor._make_subclass(CardTensor, t, t.requires_grad and t.is_leaf)
    made.plain = t
    return made


def _mapped(change, value: object) -> object:
    """A value with its tensors changed, which may stand in lists."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(change, part) for part in value)
    return value


def _plain(t: object) -> object:
    return t.plain if isinstance(t, CardTensor) else t


def _note(name: str, args: tuple, strangers: list[torch.Tensor]) -> None:
    if name not in FREE:
        for log in _logs:
            log.launches[name] += 1
    if name in WAITS or (name == "repeat_interleave" and isinstance(args[0], torch.Tensor)):
        _each(Log.wait, name)
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        indices = [t for t in args[1] if t is not None]
        if any(t.dtype == torch.bool for t in indices) and not _fills(name, args):
            _each(Log.wait, f"{name} by a mask")
        if any(not isinstance(t, CardTensor) for t in indices):
            _each(Log.wait, f"{name} by indices on the CPU")
    if name == "copy_" and strangers:
        _each(Log.wait, "copy_ between devices")


def _fills(name: str, args: tuple) -> bool:
    """Whether what is put where a mask is true is one number: no place must be known."""
    return name != "index" and args[2].numel() == 1


def _each(method, *args) -> None:
    for log in _logs:
        method(log, *args)


def _line() -> str:
    ours = [
        frame
        for frame in traceback.extract_stack()
        if "/site-packages/" not in frame.filename and "card_stand_in" not in frame.filename
    ]
    return " < ".join(f"{f.filename.split('/')[-1]}:{f.lineno}" for f in ours[-1:-4:-1])


_COPIES = {torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda}


class _Devices(TorchFunctionMode):
    """Takes `device` out of every call: what the CPU then makes is put where it was asked for."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in _COPIES:
            return self.copied(function, args, kwargs)
        wanted = kwargs.get("device")
        if wanted is None or torch.device(wanted).type == "meta":
            return function(*args, **kwargs)
        there = torch.device(wanted).type == "cuda"
        kwargs["device"] = "cpu"
        first = args[0] if args else None
        if isinstance(first, CardTensor):
            made = function(*args, **kwargs)
            return made if there else _plain(made)
        made = function(*args, **kwargs)
        if there and function in (torch.tensor, torch.as_tensor, torch.asarray):
            _each(Log.wait, "copy to the card")
        return on_card(made) if there else made

    def copied(self, function, args, kwargs):
        t, *rest = args
        where = kwargs.pop("device", None)
        if function is torch.Tensor.cpu:
            where = "cpu"
        elif function is torch.Tensor.cuda:
            where, rest = "cuda", []
        elif rest and isinstance(rest[0], torch.Tensor):
            other = rest.pop(0)
            where = other.device
            rest.insert(0, other.dtype)
        elif rest and isinstance(rest[0], (str, torch.device)):
            where = rest.pop(0)
        there = isinstance(t, CardTensor) if where is None else torch.device(where).type == "cuda"
        moves = there != isinstance(t, CardTensor)
        if moves:
            _each(Log.wait, "copy to the card" if there else "copy from the card")
            made = _Moved.apply(t, there) if torch.is_grad_enabled() else _moved(t, there)
        else:
            made = t
        if function is torch.Tensor.to and (rest or kwargs):
            made = made.to(*rest, **kwargs)
        return made


def _moved(t: torch.Tensor, there: bool) -> torch.Tensor:
    copy = _plain(t.detach()).clone()
    return on_card(copy) if there else copy


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, there):
        ctx.there = there
        return _moved(t, there)

    @staticmethod
    def backward(ctx, g):
        return _moved(g, not ctx.there), None


@contextlib.contextmanager
def card(monkeypatch):
    """A stand-in for a card, that torch knows of."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (MEMORY // 2, MEMORY))
    told = SimpleNamespace(total_memory=MEMORY, name=NAME)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: told)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: NAME)
    devices.total_of_card.cache_clear()
    with _Devices():
        yield CARD
    devices.total_of_card.cache_clear()


@contextlib.contextmanager
def watched():
    """The `Log` of what is asked of the card meanwhile."""
    log = Log()
    _logs.append(log)
    try:
        yield log
    finally:
        _logs.remove(log)
