"""Converts bodies of inference requests to parameters of ModelInfer, and results to bodies, without I/O.

A body is JSON, which the bytes of binary tensors may follow; Inference-Header-Content-Length is then the
length of the JSON.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from honed.protocol.errors import InvalidArgument
from honed.protocol.params import InferOptions, InferParams, InputTensor, OutputTensor
from honed.protocol.results import InferResult
from honed.protocol.values import Data
from honed.runtime.dtypes import NARROW, STRING, DType, decode_text, encode_text, from_datatype

_MAX_RANK: Final = 16
_MAX_ELEMENTS: Final = 1 << 40
_MOST_WHOLE: Final = 1 << 64  # Exclusive maximum of a number written without a point
HEADER_LENGTH: Final = "inference-header-content-length"
_MAX_TENSORS: Final = 1024
_MAX_TEXT: Final = 128
_MAX_TOKENS: Final = 1024  # Maximum tokens that a decoder chooses for a request, or ends with
Object = dict[str, Any]


def kind_of(datatype: object, name: str) -> DType:
    """Return the element type of a tensor; raise InvalidArgument for types that honed does not carry."""
    if not isinstance(datatype, str):
        raise InvalidArgument(f"datatype of {name!r} must be a text, as 'FP32'")
    return from_datatype(datatype)


def shape_of(value: object, name: str) -> tuple[int, ...]:
    """Return a shape from JSON; raise InvalidArgument for values that are no shape."""
    if not isinstance(value, list) or len(value) > _MAX_RANK:
        raise InvalidArgument(f"shape of {name!r} must be a list of at most {_MAX_RANK} sizes")
    if (
        not all(type(size) is int and 0 <= size < 1 << 63 for size in value)
        or math.prod(value) > _MAX_ELEMENTS
    ):
        raise InvalidArgument(f"shape of {name!r} must be a list of sizes, which are not negative")
    return tuple(value)


def from_json(data: object, kind: DType, shape: tuple[int, ...], name: str) -> Data:
    """Return the bytes of a tensor whose elements are JSON numbers, booleans or texts.

    The elements are nested as its shape or in one list. Raises InvalidArgument if there are too many or too
    few, or one is not of that type.
    """
    _check_carried(kind, name, "send it as binary data")
    flat = _flat(data, shape, name)
    _check_elements(flat, kind, name)
    if kind is STRING:
        try:
            return encode_text(np.array(flat, object))
        except UnicodeEncodeError as error:
            raise InvalidArgument(
                f"data of {name!r} has half of a surrogate pair; give whole texts"
            ) from error
    return np.array(flat, kind.numpy).view(np.uint8).data


def to_json(content: bytes | memoryview, kind: DType, shape: Sequence[int], name: str) -> list[Any]:
    """Return the elements of a tensor in one list; raise InvalidArgument if JSON cannot carry them."""
    _check_carried(kind, name, "ask for binary_data")
    if kind is STRING:
        return list(decode_text(content, shape).reshape(-1))
    array: NDArray[Any] = np.frombuffer(content, kind.numpy)
    if kind.floating and not np.isfinite(array).all():
        raise InvalidArgument(f"{name!r} has NaN or infinity, which JSON does not carry; ask for binary_data")
    elements: list[Any] = array.tolist()
    return elements


def _check_carried(kind: DType, name: str, instead: str) -> None:
    if kind in NARROW or kind.name == "float16":
        raise InvalidArgument(f"{name!r} is {kind.datatype}, which JSON does not carry; {instead}")


def _flat(data: object, shape: tuple[int, ...], name: str) -> Sequence[object]:
    if not isinstance(data, list):
        raise InvalidArgument(f"data of {name!r} must be a list")
    wanted = math.prod(shape)
    flat: list[object] = data
    if data and isinstance(data[0], list):
        for size in shape[1:]:
            if not all(isinstance(row, list) and len(row) == size for row in flat):
                raise InvalidArgument(f"data of {name!r} is not nested as its shape {list(shape)}")
            flat = list(itertools.chain.from_iterable(flat))  # type: ignore[arg-type]
    if len(flat) != wanted:
        raise InvalidArgument(
            f"data of {name!r} has {len(flat)} elements, and its shape {list(shape)} {wanted}"
        )
    return flat


def _check_elements(flat: Sequence[object], kind: DType, name: str) -> None:
    types = set(map(type, flat))
    if kind.name == "bool":
        right, allowed = types <= {bool}, "true or false"
    elif kind is STRING:
        right, allowed = types <= {str}, "texts"
    elif kind.floating:
        right, allowed = types <= {int, float}, "numbers"
    else:
        bounds = np.iinfo(kind.name)
        allowed = f"whole numbers from {bounds.min} to {bounds.max}"
        right = types <= {int} and (not flat or (min(flat) >= bounds.min and max(flat) <= bounds.max))  # type: ignore[type-var,operator]
    if not right:
        raise InvalidArgument(f"data of {name!r} is {kind.datatype}; give {allowed}")
    if kind.floating and int in types and not all(abs(each) < _MOST_WHOLE for each in flat):  # type: ignore[arg-type]
        raise InvalidArgument(f"data of {name!r} has a whole number beyond 2^64; write it as 1e30")


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """The parameters of ModelInfer, and which outputs are answered as binary data."""

    params: InferParams
    seconds: float  # Maximum seconds to wait and run
    binary: dict[str, bool]  # Choices of the outputs named
    binary_by_default: bool

    def is_binary(self, output: str) -> bool:
        """Return whether the output's bytes follow the JSON."""
        return self.binary.get(output, self.binary_by_default)


