"""The two schemes in depth: their order, what they count, and how Picard refuses."""

import numpy as np
import pytest
import torch
from builders import normal, small_atoms, small_problem
from frozen_heads import DENSE, P_END, X0, fitted_order, frozen

from ipslimit import SGD
from ipslimit.solvers.grid import DepthGrid
from ipslimit.solvers.limit import LimitRun
from ipslimit.solvers.march import March
from ipslimit.solvers.on_grid import train_on_grid
from ipslimit.solvers.picard import NotContracting, Picard, integrate
from ipslimit.solvers.refinement import Refinement
from ipslimit.solvers.tableau import RK4, Tableau

CPU = torch.device("cpu")
SCHEMES = {"march": March, "picard": Picard}
each_scheme = pytest.mark.parametrize("name", SCHEMES)

# Orders are fitted over these elements. The errors run from 1e-7 to 1e-13 of solutions of O(1): for
# the weak coupling chosen the next term of the expansion is a few percent at 16 elements, and
# rounding is not yet seen at 64. With entries of 1.5 instead of 0.5 the window would have to start
# at 64: before that the errors fall like h^5, in the dense values most of all.
WINDOW = (16, 32, 64)
FINE = 256  # its own error is (1/4)^4 of that at 64 elements, 0.006 in the order fitted


def solve_frozen(scheme, elements, causal=False, **kwargs):
    system = frozen(DepthGrid.uniform(elements), causal, **kwargs)
    x = scheme.forward(system, X0)
    p, gradient = scheme.backward(system, x, P_END, True)
    return x, p, gradient.sums["attention"], system.cost


@pytest.mark.parametrize("causal", [False, True])
@each_scheme
def test_order_four_on_frozen_heads(name, causal):
    fine_x, fine_p, fine_gradient, _ = solve_frozen(March(), FINE, causal)
    errors = {key: [] for key in ("x", "p", "x dense", "p dense", "gradient")}
    for elements in WINDOW:
        x, p, gradient, _ = solve_frozen(SCHEMES[name](), elements, causal)
        stride = FINE // elements
        errors["x"].append((x.edges - fine_x.edges[::stride]).abs().max())
        errors["p"].append((p.edges - fine_p.edges[::stride]).abs().max())
        errors["x dense"].append((x(DENSE) - fine_x(DENSE)).abs().max())
        errors["p dense"].append((p(DENSE) - fine_p(DENSE)).abs().max())
        errors["gradient"].append((gradient - fine_gradient[::stride]).abs().max())
    orders = {key: fitted_order(values, WINDOW) for key, values in errors.items()}
    # measured 3.98 to 4.10; 0.2 tells order 4 from its neighbours with room for the next term
    assert all(abs(order - 4) < 0.2 for order in orders.values()), orders


def train(problem, scheme, elements, steps=4, record=(0, 2, 4)):
    cost = {"field": 0, "vjp": 0}
    return train_on_grid(
        problem, SGD(lr=0.3), steps, record, DepthGrid.uniform(elements), scheme, cost, CPU
    )


