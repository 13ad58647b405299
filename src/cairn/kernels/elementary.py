"""Elementary functions that give the same bits on every machine, independent of any C library.

Each step is a sum, product or quotient in float64, which IEEE 754 defines to the last bit, or a bit operation.
`csrc/elementary.h` does the same steps. Results are float32 within 0.51 units in the last place; cosine and sine are
float64 with a relative error of at most 3e-10. `log_of` and `power_of`, for single numbers while a model loads, are
float64 and correctly rounded in practice (40 decimal digits inside).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from decimal import Context, Decimal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

_PIECE = 16384
"""Numbers processed at a time, few enough to stay in the CPU's cache."""

_LN2, _LOG2E = 0.6931471805599453, 1.4426950408889634
_SHIFT = 6755399441055744.0
"""1.5 * 2**52: adding it rounds to an integer, which is then in the low bits of the sum."""
_ONE = 0x3FF0000000000000
_ROOT_HALF = 0x3FE6A09E667F3BCD
"""The bits of 1 and of sqrt(1/2) as float64."""
_LEAST, _MOST = np.float32(-104), np.float32(89)
"""Arguments beyond which the exponential is 0 or infinity in float32."""

# Polynomials of least error, the highest power first: Q, P, S and C in
#     e^r = 1 + r + r^2 Q(r)                  |r| <= ln 2 / 2
#     atanh(s) = s + s^3 P(s^2)               |s| <= 3 - 2 sqrt 2
#     sin(r) = r + r^3 S(r^2)                 |r| <= pi / 4
#     cos(r) = 1 - r^2 / 2 + r^4 C(r^2)       |r| <= pi / 4
_EXP = (
    *(0.00019890990824673654, 0.0013933649996309251, 0.0083333109254809),
    *(0.041666464925285904, 0.16666666681623232, 0.500000001346581),
)
_ATANH = (0.11665807235921749, 0.14275389316595982, 0.20000061105905326, 0.33333333277021004)
_SIN = (
    *(-2.4805587179980646e-08, 2.7555990399839905e-06, -0.0001984126691523504),
    *(0.008333333331077422, -0.16666666666663882),
)
_COS = (
    *(2.070056539736993e-09, -2.755636931675049e-07, 2.4801585209738397e-05),
    *(-0.0013888888887276056, 0.04166666666666468),
)

_TWO_OVER_PI = 0.6366197723675814
_HALF_PI = (1.5707963109016418, 1.5893254712295857e-08, 6.123233995736766e-17)
"""Parts whose sum is pi / 2. Products of the first two with integers below 2**27 are exact."""
_FAR = 67108864.0
"""2**26: larger angles are reduced modulo 2 pi in integer arithmetic."""
_TWO_OVER_PI_BITS = np.array(
    [0xA2F9836E, 0x4E441529, 0xFC2757D1, 0xF534DDC0, 0xDB629599, 0x3C439041, 0xFE5163AB], np.uint64
)
"""The first bits of 2 / pi after the point, 32 in each word."""
_SIXTY_TWO_BITS = 3.4061215800865545e-19
"""pi / 2 * 2**-62"""


def exp(x: ArrayLike) -> Floats:
    """Return e^x of float32 numbers."""
    return _by_pieces(_exp, x)


def expm1(x: ArrayLike) -> Floats:
    """Return e^x - 1 of float32 numbers."""
    return _by_pieces(_expm1, x)


def log(x: ArrayLike) -> Floats:
    """Return the natural logarithm of float32 numbers: -inf of 0, NaN below."""
    return _by_pieces(_log, x)


def log1p(x: ArrayLike) -> Floats:
    """Return log(1 + x) of float32 numbers: -inf of -1, NaN below."""
    return _by_pieces(_log1p, x)


def tanh(x: ArrayLike) -> Floats:
    """Return the hyperbolic tangent of float32 numbers."""
    return _by_pieces(_tanh, x)


def cos_sin(x: Floats) -> tuple[Doubles, Doubles]:
    """Return cosine and sine, in float64, of float32 angles in radians; NaN for angles that are not finite."""
    with np.errstate(all="ignore"):
        quarters, rest = _quarters(x.astype(np.float64))
        square = rest * rest
        sine = (_polynomial(_SIN, square) * square + 1) * rest
        cosine = (_polynomial(_COS, square) * square - 0.5) * square + 1
    swapped, low = quarters & 1 == 1, quarters & 2 == 2
    first, second = np.where(swapped, sine, cosine), np.where(swapped, cosine, sine)
    return np.where(low ^ swapped, -first, first), np.where(low, -second, second)


@functools.lru_cache(maxsize=256)
def log_of(x: float) -> float:
    """Return the natural logarithm of one number. Raises `ValueError` unless it is above 0."""
    if not x > 0:
        raise ValueError(f"{x} has no logarithm")
    return float(_context().ln(Decimal(x)))


