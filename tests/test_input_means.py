"""The rows that SBO-AdamW's means are taken over, in every way that people train models."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from builders import normal
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ipslimit.nn import CenteredLinear, Recentring, center_linears
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


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_padding_does_not_count(reentrant):
    """Ragged rows in a padded batch have the means, and train as, the rows alone."""
    ragged, padded = Net(), Net(reentrant)
    lengths = torch.tensor([1, 4, 2])
    mask = torch.arange(4) < lengths[:, None]
    optimizer, other = SBOAdamW(ragged, **OPTIONS), SBOAdamW(padded, **OPTIONS)
    for k in range(3):
        x = 1.0 + normal(3, 4, 5, seed=k)
        x[~mask] = 100.0
        optimizer.zero_grad()
        ragged(x[mask]).square().sum().backward()
        optimizer.step()
        other.zero_grad()
        other.row_mask = mask
        (padded(x.requires_grad_()).square().sum(-1) * mask).sum().backward()
        other.step()
    assert distance(ragged, padded) < 1e-12


def test_masks_fit_flattened_and_pooled_inputs_and_nothing_else():
    model = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
    optimizer = SBOAdamW(model)
    optimizer.row_mask = mask = torch.tensor([[True, False, False], [True, True, False]])
    x = normal(2, 3, 2, dtype=torch.float32)
    pooled = x[:, 0]
    (model[0](x).sum() + model[1](x.flatten(0, 1)).sum() + model[2](pooled).sum()).backward()
    found = means(optimizer)
    torch.testing.assert_close(found["0"][0], x[mask].mean(0))
    torch.testing.assert_close(found["1"], found["0"])
    torch.testing.assert_close(found["2"][0], pooled.mean(0))
    with pytest.raises(ValueError, match=r"row_mask must have the leading shape \(3, 2\).*'0'"):
        model[0](x.transpose(0, 1))
    optimizer.row_mask = mask.float()
    with pytest.raises(TypeError, match="row_mask must be a bool tensor"):
        model[0](x)
    optimizer.zero_grad()
    optimizer.row_mask = lambda name, shape: mask if name == "0" else None
    (model[0](x).sum() + model[1](x).sum()).backward()
    found = means(optimizer)
    torch.testing.assert_close(found["0"][0], x[mask].mean(0))
    torch.testing.assert_close(found["1"][0], x.flatten(0, 1).mean(0))


def test_masked_windows_of_a_convolution():
    model = nn.Conv1d(2, 3, 3, padding=1, dtype=F64)
    optimizer = SBOAdamW(model)
    x, mask = normal(2, 2, 5), torch.tensor([[True] * 5, [True, True, False, False, False]])
    optimizer.row_mask = mask
    model(x).sum().backward()
    windows = nn.functional.pad(x, (1, 1)).unfold(-1, 3, 1).transpose(1, 2)  # (B, T, C, K)
    expected = windows[mask].mean(0).flatten()
    torch.testing.assert_close(means(optimizer)["Conv1d"][0], expected, rtol=0, atol=1e-14)


def test_a_mask_that_hides_everything_has_mean_zero():
    model = nn.Linear(2, 2)
    optimizer = SBOAdamW(model)
    optimizer.row_mask = torch.zeros(3, dtype=torch.bool)
    model(normal(3, 2, dtype=torch.float32)).sum().backward()
    assert torch.equal(means(optimizer)["Linear"], torch.zeros(1, 2))
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


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


def _train_distributed(rank, folder):
    """One of two processes: each sees its half of the rows, unevenly split."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    model = Net()
    parallel = DistributedDataParallel(model)
    optimizer = SBOAdamW(parallel, **OPTIONS)
    for k in range(3):
        x = batch(k)[:3] if rank == 0 else batch(k)[3:]
        optimizer.zero_grad()
        # gradients are averaged over two processes; the loss is the mean over 8 rows
        (parallel(x).square().sum() * 2 / 8).backward()
        optimizer.step()
    centred = center_linears(Net())
    parallel = DistributedDataParallel(centred)
    adamw = torch.optim.AdamW(centred.parameters(), **OPTIONS)
    Recentring(parallel, adamw, every=2, decay=0.5)
    for k in range(4):
        adamw.zero_grad()
        x = batch(k)[:3] if rank == 0 else batch(k)[3:]
        (parallel(x).square().sum() * 2 / 8).backward()
        adamw.step()
    found = {"sbo": model.state_dict(), "centred": centred.state_dict()}
    torch.save(found, f"{folder}/rank{rank}")
    dist.destroy_process_group()


def test_distributed_processes_add_their_rows_up(tmp_path):
    multiprocessing.spawn(_train_distributed, (str(tmp_path),), nprocs=2)
    found = [torch.load(tmp_path / f"rank{rank}", weights_only=True) for rank in (0, 1)]
    expected = {"sbo": plain()[0]}
    centred = expected["centred"] = center_linears(Net())
    adamw = torch.optim.AdamW(centred.parameters(), **OPTIONS)
    Recentring(centred, adamw, every=2, decay=0.5)
    for k in range(4):
        step(centred, adamw, k)
    assert isinstance(centred.first, CenteredLinear) and centred.first.centre.any()
    for kind, model in expected.items():
        for name, value in model.state_dict().items():
            for rank in (0, 1):
                torch.testing.assert_close(found[rank][kind][name], value, rtol=0, atol=1e-12)
            assert torch.equal(found[0][kind][name], found[1][kind][name])


def test_owners_of_a_process_group_are_not_copied():
    with pytest.raises(TypeError, match=r"state_dict\(\)"):
        copy.deepcopy(InputMeans(find_maps(named_modules(Net()))[0], process_group=object()))
