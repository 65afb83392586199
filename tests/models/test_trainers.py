"""What the trainers of accelerate, Lightning and transformers make of optimizers and averages."""

import copy
import logging
import tempfile
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from ipslimit import BoundaryProbe
from ipslimit.nn import Recentring, calibrate_centres, center_linears, restore_linears
from ipslimit.optim import SAGGS, SBOAdamW, carry_moves, find_pairs

pytestmark = pytest.mark.models

STEPS = 4


def encoder():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        return nn.Sequential(layer, nn.Linear(8, 2)).double()


def batch(k):
    generator = torch.Generator().manual_seed(k)
    return 1.0 + torch.randn(3, 5, 8, generator=generator, dtype=torch.float64)


def loss(model, x):
    return model(x).square().sum(-1).mean()


def adam(model):
    # keys have biases whose gradients are rounding, which a smaller eps would make steps of
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def saggs(model):
    return SAGGS(adam(model), find_pairs(model, refused="skip"), every=2)


def sbo(model):
    return SBOAdamW(model, lr=1e-2, exclude=("*.out_proj",))


KINDS = {
    "recentring": (adam, lambda *a: Recentring(*a, decay=0.5)),
    "probe": (adam, BoundaryProbe),
    "saggs": (saggs, BoundaryProbe),
    "sbo": (sbo, BoundaryProbe),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def start(kind):
    model = encoder()
    if kind == "recentring":
        center_linears(model)
    return model, KINDS[kind][0](model)


def plainly(kind, accumulate):
    """Model and watcher after training without any library."""
    model, optimizer = start(kind)
    watcher = KINDS[kind][1](model, optimizer)
    for k in range(STEPS):
        optimizer.zero_grad()
        for j in range(accumulate):
            (loss(model, batch(k * accumulate + j)) / accumulate).backward()
        optimizer.step()
    return model, watcher


def require_alike(found, kind, accumulate):
    model, watcher = plainly(kind, accumulate)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[0].state_dict()[name], value, rtol=0, atol=1e-13)
    if kind == "recentring":
        assert found[1].steps == watcher.steps == STEPS
        return
    np.testing.assert_array_equal(found[1].steps, np.arange(1, STEPS + 1))
    chosen = ~watcher.is_key
    for name, values in watcher.history().items():
        theirs = found[1].history()[name]
        np.testing.assert_allclose(theirs[:, chosen], values[:, chosen], rtol=1e-8, err_msg=name)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("after", [False, True])
@every_kind
def test_optimizers_that_accelerate_prepares(kind, after, accumulate):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model, optimizer = start(kind)
    watcher = None if after else KINDS[kind][1](model, optimizer)
    prepared, its = accelerator.prepare(model, optimizer)
    if after:
        watcher = KINDS[kind][1](prepared, its)
    for k in range(STEPS * accumulate):
        with accelerator.accumulate(prepared):
            accelerator.backward(loss(prepared, batch(k)))
            its.step()
            its.zero_grad()
    require_alike((model, watcher), kind, accumulate)


@pytest.fixture
def lightning():
    found = pytest.importorskip("lightning.pytorch")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return found


