"""Reads and writes the messages between Frigate's `zmq` detector and the bridge, without I/O.

Frigate sends a header, JSON, and for two of three messages a second frame:

    {"model_request": true, "model_name": "yolox_nano.onnx"}      answered {"model_available", "model_loaded"}
    {"model_data": true, "model_name": "yolox_nano.onnx"}, file   answered {"model_saved", "model_loaded"}
    {"shape", "dtype", "model_type"}, tensor                      answered {"shape", "dtype"}, detections
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from honed.protocol.errors import InvalidArgument
from honed.runtime.dtypes import dtype

Frame = bytes | memoryview
_MAX_HEADER: Final = 4096  # Bytes
_MAX_NAME: Final = 255
_MAX_RANK: Final = 8


@dataclass(frozen=True, slots=True)
class ModelAsked:
    """The question whether the model of a file is known and ready."""

    file: str


@dataclass(frozen=True, slots=True)
class ModelSent:
    """A model's file, sent for the service to serve."""

    file: str
    data: Frame


@dataclass(frozen=True, slots=True, eq=False)
class CameraPicture:
    """A picture to find objects in, in the model's type and shape."""

    tensor: NDArray[Any]
    model_type: str

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels; raises InvalidArgument if the shape is not that of a picture."""
        shape = self.tensor.shape
        if len(shape) == 4 and shape[0] == 1 and 0 not in shape:
            if shape[1] == 3:
                return shape[3], shape[2]
            if shape[3] == 3:
                return shape[2], shape[1]
        raise InvalidArgument(
            f"a picture of {list(shape)} came; give input_tensor nchw or nhwc, and the width and height "
            "of the model, in Frigate's configuration"
        )


Message = ModelAsked | ModelSent | CameraPicture


def parse(frames: Sequence[Frame]) -> Message:
    """Return the message in these frames; raise InvalidArgument if there is none."""
    if not 1 <= len(frames) <= 2:
        raise InvalidArgument(f"a message of {len(frames)} frames came; Frigate sends one or two")
    header = _header(frames[0])
    if header.get("model_request") is True and len(frames) == 1:
        return ModelAsked(_file(header))
    if header.get("model_data") is True and len(frames) == 2:
        return ModelSent(_file(header), frames[1])
    if len(frames) == 2:
        return CameraPicture(_tensor(header, frames[1]), _model_type(header))
    raise InvalidArgument("a header without a tensor came; Frigate sends both")


def model_status(*, available: bool, loaded: bool) -> list[bytes]:
    """Return the answer to ModelAsked."""
    return [json.dumps({"model_available": available, "model_loaded": loaded}).encode()]


def model_kept(*, saved: bool, loaded: bool) -> list[bytes]:
    """Return the answer to ModelSent."""
    return [json.dumps({"model_saved": saved, "model_loaded": loaded}).encode()]


def encode_detections(detections: NDArray[Any]) -> list[bytes]:
    """Return the answer to a CameraPicture."""
    header = {"shape": list(detections.shape), "dtype": detections.dtype.name}
    return [json.dumps(header).encode(), detections.tobytes()]


def _header(frame: Frame) -> dict[str, Any]:
    if len(frame) > _MAX_HEADER:
        raise InvalidArgument(f"a header of {len(frame)} bytes came; {_MAX_HEADER} are allowed")
    try:
        header = json.loads(bytes(frame))
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"a header came that is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise InvalidArgument("a header came that is no JSON object")
    return header


def _file(header: dict[str, Any]) -> str:
    name = header.get("model_name")
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME or not name.isprintable():
        raise InvalidArgument(f"model_name must be a name of at most {_MAX_NAME} letters")
    return name


def _model_type(header: dict[str, Any]) -> str:
    kind = header.get("model_type")
    if not isinstance(kind, str) or len(kind) > _MAX_NAME:
        raise InvalidArgument("the header tells no model_type; honed-frigate needs Frigate 0.17 or newer")
    return kind


def _tensor(header: dict[str, Any], data: Frame) -> NDArray[Any]:
    shape = header.get("shape")
    if not isinstance(shape, list) or len(shape) > _MAX_RANK:
        raise InvalidArgument(f"shape must be a list of at most {_MAX_RANK} sizes")
    if not all(type(size) is int and 0 <= size < 1 << 31 for size in shape):
        raise InvalidArgument("shape must be a list of sizes")
    kind = dtype(str(header.get("dtype"))[:_MAX_NAME])
    if math.prod(shape) * kind.itemsize != len(data):
        raise InvalidArgument(f"a tensor of {len(data)} bytes came for shape {shape} of {kind.name}")
    return np.frombuffer(data, kind.numpy).reshape(shape)
