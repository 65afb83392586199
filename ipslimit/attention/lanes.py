"""Numbers for _W heads at once, as one value in compiled code.

A `Lanes` value holds one number per head of a block of _W heads and lives in a vector
register (LLVM's <_W x float> or <_W x double>, which LLVM splits where registers are
narrower). Code written with it reads like code for a single head. Nothing here is left to
fast-math: every fused multiply-add is asked for, sums keep the order they are written in, and
NaN goes through.

All vectors sit in one flat scratch array, addressed by element offsets.
"""

from __future__ import annotations

import contextlib
import operator

# 8 doubles fill an AVX-512 register and 8 floats an AVX2 one. On machines whose 512-bit
# instructions run at half rate 8 floats are as fast as 16, and fewer heads go to waste.

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

_W = 8

# numpy integers: numba compiles a function again for every literal int it is called with
WIDTH, ZERO, ONE = np.intp(_W), np.intp(0), np.intp(1)

_INDEX = ir.IntType(32)


class Lanes(types.Type):
    """The numba type of _W numbers of one floating-point type."""

    def __init__(self, dtype):
        self.dtype = dtype
        super().__init__(name=f"Lanes({dtype})")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        element = dmm.lookup(fe_type.dtype).get_value_type()
        super().__init__(dmm, fe_type, ir.VectorType(element, _W))


def _address(context, builder, array_type, array, offset):
    """Pointer to an element of a C-contiguous array, counted from its first one."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [offset])


def _vector_type(context, dtype):
    return ir.VectorType(context.get_value_type(dtype), _W)


def _splat(builder, value):
    vector = ir.VectorType(value.type, _W)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, _INDEX(0))
    zeros = ir.Constant(ir.VectorType(_INDEX, _W), [0] * _W)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


def _constant(vector, value):
    return ir.Constant(vector, [value] * _W)


def _load(context, builder, array_type, array, offset):
    vector = _vector_type(context, array_type.dtype)
    pointer = _address(context, builder, array_type, array, offset)
    pointer = builder.bitcast(pointer, vector.as_pointer())
    return builder.load(pointer, align=array_type.dtype.bitwidth // 8)


def _store(context, builder, array_type, array, offset, value):
    pointer = _address(context, builder, array_type, array, offset)
    pointer = builder.bitcast(pointer, value.type.as_pointer())
    builder.store(value, pointer, align=array_type.dtype.bitwidth // 8)


def _call(builder, name, result, *arguments):
    """Call an LLVM intrinsic function."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, arguments)


def _suffix(vector):
    return f"v{_W}{'f32' if vector.element == ir.FloatType() else 'f64'}"


def _fma(builder, a, b, c):
    # fmuladd, not fma: where the machine has no fused instruction it is a multiply and an add
    return _call(builder, f"llvm.fmuladd.{_suffix(a.type)}", a.type, a, b, c)


@intrinsic
def load(typingctx, array, offset):
    """The _W elements from `offset` on."""

    def codegen(context, builder, signature, args):
        return _load(context, builder, signature.args[0], *args)

    return Lanes(array.dtype)(array, types.intp), codegen


@intrinsic
def store(typingctx, array, offset, value):
    """Write a value to the _W elements from `offset` on."""

    def codegen(context, builder, signature, args):
        _store(context, builder, signature.args[0], *args)
        return context.get_dummy_value()

    return types.void(array, types.intp, value), codegen


def _mask(builder, count):
    counts = _splat(builder, count)
    numbers = ir.Constant(counts.type, list(range(_W)))
    return builder.icmp_signed("<", numbers, counts)


