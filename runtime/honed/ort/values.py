"""Tensors as apps hand them over, all of them on the host: OrtValue, and what is bound to a session."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from honed.runtime import dtypes
from honed.runtime.dtypes import is_text

from . import errors
from .errors import InvalidArgument, said
from .modelproto import TYPES
from .options import check_on_host

Array = NDArray[Any]
_ONNX = {each.name: each.onnx for each in dtypes.CARRIED}


def type_of(array: Array) -> str:
    """Return ONNX Runtime's name for the type of an array, as in "tensor(float)"."""
    if is_text(array):
        return "tensor(string)"
    return f"tensor({_ONNX.get(array.dtype.name, array.dtype.name)})"


def numpy_type(type_name: str) -> np.dtype[Any]:
    """Return NumPy's type for one as in "tensor(float)"; raise NotImplemented for unsupported types."""
    known = dtypes.from_onnx(type_name)
    if known is None:
        text = f"honed does not carry {type_name}; use a model of dense tensors of numbers or strings"
        raise said(errors.NotImplemented, text)
    return known.numpy


class OrtValue:
    """A tensor on the host."""

    def __init__(self, array: Array) -> None:
        self._array = array

    @classmethod
    def ortvalue_from_numpy(
        cls, numpy_obj: ArrayLike, /, device_type: str = "cpu", device_id: int = 0, vendor_id: int = -1
    ) -> OrtValue:
        """Return an OrtValue that is the array itself where it is contiguous: both show what is written.

        Raises NotImplemented for another device than "cpu".
        """
        check_on_host(device_type)
        return cls(np.asarray(numpy_obj, order="C"))

    @classmethod
    def ortvalue_from_numpy_with_onnx_type(cls, data: Array, /, onnx_element_type: int) -> OrtValue:
        """Return the bytes of an array as another type of the same size, given by its ONNX number."""
        return cls(data.view(_element(onnx_element_type)))

    @classmethod
    def from_dlpack(cls, data: Any, /) -> OrtValue:
        """Return another library's tensor on the host as an OrtValue, without a copy."""
        return cls(np.from_dlpack(data))

    @classmethod
    def ortvalue_from_shape_and_type(
        cls,
        shape: Sequence[int],
        element_type: Any,
        device_type: str = "cpu",
        device_id: int = 0,
        vendor_id: int = -1,
    ) -> OrtValue:
        """Return an OrtValue of zeros; `element_type` is a NumPy type or an ONNX number."""
        check_on_host(device_type)
        return cls(np.zeros(tuple(shape), _element(element_type)))

    def numpy(self) -> Array:
        """Return the array itself."""
        return self._array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return the array for NumPy."""
        return np.array(self._array, dtype) if copy else np.asarray(self._array, dtype)

    def __dlpack__(self, **how: Any) -> Any:
        """Return the array for other libraries, without a copy."""
        return self._array.__dlpack__(**how)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the array's DLPack device, which is the host."""
        return self._array.__dlpack_device__()

    def shape(self) -> list[int]:
        """Return the array's sizes."""
        return list(self._array.shape)

    def data_type(self) -> str:
        """Return ONNX Runtime's name for the type, as in "tensor(float)"."""
        return type_of(self._array)

    def element_type(self) -> int:
        """Return ONNX's number of the element type."""
        known = dtypes.from_onnx(self.data_type())
        return known.number if known is not None else 0

    def device_name(self) -> str:
        """Return "cpu", as every array is in the host's memory."""
        return "cpu"

    def data_ptr(self) -> int:
        """Return the address of the first element."""
        return int(self._array.ctypes.data)

    def tensor_size_in_bytes(self) -> int:
        """Return the bytes that all elements take."""
        return int(self._array.nbytes)

    def is_tensor(self) -> bool:
        """Return True: every value here is a tensor."""
        return True

    def is_tensor_sequence(self) -> bool:
        """Return False: no value here is a sequence of tensors."""
        return False

    def is_sparse_tensor(self) -> bool:
        """Return False: no tensor here is sparse."""
        return False

    def has_value(self) -> bool:
        """Return True: every tensor here has a value."""
        return True

    def update_inplace(self, np_arr: ArrayLike) -> None:
        """Write an array of the same shape and type over this value."""
        given = np.asarray(np_arr)
        if given.shape != self._array.shape or given.dtype != self._array.dtype:
            raise RuntimeError(
                f"the value is {type_of(self._array)} {self.shape()} and the array {type_of(given)} "
                f"{list(given.shape)}; make them equal"
            )
        self._array[...] = given


