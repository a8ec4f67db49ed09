"""Kernels run with each buffer against a page that may not be touched: what leaves it ends its process.

    python -m tests.tuner.fence [--profile cpu,mali,nvidia] [--graphs 1000] [--first 0] [--seconds S]
                                [--models] [--nodes] [FILE ...]

Lowers random graphs by seed (tests/tuner/graphs_random.py), the models of tests/models, ONNX's node tests,
or files (those of `python -m benchmarks.prior.zoo` for instance), for processors, Malis or NVIDIA's GPUs, and
runs each kernel twice on an OpenCL device that shares the host's memory: with pages behind its buffers and
bytes that are large as integers in them, and with pages before its buffers and bytes that are -1. Exits with
1 where a kernel left its buffers, or a model was refused because one may.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

import onnx

from honed.machine import devices
from honed.machine.profile import DeviceProfile
from honed.protocol.errors import InvalidArgument, ModelRefused
from honed.tuner import frontend
from honed.tuner.compiler.compile import prepare
from honed.tuner.compiler.fusion import FusionPolicy
from honed.tuner.compiler.schedules import NOTHING, untuned_kernels
from honed.tuner.lower.module import lower_module
from honed.tuner.lower.program import Function, MemoryValue

from .graphs_random import random_model
from .search.search_functions import profile_of

FAMILIES = {"cpu": "cpu", "mali": "mali", "nvidia": "gpu"}
_FILLS = {False: 0x7F, True: 0xFF}  # by whether the page lies before the buffers
_SECONDS = 120.0  # that one kernel may take


@dataclass(frozen=True, slots=True)
class FencedKernel:
    """What it takes to run one kernel on buffers of its own."""

    source: str
    entry: str
    sizes: tuple[int, ...]  # of its arguments, in bytes
    items: tuple[int, int, int]
    block: tuple[int, int, int]


def kernels_of(function: Function) -> list[FencedKernel]:
    """The kernels of a function, in order."""
    return [
        FencedKernel(
            function.source,
            launch.entry,
            tuple(t.nbytes for t in launch.arg_types),
            (
                launch.grid[0] * launch.block[0],
                launch.grid[1] * launch.block[1],
                launch.grid[2] * launch.block[2],
            ),
            launch.block,
        )
        for launch in function.launches
    ]


def lowered(model: onnx.ModelProto, profile: DeviceProfile) -> list[FencedKernel]:
    """The kernels of a checked model, with schedules that need no trial; raises ModelRefused."""
    normalised = prepare(model, {}, "fp32", profile).normalised
    imported = frontend.import_named(normalised)
    joining = FusionPolicy(profile, NOTHING.times)
    made = lower_module(imported.module, profile, first=untuned_kernels, names=imported.names, joins=joining)
    return [kernel for function in made.functions.values() for kernel in kernels_of(function)]


class FencedRuns:
    """Runs kernels in a child, which is started anew where one ends it; a context manager."""

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._child: multiprocessing.context.SpawnProcess | None = None
        self._channel: Connection | None = None
        self._done: dict[FencedKernel, str] = {}

    def __enter__(self) -> FencedRuns:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def run(self, kernel: FencedKernel) -> str:
        """How it left its buffers, "" where it did not; "not built: ..." by a device that cannot."""
        if kernel not in self._done:
            self._done[kernel] = self._ask(kernel)
        return self._done[kernel]

    def _ask(self, kernel: FencedKernel) -> str:
        if self._channel is None:
            context = multiprocessing.get_context("spawn")
            self._channel, theirs = context.Pipe()
            self._child = context.Process(target=_serve, args=(theirs, self._device), daemon=True)
            self._child.start()
            theirs.close()
        try:
            self._channel.send(kernel)
            if not self._channel.poll(_SECONDS):
                self._stop()
                return f"not finished within {_SECONDS:.0f} s"
            return str(self._channel.recv())
        except (EOFError, ConnectionError):
            assert self._child is not None
            self._child.join()
            status = self._child.exitcode
            self._stop()
            return f"its process ended with status {status}"

    def _stop(self) -> None:
        if self._child is not None and self._channel is not None:
            self._channel.close()
            self._child.kill()
            self._child.join()
            self._child = self._channel = None


def _serve(channel: Connection, device: str) -> None:
    """The child: runs what it is sent, until nobody sends any more."""
    import pyopencl as cl

    from honed.machine.opencl import context
    from honed.tuner.measure.session import FencedBuffer

    chosen = devices.select(device).cl
    made = context(chosen)
    queue = cl.CommandQueue(made)
    programs: tuple[str, object] = ("", None)
    while True:
        try:
            kernel: FencedKernel = channel.recv()
        except EOFError:
            return
        if kernel.source != programs[0]:
            try:
                programs = kernel.source, cl.Program(made, kernel.source).build()
            except cl.Error as error:
                channel.send(f"not built: {str(error).splitlines()[0]}")
                continue
        bound = cl.Kernel(programs[1], kernel.entry)
        for before, fill in _FILLS.items():
            values = [MemoryValue(dtype="uint8", shape=(size,)) for size in kernel.sizes]
            fenced = [FencedBuffer(made, value, before=before) for value in values]
            for one in fenced:
                one.host[:] = fill
            bound.set_args(*(one.buffer for one in fenced))
            cl.enqueue_nd_range_kernel(queue, bound, kernel.items, kernel.block)
            queue.finish()
            for one in fenced:
                one.release()
        channel.send("")


@dataclass(slots=True)
class Found:
    """What came of many models."""

    models: int = 0
    refused: int = 0
    kernels: int = 0
    not_built: int = 0
    bad: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.models} models lowered, {self.refused} refused; {self.kernels} kernels, "
            f"{self.not_built} not built here; {len(self.bad)} beyond their buffers"
        )


def examine(
    models: Iterable[tuple[str, onnx.ModelProto]],
    profile: DeviceProfile,
    runs: FencedRuns,
    *,
    show: bool = False,
) -> Found:
    """Lower models and run all their kernels."""
    found = Found()
    for name, model in models:
        try:
            kernels = lowered(model, profile)
        except (ModelRefused, InvalidArgument) as refused:
            found.refused += 1
            why = "; ".join((str(refused), *getattr(refused, "reasons", ())))
            if "may lie outside" in why:
                found.bad.append(f"{name}: {why}")
                print(found.bad[-1], flush=True)
            continue
        found.models += 1
        for kernel in kernels:
            found.kernels += 1
            said = runs.run(kernel)
            if said.startswith("not built"):
                found.not_built += 1
            elif said:
                found.bad.append(f"{name}: {kernel.entry}: {said}")
                print(found.bad[-1], flush=True)
        if show and (found.models + found.refused) % 20 == 0:
            print(f"  {name}: {found}", flush=True)
    return found


def random_models(
    first: int, count: int, seconds: float = float("inf")
) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Random graphs by seed, for as long as there is time."""
    until = time.monotonic() + seconds
    for seed in range(first, first + count):
        if time.monotonic() > until:
            return
        yield f"random graph {seed}", random_model(seed)


