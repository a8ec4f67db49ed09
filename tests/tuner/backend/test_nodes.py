"""A part of ONNX's node tests that holds one or two of every operator, through the whole pipeline.

`python -m tests.tuner.backend.run --all --write-list` runs all of them and rewrites right.txt.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import pytest

from . import cases
from .run import RIGHT_LIST, Worker

pytestmark = [pytest.mark.tvm, pytest.mark.opencl]
LEAST_RIGHT = 1340  # of 1,653; the list may not shrink unnoticed. Two follow ONNX Runtime instead of ONNX


def listed() -> list[str]:
    return RIGHT_LIST.read_text().split()


def sample() -> list[Any]:
    """For each operator the first and the last of its own tests, and every seventh expanded function.

    All but the first of every 32nd operator and every 196th expanded function are slow: it is their number.
    """
    known = cases.all_cases()
    own: dict[str, list[str]] = collections.defaultdict(list)
    expanded: list[str] = []
    for name in listed():
        if name in known:
            names = cases.operators(known[name])
            (own[names[0]] if len(names) == 1 else expanded).append(name)
    quick = {own[operator][0] for operator in sorted(own)[::32]} | set(expanded[::196])
    chosen = {name for names in own.values() for name in (names[0], names[-1])} | set(expanded[::7])
    return [pytest.param(n, marks=() if n in quick else pytest.mark.slow) for n in sorted(chosen)]


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    running = Worker()
    yield running
    running.close()


@pytest.mark.parametrize("name", sample())
def test_node(worker: Worker, name: str) -> None:
    result = worker.run(name)
    assert result["outcome"] == "right", result["text"]


def test_the_list_is_long_and_of_this_onnx() -> None:
    names = listed()
    assert len(names) == len(set(names)) >= LEAST_RIGHT
    assert set(names) <= set(cases.all_cases())


@pytest.mark.slow
def test_a_worker_that_dies_is_replaced(worker: Worker) -> None:
    assert worker.run("no such test")["outcome"] == "crash"
    assert worker.run("test_relu")["outcome"] == "right"


@pytest.mark.parametrize(
    "name",
    [
        "test_nonzero_example",
        "test_scan_sum",
        "test_strnormalizer_nostopwords_nochangecase",
    ],
)
def test_what_cannot_be_compiled_is_refused_with_a_reason(worker: Worker, name: str) -> None:
    result = worker.run(name)
    assert result["outcome"] == "refused"
    assert result["reasons"]
