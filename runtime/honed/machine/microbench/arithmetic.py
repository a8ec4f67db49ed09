"""The peak of multiply-adds in registers: many forms of a kernel in short launches, the best in long ones.

What a form must get right differs: a CPU wants vectors of just its registers' width, and as many independent
chains as its units hold in flight, yet no more than it has registers; a GPU wants few registers a work-item.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from honed.machine.opencl import cl

from .bench import Bench

# Independent accumulators by width of vectors: units of latency 4 with two pipes need 8 in flight.
_CHAINS = {1: (8,), 2: (8,), 4: (4, 8, 12), 8: (4, 8, 12), 16: (4, 8, 12)}
_UNROLLED = 4  # steps of all chains in one turn of the loop, so that the loop itself costs nothing
_GROUPS = (64, 256)  # work-items
_ITEMS_PER_UNIT = 2048  # what the largest compute units hold at once
_SHORT_SECONDS = 1e-3  # of a launch in the first round
_SHORT_TRIES = 3
_LONG_SECONDS = 0.02  # of a launch at the end: enough for a clock to rise, too little for any watchdog
_SHORTER = 16  # a launch as much shorter fits between the interruptions of a busy CPU
_FINALISTS = 2
_MOST_ITERATIONS = 1 << 22


@dataclass(frozen=True, slots=True)
class ArithmeticForm:
    """One way of keeping the device busy. `fma` is one instruction or, on some devices, slower than `mad`."""

    width: int  # of its vectors
    chains: int
    function: Literal["fma", "mad"] = "fma"
    group: int = _GROUPS[0]  # work-items of a work-group

    @property
    def name(self) -> str:
        """The name of its kernel; the work-group is no part of that."""
        return f"{self.function}_{self.width}_{self.chains}"

    def operations(self, items: int) -> float:
        """The operations of all work-items in one turn of the loop; a multiply-add is two."""
        return 2.0 * self.width * self.chains * _UNROLLED * items


def forms(accumulators: int) -> list[ArithmeticForm]:
    """What is tried first on a device that spills beyond so many scalars."""
    return [
        ArithmeticForm(width, n)
        for width, chains in _CHAINS.items()
        for n in chains
        if width * n <= accumulators
    ]


def finalists(rates: dict[ArithmeticForm, float], largest_group: int) -> list[ArithmeticForm]:
    """The best forms of the first round, and the neighbours of the very best."""
    first, *others = sorted(rates, key=lambda form: -rates[form])[:_FINALISTS]
    larger = [replace(first, group=group) for group in _GROUPS[1:] if group <= largest_group]
    return [first, replace(first, function="mad"), *larger, *others]


def source(form: ArithmeticForm, scalar: str) -> str:
    """The kernel of a form, for "float" or "half"."""
    kind = scalar if form.width == 1 else f"{scalar}{form.width}"
    chains = range(form.chains)
    start = " ".join(f"{kind} a{i} = ({kind})(({scalar})({i} + (int)get_local_id(0)));" for i in chains)
    step = " ".join(f"a{i} = {form.function}(a{i}, b, c);" for i in chains)
    total = " + ".join(f"a{i}" for i in chains)
    components = "total" if form.width == 1 else " + ".join(f"total.s{i:x}" for i in range(form.width))
    # b and c depend on an argument, so that nothing can be computed ahead; the values converge to 1.
    return (
        f"__kernel void {form.name}(__global float* sink, int n) {{ {start}"
        f" const {kind} b = ({kind})(({scalar})(n > 0 ? 0.5f : 0.25f)), c = ({kind})(({scalar})0.5f);"
        f" for (int i = 0; i < n; ++i) {{ {' '.join([step] * _UNROLLED)} }}"
        f" const {kind} total = {total}; sink[get_global_id(0)] = (float)({components}); }}\n"
    )


def gflops(bench: Bench, scalar: str) -> float:
    """GFLOP/s of the best form."""
    items = bench.limits.compute_units * _ITEMS_PER_UNIT
    sink = bench.buffer(items * 4)
    tried = forms(bench.device.profile.family.accumulators)
    program = bench.built("".join(source(form, scalar) for form in tried))
    rates = {form: _quick(bench, cl.Kernel(program, form.name), form, items, sink) for form in tried}
    last = finalists(rates, bench.limits.max_work_group_size)
    sources = {form.name: source(form, scalar) for form in last}
    program = bench.built("".join(sources.values()))
    return max(_thorough(bench, cl.Kernel(program, form.name), form, items, sink) for form in last) * 1e-9


def _quick(bench: Bench, kernel: Any, form: ArithmeticForm, items: int, sink: Any) -> float:
    iterations = _calibrated(bench, kernel, form, items, sink, _SHORT_SECONDS)
    tries = [
        bench.seconds(kernel, items, form.group, sink, np.int32(iterations)) for _ in range(_SHORT_TRIES)
    ]
    return form.operations(items) * iterations / min(tries)


def _thorough(bench: Bench, kernel: Any, form: ArithmeticForm, items: int, sink: Any) -> float:
    long = _calibrated(bench, kernel, form, items, sink, _LONG_SECONDS)
    each = [
        bench.shortest(kernel, items, form.group, sink, np.int32(iterations)) / iterations
        for iterations in (long, max(1, long // _SHORTER))
    ]
    return form.operations(items) / min(each)


def _calibrated(bench: Bench, kernel: Any, form: ArithmeticForm, items: int, sink: Any, wanted: float) -> int:
    """How many iterations take about `wanted` seconds."""
    iterations = 1
    bench.seconds(kernel, items, form.group, sink, np.int32(iterations))  # the first launch may compile
    while True:
        seconds = bench.seconds(kernel, items, form.group, sink, np.int32(iterations))
        if seconds >= wanted / 4 or iterations >= _MOST_ITERATIONS:
            return iterations
        growth = wanted / seconds if seconds > wanted / 64 else 16.0
        iterations = min(int(iterations * min(growth, 16.0)) + 1, _MOST_ITERATIONS)
