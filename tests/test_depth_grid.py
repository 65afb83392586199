"""Depth grids, the functions on them, and the interpolation between their nodes."""

import pytest
import torch
from builders import F64, normal
from hypothesis import given
from hypothesis import strategies as st

from ipslimit.solvers.grid import DepthGrid, Trajectory, between_nodes, hermite_weights, lagrange

GRIDS = [DepthGrid.uniform(2), DepthGrid.uniform(7), DepthGrid((0.0, 0.1, 0.15, 0.5, 1.0))]
DENSE = torch.linspace(0, 1, 173, dtype=F64)


def polynomial(coefficients, s):
    return sum(c * s[:, None, None, None] ** i for i, c in enumerate(coefficients))


def derivative(coefficients, s):
    return polynomial([i * c for i, c in enumerate(coefficients)][1:], s)


def on_grid(grid, function, slope):
    edges = torch.tensor(grid.edges, dtype=F64)
    return Trajectory(grid, function(edges), slope(edges))


@pytest.mark.parametrize("grid", GRIDS)
def test_nodes_are_the_edges_and_the_middles(grid):
    edges = torch.tensor(grid.edges, dtype=F64)
    assert grid.nodes[0::2].equal(edges)
    assert grid.nodes[1::2].equal((edges[1:] + edges[:-1]) / 2)
    assert grid.widths == [b - a for a, b in zip(grid.edges, grid.edges[1:])]


@given(st.lists(st.lists(st.booleans(), min_size=64, max_size=64), max_size=6), st.integers(2, 6))
def test_refined_grids_share_their_edges_to_the_last_bit(rounds, elements):
    grid = DepthGrid.uniform(elements)
    for marks in rounds:
        marked = [marks[i % len(marks)] for i in range(grid.elements)]
        fine = grid.split(marked)
        assert set(grid.edges) <= set(fine.edges)
        assert fine.elements == grid.elements + sum(marked)
        assert min(fine.widths) > 0
        assert (fine.edges[0], fine.edges[-1]) == (0.0, 1.0)
        grid = fine


@pytest.mark.parametrize("grid", GRIDS)
def test_nodes_of_a_grid_are_edges_of_its_halving(grid):
    assert grid.halved().edges == tuple(grid.nodes.tolist())


@pytest.mark.parametrize("grid", GRIDS)
def test_locate_finds_the_element_that_holds_a_depth(grid):
    edges = torch.tensor(grid.edges, dtype=F64)
    element = grid.locate(DENSE)
    assert bool(((edges[element] <= DENSE) & (edges[element + 1] >= DENSE)).all())
    # both ends belong to an element, an inner edge to the one that starts there
    assert grid.locate(edges).tolist() == [*range(grid.elements), grid.elements - 1]


@pytest.mark.parametrize("grid", GRIDS)
def test_dense_values_reproduce_polynomials_of_degree_five(grid):
    c = normal(6, 2, 3, 2)
    trajectory = on_grid(grid, lambda s: polynomial(c, s), lambda s: derivative(c, s))
    # rounding of O(10) values and slopes; weights are O(1) inside a stencil, whose elements here
    # differ in width up to 7 times
    assert (trajectory(DENSE) - polynomial(c, DENSE)).abs().max() < 1e-12
    assert (trajectory.values - polynomial(c, grid.nodes)).abs().max() < 1e-12


@pytest.mark.parametrize("grid", GRIDS)
def test_dense_values_pass_through_the_edges(grid):
    trajectory = Trajectory(
        grid, normal(grid.elements + 1, 1, 2, 2), normal(grid.elements + 1, 1, 2, 2, seed=1)
    )
    edges = torch.tensor(grid.edges, dtype=F64)
    # the weights are exactly 0 and 1 there
    assert trajectory(edges).equal(trajectory.edges)
    assert trajectory.values[0::2].equal(trajectory.edges)


