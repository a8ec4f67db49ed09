"""Sine, cosine and tangent as the printer defines them, run by the device and compared with doubles."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from tvm import te, tirx

from honed.machine.devices import Device
from honed.tuner.lower.printer.library import CIRCULAR, definitions
from tests.tuner.lower.printer.test_printer import lowered, over, placeholders, run, scheduled

pytestmark = [pytest.mark.tvm, pytest.mark.opencl]

# Of each function: how many ulp it may err (a tangent's division is the device's), and the reference.
FUNCTIONS: dict[str, tuple[Callable[..., object], float, Callable[[np.ndarray], np.ndarray]]] = {
    "sin": (te.sin, 1.9, np.sin),
    "cos": (te.cos, 1.9, np.cos),
    "tan": (te.tan, 3.4, np.tan),
}
EVERY_HALF = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
EACH = 2048  # numbers of each exponent
MULTIPLES = 1 << 15  # of a quarter turn, with the singles beside them


@cache
def sweep() -> np.ndarray:
    """Return singles of all exponents and both signs, and those beside multiples of a quarter turn."""
    rng = np.random.default_rng(7)
    exponents = np.arange(1, 255, dtype=np.uint32)[:, None] << np.uint32(23)
    spread = exponents | rng.integers(0, 1 << 23, (254, EACH), np.uint32)
    ends = exponents | np.array([0, 1, (1 << 23) - 1], np.uint32)
    turns = np.concatenate([np.arange(1, MULTIPLES), rng.integers(MULTIPLES, 1 << 40, MULTIPLES)])
    nearest = (turns * (np.pi / 2)).astype(np.float32).view(np.uint32)
    beside = nearest[:, None] + np.arange(-2, 3).astype(np.uint32)
    found = np.concatenate([spread, ends, beside], axis=None).view(np.float32)
    return np.where(rng.integers(0, 2, found.size).astype(bool), found, -found)


def applied(name: str, x: np.ndarray, lanes: int, device: Device) -> np.ndarray:
    """Return the function of singles, computed by the device in vectors of so many lanes."""
    padded = np.resize(x, -(-x.size // 1024) * 1024)
    make = FUNCTIONS[name][0]
    func = scheduled(
        over(lambda i, a: make(a[i]), *placeholders("float32", extent=padded.size), extent=padded.size), lanes
    )
    return run(func, [padded], np.zeros_like(padded), device)[: x.size]


def ulp_between(found: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Return the errors in units of the last place that exact values have in the type that was found."""
    kind = np.finfo(found.dtype)
    _, exponents = np.frexp(np.maximum(np.abs(exact), float(kind.smallest_normal)))
    return np.abs(found.astype(np.float64) - exact) / np.ldexp(1.0, exponents - kind.nmant - 1)


@pytest.mark.parametrize("lanes", [1, 8])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_singles_of_all_sizes_err_by_no_more_than_is_said(name: str, lanes: int, device: Device) -> None:
    x = sweep()
    _, most, exactly = FUNCTIONS[name]
    error = ulp_between(applied(name, x, lanes, device), exactly(x.astype(np.float64)))
    assert error.max() <= most, x[error.argmax()]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_numpy_reduces_large_arguments_exactly(name: str) -> None:
    """The reference agrees with the C library's, whose error is below an ulp of a double."""
    x = np.random.default_rng(5).choice(sweep(), 10000).astype(np.float64)
    exact = np.array([getattr(math, name)(value) for value in x])
    np.testing.assert_allclose(FUNCTIONS[name][2](x), exact, rtol=1e-13)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_half_is_the_single_rounded(name: str, device: Device) -> None:
    """A single that is off by an ulp or two is rounded to another half only where both are as near."""
    x = EVERY_HALF[np.isfinite(EVERY_HALF)]
    exact = FUNCTIONS[name][2](x.astype(np.float64))
    with np.errstate(over="ignore"):  # a tangent
        found = applied(name, x.astype(np.float32), 8, device).astype(np.float16)
        np.testing.assert_array_equal(np.isinf(found), np.isinf(exact.astype(np.float16)))
    assert ulp_between(found, exact)[np.isfinite(found)].max() < 0.51