class IOBinding:
    """Inputs and outputs of a session by name, for `run_with_iobinding`."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self._inputs = {
            each.name for each in (*session.get_inputs(), *session.get_overridable_initializers())
        }
        self.inputs: dict[str, Array] = {}
        self.outputs: dict[str, Array | None] = {}  # None: allocated by the run
        self.found: dict[str, OrtValue] = {}

    def bind_cpu_input(self, name: str, arr_on_cpu: ArrayLike) -> None:
        """Bind an array to an input; it is read when the session runs."""
        self._bind(name, np.asarray(arr_on_cpu))

    def bind_input(
        self,
        name: str,
        device_type: str,
        device_id: int,
        element_type: Any,
        shape: Sequence[int],
        buffer_ptr: int,
    ) -> None:
        """Bind memory at an address to an input."""
        check_on_host(device_type)
        self._bind(name, _at(buffer_ptr, element_type, shape))

    def bind_ortvalue_input(self, name: str, ortvalue: OrtValue) -> None:
        """Bind a value to an input."""
        self._bind(name, ortvalue._array)

    def _bind(self, name: str, array: Array) -> None:
        if name not in self._inputs:
            raise RuntimeError(f"Failed to find NodeArg with name: {name} in the def list")
        self.inputs[name] = array

    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """Bind an output, which is written to the memory at an address where one is given."""
        check_on_host(device_type)
        whole = buffer_ptr is not None and shape is not None
        self.outputs[name] = _at(buffer_ptr or 0, element_type, shape or ()) if whole else None

    def bind_ortvalue_output(self, name: str, ortvalue: OrtValue) -> None:
        """Bind an output, which is written over a value."""
        self.outputs[name] = ortvalue._array

    def synchronize_inputs(self) -> None:
        """Do nothing: no copy of inputs is under way."""

    def synchronize_outputs(self) -> None:
        """Do nothing: no copy of outputs is under way."""

    def get_outputs(self) -> list[OrtValue]:
        """Return the outputs of the last run, in the order in which they were requested."""
        return [self.found[name] for name in self.outputs if name in self.found]

    def get_outputs_as_ortvaluevector(self) -> list[OrtValue]:
        """Return what `get_outputs` returns."""
        return self.get_outputs()

    def copy_outputs_to_cpu(self) -> list[Array]:
        """Return the outputs of the last run as arrays."""
        return [value.numpy() for value in self.get_outputs()]

    def clear_binding_inputs(self) -> None:
        """Forget all bound inputs."""
        self.inputs.clear()

    def clear_binding_outputs(self) -> None:
        """Forget all bound outputs."""
        self.outputs.clear()
        self.found.clear()

    def ran(self, outputs: Mapping[str, Array]) -> None:
        """Keep the outputs of a run, in the memory that was bound for them."""
        for name, array in outputs.items():
            target = self.outputs.get(name)
            if target is None:
                self.found[name] = OrtValue(array)
                continue
            if target.shape != array.shape or target.dtype != array.dtype:
                raise said(
                    InvalidArgument,
                    f"output {name!r} is {type_of(array)} {list(array.shape)} and what is bound to it "
                    f"{type_of(target)} {list(target.shape)}; bind as much, or none",
                )
            target[...] = array
            self.found[name] = OrtValue(target)


def _element(element_type: Any) -> np.dtype[Any]:
    if isinstance(element_type, int):
        return numpy_type(f"tensor({TYPES.get(element_type, 'undefined')})")
    kind: np.dtype[Any] = np.dtype(element_type)
    return kind


def _at(address: int, element_type: Any, shape: Sequence[int]) -> Array:
    kind = _element(element_type)
    nbytes = kind.itemsize * math.prod(shape)
    memory = memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
    array: Array = np.frombuffer(memory, kind).reshape(tuple(shape))
    return array
