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
from numba.np.arrayobj import populate_array

from .cost import LANES, REGISTER_BYTES

# numpy integers: numba compiles a function again for every literal int it is called with
WIDTH, ZERO, ONE = np.intp(LANES), np.intp(0), np.intp(1)

_INDEX = ir.IntType(32)


class Lanes(types.Type):
    """The numba type of so many numbers of one floating-point type: LANES, or a register's."""

    def __init__(self, dtype, count=LANES):
        self.dtype, self.count = dtype, count
        super().__init__(name=f"Lanes({dtype}, {count})")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        element = dmm.lookup(fe_type.dtype).get_value_type()
        super().__init__(dmm, fe_type, ir.VectorType(element, fe_type.count))


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


def _load(context, builder, array_type, array, offset, count=LANES):
    vector = ir.VectorType(context.get_value_type(array_type.dtype), count)
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
def load_like(typingctx, array, offset, like):
    """The elements from `offset` on, as many as the vector `like` has."""

    def codegen(context, builder, signature, args):
        return _load(context, builder, signature.args[0], *args[:2], like.count)

    return like(array, types.intp, like), codegen


@intrinsic
def width_of(typingctx, like):
    """How many numbers a vector has."""
    return types.intp(like), lambda *_: ir.IntType(64)(like.count)


@intrinsic
def copy_four(typingctx, array, into, offset):
    """Copy the four elements from `offset` on to those from `into` on."""

    def codegen(context, builder, signature, args):
        kind, (array, into, offset) = signature.args[0], args
        _store(context, builder, kind, array, into, _load(context, builder, kind, array, offset, 4))
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp), codegen


@intrinsic
def store(typingctx, array, offset, value):
    """Write a value to the elements from `offset` on."""

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
def matrix_in(typingctx, array, start, rows, columns):
    """The matrix (rows, columns) in a flat array from `start` on: a view, which owns nothing."""
    kind = types.Array(array.dtype, 2, "C")

    def codegen(context, builder, signature, args):
        data, start, rows, columns = args
        itemsize = context.get_constant(types.intp, kind.dtype.bitwidth // 8)
        matrix = context.make_array(kind)(context, builder)
        populate_array(
            matrix,
            data=element_address(context, builder, signature.args[0], data, start),
            shape=(rows, columns),
            strides=(builder.mul(columns, itemsize), itemsize),
            itemsize=itemsize,
            meminfo=None,
        )
        return matrix._getvalue()

    return kind(array, *[types.intp] * 3), codegen


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
def zeros_of_register(typingctx, array):
    """Zeros, as many of an array's numbers as fill a register: see `register_width`."""
    kind = Lanes(array.dtype, REGISTER_BYTES * 8 // array.dtype.bitwidth)

    def codegen(context, builder, signature, args):
        return splat_constant(context.get_value_type(kind), 0.0)

    return kind(array), codegen


@intrinsic
def constant_like(typingctx, like, value):
    """A number in all lanes of a vector as `like`."""

    def codegen(context, builder, signature, args):
        number = context.cast(builder, args[1], types.float64, like.dtype)
        return splat(builder, number, like.count)

    return like(like, types.float64), codegen


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
