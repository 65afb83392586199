"""The plain Transformer that the language model is held against: size, batches, losses."""

import math

import pytest
import torch

from ipslimit import Block, TokenProblem, XavierPerceptrons, XavierUniform
from ipslimit.experiments.language.plain import PlainTrainer, plain_run
from ipslimit.experiments.text.training import Recipe, held_out_loss
from ipslimit.experiments.text.transformer import Shape, make_decoder

V, N = 6, 8
SIZES = {"vocabulary": V, "d": 16, "layers": 2, "heads": 4, "batch": 5, "batch_seed": 3}
TRAINING = {"steps": 12, "lr": 0.01, "warmup": 3, "floor": 0.001, "weight_decay": 0.1, "seed": 0}


def windows(count=30, seed=0):
    """Texts in which each token nearly tells the next one."""
    gen = torch.Generator().manual_seed(seed)
    start = torch.randint(0, V, (count, 1), generator=gen)
    jumps = (torch.rand(count, N + 1, generator=gen) < 0.1).cumsum(1)
    return (start + torch.arange(N + 1) + jumps) % V


def run(**changed):
    arguments = SIZES | TRAINING | {"evaluate": (0, 6, 12)} | changed
    return plain_run(windows(), windows(7, seed=1), **arguments)


@pytest.fixture(scope="module")
def trained():
    return run()


def test_it_reads_the_windows_of_the_token_problem_in_their_order():
    law = Block(XavierUniform(16, 4), XavierPerceptrons(16, 4), norm="rms")
    problem = TokenProblem(windows(), V, law, 16, batch=5, batch_seed=3)
    shape, recipe = Shape("plain", V, N, 16, 1, 4), Recipe(batch=5)
    trainer = PlainTrainer(shape, recipe, windows().numpy(), 0, 12, 3)
    for k in (0, 1, 17):
        assert torch.equal(trainer.batch(k), problem.ids[problem.chosen(k)])


@pytest.mark.parametrize("vocabulary, d, layers", [(64, 32, 8), (96, 32, 32), (30, 16, 4)])
def test_it_has_the_parameters_of_the_model_it_is_held_against(vocabulary, d, layers):
    plain = make_decoder(Shape("plain", vocabulary, 64, d, layers, 4), 0)
    ours = layers * (4 * d * d + 2 * d * 4 * d) + 2 * vocabulary * d + 64 * d
    assert sum(p.numel() for p in plain.parameters()) == pytest.approx(ours, rel=0.02)


def test_it_starts_as_gpt_2_does_and_learns(trained):
    assert [step for step, _ in trained["validation"]] == [0, 6, 12]
    assert len(trained["loss"]) == TRAINING["steps"] + 1
    first, _, last = (loss for _, loss in trained["validation"])
    model = make_decoder(Shape("plain", V, N, 16, 2, 4), 0)
    assert first == held_out_loss(model, windows(7, seed=1).numpy())
    assert first == pytest.approx(math.log(V), abs=0.02)
    assert last < first - 0.1
    assert trained["parameters"] == sum(p.numel() for p in model.parameters())


def test_it_is_a_function_of_its_seeds_and_leaves_random_state_alone(trained):
    state = torch.get_rng_state()
    assert run() == trained
    assert torch.equal(state, torch.get_rng_state())
    for name in ("seed", "batch_seed"):
        assert run(**{name: 9})["loss"] != trained["loss"]


def test_the_steps_that_are_evaluated_change_no_number(trained):
    alone = run(evaluate=(12,))
    assert alone["loss"] == trained["loss"]
    assert alone["validation"] == trained["validation"][-1:]


def test_it_ends_where_a_loss_is_no_number():
    found = run(lr=1e30, warmup=0)
    assert len(found["loss"]) < 12 and not math.isfinite(found["loss"][-1])
    assert [step for step, _ in found["validation"]] == [0]


def test_a_width_that_heads_do_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"d must be a multiple of heads \(4\); got 18. Use 16."):
        run(d=18)
