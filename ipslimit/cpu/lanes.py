"""Numbers for LANES heads at once, as one value in compiled code.

A `Lanes` value holds one number per head of a block of LANES heads and lives in a vector
register (LLVM's <LANES x float> or <LANES x double>, which LLVM splits where registers are
narrower). Code written with it reads like code for a single head. Nothing here is left to
fast-math: every fused multiply-add is asked for, sums keep the order they are written in, and
NaN goes through.

All vectors sit in one flat scratch array, addressed by element offsets.
"""

from __future__ import annotations

import functools
import operator

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

from .cost import LANES, REGISTER_BYTES

# numpy integers: numba compiles a function again for every literal int it is called with
WIDTH, ZERO, ONE = np.intp(LANES), np.intp(0), np.intp(1)

_INDEX = ir.IntType(32)


class Lanes(types.Type):
    """The numba type of LANES numbers of one floating-point type."""

    def __init__(self, dtype):
        self.dtype = dtype
        super().__init__(name=f"Lanes({dtype})")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        element = dmm.lookup(fe_type.dtype).get_value_type()
        super().__init__(dmm, fe_type, ir.VectorType(element, LANES))


def element_address(context, builder, array_type, array, offset):
    """Pointer to an element of a C-contiguous array, counted from its first one."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [offset])


def _vector_type(context, dtype):
    return ir.VectorType(context.get_value_type(dtype), LANES)


def splat(builder, value, lanes=LANES):
    vector = ir.VectorType(value.type, lanes)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, _INDEX(0))
    zeros = ir.Constant(ir.VectorType(_INDEX, lanes), [0] * lanes)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


def splat_constant(vector, value):
    return ir.Constant(vector, [value] * vector.count)


def _load(context, builder, array_type, array, offset):
    vector = _vector_type(context, array_type.dtype)
    pointer = element_address(context, builder, array_type, array, offset)
    pointer = builder.bitcast(pointer, vector.as_pointer())
    return builder.load(pointer, align=array_type.dtype.bitwidth // 8)


def _store(context, builder, array_type, array, offset, value):
    pointer = element_address(context, builder, array_type, array, offset)
    pointer = builder.bitcast(pointer, value.type.as_pointer())
    builder.store(value, pointer, align=array_type.dtype.bitwidth // 8)


def _call(builder, name, result, *arguments):
    """Call an LLVM intrinsic function."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, arguments)


def _suffix(vector):
    return f"v{vector.count}{'f32' if vector.element == ir.FloatType() else 'f64'}"


def absolute(builder, value):
    return _call(builder, f"llvm.fabs.{_suffix(value.type)}", value.type, value)


def multiply_add(builder, a, b, c):
    # fmuladd, not fma: where the machine has no fused instruction it is a multiply and an add
    return _call(builder, f"llvm.fmuladd.{_suffix(a.type)}", a.type, a, b, c)


@intrinsic
def load(typingctx, array, offset):
    """The LANES elements from `offset` on."""

    def codegen(context, builder, signature, args):
        return _load(context, builder, signature.args[0], *args)

    return Lanes(array.dtype)(array, types.intp), codegen


@intrinsic
def store(typingctx, array, offset, value):
    """Write a value to the LANES elements from `offset` on."""

    def codegen(context, builder, signature, args):
        _store(context, builder, signature.args[0], *args)
        return context.get_dummy_value()

    return types.void(array, types.intp, value), codegen


def _mask(builder, count):
    counts = splat(builder, count)
    numbers = ir.Constant(counts.type, list(range(LANES)))
    return builder.icmp_signed("<", numbers, counts)


