"""The affine maps z = W x + b inside a model, found by module."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ..checks import require_several, shown
from .affine import affine_form
from .shards import is_sharded, local, original_class, require_by_rows, rows_here, same_rows
from .wrappers import matches, uncompiled


@dataclasses.dataclass(eq=False, repr=False)
class AffineMap:
    """One weight, the bias that goes with it, and which inputs it has.

    Attributes
    ----------
    name : str
        The module's name in the model; a separate projection of `nn.MultiheadAttention` has its
        parameter's name behind it.
    module : nn.Module
        The module that is called.
    weight : Parameter
        Its outputs are its first dimension: (outputs, ...); or (inputs, outputs), see `transposed`.
    bias : Parameter
        beta for a `CenteredLinear`.
    start, stop : int
        The rows of `bias` that go with `weight`.
    inputs : tuple of int
        For every group of rows of the weight, the number of the module's input it multiplies: 3
        groups (query, key, value) for a packed projection, else 1.
    groups : int
        Blocks of equally many outputs with inputs of their own; more than len(inputs) only for a
        grouped convolution.
    transposed : bool
        z = x W + b: the outputs are the second dimension of the weight (GPT-2's Conv1D).
    """

    name: str
    module: nn.Module
    weight: nn.Parameter
    bias: nn.Parameter
    start: int
    stop: int
    inputs: tuple[int, ...] = (0,)
    groups: int = 1
    transposed: bool = False

    def __repr__(self) -> str:
        return f"AffineMap({self.name}: {tuple(self.weight.shape)})"

    @property
    def key(self) -> tuple:
        """Equal for maps that are tied: the same weight and bias, called as two modules."""
        return (id(self.weight), id(self.bias), self.start, self.groups)

    @property
    def centred(self) -> bool:
        """Whether the map is written z = S (x - c) + beta."""
        return is_centred(self.module)

    @property
    def outputs(self) -> int:
        """How many there are, over all processes."""
        return self.weight.shape[1 if self.transposed else 0]

    @property
    def mean_shape(self) -> tuple[int, int]:
        """(groups, inputs of a group)."""
        return self.groups, self.matrix(self.weight).shape[1:].numel()

    def matrix(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the weight's shape with the outputs first (a view)."""
        return tensor.T if self.transposed else tensor

    def blocks(self, tensor: torch.Tensor, mean: torch.Tensor) -> tuple:
        """A tensor of the weight's shape, its rows here, as (groups, outputs, inputs) of a group,
        and mu (groups, inputs). Where shards cut groups, each row here is a group of its own."""
        if self.groups > 1 and is_sharded(self.weight):
            here = rows_here(self.weight)
            row = torch.arange(here.start, here.stop, device=mean.device)
            mean = mean[row // (self.outputs // self.groups)]
        matrix = self.matrix(tensor)
        outputs = matrix.shape[0] // max(len(mean), 1)
        return matrix.reshape(len(mean), outputs, matrix.shape[1:].numel()), mean

    def own_bias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a tensor of the bias's shape that goes with the weight (a view)."""
        return tensor[self.start : self.stop]

    def mean(self, means: Sequence[torch.Tensor]) -> torch.Tensor:
        """(groups, inputs of a group), from the means of the module's inputs, each with one entry
        behind it. On the weight's device, and in its dtype, but at least in float32: an average of
        means would come to a halt in less."""
        chosen = means[self.inputs[0]]
        if len(self.inputs) > 1:
            chosen = torch.stack([means[i] for i in self.inputs])
        mean = chosen[..., :-1].reshape(self.mean_shape)
        return mean.to(self.weight.device, at_least_single(self.weight.dtype))

    def less_outer(self, weight, bias: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        """W - b mu^T, for W of the weight's shape, the map's part of b, and mu (groups, inputs).

        W and b are whole, or their rows here.

        With b the gradient of the bias this is the gradient of the weight at a fixed output at mu.
        The sum is taken in the dtype of mu.
        """
        blocks, mean = self.blocks(weight, mean)
        columns = bias.reshape(*blocks.shape[:2], 1).to(mean)
        shape = torch.addcmul(blocks.to(mean), columns, mean.unsqueeze(1), value=-1)
        shape = shape.to(weight.dtype)
        return shape[0].T.contiguous() if self.transposed else shape.reshape(weight.shape)

    def apply(self, weight: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        """W mu, (outputs,), for a tensor of the weight's shape and mu (groups, inputs)."""
        return apply(*self.blocks(weight, mean)).reshape(-1)

    def linear_bias(self) -> torch.Tensor:
        """The bias of the nn.Linear that the map equals: beta - S c of a centred one."""
        return self.module.bias if self.centred else self.own_bias(local(self.bias))

    def gradients(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Those of weight and bias of the nn.Linear that the map equals; None if one is missing."""
        if self.weight.grad is None or self.bias.grad is None:
            return None
        weight, bias = local(self.weight.grad), local(self.bias.grad)
        if not self.centred:
            return weight, self.own_bias(bias)
        return self.less_outer(weight, -bias, self.module.centre.unsqueeze(0)), bias

    def refuse_other_shards(self) -> None:
        """Refuse parameters that are sharded, but not both by rows and alike.

        Raises
        ------
        ValueError
            Naming the layer and its placements.
        """
        remedy = "Shard by fully_shard alone, or exclude the layer."
        for name, parameter in (("weight", self.weight), ("bias", self.bias)):
            require_by_rows(f"{self.name} ({name})", parameter, remedy)
        if not is_sharded(self.weight) and not is_sharded(self.bias):
            return
        if self.transposed:
            raise ValueError(
                f"{self.name} must have its outputs along the first dimension of its weight, by "
                f"which it is sharded; got {tuple(self.weight.shape)} of x W + b, as GPT-2's "
                "Conv1D has it. Put an nn.Linear in its place before fully_shard, or exclude the "
                "layer."
            )
        if not same_rows(self.weight, self.bias):
            raise ValueError(
                f"weight and bias of {self.name} must have the same rows on a process; got "
                f"{tuple(self.weight.shape)} and {tuple(self.bias.shape)}, sharded apart (by "
                f"ignored_params, or one bias for several weights). {remedy}"
            )


def apply(weight: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """W mu, (..., outputs), of weights (..., outputs, inputs) and means (..., inputs)."""
    # a row from the left: products with a column from the right take several times as long
    return (mean.unsqueeze(-2) @ weight.to(mean.dtype).mT).squeeze(-2)


def at_least_single(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which means and centres are kept beside parameters of a dtype."""
    return torch.promote_types(dtype, torch.float32)


def is_centred(module: nn.Module) -> bool:
    """Whether a module declares itself z = weight (x - centre) + beta, as `CenteredLinear` does."""
    return getattr(type(module), "centred", False)


def find_maps(
    modules: Iterable[tuple[str, nn.Module]], exclude: Sequence[str | nn.Module] = ()
) -> tuple[list[AffineMap], list[str]]:
    """The affine maps among modules, and the names of those whose inputs nobody can see.

    Found are `nn.Linear` and what computes the same of its weight and bias (GPT-2's Conv1D; see
    `affine_form`), `nn.Conv1d`, `CenteredLinear` and the input projections of
    `nn.MultiheadAttention`, each with a bias and with a plain parameter as its weight (a
    parametrized weight, as of `weight_norm`, moves with its own parameters).

    Parameters
    ----------
    modules : (name, module) pairs
        As `named_modules` gives them.
    exclude : patterns or modules
        Left out with all they contain; patterns as in `fnmatch` ("*.out_proj", "decoder.*").

    Returns
    -------
    maps : list of AffineMap
    unseen : list of str
        Affine layers of which no hook sees what enters the weight: output projections of
        `nn.MultiheadAttention`, which applies their weights without calling them, and subclasses
        with a forward of their own, which may change the input first.

    Raises
    ------
    ValueError
        If an entry of `exclude` matches nothing, and for layers sharded otherwise than by rows.
    TypeError
        If an entry of `exclude` is neither.
    """
    modules = list(modules)
    excluded = _excluded(modules, exclude)
    hidden = {
        id(module.out_proj) for _, module in modules if isinstance(module, nn.MultiheadAttention)
    }
    maps, unseen = [], []
    for name, module in modules:
        if id(module) in excluded:
            continue
        if id(module) in hidden and not is_centred(module):
            if module.bias is not None:
                unseen.append(name)
        elif id(module) not in hidden:
            name = name or original_class(module).__name__
            found = _maps_of(name, module)
            if found and not _as_declared(module):
                unseen.append(name)
            else:
                maps += found
    for m in maps:
        m.refuse_other_shards()
    return maps, unseen


def _as_declared(module: nn.Module) -> bool:
    """Whether the module computes what its kind says."""
    kinds = (nn.Linear, nn.Conv1d, nn.MultiheadAttention)
    own = type(module).forward
    known = is_centred(module) or any(own is kind.forward for kind in kinds)
    return known or affine_form(module) is not None


def _excluded(modules, exclude) -> set[int]:
    found = set()
    for entry in require_several("exclude", exclude, (str, nn.Module), "('*.out_proj',)"):
        if isinstance(entry, nn.Module):
            roots = [module for _, module in modules if module is uncompiled(entry)]
        else:
            roots = [module for name, module in modules if matches(name, (entry,))]
        if not roots:
            known = shown([name for name, module in modules if _maps_of(name, module)])
            raise ValueError(
                f"exclude must name modules of the model; {shown(entry)} matches none. The affine "
                f"layers are {known}."
            )
        found |= {id(part) for root in roots for part in root.modules()}
    return found


def _maps_of(name: str, module: nn.Module) -> list[AffineMap]:
    own = module._parameters  # a parametrized weight is no parameter of its own
    if isinstance(module, nn.MultiheadAttention):
        return _attention_maps(name, module)
    if is_centred(module):
        bias = own.get("beta")
    elif isinstance(module, (nn.Linear, nn.Conv1d)):
        bias = own.get("bias")
    else:
        return _unnamed_map(name, module)
    weight = own.get("weight")
    if weight is None or bias is None or weight.is_complex():
        return []
    groups = getattr(module, "groups", 1)
    return [AffineMap(name, module, weight, bias, 0, len(bias), groups=groups)]


def _unnamed_map(name: str, module: nn.Module) -> list[AffineMap]:
    """The map that a module of another class is, if it has a matrix and a bias of its own."""
    own = module._parameters
    shapes = [len(own[n].shape) for n in ("weight", "bias") if own.get(n) is not None]
    form = affine_form(module) if shapes == [2, 1] else None
    if form is None or form.bias is None:
        return []
    rows = (0, len(form.bias))
    return [AffineMap(name, module, form.weight, form.bias, *rows, transposed=form.transposed)]


def _attention_maps(name: str, module: nn.MultiheadAttention) -> list[AffineMap]:
    own = module._parameters
    bias = own.get("in_proj_bias")
    if bias is None:
        return []
    if own.get("in_proj_weight") is not None:
        weight = own["in_proj_weight"]
        return [AffineMap(name, module, weight, bias, 0, len(bias), (0, 1, 2), 3)]
    width = module.embed_dim
    maps = []
    for i, part in enumerate(("q_proj_weight", "k_proj_weight", "v_proj_weight")):
        if own.get(part) is not None:
            rows = (i * width, (i + 1) * width)
            maps.append(AffineMap(f"{name}.{part}", module, own[part], bias, *rows, (i,)))
    return maps
