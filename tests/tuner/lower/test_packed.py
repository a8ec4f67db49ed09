"""Numbers of few bits that a product reads are exact, in singles and in halves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm import relax

from honed.tuner.frontend import import_relax, normalise
from honed.tuner.lower.functions.legalize import legalize
from tests.tuner.graph.graphs import parsed
from tests.tuner.search.search_functions import imagined

pytestmark = pytest.mark.tvm

TERMS, COLUMNS, BLOCK = 64, 4, 32


@pytest.mark.parametrize("kind", [np.float16, np.float32])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zeros", ["middle", "packed", "between"])
@pytest.mark.parametrize("units", [4, 132])
def test_every_number_comes_out_as_it_is(kind: type[np.floating], bits: int, zeros: str, units: int) -> None:
    """A large GPU unpacks the numbers once for all rows, others in each group."""
    rng, blocks = np.random.default_rng(bits), TERMS // BLOCK
    numbers = rng.integers(0, 1 << bits, (COLUMNS, TERMS))
    zero = np.full((COLUMNS, blocks), 1 << (bits - 1), np.float64)
    given = {"w": _bytes(numbers, bits).reshape(COLUMNS, blocks, -1), "s": np.ones((COLUMNS, blocks), kind)}
    if zeros == "packed":
        whole = rng.integers(0, 1 << bits, (COLUMNS, 8))  # whole bytes, of which the first are read
        given["z"], zero = _bytes(whole, bits), whole[:, :blocks].astype(float)
    elif zeros == "between":
        zero += rng.integers(0, 8, zero.shape) / 8
        given["z"] = zero.astype(kind)
    names = ", ".join(["x", *given])
    name, attributes = kind(0).dtype.name.replace("32", ""), f"K = {TERMS}, N = {COLUMNS}, bits = {bits}"
    model = parsed(
        f"({name}[{TERMS},{TERMS}] x) => ({name}[{TERMS},{COLUMNS}] y) {{"
        f" y = com.microsoft.MatMulNBits <{attributes}, block_size = {BLOCK}> ({names}) }}",
        **given,
    )
    profile = imagined("mali" if units == 4 else "gpu")
    profile = replace(profile, limits=replace(profile.limits, compute_units=units))
    module = legalize(import_relax(normalise(model)), profile)[0]
    assert any("packed" in one.name_hint for one in module.get_global_vars()) == (units == 4)
    run = relax.VirtualMachine(tvm.compile(module, "llvm"), tvm.cpu())["main"]
    (got,) = (one.numpy() for one in run(tvm.runtime.tensor(np.eye(TERMS, dtype=kind))))
    np.testing.assert_array_equal(got, (numbers - np.repeat(zero, BLOCK, axis=1)).T)


def _bytes(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of so many bits packed along the last axis, the first in the lowest bits."""
    parts = numbers.reshape(*numbers.shape[:-1], -1, 8 // bits) << np.arange(0, 8, bits)
    return parts.sum(axis=-1).astype(np.uint8)