@intrinsic
def load_some(typingctx, array, offset, count):
    """The first `count` elements from `offset` on, zeros after them; reads nothing beyond."""

    def codegen(context, builder, signature, args):
        array, offset, count = args
        vector = _vector_type(context, signature.args[0].dtype)
        pointer = _address(context, builder, signature.args[0], array, offset)
        pointer = builder.bitcast(pointer, vector.as_pointer())
        align = _INDEX(signature.args[0].dtype.bitwidth // 8)
        zero = _constant(vector, 0.0)
        return _call(
            builder, f"llvm.masked.load.{_suffix(vector)}.p0", vector,
            pointer, align, _mask(builder, count), zero,
        )  # fmt: skip

    return Lanes(array.dtype)(array, types.intp, types.intp), codegen


@intrinsic
def store_some(typingctx, array, offset, count, value):
    """Write the first `count` elements only."""

    def codegen(context, builder, signature, args):
        array, offset, count, value = args
        pointer = _address(context, builder, signature.args[0], array, offset)
        pointer = builder.bitcast(pointer, value.type.as_pointer())
        align = _INDEX(signature.args[0].dtype.bitwidth // 8)
        _call(
            builder, f"llvm.masked.store.{_suffix(value.type)}.p0", ir.VoidType(),
            value, pointer, align, _mask(builder, count),
        )  # fmt: skip
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, value), codegen


@intrinsic
def number(typingctx, array, offset):
    """One element of an array of any shape, counted from its first one."""

    def codegen(context, builder, signature, args):
        return builder.load(_address(context, builder, signature.args[0], *args))

    return array.dtype(array, types.intp), codegen


@intrinsic
def set_number(typingctx, array, offset, value):
    """Write one element of an array of any shape, counted from its first one."""

    def codegen(context, builder, signature, args):
        array, offset, value = args
        builder.store(value, _address(context, builder, signature.args[0], array, offset))
        return context.get_dummy_value()

    return types.void(array, types.intp, array.dtype), codegen


@intrinsic
def spread(typingctx, array, offset):
    """One element, the same in all lanes."""

    def codegen(context, builder, signature, args):
        return _splat(builder, builder.load(_address(context, builder, signature.args[0], *args)))

    return Lanes(array.dtype)(array, types.intp), codegen


@intrinsic
def constant(typingctx, array, value):
    """A number in all lanes, in the precision of `array`."""

    def codegen(context, builder, signature, args):
        number = context.cast(builder, args[1], types.float64, signature.args[0].dtype)
        return _splat(builder, number)

    return Lanes(array.dtype)(array, types.float64), codegen


@intrinsic
def fma(typingctx, a, b, c):
    """a b + c, rounded once where the machine can."""
    return a(a, a, a), lambda context, builder, signature, args: _fma(builder, *args)


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
        total, width = args[0], _W
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


def _operator(function, instruction):
    @intrinsic
    def apply(typingctx, a, b):
        def codegen(context, builder, signature, args):
            return getattr(builder, instruction)(*args)

        return a(a, b), codegen

    @overload(function, inline="never")
    def implementation(a, b):
        if isinstance(a, Lanes) and isinstance(b, Lanes):
            return lambda a, b: apply(a, b)
        return None


for _function, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _operator(_function, _instruction)


# Per type: the number whose addition rounds to whole numbers and adds the exponent's bias; the
# exponent whose field is 0; the bits of the mantissa; the polynomial for 2^r on |r| <= 1/2, highest
# power first: (2^r - 1)/r interpolated at Chebyshev points, relative error 5e-9 and 8e-18.
_EXP2 = {
    types.float32: (
        1.5 * 2.0**23 + 127.0,
        -127.0,
        23,
        (
            0.00015453163, 0.0013390863, 0.009618083, 0.05550357, 0.2402265, 0.6931472, 1.0,
        ),
    ),
    types.float64: (
        1.5 * 2.0**52 + 1023.0,
        -1023.0,
        52,
        (
            4.4549605981865186e-10, 7.072585949269223e-09, 1.0178062445845774e-07,
            1.321544258792169e-06, 1.525273382983612e-05, 0.0001540353044173605,
            0.0013333558146416936, 0.009618129107606888, 0.0555041086648216,
            0.24022650695910097, 0.6931471805599453, 1.0,
        ),
    ),
}  # fmt: skip


@intrinsic
def exp2(typingctx, value):
    """2^t for t <= 0: within 2 ulp; 0 for t below the smallest exponent; NaN for NaN.

    t = n + r with n whole and |r| <= 1/2. Adding `magic` rounds t to n and leaves n plus the
    exponent's bias in the low bits of the sum, which shifted are the float 2^n itself. The sum
    and difference must not be simplified away, so no fast-math flag may ever be set here.
    """

    def codegen(context, builder, signature, args):
        vector = args[0].type
        magic, lowest, shift, coefficients = _EXP2[signature.args[0].dtype]
        floor = _constant(vector, lowest)
        # at `lowest` the exponent's field is 0, hence 2^n = 0; the order keeps NaN
        t = builder.select(builder.fcmp_ordered(">", floor, args[0]), floor, args[0])
        shifted = builder.fadd(t, _constant(vector, magic))
        rest = builder.fsub(t, builder.fsub(shifted, _constant(vector, magic)))
        power = _constant(vector, coefficients[0])
        for coefficient in coefficients[1:]:
            power = _fma(builder, power, rest, _constant(vector, coefficient))
        integer = ir.VectorType(ir.IntType(signature.args[0].dtype.bitwidth), _W)
        bits = builder.shl(builder.bitcast(shifted, integer), _constant(integer, shift))
        return builder.fmul(power, builder.bitcast(bits, vector))

    return value(value), codegen


@contextlib.contextmanager
def _rolled_loop(builder, count):
    """A loop over 0 .. count - 1 (count >= 1) that LLVM does not unroll: most are short."""
    module = builder.module
    disable = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
    label = module.add_metadata([disable, ir.MetaDataString(module, f"{len(module.metadata)}")])
    label.operands = (label, disable)  # refers to itself, as LLVM wants it, hence never shared
    body, end = (builder.append_basic_block(name) for name in ("body", "end"))
    entry = builder.block
    builder.branch(body)
    builder.position_at_end(body)
    index = builder.phi(count.type)
    index.add_incoming(count.type(0), entry)
    yield index
    following = builder.add(index, count.type(1), flags=("nsw", "nuw"))
    index.add_incoming(following, builder.block)
    again = builder.icmp_signed("<", following, count)
    builder.cbranch(again, body, end).set_metadata("llvm.loop", label)
    builder.position_at_end(end)


def _define_tile(module, element, rows, columns, scalar_left, contiguous):
    """The LLVM function of a register tile: `rows` by `columns` sums that stay in registers.

    out[i, j] = start[i, j] + sum_k left[i, k] right[k, j], with k running upwards. `contiguous`
    tells along which index neighbours in `right` are neighbours in memory ("column" or "inner",
    then also in left). It is a function of its own, never inlined, since in its callers the
    addresses alone would fill the registers.
    """
    suffix = f"{rows}x{columns}.{'scalar.' if scalar_left else ''}{contiguous}.{element}"
    name = f"ipslimit.tile.{suffix}.{_W}"
    if name in module.globals:
        return module.globals[name]
    number, pointer = ir.IntType(64), element.as_pointer()
    vector = ir.VectorType(element, _W)
    arguments = [
        number, pointer, number, pointer, number, number, pointer, number, number, pointer, number,
    ]  # fmt: skip
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), name)
    function.linkage = "linkonce_odr"
    function.attributes.add("noinline")
    function.attributes.add("nounwind")
    (
        inner, out, out_row, start, start_row, start_column, left, left_row, left_inner,
        right, right_stride,
    ) = function.args  # fmt: skip
    function.args[1].add_attribute("noalias")  # read only before the first write
    builder = ir.IRBuilder(function.append_basic_block())

    def address(base, *terms):
        offset = number(0)
        for count, stride in terms:
            count = number(count) if isinstance(count, int) else count
            stride = number(stride) if isinstance(stride, int) else stride
            offset = builder.add(offset, builder.mul(count, stride))
        return builder.gep(base, [offset])

    def vector_at(pointer):
        return builder.bitcast(pointer, vector.as_pointer())

    align = 4 if element == ir.FloatType() else 8
    cells = [(i, j) for i in range(rows) for j in range(columns)]
    sums = {}
    for i, j in cells:
        at = address(start, (i, start_row), (j, start_column))
        first = builder.load(vector_at(at), align=align)
        sums[i, j] = cgutils.alloca_once_value(builder, first)
    right_column, right_inner = (_W, right_stride) if contiguous == "column" else (right_stride, _W)
    if contiguous == "inner":
        left_inner = _W
    with _rolled_loop(builder, inner) as k:
        lefts, rights = [], []
        for i in range(rows):
            at = address(left, (i, left_row), (k, left_inner))
            if scalar_left:
                lefts.append(_splat(builder, builder.load(at)))
            else:
                lefts.append(builder.load(vector_at(at), align=align))
        for j in range(columns):
            at = address(right, (j, right_column), (k, right_inner))
            rights.append(builder.load(vector_at(at), align=align))
        for i, j in cells:
            total = _fma(builder, lefts[i], rights[j], builder.load(sums[i, j]))
            builder.store(total, sums[i, j])
    for i, j in cells:
        at = address(out, (i, out_row), (j, _W))
        builder.store(builder.load(sums[i, j]), vector_at(at), align=align)
    builder.ret_void()
    return function


