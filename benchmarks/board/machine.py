"""Tests the model of the machine by small kernels: `python -m benchmarks.board machine`.

Predictions for a Mali, and the tables and the prior made from them, rest on assumptions that only a board can
test (honed.valhall.judge). Each question here compares the times of two kernels, or a launch's with a figure,
and says what the answer is and which of honed's choices it changes. The judges checked the instructions in an
iteration of each loop: Mesa 25.0 and 26.2 have 64 FMA beside 32 CVT or 16 SFU, and one address a load. The
kernels run in children: `python -m benchmarks.board.machine SPEC FIRST`.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from benchmarks import supervising
from honed.machine import devices
from honed.machine.families import mali_model
from honed.machine.microbench import Bench, empty_kernels
from honed.machine.opencl import cl, driver_call
from honed.machine.profile import DeviceIdentity
from honed.protocol import strict
from honed.protocol.errors import DeviceError

from .kernels import PREDICTED_FOR
from .report import columns, heading

COMMAND = (sys.executable, "-m", "benchmarks.board.machine")
_EACH_SECONDS = 20.0  # Limit for a kernel, including its build
_LONG_SECONDS = 2e-3  # Length of a launch, many times that of launching it
_MOST_TURNS = 1 << 20
_ITEMS_PER_UNIT, _GROUP = 2048, 64  # Work-items that keep a compute unit busy
_LINE = 16  # Floats in a line of memory, and lanes in a warp
_LOADS_APART = 1024  # Bytes, which 16 lanes a line apart touch
_WAITS = 100
_PREFIX = "machine_"  # Prefix of the kernels' names, as `fma` is a function

_CHAINS = "float a0 = x, a1 = x + 1, a2 = x + 2, a3 = x + 3, a4 = x + 4, a5 = x + 5, a6 = x + 6, a7 = x + 7;"
_FMA = " ".join(f"a{n} = mad(a{n}, b, c);" for n in range(8))
_SUM = " + ".join(f"a{n}" for n in range(8))
# Operations that each depend on the one before, so that no compiler shortens them.
_ADDS = "i0 += i1; i2 += i3; i1 += i0; i3 += i2;"
_MULTIPLIES = "i0 *= i1; i1 *= i0;"


def _arithmetic(name: str, start: str, turn: str, result: str, image: str = "") -> str:
    return (
        f"__kernel void {_PREFIX}{name}(__global float* sink, __global const float* in, int n{image}) {{ "
        "const int l = (int)get_local_id(0); const float x = (float)l, b = n > 0 ? 0.5f : 0.25f, c = 0.5f; "
        f"{start} for (int t = 0; t < n; ++t) {{ {turn} }} sink[get_global_id(0)] = (float)({result}); }}"
    )


def _halves(name: str, chains: int) -> str:
    """Return a kernel of as many chains of vectors of eight halves, and 64 multiply-adds a turn."""
    start = " ".join(f"half8 a{n} = (half8)((half)(x + {n}));" for n in range(chains))
    step = " ".join(f"a{n} = mad(a{n}, (half8)d, (half8)e);" for n in range(chains))
    total = " + ".join(f"a{n}" for n in range(chains))
    return _arithmetic(
        name,
        f"const half d = (half)b, e = (half)c; {start}",
        " ".join([step] * (8 // chains)),
        " + ".join(f"total.s{n}" for n in range(8)),
    ).replace("sink[", f"const half8 total = {total}; sink[")


_FROM = f"__global const uchar* q = (__global const uchar*)(in + {{place}}); long step = {4 * _LINE};"
_ON = " q += step; step = -step;"


def _loads(name: str, kind: str, place: str) -> str:
    """Return a kernel of eight loads a turn out of a few KiB; `place` is where lane `l` begins, in floats.

    A pointer that moves to and fro costs a turn two additions, and no shift.
    """
    turn = " ".join(f"a{n % 4} += *(__global const {kind}*)(q + {n * _LOADS_APART});" for n in range(8))
    return _arithmetic(
        name,
        f"{_FROM.format(place=place)} {kind} a0 = x, a1 = x, a2 = x, a3 = x;",
        turn + _ON,
        "a0 + a1 + a2 + a3" if kind == "float" else "dot(a0 + a1 + a2 + a3, (float4)1)",
    )


def _texels(name: str, *, texels: bool, pairs: bool) -> str:
    """Return a kernel of eight texels a turn, of eight loads of as many bytes, or of both.

    A texel has four halves, which OpenCL converts to singles: Mesa 25.0 loses half of those that stay halves.
    """
    start, turn = "float4 s = x; ", ""
    if texels:
        start += "int2 at = (int2)(l & 15, 0); "
        turn += " ".join(f"s += read_imagef(texels, at + (int2)(0, {n}));" for n in range(8)) + " at.y ^= 8;"
    if pairs:
        start += f"{_FROM.format(place='(l & 15) * 2')} float2 p = x; "
        turn += " ".join(f"p += *(__global const float2*)(q + {n * _LOADS_APART});" for n in range(8)) + _ON
    result = "dot(s, (float4)1)" + " + p.x + p.y" * pairs
    return _arithmetic(name, start, turn, result, f", __read_only {_IMAGE} texels" if texels else "")


_IMAGE, _IMAGE_ROWS = "image2d_t", 16
_INTEGERS = "int i0 = l, i1 = l | 1, i2 = l + 3, i3 = l | 5;"
_WHOLE = f"{_SUM} + i0 + i1 + i2 + i3"
# Kernels by name. An iteration of `fma` has 64 multiply-adds; `fma_add` adds 32 additions of integers, and
# `fma_mul` 16 multiplications, which keep their pipes busy for half of that time, and for all of it.
KERNELS: Mapping[str, str] = {
    "fma": _arithmetic("fma", _CHAINS, " ".join([_FMA] * 8), _SUM),
    "fma_add": _arithmetic("fma_add", _CHAINS + _INTEGERS, " ".join([_FMA + _ADDS] * 8), _WHOLE),
    "fma_mul": _arithmetic("fma_mul", _CHAINS + _INTEGERS, " ".join([_FMA + _MULTIPLIES] * 8), _WHOLE),
    "half32": _halves("half32", 4),
    "half64": _halves("half64", 8),
    "row": _loads("row", "float", "(l & 15)"),
    "four_rows": _loads("four_rows", "float", "(l & 3) + (l >> 2 & 3) * 64"),
    "column": _loads("column", "float", f"(l & 15) * {_LINE}"),
    "wide": _loads("wide", "float4", "(l & 15) * 4"),
    "texels": _texels("texels", texels=True, pairs=False),
    "pairs": _texels("pairs", texels=False, pairs=True),
    "texels_pairs": _texels("texels_pairs", texels=True, pairs=True),
    "queued": "",  # An empty kernel
    "waited": "",
}
_FLOATS = 8 << 10  # Floats that are loaded from


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """The result of one kernel, in us: of a turn of its loop at the least, or why there is none.

    Of an empty kernel it is the time from one to the next in a queue, or of one that the host waits for.
    """

    us: float | None = None
    failed: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """A possible answer of a board: its range of figures, its text, and the choices that it changes.

    `flips` is empty if honed's choices were made for this answer.
    """

    least: float
    most: float
    text: str
    flips: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """A question answered by the time of kernel `of` over that of `per`, or its time in us without `per`."""

    text: str
    of: str
    per: str
    answers: tuple[Answer, ...]


_AGAIN = "tables and prior are to be learned again by `alu`, by which larger tiles gain less"
# The bounds enclose the ratios that the judges' counts of these kernels have under each assumption.
QUESTIONS = (
    Question(
        "FMA and CVT share the issue of instructions",
        "fma_add",
        "fma",
        (Answer(0.8, 1.2, "no, the busiest pipe bounds"), Answer(1.35, 1.8, "yes, `alu` bounds", _AGAIN)),
    ),
    Question(
        "FMA and SFU share it",
        "fma_mul",
        "fma",
        (Answer(0.8, 1.1, "no"), Answer(1.15, 1.5, "yes", _AGAIN)),
    ),
    Question(
        "halves are multiplied in pairs in a loop",
        "half32",
        "fma",
        (
            Answer(0.4, 0.7, "yes"),
            Answer(0.8, 1.3, "no", "bounds are `plain`, not `packed`: fp16 saves memory, not arithmetic"),
        ),
    ),
    Question(
        "64 sums in halves fit the registers, as of a tile of 8x8",
        "half64",
        "half32",
        (
            Answer(0.7, 1.4, "yes", "tiles of 6x8 and 8x8 are served first, as for Mesa since 26.1"),
            Answer(2.0, math.inf, "no, they spill"),
        ),
    ),
    Question(
        "four rows of four lanes cost four lines",
        "four_rows",
        "row",
        (Answer(0.8, 1.3, "no, one", "groups of 8x8 load as cheaply as 16x4"), Answer(1.7, 5.0, "yes")),
    ),
    Question(
        "lanes a line apart cost sixteen lines",
        "column",
        "row",
        (Answer(0.8, 1.5, "no, one", "weights need no packing for Malis"), Answer(6.0, 20.0, "yes")),
    ),
    Question(
        "four floats a lane cost four lines",
        "wide",
        "row",
        (Answer(0.8, 1.3, "no, one", "the widest loads are always best"), Answer(1.7, 5.0, "yes")),
    ),
    Question(
        "a texel of four halves takes twice as long as a load of 8 bytes",
        "texels",
        "pairs",
        (
            Answer(0.3, 1.3, "no, as long", "weights as images are to be tried, by read_imagef"),
            Answer(1.6, 5.0, "yes"),
        ),
    ),
    Question(
        "texels come while buffers are loaded",
        "texels_pairs",
        "texels",
        (
            Answer(0.8, 1.2, "yes"),
            Answer(1.3, 4.0, "no, one after the other", "images take nothing off the loads of buffers"),
        ),
    ),
    Question(
        "a launch in a queue takes 4 us",
        "queued",
        "",
        (
            Answer(0.0, 6.0, "at most about"),
            Answer(6.0, math.inf, "more", "an attention in one kernel may pay on Malis"),
        ),
    ),
    Question(
        "a launch that is waited for takes 14 us",
        "waited",
        "",
        (
            Answer(0.0, 30.0, "at most about"),
            Answer(30.0, math.inf, "more", "turns with the CPU engine cost more: fewer partitions pay"),
        ),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The device's answer to a question; `answer` says why there is no `figure` if that is None."""

    question: str
    figure: float | None
    answer: str
    flips: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The output of `--json`. `applies`: the predictions are for this device."""

    device: DeviceIdentity
    applies: bool
    kernels: dict[str, Timed]
    said: tuple[Said, ...]


def settle(identity: DeviceIdentity, spec: str, seconds: float) -> Settled:
    """Measure the kernels in children within about `seconds`, and answer the questions."""
    command = [*COMMAND, spec]
    found = supervising.work_off(Timed, command, len(KERNELS), seconds, each_seconds=_EACH_SECONDS)
    timed = dict(zip(KERNELS, found, strict=True))
    model = mali_model(identity.name)
    return Settled(
        device=identity,
        applies=model is not None and model.name == PREDICTED_FOR,
        kernels=timed,
        said=tuple(answered(question, timed) for question in QUESTIONS),
    )


def answered(question: Question, timed: Mapping[str, Timed]) -> Said:
    """Return the answer that the times give."""
    kernels = [timed[name] for name in (question.of, question.per) if name]
    failed = next((one.failed for one in kernels if not one.us), "")
    times = [one.us for one in kernels if one.us]
    if len(times) < len(kernels):
        return Said(question=question.text, figure=None, answer=failed, flips="")
    figure = times[0] / times[1] if question.per else times[0]
    for answer in question.answers:
        if answer.least <= figure <= answer.most:
            return Said(question=question.text, figure=figure, answer=answer.text, flips=answer.flips)
    return Said(question=question.text, figure=figure, answer="not clear", flips="")


def table(found: Settled) -> str:
    """Return the answers as text."""
    rows = [
        (one.question, "-" if one.figure is None else f"{one.figure:.2f}", one.answer, one.flips or "-")
        for one in found.said
    ]
    whose = f"They are for a {PREDICTED_FOR}, as this device is."
    if not found.applies:
        whose = f"This is {found.device.name}, whose answers say nothing about a {PREDICTED_FOR}."
    return (
        heading("The model of the machine")
        + columns([("question", "figure", "answer", "what that flips for a Mali"), *rows])
        + f"{whose}\nA turn or a launch takes, in us: "
        + ", ".join(f"{name} {one.us:.4g}" for name, one in found.kernels.items() if one.us)
        + "\n"
    )


def main(spec: str, first: str) -> int:
    """Measure from kernel FIRST on, and print each result."""
    with os.fdopen(os.dup(1), "w", buffering=1) as printed:
        os.dup2(2, 1)  # Drivers print
        bench = Bench(devices.select(spec))
        for number, (name, source) in enumerate(KERNELS.items()):
            if number >= int(first):
                printed.write(f"{number}\n")
                printed.write(json.dumps(strict.to_plain(_timed(bench, name, source))) + "\n")
    return 0


def _timed(bench: Bench, name: str, source: str) -> Timed:
    if "half" in source and not bench.limits.fp16:
        return Timed(failed="the device computes no halves (cl_khr_fp16)")
    if _IMAGE in source and not bench.device.cl.image_support:
        return Timed(failed="the device has no images")
    try:
        with driver_call(f"build or run the kernel {name}"):
            if not source:
                return Timed(us=empty_kernels(bench)[0] if name == "queued" else _waited(bench))
            images = [_image(bench)] * (_IMAGE in source)
            return Timed(us=_turn(bench, cl.Kernel(bench.build(source), _PREFIX + name), *images) * 1e6)
    except DeviceError as error:
        return Timed(failed=str(error))


def _image(bench: Bench) -> Any:
    """Return an image of a few texels of four halves."""
    kind = cl.ImageFormat(cl.channel_order.RGBA, cl.channel_type.HALF_FLOAT)
    return cl.create_image(bench.context, cl.mem_flags.READ_ONLY, kind, shape=(_LINE, _IMAGE_ROWS))


def _turn(bench: Bench, kernel: Any, *images: Any) -> float:
    """Return the seconds of a turn of the kernel's loop, at the least."""
    items = bench.limits.compute_units * _ITEMS_PER_UNIT
    sink, loaded = bench.buffer(items * 4), bench.buffer(_FLOATS * 4)
    cl.enqueue_fill_buffer(bench.queue, loaded, np.float32(1), 0, _FLOATS * 4)
    turns = 16
    while True:
        seconds = bench.seconds(kernel, items, _GROUP, sink, loaded, np.int32(turns), *images)
        if seconds >= _LONG_SECONDS or turns >= _MOST_TURNS:
            break
        turns *= 2
    return bench.shortest(kernel, items, _GROUP, sink, loaded, np.int32(turns), *images) / turns


def _waited(bench: Bench) -> float:
    """Return the microseconds of a launch that the host waits for, by its clock: the median of many."""
    kernel = cl.Kernel(bench.build("__kernel void empty(__global float* sink) { }"), "empty")
    queue = cl.CommandQueue(bench.context)  # Takes no times, like the executor's
    sink, taken = bench.buffer(64), list[float]()  # Kernels do not hold their buffers
    kernel.set_args(sink)
    for _ in range(_WAITS):
        began = time.perf_counter()
        cl.enqueue_nd_range_kernel(queue, kernel, (1,), (1,))
        queue.finish()
        taken.append(time.perf_counter() - began)
    return median(taken) * 1e6


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
