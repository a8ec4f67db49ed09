"""Products that read transposed and sliced values where they lie: the same answers, without the copies."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax

from honed.machine.devices import Device
from honed.runtime.errors import ModelRefused
from honed.tuner import frontend
from honed.tuner.compiler.verification import run_model
from honed.tuner.lower.functions.legalize import legalize
from honed.tuner.lower.functions.views import extents, view
from honed.tuner.lower.module import read_program
from tests.tuner.graph.graphs import answers, parsed, weights
from tests.tuner.search.search_functions import imagined

pytestmark = pytest.mark.tvm


@dataclass
class _Moved:
    """A value that is moved step by step: its elements' places in the source, and what Relax knows of it."""

    held: np.ndarray
    made: relax.Var
    bound: dict[relax.Var, relax.Expr] = field(default_factory=dict)
    copied: bool = False  # perhaps: by a reshape, or where strides do not divide an axis

    def move(self, call: relax.Call, held: np.ndarray) -> None:
        typed = relax.BlockBuilder().normalize(call)
        self.made, self.held = relax.Var("v", typed.ty), held
        self.bound[self.made] = typed


@given(st.data())
def test_a_view_has_the_elements_of_what_it_is_a_view_of(data: st.DataObject) -> None:
    """Of values that are transposed, sliced and reshaped at random."""
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=2, max_size=4)))
    source = relax.Var("x", relax.TensorType(shape, "float32"))
    moved = _Moved(np.arange(math.prod(shape)).reshape(shape), source)
    for _ in range(data.draw(st.integers(1, 4))):
        _move(moved, data)
    found = view(moved.made, moved.bound.get)
    assert found is not None
    assert found.shape == moved.held.shape
    assert math.prod(found.dimensions) == math.prod(extents(found.source))
    if not found.source.same_as(source):
        assert moved.copied
        return
    places = np.indices(found.shape)
    index = [
        np.broadcast_to(one.start + one.sign * (places[one.axis] // one.times), found.shape)
        for one in found.indices
    ]
    flat = np.ravel_multi_index(index, found.dimensions) if index else np.zeros(found.shape, int)
    np.testing.assert_array_equal(flat, moved.held)


def _move(moved: _Moved, data: st.DataObject) -> None:
    held, op = moved.held, data.draw(st.sampled_from(["permute", "slice", "reshape", "repeat"]))
    if op == "repeat":
        axis, times = data.draw(st.integers(0, held.ndim - 1)), data.draw(st.integers(2, 3))
        new, many = list(held.shape), list(held.shape)
        new.insert(axis + 1, 1)
        many.insert(axis + 1, times)
        held = held.repeat(times, axis)
        moved.move(relax.op.reshape(moved.made, new), held)
        moved.move(relax.op.broadcast_to(moved.made, many), held)
        moved.move(relax.op.reshape(moved.made, held.shape), held)
        moved.copied = True
    elif op == "permute":
        axes = data.draw(st.permutations(range(held.ndim)))
        moved.move(relax.op.permute_dims(moved.made, axes), held.transpose(axes))
    elif op == "slice":
        axis = data.draw(st.integers(0, held.ndim - 1))
        step, extent = data.draw(st.sampled_from([1, 2, -1])), held.shape[axis]
        first, last = sorted(data.draw(st.tuples(*[st.integers(0, extent - 1)] * 2)))
        begin, end = (first, last + 1) if step > 0 else (last, first - 1)
        taken = held.take(np.arange(begin, end, step), axis)
        end = end if end >= 0 else -extent - 1  # as ONNX writes it
        moved.move(relax.op.strided_slice(moved.made, [axis], [begin], [end], [step]), taken)
        moved.copied |= step == 2
    else:
        halves = held.size % 2 == 0 and data.draw(st.booleans())
        shape = (2, held.size // 2) if halves else (held.size,)
        moved.move(relax.op.reshape(moved.made, shape), held.reshape(shape))
        moved.copied = True


ONE = np.array([1])
_GIVEN = {"x": (2, 6, 48), "w": (2, 4, 6, 6), "a": (2, 6, 6)}
# Of x [2, 6, 48] with 3 x 4 heads of 4: what is multiplied, and how many functions that takes.
_HEADS = """h = Reshape(x, split) q = Slice(h, i0, i1, i2) k = Slice(h, i1, i2, i2) v = Slice(h, i2, i3, i2)
    qs = Squeeze(q, i2) ks = Squeeze(k, i2) vs = Squeeze(v, i2) qh = Transpose <perm = [0, 2, 1, 3]> (qs)
    kh = Transpose <perm = [0, 2, 3, 1]> (ks) vh = Transpose <perm = [0, 2, 1, 3]> (vs) """
_SHARED = "p = Slice(vh, i1, i3, i1) e = Unsqueeze(p, i2) b = Expand(e, twice) r = Reshape(b, shared)"
_PRODUCTS = {
    "values of heads": ("s = MatMul(w, vh) y = Tanh(s)", "2,4,6,4", 1),
    "keys of few queries": ("y = MatMul(qh, kh)", "2,4,6,6", 1),
    "keys of many queries": ("c = Concat <axis = 2> (qh, qh) y = MatMul(c, kh)", "2,4,12,6", 3),
    "values that heads share": (f"{_SHARED} s = MatMul(w, r) y = Tanh(s)", "2,4,6,4", 1),
    "keys that heads of few queries share": (
        f"{_SHARED} t = Transpose <perm = [0, 1, 3, 2]> (r) y = MatMul(qh, t)",
        "2,4,6,6",
        1,
    ),
    "values of the twin": ("r = Slice(vh, end, start, i0, back) y = MatMul(w, r)", "2,4,6,4", 1),
    "both of one value": (
        "s = Slice(x, i0, i6, i2) t = Slice(x, i24, i48, i2) g = MatMul(s, t) y = Tanh(g)",
        "2,6,24",
        1,
    ),
    "columns on the left": ("t = Transpose <perm = [0, 2, 1]> (a) y = MatMul(t, x)", "2,6,48", 1),
    "both of one transpose": (
        "t = Transpose <perm = [0, 2, 1]> (a) s = Slice(t, i0, i3, i1) r = Transpose <perm = [0, 2, 1]> (s) "
        "o = Slice(t, i3, i6, i1) y = MatMul(r, o)",
        "2,6,6",
        1,
    ),
    "every second row": ("s = Slice(x, i0, i6, i1, i2) y = MatMul(s, u)", "2,3,5", 1),
    "one for all of a batch": ("s = Slice(x, i0, i1, i0) y = MatMul(a, s)", "2,6,48", 1),
    "rows of heads": (
        "m = MatMul(w, vh) t = Transpose <perm = [0, 2, 1, 3]> (m) r = Reshape(t, rows) y = MatMul(r, z)",
        "2,6,5",
        2,
    ),
    "columns of heads": ("m = MatMul(w, vh) y = Transpose <perm = [0, 1, 3, 2]> (m)", "2,4,4,6", 2),
    "heads that others read, too": (
        "m = MatMul(w, vh) t = Transpose <perm = [0, 2, 1, 3]> (m) r = Reshape(m, mixed) y = Add(t, r)",
        "2,6,4,4",
        2,
    ),
    "columns that are added": ("m = MatMul(x, u) s = Slice(x, i3, i8, i2) y = Add(s, m)", "2,6,5", 1),
    "columns added to what others read": (
        "m = MatMul(x, u) s = Slice(x, i3, i8, i2) d = Add(s, m) y = Mul(d, m)",
        "2,6,5",
        2,
    ),
    "read by others, too": ("s = MatMul(w, vh) t = Tanh(vh) y = Add(s, t)", "2,4,6,4", 2),
}


@pytest.mark.parametrize("name", _PRODUCTS)
def test_products_of_views_are_right_and_save_the_copies(name: str, device: Device) -> None:
    body, shape, functions = _PRODUCTS[name]
    text = f"(float[2,6,48] x, float[2,4,6,6] w, float[2,6,6] a) => (float[{shape}] y) {{ {_HEADS} {body} }}"
    ends = {f"i{n}": np.array([n]) for n in (0, 1, 2, 3, 6, 8, 24, 48)} | {"end": -ONE, "start": -9 * ONE}
    constants = {"split": np.array([2, 6, 3, 4, 4]), "back": -ONE, "u": weights(48, 5), "z": weights(16, 5)}
    constants |= {"twice": np.array([2, 2, 2, 6, 4]), "shared": np.array([2, 4, 6, 4])}
    constants |= {"rows": np.array([2, 6, 16]), "mixed": np.array([2, 6, 4, 4])}
    model = parsed(text, **ends, **constants)
    rng = np.random.default_rng(1)
    values = {n: rng.standard_normal(s).astype(np.float32) for n, s in _GIVEN.items()}
    (expected,) = answers(model, values)
    found = run_model(model, values, device)["y"]
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)
    program = read_program(legalize(frontend.import_relax(frontend.normalise(model)), imagined("gpu"))[0])
    assert len(program.calls) == functions


def test_products_of_unknown_shapes_are_left_alone() -> None:
    """They are refused later, in a sentence of their own."""
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((4, 4), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            found = builder.emit(relax.op.astype(relax.op.nonzero(x), "float32"))
            turned = builder.emit(relax.op.permute_dims(found, [1, 0]))
            result = builder.emit_output(relax.op.matmul(found, turned))
        builder.emit_func_output(result)
    with pytest.raises(ModelRefused):
        read_program(legalize(builder.get(), imagined("gpu"))[0])
