"""The rows that SBO-AdamW's means are taken over, in every way that people train models."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from builders import normal
from torch import nn
from torch.utils.checkpoint import checkpoint

from ipslimit.nn import CenteredLinear
from ipslimit.optim import SBOAdamW
from ipslimit.torchmodels.inputs import InputMeans
from ipslimit.torchmodels.maps import find_maps
from ipslimit.torchmodels.wrappers import named_modules

F64 = torch.float64
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}


class Net(nn.Module):
    """Two affine layers with an activation that works in place, the first maybe checkpointed."""

    def __init__(self, reentrant=None, dtype=F64):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first = nn.Linear(5, 6, dtype=dtype)
            self.second = nn.Linear(6, 3, dtype=dtype)
        self.act = nn.ReLU(inplace=True)
        self.reentrant = reentrant

    def body(self, x):
        return self.act(self.first(x))

    def forward(self, x):
        if self.reentrant is None:
            return self.second(self.body(x))
        return self.second(checkpoint(self.body, x, use_reentrant=self.reentrant))


def batch(k, rows=8):
    return 1.0 + normal(rows, 5, seed=k)


def loss(model, x):
    return model(x).square().sum(-1).mean()


def step(model, optimizer, k=0):
    optimizer.zero_grad()
    loss(model, batch(k)).backward()
    optimizer.step()


def distance(a, b):
    return max(float((p - q).detach().abs().max()) for p, q in zip(a.parameters(), b.parameters()))


def plain(steps=3):
    """What training gives without anything special."""
    model = Net()
    optimizer = SBOAdamW(model, **OPTIONS)
    for k in range(steps):
        step(model, optimizer, k)
    return model, optimizer


def means(optimizer):
    return {m.name: mean for m, mean in optimizer.means.gather().items()}


def test_hooks_leave_outputs_and_gradients_alone():
    watched, bare = Net(), Net()
    optimizer = SBOAdamW(watched)
    for model in (watched, bare):
        loss(model, batch(0)).backward()
    assert torch.equal(watched(batch(0)), bare(batch(0)))
    for p, q in zip(watched.parameters(), bare.parameters()):
        assert torch.equal(p.grad, q.grad)
    torch.testing.assert_close(means(optimizer)["first"][0], batch(0).mean(0))


class Query(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, dtype=F64)

    def forward(self, x):
        return self.attention(x, x, x)[0]


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Linear(4, 4, dtype=F64), (3, 4)),
        (lambda: nn.Linear(4, 4, dtype=F64), (2, 3, 4)),
        (lambda: CenteredLinear(4, 4, dtype=F64), (2, 3, 4)),
        (lambda: nn.Conv1d(4, 4, 1, dtype=F64), (2, 4, 3)),
        (lambda: nn.Conv1d(4, 4, 1, dtype=F64), (4, 3)),
        (Query, (2, 3, 4)),
    ],
)
def test_outputs_may_be_changed_in_place(make, shape):
    """Outputs are often views; in place they get a new history, and must keep what waits there."""
    watched, bare = make(), make()
    bare.load_state_dict(watched.state_dict())
    own = InputMeans(find_maps(named_modules(watched))[0])
    x = normal(*shape)
    for model in (watched, bare):
        z = model(x)
        z.mul_(2.0)
        z.relu_().square().sum().backward()
    for p, q in zip(watched.parameters(), bare.parameters()):
        assert torch.equal(p.grad, q.grad)
    (mean,) = own.gather().values()
    channels = 0 if shape == (4, 3) else 1 if "Conv" in type(watched).__name__ else -1
    expected = x.movedim(channels, -1).flatten(0, -2).mean(0)
    torch.testing.assert_close(mean, expected.expand_as(mean), rtol=0, atol=1e-14)


def test_gradient_accumulation_adds_rows_up():
    model = Net()
    optimizer = SBOAdamW(model, **OPTIONS)
    for k in range(3):
        optimizer.zero_grad()
        for part, share in zip(batch(k).split([2, 5, 1]), (2 / 8, 5 / 8, 1 / 8)):
            (share * loss(model, part)).backward()
        optimizer.step()
    assert distance(model, plain()[0]) < 1e-13


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_segment_counts_once(reentrant):
    """Shown with two passes of different size: counted twice, the first would weigh too much."""
    model = Net(reentrant)
    optimizer = SBOAdamW(model, **OPTIONS)
    model.reentrant = reentrant
    loss(model, batch(0, rows=6).requires_grad_()).backward()
    model.reentrant = None
    loss(model, batch(1, rows=2)).backward()
    rows = torch.cat([batch(0, rows=6), batch(1, rows=2)])
    torch.testing.assert_close(means(optimizer)["first"][0], rows.mean(0), rtol=0, atol=1e-14)


@pytest.mark.parametrize("train_mode", [False, True])
def test_passes_without_gradient_count_nothing_and_are_not_kept(train_mode):
    model = Net().train(train_mode)
    optimizer = SBOAdamW(model, **OPTIONS)
    x = batch(7)
    with torch.no_grad():
        output = model(x)
    with torch.inference_mode():
        model(x)
    assert output.grad_fn is None
    assert set(means(optimizer).values()) == {None}
    kept = weakref.ref(x), weakref.ref(output)
    del x, output
    gc.collect()
    assert [k() for k in kept] == [None, None]
    for k in range(3):
        with torch.no_grad():
            model(batch(20 + k))
        step(model, optimizer, k)
        with torch.no_grad():
            model(batch(30 + k))
    assert distance(model, plain()[0]) == 0.0


def test_passes_that_are_never_differentiated_count_nothing_and_are_not_kept():
    model = Net().eval()
    optimizer = SBOAdamW(model, **OPTIONS)
    for k in range(3):
        optimizer.zero_grad()
        x = batch(20 + k)
        evaluation = loss(model, x)  # with a graph, and thrown away
        kept = weakref.ref(x)
        loss(model, batch(k)).backward()
        del x, evaluation
        gc.collect()
        assert kept() is None
        optimizer.step()
    assert distance(model, plain()[0]) == 0.0


@pytest.mark.parametrize("reset", ["optimizer", "in place", "model"])
def test_a_step_that_amp_skips_takes_its_rows_along(reset):
    model = Net(dtype=torch.float32)
    other = Net(dtype=torch.float32)
    optimizer, expected = SBOAdamW(model, **OPTIONS), SBOAdamW(other, **OPTIONS)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def zero():
        model.zero_grad() if reset == "model" else optimizer.zero_grad(reset == "optimizer")

    for k in range(3):
        x = batch(k).float()
        zero()
        if k == 1:  # an overflow: this batch is skipped
            bad = loss(model, batch(50).float())
            scaler.scale(bad * torch.inf).backward()
            before = copy.deepcopy(model.state_dict())
            scaler.step(optimizer)
            scaler.update()
            assert all(torch.equal(v, before[name]) for name, v in model.state_dict().items())
            zero()
        scaler.scale(loss(model, x)).backward()
        scaler.step(optimizer)
        scaler.update()
        expected.zero_grad()
        loss(other, x).backward()
        expected.step()
    assert scaler.get_scale() == 4.0  # it did skip
    assert distance(model, other) == 0.0  # powers of two scale without rounding


def test_autocast_takes_means_in_single_precision():
    model = Net(dtype=torch.float32)
    optimizer = SBOAdamW(model, **OPTIONS)
    with torch.autocast("cpu", torch.bfloat16):
        loss(model, batch(0).float()).backward()
    found = means(optimizer)
    torch.testing.assert_close(found["first"][0], batch(0).float().mean(0))
    assert found["second"].dtype == torch.float32
    optimizer.step()


def test_the_unused_passes_of_two_models_stay_apart():
    """A second pass whose gradients are dropped, as a discriminator's are."""
    model = Net()
    optimizer = SBOAdamW(model, **OPTIONS)
    for k in range(3):
        loss(model, batch(40 + k)).backward()
        step(model, optimizer, k)
    assert distance(model, plain()[0]) == 0.0


