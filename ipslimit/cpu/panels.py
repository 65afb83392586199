"""Products of many tokens with one small matrix in every lane, written out for its size.

    project   out[i, j] = bias[j] + sum_k left[i, k] right[k, j], where left holds plain numbers
    apply     out[i, j] += sum_k left[i, k] right[k, j]

    add_outer out[i, j] += sum_k left[k, i] right[k, j], where left holds plain numbers

in the order of k. Four columns, or two where registers are few, are done for all rows before the
next, so that what they are made of stays in the first cache. What `tiles` computes for any size,
calls and loops included, takes twice as long as the products themselves where a unit is small: here
the sums over k are straight code, a matrix of four rows stays in registers if it fits, and one call
takes all tokens. Vectors fill a register of AVX-512, see `lanes.register_width`; all of them are
dense.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..compilation import inner_loop
from .lanes import (
    ONE,
    REGISTER_BYTES,
    ZERO,
    element_address,
    multiply_add,
    register_width,
    splat,
    zeros_of_register,
)
from .registers import room
from .tiles import product, rolled_loop, token_product

# Vectors that are in registers at a time; columns of a tile, and by the length of the sums that are
# written out, its rows.
_ROOM = room(REGISTER_BYTES)
_COLUMNS = 4 if _ROOM >= 32 else 2
_ROWS = {4: 2, 8: 4 if _ROOM >= 32 else 2}


def _define(module, element, inner: int, projects: bool):
    """The LLVM function (rows, columns, out, bias, step, left, right), for columns in fours."""
    bits = 32 if element == ir.FloatType() else 64
    lanes = REGISTER_BYTES * 8 // bits
    name = f"ipslimit.panel.{'project' if projects else 'apply'}.{inner}.{element}.{lanes}"
    if name in module.globals:
        return module.globals[name]
    number, pointer = ir.IntType(64), element.as_pointer()
    vector = ir.VectorType(element, lanes)
    arguments = [number, number, pointer, pointer, number, pointer, pointer]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), name)
    function.linkage = "internal"  # see `tiles`
    function.attributes.add("noinline")
    function.attributes.add("nounwind")
    rows, columns, out, bias, step, left, right = function.args
    builder = ir.IRBuilder(function.append_basic_block())
    row = builder.mul(columns, number(lanes))

    def at(base, offset, steps=0):
        """The address of a vector, from an offset on and so many lanes further."""
        place = builder.gep(builder.gep(base, [offset]), [number(steps * lanes)])
        return builder.bitcast(place, vector.as_pointer())

    def load(*place):
        return builder.load(at(*place), align=bits // 8)

    def times(a, count):
        return builder.mul(a, number(count))

    tall = _ROWS[inner]
    tiles, turns = builder.udiv(columns, number(_COLUMNS)), builder.udiv(rows, number(tall))
    done = times(turns, tall)
    rest = builder.sub(rows, done)
    with rolled_loop(builder, tiles) as tile:
        first = times(tile, _COLUMNS * lanes)
        starts = []
        if projects:
            from_column = times(builder.mul(tile, step), _COLUMNS)
            for c in range(_COLUMNS):
                offset = builder.add(from_column, times(step, c))
                starts.append(load(bias, offset))

        def matrix(k, first=first):
            offset = builder.add(first, times(row, k))
            return [load(right, offset, c) for c in range(_COLUMNS)]

        fits = (inner + tall) * _COLUMNS + 1 <= _ROOM
        kept = [matrix(k) for k in range(inner)] if fits else None

        def block(i, height, first=first, starts=starts, kept=kept, matrix=matrix):
            places = [
                builder.add(first, builder.mul(builder.add(i, number(r)), row))
                for r in range(height)
            ]
            sums = [
                list(starts) if projects else [load(out, place, c) for c in range(_COLUMNS)]
                for place in places
            ]
            for k in range(inner):
                entries = kept[k] if kept else matrix(k)
                for r in range(height):
                    token = times(builder.add(i, number(r)), inner)
                    token = builder.add(token, number(k))
                    if projects:
                        value = splat(builder, builder.load(builder.gep(left, [token])), lanes)
                    else:
                        value = load(left, times(token, lanes))
                    sums[r] = [
                        multiply_add(builder, value, entry, total)
                        for entry, total in zip(entries, sums[r], strict=True)
                    ]
            for place, totals in zip(places, sums, strict=True):
                for c, total in enumerate(totals):
                    builder.store(total, at(out, place, c), align=bits // 8)

        with builder.if_then(builder.icmp_signed(">", turns, number(0))):
            with rolled_loop(builder, turns) as turn:
                block(times(turn, tall), tall)
        with builder.if_then(builder.icmp_signed(">", rest, number(0))):
            with rolled_loop(builder, rest) as turn:
                block(builder.add(done, turn), 1)
    builder.ret_void()
    return function


def _panel(inner: int, projects: bool):
    @intrinsic
    def panel(typingctx, s, rows, columns, out, bias, step, left, right):
        def codegen(context, builder, signature, args):
            array, rows, columns, out, bias, step, left, right = args
            kind = signature.args[0]
            function = _define(builder.module, context.get_value_type(kind.dtype), inner, projects)
            out, bias, left, right = (
                element_address(context, builder, kind, array, offset)
                for offset in (out, bias, left, right)
            )
            builder.call(function, [rows, columns, out, bias, step, left, right])
            return context.get_dummy_value()

        return types.void(s, *[types.intp] * 7), codegen

    return panel


_project4, _project8 = _panel(4, True), _panel(8, True)
_apply4, _apply8 = _panel(4, False), _panel(8, False)


@inner_loop
def project(s, out, right, bias, step, left, rows, inner, columns):
    """out (rows, columns) from numbers (rows, inner), a matrix (inner, columns) and a bias.

    `step` leads from one entry of the bias to the next: 0 where all are one.
    """
    width = register_width(s)
    if columns % 4 == 0 and inner == 4:
        _project4(s, rows, columns, out, bias, step, left, right)
    elif columns % 4 == 0 and inner == 8:
        _project8(s, rows, columns, out, bias, step, left, right)
    else:
        for j in range(0, columns, _COLUMNS):
            token_product(
                s,
                zeros_of_register(s),
                (rows, min(_COLUMNS, columns - j), inner),
                (out + j * width, columns * width),
                (bias + j * step, ZERO, step),
                (left, inner, ONE),
                (right + j * width, columns * width, width),
            )


@inner_loop
def apply(s, out, left, right, rows, columns, inner):
    """out (rows, columns) += the products of (rows, inner) with (inner, columns)."""
    width = register_width(s)
    if columns % 4 == 0 and inner == 4:
        _apply4(s, rows, columns, out, out, width, left, right)
    elif columns % 4 == 0 and inner == 8:
        _apply8(s, rows, columns, out, out, width, left, right)
    else:
        for j in range(0, columns, _COLUMNS):
            at = out + j * width
            product(
                s,
                zeros_of_register(s),
                (rows, min(_COLUMNS, columns - j), inner),
                (at, columns * width),
                (at, columns * width, width),
                (left, inner * width, width),
                (right + j * width, columns * width, width),
            )


@inner_loop
def add_outer(s, out, left, right, rows, columns, tokens):
    """out (rows, columns) += the products of numbers (tokens, rows) with (tokens, columns)."""
    width = register_width(s)
    for j in range(0, columns, _COLUMNS):
        at = out + j * width
        token_product(
            s,
            zeros_of_register(s),
            (rows, min(_COLUMNS, columns - j), tokens),
            (at, columns * width),
            (at, columns * width, width),
            (left, ONE, rows),
            (right + j * width, columns * width, width),
        )
