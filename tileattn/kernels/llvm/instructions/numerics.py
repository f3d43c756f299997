"""Emit exp, log and tanh of vectors, accurate to about one unit in the last place."""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.polynomial import Chebyshev, Polynomial

from tileattn.kernels.llvm.instructions.code import I32, Code

_DEGREE = {"float32": 6, "float64": 12}


def _expm1_over_f(dtype: str) -> list[float]:
    """Coefficients of ``(2**f - 1) / f`` on [-1/2, 1/2]."""
    x = 0.5 * np.cos(np.pi * (np.arange(200) + 0.5) / 200)
    x = x[x != 0]
    fit = Chebyshev.fit(x, np.expm1(x * math.log(2)) / x, _DEGREE[dtype] - 1, domain=[-0.5, 0.5])
    return [float(c) for c in fit.convert(kind=Polynomial).coef]


def exp(c: Code, t: Any) -> Any:
    """``e**t``: 0 for -inf, inf for inf, and below the smallest normal number correct too."""
    n, f, tail = _reduced(c, t)
    x = c.fma(f, tail, c.const(1.0))
    # Results that round to 0 do not get there by underflow, for which CPUs may take 150 cycles.
    zero = c.b.fcmp_ordered("<", t, c.const(-746.0 if c.size == 8 else -104.0))
    return scale_by_power(c, c.b.select(zero, c.const(0.0), x), n)


def _reduced(c: Code, t: Any) -> tuple[Any, Any, Any]:
    """Split ``t / ln 2`` into an integer n and a rest f; with ``(2**f - 1) / f``."""
    b = c.b
    t = c.minimum(c.const(1400.0 if c.size == 8 else 160.0), t)  # from there on it is infinite
    magic = c.const(1.5 * 2.0 ** (52 if c.size == 8 else 23))
    log2e = c.const(1 / math.log(2))
    n = b.fsub(c.fma(t, log2e, magic), magic)
    f = c.fma(t, log2e, b.fneg(n))
    *rest, tail = (c.const(x) for x in _expm1_over_f(c.dtype))
    for x in reversed(rest):
        tail = c.fma(tail, f, x)
    return n, f, tail


def scale_by_power(c: Code, x: Any, n: Any) -> Any:
    """``x * 2**n`` for an integer n, rounded once."""
    if c.target.scalef:
        name, bits = ("pd", 8) if c.size == 8 else ("ps", 16)
        all_lanes, as_usual = ir.Constant(ir.IntType(bits), -1), ir.Constant(I32, 4)
        instruction = f"llvm.x86.avx512.mask.scalef.{name}.512"
        return c.intrinsic(instruction, c.vector, x, n, x, all_lanes, as_usual)
    bias, shift = (1023, 52) if c.size == 8 else (127, 23)
    n = c.maximum(c.const(-2.0 * (bias - 1)), n)  # half of it is an exponent, too
    whole = c.b.fptosi(n, c.integers)
    half = c.b.ashr(whole, c.ints(1))
    for part in (half, c.b.sub(whole, half)):
        power = c.b.shl(c.b.add(part, c.ints(bias)), c.ints(shift))
        x = c.b.fmul(x, c.b.bitcast(power, c.vector))
    return x


def log(c: Code, x: Any) -> Any:
    """Natural logarithm of positive normal numbers; -inf for 0, NaN and inf as they are."""
    b = c.b
    exponent, rest = _log_parts(c, x)
    result = c.fma(exponent, c.const(math.log(2)), rest)
    result = b.select(b.fcmp_ordered("==", x, c.const(0.0)), c.const(-math.inf), result)
    usual = b.fcmp_ordered("<", x, c.const(math.inf))
    return b.select(usual, result, x)


def plus_log(c: Code, m: Any, x: Any) -> Any:
    """``m + log(x)``, rounded about once; as their sum where either is not finite."""
    b = c.b
    exponent, rest = _log_parts(c, x)
    bits = 32 if c.size == 8 else 12  # times an exponent it is exact
    high = math.floor(math.ldexp(math.log(2), bits)) / 2**bits
    total, lost = two_sum(c, m, b.fmul(exponent, c.const(high)))
    rest = c.fma(exponent, c.const(math.log(2) - high), rest)
    found, plain = b.fadd(total, b.fadd(lost, rest)), b.fadd(m, log(c, x))
    size = b.fsub(plain, plain)  # 0, or NaN
    return b.select(b.fcmp_ordered("==", size, c.const(0.0)), found, plain)


def two_sum(c: Code, x: Any, y: Any) -> tuple[Any, Any]:
    """Return the sum of two vectors, and its rounding error."""
    b = c.b
    total = b.fadd(x, y)
    added = b.fsub(total, x)
    return total, b.fadd(b.fsub(x, b.fsub(total, added)), b.fsub(y, added))


def _log_parts(c: Code, x: Any) -> tuple[Any, Any]:
    """Split the logarithm of a positive normal number into a multiple of ``ln 2`` and a rest."""
    b = c.b
    mantissa, terms = (52, 11) if c.size == 8 else (23, 5)
    bits = b.bitcast(x, c.integers)
    # Mantissas from sqrt(1/2) to sqrt(2): the difference to that of sqrt(1/2) carries over.
    low = int(np.array(math.sqrt(0.5), c.dtype).view(f"i{c.size}"))
    e = b.ashr(b.sub(bits, c.ints(low)), c.ints(mantissa))
    m = b.bitcast(b.sub(bits, b.shl(e, c.ints(mantissa))), c.vector)
    s = b.fdiv(b.fsub(m, c.const(1.0)), b.fadd(m, c.const(1.0)))
    z, tail = b.fmul(s, s), c.const(2 / (2 * terms + 1))
    for k in reversed(range(terms)):
        tail = c.fma(tail, z, c.const(2 / (2 * k + 1)))
    return b.sitofp(e, c.vector), b.fmul(s, tail)


def tanh(c: Code, x: Any) -> Any:
    """``e / (e + 2)`` with ``e = expm1(2 |x|)``; of small numbers as exact as of large ones."""
    b = c.b
    bits = b.bitcast(x, c.integers)
    sign = b.and_(bits, c.ints(1 << (8 * c.size - 1)))
    size = b.bitcast(b.xor(bits, sign), c.vector)
    size = c.minimum(c.const(22.0), size)  # from there on it rounds to 1
    n, f, tail = _reduced(c, b.fadd(size, size))
    power = scale_by_power(c, c.const(1.0), n)
    e = c.fma(power, b.fmul(f, tail), b.fsub(power, c.const(1.0)))
    result = b.fdiv(e, b.fadd(e, c.const(2.0)))
    return b.bitcast(b.or_(b.bitcast(result, c.integers), sign), c.vector)