def test_frozen_and_thawed_layers():
    model = Net()
    optimizer = SBOAdamW(model, **OPTIONS)
    model.first.requires_grad_(False)
    before = copy.deepcopy(model)
    step(model, optimizer)
    assert means(optimizer)["first"] is None
    assert distance(model.first, before.first) == 0.0
    assert distance(model.second, before.second) > 1e-3
    model.first.requires_grad_(True)
    step(model, optimizer)
    assert distance(model.first, before.first) > 1e-3


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_of_model_and_optimizer_train_alike_and_apart(way):
    model, optimizer = plain(2)
    if way == "deepcopy":
        twin, its = copy.deepcopy((model, optimizer))
    else:
        twin, its = pickle.loads(pickle.dumps((model, optimizer)))
    step(model, optimizer, 2)
    assert distance(model, twin) > 1e-3
    assert set(means(its).values()) == {None}  # the original's rows are its own
    step(twin, its, 2)
    assert distance(model, twin) == 0.0


def test_a_copy_of_the_model_alone_has_idle_hooks():
    model, optimizer = plain(2)
    optimizer.zero_grad()
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    z = twin(batch(0))
    z.sum().backward()
    assert not any(tap.active for part in twin.modules() for tap in part._forward_hooks.values())
    assert set(means(optimizer).values()) == {None}
    own = SBOAdamW(twin, **OPTIONS)
    step(twin, own)


