"""Functions that kernels call and honed defines: larger and smaller of two numbers; sine, cosine and tangent.

`max` and `min`: OpenCL leaves them undefined for NaN and infinities (OpenCL C 3.0, 6.15.4); `fmax` and `fmin`
ignore NaN, and take PoCL up to 1.9 times as long. A comparison with a selection defines the result for NaN,
and compilers turn it into the device's own instruction where one has that meaning.

`sin`, `cos` and `tan`: a driver may lack them. Mesa uses those of libclc, and libclc 22.1.8 in Debian imports
an undefined function (`__clc_flush_denormal_if_not_supported`). In its SPIR-V, `sin`, `cos`, `tan`, `sincos`,
`remquo` and the `fma` of devices without one call it. Kernels use only the first three of these, so all other
functions are left to the driver, and so are the three for doubles.
"""

from __future__ import annotations

import re

from . import terms
from .terms import Type

_EXTREME = re.compile(r"\bhoned_(nan)?(max|min)_(float|half|double)(\d*)\b")
_MASKS = {"half": "short", "float": "int", "double": "long"}

CIRCULAR = frozenset({"sin", "cos", "tan"})
_CIRCULAR = re.compile(r"\bhoned_(sin|cos|tan)_(float|half)(\d*)\b")

# Sine and cosine of a >= 0, both from one reduction of a to r + rest, with |r| at most a little over pi/4,
# and from the number n of quarter turns that were subtracted.
#
# Up to 4095 quarter turns, a - n pi/2 is computed with pi/2 as a sum of four numbers. Three have 12 bits, so
# that their products with n are exact, whether the compiler fuses them with the sums or not; what is left of
# pi/2 after all four is 2^-69. `rest` holds what r loses by rounding.
#
# Beyond that, up to the largest number, it is Payne and Hanek's way: a = m 2^e with an integer m of 24 bits,
# and of 2/pi only 96 bits matter. The bits before them add multiples of 4 quarter turns, those after them
# less than 2^-70, and no a comes nearer to a multiple of pi/2 than 2^-30 quarter turns. The seven words are
# the bits of 2/pi, after 14 zeros. The two highest bits of m times the 96 are n, the others its fraction.
#
# Polynomials in s = r^2 for sin(r)/r and cos(r), minimax on |r| <= 0.7925 by linear programming; coefficients
# were rounded to singles one by one, the lowest power first, and the others fitted again. Their relative
# errors are 2^-27.8 and 2^-32.7.
_SINE_AND_COSINE = """\
static inline void honed_sin_cos_{T}({T} a, {T}* sine, {T}* cosine) {{
  const {T} turns = rint(a * 0x1.45f306p-1f);
  const {T} near = a - turns * 0x1.922p0f;
  const {T} nearer = near + turns * 0x1.2aep-18f, nearest = nearer + turns * 0x1.deap-31f;
  const {T} lost = (near - nearer + turns * 0x1.2aep-18f) + (nearer - nearest + turns * 0x1.deap-31f);
  const {T} tail = lost - turns * 0x1.184698p-44f;
  {T} r = nearest + tail, rest = nearest - r + tail;
  {U} n = convert_{U}(turns);
  if ({any}(a > 6432.0f)) {{
    const {U} m = (as_{U}(a) & 0x7fffffu) | 0x800000u, at = (as_{U}(a) >> 23) - 138u, bit = at & 31u;
    const {I} by_two = (at & 64u) != 0u, by_one = (at & 32u) != 0u;
    const {U} w0 = by_two ? ({U})(0x54a7f09du) : ({U})(0x28be6u);
    const {U} w1 = by_two ? ({U})(0x5f47d4d3u) : ({U})(0xdb93910u);
    const {U} w2 = by_two ? ({U})(0x77036d8au) : ({U})(0x54a7f09du);
    const {U} w3 = by_two ? ({U})(0x5664f10eu) : ({U})(0x5f47d4d3u);
    const {U} w4 = by_two ? ({U})(0x4107f945u) : ({U})(0x77036d8au);
    const {U} v0 = by_one ? w1 : w0, v1 = by_one ? w2 : w1, v2 = by_one ? w3 : w2, v3 = by_one ? w4 : w3;
    const {U} high = (v0 << bit) | (v1 >> 1 >> (31u - bit)), middle = (v1 << bit) | (v2 >> 1 >> (31u - bit));
    const {U} low = (v2 << bit) | (v3 >> 1 >> (31u - bit));
    const {U} p0 = m * low, p1 = m * middle + mul_hi(m, low);
    const {U} carry = p1 < m * middle ? ({U})(1u) : ({U})(0u);
    const {U} p2 = m * high + mul_hi(m, middle) + carry, fraction = (p2 << 2) | (p1 >> 30);
    const {U} minus = ({U})(0u) - (fraction >> 31), f = fraction ^ minus;
    const {U} g = ((p1 << 2) | (p0 >> 30)) ^ minus;
    const {T} f0 = convert_{T}(f & 0xfff00000u) * 0x1p-32f;
    const {T} f1 = convert_{T}(f & 0xfffffu) * 0x1p-32f + convert_{T}(g) * 0x1p-64f;
    const {T} lower = f0 * -0x1.2aeef4p-18f + f1 * 0x1.921fb6p0f, sum = f0 * 0x1.922p0f + lower;
    const {T} off = lower - (sum - f0 * 0x1.922p0f), none = a - a;  // NaN for infinities
    const {U} sign = minus & 0x80000000u;
    r = a > 6432.0f ? as_{T}(as_{U}(sum) ^ sign) + none : r;
    rest = a > 6432.0f ? as_{T}(as_{U}(off) ^ sign) : rest;
    n = a > 6432.0f ? (p2 + 0x20000000u) >> 30 : n;
  }}
  const {T} s = r * r, half_s = 0.5f * s, one = 1.0f - half_s;
  const {T} sine_r = s * (-0x1.555544p-3f + s * (0x1.1106c6p-7f + s * -0x1.991c26p-13f));
  const {T} cosine_r = s * s * (0x1.55554ap-5f + s * (-0x1.6c0c16p-10f + s * 0x1.99df6p-16f));
  const {T} x = r + (r * sine_r + (rest - half_s * rest));
  const {T} y = one + (1.0f - one - half_s + (cosine_r - r * rest));
  const {I} odd = (n & 1u) != 0u;
  *sine = as_{T}(as_{U}(odd ? y : x) ^ ((n << 30) & 0x80000000u));
  *cosine = as_{T}(as_{U}(odd ? x : y) ^ (((n + 1u) << 30) & 0x80000000u));
}}"""
_PARTS = {"16": "8", "8": "4"}  # Longer vectors are computed by halves: Mesa 26.2's compiler crashes on eight
_VALUES = {"sin": "as_{T}(as_{U}(s) ^ sign)", "cos": "c", "tan": "as_{T}(as_{U}(s / c) ^ sign)"}


