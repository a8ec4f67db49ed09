"""What is watched in the compiler itself, so that an update that breaks it is noticed here."""

from __future__ import annotations

from importlib.metadata import version

import pytest
import tvm
from tvm import te
from tvm.s_tir import meta_schedule as ms

from honed.tuner.search.traces import tune_context

pytestmark = pytest.mark.tvm


@pytest.fixture
def module() -> tvm.IRModule:
    a = te.placeholder((16,), name="a")
    return tvm.IRModule({"main": te.create_prim_func([a, te.compute((16,), lambda i: a[i] + 1.0)])})


def test_it_is_the_one_that_was_tried() -> None:
    assert version("apache-tvm-ffi") == "0.1.14.post1"


def test_the_tuners_context_can_be_made(module: tvm.IRModule) -> None:
    generator = ms.space_generator.ScheduleFn(
        lambda _schedule: None, sch_rules=[], postprocs=[], mutator_probs={}
    )
    strategy = ms.search_strategy.ReplayTrace(max_fail_count=1)
    context = tune_context(module, tvm.target.Target("llvm"), generator, strategy, seed=0, threads=1)
    assert context.task_name == "main"


@pytest.mark.slow
def test_a_tune_context_can_be_made(module: tvm.IRModule) -> None:
    """With apache-tvm-ffi 0.1.15 this crashes the process. It parses every tensor intrinsic of TVM."""
    context = ms.TuneContext(module, target=tvm.target.Target("llvm"), num_threads=1)
    assert context.task_name == "main"


def test_the_opencl_code_generator_is_there() -> None:
    assert tvm.get_global_func("target.build.opencl", allow_missing=True) is not None
