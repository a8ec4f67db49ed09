"""C identifiers for what TVM names, each unique in its kernel."""

from __future__ import annotations

import re

_OTHER = re.compile(r"[^A-Za-z0-9_]")
# Words of OpenCL C, names of its types, and those functions of its library that kernels may call.
_RESERVED = re.compile(
    r"u?(?:char|short|int|long)\d*|(?:half|float|double|bool|void)\d*|"
    r"(?:get|convert|as|atomic|atom|read|write|native|half|work_group|sub_group|cl|mem|async|M|CL|_)_\w*|"
    r"(?:vload|vstore|is|image|fract)\w*|"
    r"auto|break|case|const|continue|default|do|else|enum|extern|for|goto|if|inline|register|restrict|"
    r"return|signed|sizeof|static|struct|switch|typedef|typeof|union|unsigned|volatile|while|kernel|"
    r"global|local|constant|private|generic|uniform|pipe|event_t|sampler_t|true|false|NULL|NAN|"
    r"INFINITY|HUGE_VAL|MAXFLOAT|AT|barrier|size_t|ptrdiff_t|intptr_t|uintptr_t|main|and|or|xor|not|"
    r"abs|abs_diff|acos|acosh|acospi|add_sat|all|any|asin|asinh|asinpi|atan|atan2|atan2pi|atanh|atanpi|"
    r"bitselect|cbrt|ceil|clamp|clz|copysign|cos|cosh|cospi|cross|ctz|degrees|distance|dot|erf|erfc|"
    r"exp|exp10|exp2|expm1|fabs|fast_distance|fast_length|fast_normalize|fdim|floor|fma|fmax|fmin|fmod|"
    r"frexp|hadd|hypot|ilogb|ldexp|length|lgamma|lgamma_r|log|log10|log1p|log2|logb|mad|mad24|mad_hi|"
    r"mad_sat|max|maxmag|min|minmag|mix|modf|mul24|mul_hi|nan|nearbyint|nextafter|normalize|popcount|"
    r"pow|pown|powr|prefetch|printf|radians|remainder|remquo|rhadd|rint|rootn|rotate|round|rsqrt|"
    r"select|shuffle|shuffle2|sign|signbit|sin|sincos|sinh|sinpi|smoothstep|sqrt|step|sub_sat|tan|tanh|"
    r"tanpi|tgamma|trunc|upsample|vec_step"
)


class Names:
    """The identifiers of a kernel."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}

    def fresh(self, wanted: str) -> str:
        """The name wanted, as an identifier of OpenCL C, with a number where it is taken."""
        plain = _OTHER.sub("_", wanted) or "v"
        if plain[0].isdigit() or _RESERVED.fullmatch(plain):
            plain = f"v_{plain}"
        found = plain
        while found in self._taken:
            self._taken[plain] += 1
            found = f"{plain}_{self._taken[plain]}"
        self._taken[found] = 0
        return found