def defined_name(which: str, of: Type) -> str:
    """Return the name of the function for a larger or smaller value, or for a sine, cosine or tangent.

    `max` and `min` return the first number where it is NaN, and ignore a second number that is NaN; `nanmax`
    and `nanmin` return NaN where either is.

    Of singles up to 4095 quarter turns, sine and cosine err by at most 0.81 ulp and tangent by 2.4; beyond
    that by 1.9 and 3.4. A tangent errs more where the device's division does. Halves are computed as singles
    and rounded. NaN and infinities give NaN; of -0, sine and tangent are -0.
    """
    return f"honed_{which}_{terms.name(of)}"


def definitions(source: str) -> list[str]:
    """Return the definitions of the functions that a source uses, each after those that it calls."""
    extremes = sorted({match.groups(default="") for match in _EXTREME.finditer(source)})
    circular = sorted({match.groups() for match in _CIRCULAR.finditer(source)})
    wide = {(which, lanes) for which, _, lanes in circular}
    for lanes, half in _PARTS.items():
        wide |= {(which, half) for which, whole in wide if whole == lanes}
    ordered = sorted(wide, key=lambda one: (int(one[1] or 1), one))
    return [
        *(_extreme(*parts) for parts in extremes),
        *(
            _SINE_AND_COSINE.format(**_types(lanes))
            for lanes in sorted({lanes for _, lanes in wide} - _PARTS.keys())
        ),
        *(_single(*parts) for parts in ordered),
        *(_half(which, lanes) for which, element, lanes in circular if element == "half"),
    ]


def _extreme(nan: str, which: str, element: str, lanes: str) -> str:
    of, better = f"{element}{lanes}", f"y {'>' if which == 'max' else '<'} x"
    value = f"select(x, y, {better})" if lanes else f"{better} ? y : x"
    if nan:  # Scalars without a branch, which PoCL would not make vectors of
        mask = "" if lanes else f"({_MASKS[element]})"  # Scalars compare to int, which selects no half
        value = f"select(x, y, {mask}(({better}) | (y != y)))"
    return f"static inline {of} honed_{nan}{which}_{of}({of} x, {of} y) {{ return {value}; }}"


def _types(lanes: str) -> dict[str, str]:
    return {"T": f"float{lanes}", "I": f"int{lanes}", "U": f"uint{lanes}", "any": "any" if lanes else ""}


def _single(which: str, lanes: str) -> str:
    types = _types(lanes)
    of, bits, value = types["T"], types["U"], _VALUES[which].format(**types)
    if lanes in _PARTS:
        each = f"honed_{which}_float{_PARTS[lanes]}"
        value = f"({of})({each}(x.lo), {each}(x.hi))"
        return f"static inline {of} honed_{which}_{of}({of} x) {{ return {value}; }}"
    sign = "" if which == "cos" else f"  const {bits} sign = as_{bits}(x) & 0x80000000u;\n"
    return (
        f"static inline {of} honed_{which}_{of}({of} x) {{\n"
        f"  {of} s, c;\n  honed_sin_cos_{of}(fabs(x), &s, &c);\n{sign}  return {value};\n}}"
    )


def _half(which: str, lanes: str) -> str:
    of, wide = f"half{lanes}", f"float{lanes}"
    value = f"convert_{of}(honed_{which}_{wide}(convert_{wide}(x)))"
    return f"static inline {of} honed_{which}_{of}({of} x) {{ return {value}; }}"
