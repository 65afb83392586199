"""The limit: depth grids, the forward-backward McKean-Vlasov solver, and independent routes."""

from .limit import LimitRun, solve_limit

__all__ = ["LimitRun", "solve_limit"]
