"""Everything that a session tells of itself, beside what onnxruntime tells of the same file."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto as T
from onnx import helper, numpy_helper

from honed import ort

from .test_ort import pointed, served

pytestmark = [pytest.mark.service, pytest.mark.opencl, pytest.mark.tvm]
__all__ = ["pointed", "served"]
_ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((_ROOT / "tests/models").glob("*.onnx"))
SHARED = Path("/work/shared/models")  # more of them, where they are
FILES += [path for path in sorted(SHARED.glob("*.onnx")) if path.name not in {each.name for each in FILES}]
END, NODE = helper.make_tensor_value_info, helper.make_node
X = END("x", T.FLOAT, ["batch", 16])
W = numpy_helper.from_array(np.ones((16, 256), np.float32), "w")
DENSE = [NODE("MatMul", ["x", "w"], ["a"]), NODE("Relu", ["a"], ["y"])]
OPTIONAL = helper.make_optional_type_proto(helper.make_tensor_type_proto(T.FLOAT, ["batch", 16]))


def file(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    known: Sequence[onnx.TensorProto] = (),
    *,
    domain: str = "",
    opset: int = 17,
    ir_version: int = 8,
) -> bytes:
    """A model file, unchecked."""
    graph = helper.make_graph(
        nodes, "the graph", inputs, outputs, initializer=list(known), doc_string="of it"
    )
    opsets = [helper.make_opsetid(domain, opset)]
    made = helper.make_model(
        graph, opset_imports=opsets, ir_version=ir_version, producer_name="p", model_version=3, domain="d.e"
    )
    made.doc_string = "words"
    helper.set_model_props(made, {"names": "a,b", "empty": ""})
    return bytes(made.SerializeToString())


def dense(output: onnx.ValueInfoProto, **changes: Any) -> bytes:
    """One layer, whose output is declared so."""
    return file(changes.pop("nodes", DENSE), changes.pop("inputs", [X]), [output], [W], **changes)


def relu(given: Sequence[Any] | None, declared: Sequence[Any] | None) -> bytes:
    """A Relu of such shapes; None: none is declared."""
    return file([NODE("Relu", ["x"], ["y"])], [END("x", T.FLOAT, given)], [END("y", T.FLOAT, declared)])


MADE: dict[str, Callable[[], bytes]] = {
    "sizes by name": lambda: dense(END("y", T.FLOAT, ["batch", "Reluy_dim_1"])),
    "no shape": lambda: dense(END("y", T.FLOAT, None)),
    "a name only": lambda: dense(onnx.ValueInfoProto(name="y")),
    "declared a scalar": lambda: dense(END("y", T.FLOAT, [])),
    "declared another size": lambda: dense(END("y", T.FLOAT, ["batch", 255])),
    "declared another rank": lambda: dense(END("y", T.FLOAT, ["a", "b", "c"])),
    "declared another name": lambda: dense(END("y", T.FLOAT, ["rows", 256])),
    "nodes out of order": lambda: dense(END("y", T.FLOAT, None), nodes=DENSE[::-1]),
    "out of order, a name only": lambda: dense(onnx.ValueInfoProto(name="y"), nodes=DENSE[::-1]),
    "an input that has a value": lambda: dense(
        END("y", T.FLOAT, None), inputs=[X, END("w", T.FLOAT, [16, 256])]
    ),
    "one with open sizes": lambda: dense(END("y", T.FLOAT, None), inputs=[X, END("w", T.FLOAT, ["k", None])]),
    "one of an old file": lambda: dense(
        END("y", T.FLOAT, None), inputs=[X, END("w", T.FLOAT, [16, 256])], ir_version=3
    ),
    "an input that nothing takes": lambda: file(
        [NODE("Relu", ["x"], ["y"])], [X, END("z", T.INT64, [3])], [END("y", T.FLOAT, None)]
    ),
    "the domain ai.onnx": lambda: file(
        [NODE("Relu", ["x"], ["y"], domain="ai.onnx")], [X], [END("y", T.FLOAT, None)], domain="ai.onnx"
    ),
    "no rank anywhere": lambda: relu(None, None),
    "a rank for the output alone": lambda: relu(None, ["q", 2, 3]),
    "no rank for the output": lambda: relu([2, "n", 3], None),
    "a scalar": lambda: relu([], []),
    "sizes of 0": lambda: relu([0, "n"], [0, "n"]),
    "sizes below 0": lambda: relu([-1, 3], [-1, 3]),
    "names of Paddle": lambda: relu(["?", 3], ["?", 3]),
    "empty names": lambda: relu(["", 3], ["n", 3]),
    "a size that is computed": lambda: file(
        [NODE("Concat", ["x", "x"], ["y"], axis=0)], [X], [END("y", T.FLOAT, ["rows", 16])]
    ),
    "a size of the data": lambda: file([NODE("NonZero", ["x"], ["y"])], [X], [onnx.ValueInfoProto(name="y")]),
    "a shape of the file's": lambda: file(
        [NODE("Shape", ["c"], ["s"]), NODE("Reshape", ["x", "s"], ["y"])],
        [END("x", T.FLOAT, ["n"])],
        [END("y", T.FLOAT, ["p", "q"])],
        [numpy_helper.from_array(np.ones((2, 3), np.float32), "c")],
    ),
    "other types": lambda: file(
        [NODE("Cast", ["x"], ["y"], to=T.FLOAT16), NODE("Cast", ["x"], ["z"], to=T.BOOL)],
        [END("x", T.STRING, ["n"])],
        [END("y", T.FLOAT16, None), onnx.ValueInfoProto(name="z")],
    ),
}
# What honed does not carry, and leaves to onnxruntime where the app allows that.
LEFT: dict[str, Callable[[], bytes]] = {
    "a sequence": lambda: file(
        [NODE("SequenceConstruct", ["x"], ["y"])],
        [X],
        [helper.make_tensor_sequence_value_info("y", T.FLOAT, None)],
    ),
    "a sequence by name": lambda: file(
        [NODE("SequenceConstruct", ["x"], ["y"])], [X], [onnx.ValueInfoProto(name="y")]
    ),
    "a sequence in": lambda: file(
        [NODE("SequenceLength", ["x"], ["y"])],
        [helper.make_tensor_sequence_value_info("x", T.FLOAT, ["batch", 16])],
        [END("y", T.INT64, [])],
    ),
    "optional": lambda: file(
        [NODE("Optional", ["x"], ["y"])], [X], [helper.make_value_info("y", OPTIONAL)], opset=18
    ),
    "optional in": lambda: file(
        [NODE("OptionalHasElement", ["x"], ["y"])],
        [helper.make_value_info("x", OPTIONAL)],
        [END("y", T.BOOL, [])],
        opset=18,
    ),
}
META = ("producer_name", "graph_name", "domain", "description", "graph_description", "version")


def told(rt: Any, given: Any, options: Any = None, **asked: Any) -> dict[str, Any]:
    """All of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = rt.InferenceSession(given, options, **asked)
    ends = {
        what: [(end.name, end.type, end.shape) for end in getattr(one, what)()]
        for what in ("get_inputs", "get_outputs", "get_overridable_initializers")
    }
    meta = one.get_modelmeta()
    return {
        **ends,
        "meta": {name: getattr(meta, name) for name in META},
        "custom": dict(meta.custom_metadata_map),
        "providers": one.get_providers(),
        "provider options": one.get_provider_options(),
        "options": {
            name: str(getattr(one.get_session_options(), name)) for name in ort.SessionOptions.__annotations__
        },
        "profile": one.end_profiling(),
        "tuning": one.get_tuning_results(),
        "memory": [len(one.get_input_memory_infos()), len(one.get_output_memory_infos())],
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_of_models_at_hand(path: Path) -> None:
    assert told(ort, path) == told(onnxruntime, path)


@pytest.mark.parametrize("what", MADE)
def test_of_made_files(what: str) -> None:
    data = MADE[what]()
    assert told(ort, data) == told(onnxruntime, data)


@pytest.mark.parametrize("what", LEFT)
def test_of_what_is_left_to_onnxruntime(what: str) -> None:
    data = LEFT[what]()
    options = ort.SessionOptions()
    options.add_session_config_entry("honed.fallback", "1")
    assert told(ort, data, options) == told(onnxruntime, data)


CPU = "CPUExecutionProvider"
ASKED: list[Any] = [
    None,
    [],
    (),
    [CPU],
    (CPU,),
    ["CUDAExecutionProvider"],
    ["CUDAExecutionProvider", CPU],
    [("CUDAExecutionProvider", {"device_id": 0}), CPU],
    [(CPU, {"arena_extend_strategy": "kSameAsRequested"})],
    [CPU, CPU],
    # Given wrongly, so that none counts.
    [(CPU,)],
    [(CPU, None)],
    [3],
    {CPU},
    CPU,
]


@pytest.mark.parametrize("providers", ASKED, ids=repr)
def test_providers_are_those_that_were_asked_for(providers: Any) -> None:
    data = MADE["no shape"]()
    expected = told(onnxruntime, data, providers=providers)
    found = told(ort, data, providers=providers)
    for what in ("providers", "provider options"):
        assert found[what] == expected[what]


@pytest.mark.parametrize("given", [[], {"a": 1}, [3], [{"x": 1}], ({},)], ids=repr)
def test_provider_options_are_looked_at_as_there(given: Any) -> None:
    data = MADE["no shape"]()
    asked = {"providers": [CPU], "provider_options": given}
    assert told(ort, data, **asked) == told(onnxruntime, data, **asked)
    try:
        told(onnxruntime, data, **asked, enable_fallback=0)
    except ValueError as error:
        with pytest.raises(ValueError, match=str(error)[:20]):
            told(ort, data, **asked, enable_fallback=0)
    else:
        told(ort, data, **asked, enable_fallback=0)


def test_an_app_that_asks_for_honed_is_told_of_it_and_of_the_engine() -> None:
    one = ort.InferenceSession(MADE["no shape"](), providers=[("HonedExecutionProvider", {"a": 1})])
    assert one.get_providers() == ort.get_available_providers()
    assert one.get_provider_options() == {"HonedExecutionProvider": {"a": "1"}, CPU: {}}
    assert one.honed_engine == "cpu"
    one.run(None, {"x": np.zeros((1, 16), np.float32)})
    assert one.honed_engine == "cpu"
    one.set_providers([CPU])
    assert one.get_providers() == [CPU]


def test_options_are_those_of_the_moment() -> None:
    for rt in (ort, onnxruntime):
        options = rt.SessionOptions()
        options.intra_op_num_threads = 2
        options.add_session_config_entry("a", "b")
        one = rt.InferenceSession(MADE["no shape"](), options)
        options.intra_op_num_threads = 3
        kept = one.get_session_options()
        assert kept is not options
        assert (kept.intra_op_num_threads, kept.get_session_config_entry("a")) == (2, "b")


ROWS = np.ones((2, 16), np.float32)
RUNS: dict[str, tuple[Any, Any]] = {
    "all": (None, {"x": ROWS}),
    "none": ([], {"x": ROWS}),
    "one twice": (["y", "y"], {"x": ROWS}),
    "a tuple": (("y",), {"x": ROWS}),
    "unknown": (["q"], {"x": ROWS}),
    "a str": ("y", {"x": ROWS}),
    "a dict": ({"y": 1}, {"x": ROWS}),
    "no str": ([None], {"x": ROWS}),
    "numbers": ([3], {"x": ROWS}),
    "lists": (None, {"x": ROWS.tolist()}),
    "no feed": (None, None),
    "a list for a feed": (None, [ROWS]),
    "nothing": (None, {}),
    "another type": (None, {"x": ROWS.astype(np.float64)}),
    "another size": (None, {"x": ROWS[:, :3]}),
    "another rank": (None, {"x": ROWS[0]}),
    "one too many": (None, {"x": ROWS, "more": ROWS}),
    "not contiguous": (None, {"x": np.ones((16, 2), np.float32).T}),
    "no rows": (None, {"x": ROWS[:0]}),
    "read-only": (None, {"x": np.broadcast_to(np.float32(1), (2, 16))}),
}


@pytest.mark.parametrize("what", RUNS)
def test_runs_give_or_raise_what_they_do_there(what: str) -> None:
    names, feed = RUNS[what]

    def outcome(rt: Any) -> Any:
        one = rt.InferenceSession(MADE["no shape"](), providers=[CPU])
        try:
            return [array.tolist() for array in one.run(names, feed)]
        except Exception as error:  # noqa: BLE001 - which one is what is compared
            return type(error).__name__, str(error).split(" : ")[:3]

    found, expected = outcome(ort), outcome(onnxruntime)
    if expected[:1] == ("TypeError",):
        assert found[0] == "TypeError"
    else:
        assert found == expected


@pytest.mark.parametrize("given", [bytearray(b"a"), None, 3, b"", b"abc", "", "/"], ids=repr)
def test_what_is_no_file_raises_what_it_does_there(given: Any) -> None:
    with pytest.raises(Exception) as expected:  # noqa: PT011 - which one is what is compared
        onnxruntime.InferenceSession(given)
    with pytest.raises(Exception) as found:  # noqa: PT011
        ort.InferenceSession(given)
    assert type(found.value).__name__ == type(expected.value).__name__


def test_bindings_raise_what_they_do_there() -> None:
    def outcome(rt: Any, use: Callable[[Any, Any, Any], object]) -> Any:
        one, other = (rt.InferenceSession(MADE["no shape"](), providers=[CPU]) for _ in range(2))
        binding = one.io_binding()
        try:
            return use(one, other, binding)
        except Exception as error:  # noqa: BLE001
            return type(error).__name__

    uses: list[Callable[[Any, Any, Any], object]] = [
        lambda one, other, io: io.bind_cpu_input("q", ROWS),
        lambda one, other, io: other.run_with_iobinding(io),
        lambda one, other, io: (io.bind_cpu_input("x", ROWS), one.run_with_iobinding(io)),
        lambda one, other, io: (io.bind_output("y"), one.run_with_iobinding(io)),
        lambda one, other, io: (
            io.bind_cpu_input("x", ROWS[:, :3]),
            io.bind_output("y"),
            one.run_with_iobinding(io),
        ),
        lambda one, other, io: (
            io.bind_cpu_input("x", ROWS),
            io.bind_output("y"),
            one.run_with_iobinding(io),
            [array.tolist() for array in io.copy_outputs_to_cpu()],
        ),
    ]
    for use in uses:
        assert outcome(ort, use) == outcome(onnxruntime, use)
