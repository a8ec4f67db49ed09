"""What apps do with values, devices and options, with honed and with onnxruntime; no service."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest

from honed import ort

BOTH = pytest.mark.parametrize("rt", [ort, onnxruntime], ids=["honed", "onnxruntime"])
ARRAY = np.arange(6, dtype=np.float32).reshape(2, 3)


@BOTH
def test_a_value_is_the_array_that_it_was_made_of(rt: Any) -> None:
    array = ARRAY.copy()
    value = rt.OrtValue.ortvalue_from_numpy(array, "cpu", 0)
    array[0, 0] = 9
    assert value.numpy()[0, 0] == 9
    value.update_inplace(ARRAY + 1)
    np.testing.assert_array_equal(array, ARRAY + 1)
    assert value.data_ptr() == array.ctypes.data


@BOTH
def test_types_are_given_as_numpys_and_as_onnxs_numbers(rt: Any) -> None:
    for kind in (np.float32, 1):
        value = rt.OrtValue.ortvalue_from_shape_and_type([2, 3], kind, "cpu", 0)
        assert (value.data_type(), value.shape()) == ("tensor(float)", [2, 3])
    bits = np.array([0x3C00], np.uint16)
    half = rt.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, 10)
    assert (half.data_type(), half.numpy().tolist()) == ("tensor(float16)", [1.0])


@BOTH
def test_other_libraries_take_values_and_give_them(rt: Any) -> None:
    np.testing.assert_array_equal(np.from_dlpack(rt.OrtValue.ortvalue_from_numpy(ARRAY.copy())), ARRAY)
    value = rt.OrtValue.from_dlpack(ARRAY.copy())
    np.testing.assert_array_equal(value.numpy(), ARRAY)
    np.testing.assert_array_equal(np.asarray(value, np.float64), ARRAY)


@BOTH
def test_the_host_is_a_device_and_others_are_refused(rt: Any) -> None:
    device = rt.OrtDevice.make("cpu", 0)
    assert (device.device_type(), device.device_id()) == (0, 0)
    with pytest.raises(Exception, match=r"cpu|device"):
        rt.OrtValue.ortvalue_from_numpy(ARRAY, "cuda", 0)
    memory = rt.OrtMemoryInfo("Cpu", rt.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, rt.OrtMemType.DEFAULT)
    rt.create_and_register_allocator(memory, rt.OrtArenaCfg(0, -1, -1, -1))


@BOTH
def test_options_print_and_refuse_as_theirs_do(rt: Any) -> None:
    options = rt.SessionOptions()
    assert str(options.graph_optimization_level) == "GraphOptimizationLevel.ORT_ENABLE_ALL"
    assert str(options.execution_mode) == "ExecutionMode.ORT_SEQUENTIAL"
    with pytest.raises(RuntimeError):
        options.get_session_config_entry("not.set")
    options.add_provider("CPUExecutionProvider", {})
    assert options.has_providers()
    with pytest.raises(Exception, match="CUDAExecutionProvider"):
        options.add_provider("CUDAExecutionProvider", {})


@BOTH
@pytest.mark.parametrize(
    ("attribute", "value", "kind"),
    [
        ("intra_op_num_threads", "4", TypeError),
        ("intra_op_num_threads", 1.5, TypeError),
        ("graph_optimization_level", 99, TypeError),
        ("logid", 3, TypeError),
        ("enable_profiling", "False", TypeError),
        ("intra_op_threads", 4, AttributeError),
    ],
)
def test_slips_in_options_are_told(rt: Any, attribute: str, value: object, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        setattr(rt.SessionOptions(), attribute, value)


@BOTH
def test_options_take_what_they_are_for(rt: Any) -> None:
    options, run = rt.SessionOptions(), rt.RunOptions()
    options.intra_op_num_threads, options.enable_profiling = np.int64(2), 1
    options.graph_optimization_level = rt.GraphOptimizationLevel.ORT_DISABLE_ALL
    assert (options.intra_op_num_threads, options.enable_profiling) == (2, True)
    run.terminate, run.logid = True, "a"
    with pytest.raises(AttributeError):
        run.end = True


@BOTH
def test_wrong_values_raise_as_theirs_do(rt: Any) -> None:
    with pytest.raises(RuntimeError):
        rt.OrtValue.ortvalue_from_numpy(ARRAY.copy()).update_inplace(np.zeros(4, np.float32))
    with pytest.raises(RuntimeError):
        rt.set_default_logger_severity(9)
    with pytest.raises(TypeError):
        rt.InferenceSession(b"abc", sess_options=3)
    with pytest.raises(Exception, match="No graph was found") as raised:
        rt.InferenceSession(b"", providers=["CPUExecutionProvider"])
    assert type(raised.value).__name__ == "InvalidArgument"


def test_exceptions_have_onnxruntimes_names() -> None:
    theirs = onnxruntime.capi.onnxruntime_pybind11_state
    named = {
        name
        for name, each in vars(theirs).items()
        if isinstance(each, type) and issubclass(each, Exception) and not name.startswith("_")
    }
    assert named <= {each.__name__ for each in ort.errors.ALL}


def test_all_numbers_are_onnxruntimes() -> None:
    """Apps give them as numbers, too."""
    for name in ("OrtAllocatorType", "OrtMemType", "GraphOptimizationLevel", "ExecutionMode"):
        theirs, ours = getattr(onnxruntime, name).__members__, getattr(ort, name).__members__
        for each, value in ours.items():
            assert int(theirs[each].value) == int(value), each