def _tile(rows, columns, scalar_left, contiguous):
    """The numba face of a register tile."""

    @intrinsic
    def tile(typingctx, s, inner, out, start, left, right):
        def codegen(context, builder, signature, args):
            array, inner, *operands = args
            kind = signature.args[0]
            element = context.get_value_type(kind.dtype)
            function = _define_tile(builder.module, element, rows, columns, scalar_left, contiguous)

            def unpack(operand):
                offset, *strides = (
                    builder.extract_value(operand, n) for n in range(operand.type.count)
                )
                return [_address(context, builder, kind, array, offset), *strides]

            out, start, left, right = map(unpack, operands)
            right.pop(2 if contiguous == "column" else 1)
            builder.call(function, [inner, *out, *start, *left, *right])
            return context.get_dummy_value()

        return types.void(s, inner, out, start, left, right), codegen

    return tile


TALL, BROAD = 4, 4


def _product(scalar_left, contiguous):
    """A compiled matrix product over tiles, with smaller tiles at the edges."""
    big = _tile(TALL, BROAD, scalar_left, contiguous)
    tall = _tile(TALL, 1, scalar_left, contiguous)
    broad = _tile(1, BROAD, scalar_left, contiguous)
    small = _tile(1, 1, scalar_left, contiguous)

    @njit
    def multiply(s, shape, out, start, left, right):
        rows, columns, inner = shape
        for i in range(0, rows, TALL):
            full_rows = i + TALL <= rows
            for j in range(0, columns, BROAD):
                full_columns = j + BROAD <= columns
                o = (out[0] + i * out[1] + j * WIDTH, out[1])
                b = (start[0] + i * start[1] + j * start[2], start[1], start[2])
                x = (left[0] + i * left[1], left[1], left[2])
                y = (right[0] + j * right[2], right[1], right[2])
                if full_rows and full_columns:
                    big(s, inner, o, b, x, y)
                elif full_rows:
                    for n in range(columns - j):
                        tall(
                            s, inner, (o[0] + n * WIDTH, o[1]), (b[0] + n * b[2], b[1], b[2]),
                            x, (y[0] + n * y[2], y[1], y[2]),
                        )  # fmt: skip
                else:
                    for l in range(rows - i):
                        oo = o[0] + l * o[1]
                        bb = b[0] + l * b[1]
                        xx = (x[0] + l * x[1], x[1], x[2])
                        if full_columns:
                            broad(s, inner, (oo, o[1]), (bb, b[1], b[2]), xx, y)
                        else:
                            for n in range(columns - j):
                                small(
                                    s, inner, (oo + n * WIDTH, o[1]), (bb + n * b[2], b[1], b[2]),
                                    xx, (y[0] + n * y[2], y[1], y[2]),
                                )  # fmt: skip

    return multiply


# out[i, j] = start[i, j] + sum_k left[i, k] right[k, j] in every lane, all in the scratch array s.
# shape = (rows, columns, inner); out = (offset, row stride), its columns being WIDTH apart;
# start = (offset, row stride, column stride); left = (offset, row stride, inner stride);
# right = (offset, inner stride, column stride).
product = _product(False, "column")  # right's column stride is WIDTH
row_product = _product(False, "inner")  # left's and right's inner strides are WIDTH
token_product = _product(True, "column")  # left holds numbers, the same for all lanes
