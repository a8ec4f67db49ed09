"""Numbers of few bits that a product reads are exact, in singles and in halves."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import tvm
from tvm import relax

from honed.tuner.frontend import import_relax, normalise
from honed.tuner.lower.functions.legalize import legalize
from honed.tuner.lower.module import read_program
from honed.tuner.lower.program import FunctionCall
from tests.tuner.graph.graphs import parsed
from tests.tuner.search.search_functions import imagined

pytestmark = pytest.mark.tvm

TERMS, COLUMNS, BLOCK = 64, 4, 32


@pytest.mark.parametrize("kind", [np.float16, np.float32])
@pytest.mark.parametrize("units", [4, 132])
def test_every_number_comes_out_as_it_is(kind: type[np.floating], units: int) -> None:
    """A large GPU unpacks the numbers once for all rows, others in each group."""
    name, given, wanted, lines = kind(0).dtype.name.replace("32", ""), dict[str, np.ndarray](), {}, ""
    for bits, zeros in product((2, 4, 8), ("middle", "packed", "between")):
        operands, expected = _product(kind, bits, zeros)
        made = f"{zeros}{bits}"
        given |= {f"{each}{made}": value for each, value in operands.items()}
        names = ", ".join(["x", *(f"{each}{made}" for each in operands)])
        attributes = f"K = {TERMS}, N = {COLUMNS}, bits = {bits}, block_size = {BLOCK}"
        lines += f" {made} = com.microsoft.MatMulNBits <{attributes}> ({names})"
        wanted[made] = expected
    outputs = ", ".join(f"{name}[{TERMS},{COLUMNS}] {made}" for made in wanted)
    model = parsed(f"({name}[{TERMS},{TERMS}] x) => ({outputs}) {{{lines} }}", **given)
    profile = imagined("mali" if units == 4 else "gpu")
    profile = replace(profile, limits=replace(profile.limits, compute_units=units))
    module = legalize(import_relax(normalise(model)), profile)[0]
    packed = ["packed" in one.function for one in read_program(module).calls if isinstance(one, FunctionCall)]
    assert packed.count(True) == (len(wanted) if units == 4 else 0)
    run = relax.VirtualMachine(tvm.compile(module, "llvm"), tvm.cpu())["main"]
    found = run(tvm.runtime.tensor(np.eye(TERMS, dtype=kind)))
    for (made, expected), got in zip(wanted.items(), found, strict=True):
        np.testing.assert_array_equal(got.numpy(), expected, err_msg=made)


def _product(kind: type[np.floating], bits: int, zeros: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return what is given of packed weights, and the numbers that they are."""
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
    return given, (numbers - np.repeat(zero, BLOCK, axis=1)).T


def _bytes(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of so many bits packed along the last axis, the first in the lowest bits."""
    parts = numbers.reshape(*numbers.shape[:-1], -1, 8 // bits) << np.arange(0, 8, bits)
    return parts.sum(axis=-1).astype(np.uint8)
