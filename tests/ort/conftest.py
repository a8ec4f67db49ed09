"""The preload library, a program that it is for, and a model that takes its time."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.daemon.running import wait_for
from tests.libhoned.binding import build, lacking

HERE = Path(__file__).parent
Made = Callable[[str, Callable[[Path], object]], Path]
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined"
WIDTH = 512
CLIENT_SECONDS = 500


@dataclass(frozen=True)
class Ended:
    """A program that has ended: its lines of JSON by who, and what it said."""

    of: Mapping[str, Mapping[str, int]]
    stderr: str


@dataclass(frozen=True)
class Client:
    """client.c with a model; `preloaded` is the libraries of LD_PRELOAD."""

    program: Path
    runtime: str
    model: Path
    preloaded: str

    def __call__(
        self,
        socket: Path,
        *keys: str,
        before: tuple[str, ...] = (),
        until: Callable[[], object] | None = None,
        **settings: str,
    ) -> Ended:
        """Run it; it has to end by itself, without an error. Its runs go on `until` something holds.

        It rests between runs: the library tries the service when the app has run for some time.
        """
        command = [*before, str(self.program), self.runtime, str(self.model), "pause=8", *keys]
        command += ["milliseconds=-1"] * (until is not None)
        preload = {"LD_PRELOAD": self.preloaded} if self.preloaded else {}
        # A busy machine takes a processor away for longer than a run; this does not lose a row.
        given = {"HONED_SOCKET": str(socket), "HONED_ORT_ALLOWANCE": "5", "ASAN_OPTIONS": "detect_leaks=0"}
        env = {**os.environ, **given, **preload, **settings}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, env=env, text=True, **pipes) as process:
            if until is not None:
                wait_for(lambda: until() or process.poll() is not None, "what its runs wait for")
            out, err = process.communicate(timeout=CLIENT_SECONDS)
        assert process.returncode == 0, err
        lines: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines()]
        return Ended({line.pop("who"): line for line in lines}, err)


def write_model(path: Path, *, depth: int = 110, external: bool = False) -> None:
    """Write a model with y = x, after so many multiplications of matrices that count for nothing."""
    generator = np.random.default_rng(1)
    weights = (generator.standard_normal((WIDTH, WIDTH)) / WIDTH).astype(np.float32)
    tensors = [numpy_helper.from_array(weights, "w")] * bool(depth) + [
        numpy_helper.from_array(np.zeros(1, np.float32), "zero")
    ]
    names = ["x", *(f"h{i}" for i in range(depth))]
    nodes = [helper.make_node("MatMul", [a, "w"], [b]) for a, b in pairwise(names)]
    nodes += [helper.make_node("Mul", [names[-1], "zero"], ["z"]), helper.make_node("Add", ["x", "z"], ["y"])]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", WIDTH]) for name in "xy"]
    graph = helper.make_graph(nodes, "slow", ends[:1], ends[1:], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, path, save_as_external_data=external, location="weights.bin", size_threshold=1024)


@pytest.fixture(scope="session")
def runtime() -> str:
    """A libonnxruntime.so: that of sherpa-onnx."""
    return str(
        importlib.metadata.distribution("sherpa-onnx-core").locate_file("sherpa_onnx/lib/libonnxruntime.so")
    )


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of some milliseconds."""
    path = tmp_path_factory.mktemp("slow") / "slow.onnx"
    write_model(path)
    return path


def compile_client(path: Path, *flags: str) -> None:
    """Compile client.c; with flags that link ONNX Runtime it asks for it by name."""
    command = ["gcc", "-std=gnu99", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-o", str(path)]
    subprocess.run([*command, str(HERE / "client.c"), "-pthread", *flags, "-ldl"], check=True)


@pytest.fixture(scope="session")
def program(made_once: Made) -> Path:
    """client.c, which opens ONNX Runtime itself."""
    return made_once("ort-client", compile_client)


@pytest.fixture(scope="session")
def preload(made_once: Made) -> Path:
    """The folder with libhoned-ort.so."""
    if missing := lacking():
        pytest.skip(f"there is no {', '.join(missing)}")
    return made_once("libhoned", build)


@pytest.fixture(scope="session")
def sanitized(made_once: Made, preload: Path) -> str:
    """What to preload for the library with checks of memory and of undefined behaviour."""
    folder = made_once("libhoned-sanitized", lambda path: build(path, f"CFLAGS=-O1 -g {SANITIZERS}"))
    found = [
        subprocess.run(
            ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    return ":".join([*found, str(folder / "libhoned-ort.so")])


@pytest.fixture(scope="session")
def client(program: Path, runtime: str, slow_model: Path, preload: Path) -> Client:
    """The program with the library preloaded."""
    return Client(program, runtime, slow_model, str(preload / "libhoned-ort.so"))