def test_hooks_go_with_the_optimizer():
    model = Net()
    for _ in range(3):
        SBOAdamW(model)
    gc.collect()
    assert not model.first._forward_hooks
    optimizer = SBOAdamW(model)
    assert len(model.first._forward_hooks) == 1
    optimizer.means.remove()
    assert not model.first._forward_hooks


@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_compiled_models_train_alike(backend):
    torch._dynamo.reset()
    model = Net()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = SBOAdamW(compiled, **OPTIONS)
    assert [m.name for m in optimizer.maps] == ["first", "second"]
    for k in range(3):
        with torch.no_grad():
            compiled(batch(60))
        compiled.zero_grad()  # the model's own: the rows must go with the gradients
        for part in batch(k).split(4):
            (0.5 * loss(compiled, part)).backward()
        optimizer.step()
    assert distance(model, plain()[0]) < 1e-13
    torch._dynamo.reset()


def test_a_model_compiled_and_run_before_is_named():
    torch._dynamo.reset()
    model = Net()
    compiled = torch.compile(model, backend="eager")
    loss(compiled, batch(0)).backward()
    optimizer = SBOAdamW(compiled, **OPTIONS)
    try:
        step(compiled, optimizer)
    except RuntimeError as error:
        assert "compiled and run before" in str(error)
    else:  # a torch that looks at hooks again
        other = Net()
        step(other, SBOAdamW(other, **OPTIONS))
        assert distance(model, other) < 1e-13
    torch._dynamo.reset()


def test_one_input_of_many_layers_is_summed_once_and_again_when_it_changes():
    model = nn.ModuleList([nn.Linear(2, 2, dtype=F64) for _ in range(3)])
    optimizer = SBOAdamW(model)
    x = normal(4, 2)
    model[0](x).sum().backward()
    model[1](x).sum().backward()
    first = x.mean(0)
    x.add_(1.0)
    model[2](x).sum().backward()
    found = means(optimizer)
    torch.testing.assert_close(found["0"][0], first)
    torch.testing.assert_close(found["1"][0], first)
    torch.testing.assert_close(found["2"][0], first + 1.0)


def test_functional_transforms_pass_through():
    model = Net()
    optimizer = SBOAdamW(model)
    params = dict(model.named_parameters())
    bare = Net()

    def of(net):
        def value(p, x):
            return torch.func.functional_call(net, p, (x.unsqueeze(0),)).square().sum()

        return torch.func.vmap(torch.func.grad(value), (None, 0))

    model.act = bare.act = nn.ReLU()
    expected = of(bare)(params, batch(0))
    for name, g in of(model)(params, batch(0)).items():
        assert torch.equal(g, expected[name])
    assert set(means(optimizer).values()) == {None}


def test_a_model_that_was_moved_to_another_precision():
    model = Net(dtype=torch.float32)
    optimizer = SBOAdamW(model)
    model.double()
    loss(model, batch(0)).backward()
    found = means(optimizer)["first"]
    torch.testing.assert_close(found[0], batch(0).mean(0), rtol=0, atol=1e-15)
