"""The particle transformer against a network written naively, with autograd and torch.optim."""

import pytest
import torch
from builders import assert_to_rounding, naive_field, normal, small_atoms, small_problem
from contract import ROUNDING, plain_heads, run_from
from test_particles import ADAMW

from ipslimit import SGD
from ipslimit.model.losses import ReadoutCrossEntropy
from ipslimit.model.problem import Problem


class NaiveNetwork:
    """L layers written out with autograd, one seed, trained by torch.optim on the plain J."""

    def __init__(self, start, problem, exponent=1.0):
        layers = [start[r, 0] for r in range(start.lead[0])]
        self.problem = problem
        self.scale = len(layers) ** -exponent
        self.factor = start.count / self.scale  # J's gradient times this is g
        self.weights = layers[0].weights
        self.layers = [
            {name: t.detach().clone().requires_grad_() for name, t in layer.parts().items()}
            for layer in layers
        ]

    def hidden(self, contexts):
        x = [contexts.clone().requires_grad_()]
        for layer in self.layers:
            field = naive_field(x[-1], layer | {"weights": self.weights}, self.problem.causal)
            x.append(x[-1] + self.scale * field)
        return x

    def losses(self):
        x = self.hidden(self.problem.contexts)
        return x, self.problem.loss(x[-1], self.problem.targets)

    def costates(self):
        """N dl_b/dx_r at every layer."""
        x, losses = self.losses()
        return [self.problem.N * g for g in torch.autograd.grad(losses.sum(), x)]

    def parameters(self):
        return [t for layer in self.layers for name, t in layer.items() if name != "bk"]

    def gradients(self):
        """g of every layer by name."""
        loss = self.losses()[1].mean()
        for t in self.parameters():
            t.grad = None
        loss.backward()
        return [
            {name: self.factor * t.grad for name, t in layer.items() if name != "bk"}
            for layer in self.layers
        ]

    def train(self, make_optimizer, steps):
        optimizer = make_optimizer(self.parameters())
        losses = [self.losses()[1].mean().detach()]
        for _ in range(steps):
            self.gradients()
            for t in self.parameters():
                t.grad *= self.factor
            optimizer.step()
            losses.append(self.losses()[1].mean().detach())
        return torch.stack(losses)


class WeightedSquares:
    """A loss of the user's, on all tokens, without a check of its own."""

    def __call__(self, x, y):
        weights = torch.linspace(0, 1, x.shape[-2])[:, None]
        return ((x - y[..., None, :]).square() * weights).sum(dim=(-1, -2))


def problem_with(loss, **options):
    if loss == "squares":
        return small_problem(**options)
    if loss == "user":
        return small_problem(loss=WeightedSquares(), **options)
    law = small_atoms()
    readout = ReadoutCrossEntropy(normal(4, law.d, seed=8))
    contexts, classes = normal(3, 4, law.d, seed=2), torch.tensor([3, 0, 1])
    return Problem(contexts, classes, law, loss=readout, **options)


LOSSES = pytest.mark.parametrize("loss", ["squares", "user", "entropy"])
CAUSAL = pytest.mark.parametrize("causal", [False, True])


@LOSSES
@CAUSAL
@pytest.mark.parametrize("depth,H,exponent", [(4, 3, 1.0), (3, 2, 0.5), (1, 1, 1.0)])
def test_hidden_states_and_costates_are_autograd_through_the_whole_network(
    depth, H, exponent, loss, causal
):
    problem = problem_with(loss, causal=causal)
    start = plain_heads(depth, H)
    run = run_from(start, problem, SGD(0.1), 0, exponent=exponent)
    naive = NaiveNetwork(start, problem, exponent)
    x, losses = naive.losses()
    assert run.x[0].shape == run.p[0].shape == (1, depth + 1, 3, 4, 3)
    assert_to_rounding(run.x[0][0], torch.stack(x).detach(), ROUNDING, "x")
    assert_to_rounding(run.p[0][0], torch.stack(naive.costates()), ROUNDING, "p")
    assert_to_rounding(run.loss[0, 0], losses.mean().detach(), ROUNDING, "loss")


@LOSSES
@CAUSAL
@pytest.mark.parametrize("depth,H,exponent", [(4, 3, 1.0), (3, 2, 0.5), (1, 1, 1.0)])
def test_an_sgd_step_is_minus_lr_L_H_times_the_gradient_of_J(depth, H, exponent, loss, causal):
    problem = problem_with(loss, causal=causal)
    start = plain_heads(depth, H)
    run = run_from(start, problem, SGD(0.5), 1, exponent=exponent)
    naive = NaiveNetwork(start, problem, exponent)
    moved = run.heads[1].with_packed(run.heads[1].packed - run.heads[0].packed)
    for r, gradients in enumerate(naive.gradients()):
        for name, g in gradients.items():
            assert_to_rounding(getattr(moved, name)[0, r], -0.5 * g, ROUNDING, f"{name} of {r}")
        assert (moved.bk[0, r] == 0).all()


def test_gradients_do_not_depend_on_the_scale_of_depth_and_width():
    """g = L H dJ/dtheta is O(1): an SGD step moves heads alike at L H = 4 and at L H = 256."""
    problem, sizes = small_problem(), []
    for depth, H in ((2, 2), (16, 16)):
        run = run_from(plain_heads(depth, H), problem, SGD(1.0), 1)
        sizes.append(float((run.heads[1].packed - run.heads[0].packed).square().mean().sqrt()))
    assert 0.5 < sizes[0] / sizes[1] < 2


OPTIMIZERS = {
    "sgd": (
        SGD(0.02, momentum=0.8, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.8, weight_decay=0.1),
    ),
    "adamw": (
        ADAMW,
        lambda p: torch.optim.AdamW(p, lr=0.05, betas=(0.9, 0.99), eps=0.1, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@LOSSES
@CAUSAL
def test_training_is_torch_optim_on_a_network_with_autograd(optimizer, loss, causal):
    rule, make_optimizer = OPTIMIZERS[optimizer]
    problem = problem_with(loss, causal=causal)
    start = plain_heads(3, 4, biases=("bq", "bv", "bo"))
    naive = NaiveNetwork(start, problem)
    run = run_from(start, problem, rule, 5)
    assert_to_rounding(run.loss[0], naive.train(make_optimizer, 5), ROUNDING)
    assert float(run.loss[0, 5]) < float(run.loss[0, 0])
    for r, layer in enumerate(naive.layers):
        for name, t in layer.items():
            assert_to_rounding(getattr(run.heads[5], name)[0, r], t.detach(), ROUNDING, name)


def test_a_layer_is_updated_after_its_costate_was_formed():
    """p_r uses theta before the update: one sweep on updated heads would give other gradients."""
    problem, start = small_problem(), plain_heads(3, 2)
    trained = run_from(start, problem, SGD(5.0), 1, record=(0,))
    assert torch.equal(trained.p[0], run_from(start, problem, SGD(5.0), 0).p[0])
