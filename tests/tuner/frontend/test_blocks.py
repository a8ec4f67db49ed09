"""Weights of few bits in blocks, against ONNX Runtime, and what is compiled of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tvm import tirx

from honed.machine.profile import DeviceProfile
from honed.runtime.errors import ModelRefused
from honed.tuner.frontend import import_named, normalise
from honed.tuner.lower.functions.legalize import legalize
from honed.tuner.verify.evaluator import Reference, evaluate
from tests.runtime.builder import PROFILE

from .test_contrib_forms import model, same
from .test_quantised import integers
from .test_rules import floats, run

pytestmark = pytest.mark.tvm
Constants = dict[str, np.ndarray | None]


def weights(
    terms: int, columns: int, bits: int, block: int, *, zeros: str = "", kind: type[np.generic] = np.float32
) -> Constants:
    """What MatMulNBits is given beside its input, without group indices and bias."""
    blocks = -(-terms // block)
    zero: np.ndarray | None = None
    if zeros == "packed":
        zero = integers(np.uint8, columns, -(-blocks * bits // 8), seed=1)
    elif zeros:
        zero = floats(columns, blocks, seed=3).astype(kind)
    found: Constants = {
        "w": integers(np.uint8, columns, blocks, block * bits // 8),
        "s": (np.abs(floats(columns, blocks, seed=1)) / 2**bits + 0.01).astype(kind),
        "z": zero,
    }
    return found if zero is not None else {k: found[k] for k in "ws"}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("zeros", ["", "packed"])
def test_products_of_each_block(bits: int, block: int, zeros: str) -> None:
    for terms in (block, 3 * block, 2 * block + 8):
        constants = weights(terms, 6, bits, block, zeros=zeros)
        attrs = {"K": terms, "N": 6, "bits": bits, "block_size": block}
        same("MatMulNBits", {"x": floats(2, 3, terms)}, constants, tolerance=1e-3, **attrs)


@pytest.mark.parametrize("rows", [(1,), (1, 1), (7,), (2, 1, 3)])
def test_products_of_any_rank_and_with_a_bias(rows: tuple[int, ...]) -> None:
    constants = weights(48, 5, 4, 16, zeros="float") | {"g": None, "b": floats(5, seed=2)}
    attrs = {"K": 48, "N": 5, "bits": 4, "block_size": 16}
    same("MatMulNBits", {"x": floats(*rows, 48)}, constants, tolerance=1e-3, **attrs)


def test_products_of_halves() -> None:
    data, constants = {"x": floats(3, 64).astype(np.float16)}, weights(64, 8, 4, 32, kind=np.float16)
    attrs = {"K": 64, "N": 8, "bits": 4, "block_size": 32}
    same("MatMulNBits", data, constants, [np.float16], tolerance=2e-2, **attrs)


def test_inputs_that_onnx_runtime_may_quantise_are_not() -> None:
    attrs = {"K": 64, "N": 8, "bits": 4, "block_size": 32}
    data = {"x": floats(3, 64)}
    plain, quick = (
        model("MatMulNBits", data, weights(64, 8, 4, 32), [np.float32], attrs | {"accuracy_level": level})
        for level in (0, 4)
    )
    got = run(normalise(quick).model, data)[0]
    np.testing.assert_allclose(got, run(plain, data)[0], rtol=1e-5, atol=1e-5)
    reference = evaluate(quick, [data])
    assert isinstance(reference, Reference)
    np.testing.assert_allclose(got, reference.outputs[0]["y0"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("attrs", "given", "text"),
    [
        ({"bits": 5}, {}, "of 5 bits in blocks of 16"),
        ({"block_size": 8}, {}, "of 4 bits in blocks of 8"),
        ({}, {"z": None, "g": np.zeros(16, np.int32)}, "ordered for one machine, or by groups"),
        ({}, {"w": np.zeros((5, 1, 8), np.int8)}, "not packed into bytes"),
        ({}, {"z": np.zeros((5, 1), np.int32)}, "not packed into bytes"),
    ],
)
def test_weights_that_are_refused(attrs: dict[str, int], given: Constants, text: str) -> None:
    constants = weights(16, 5, 4, 16) | given
    attrs = {"K": 16, "N": 5, "bits": 4, "block_size": 16} | attrs
    with pytest.raises(ModelRefused, match=text):
        normalise(model("MatMulNBits", {"x": floats(2, 16)}, constants, [np.float32], attrs))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("terms", "functions"), [(256, 1), (240, 2)])  # one fills the last block up
@pytest.mark.parametrize("family", ["cpu", "mali"])
def test_weights_stay_packed_and_take_no_launch_of_their_own(
    bits: int, terms: int, functions: int, family: str
) -> None:
    constants = weights(terms, 128, bits, 32, zeros="packed")
    attrs = {"K": terms, "N": 128, "bits": bits, "block_size": 32}
    done = normalise(model("MatMulNBits", {"x": floats(1, terms)}, constants, [np.float32], attrs))
    stored = sum(numpy_helper.to_array(t).nbytes for t in done.model.graph.initializer)
    assert stored <= 256 * 128 * bits // 8 + 128 * 8 * 5 + 256
    profile: DeviceProfile = replace(PROFILE, rules=replace(PROFILE.rules, family=family))
    legal = legalize(import_named(done).module, profile)[0]
    assert sum(isinstance(one, tirx.PrimFunc) for one in legal.functions.values()) == functions


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_rows_of_a_table(bits: int, zeros: bool, kind: type[np.generic]) -> None:
    rows, width, block = 9, 96, 32
    constants: Constants = {
        "s": np.abs(floats(rows, width // block, seed=1)),
        "z": integers(np.uint8, rows, -(-(width // block) * bits // 8), seed=2) if zeros else None,
    }
    if not zeros:
        constants.pop("z")
    places = np.array([[0, 8, -1], [3, -9, 5]], kind)
    data, attrs = {"i": places}, {"bits": bits, "block_size": block}
    given = {"t": integers(np.uint8, rows, width * bits // 8), **constants}
    made = model("GatherBlockQuantized", data, given, [np.float32], attrs)
    made.graph.node[0].input[:] = ["t", "i", *constants]
    done = normalise(made)
    onnx.checker.check_model(done.model, full_check=True)
    np.testing.assert_allclose(run(done.model, data)[0], run(made, data)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [TensorProto.INT4, TensorProto.UINT4])
@pytest.mark.parametrize("zeros", [False, True])
def test_rows_of_a_table_of_4_bits(kind: int, zeros: bool) -> None:
    rows, width, block = 9, 96, 32  # three blocks: an odd number of zero points
    low = -8 if kind == TensorProto.INT4 else 0
    rng = np.random.default_rng(0)
    table, middle = rng.integers(low, low + 16, (rows, width)), rng.integers(low, low + 16, (rows, 3))
    scales, places = np.abs(floats(rows, 3, seed=1)), np.array([[0, 8, -1], [3, -9, 5]], np.int64)
    attrs = {"block_size": block, "gather_axis": 0, "quantize_axis": 1}
    made = model("GatherBlockQuantized", {"i": places}, {"s": scales}, [np.float32], attrs)
    made.graph.initializer.append(helper.make_tensor("t", kind, [rows, width], table.ravel()))
    made.graph.initializer.append(helper.make_tensor("z", kind, [rows, 3], middle.ravel()))
    made.graph.node[0].input[:] = ["t", "i", "s", *(["z"] if zeros else [])]
    got = run(normalise(made).model, {"i": places})[0]
    whole = table.reshape(rows, 3, block) - (middle[:, :, None] if zeros else 0)
    np.testing.assert_allclose(got, (whole * scales[:, :, None]).reshape(rows, width)[places], rtol=1e-5)


def test_rows_out_of_range_are_zeros() -> None:
    data = {"i": np.array([1, 4, -5], np.int64)}
    given: Constants = {"t": integers(np.uint8, 4, 16), "s": floats(4, 1)}
    made = model("GatherBlockQuantized", data, given, [np.float32], {"block_size": 16, "bits": 8})
    made.graph.node[0].input[:] = ["t", "i", "s"]
    got = run(normalise(made).model, data)[0]
    assert got[0].any()
    assert not got[1:].any()


@pytest.mark.parametrize(
    ("attrs", "kind", "text"),
    [
        ({"quantize_axis": 0, "gather_axis": 1}, np.uint8, "blocks of 16 along axis 0"),
        ({"bits": 3}, np.uint8, "its 3 bits"),
        ({"block_size": 64}, np.uint8, "not whole blocks of 64"),
        ({}, np.int8, "its table is of int8"),
    ],
)
def test_tables_that_are_refused(attrs: dict[str, int], kind: type[np.generic], text: str) -> None:
    given: Constants = {"t": integers(kind, 4, 16), "s": floats(4, 1)}
    attrs = {"block_size": 16, "bits": 8} | attrs
    made = model("GatherBlockQuantized", {"i": np.array([1], np.int64)}, given, [np.float32], attrs)
    made.graph.node[0].input[:] = ["t", "i", "s"]
    with pytest.raises(ModelRefused, match=text):
        normalise(made)
