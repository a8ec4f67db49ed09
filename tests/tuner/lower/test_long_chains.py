"""Long chains, doubling graphs and wide nodes: bounded kernels that give NumPy's answers on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

from honed.machine import devices
from honed.tuner.compiler.verification import run_model
from honed.tuner.frontend import import_named, normalise
from honed.tuner.lower.functions.legalize import legalize

pytestmark = pytest.mark.tvm
Array = np.ndarray[Any, Any]
_ARGUMENTS = 128  # pointers that any OpenCL device takes (1,024 bytes of parameters)


def model(
    nodes: Sequence[NodeProto], shape: tuple[int, ...], constants: dict[str, Array], kind: int, opset: int
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info("y", kind, None)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def chain(links: int, *ops: str) -> onnx.ModelProto:
    """Return a model of so many operators, each of what the one before gives."""
    names = ["x", *(f"v{n}" for n in range(links - 1)), "y"]
    nodes = [helper.make_node(ops[n % len(ops)], [names[n]], [names[n + 1]]) for n in range(links)]
    return model(nodes, (2, 64), {}, TensorProto.FLOAT, 20)


def doubled(op: str, links: int) -> onnx.ModelProto:
    names = ["x", *(f"v{n}" for n in range(links - 1)), "y"]
    nodes = [helper.make_node(op, [names[n], names[n]], [names[n + 1]]) for n in range(links)]
    return model(nodes, (2, 64), {}, TensorProto.FLOAT, 17)


def on_device(given: onnx.ModelProto, x: Array) -> Array:
    functions = legalize(import_named(normalise(given)).module, devices.select("").profile)[0].functions
    assert all(len(one.params) <= _ARGUMENTS for one in functions.values())
    return run_model(given, {"x": x}, devices.select(""))["y"]


def erf(x: Array) -> Array:
    import math

    return np.vectorize(math.erf)(x)


_FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "Sin": np.sin,
    "Tanh": np.tanh,
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Erf": erf,
    "Elu": lambda x: np.where(x < 0, np.exp(np.minimum(x, 0)) - 1, x),
    "LeakyRelu": lambda x: np.where(x < 0, 0.01 * x, x),
    "HardSwish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    "Softplus": lambda x: np.log1p(np.exp(x)),
}


@pytest.mark.parametrize(
    "op",
    [each if each == "HardSwish" else pytest.param(each, marks=pytest.mark.slow) for each in _FUNCTIONS],
)
def test_a_chain_of_one_operator(op: str) -> None:
    x = np.random.default_rng(0).standard_normal((2, 64)).astype("f")
    wanted: Array = x.astype("d")
    for _ in range(24):
        wanted = _FUNCTIONS[op](wanted)
    np.testing.assert_allclose(on_device(chain(24, op), x), wanted, rtol=2e-4, atol=1e-5)


def test_a_chain_of_several() -> None:
    x = np.random.default_rng(0).standard_normal((2, 64)).astype("f")
    wanted: Array = x.astype("d")
    for n in range(24):
        wanted = _FUNCTIONS[("Sin", "Tanh", "Erf", "Sigmoid")[n % 4]](wanted)
    got = on_device(chain(24, "Sin", "Tanh", "Erf", "Sigmoid"), x)
    np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=1e-5)


def test_a_graph_that_doubles() -> None:
    x = np.random.default_rng(0).standard_normal((2, 64)).astype("f")
    np.testing.assert_allclose(on_device(doubled("Add", 40), x), x.astype("d") * 2**40, rtol=1e-5)


def test_a_concatenation_of_very_many() -> None:
    count, rng = 300, np.random.default_rng(0)
    x, places = rng.standard_normal((2, 5)).astype("f"), rng.integers(0, 5, count)
    nodes = [helper.make_node("Gather", ["x", f"i{n}"], [f"g{n}"], axis=1) for n in range(count)]
    nodes.append(helper.make_node("Concat", [f"g{n}" for n in range(count)], ["y"], axis=1))
    constants: dict[str, Array] = {f"i{n}": places[n : n + 1] for n in range(count)}
    got = on_device(model(nodes, (2, 5), constants, TensorProto.FLOAT, 17), x)
    np.testing.assert_array_equal(got, x[:, places])


def sums() -> list[Any]:
    """Return all ways to sum; of those that are not slow, one is of each shape, and any two others meet."""
    axes = [((2, 3000), 1), ((130, 3), 0), ((2, 65, 7), -2), ((1, 1), 1)]
    quick = [("float32", 0, 0), ("float32", 1, 1), ("int32", 0, 1), ("int32", 1, 0)]
    return [
        pytest.param(kind, *axis, *flags, marks=() if one == (kind, *flags) else pytest.mark.slow)
        for axis, one in zip(axes, quick, strict=True)
        for kind, *flags in product(("float32", "int32"), (0, 1), (0, 1))
    ]


@pytest.mark.parametrize(("kind", "shape", "axis", "exclusive", "reverse"), sums())
def test_running_sums(kind: str, shape: tuple[int, ...], axis: int, exclusive: int, reverse: int) -> None:
    x = np.random.default_rng(0).integers(-9, 9, shape).astype(kind)
    node = helper.make_node("CumSum", ["x", "a"], ["y"], exclusive=exclusive, reverse=reverse)
    elem = helper.np_dtype_to_tensor_dtype(x.dtype)
    got = on_device(model([node], shape, {"a": np.array(axis)}, elem, 17), x)
    forward = np.flip(x, axis) if reverse else x
    sums = np.cumsum(forward, axis) - (forward if exclusive else 0)
    np.testing.assert_array_equal(got, np.flip(sums, axis) if reverse else sums)


@pytest.mark.parametrize("reverse", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_running_products(reverse: int) -> None:
    x = np.random.default_rng(0).uniform(0.95, 1.05, (3, 200)).astype("f")
    node = helper.make_node("CumProd", ["x", "a"], ["y"], exclusive=1, reverse=reverse)
    got = on_device(model([node], (3, 200), {"a": np.array(1)}, TensorProto.FLOAT, 26), x)
    forward = (np.flip(x, 1) if reverse else x).astype("d")
    products = np.concatenate([np.ones((3, 1)), np.cumprod(forward, 1)[:, :-1]], 1)
    np.testing.assert_allclose(got, np.flip(products, 1) if reverse else products, rtol=1e-5)


@pytest.mark.parametrize(("kind", "to"), [("float32", "int32"), ("int32", "float32"), ("int8", "uint8")])
def test_bits_as_another_type(kind: str, to: str) -> None:
    x = np.random.default_rng(0).integers(-100, 100, (4, 33)).astype(kind)
    wanted = helper.np_dtype_to_tensor_dtype(np.dtype(to))
    made = model([helper.make_node("Identity", ["x"], ["y"])], (4, 33), {}, 1, 26)
    made.graph.input[0].type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(x.dtype)
    made.graph.output[0].type.tensor_type.elem_type = wanted
    made.graph.node[0].CopyFrom(helper.make_node("BitCast", ["x"], ["y"], to=wanted))
    np.testing.assert_array_equal(on_device(made, x).view(kind), x)