@intrinsic
def load_some(typingctx, array, offset, count):
    """The first `count` elements from `offset` on, zeros after them; reads nothing beyond."""

    def codegen(context, builder, signature, args):
        array, offset, count = args
        vector = _vector_type(context, signature.args[0].dtype)
        pointer = element_address(context, builder, signature.args[0], array, offset)
        pointer = builder.bitcast(pointer, vector.as_pointer())
        align = _INDEX(signature.args[0].dtype.bitwidth // 8)
        zero = splat_constant(vector, 0.0)
        return _call(
            builder,
            f"llvm.masked.load.{_suffix(vector)}.p0",
            vector,
            pointer,
            align,
            _mask(builder, count),
            zero,
        )

    return Lanes(array.dtype)(array, types.intp, types.intp), codegen


@intrinsic
def store_some(typingctx, array, offset, count, value):
    """Write the first `count` elements only."""

    def codegen(context, builder, signature, args):
        array, offset, count, value = args
        pointer = element_address(context, builder, signature.args[0], array, offset)
        pointer = builder.bitcast(pointer, value.type.as_pointer())
        align = _INDEX(signature.args[0].dtype.bitwidth // 8)
        _call(
            builder,
            f"llvm.masked.store.{_suffix(value.type)}.p0",
            ir.VoidType(),
            value,
            pointer,
            align,
            _mask(builder, count),
        )
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, value), codegen


@intrinsic
def number(typingctx, array, offset):
    """One element of an array of any shape, counted from its first one."""

    def codegen(context, builder, signature, args):
        return builder.load(element_address(context, builder, signature.args[0], *args))

    return array.dtype(array, types.intp), codegen


@intrinsic
def set_number(typingctx, array, offset, value):
    """Write one element of an array of any shape, counted from its first one."""

    def codegen(context, builder, signature, args):
        array, offset, value = args
        builder.store(value, element_address(context, builder, signature.args[0], array, offset))
        return context.get_dummy_value()

    return types.void(array, types.intp, array.dtype), codegen


@intrinsic
def spread(typingctx, array, offset):
    """One element, the same in all lanes."""

    def codegen(context, builder, signature, args):
        return splat(
            builder, builder.load(element_address(context, builder, signature.args[0], *args))
        )

    return Lanes(array.dtype)(array, types.intp), codegen


@intrinsic
def constant(typingctx, array, value):
    """A number in all lanes, in the precision of `array`."""

    def codegen(context, builder, signature, args):
        number = context.cast(builder, args[1], types.float64, signature.args[0].dtype)
        return splat(builder, number)

    return Lanes(array.dtype)(array, types.float64), codegen


@intrinsic
def fma(typingctx, a, b, c):
    """a b + c, rounded once where the machine can."""
    return a(a, a, a), lambda context, builder, signature, args: multiply_add(builder, *args)


@intrinsic
def maximum(typingctx, a, b):
    """The larger one, or b where either is NaN."""

    def codegen(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return a(a, a), codegen


@intrinsic
def sum_lanes(typingctx, value):
    """Sum over the lanes, by halves."""

    def codegen(context, builder, signature, args):
        total, width = args[0], LANES
        while width > 1:
            width //= 2
            undefined = ir.Constant(total.type, ir.Undefined)
            low = ir.Constant(ir.VectorType(_INDEX, width), list(range(width)))
            high = ir.Constant(ir.VectorType(_INDEX, width), list(range(width, 2 * width)))
            low = builder.shuffle_vector(total, undefined, low)
            high = builder.shuffle_vector(total, undefined, high)
            total = builder.fadd(low, high)
        return builder.extract_element(total, _INDEX(0))

    return value.dtype(value), codegen


@intrinsic
def register_width(typingctx, array):
    """How many of an array's numbers REGISTER_BYTES hold: a multiple of LANES."""
    width = REGISTER_BYTES * 8 // array.dtype.bitwidth
    return types.intp(array), lambda context, builder, signature, args: ir.IntType(64)(width)


@intrinsic
def sum_registers(typingctx, array, offset):
    """Lanes of the sums of LANES registers that follow each other, each over its numbers."""

    def codegen(context, builder, signature, args):
        kind, (array, offset) = signature.args[0], args
        width = REGISTER_BYTES * 8 // kind.dtype.bitwidth
        totals = []
        for start in range(0, LANES * width, width):
            parts = [
                _load(context, builder, kind, array, builder.add(offset, offset.type(start + i)))
                for i in range(0, width, LANES)
            ]
            totals.append(functools.reduce(builder.fadd, parts))
        # neighbours in a lane are added, then pairs of these, then halves
        for size in (1 << i for i in range(LANES.bit_length() - 1)):
            totals = [
                _add_across(builder, a, b, size)
                for a, b in zip(totals[::2], totals[1::2], strict=True)
            ]
        return totals[0]

    return Lanes(array.dtype)(array, types.intp), codegen


def _add_across(builder, a, b, size):
    """Runs of `size` lanes added to those beside them: of a, then of b, in turn."""
    shares = []
    for first in (0, size):
        lanes = [
            source + pair + first + i
            for pair in range(0, LANES, 2 * size)
            for source in (0, LANES)
            for i in range(size)
        ]
        shares.append(
            builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_INDEX, LANES), lanes))
        )
    return builder.fadd(*shares)


def _define_operator(function, instruction):
    """The arithmetic operator of two Lanes as one LLVM instruction."""

    @infer_global(function)
    class Signature(AbstractTemplate):
        def generic(self, args, keywords):
            if len(args) == 2 and isinstance(args[0], Lanes) and args[0] == args[1]:
                return signature(args[0], *args)
            return None

    @lower_builtin(function, Lanes, Lanes)
    def apply(context, builder, kind, args):
        return getattr(builder, instruction)(*args)


for _function, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _define_operator(_function, _instruction)


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
