"""Rewriting rules of linear algebra: matrix products, Fourier transforms as such products, determinants."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from honed.tuner.frontend.builder import Builder
from honed.tuner.frontend.rules import rule
from honed.tuner.frontend.values import Array, NodeCall, NodeRefused, Value, normal_axis

from .layout import cut, expand, pad_axis, pick, reshape, transpose, with_axis

_MAX_MATRIX = 1 << 24  # Elements of a transform's matrix
_MAX_DETERMINANT = 4  # Larger ones need pivoting


def matmul(b: Builder, x: Value, y: Value) -> Value:
    """Return a matrix product; over a single element it is a product of numbers, which needs no reduction."""
    if x.rank >= 2 and y.rank >= 2 and x.shape[-1] == 1:
        return b("Mul", x, y)
    return b("MatMul", x, y)


@rule("MatMul")
def matmul_rule(b: Builder, c: NodeCall) -> Value:
    """A product of matrices, or of stacks of them."""
    return matmul(b, c.x(0), c.x(1))


@rule("Gemm")
def gemm(b: Builder, c: NodeCall) -> Value:
    """`alpha` * A' * B' + beta * C; alpha and beta are folded into constant operands."""
    x, y, bias = c.x(0), c.x(1), c.opt(2)
    x = transpose(b, x, [1, 0]) if c.integer("transA") else x
    y = transpose(b, y, [1, 0]) if c.integer("transB") else y
    alpha, beta = c.number("alpha", 1.0), c.number("beta", 1.0)
    if alpha != 1.0 and y.data is not None:
        y = b("Mul", y, alpha)
    result = matmul(b, x, y)
    if alpha != 1.0 and y.data is None:
        result = b("Mul", result, alpha)
    if bias is None or beta == 0.0:
        return result
    return b("Add", result, bias if beta == 1.0 else b("Mul", bias, beta))


@rule("Einsum")
def einsum(b: Builder, c: NodeCall) -> Value:
    """Pairwise products: transposes, one matrix product and a reshape."""
    equation = c.text("equation", "").replace(" ", "")
    operands = c.tensors()
    terms, result = _terms(equation, operands)
    dims: dict[str, int] = {}
    for term, value in zip(terms, operands, strict=True):
        for label, extent in zip(term, value.shape, strict=True):
            if dims.setdefault(label, extent) not in (extent, 1) and extent != 1:
                raise NodeRefused(f"equation {equation!r} gives dimension {label!r} two sizes")
            dims[label] = max(dims[label], extent)
    pairs = [_diagonal(b, v, t) for v, t in zip(operands, terms, strict=True)]
    while len(pairs) > 1:
        (x, tx), (y, ty) = pairs.pop(0), pairs.pop(0)
        needed = set(result) | {label for _, t in pairs for label in t}
        pairs.insert(0, _contract(b, x, tx, y, ty, needed, dims))
    value, term = _sum_unneeded(b, *pairs[0], set(result))
    return transpose(b, value, [term.index(label) for label in result])


def _terms(equation: str, operands: Sequence[Value]) -> tuple[list[str], str]:
    """Return the labels of every operand and of the result, with the ellipsis replaced by unused letters."""
    left, arrow, result = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(operands):
        raise NodeRefused(f"equation {equation!r} is for {len(terms)} operands, not {len(operands)}")
    free = [chr(code) for code in range(0x3B1, 0x3B1 + 64)]  # Labels no equation uses
    widest = max(
        (v.rank - len(t.replace("...", "")) for t, v in zip(terms, operands, strict=True) if "..." in t),
        default=0,
    )
    spelled: list[str] = []
    for term, value in zip(terms, operands, strict=True):
        count = value.rank - len(term.replace("...", ""))
        if count < 0 or (count and "..." not in term):
            raise NodeRefused(f"equation {equation!r} does not fit an operand of {value.rank} dimensions")
        spelled.append(term.replace("...", "".join(free[widest - count : widest])))
    if arrow:
        return spelled, result.replace("...", "".join(free[:widest]))
    letters = "".join(spelled)
    once = sorted(x for x in set(letters) if letters.count(x) == 1 and x not in free)
    return spelled, "".join(free[:widest]) + "".join(once)


def _diagonal(b: Builder, x: Value, term: str) -> tuple[Value, str]:
    """Return the diagonal where a label occurs twice in a term: the rest is masked, then summed away."""
    for label in dict.fromkeys(term):
        while term.count(label) > 1:
            first, second = term.index(label), term.rindex(label)
            size = x.shape[first]
            mask_shape = [1] * x.rank
            mask_shape[first] = mask_shape[second] = size
            mask = b.constant(np.eye(size, dtype=np.bool_).reshape(mask_shape))
            masked = b("Where", mask, x, 0)
            x = b("ReduceSum", masked, b.ints(second), keepdims=0)
            term = term[:second] + term[second + 1 :]
    return x, term


def _sum_unneeded(b: Builder, x: Value, term: str, needed: set[str]) -> tuple[Value, str]:
    axes = [i for i, label in enumerate(term) if label not in needed]
    if not axes:
        return x, term
    return b("ReduceSum", x, b.ints(*axes), keepdims=0), "".join(t for t in term if t in needed)


def _contract(
    b: Builder, x: Value, tx: str, y: Value, ty: str, needed: set[str], dims: dict[str, int]
) -> tuple[Value, str]:
    x, tx = _sum_unneeded(b, x, tx, needed | set(ty))
    y, ty = _sum_unneeded(b, y, ty, needed | set(tx))
    shared = [t for t in tx if t in ty]
    batch = [t for t in shared if t in needed]
    inner = [t for t in shared if t not in needed]
    rows, columns = [t for t in tx if t not in ty], [t for t in ty if t not in tx]

    def arrange(v: Value, term: str, groups: list[list[str]]) -> Value:
        order = [t for group in groups for t in group]
        full = expand(b, v, [dims[t] for t in term]) if any(t in shared for t in term) else v
        moved = transpose(b, full, [term.index(t) for t in order])
        return reshape(b, moved, [math.prod(dims[t] for t in group) for group in groups])

    left = arrange(x, tx, [batch, rows, inner])
    right = arrange(y, ty, [batch, inner, columns])
    product = matmul(b, left, right) if inner else b("Mul", left, right)
    order = [*batch, *rows, *columns]
    return reshape(b, product, [dims[t] for t in order]), "".join(order)


def _fourier(b: Builder, x: Value, axis: int, length: int, *, inverse: bool, onesided: bool) -> Value:
    """Discrete Fourier transform of `x` [..., 1 or 2] along an axis, zero-padded or cut to `length`."""
    count = length // 2 + 1 if onesided else length
    if length * count > _MAX_MATRIX:
        raise NodeRefused(f"its transform of {length} elements is too long")
    extent = x.shape[axis]
    if extent > length:
        x = cut(b, x, axis, 0, length)
    elif extent < length:
        x = pad_axis(b, x, axis, 0, length - extent)
    order = [i for i in range(x.rank - 1) if i != axis] + [axis, x.rank - 1]
    moved = transpose(b, x, order)
    real = pick(b, moved, x.rank - 1, 0)
    cosine, sine = _matrices(length, count, inverse=inverse)
    cosines, sines = (b.constant(m.astype(x.dtype)) for m in (cosine, sine))
    parts = [matmul(b, real, cosines), matmul(b, real, sines)]
    if x.shape[-1] == 2:
        imaginary = pick(b, moved, x.rank - 1, 1)
        parts = [
            b("Sub", parts[0], matmul(b, imaginary, sines)),
            b("Add", parts[1], matmul(b, imaginary, cosines)),
        ]
    joined = b("Concat", *(with_axis(b, p, p.rank) for p in parts), axis=x.rank - 1)
    return transpose(b, joined, list(np.argsort(order)))


def _matrices(length: int, count: int, *, inverse: bool) -> tuple[Array, Array]:
    """Real and imaginary part of exp(-2 pi i n k / length), [n, k]; conjugate over length where inverse."""
    angles: Array = 2 * np.pi * (np.outer(np.arange(length), np.arange(count)) % length) / length
    if inverse:
        return np.cos(angles) / length, np.sin(angles) / length
    return np.cos(angles), -np.sin(angles)


@rule("DFT")
def dft(b: Builder, c: NodeCall) -> Value:
    """Along one axis; the axis is an attribute at opset 17, an input from 20."""
    x = c.x()
    given = c.opt_numbers(2, "axis") or [-2] if c.opset >= 20 else [c.integer("axis", 1)]
    axis = normal_axis(given[0], x.rank)
    (length, *_) = c.opt_numbers(1, "dft_length") or [x.shape[axis]]
    if axis == x.rank - 1 or x.shape[-1] not in (1, 2) or length < 1:
        raise NodeRefused("its axis or length does not fit its input")
    return _fourier(
        b, x, axis, length, inverse=bool(c.integer("inverse")), onesided=bool(c.integer("onesided"))
    )


@rule("STFT")
def stft(b: Builder, c: NodeCall) -> Value:
    """A DFT of overlapping frames, each weighted by a window."""
    x, window = c.x(), c.opt(2)
    step, signal = c.numbers(1, "frame_step")[0], x.shape[1]
    (length, *_) = c.opt_numbers(3, "frame_length") or [signal if window is None else window.size]
    if x.rank == 2:
        x = with_axis(b, x, 2)
    if step < 1 or not 1 <= length <= signal or x.shape[-1] not in (1, 2):
        raise NodeRefused("its frames do not fit its signal")
    frames = 1 + (signal - length) // step
    places = np.arange(frames)[:, None] * step + np.arange(length)[None, :]
    framed = b(
        "Gather", x, b.constant(places.astype(np.int64)), axis=1
    )  # Shape [batch, frames, length, 1 or 2]
    if window is not None:
        framed = b("Mul", framed, reshape(b, window, [window.size, 1]))
    return _fourier(b, framed, 2, length, inverse=False, onesided=bool(c.integer("onesided", 1)))


@rule("Det")
def determinant(b: Builder, c: NodeCall) -> Value:
    """Laplace's expansion of small matrices."""
    x = c.x()
    size = x.shape[-1]
    if x.rank < 2 or x.shape[-2] != size or not 1 <= size <= _MAX_DETERMINANT:
        raise NodeRefused(
            f"its matrices of {list(x.shape[-2:])} are not square or larger than {_MAX_DETERMINANT}"
        )
    flat = reshape(b, x, [math.prod(x.shape[:-2]), size, size])

    def minor(rows: tuple[int, ...], columns: tuple[int, ...]) -> Value:
        total: Value | None = None
        for index, column in enumerate(columns):
            rest = minor(rows[1:], columns[:index] + columns[index + 1 :]) if len(rows) > 1 else None
            row = cut(b, flat, 1, rows[0], rows[0] + 1)
            part = reshape(b, cut(b, row, 2, column, column + 1), [flat.shape[0]])
            part = part if rest is None else b("Mul", part, rest)
            total = part if total is None else b("Sub" if index % 2 else "Add", total, part)
        assert total is not None
        return total

    every = tuple(range(size))
    return reshape(b, minor(every, every), x.shape[:-2])
