"""What the bridges make of bytes from outside, without a service: something sound, or a sentence."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from honed.frigate import messages
from honed.http import inference
from honed.http.inference import from_json, to_json
from honed.protocol.errors import InvalidArgument
from honed.protocol.results import InferredOutput, InferTimes
from honed.protocol.results import InferResult as Result
from honed.runtime.dtypes import CARRIED, DTYPES, STRING, decode_text, dtype, from_datatype

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
)
JSON_KINDS = [kind for kind in DTYPES if kind.name != "float16"]


def objects(**fields: Any) -> st.SearchStrategy[Any]:
    """JSON objects in which each field is as it should be, anything else, or not there."""
    return st.fixed_dictionaries({}, optional={name: each | ANY_JSON for name, each in fields.items()})


TENSORS = objects(
    name=st.just("x"),
    datatype=st.sampled_from([kind.datatype for kind in CARRIED]),
    shape=st.lists(st.integers(0, 4), max_size=3),
    data=st.lists(st.integers(0, 9) | st.floats() | st.text(max_size=3), max_size=9),
    parameters=objects(binary_data_size=st.integers(0, 20)),
)
REQUESTS = objects(
    id=st.text(max_size=5),
    inputs=st.lists(TENSORS, max_size=3),
    outputs=st.lists(objects(name=st.sampled_from("yz"), parameters=objects(binary_data=st.booleans()))),
    parameters=objects(priority=st.integers(0, 3), timeout=st.integers(0, 9), sequence_id=st.integers(0, 9)),
)


@given(REQUESTS, st.binary(max_size=40))
def test_an_http_request_is_sound_or_refused(said: Any, binary: bytes) -> None:
    text = json.dumps(said).encode()
    body = memoryview(text + binary)
    first, rest = inference.json_part(body, str(len(text)), 1 << 20)
    try:
        request = inference.parse("m", "", first, rest, 60.0)
    except InvalidArgument:
        return
    params = request.params
    assert params.raw_input_contents is not None
    for tensor, content in zip(params.inputs, params.raw_input_contents, strict=True):
        if "binary_data_size" not in json.dumps(said):
            if tensor.datatype == STRING.datatype:
                assert decode_text(content, tensor.shape).shape == tensor.shape
            else:
                assert len(content) == int(np.prod(tensor.shape)) * from_datatype(tensor.datatype).itemsize


@given(st.data(), st.sampled_from(JSON_KINDS), arrays.array_shapes(max_dims=4, max_side=4))
def test_elements_are_the_same_when_they_come_back(
    data: st.DataObject, kind: Any, shape: tuple[int, ...]
) -> None:
    options = {"allow_nan": False, "allow_infinity": False} if kind.floating else {}
    elements = arrays.from_dtype(kind.numpy, **options)
    array = data.draw(arrays.arrays(kind.numpy, shape, elements=elements))
    flat = json.loads(json.dumps(to_json(array.tobytes(), kind, shape, "x")))
    nested = json.loads(json.dumps(array.tolist()))
    for told in (flat, nested):
        assert bytes(from_json(told, kind, shape, "x")) == array.tobytes()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_json_cannot_carry_is_refused(value: float) -> None:
    with pytest.raises(InvalidArgument, match="ask for binary_data"):
        to_json(np.array([1, value], np.float32).tobytes(), dtype("float32"), (2,), "y")
    with pytest.raises(InvalidArgument, match="FP16"):
        to_json(b"\0\0", dtype("float16"), (1,), "y")
    with pytest.raises(InvalidArgument, match="BF16"):
        to_json(b"\0\0", dtype("bfloat16"), (1,), "y")


def test_binary_and_json_outputs_in_one_answer() -> None:
    text = json.dumps(
        {
            "inputs": [],
            "outputs": [{"name": "a", "parameters": {"binary_data": False}}, {"name": "b"}],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    request = inference.parse("m", "", memoryview(text), memoryview(b""), 60.0)
    outputs = [InferredOutput(name=name, datatype="UINT8", shape=(3,), parameters={}) for name in "ab"]
    result = Result(
        model_name="m",
        model_version="1",
        id="",
        parameters=InferTimes(queue_us=1, compute_us=2, engine="cpu"),
        outputs=tuple(outputs),
        raw_output_contents=(b"\1\2\3", b"\4\5\6"),
    )
    made = inference.answer(request, result)
    assert made.json_length is not None
    told = json.loads(made.body[: made.json_length])
    assert told["outputs"][0]["data"] == [1, 2, 3]
    assert told["outputs"][1]["parameters"] == {"binary_data_size": 3}
    assert made.body[made.json_length :] == b"\4\5\6"


@given(
    st.lists(st.binary(max_size=30), max_size=3)
    | st.tuples(
        objects(
            model_request=st.just(True),
            model_data=st.just(True),
            model_name=st.just("m.onnx"),
            shape=st.lists(st.integers(0, 3), max_size=4),
            dtype=st.sampled_from(["uint8", "float32"]),
            model_type=st.just("yolox"),
        ).map(lambda header: json.dumps(header).encode()),
        st.binary(max_size=30),
    ).map(list)
)
def test_a_message_of_frigate_is_sound_or_refused(frames: list[bytes]) -> None:
    try:
        message = messages.parse(frames)
        size = message.size if isinstance(message, messages.CameraPicture) else (1, 1)
    except InvalidArgument:
        return
    assert min(size) > 0
    if isinstance(message, messages.CameraPicture):
        assert message.tensor.nbytes == len(frames[1])