def power_of(base: float, exponent: float) -> float:
    """Return base ** exponent. Raises `ValueError` unless the base is above 0."""
    if not base > 0:
        raise ValueError(f"the base of a power must be above 0, not {base}")
    context = _context()
    return float(context.exp(context.multiply(Decimal(exponent), context.ln(Decimal(base)))))


def _context() -> Context:
    """Return a decimal context with digits to spare, so that only the rounding to float64 shows."""
    return Context(prec=40)


def _by_pieces(steps: Callable[[Floats], Doubles], x: ArrayLike) -> Floats:
    array = np.asarray(x, np.float32)
    flat, out = array.reshape(-1), np.empty(array.size, np.float32)
    with np.errstate(all="ignore"):
        for at in range(0, array.size, _PIECE):
            out[at : at + _PIECE] = steps(flat[at : at + _PIECE])
    return out.reshape(array.shape)


def _polynomial(terms: tuple[float, ...], x: Doubles) -> Doubles:
    """Evaluate a polynomial by Horner's scheme; coefficients from the highest power down."""
    value = x * terms[0]
    for term in terms[1:-1]:
        value += term
        value *= x
    value += terms[-1]
    return value


def _powers(x: Floats) -> tuple[Doubles, Doubles]:
    """Return (p, q) with e^x = (1 + p) q, where q is a power of 2."""
    rest = np.clip(x, _LEAST, _MOST).astype(np.float64)
    turned = rest * _LOG2E
    turned += _SHIFT
    whole = turned - _SHIFT
    whole *= _LN2
    rest -= whole
    found = _polynomial(_EXP, rest)
    found *= rest
    found += 1
    found *= rest
    bits = turned.view(np.int64)
    bits <<= 52
    bits += _ONE
    return found, turned


def _exp(x: Floats) -> Doubles:
    found, power = _powers(x)
    found += 1
    found *= power
    return found


def _minus_one(x: Floats) -> Doubles:
    found, power = _powers(x)
    found *= power
    power -= 1
    found += power
    return found


def _expm1(x: Floats) -> Doubles:
    return np.copysign(_minus_one(x), x)


def _tanh(x: Floats) -> Doubles:
    less = _minus_one(np.float32(-2) * np.abs(x))
    return np.copysign(less / (less + 2), x)


def _logarithm(x: Doubles, near: Doubles | None = None) -> Doubles:
    """Return log(x) for x above 0; `near` is x - 1 with full precision, used where x is near 1."""
    bits = x.view(np.int64)
    turns = (bits - _ROOT_HALF) >> 52
    rest = (bits - (turns << 52)).view(np.float64) - 1
    if near is not None:
        rest = np.where(turns == 0, near, rest)
    small = rest / (rest + 2)
    square = small * small
    found = (_polynomial(_ATANH, square) * square + 1) * (small + small)
    return turns * _LN2 + found


def _log(x: Floats) -> Doubles:
    wide = x.astype(np.float64)
    found = np.where(wide == 0, -math.inf, _logarithm(wide))
    return np.where(wide < 0, math.nan, np.where(wide < math.inf, found, wide))


def _log1p(x: Floats) -> Doubles:
    wide = x.astype(np.float64)
    found = np.where(wide == -1, -math.inf, np.copysign(_logarithm(wide + 1, wide), wide))
    return np.where(wide < -1, math.nan, np.where(wide < math.inf, found, wide))


def _quarters(x: Doubles) -> tuple[NDArray[np.int64], Doubles]:
    """Split angles into quarter turns, modulo 4, and a rest of at most pi / 4."""
    turned = x * _TWO_OVER_PI + _SHIFT
    whole = turned - _SHIFT
    rest = ((x - whole * _HALF_PI[0]) - whole * _HALF_PI[1]) - whole * _HALF_PI[2]
    quarters = turned.view(np.int64)
    far = (np.abs(x) >= _FAR) & (np.abs(x) < math.inf)
    if far.any():
        quarters[far], rest[far] = _far_quarters(x[far])
    return quarters & 3, rest


def _far_quarters(x: Doubles) -> tuple[NDArray[np.int64], Doubles]:
    """Split as `_quarters` does, for |x| >= 2^26: 24 bits of x times the 96 bits of 2 / pi that matter modulo 4."""
    bits = np.abs(x).astype(np.float32).view(np.uint32).astype(np.uint64)
    whole, first = bits & 0x7FFFFF | 0x800000, (bits >> 23) - 152
    at, shift = (first >> 5).astype(np.intp), first & 31
    high, middle, low = (
        (_TWO_OVER_PI_BITS[at + i] << 32 | _TWO_OVER_PI_BITS[at + i + 1]) << shift >> 32 for i in range(3)
    )
    turned = (whole * high << 32) + whole * middle + (whole * low >> 32)
    quarters = ((turned >> 61) + 1 >> 1).view(np.int64)
    rest = (turned.view(np.int64) - (quarters << 62)) * _SIXTY_TWO_BITS
    return np.where(x < 0, -quarters, quarters), np.where(x < 0, -rest, rest)