@each_scheme
def test_order_four_through_training_by_sgd(name):
    # step 0 has constant heads; later heads vary with depth, but SGD keeps them smooth
    problem = small_problem(small_atoms(scale=0.5))
    fine = train(problem, Picard(), FINE)
    errors = {}
    for elements in WINDOW:
        run = train(problem, SCHEMES[name](), elements)
        for k in run.x:
            for variable in ("x", "p"):
                difference = getattr(run, variable)[k](DENSE) - getattr(fine, variable)[k](DENSE)
                errors.setdefault((variable, k), []).append(difference.abs().max())
        for k in (2, 4):
            own, other = (solution.units[k]["attention"].packed for solution in (run, fine))
            difference = own - other[:: FINE // elements]
            errors.setdefault(("heads", k), []).append(difference.abs().max())
        errors.setdefault("loss", []).append((run.loss - fine.loss)[1:].abs().max())
    orders = {key: fitted_order(values, WINDOW) for key, values in errors.items()}
    # measured 3.97 to 4.02
    assert all(abs(order - 4) < 0.2 for order in orders.values()), orders


def test_order_four_of_heads_between_nodes():
    # The quartic through five nodes has an error of h^5 next to the heads' own of h^4: it leads on
    # coarse grids, below 32 elements at step 2 (orders 4.9, then 4.06, 4.01), and at later steps,
    # whose heads have sharper features, down to 1e-12. So step 2 on finer grids tells the order.
    problem, window = small_problem(small_atoms(scale=0.5)), (32, 64, 128)

    def heads(elements):
        solution = train(problem, Picard(), elements, steps=2, record=(2,))
        history = [Refinement(solution.grid, 0.0, torch.zeros(elements), True, 0.0)]
        return LimitRun(solution, solution, "converged", "", history, {}).heads(2, DENSE).packed

    fine = heads(512)
    order = fitted_order([(heads(n) - fine).abs().max() for n in window], window)
    assert abs(order - 4) < 0.2


# Kutta's scheme of order 3, whose last stage is made of two others, and the midpoint rule
KUTTA = Tableau(c=(0, 1, 2), a=((), (0.5,), (-1.0, 2.0)), b=(1, 4, 1), divisor=6)
MIDDLE = Tableau(c=(0, 1), a=((), (0.5,)), b=(0, 1), divisor=1)


@pytest.mark.parametrize("tableau, order", [(RK4, 4), (KUTTA, 3), (MIDDLE, 2)])
def test_tableaus_meet_the_conditions_of_their_order(tableau, order):
    c = np.array(tableau.c) / 2
    b = np.array(tableau.b) / tableau.divisor
    a = np.zeros((len(c), len(c)))
    for row, weights in zip(a, tableau.a, strict=True):
        row[: len(weights)] = weights
    assert a.sum(1) == pytest.approx(c)
    conditions = {  # Butcher's, one a rooted tree
        1: [(b.sum(), 1)],
        2: [(b @ c, 1 / 2)],
        3: [(b @ c**2, 1 / 3), (b @ a @ c, 1 / 6)],
        4: [(b @ c**3, 1 / 4), (b @ (c * (a @ c)), 1 / 8), (b @ a @ c**2, 1 / 12)],
        5: [(b @ c**4, 1 / 5)],
    }
    conditions[4].append((b @ a @ a @ c, 1 / 24))
    met = {n: all(x == pytest.approx(y) for x, y in pairs) for n, pairs in conditions.items()}
    assert all(met[n] for n in range(1, order + 1)) and not met[order + 1]


@pytest.mark.parametrize("tableau, order", [(KUTTA, 3), (MIDDLE, 2)])
@pytest.mark.parametrize("path", ["eager", "fused"])
def test_the_march_follows_whatever_the_tableau_says(path, tableau, order, monkeypatch):
    fine_x, fine_p, _, _ = solve_frozen(March(), FINE)
    monkeypatch.setenv("IPSLIMIT_KERNEL", path)
    for module in ("march", "march_compiled"):
        monkeypatch.setattr(f"ipslimit.solvers.{module}.RK4", tableau)
    errors = {"x": [], "p": []}
    for elements in WINDOW:
        x, p, _, cost = solve_frozen(March(), elements)
        assert cost["field"] == len(tableau.b) * elements + 1
        errors["x"].append((x.edges - fine_x.edges[:: FINE // elements]).abs().max())
        errors["p"].append((p.edges - fine_p.edges[:: FINE // elements]).abs().max())
    orders = {key: fitted_order(values, WINDOW) for key, values in errors.items()}
    assert all(abs(found - order) < 0.2 for found in orders.values()), orders


@pytest.mark.parametrize("elements", [2, 5])
def test_march_evaluates_four_times_an_element(elements):
    system = frozen(DepthGrid.uniform(elements))
    x = March().forward(system, X0)
    assert system.cost == {"field": 4 * elements + 1, "vjp": 0}
    March().backward(system, x, P_END, False)
    assert system.cost == {"field": 4 * elements + 1, "vjp": 4 * elements + 1}
    system.cost["vjp"] = 0
    March().backward(system, x, P_END, True)  # the head gradient at the middles comes on top
    assert system.cost["vjp"] == 5 * elements + 1


def test_picard_counts_every_node_of_every_sweep():
    elements = 6
    system = frozen(DepthGrid.uniform(elements))
    nodes = 2 * elements + 1
    x = Picard().forward(system, X0)
    sweeps, rest = divmod(system.cost["field"], nodes)
    assert rest == 0 and 5 < sweeps < 30
    Picard().backward(system, x, P_END, True)
    assert system.cost["vjp"] % nodes == 0


def test_picard_starts_from_the_guess():
    system = frozen(DepthGrid.uniform(6))
    x = Picard().forward(system, X0)
    cold, system.cost["field"] = system.cost["field"], 0
    warm = Picard().forward(system, X0, x)
    assert system.cost["field"] < cold
    # both have settled to 20 units of rounding of numbers up to 3
    assert (warm.values - x.values).abs().max() < 3e-14


def test_march_and_picard_agree_far_from_weak_coupling():
    # one token attends to itself only, a linear field: heads can be three times larger here than
    # in the other tests
    x0, p_end = 5 * normal(3, 1, 3), normal(3, 1, 3)
    system = frozen(DepthGrid.uniform(256), size=1.5)
    answers = []
    for scheme in (March(), Picard()):
        x = scheme.forward(system, x0)
        p, gradient = scheme.backward(system, x, p_end, True)
        answers.append((x.edges, p.edges, gradient.sums["attention"]))
    for a, b in zip(*answers):
        # h^4 = 2e-10 times a constant of O(1)
        assert (a - b).abs().max() < 1e-8 * a.abs().max()


@each_scheme
def test_zero_heads_leave_x_and_p_where_they_are(name):
    system = frozen(DepthGrid.uniform(4), size=0.0)
    x = SCHEMES[name]().forward(system, X0)
    p, _ = SCHEMES[name]().backward(system, x, P_END, False)
    # dense weights of values sum to 1 up to rounding
    assert (x(DENSE) - X0).abs().max() < 1e-14 and (p(DENSE) - P_END).abs().max() < 1e-14


def test_integrate_is_exact_for_parabolas_and_at_edges_for_cubics():
    grid = DepthGrid((0.0, 0.3, 0.4, 1.0))
    s = grid.nodes[:, None, None, None]
    for degree in range(4):
        error = integrate(grid, s**degree) - s ** (degree + 1) / (degree + 1)
        exact = error if degree < 3 else error[0::2]
        assert exact.abs().max() < 1e-15  # rounding of numbers up to 1
    assert error[1::2].abs().max() > 1e-6  # the middles of a cubic are not exact, nor need be


def test_picard_that_does_not_settle_names_the_other_method():
    with pytest.raises(NotContracting, match=r"2 sweeps\. Use method='march'"):
        Picard(max_sweeps=2).forward(frozen(DepthGrid.uniform(4)), X0)


@pytest.mark.parametrize("size, elements", [(2.0, 1024), (3.0, 64)])
def test_picard_settles_at_rounding(size, elements):
    # iterations that have converged keep changing P by 1e-14 of its size here, over 20 units of
    # rounding: that is no failure to contract
    system = frozen(DepthGrid.uniform(elements), causal=True, size=size)
    back, _ = Picard().backward(system, Picard().forward(system, X0), P_END, False)
    assert back.finite


@each_scheme
def test_non_finite_trajectories_are_returned_for_the_caller_to_flag(name):
    system = frozen(DepthGrid.uniform(3), size=1e160)
    assert not SCHEMES[name]().forward(system, X0).finite


@each_scheme
def test_schemes_keep_float32(name):
    system = frozen(DepthGrid.uniform(4))
    system.branch = system.branch.map(torch.Tensor.float)
    x = SCHEMES[name]().forward(system, X0.float())
    p, gradient = SCHEMES[name]().backward(system, x, P_END.float(), True)
    assert x(DENSE).dtype == p(DENSE).dtype == gradient.sums["attention"].dtype == torch.float32