def fit(lightning, kind, manual=False, accumulate=1, callbacks=(), at_start=lambda module: None):
    """The module, which has `net` and `watcher`, and the functions it had after every step."""

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.optimizer = start(kind)
            self.watcher, self.after = [], []  # in a list: not a part of the module
            self.automatic_optimization = not manual
            if not manual:
                self.watcher.append(KINDS[kind][1](self.net, self.optimizer))

        def configure_optimizers(self):
            return self.optimizer

        def on_train_start(self):
            if manual:
                self.watcher.append(KINDS[kind][1](self.net, self.optimizers()))
            at_start(self)

        def training_step(self, x, index):
            value = loss(self.net, x)
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(value)
                optimizer.step()
            return value

        def on_train_batch_end(self, outputs, x, index):
            self.after.append(copy.deepcopy(self.net))

    module = Module()
    batches = [batch(k) for k in range(STEPS * accumulate)]
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=list(callbacks),
        accumulate_grad_batches=accumulate,
        **dict.fromkeys(quiet, False),
    )
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*(does not have many workers|`train_dataloader)"
        )
        trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    return module


@pytest.mark.parametrize("accumulate", [1, 2])
@every_kind
def test_lightnings_closures(lightning, kind, accumulate):
    module = fit(lightning, kind, accumulate=accumulate)
    require_alike((module.net, *module.watcher), kind, accumulate)


@every_kind
def test_lightnings_manual_optimization(lightning, kind):
    module = fit(lightning, kind, manual=True)
    require_alike((module.net, *module.watcher), kind, 1)


def follow(module):
    for callback in module.trainer.callbacks:
        if getattr(callback, "_average_model", None) is not None:
            carry_moves(module, callback._average_model)


@pytest.mark.parametrize("buffers", [True, False])
def test_lightnings_average_of_a_centred_model(lightning, buffers):
    from lightning.pytorch.callbacks import EMAWeightAveraging

    ema = EMAWeightAveraging(decay=0.5, use_buffers=buffers)
    module = fit(lightning, "recentring", callbacks=[ema], at_start=follow)
    states = [restore_linears(net).state_dict() for net in module.after]
    average = states[0]
    for state in states[1:]:
        average = {name: average[name].lerp(value, 0.5) for name, value in state.items()}
    expected = restore_linears(copy.deepcopy(module.net))
    expected.load_state_dict(average)
    x = batch(99)
    torch.testing.assert_close(module.net(x), expected(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["recentring", "saggs"])
def test_an_average_of_lightnings_that_does_not_follow_is_warned_of(lightning, kind):
    from lightning.pytorch.callbacks import EMAWeightAveraging

    with pytest.warns(UserWarning, match=r"carry_moves\(model, average\)"):
        fit(lightning, kind, callbacks=[EMAWeightAveraging(decay=0.5)])


@pytest.fixture
def bert():
    """A function that makes the same small model every time."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )

    def make():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = transformers.BertForSequenceClassification(config)
            for p in model.parameters():
                if p.dim() == 1:
                    nn.init.normal_(p, 1.0, 0.3)
        return model.eval()

    return make


IDS = torch.arange(32).reshape(4, 8) % 50


def test_a_centred_model_is_saved_as_what_it_computes(bert):
    model = center_linears(bert())
    expected = model(IDS).logits.detach()
    with calibrate_centres(model), torch.no_grad():
        model(IDS)
    assert float(model.classifier.centre.abs().max()) > 0.1
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded, found = type(model).from_pretrained(folder, output_loading_info=True)
    assert not found["missing_keys"]
    assert {name.rpartition(".")[2] for name in found["unexpected_keys"]} == {"beta", "centre"}
    torch.testing.assert_close(loaded.eval()(IDS).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_class_with_centred_layers_is_loaded_as_it_was_saved(bert, dtype):
    class Centred(type(bert())):
        def __init__(self, config):
            super().__init__(config)
            center_linears(self)

    model = Centred(bert().config).eval()
    model.load_state_dict(bert().state_dict())
    with calibrate_centres(model), torch.no_grad():
        model(IDS)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded, found = Centred.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not found["missing_keys"] and loaded.classifier.centre.dtype == torch.float32
    assert torch.equal(loaded.classifier.beta, model.classifier.beta.to(dtype))
    tolerance = 1e-6 if dtype == torch.float32 else 0.1
    expected = model(IDS).logits.detach()
    torch.testing.assert_close(loaded.eval()(IDS).logits.float(), expected, rtol=0, atol=tolerance)


def test_the_trainer_makes_sbo_of_the_model_it_is_told(bert):
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": i % 2} for i, row in enumerate(IDS)] * 4

    def train(model, **options):
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder, max_steps=3, report_to=[], disable_tqdm=True, use_cpu=True, seed=1
            )
            trainer = Trainer(model=model, args=arguments, train_dataset=rows, **options)
            trainer.train()
        return model, trainer

    told = bert()
    by_class, trainer = train(
        told, optimizer_cls_and_kwargs=(SBOAdamW, {"model": told, "lr": 1e-3})
    )
    assert len(trainer.optimizer.optimizer.maps) == 14
    model = bert()
    optimizer = SBOAdamW(model, lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: max(0.0, 1.0 - k / 3))
    by_hand, _ = train(model, optimizers=(optimizer, schedule))
    for p, q in zip(by_class.parameters(), by_hand.parameters()):
        assert torch.equal(p, q)
    with pytest.raises(TypeError, match=r"optimizer_cls_and_kwargs=\(SBOAdamW, \{'model': model"):
        train(bert(), optimizer_cls_and_kwargs=(SBOAdamW, {"lr": 1e-3}))