@dataclass(frozen=True, slots=True)
class AnswerBody:
    """A body, and the length of its JSON if binary tensors follow; None if it is all JSON."""

    body: bytes
    json_length: int | None


def json_part(body: memoryview, header_length: str | None, most: int) -> tuple[memoryview, memoryview]:
    """Return the JSON of a body, and the bytes that follow it.

    Raises InvalidArgument for lengths that are wrong, or over `most`.
    """
    length = len(body)
    if header_length is not None:
        if not (header_length.isascii() and header_length.isdigit() and len(header_length) < 16):
            raise InvalidArgument("Inference-Header-Content-Length must be the number of bytes of the JSON")
        length = int(header_length)
        if length > len(body):
            raise InvalidArgument(
                f"Inference-Header-Content-Length is {length}, and the body has {len(body)} bytes"
            )
    if length > most:
        raise InvalidArgument(
            f"{length} bytes of JSON came and {most} are allowed; send tensors as binary data"
        )
    return body[:length], body[length:]


def parse(
    model: str, version: str, text: memoryview, binary: memoryview, most_seconds: float
) -> InferenceRequest:
    """Return the request; raise InvalidArgument, which says what is wrong, if there is none."""
    said = _object(text)
    inputs, contents = _inputs(said, binary)
    outputs = said.get("outputs")
    asked = _list(outputs, "outputs") if outputs is not None else []
    named = {_name(each, "outputs"): _binary_asked(each) for each in asked}
    if len(named) != len(asked):
        raise InvalidArgument("an output is named twice; name each once")
    parameters = _parameters(said, "the request")
    options, seconds = _options(parameters, most_seconds)
    identity = said.get("id", "")
    if not isinstance(identity, str) or len(identity) > _MAX_TEXT:
        raise InvalidArgument(f"id must be a text of at most {_MAX_TEXT} letters")
    return InferenceRequest(
        params=InferParams(
            model_name=model,
            model_version=version or None,
            id=identity or None,
            parameters=options,
            inputs=inputs,
            outputs=tuple(OutputTensor(name=name) for name in named) or None,
            raw_input_contents=contents,
        ),
        seconds=seconds,
        binary={name: asked for name, asked in named.items() if asked is not None},
        binary_by_default=_flag(parameters, "binary_data_output"),
    )


def answer(request: InferenceRequest, inferred: InferResult) -> AnswerBody:
    """Return the body of the answer; raise InvalidArgument if JSON cannot carry an output."""
    outputs: list[Object] = []
    following: list[Data] = []
    for output, content in zip(inferred.outputs, inferred.raw_output_contents, strict=True):
        tensor: Object = {"name": output.name, "datatype": output.datatype, "shape": list(output.shape)}
        if request.is_binary(output.name):
            tensor["parameters"] = {"binary_data_size": len(content)}
            following.append(content)
        else:
            tensor["data"] = to_json(content, from_datatype(output.datatype), output.shape, output.name)
        outputs.append(tensor)
    times = inferred.parameters
    said: Object = {
        "model_name": inferred.model_name,
        "model_version": inferred.model_version,
        "parameters": {
            "engine": times.engine,
            "engine_name": times.engine_name,
            "device": times.device,
            "queue_us": times.queue_us,
            "compute_us": times.compute_us,
        },
        "outputs": outputs,
    }
    if inferred.id:
        said["id"] = inferred.id
    text = json.dumps(said, allow_nan=False).encode()
    return AnswerBody(b"".join((text, *following)), len(text) if following else None)


def _object(text: memoryview) -> Object:
    try:
        said = json.loads(bytes(text))
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"the request is not JSON ({str(error)[:200]}); correct it") from error
    if not isinstance(said, dict):
        raise InvalidArgument("the request must be a JSON object with inputs")
    return said


