"""A decoder with room for more rows than there are gives what it gives without: ONNX Runtime runs both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from honed.protocol.errors import ModelRefused
from honed.runtime.compiled.model import ROWS_MASK
from honed.tuner import frontend
from honed.tuner.compiler.form import with_room

ROOM, WIDTH, WORDS, PLACES = 16, 8, 11, 64
I64, FLOAT, BOOL = TensorProto.INT64, TensorProto.FLOAT, TensorProto.BOOL
RNG = np.random.default_rng(5)


class Graph:
    """A decoder of one layer and one head, whose parts are added to it."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.inputs = [self.info("ids", I64, [1, "s"]), self.info("past", FLOAT, [1, 1, "p", WIDTH])]
        self.inputs.append(self.info("past_value", FLOAT, [1, 1, "p", WIDTH]))
        self.domains = {"": 17}

    @staticmethod
    def info(name: str, kind: int, shape: list[int | str]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, shape)

    def op(self, kind: str, *inputs: str, out: str = "", **more: object) -> str:
        out = out or f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [out], **more))
        return out

    def const(self, value: object, kind: object = np.int64) -> str:
        name = f"c{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value, kind), name))  # type: ignore[arg-type]
        return name

    def weight(self, *shape: int) -> str:
        return self.const(RNG.standard_normal(shape), np.float32)

    def size(self, of: str, axis: int) -> str:
        return self.op("Gather", self.op("Shape", of), self.const(axis))

    @property
    def lengths(self) -> tuple[str, str, str]:
        """Tokens, rows before, and both."""
        new, before = self.size("ids", 1), self.size("past", 2)
        return new, before, self.op("Add", new, before)

    def rows(self) -> str:
        _, before, whole = self.lengths
        return self.op("Range", before, whole, self.const(1))

    def embedded(self, places: str = "") -> str:
        words = self.op("Gather", self.weight(WORDS, WIDTH), "ids")
        return (
            self.op("Add", words, self.op("Gather", self.weight(PLACES, WIDTH), places)) if places else words
        )

    def state(self, x: str) -> tuple[str, str, str]:
        """The query, and the keys and values of all rows."""
        new = [self.op("MatMul", x, self.weight(WIDTH, WIDTH)) for _ in range(3)]
        query, key, value = (self.op("Unsqueeze", each, self.const([1])) for each in new)
        self.op("Concat", "past", key, out="present", axis=2)
        self.op("Concat", "past_value", value, out="present_value", axis=2)
        return query, "present", "present_value"

    def scores(self, query: str, keys: str) -> str:
        return self.op("MatMul", query, self.op("Transpose", keys, perm=[0, 1, 3, 2]))

    def ends(self, scores: str, values: str) -> onnx.ModelProto:
        return self.model(self.op("MatMul", self.op("Softmax", scores, axis=-1), values))

    def model(self, attended: str) -> onnx.ModelProto:
        self.op("MatMul", attended, self.weight(WIDTH, WORDS), out="logits")
        rows: list[int | str] = [1, 1, "t", WIDTH]
        outputs = [self.info("logits", FLOAT, [1, 1, "s", WORDS])]
        outputs += [self.info(name, FLOAT, rows) for name in ("present", "present_value")]
        graph = helper.make_graph(self.nodes, "g", self.inputs, outputs, self.weights)
        opsets = [helper.make_opsetid(domain, version) for domain, version in self.domains.items()]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def compared() -> onnx.ModelProto:
    """Columns are compared with rows, as numbers and within a window."""
    g = Graph()
    rows = g.rows()
    query, keys, values = g.state(g.embedded(rows))
    columns = g.op("Range", g.const(0), g.lengths[2], g.const(1))
    row = g.op("Unsqueeze", rows, g.const([1]))
    seen = g.op("And", g.op("LessOrEqual", columns, row), g.op("Less", g.op("Sub", row, g.const(5)), columns))
    return g.ends(g.op("Where", seen, g.scores(query, keys), g.const(-1e9, np.float32)), values)


