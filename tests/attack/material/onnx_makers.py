"""Hostile ONNX files: small valid models altered in structure and bytes, and a few that are built to hurt."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from .mutate import INTEGERS, TEXTS, Mutator


def right(rng: random.Random) -> Any:
    """One of a few valid models, with most kinds of fields."""
    from onnx import TensorProto, helper, numpy_helper

    weights = np.arange(32, dtype=np.float32).reshape(8, 4)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], name="first"),
        helper.make_node("Add", ["m", "b"], ["a"]),
        helper.make_node("Reshape", ["a", "s"], ["r"]),
        helper.make_node("Softmax", ["r"], ["p"], axis=-1),
        helper.make_node("Transpose", ["p"], ["y"], perm=[1, 0]),
    ]
    initialisers = [
        numpy_helper.from_array(weights, "w"),
        numpy_helper.from_array(np.ones(4, np.float32), "b"),
        numpy_helper.from_array(np.array([4, 2], np.int64), "s"),
    ]
    size = rng.choice((2, "n"))
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [size, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 4])],
        initialisers,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def offered(rng: random.Random, *, costly: bool = True) -> tuple[str, bytes]:
    """A hostile file, and what it is."""
    mutator = Mutator(rng)
    special = list(_SPECIAL) if costly else [name for name in _SPECIAL if not name.startswith("*")]
    kind = rng.randrange(10)
    if kind < 3:
        return "altered bytes", mutator.data(right(rng).SerializeToString())
    if kind < 8:
        return _altered(right(rng), mutator)
    name = rng.choice(special)
    model = right(rng)
    _SPECIAL[name](model)
    return name.lstrip("*"), model.SerializeToString()


def _altered(model: Any, mutator: Mutator) -> tuple[str, bytes]:
    """Fields anywhere in the message changed, doubled or cleared."""
    label = ""
    for _ in range(mutator.rng.choice((1, 1, 2, 3))):
        messages = _messages(model)
        message = mutator.rng.choice(messages)
        fields = message.DESCRIPTOR.fields
        field = mutator.rng.choice(fields)
        label += f" {message.DESCRIPTOR.name}.{field.name}"
        try:
            _change(message, field, mutator)
        except (ValueError, TypeError, UnicodeEncodeError):
            continue  # protobuf itself refuses it
    return f"altered{label}", model.SerializePartialToString()


def _change(message: Any, field: Any, mutator: Mutator) -> None:
    rng = mutator.rng
    repeated = field.is_repeated
    if rng.random() < 0.15:
        message.ClearField(field.name)
        return
    if field.message_type is not None:
        if repeated:
            values = getattr(message, field.name)
            if values and rng.random() < 0.8:
                values.add().CopyFrom(rng.choice(values))
            else:
                values.add()
        else:
            getattr(message, field.name).SetInParent()
        return
    value = _value(field, rng)
    if not repeated:
        setattr(message, field.name, value)
        return
    values = getattr(message, field.name)
    if values and rng.random() < 0.6:
        values[rng.randrange(len(values))] = value
    else:
        values.extend([value] * rng.choice((1, 1, 3, 1000)))


def _value(field: Any, rng: random.Random) -> Any:
    kinds: dict[str, Callable[[], Any]] = {
        "str": lambda: rng.choice((*TEXTS, "x", "w", "y", "Loop", "If", "Conv", "Gather", "ai.onnx")),
        "bytes": lambda: rng.randbytes(rng.choice((0, 1, 16, 4000))),
        "float": lambda: rng.choice((0.0, -1.0, float("nan"), float("inf"), 1e30)),
        "int": lambda: rng.choice((*INTEGERS, 1, 2, 3, 7, 11)),
    }
    name = type(field.default_value).__name__ if not field.is_repeated else _repeated_kind(field)
    return kinds.get(name, kinds["int"])()


def _repeated_kind(field: Any) -> str:
    if field.type == field.TYPE_STRING:
        return "str"
    if field.type == field.TYPE_BYTES:
        return "bytes"
    return "float" if field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE) else "int"


def _messages(message: Any) -> list[Any]:
    """The message and all inside of it."""
    found = [message]
    for field, value in message.ListFields():
        if field.message_type is not None:
            for each in value if field.is_repeated else (value,):
                found += _messages(each)
    return found


def _nested(model: Any) -> None:
    """If inside If, 60 deep (protobuf stops at 100 messages)."""
    from onnx import TensorProto, helper

    inner = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y0"])],
        "g0",
        [],
        [helper.make_tensor_value_info("y0", TensorProto.FLOAT, None)],
    )
    for depth in range(1, 24):
        node = helper.make_node("If", ["c"], [f"y{depth}"], then_branch=inner, else_branch=inner)
        # Both branches hold all that is inside: only the first few levels may double.
        if depth > 6:
            del node.attribute[1:]
        info = helper.make_tensor_value_info(f"y{depth}", TensorProto.FLOAT, None)
        inner = helper.make_graph([node], f"g{depth}", [], [info])
    del model.graph.node[:]
    model.graph.node.extend(inner.node)
    model.graph.node[0].output[0] = "y"


def functions(model: Any, depth: int = 30) -> None:
    """Functions that call each other twice: 2^depth nodes once they are put in."""
    from onnx import helper

    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("deep", 1)]
    leaf = [helper.make_node("Relu", ["a"], ["b"])]
    model.functions.append(helper.make_function("deep", "f0", ["a"], ["b"], leaf, opsets))
    for level in range(1, depth + 1):
        nodes = [
            helper.make_node(f"f{level - 1}", ["a"], ["h"], domain="deep"),
            helper.make_node(f"f{level - 1}", ["h"], ["b"], domain="deep"),
        ]
        model.functions.append(helper.make_function("deep", f"f{level}", ["a"], ["b"], nodes, opsets))
    model.opset_import.append(helper.make_opsetid("deep", 1))
    model.graph.node.append(helper.make_node(f"f{depth}", ["p"], ["z"], domain="deep"))


def _itself(model: Any) -> None:
    """A function that calls itself."""
    from onnx import helper

    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("deep", 1)]
    body = [helper.make_node("f", ["a"], ["b"], domain="deep")]
    model.functions.append(helper.make_function("deep", "f", ["a"], ["b"], body, opsets))
    model.opset_import.append(helper.make_opsetid("deep", 1))
    model.graph.node.append(helper.make_node("f", ["p"], ["z"], domain="deep"))


def _claimed(model: Any) -> None:
    """An initialiser that says it has 2^40 elements."""
    del model.graph.initializer[0].dims[:]
    model.graph.initializer[0].dims.extend([1 << 20, 1 << 20])


def _overflow(model: Any) -> None:
    """An initialiser whose size is zero, modulo 2^64."""
    del model.graph.initializer[0].dims[:]
    model.graph.initializer[0].dims.extend([1 << 32, 1 << 32])


def _outside(path: str) -> Callable[[Any], None]:
    def place(model: Any) -> None:
        tensor = model.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = 1
        tensor.external_data.add(key="location", value=path)
        tensor.external_data.add(key="length", value=str(2 << 30))

    return place


def _huge(model: Any) -> None:
    """A constant that would have 2^40 elements when it is computed."""
    from onnx import helper, numpy_helper

    shape = numpy_helper.from_array(np.array([1 << 20, 1 << 20], np.int64), "big")
    model.graph.initializer.append(shape)
    model.graph.node.insert(0, helper.make_node("ConstantOfShape", ["big"], ["filled"]))
    model.graph.node.append(helper.make_node("ReduceSum", ["filled"], ["z"]))
    model.graph.output[0].name = "z"


def _wide(model: Any) -> None:
    """20,000 nodes in a row."""
    from onnx import helper

    last = "p"
    for number in range(20_000):
        model.graph.node.append(helper.make_node("Relu", [last], [f"n{number}"]))
        last = f"n{number}"
    model.graph.output[0].name = last


def _ring(model: Any) -> None:
    """A node that needs its own output."""
    model.graph.node[0].input[0] = "y"


# Those with a star take a compiler long or much memory by design; the frontend alone is to refuse them too.
_SPECIAL: dict[str, Callable[[Any], None]] = {
    "ifs nested deep": _nested,
    "*functions a billion deep": functions,
    "a function that calls itself": _itself,
    "an initialiser of 2^40 elements": _claimed,
    "an initialiser of 2^64 elements": _overflow,
    "data at an absolute path": _outside("/etc/passwd"),
    "data above the folder": _outside("../../../../etc/passwd"),
    "data in a device": _outside("/dev/zero"),
    "data in nothing": _outside(""),
    "data in a zero character": _outside("a\0b"),
    "data that is not there": _outside("weights.bin"),
    "a constant of 2^40 elements": _huge,
    "*20,000 nodes": _wide,
    "a ring": _ring,
}