def _inputs(said: Object, binary: memoryview) -> tuple[tuple[InputTensor, ...], tuple[Data, ...]]:
    tensors: list[InputTensor] = []
    contents: list[Data] = []
    for each in _list(said.get("inputs"), "inputs"):
        name = _name(each, "inputs")
        kind, shape = kind_of(each.get("datatype"), name), shape_of(each.get("shape"), name)
        parameters = _parameters(each, repr(name))
        if "shared_memory_region" in parameters:
            raise InvalidArgument(f"{name!r} lies in shared memory, which HTTP does not reach; send it along")
        size = parameters.get("binary_data_size")
        if size is None:
            contents.append(from_json(each.get("data"), kind, shape, name))
        else:
            content, binary = _binary(size, binary, name)
            if "data" in each:
                raise InvalidArgument(f"{name!r} comes as data and as binary data; send one of them")
            contents.append(content)
        tensors.append(InputTensor(name=name, datatype=kind.datatype, shape=shape))
    if len(binary):
        raise InvalidArgument(f"{len(binary)} bytes follow that belong to no input; correct binary_data_size")
    return tuple(tensors), tuple(contents)


def _binary(size: object, binary: memoryview, name: str) -> tuple[memoryview, memoryview]:
    if type(size) is not int or not 0 <= size <= len(binary):
        raise InvalidArgument(
            f"binary_data_size of {name!r} is {str(size)[:50]}, and {len(binary)} bytes follow; correct it"
        )
    return binary[:size], binary[size:]


def _options(parameters: Object, most_seconds: float) -> tuple[InferOptions, float]:
    """Return priority, timeout and sequence; 0 and "" mean none, as Triton's clients send them."""
    priority = _number(parameters, "priority", 3)
    timeout = _number(parameters, "timeout", 1 << 62)
    seconds = min(timeout / 1e6, most_seconds) if timeout else most_seconds
    sequence = parameters.get("sequence_id", 0)
    if type(sequence) is int and 0 <= sequence < 1 << 64:
        pass
    elif not isinstance(sequence, str) or len(sequence) > _MAX_TEXT:
        raise InvalidArgument(f"sequence_id must be a number, or a text of at most {_MAX_TEXT} letters")
    options = InferOptions(
        timeout=max(1, round(seconds * 1e6)),
        priority=priority or None,
        sequence_id=sequence or None,
        sequence_start=(bool(sequence) and _flag(parameters, "sequence_start")) or None,
        sequence_end=(bool(sequence) and _flag(parameters, "sequence_end")) or None,
        last_token=_flag(parameters, "last_token") or None,
        greedy_tokens=_number(parameters, "greedy_tokens", _MAX_TOKENS) or None,
        stop_tokens=_stop_tokens(parameters) or None,
    )
    return options, seconds


def _stop_tokens(parameters: Object) -> tuple[int, ...]:
    tokens = parameters.get("stop_tokens", [])
    numbers = isinstance(tokens, list) and all(type(token) is int for token in tokens)
    if not numbers or len(tokens) > _MAX_TOKENS:
        raise InvalidArgument(f"stop_tokens must be a list of at most {_MAX_TOKENS} whole numbers")
    return tuple(tokens)


def _binary_asked(output: Object) -> bool | None:
    parameters = _parameters(output, repr(output["name"]))
    if parameters.get("classification"):
        raise InvalidArgument("classification is not offered; ask for the scores and sort them")
    if "shared_memory_region" in parameters:
        raise InvalidArgument("HTTP does not reach shared memory; have outputs sent")
    return _flag(parameters, "binary_data") if "binary_data" in parameters else None


def _parameters(said: Object, where: str) -> Object:
    parameters = said.get("parameters", {})
    if not isinstance(parameters, dict):
        raise InvalidArgument(f"parameters of {where} must be a JSON object")
    return parameters


def _list(value: object, name: str) -> list[Object]:
    if not isinstance(value, list) or len(value) > _MAX_TENSORS:
        raise InvalidArgument(f"{name} must be a list of at most {_MAX_TENSORS} tensors")
    if not all(isinstance(each, dict) for each in value):
        raise InvalidArgument(f"{name} must be a list of JSON objects")
    return value


def _name(tensor: Object, where: str) -> str:
    name = tensor.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidArgument(f"each of {where} must have a name")
    return name


def _flag(parameters: Object, name: str) -> bool:
    value = parameters.get(name, False)
    if not isinstance(value, bool):
        raise InvalidArgument(f"{name} must be true or false")
    return value


def _number(parameters: Object, name: str, most: int) -> int:
    value = parameters.get(name, 0)
    if type(value) is not int or not 0 <= value <= most:
        raise InvalidArgument(f"{name} must be a whole number from 0 to {most}")
    return value
