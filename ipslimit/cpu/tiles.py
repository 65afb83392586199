"""Matrix products of vectors, in every lane at once, computed in register tiles.

    out[i, j] = start[i, j] + sum_k left[i, k] right[k, j]        in every lane, k upwards

How many numbers a vector has, a vector `like` them tells. All operands lie in the scratch array,
given by tuples of an offset and strides in elements:

    shape   (rows, columns, inner), inner >= 1
    out     (offset, row stride); its columns are neighbours (a vector apart)
    start   (offset, row stride, column stride); may be out itself, stride 0 repeats
    left    (offset, row stride, inner stride)
    right   (offset, inner stride, column stride)
"""

from __future__ import annotations

import contextlib

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..compilation import inner_loop
from .lanes import element_address, multiply_add, splat, width_of
from .registers import tile_sizes


@contextlib.contextmanager
def rolled_loop(builder, count):
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


def _define_tile(module, element, rows, columns, scalar_left, contiguous, lanes):
    """The LLVM function of a register tile: `rows` by `columns` sums that stay in registers.

    out[i, j] = start[i, j] + sum_k left[i, k] right[k, j], with k running upwards. `contiguous`
    tells along which index neighbours in `right` are neighbours in memory ("column" or "inner",
    then also in left). It is a function of its own, never inlined, since in its callers the
    addresses alone would fill the registers.
    """
    suffix = f"{rows}x{columns}.{'scalar.' if scalar_left else ''}{contiguous}.{element}"
    name = f"ipslimit.tile.{suffix}.{lanes}"
    if name in module.globals:
        return module.globals[name]
    number, pointer = ir.IntType(64), element.as_pointer()
    vector = ir.VectorType(element, lanes)
    arguments = [
        number,
        pointer,
        number,
        pointer,
        number,
        number,
        pointer,
        number,
        number,
        pointer,
        number,
    ]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), name)
    # every compiled entry keeps its own copy: shared by name, an older entry in the cache could
    # lend its tiles to a newer one
    function.linkage = "internal"
    function.attributes.add("noinline")
    function.attributes.add("nounwind")
    (
        inner,
        out,
        out_row,
        start,
        start_row,
        start_column,
        left,
        left_row,
        left_inner,
        right,
        right_stride,
    ) = function.args
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
    right_column, right_inner = (
        (lanes, right_stride) if contiguous == "column" else (right_stride, lanes)
    )
    if contiguous == "inner":
        left_inner = lanes
    with rolled_loop(builder, inner) as k:
        lefts, rights = [], []
        for i in range(rows):
            at = address(left, (i, left_row), (k, left_inner))
            if scalar_left:
                lefts.append(splat(builder, builder.load(at), lanes))
            else:
                lefts.append(builder.load(vector_at(at), align=align))
        for j in range(columns):
            at = address(right, (j, right_column), (k, right_inner))
            rights.append(builder.load(vector_at(at), align=align))
        for i, j in cells:
            total = multiply_add(builder, lefts[i], rights[j], builder.load(sums[i, j]))
            builder.store(total, sums[i, j])
    for i, j in cells:
        at = address(out, (i, out_row), (j, lanes))
        builder.store(builder.load(sums[i, j]), vector_at(at), align=align)
    builder.ret_void()
    return function


def _tile(rows, columns, scalar_left, contiguous):
    """The numba face of a register tile."""

    @intrinsic
    def tile(typingctx, s, like, inner, out, start, left, right):
        def codegen(context, builder, signature, args):
            array, _, inner, *operands = args
            kind = signature.args[0]
            element = context.get_value_type(kind.dtype)
            function = _define_tile(
                builder.module, element, rows, columns, scalar_left, contiguous, like.count
            )

            def unpack(operand):
                offset, *strides = (
                    builder.extract_value(operand, n) for n in range(operand.type.count)
                )
                return [element_address(context, builder, kind, array, offset), *strides]

            out, start, left, right = map(unpack, operands)
            right.pop(2 if contiguous == "column" else 1)
            builder.call(function, [inner, *out, *start, *left, *right])
            return context.get_dummy_value()

        return types.void(s, like, inner, out, start, left, right), codegen

    return tile


def _most(axis):
    """The rows or columns of a tile that stays in registers, of vectors like one: a constant."""

    @intrinsic
    def most(typingctx, like):
        size = tile_sizes(like.count * like.dtype.bitwidth // 8)[axis]
        return types.intp(like), lambda *_: ir.IntType(64)(size)

    return most


most_rows, most_columns = _most(0), _most(1)


def _product(scalar_left, contiguous):
    """The compiled product over tiles of 4, 2 and 1 rows and columns, as far as registers reach."""
    t44, t42, t41, t24, t22, t21, t14, t12, t11 = (
        _tile(rows, columns, scalar_left, contiguous) for rows in (4, 2, 1) for columns in (4, 2, 1)
    )

    def multiply(s, like, shape, out, start, left, right):
        rows, columns, inner = shape
        width = width_of(like)
        i = 0
        while i < rows:
            tall = min(most_rows(like), 4 if rows - i >= 4 else 2 if rows - i >= 2 else 1)
            x = (left[0] + i * left[1], left[1], left[2])
            j = 0
            while j < columns:
                o = (out[0] + i * out[1] + j * width, out[1])
                a = (start[0] + i * start[1] + j * start[2], start[1], start[2])
                y = (right[0] + j * right[2], right[1], right[2])
                if columns - j >= 4 and most_columns(like) >= 4:
                    if tall == 4:
                        t44(s, like, inner, o, a, x, y)
                    elif tall == 2:
                        t24(s, like, inner, o, a, x, y)
                    else:
                        t14(s, like, inner, o, a, x, y)
                    j += 4
                elif columns - j >= 2 and most_columns(like) >= 2:
                    if tall == 4:
                        t42(s, like, inner, o, a, x, y)
                    elif tall == 2:
                        t22(s, like, inner, o, a, x, y)
                    else:
                        t12(s, like, inner, o, a, x, y)
                    j += 2
                else:
                    if tall == 4:
                        t41(s, like, inner, o, a, x, y)
                    elif tall == 2:
                        t21(s, like, inner, o, a, x, y)
                    else:
                        t11(s, like, inner, o, a, x, y)
                    j += 1
            i += tall

    # Kept code is linked by name, and the number numba adds to tell functions of one name apart
    # counts within a process: without names of their own, entries that were compiled in different
    # processes would call each other's products.
    name = f"multiply_{'scalar' if scalar_left else 'vector'}_{contiguous}"
    multiply.__name__ = multiply.__qualname__ = name
    return inner_loop(multiply)


product = _product(False, "column")  # right's columns are neighbours
row_product = _product(False, "inner")  # left's and right's rows are: products of rows with rows
token_product = _product(True, "column")  # left holds plain numbers, the same for all lanes