def table() -> onnx.ModelProto:
    """A triangle is cut from a table, as GPT-2 does, and places from a table of turns."""
    g = Graph()
    _, before, whole = g.lengths
    one = g.const([0])
    first, last = g.op("Unsqueeze", before, one), g.op("Unsqueeze", whole, one)
    places = g.op("Slice", g.weight(PLACES, WIDTH), first, last, g.const([0]))
    query, keys, values = g.state(g.op("Add", g.embedded(), places))
    triangle = g.const(np.tril(np.ones((1, 1, PLACES, PLACES))), bool)
    cut = g.op("Slice", triangle, first, last, g.const([2]))
    cut = g.op("Slice", cut, g.const([0]), last, g.const([3]))
    return g.ends(g.op("Where", cut, g.scores(query, keys), g.const(-1e9, np.float32)), values)


def diagonal() -> onnx.ModelProto:
    """A matrix of the least number is cut above a diagonal, of runtime sizes."""
    g = Graph()
    new, before, whole = g.lengths
    query, keys, values = g.state(g.embedded(g.rows()))
    shape = g.op("Concat", *(g.op("Unsqueeze", each, g.const([0])) for each in (new, whole)), axis=0)
    full = g.op("Expand", g.const(-1e9, np.float32), shape)
    bias = g.op("Trilu", full, g.op("Add", before, g.const(1)), upper=1)
    return g.ends(g.op("Add", g.scores(query, keys), bias), values)


def distances() -> onnx.ModelProto:
    """Scores fall with the distance (ALiBi), in floats; a matrix of data is cut above a diagonal."""
    g = Graph()
    query, keys, values = g.state(g.embedded())
    columns = g.op("Cast", g.op("Range", g.const(0), g.lengths[2], g.const(1)), to=FLOAT)
    row = g.op("Cast", g.op("Unsqueeze", g.rows(), g.const([1])), to=FLOAT)
    slope = g.op("Mul", g.op("Sub", columns, row), g.const(0.3, np.float32))
    scores = g.op("Add", g.scores(query, keys), slope)
    data = g.op("Sub", g.op("Mul", scores, g.const(0, np.float32)), g.const(1e9, np.float32))
    later = g.op("Trilu", data, g.op("Add", g.lengths[1], g.const(1)), upper=1)
    return g.ends(g.op("Add", scores, later), values)


def one_token() -> onnx.ModelProto:
    """Nothing is masked, as one token sees all: attention alone says what there is."""
    g = Graph()
    query, keys, values = g.state(g.embedded())
    return g.ends(g.scores(query, keys), values)


def operator() -> onnx.ModelProto:
    """ONNX's Attention has the state, and is causal."""
    g = Graph()
    g.domains[""] = 23
    x = g.op("Unsqueeze", g.embedded(g.rows()), g.const([1]))
    parts = [g.op("MatMul", x, g.weight(WIDTH, WIDTH)) for _ in range(3)]
    g.nodes.append(
        helper.make_node(
            "Attention", [*parts, "", "past", "past_value"], ["y", "present", "present_value"], is_causal=1
        )
    )
    return g.model("y")


def own_mask(kind: int, *, joins: bool) -> onnx.ModelProto:
    """ONNX's Attention has a causal mask of sizes, and may join the state itself."""
    g = Graph()
    g.domains[""] = 23
    rows = g.rows()
    x = g.op("Unsqueeze", g.embedded(rows), g.const([1]))
    columns = g.op("Range", g.const(0), g.lengths[2], g.const(1))
    mask = g.op("LessOrEqual", columns, g.op("Unsqueeze", rows, g.const([1])))
    if kind == FLOAT:
        mask = g.op("Where", mask, g.const(0, np.float32), g.const(-1e9, np.float32))
    query, *new = (g.op("MatMul", x, g.weight(WIDTH, WIDTH)) for _ in range(3))
    pasts, after = ["past", "past_value"], ["present", "present_value"]
    if joins:
        inputs, outputs = [query, *new, mask, *pasts], ["y", *after]
    else:
        rows_of = [
            g.op("Concat", *each[:2], out=each[2], axis=2) for each in zip(pasts, new, after, strict=True)
        ]
        inputs, outputs = [query, *rows_of, mask], ["y"]
    g.nodes.append(helper.make_node("Attention", inputs, outputs))
    return g.model("y")


