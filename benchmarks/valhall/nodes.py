"""The kernels of ONNX's node tests by each judge: `python -m benchmarks.valhall nodes --judges 25.0,26.2`.

Finds whether they build, and which spill: the kernels first served to each judge's class of drivers of each
test that can be compiled, in the model's own types; functions of equal text count once. Several are built as
one program, which takes an emulated compiler little longer than one of them; if it refuses that, both halves
are built again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from tests.tuner.backend import cases

from honed.machine.families import DriverClass
from honed.machine.profile import DeviceProfile
from honed.protocol.errors import HonedError
from honed.tuner import frontend
from honed.tuner.compiler.compile import prepare
from honed.tuner.compiler.fusion import FusionPolicy
from honed.tuner.compiler.schedules import untuned_kernels
from honed.tuner.lower.module import legal_model
from honed.tuner.lower.target import target_for
from honed.valhall.compiler import Dump, OfflineCompileFailed
from honed.valhall.dump import kernels
from honed.valhall.judge import MachineCodeJudge

from .tasks import profile

_TOGETHER = 16  # Functions of a program
_NAME = "node"
_KERNEL = "__kernel"


@dataclass(frozen=True, slots=True)
class Function:
    """The kernels of a function as OpenCL C, and the first test with them."""

    test: str
    source: str


@dataclass(slots=True)
class Counts:
    """The counts for a class of drivers: tests with kernels, tests without, and kernels."""

    tests: int = 0
    refused: int = 0
    kernels: int = 0
    functions: list[Function] = field(default_factory=list)


def report(judges: Mapping[str, MachineCodeJudge], only: str) -> None:
    """Print how many kernels each judge builds, which it refuses, with its words, and which spill."""
    by_class = dict[DriverClass, list[str]]()
    for name in judges:
        by_class.setdefault(profile(name).driver, []).append(name)
    begun: dict[str, list[tuple[list[Function], Future[Dump]]]] = {name: [] for name in judges}
    for names in by_class.values():
        counts = Counts()
        for together in _programs(counts, only, profile(names[0])):
            for name in names:
                begun[name].append((together, judges[name].begin(joined(together))))
        print(
            f"{', '.join(names)}: {counts.tests} tests are compiled and {counts.refused} are not: "
            f"{len(counts.functions)} functions, {counts.kernels} kernels",
            flush=True,
        )
    for name, judge in judges.items():
        refused, spilling = 0, 0
        for together, dump in begun[name]:
            for one, built in _built(judge, together, dump):
                if isinstance(built, OfflineCompileFailed):
                    refused += 1
                    print(f"{name} refuses {one[0].test}: {built}\n{one[0].source}", flush=True)
                    continue
                for kernel in kernels(built).values():
                    if kernel.spills:
                        spilling += 1
                        tests = ", ".join(each.test for each in one)
                        print(f"{name} spills {kernel.spills}:{kernel.fills} in one of {tests}", flush=True)
        print(f"{name} refuses {refused} functions; {spilling} kernels spill", flush=True)


def joined(functions: Sequence[Function]) -> str:
    """Return one program of functions that have the same text before their kernels."""
    before, _, _ = functions[0].source.partition(_KERNEL)
    kernels = [
        one.source.removeprefix(before).replace(f"{_NAME}_kernel", f"{_NAME}{n}_kernel")
        for n, one in enumerate(functions)
    ]
    return before + "\n".join(kernels)


def _programs(counts: Counts, only: str, device: DeviceProfile) -> Iterator[list[Function]]:
    """Yield functions that make one program, as the tests are compiled."""
    waiting = dict[str, list[Function]]()  # Functions by the text before their kernels
    seen = set[str]()
    names = [name for name in sorted(cases.all_cases()) if only in name]
    for n, name in enumerate(names):
        if n % 100 == 0:
            print(f"{n} of {len(names)} tests, {len(seen)} functions", file=sys.stderr, flush=True)
        try:
            sources = list(_sources(cases.all_cases()[name], device))
        except HonedError:
            counts.refused += 1
            continue
        counts.tests += 1
        for source in sources:
            if source in seen:
                continue
            seen.add(source)
            one = Function(name, source)
            counts.functions.append(one)
            counts.kernels += source.count(_KERNEL)
            mine = waiting.setdefault(source.partition(_KERNEL)[0], [])
            mine.append(one)
            if len(mine) == _TOGETHER:
                yield list(mine)
                mine.clear()
    yield from (mine for mine in waiting.values() if mine)


def _sources(case: cases.Case, device: DeviceProfile) -> Iterator[str]:
    """Yield the OpenCL C of a test's functions; raise HonedError if it cannot be compiled."""
    model = case.model()
    folder = (case.sets() or [case.folder])[0]
    given = case.data("input", folder, list(model.graph.input))
    arrays = {i.name: v for i, v in zip(model.graph.input, given, strict=True) if isinstance(v, np.ndarray)}
    frozen, _ = cases.freeze(model, arrays)
    normalised = prepare(frozen, {}, "auto", device).normalised
    legal = legal_model(frontend.import_relax(normalised), device, FusionPolicy(device))
    for func in legal.functions.values():
        yield untuned_kernels(func, _NAME, target_for(device), device)[1].source


def _built(
    judge: MachineCodeJudge, functions: list[Function], dump: Future[Dump]
) -> Iterator[tuple[list[Function], Dump | OfflineCompileFailed]]:
    """Yield functions with their build: together if they build, else each with the compiler's error."""
    try:
        yield functions, dump.result()
    except OfflineCompileFailed as failed:
        if len(functions) == 1:
            yield functions, failed
            return
        half = len(functions) // 2
        halves = [(part, judge.begin(joined(part))) for part in (functions[:half], functions[half:])]
        for part, again in halves:
            yield from _built(judge, part, again)