def files(paths: Iterable[Path]) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Models of files."""
    for path in paths:
        yield path.name, frontend.load(path)


def node_tests(first: int = 0) -> Iterator[tuple[str, onnx.ModelProto]]:
    """ONNX's node tests from the `first` one on, with parameters frozen as exporters write them."""
    import numpy as np

    from .backend import cases

    for name, case in itertools.islice(cases.all_cases().items(), first, None):
        model = case.model()
        folder = (case.sets() or [case.folder])[0]
        given = case.data("input", folder, list(model.graph.input))
        inputs = {
            i.name: v for i, v in zip(model.graph.input, given, strict=True) if isinstance(v, np.ndarray)
        }
        yield name, cases.freeze(model, inputs)[0]


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--profile", default="cpu,mali,nvidia")
    parser.add_argument("--graphs", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="of random graphs and node tests")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--models", action="store_true")
    parser.add_argument("--nodes", action="store_true")
    options = parser.parse_args()
    device = devices.select("cpu").profile
    bad = 0
    with FencedRuns() as runs:
        for name in options.profile.split(","):
            profile = profile_of(FAMILIES[name], device)
            parts = {"files": files(options.files)}
            if options.models:
                parts["models"] = files(sorted((Path(__file__).parents[1] / "models").glob("*.onnx")))
            if options.nodes:
                parts["node tests"] = node_tests(options.first)
            if options.graphs:
                parts["random graphs"] = random_models(options.first, options.graphs, options.seconds)
            for kind, models in parts.items():
                found = examine(models, profile, runs, show=True)
                if found.models or found.refused:
                    print(f"{name}, {kind}: {found}", flush=True)
                bad += len(found.bad)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
