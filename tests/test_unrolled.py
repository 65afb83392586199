"""A march as data does what the scheme's own loop does."""

import pytest
import torch

from ipslimit.solvers.adams import Adams
from ipslimit.solvers.grid import DepthGrid
from ipslimit.solvers.march import March
from ipslimit.solvers.unrolled import unrolled

GRID = DepthGrid((0.0, 0.1, 0.35, 0.5, 0.8, 1.0))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("kind", [March, Adams])
def test_its_steps_give_the_values_and_slopes_of_the_loop(kind, backward):
    scheme, s = kind(), GRID.nodes
    slope = lambda y, node, final: torch.sin(3 * y) + s[node]  # noqa: E731
    values = torch.zeros(scheme.kept(GRID), 2, dtype=torch.float64)
    slopes = torch.zeros_like(values)
    steps = unrolled(kind, GRID, backward)
    values[steps.first] = torch.tensor([0.2, -0.4])
    room = torch.full((steps.slots, 2), torch.nan, dtype=torch.float64)
    room[steps.first] = values[steps.first]
    scheme._go(GRID, backward, values, slopes, slope)
    asked = []
    for into, node, place, point, terms in steps.steps:
        room[into] = sum(weight * room[slot] for slot, weight in terms)
        if node >= 0:
            room[place] = slope(room[into], node, point >= 0)
            asked.append(point)
    points = steps.points
    torch.testing.assert_close(room[:points], values, rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(room[points : 2 * points], slopes, rtol=1e-14, atol=1e-15)
    assert sorted(point for point in asked if point >= 0) == list(range(points))
    assert len(asked) == steps.evaluations == scheme.evaluations(GRID.elements)[0]
    assert unrolled(kind, DepthGrid(GRID.edges), backward) is steps