@pytest.mark.parametrize("lanes", [1, 8])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_special_values(name: str, lanes: int, device: Device) -> None:
    x = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1e5, np.finfo(np.float32).max], np.float32)
    found = applied(name, x, lanes, device)
    assert np.isnan(found[:3]).all()
    assert np.isfinite(found[3:]).all()
    if name == "cos":
        assert (found[3:5] == 1).all()
    else:
        np.testing.assert_array_equal(found[3:5].view(np.uint32), x[3:5].view(np.uint32))


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_no_value_is_beyond_one(name: str, device: Device) -> None:
    """What models compute of it, as the root of 1 - x^2, must not become NaN."""
    assert np.abs(applied(name, sweep(), 8, device)).max() == 1


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("dtype", "lanes"), [("float32", 1), ("float32", 4), ("float16", 1), ("float16", 8)])
def test_no_kernel_calls_the_driver_s(name: str, dtype: str, lanes: int) -> None:
    make = FUNCTIONS[name][0]
    source = lowered(scheduled(over(lambda i, a: make(a[i]), *placeholders(dtype)), lanes)).source
    of = {"float32": "float", "float16": "half"}[dtype] + (str(lanes) if lanes > 1 else "")
    before, kernel = source.split("__kernel")
    assert f"honed_{name}_{of}(" in kernel
    assert f"{of} honed_{name}_{of}({of} x)" in before
    called = {word for word in CIRCULAR if f" {word}(" in source or f"({word}(" in source}
    assert not called


def test_doubles_are_left_to_the_driver() -> None:
    source = lowered(scheduled(over(lambda i, a: tirx.sin(a[i]), *placeholders("float64")))).source
    assert "= sin(" in source
    assert not definitions(source)


@pytest.mark.parametrize("name", ["asin", "exp2", "log", "exp"])
def test_what_libclc_lacks_for_halves_is_computed_as_singles(name: str, device: Device) -> None:
    """Mesa 25.0 and 26.1 take functions from libclc 19, and end the process where it has none."""
    make: Callable[..., object] = {"asin": te.asin, "exp2": tirx.exp2, "log": te.log, "exp": tirx.exp}[name]
    exactly: np.ufunc = {"asin": np.arcsin, "exp2": np.exp2, "log": np.log, "exp": np.exp}[name]
    source = lowered(scheduled(over(lambda i, a: make(a[i]), *placeholders("float16")))).source
    assert f"(half){'native_' if name == 'exp' else ''}{name}((float)" in source
    source = lowered(scheduled(over(lambda i, a: make(a[i]), *placeholders("float32")))).source
    assert f"= {name}(" in source
    with np.errstate(all="ignore"):
        exact = exactly(EVERY_HALF.astype(np.float64))
    wide = scheduled(
        over(lambda i, a: make(a[i]), *placeholders("float32", extent=1 << 16), extent=1 << 16), 8
    )
    with np.errstate(over="ignore"):
        found = run(wide, [EVERY_HALF.astype(np.float32)], np.zeros(1 << 16, np.float32), device).astype(
            np.float16
        )
        expected = exact.astype(np.float16)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(found[~finite], expected[~finite])
    assert ulp_between(found[finite], exact[finite]).max() < 0.51


@pytest.mark.parametrize(("element", "mask"), [("half", "short"), ("float", "int"), ("double", "long")])
def test_scalars_are_selected_by_an_integer_of_their_width(element: str, mask: str) -> None:
    """Clang refuses another for halves; C makes an int of two shorts."""
    (function,) = definitions(f"honed_nanmax_{element}(a, b)")
    assert function.endswith(f"select(x, y, ({mask})((y > x) | (y != y))); }}")
