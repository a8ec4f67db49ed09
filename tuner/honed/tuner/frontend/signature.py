"""A model's inputs and outputs as the user sees them, with every dimension bound to a number."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper

from honed.onnxfile.reading import UNNAMED
from honed.protocol.errors import InvalidArgument
from honed.runtime.dtypes import DTYPES

from .values import NodeRefused, Reasons, elem_type, numpy_dtype

MAX_DIMENSION = (1 << 31) - 1
CARRIED = frozenset(d.name for d in DTYPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A named input or output: NumPy dtype name and static shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy dtype."""
        return np.dtype(self.dtype)

    def type_proto(self) -> onnx.TypeProto:
        """The same type as ONNX writes it; sizes of -1 are left out."""
        shape = [size if size >= 0 else None for size in self.shape]
        return helper.make_tensor_type_proto(elem_type(self.numpy), shape)


def bind_inputs(
    model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]], found: Reasons
) -> tuple[tuple[TensorSpec, ...], tuple[str, ...], frozenset[str]]:
    """The inputs with static shapes, notes on what was assumed, and names of inputs that were refused.

    A symbolic dimension takes what `shapes` says of it, here or at another input; a leading one that
    nothing says becomes 1. Raises InvalidArgument where `shapes` contradicts the model. Where it has every
    input, names bind nothing: there are files that call by one name what differs.
    """
    frozen = {t.name for t in model.graph.initializer} | {
        s.values.name for s in model.graph.sparse_initializer
    }
    inputs = [i for i in model.graph.input if i.name not in frozen]
    unknown = sorted(set(shapes) - {i.name for i in inputs})
    if unknown:
        known = ", ".join(i.name for i in inputs) or "none"
        raise InvalidArgument(f"--shape names {unknown[0]!r}, but the model's inputs are: {known}")
    whole = all(i.name in shapes for i in inputs)
    named = _named_dimensions(inputs, shapes, bind=not whole)
    inner = {_name(d) for i in inputs for d in i.type.tensor_type.shape.dim[1:]} - {""}
    specs: list[TensorSpec] = []
    notes: list[str] = []
    refused: set[str] = set()
    for info in inputs:
        try:
            specs.append(_bind(info, shapes.get(info.name), named, inner, notes))
        except NodeRefused as refusal:
            found.general.append(f"input {info.name!r}: {refusal}")
            refused.add(info.name)
    return tuple(specs), tuple(notes), frozenset(refused)


def carried(info: onnx.ValueInfoProto) -> np.dtype[Any]:
    """The NumPy dtype of an input or output; raises NodeRefused where it is no tensor honed carries."""
    kind = info.type.WhichOneof("value")
    if kind != "tensor_type":
        what = kind.removesuffix("_type").replace("_", " ") if kind else "value without a type"
        raise NodeRefused(f"it is a {what}; only dense tensors are compiled")
    if info.type.tensor_type.elem_type == 0:
        raise NodeRefused("its element type is not given; export the model again")
    dtype = numpy_dtype(info.type.tensor_type.elem_type)
    if dtype.name not in CARRIED:
        name = onnx.TensorProto.DataType.Name(info.type.tensor_type.elem_type).lower()
        raise NodeRefused(f"its elements are {name}, which is not compiled")
    return dtype


def _named_dimensions(
    inputs: list[onnx.ValueInfoProto], shapes: Mapping[str, tuple[int, ...]], *, bind: bool
) -> dict[str, int]:
    named: dict[str, int] = {}
    for info in inputs:
        given = shapes.get(info.name)
        if given is None:
            continue
        if any(not 0 < d <= MAX_DIMENSION for d in given):
            raise InvalidArgument(f"--shape {info.name}: dimensions must be between 1 and {MAX_DIMENSION}")
        if not info.type.tensor_type.HasField("shape"):
            continue
        dims = info.type.tensor_type.shape.dim
        if len(dims) != len(given):
            raise InvalidArgument(
                f"--shape {info.name}: {len(given)} dimensions are given, but the input has {len(dims)}"
            )
        for dim, number in zip(dims, given, strict=True):
            if bind and _name(dim) and named.setdefault(dim.dim_param, number) != number:
                raise InvalidArgument(
                    f"--shape {info.name}: dimension {dim.dim_param!r} is {named[dim.dim_param]} elsewhere "
                    f"and {number} here; give one value"
                )
    return named


def _name(dim: onnx.TensorShapeProto.Dimension) -> str:
    """The name that stands for one number wherever it is used; empty where there is none."""
    return "" if dim.dim_param == UNNAMED else str(dim.dim_param)


def _bind(
    info: onnx.ValueInfoProto,
    given: tuple[int, ...] | None,
    named: Mapping[str, int],
    inner: Collection[str],
    notes: list[str],
) -> TensorSpec:
    """`inner` holds the names of dimensions that stand in other than leading places: no batch sizes."""
    dtype = carried(info)
    if not info.type.tensor_type.HasField("shape"):
        if given is None:
            raise NodeRefused(f"its shape is not given; add --shape {info.name}=...")
        return TensorSpec(name=info.name, dtype=dtype.name, shape=tuple(given))
    indices = range(len(info.type.tensor_type.shape.dim))
    shape = [_size(info, index, given, named, inner, notes) for index in indices]
    if None in shape:
        raise NodeRefused(_unbound(info, [index for index in indices if shape[index] is None]))
    sizes = tuple(size for size in shape if size is not None)
    if any(d > MAX_DIMENSION for d in sizes):
        raise NodeRefused(f"a dimension is larger than {MAX_DIMENSION}")
    return TensorSpec(name=info.name, dtype=dtype.name, shape=sizes)


def _size(
    info: onnx.ValueInfoProto,
    index: int,
    given: tuple[int, ...] | None,
    named: Mapping[str, int],
    inner: Collection[str],
    notes: list[str],
) -> int | None:
    """One dimension as a number; None where nothing says what it is."""
    dims = info.type.tensor_type.shape.dim
    dim, label = dims[index], dims[index].dim_param or UNNAMED
    if _is_static(dim):
        if given is not None and given[index] != dim.dim_value:
            raise InvalidArgument(
                f"--shape {info.name}: dimension {index} is {dim.dim_value} in the model, not {given[index]}"
            )
        return int(dim.dim_value)
    if given is not None:
        return given[index]
    if label in named:
        return named[label]
    if index == 0 and len(dims) > 1 and label not in inner:
        notes.append(
            f"the leading dimension of input {info.name!r} ({label}) is taken as 1; --shape changes it"
        )
        return 1
    return None


def _unbound(info: onnx.ValueInfoProto, indices: Sequence[int]) -> str:
    """What to do about dimensions that nothing says."""
    dims = info.type.tensor_type.shape.dim
    names = ", ".join(dims[index].dim_param or UNNAMED for index in indices)
    template = ",".join(str(d.dim_value) if _is_static(d) else (d.dim_param or UNNAMED) for d in dims)
    return (
        f"its dimension{'s' * (len(indices) > 1)} {names} must be given: "
        f"add --shape {info.name}={template} with numbers"
    )


def _is_static(dim: onnx.TensorShapeProto.Dimension) -> bool:
    return bool(dim.HasField("dim_value")) and dim.dim_value >= 0
