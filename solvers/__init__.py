"""The limit: the forward-backward McKean-Vlasov system in depth, trained by the optimizer's rule.

To be read in this order, in which each stands on those before it:

    grid          elements of depth and their nodes, functions of depth on them, interpolation
    scheme        the system at frozen heads, and what a scheme has to do with it
    tableau       the classical Runge-Kutta scheme, as data
    march         that scheme through depth;  march_compiled: the same for small problems
    unrolled      a march as data, and march_swept: by it in one launch on a card
    picard        all of depth at once, in place of the march: for cards
    adams         order 6 on the same nodes, for heads that are smooth in depth
    schemes       these three by their names
    meter         what it has cost, and how far it has come
    on_grid       training on one fixed grid
    refinement    two grids compared: the error in depth, and where to refine
    quadrature    the error of a sampled law's integral, and how many nodes it takes
    token_quadrature  the error of the nodes of a law of tokens, of limits that are solved
    limit_memory  what all this takes of the memory, and what is free;  limit_work: of time
    limit_flow    where the limit carries points that are no tokens
    limit         `solve_limit`: refines until the errors are below what was asked for

`routes` stands aside: the same system at frozen heads by the solvers of others, which share nothing
with these but the field. `ipslimit check` holds a run against it.
"""

from .limit import LimitRun, solve_limit
from .token_quadrature import token_quadrature_error

__all__ = ["LimitRun", "solve_limit", "token_quadrature_error"]
