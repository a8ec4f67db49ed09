"""What is watched in the compiler itself, so that an update that breaks it is noticed here."""

from __future__ import annotations

from importlib.metadata import version

import pytest
import tvm
from tvm import te
from tvm.s_tir import meta_schedule as ms

pytestmark = pytest.mark.tvm


def test_a_tune_context_can_be_made() -> None:
    """With apache-tvm-ffi 0.1.15 this crashes the process."""
    assert version("apache-tvm-ffi") == "0.1.14.post1"
    a = te.placeholder((16,), name="a")
    module = tvm.IRModule({"main": te.create_prim_func([a, te.compute((16,), lambda i: a[i] + 1.0)])})
    context = ms.TuneContext(module, target=tvm.target.Target("llvm"), num_threads=1)
    assert context.task_name == "main"


def test_the_opencl_code_generator_is_there() -> None:
    assert tvm.get_global_func("target.build.opencl", allow_missing=True) is not None
