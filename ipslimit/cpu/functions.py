"""Activations of LANES numbers at once, and the functions that they are made of.

Everything here is written on `Vector`, an LLVM vector with arithmetic, and becomes compiled code as
it runs: formulas read like those for a number, and cost the compiler next to nothing. Errors are a
few units in the last place of 1, or of the value where it is larger; nothing overflows, and NaN
goes through. What each activation is, `model.activations` defines.
"""

from __future__ import annotations

import math

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .lanes import LANES, REGISTER_BYTES, absolute, element_address, multiply_add, splat_constant
from .powers import evaluate, split_exp2
from .tiles import rolled_loop

# exp(t^2) erfc(t) / 2 as a quotient of polynomials, highest power first, on 0 <= t <= _FAR, beyond
# which erfc(t) is less than the last place of 1: (numerator, denominator), interpolated where the
# errors times exp(-t^2) max(1, t) between the points are all as large, 1.4e-8 and 3.3e-18.
_FAR = {types.float32: 4.2, types.float64: 6.2}
_HALF_ERFC = {
    types.float32: (
        (-0.00038856023, 0.070258895, 0.26384038, 0.50000001),
        (0.23444285, 1.0091335, 1.6560628, 1.0),
    ),
    types.float64: (
        (
            0.000154640672879161593,
            0.00265253923501342231,
            0.0211312217966154701,
            0.10101483699568554,
            0.313321672082902001,
            0.635777542891616268,
            0.793800031565908537,
            0.5,
        ),
        (
            0.000548188533439042063,
            0.00940294784335421919,
            0.0751833723550733708,
            0.36277760045914669,
            1.14798022737785725,
            2.42742615212347515,
            3.33620946743586235,
            2.71597923022732959,
            1.0,
        ),
    ),
}

# Registers that a loop over vectors computes side by side.
REGISTERS = 4


class Vector:
    """A vector in code that is being built; plain numbers beside it stand for constants."""

    def __init__(self, builder, value):
        self.builder, self.value = builder, value

    def like(self, other) -> Vector:
        if isinstance(other, Vector):
            return other
        return Vector(self.builder, splat_constant(self.value.type, other))

    def _apply(self, instruction: str, *others) -> Vector:
        values = [self.like(other).value for other in others]
        return Vector(self.builder, getattr(self.builder, instruction)(*values))

    def __add__(self, other):
        return self._apply("fadd", self, other)

    def __sub__(self, other):
        return self._apply("fsub", self, other)

    def __rsub__(self, other):
        return self._apply("fsub", other, self)

    def __mul__(self, other):
        return self._apply("fmul", self, other)

    def __truediv__(self, other):
        return self._apply("fdiv", self, other)

    def __rtruediv__(self, other):
        return self._apply("fdiv", other, self)

    __radd__, __rmul__ = __add__, __mul__

    @property
    def dtype(self):
        return types.float32 if self.value.type.element == ir.FloatType() else types.float64


def fma(a: Vector, b, c) -> Vector:
    """a b + c, rounded once where the machine can."""
    values = [a.like(other).value for other in (a, b, c)]
    return Vector(a.builder, multiply_add(a.builder, *values))


def where_above(x, bound, a, b) -> Vector:
    """a where x > bound, and b elsewhere and where x is NaN."""
    like = next(one for one in (x, bound) if isinstance(one, Vector))
    x, bound, a, b = (like.like(other).value for other in (x, bound, a, b))
    builder = like.builder
    return Vector(builder, builder.select(builder.fcmp_ordered(">", x, bound), a, b))


def magnitude(x: Vector) -> Vector:
    """|x|."""
    return Vector(x.builder, absolute(x.builder, x.value))


def exp2(t: Vector) -> Vector:
    """2^t for t <= 0, as that of `lanes`."""
    power, rest, scale = _split(t)
    return fma(power, rest, 1.0) * scale


def exp2_minus_one(t: Vector) -> Vector:
    """2^t - 1 for t <= 0, within 2 ulp."""
    power, rest, scale = _split(t)
    return fma(scale, power * rest, scale - 1.0)


def _split(t: Vector) -> list[Vector]:
    return [Vector(t.builder, part) for part in split_exp2(t.builder, t.dtype, t.value)]


def normal_cdf(x: Vector) -> tuple[Vector, Vector]:
    """Phi(x) and exp(-x^2 / 2) of the standard normal law."""
    exponential = exp2(-0.5 * math.log2(math.e) * x * x)
    t, far = math.sqrt(0.5) * magnitude(x), _FAR[x.dtype]
    t = where_above(t, far, far, t)
    numerator, denominator = (
        Vector(t.builder, evaluate(t.builder, coefficients, t.value))
        for coefficients in _HALF_ERFC[t.dtype]
    )
    beyond = exponential * (numerator / denominator)
    return where_above(x, 0.0, 1.0 - beyond, beyond), exponential


