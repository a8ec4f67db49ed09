"""Describes a model's inputs and outputs as the user sees them, with every dimension bound to a number."""

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
class StaticTensorSpec:
    """A named input or output: NumPy dtype name and static shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy dtype of the elements."""
        return np.dtype(self.dtype)

    def type_proto(self) -> onnx.TypeProto:
        """Return this type as ONNX writes it; sizes of -1 are left out."""
        shape = [size if size >= 0 else None for size in self.shape]
        return helper.make_tensor_type_proto(elem_type(self.numpy), shape)


def bind_inputs(
    model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]], reasons: Reasons
) -> tuple[tuple[StaticTensorSpec, ...], tuple[str, ...], frozenset[str]]:
    """Return the inputs with static shapes, notes on assumptions, and the names of refused inputs.

    A symbolic dimension has the size in `shapes`, at this or another input; a leading one without a size
    becomes 1. Raises InvalidArgument where `shapes` contradicts the model. Where `shapes` has every input,
    names bind nothing: some files give one name to dimensions that differ.
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
    named = _bind_dimensions(inputs, shapes, bind=not whole)
    inner = {_name(d) for i in inputs for d in i.type.tensor_type.shape.dim[1:]} - {""}
    specs: list[StaticTensorSpec] = []
    notes: list[str] = []
    refused: set[str] = set()
    for info in inputs:
        try:
            specs.append(_bind(info, shapes.get(info.name), named, inner, notes))
        except NodeRefused as refusal:
            reasons.general.append(f"input {info.name!r}: {refusal}")
            refused.add(info.name)
    return tuple(specs), tuple(notes), frozenset(refused)


def dtype_of(info: onnx.ValueInfoProto) -> np.dtype[Any]:
    """Return the NumPy dtype of an input or output.

    Raises NodeRefused where it is no tensor that honed carries.
    """
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


def _bind_dimensions(
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
    """Return the name of a dimension whose size is shared by all uses of the name.

    Empty where there is none.
    """
    return "" if dim.dim_param == UNNAMED else str(dim.dim_param)


def _bind(
    info: onnx.ValueInfoProto,
    requested: tuple[int, ...] | None,
    named: Mapping[str, int],
    inner: Collection[str],
    notes: list[str],
) -> StaticTensorSpec:
    """Return an input with a static shape.

    `inner` holds the names of dimensions at other than leading places, which therefore are no batch sizes.
    """
    dtype = dtype_of(info)
    if not info.type.tensor_type.HasField("shape"):
        if requested is None:
            raise NodeRefused(f"its shape is not given; add --shape {info.name}=...")
        return StaticTensorSpec(name=info.name, dtype=dtype.name, shape=tuple(requested))
    dims = info.type.tensor_type.shape.dim
    labels = [dim.dim_param or UNNAMED for dim in dims]
    known = [int(d.dim_value) if d.HasField("dim_value") and d.dim_value >= 0 else None for d in dims]
    if requested is None:
        sizes = [
            named.get(label) if size is None else size for label, size in zip(labels, known, strict=True)
        ]
        if len(dims) > 1 and sizes[0] is None and labels[0] not in inner:
            sizes[0] = 1
            notes.append(
                f"the leading dimension of input {info.name!r} ({labels[0]}) is taken as 1; "
                "--shape changes it"
            )
    else:
        _check_given(info.name, requested, known)
        sizes = list(requested)
    unbound = [label for label, size in zip(labels, sizes, strict=True) if size is None]
    if unbound:
        template = ",".join(
            label if size is None else str(size) for label, size in zip(labels, known, strict=True)
        )
        raise NodeRefused(
            f"its dimension{'s' * (len(unbound) > 1)} {', '.join(unbound)} must be given: "
            f"add --shape {info.name}={template} with numbers"
        )
    shape = tuple(size for size in sizes if size is not None)
    if any(d > MAX_DIMENSION for d in shape):
        raise NodeRefused(f"a dimension is larger than {MAX_DIMENSION}")
    return StaticTensorSpec(name=info.name, dtype=dtype.name, shape=shape)


def _check_given(name: str, shape: Sequence[int], declared: Sequence[int | None]) -> None:
    for index, (number, size) in enumerate(zip(shape, declared, strict=True)):
        if size not in (None, number):
            raise InvalidArgument(f"--shape {name}: dimension {index} is {size} in the model, not {number}")
