"""Errors, names and parameters as they travel."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.protocol import errors, strict
from honed.protocol.errors import HonedError, InvalidArgument, MissingFiles, ModelRefused, NotFound
from honed.protocol.methods import METHODS, check_name
from honed.protocol.params import InferParams, LoadOptions, LoadParams, PinParams, UploadOptions
from honed.protocol.values import ENGINE_NAMES

parse = partial(strict.from_plain, where="params", none_omitted=True)  # As the service does

TYPES = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, HonedError) and kind is not HonedError
]


@pytest.mark.parametrize("kind", TYPES)
def test_errors_come_back_as_they_were(kind: type[HonedError]) -> None:
    back = errors.error_from_map(errors.error_to_map(kind("a sentence; do this")))
    assert type(back) is kind
    assert str(back) == "a sentence; do this"


def test_a_finer_error_travels_as_the_nearest_that_readers_know() -> None:
    class Finer(errors.OutOfMemory):
        """An error of one module's own."""

    back = errors.error_from_map(errors.error_to_map(Finer("a sentence; do this")))
    assert type(back) is errors.OutOfMemory


def test_refusals_keep_their_reasons_and_files() -> None:
    back = errors.error_from_map(errors.error_to_map(ModelRefused("no", ("a", "b"))))
    assert isinstance(back, ModelRefused)
    assert back.reasons == ("a", "b")
    missing = errors.error_from_map(errors.error_to_map(MissingFiles("no", ("r",), ("w.bin",))))
    assert isinstance(missing, MissingFiles)
    assert (missing.reasons, missing.files) == (("r",), ("w.bin",))


def test_a_client_that_knows_codes_only_gets_the_codes_class() -> None:
    assert type(errors.error_from_map({"code": "NOT_FOUND", "message": "m", "type": "Novel"})) is NotFound
    assert type(errors.error_from_map({"code": "INVALID_ARGUMENT", "message": "m"})) is InvalidArgument
    # A type that contradicts its code does not count.
    assert type(errors.error_from_map({"code": "NOT_FOUND", "message": "m", "type": "Cancelled"})) is NotFound


@given(
    st.dictionaries(
        st.sampled_from(["code", "message", "type", "reasons", "external_data"]),
        st.none() | st.text() | st.lists(st.integers()) | st.integers(),
    )
)
def test_any_error_map_is_some_error(plain: dict[str, Any]) -> None:
    assert isinstance(errors.error_from_map(plain), HonedError)


@pytest.mark.parametrize("name", ["a", "A1", "x.y_z-0", "a" * 64])
def test_names_that_are_allowed(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", ".", "-a", "_a", "a/b", "a b", "a\n", "ä", "a" * 65, "..", "a\0"])
def test_names_that_are_not(name: str) -> None:
    with pytest.raises(InvalidArgument):
        check_name(name)


INFER: dict[str, Any] = {"model_name": "m", "inputs": [{"name": "x", "datatype": "FP32", "shape": [2]}]}


def test_optional_fields_may_be_left_out_or_nil() -> None:
    assert parse(InferParams, INFER) == parse(InferParams, {**INFER, "id": None, "outputs": None})
    full = {
        **INFER,
        "model_version": "1",
        "id": "i",
        "parameters": {"timeout": 5, "priority": 1, "finite": True},
        "outputs": [{"name": "y", "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 8}}],
        "raw_input_contents": [b"12345678"],
    }
    parsed = parse(InferParams, full)
    assert parsed.outputs is not None
    assert parsed.outputs[0].parameters is not None
    assert parsed.outputs[0].parameters.shared_memory_offset is None


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {**INFER, "surprise": 1},
        {**INFER, "model_name": 3},
        {**INFER, "model_name": b"m"},
        {**INFER, "inputs": {}},
        {**INFER, "inputs": [[]]},
        {**INFER, "inputs": [{"name": "x", "datatype": "FP32", "shape": [2.0]}]},
        {**INFER, "inputs": [{"name": "x", "datatype": "FP32", "shape": [True]}]},
        {**INFER, "inputs": [{"name": "x", "datatype": "FP32"}]},
        {**INFER, "raw_input_contents": ["text"]},
        {**INFER, "raw_input_contents": b"bytes"},
        {**INFER, "parameters": {"timeout": "soon"}},
        {**INFER, "parameters": {"timeuot": 3}},
        {**INFER, "parameters": []},
    ],
)
def test_wrong_parameters_are_refused_with_the_place(wrong: dict[str, Any]) -> None:
    with pytest.raises(strict.SchemaError, match="params"):
        parse(InferParams, wrong)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda v: st.lists(v) | st.dictionaries(st.text(), v),
    max_leaves=10,
)


@given(
    method=st.sampled_from(sorted(METHODS)),
    params=st.dictionaries(
        st.sampled_from(["name", "model_name", "inputs", "outputs", "parameters", "files", "byte_size", "x"]),
        JSON,
    ),
)
def test_any_parameters_are_parsed_or_refused(method: str, params: dict[str, Any]) -> None:
    message = ""
    try:
        parse(METHODS[method].params, params)
    except (strict.SchemaError, InvalidArgument) as error:
        message = str(error)
    assert len(message) < 500


def test_shapes_of_a_load() -> None:
    params = {"model_name": "m", "files": ["a.onnx"], "parameters": {"shapes": {"x": [1, 3]}}}
    options = parse(LoadParams, params).parameters
    assert options is not None
    assert options.shapes == {"x": (1, 3)}


@pytest.mark.parametrize("word", ["gpu", "cpu"])
def test_an_engine_is_given_by_its_name_or_by_its_older_word(word: str) -> None:
    for engine in (word, ENGINE_NAMES[word]):
        assert LoadOptions(engine=engine).engine == word
        assert UploadOptions(engine=engine).engine == word
        assert PinParams(name="m", version=None, engine=engine).engine == word
    assert LoadOptions(engine="fastest").engine == "fastest"
    assert LoadOptions(engine="npu").engine == "npu"  # to be refused as it was given
    assert PinParams(name="m", version=None, engine="").engine == ""