def with_bool_mask() -> onnx.ModelProto:
    return own_mask(BOOL, joins=True)


def with_float_mask() -> onnx.ModelProto:
    return own_mask(FLOAT, joins=True)


def with_mask_of_joined() -> onnx.ModelProto:
    return own_mask(BOOL, joins=False)


def joined_before(*, causal: bool = False) -> onnx.ModelProto:
    """ONNX Runtime's MultiHeadAttention reads keys that were joined to the state, and a mask of sizes.

    The scores after it are masked, too, by the sizes of its answer.
    """
    g = Graph()
    g.domains["com.microsoft"] = 1
    rows = g.rows()
    query, keys, values = g.state(g.embedded(rows))
    columns = g.op("Range", g.const(0), g.lengths[2], g.const(1))
    seen = g.op("LessOrEqual", columns, g.op("Unsqueeze", rows, g.const([1])))
    mask = g.op("Where", seen, g.const(0, np.float32), g.const(-1e9, np.float32))
    inputs = [g.op("Squeeze", query, g.const([1])), keys, values]
    inputs += ["", "", g.op("Unsqueeze", mask, g.const([0, 1]))] if not causal else []
    g.op(
        "MultiHeadAttention",
        *inputs,
        out="y",
        domain="com.microsoft",
        num_heads=1,
        unidirectional=int(causal),
    )
    return g.ends(g.scores(g.op("Unsqueeze", "y", g.const([1])), keys), values)


def joined() -> onnx.ModelProto:
    """ONNX Runtime's MultiHeadAttention has the state."""
    g = Graph()
    g.domains["com.microsoft"] = 1
    x = g.embedded(g.rows())
    parts = [g.op("MatMul", x, g.weight(WIDTH, WIDTH)) for _ in range(3)]
    g.nodes.append(
        helper.make_node(
            "MultiHeadAttention",
            [*parts, "", "", "", "past", "past_value"],
            ["y", "present", "present_value"],
            domain="com.microsoft",
            num_heads=1,
            unidirectional=1,
        )
    )
    return g.model(g.op("Unsqueeze", "y", g.const([1])))


def masked() -> onnx.ModelProto:
    """A mask is an input, and places follow from the length of the state or from the mask's ones."""
    g = Graph()
    g.inputs.append(g.info("mask", I64, [1, "t"]))
    rows = g.rows()
    counted = g.op("Sub", g.op("CumSum", "mask", g.const(1)), g.const(1))
    before = g.op("Unsqueeze", g.lengths[1], g.const([0]))
    places = g.op("Slice", counted, before, g.const([2**40]), g.const([1]))
    x = g.op("Add", g.embedded(rows), g.op("Gather", g.weight(PLACES, WIDTH), places))
    query, keys, values = g.state(x)
    columns = g.op("Range", g.const(0), g.size("mask", 1), g.const(1))
    causal = g.op("LessOrEqual", columns, g.op("Unsqueeze", rows, g.const([1])))
    seen = g.op("And", causal, g.op("Cast", "mask", to=BOOL))
    return g.ends(g.op("Where", seen, g.scores(query, keys), g.const(-1e9, np.float32)), values)


def fills(tokens: int) -> Iterator[int]:
    yield from (0, 1, 5, ROOM - tokens, ROOM - 1, ROOM)


ALL = [compared, table, diagonal, distances, one_token, operator, joined, joined_before, masked]
ALL += [with_bool_mask, with_float_mask, with_mask_of_joined]