def test_dense_values_have_order_six():
    def error(elements):
        def sine(s):
            return torch.sin(5 * s)[:, None, None, None]

        def slope(s):
            return 5 * torch.cos(5 * s)[:, None, None, None]

        trajectory = on_grid(DepthGrid.uniform(elements), sine, slope)
        return float((trajectory(DENSE) - sine(DENSE)).abs().max())

    # 16 to 64 elements: h = 5/16 is asymptotic for sin(5 s), and the error, 1e-12 at 64, is still
    # far above rounding; two doublings
    order = torch.log2(torch.tensor(error(16) / error(64))) / 2
    assert abs(order - 6) < 0.2


def test_values_between_nodes_have_order_five_also_at_extrema():
    def sines(s):
        return torch.stack([torch.sin(w * s + 0.3) for w in (2.0, 5.0, 8.0)], dim=-1)[:, None]

    def error(elements):
        grid = DepthGrid.uniform(elements)
        return float((between_nodes(grid, sines(grid.nodes), DENSE) - sines(DENSE)).abs().max())

    # 32 to 128 elements of a sine of 8 s: 1e-10 at 128, above rounding; two doublings
    order = torch.log2(torch.tensor(error(32) / error(128))) / 2
    assert abs(order - 5) < 0.2


@given(st.lists(st.integers(3, 7), min_size=3, max_size=6), st.integers(0, 10**6))
def test_values_between_nodes_never_overshoot_steps(plateaus, seed):
    heights = torch.cat([normal(1, seed=seed + i).expand(n) for i, n in enumerate(plateaus)])
    heights = heights[: 2 * ((len(heights) - 1) // 2) + 1]
    marks = normal(len(heights) // 2, seed=seed) > 0
    coarse = DepthGrid((0.0, *torch.cumsum(torch.where(marks, 1.0, 8.0).double(), 0).tolist()))
    grid = DepthGrid(tuple(edge / coarse.edges[-1] for edge in coarse.edges))
    found = between_nodes(grid, heights[:, None, None], DENSE).flatten()
    left = torch.searchsorted(grid.nodes[1:-1].contiguous(), DENSE, right=True)
    low, high = torch.minimum(heights[left], heights[left + 1]), heights[left]
    high = torch.maximum(high, heights[left + 1])
    assert bool(((found >= low) & (found <= high)).all())


@pytest.mark.parametrize("grid", GRIDS)
def test_values_between_nodes_are_those_of_the_nodes_there(grid):
    values = normal(len(grid.nodes), 2, 3)
    assert between_nodes(grid, values, grid.nodes).equal(values)


def test_interpolation_weights_sum_to_one_and_reproduce_their_degree():
    t = torch.tensor([[-0.7, 0.2], [0.1, 0.5], [0.4, -1.0]], dtype=F64)
    value, slope = hermite_weights(t)
    for degree in range(6):
        powers, slopes = t**degree, degree * t ** max(degree - 1, 0)
        exact = 1.0 if degree == 0 else 0.0  # at t = 0
        # rounding of weights up to O(10)
        assert ((value * powers + slope * slopes).sum(0) - exact).abs().max() < 1e-13
        if degree < 3:
            assert ((lagrange(t) * powers).sum(0) - exact).abs().max() < 1e-13


def test_a_trajectory_with_a_nan_is_not_finite():
    grid = DepthGrid.uniform(2)
    edges = torch.zeros(3, 1, 1, 1, dtype=F64)
    assert Trajectory(grid, edges, edges).finite
    broken = edges.clone()
    broken[1] = torch.nan
    assert not Trajectory(grid, broken, edges).finite


def test_a_trajectory_keeps_its_dtype():
    grid = DepthGrid.uniform(3)
    edges = normal(4, 1, 2, 2, dtype=torch.float32)
    trajectory = Trajectory(grid, edges, edges)
    assert trajectory(DENSE).dtype == trajectory.values.dtype == torch.float32