def hyperbolic_tangent(x: Vector) -> Vector:
    """tanh(x), within a few ulp of itself also where it is small."""
    below = exp2_minus_one(-2.0 * math.log2(math.e) * magnitude(x))
    t = below / (below + 2.0)
    return where_above(x, 0.0, 0.0 - t, t)


def logistic(x: Vector) -> tuple[Vector, Vector]:
    """1 / (1 + exp(-x)), and what is left of 1."""
    e = exp2(-math.log2(math.e) * magnitude(x))
    larger = 1.0 / (1.0 + e)
    smaller = e * larger
    return where_above(x, 0.0, larger, smaller), where_above(x, 0.0, smaller, larger)


# Each gives act(z) and act'(z).


def gelu(z: Vector):
    cdf, exponential = normal_cdf(z)
    return z * cdf, fma(z, exponential * (1.0 / math.sqrt(2.0 * math.pi)), cdf)


def gelu_tanh(z: Vector):
    # (1 + tanh(u)) / 2 is the logistic function of 2 u, whose rest of 1 is known without a
    # difference; z within +-20, beyond which it is 0 in either precision, so that no cube overflows
    near = where_above(z, 20.0, 20.0, where_above(-20.0, z, -20.0, z))
    scaled, square = math.sqrt(8.0 / math.pi) * near, near * near
    share, rest = logistic(scaled * fma(square, 0.044715, 1.0))
    inside = scaled * fma(square, 3 * 0.044715, 1.0)
    return z * share, share * fma(inside, rest, 1.0)


def relu(z: Vector):
    # the slope at 0 is 0, and a NaN is kept
    value = where_above(0.0, z, 0.0, z)
    return value, where_above(z, 0.0, 1.0, value * 0.0)


def silu(z: Vector):
    share, rest = logistic(z)
    return z * share, share * fma(z, rest, 1.0)


def tanh(z: Vector):
    t = hyperbolic_tangent(z)
    return t, 1.0 - t * t


ACTIVATIONS = {"gelu": gelu, "gelu_tanh": gelu_tanh, "relu": relu, "silu": silu, "tanh": tanh}


def _define(module, element, with_slope: bool):
    """The LLVM function (number, z, slope, count) over vectors of z, with two loops an activation.

    The first takes REGISTERS at once: one polynomial waits for itself most of the time, and several
    side by side keep the machine busy. The second takes what is left over.
    """
    bits = 32 if element == ir.FloatType() else 64
    together = REGISTERS * REGISTER_BYTES * 8 // (bits * LANES)
    name = f"ipslimit.activate.{'with' if with_slope else 'without'}_slope.{element}.{LANES}"
    if name in module.globals:
        return module.globals[name]
    number, pointer = ir.IntType(64), element.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [number, pointer, pointer, number])
    function = ir.Function(module, kind, name)
    function.linkage = "internal"  # see `tiles`
    function.attributes.add("noinline")
    function.attributes.add("nounwind")
    which, z, slope, count = function.args
    builder = ir.IRBuilder(function.append_basic_block())
    end = function.append_basic_block("end")
    turns = builder.udiv(count, number(together))
    done = builder.mul(turns, number(together))
    rest = builder.sub(count, done)
    choice = builder.switch(which, end)
    builder.position_at_end(end)
    builder.ret_void()

    def loop(activation, turns, first, vectors):
        """The activation of vectors, so many a turn, from one of them on."""
        kind = ir.VectorType(element, vectors * LANES).as_pointer()
        with builder.if_then(builder.icmp_signed(">", turns, number(0))):
            with rolled_loop(builder, turns) as i:
                offset = builder.mul(
                    builder.add(first, builder.mul(i, number(vectors))), number(LANES)
                )
                at, into = (builder.bitcast(builder.gep(p, [offset]), kind) for p in (z, slope))
                results = activation(Vector(builder, builder.load(at, align=bits // 8)))
                places = (at, into) if with_slope else (at,)
                for result, place in zip(results, places, strict=False):
                    builder.store(result.value, place, align=bits // 8)

    for index, activation in enumerate(ACTIVATIONS.values()):
        block = function.append_basic_block(activation.__name__)
        choice.add_case(number(index), block)
        builder.position_at_end(block)
        loop(activation, turns, number(0), together)
        loop(activation, rest, done, 1)
        builder.branch(end)
    return function


def _activate(with_slope: bool):
    @intrinsic
    def activate(typingctx, s, number, z, slope, count):
        def codegen(context, builder, signature, args):
            array, number, z, slope, count = args
            kind = signature.args[0]
            element = context.get_value_type(kind.dtype)
            function = _define(builder.module, element, with_slope)
            places = [element_address(context, builder, kind, array, at) for at in (z, slope)]
            builder.call(function, [number, *places, count])
            return context.get_dummy_value()

        return types.void(s, types.int64, types.intp, types.intp, types.intp), codegen

    return activate


# activate(s, number, z, slope, count) puts act(z) in the place of `count` >= 1 vectors, from offset
# z on, and the second one act'(z) from `slope` on; the number is a place in ACTIVATIONS.
activate, activate_with_slope = _activate(False), _activate(True)