@pytest.mark.parametrize(
    ("made", "tokens"),
    [
        pytest.param(made, n, id=f"{made.__name__}-{n}")
        for made in ALL
        for n in (1, 4)
        if n == 1 or made is not one_token
    ],
)
def test_rows_that_are_not_there_change_nothing(
    made: Callable[[], onnx.ModelProto], tokens: int, tmp_path: Path
) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(made(), path)
    session, roomy = opened(onnx.load(path)), opened(with_room(frontend.load(path), shapes(path, tokens)))
    for before in fills(tokens):
        given, padded = inputs(path, tokens, before)
        for expected, found in zip(session.run(None, given), roomy.run(None, padded), strict=True):
            new = found[..., -tokens:, :]
            np.testing.assert_allclose(new, expected[..., -tokens:, :], rtol=1e-4, atol=1e-4)


def opened(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def shapes(path: Path, tokens: int) -> dict[str, tuple[int, ...]]:
    sizes = {"s": tokens, "p": ROOM, "t": ROOM + tokens}
    graph = onnx.load(path).graph
    dims = {info.name: info.type.tensor_type.shape.dim for info in graph.input}
    found = {name: tuple(sizes.get(d.dim_param, d.dim_value) for d in each) for name, each in dims.items()}
    return {**found, ROWS_MASK: (1, ROOM)}


def inputs(path: Path, tokens: int, before: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """What the model is given for some tokens after others, and with room; rows that are not there are 7."""
    rng = np.random.default_rng(before)
    given = {"ids": rng.integers(0, WORDS, (1, tokens))}
    padded = {**given, ROWS_MASK: (np.arange(ROOM) < before)[None].astype(np.uint8)}
    for name in ("past", "past_value"):
        given[name] = rng.standard_normal((1, 1, before, WIDTH)).astype(np.float32)
        padded[name] = np.full((1, 1, ROOM, WIDTH), 7, np.float32)
        padded[name][:, :, :before] = given[name]
    if "mask" in {info.name for info in onnx.load(path).graph.input}:
        given["mask"] = np.ones((1, before + tokens), np.int64)
        seen = [np.arange(ROOM) < before, np.ones(tokens)]
        padded["mask"] = np.concatenate(seen).astype(np.int64)[None]
    return given, padded


def test_what_is_not_understood_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    g = Graph()
    query, keys, values = g.state(g.embedded())
    scores = g.op("Sigmoid", g.scores(query, keys))  # no softmax: nothing would hide rows
    onnx.save(g.model(g.op("MatMul", scores, values)), path)
    with pytest.raises(ModelRefused, match="no Softmax or Attention over the rows of its state"):
        with_room(frontend.load(path), shapes(path, 1))
    g = Graph()
    whole = g.lengths[2]
    places = g.op("Range", g.const(1), whole, g.const(1))
    query, keys, values = g.state(g.embedded())
    some = g.op("ReduceSum", g.op("Cast", places, to=FLOAT))
    onnx.save(g.ends(g.op("Add", g.scores(query, keys), some), values), path)
    with pytest.raises(ModelRefused, match="counts rows of its state from another than the first"):
        with_room(frontend.load(path), shapes(path, 4))
    g = Graph()
    g.domains["com.microsoft"] = 1
    whole = g.op("Cast", g.lengths[2], to=TensorProto.INT32)
    counts = g.op("Unsqueeze", g.op("Sub", whole, g.const(1, np.int32)), g.const([0]))
    parts = [g.op("MatMul", g.embedded(), g.weight(WIDTH, WIDTH)) for _ in range(3)]
    inputs, outputs = [*parts, "past", "past_value", counts, whole], ["y", "present", "present_value"]
    grouped = {"domain": "com.microsoft", "num_heads": 1, "kv_num_heads": 1}
    g.nodes.append(helper.make_node("GroupQueryAttention", inputs, outputs, name="attends", **grouped))
    onnx.save(g.model(g.op("Unsqueeze", "y", g.const([1]))), path)
    with pytest.raises(ModelRefused, match="'attends' takes the number of its rows from the state's size"):
        with_room(frontend.load(path), shapes(path, 1))
    onnx.save(joined_before(causal=True), path)
    with pytest.raises(ModelRefused, match="is causal, and does not know the rows of its state"):
        with_room(frontend.load(path), shapes(path, 1))
