"""Layers have the user's names, and are found by them, whatever torch.compile has wrapped."""

import pytest
import torch
import torch.distributed as dist
from modules import seeded
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from ipslimit import BoundaryProbe
from ipslimit.nn import Recentring, calibrate_centres, center_linears, decay_groups, restore_linears
from ipslimit.optim import SAGGS, SBOAdamW, balance, find_pairs, verify_pairs


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        self.head = nn.Linear(2, 1)

    def forward(self, x):
        return self.head(self.mlp(x))


def plain():
    return seeded(7, Net)


def compiled(module):
    return torch.compile(module, backend="eager")


def compiled_inside():
    model = plain()
    model.mlp = compiled(model.mlp)
    return model


def compiled_twice():
    return compiled(compiled_inside())


WRAPPED = [plain, compiled_inside, compiled_twice]
NAMES = ["mlp.0", "mlp.2", "head"]
every_wrapping = pytest.mark.parametrize("make", WRAPPED)


def adam(model):
    return torch.optim.AdamW(model.parameters(), 1e-2)


def batch():
    return torch.linspace(-1.0, 2.0, 15).reshape(5, 3)


def outputs(model):
    """What the model computes, without the time that tracing takes."""
    model, mlp = original(model)
    return model.head(mlp(batch()))


def train(model, optimizer):
    outputs(model).square().mean().backward()
    optimizer.step()


def original(model):
    """The Net, and its MLP, out of their wrappers."""
    model = getattr(model, "_orig_mod", model)
    return model, getattr(model.mlp, "_orig_mod", model.mlp)


@every_wrapping
def test_maps_have_the_users_names(make):
    assert [m.name for m in SBOAdamW(make()).maps] == NAMES


@every_wrapping
@pytest.mark.parametrize(
    ("pattern", "left"),
    [
        ("mlp.0", ["mlp.2", "head"]),
        ("mlp", ["head"]),
        ("mlp.*", ["head"]),
        ("head", ["mlp.0", "mlp.2"]),
    ],
)
def test_exclude_takes_the_users_names(make, pattern, left):
    assert [m.name for m in SBOAdamW(make(), exclude=pattern).maps] == left
    model = make()
    assert BoundaryProbe(model, adam(model), exclude=pattern).layers == left
    names = [name for name, part in make().named_modules() if type(part) is nn.Linear]
    converted = center_linears(make(), exclude=pattern)
    kept = [name for name, part in converted.named_modules() if type(part) is nn.Linear]
    assert len(kept) == len(names) - len(left)
    optimizer = SBOAdamW([{"params": [nn.Parameter(torch.zeros(1))]}, {"modules": []}])
    optimizer.add_param_group({"modules": make()}, exclude=pattern)
    assert [m.name for m in optimizer.maps] == left


@pytest.mark.parametrize("make", [compiled_inside, compiled_twice])
def test_exclude_takes_wrappers_and_the_names_that_torch_gives(make):
    model = make()
    inner, _ = original(model)
    assert [m.name for m in SBOAdamW(model, exclude=inner.mlp).maps] == ["head"]
    names = SBOAdamW(model, exclude="mlp._orig_mod.0").maps
    assert [m.name for m in names] == ["mlp.2", "head"]


@every_wrapping
def test_probes_have_the_users_names_and_take_them(make):
    model = make()
    probe = BoundaryProbe(model, adam(model), keys=("mlp.0", "head"))
    assert (probe.layers, probe.is_key.tolist()) == (NAMES, [True, False, True])
    wide = seeded(0, lambda: nn.ModuleDict({"qkv": nn.Sequential(nn.Linear(2, 6))}))
    if make is not plain:
        wide["qkv"] = compiled(wide["qkv"])
    probe = BoundaryProbe(wide, adam(wide), packed="qkv.0")
    assert probe.layers == ["qkv.0[q]", "qkv.0[k]", "qkv.0[v]"]
    attention = nn.ModuleDict({"block": nn.TransformerEncoderLayer(4, 2, 4)})
    if make is not plain:
        attention["block"] = compiled(attention["block"])
    assert BoundaryProbe(attention, adam(attention)).unseen == ["block.self_attn.out_proj"]


@every_wrapping
@pytest.mark.parametrize("owner", ["sbo", "probe", "recentring"])
def test_mask_functions_are_asked_by_the_users_names(make, owner):
    model, asked = make(), set()
    if owner == "recentring":
        center_linears(model)
    optimizer = SBOAdamW(model) if owner == "sbo" else adam(model)
    watcher = {
        "sbo": lambda: optimizer,
        "probe": lambda: BoundaryProbe(model, optimizer),
        "recentring": lambda: Recentring(model, optimizer),
    }[owner]()
    watcher.row_mask = lambda name, shape: asked.add(name)
    train(model, optimizer)
    assert asked == set(NAMES)


@every_wrapping
def test_averages_are_kept_by_the_users_names_and_load_under_torchs(make):
    model = center_linears(make())
    optimizer = adam(model)
    policy = Recentring(model, optimizer)
    train(model, optimizer)
    state = policy.state_dict()
    assert sorted(state["averages"]) == sorted(NAMES)
    averages = {f"_orig_mod.{name}": mean for name, mean in state["averages"].items()}
    other = Recentring(model, optimizer)
    other.load_state_dict(state | {"averages": averages})
    assert other.averages.keys() == state["averages"].keys()
    assert all(torch.equal(other.averages[name], state["averages"][name]) for name in NAMES)


