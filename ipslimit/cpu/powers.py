"""2^t of vectors, which every exponential is made of, and polynomials."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .lanes import multiply_add, splat_constant

# Per type: the number whose addition rounds to whole numbers and adds the exponent's bias; the
# exponent whose field is 0; the bits of the mantissa; the polynomial for 2^r on |r| <= 1/2, highest
# power first: (2^r - 1)/r interpolated at Chebyshev points, relative error 5e-9 and 8e-18.
_EXP2 = {
    types.float32: (
        1.5 * 2.0**23 + 127.0,
        -127.0,
        23,
        (0.00015453163, 0.0013390863, 0.009618083, 0.05550357, 0.2402265, 0.6931472, 1.0),
    ),
    types.float64: (
        1.5 * 2.0**52 + 1023.0,
        -1023.0,
        52,
        (
            4.4549605981865186e-10,
            7.072585949269223e-09,
            1.0178062445845774e-07,
            1.321544258792169e-06,
            1.525273382983612e-05,
            0.0001540353044173605,
            0.0013333558146416936,
            0.009618129107606888,
            0.0555041086648216,
            0.24022650695910097,
            0.6931471805599453,
            1.0,
        ),
    ),
}


def split_exp2(builder, dtype, value):
    """(q, r, 2^n): 2^t = 2^n (1 + r q) for t <= 0; 2^n is 0 below the smallest exponent.

    t = n + r with n whole and |r| <= 1/2. Adding `magic` rounds t to n and leaves n plus the
    exponent's bias in the low bits of the sum, which shifted are the float 2^n itself. The sum
    and difference must not be simplified away, so no fast-math flag may ever be set here.
    """
    vector = value.type
    magic, lowest, shift, coefficients = _EXP2[dtype]
    floor = splat_constant(vector, lowest)
    # at `lowest` the exponent's field is 0, hence 2^n = 0; the order keeps NaN
    t = builder.select(builder.fcmp_ordered(">", floor, value), floor, value)
    shifted = builder.fadd(t, splat_constant(vector, magic))
    rest = builder.fsub(t, builder.fsub(shifted, splat_constant(vector, magic)))
    power = evaluate(builder, coefficients[:-1], rest)
    integer = ir.VectorType(ir.IntType(dtype.bitwidth), vector.count)
    bits = builder.shl(builder.bitcast(shifted, integer), splat_constant(integer, shift))
    return power, rest, builder.bitcast(bits, vector)


def evaluate(builder, coefficients, value):
    """A polynomial, by its coefficients from the highest power on."""
    total = splat_constant(value.type, coefficients[0])
    for coefficient in coefficients[1:]:
        total = multiply_add(builder, total, value, splat_constant(value.type, coefficient))
    return total


@intrinsic
def exp2(typingctx, value):
    """2^t for t <= 0: within 2 ulp; 0 for t below the smallest exponent; NaN for NaN."""

    def codegen(context, builder, signature, args):
        power, rest, scale = split_exp2(builder, signature.args[0].dtype, args[0])
        one = splat_constant(args[0].type, 1.0)
        return builder.fmul(multiply_add(builder, power, rest, one), scale)

    return value(value), codegen
