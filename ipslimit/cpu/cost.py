"""What a field costs on the compiled path, known without a compiler: heads in blocks of LANES."""

from __future__ import annotations

# 8 doubles fill an AVX-512 register and 8 floats an AVX2 one. On machines whose 512-bit
# instructions run at half rate 8 floats are as fast as 16, and fewer heads go to waste.
LANES = 8

# What a loop may take at once that computes several blocks side by side: one of doubles, two of
# floats.
REGISTER_BYTES = 64


def blocks_of(heads: int) -> int:
    """Blocks of LANES heads, the last of them perhaps not full."""
    return -(-heads // LANES)


def shared_lanes(heads: int, width: int) -> tuple[int, int]:
    """(heads, contexts) that fill a vector together: no head is missing in any vector."""
    share = 1
    while share < width and heads % (2 * share) == 0:
        share *= 2
    return share, width // share


def vector_operations(contexts: int, heads: int, tokens: int, d: int, m: int) -> int:
    """Vector operations of one seed's field, each on LANES heads."""
    a_token = 4 * m * d + tokens * (2 * m + 10)
    return contexts * blocks_of(heads) * tokens * a_token


def perceptrons_together(itemsize: int) -> int:
    """How many perceptrons the loops compute at once."""
    return REGISTER_BYTES // itemsize


# What one entry of an activation costs, such as an exponential and a quotient.
_ACTIVATION = 24


def perceptron_operations(contexts: int, units: int, tokens: int, layout) -> float:
    """As `vector_operations`, of perceptrons of a layout."""
    d, n = layout.d, layout.n
    matrices = 3 if "w_gate" in layout.slices else 2
    return float(contexts * blocks_of(units) * tokens * n * (matrices * d + _ACTIVATION))