@every_wrapping
def test_pairs_have_the_users_names(make):
    model = make()
    pairs = find_pairs(model, kinds="mlp")
    assert [pair.name for pair in pairs] == ["mlp.0/2"]
    names = ["mlp.0.weight", "mlp.0.bias", "mlp.2.weight"]
    assert [part.name for part in pairs[0].parts] == names
    assert [found.name for found in balance(pairs)] == ["mlp.0/2"]
    optimizer = SAGGS(adam(model), pairs)
    assert [found.name for found in optimizer.balance()] == ["mlp.0/2"]
    model = make()
    original(model)[1][1] = nn.GELU()
    both = nn.ModuleDict({"a": model, "b": plain()})
    [reason] = find_pairs(both, refused="skip").refused
    assert reason.startswith("a.mlp (mlp): between 0 and 2")


def test_modules_that_declare_their_pairs_are_told_the_users_name():
    class Declaring(nn.Module):
        def symmetry_pairs(self, name, per):
            return {"mlp": f"{name} has none, per {per}"}

    model = nn.ModuleDict({"a": compiled(nn.Sequential(Declaring())), "b": plain()})
    assert find_pairs(model, refused="skip").refused == ["a.0 (mlp): a.0 has none, per matrix"]


@every_wrapping
def test_messages_have_the_users_names(make):
    model = make()
    with pytest.raises(ValueError, match=r"'none' matches none.*\['mlp.0', 'mlp.2', 'head'\]"):
        SBOAdamW(model, exclude="none")
    weight = original(model)[1][0].weight
    with pytest.raises(ValueError, match=r"got mlp.0.weight \(4, 3\) in groups 0 and 1"):
        SBOAdamW([{"modules": model}, {"params": [weight]}])
    optimizer = SBOAdamW(model, centre="fixed")
    with pytest.raises(RuntimeError, match=r"saw no input of mlp.0\."), optimizer.calibrate():
        pass
    weight.grad = torch.ones_like(weight)
    original(model)[1][0].bias.grad = torch.ones(4)
    with pytest.raises(RuntimeError, match=r"^mlp.0 has a gradient"):
        optimizer.step()
    center_linears(model)
    with pytest.raises(RuntimeError, match=r"saw no input of mlp.0\."), calibrate_centres(model):
        pass
    model = make()
    pairs = find_pairs(model)
    mlp = original(model)[1]
    mlp[1] = nn.GELU()
    torch._dynamo.reset()
    with pytest.raises(ValueError, match=r"mlp\.0/2 changes an output"):
        verify_pairs(model, pairs, batch())


@every_wrapping
def test_decay_groups_and_conversions_look_through(make):
    model = center_linears(make())
    expected = outputs(model)
    groups = decay_groups(model, 0.1)
    assert [len(group["params"]) for group in groups] == [3, 3]
    with calibrate_centres(model), torch.no_grad():
        outputs(model)
    assert not original(model)[1][0].centre.eq(0).any()
    torch.testing.assert_close(outputs(model), expected)
    restored = restore_linears(model)
    assert type(original(restored)[1][0]) is nn.Linear
    torch.testing.assert_close(outputs(restored), expected)


def test_a_layer_that_was_compiled_by_itself_is_not_converted_behind_its_wrapper():
    model = plain()
    model.head = compiled(model.head)
    before = model.mlp[0]
    with pytest.raises(ValueError, match="head is a compiled Linear"):
        center_linears(model)
    assert model.mlp[0] is before
    center_linears(model, exclude="head")
    with pytest.raises(ValueError, match="the model is a compiled Linear"):
        center_linears(compiled(nn.Linear(2, 2)))
    model = center_linears(plain())
    model.head = compiled(model.head)
    with pytest.raises(ValueError, match="head is a compiled CenteredLinear"):
        restore_linears(model)


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_parallel_models_are_looked_into(process_group):
    model = DistributedDataParallel(compiled_inside())
    for whole in (model, compiled(model)):
        assert [m.name for m in SBOAdamW(whole).maps] == NAMES
        assert BoundaryProbe(whole, adam(whole)).layers == NAMES
        assert [pair.name for pair in find_pairs(whole)] == ["mlp.0/2"]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.filterwarnings("ignore:.*FSDP:UserWarning", "ignore:.*FSDP:FutureWarning")
def test_flattened_weights_are_refused(process_group, own):
    flat = FullyShardedDataParallel(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)),
        use_orig_params=own,
        device_id=torch.device("cpu"),
    )
    for use in (SBOAdamW, find_pairs, lambda model: BoundaryProbe(model, adam(model))):
        with pytest.raises(ValueError, match="the model is in FullyShardedDataParallel"):
            use(flat)
    with pytest.raises(ValueError, match=r"0 is in FullyShardedDataParallel.*Use .*fully_shard"):
        SBOAdamW(nn.Sequential(flat, nn.Linear(2, 2)))
