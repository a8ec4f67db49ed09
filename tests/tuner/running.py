"""Real tuning runs of a small model, as processes to watch and to kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import onnx
import psutil
from onnx import helper

from honed.jobs.events import News, to_map
from honed.machine.kernellog.reader import Reader
from honed.machine.profile import DeviceProfile
from honed.tuner.measure.candidate import MeasureLimits
from honed.tuner.measure.measurer import Measurer
from honed.tuner.records.store import Records
from honed.tuner.setup import setup_for
from honed.tuner.tune.children import Proposals, SearchChild
from honed.tuner.tune.session import Rooflines, TuningSession
from honed.tuner.tune.trials import Trials
from tests.processes import running_children

ROOT = Path(__file__).parents[2]
ROWS, INNER, OUTER = 64, 128, 256
LIMITS = MeasureLimits(build_seconds=120.0, run_seconds=10.0)  # for a busy machine
SEARCHING, MEASURING = "honed.tuner.tune.searcher", "honed.tuner.measure.child"


def weights() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((INNER, OUTER)).astype(np.float32)


def given() -> np.ndarray:
    return np.linspace(-1, 1, ROWS * INNER, dtype=np.float32).reshape(ROWS, INNER)


def expected() -> np.ndarray:
    """y = softmax(x w) of `given`."""
    products = given().astype(np.float64) @ weights()
    powers = np.exp(products - products.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True), np.float32)


def write_model(path: Path, rows: int = ROWS) -> Path:
    """y = softmax(x w): two tasks, a matrix product and a softmax."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Softmax", ["a"], ["y"], axis=-1),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, [rows, INNER])],
        [helper.make_tensor_value_info("y", 1, [rows, OUTER])],
        [onnx.numpy_helper.from_array(weights(), "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def write_convolution(path: Path) -> Path:
    """A convolution in groups, whose first schedule takes four times what may be found, by the bench."""
    kernels = np.random.default_rng(0).standard_normal((64, 12, 3, 3)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1], group=4)],
        "g",
        [helper.make_tensor_value_info("x", 1, [1, 48, 28, 28])],
        [helper.make_tensor_value_info("y", 1, [1, 64, 28, 28])],
        [onnx.numpy_helper.from_array(kernels, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


class Tuning:
    """`python -m honed.tuner tune` as a process; a context manager that leaves none behind."""

    def __init__(self, model: Path, records: Path, cache_dir: Path, *options: str) -> None:
        command = [sys.executable, "-m", "honed.tuner", "tune", str(model)]
        command += [f"--records={records}", f"--cache-dir={cache_dir}", "--name=m", *options]
        self.events: list[dict[str, Any]] = []
        self._log = records.with_suffix(".log").open("ab")
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        )

    def __enter__(self) -> Tuning:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate()
        self._log.close()

    def reported(self) -> Iterator[dict[str, Any]]:
        """Its events, as they come; all are kept in `events`, too."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.endswith("\n"):
                return  # it was killed while it wrote
            event: dict[str, Any] = json.loads(line)
            self.events.append(event)
            yield event

    def finish(self) -> dict[str, Any]:
        """The last event, once it has ended."""
        for _ in self.reported():
            pass
        self.process.wait()
        return self.events[-1]

    def child(self, module: str) -> psutil.Process | None:
        """Its child that runs `module`; None while there is none."""
        return next(iter(running_children(module, of=self.process.pid)), None)


@contextmanager
def session(
    spec: str,
    profile: DeviceProfile,
    records: Path,
    search: SearchChild,
    emit: Callable[[dict[str, Any]], None],
    *,
    kernel_log: Reader | None = None,
    peaks_again: Callable[[], DeviceProfile] | None = None,
    trust_defaults: bool = False,
    ahead: bool = False,
    builders: int = 0,
) -> Iterator[TuningSession]:
    """A session in this process, with real records and a real measuring child."""
    with Records.open(records) as opened:
        trials = Trials(
            lambda begin: Measurer(
                spec, profile, LIMITS, kernel_log=kernel_log, begin=begin, builders=builders
            ),
            opened,
            setup_for(profile.identity),
        )
        rooflines = Rooflines(profile, peaks_again or (lambda: profile))
        proposals = Proposals(search, opened, trials.setup, ahead=ahead)

        def tell(news: News) -> None:
            emit(to_map(news))

        yield TuningSession("m", rooflines, trials, proposals, tell, trust_defaults=trust_defaults)
