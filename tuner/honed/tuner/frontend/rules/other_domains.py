"""Rewriting rules of ONNX's other domains: optimisers' steps (training), and feature preparation (ml)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from honed.tuner.frontend.builder import Builder
from honed.tuner.frontend.rules import rule
from honed.tuner.frontend.values import NodeCall, NodeRefused, Value, elem_type

from .arithmetic import mix
from .layout import reshape

TRAINING, CLASSIC = "ai.onnx.preview.training", "ai.onnx.ml"
# The step of one tensor: learning rate, count of steps as a float, the tensor, its gradient, its state.
_Step = Callable[[Value, Value, Value, Value, Sequence[Value]], Sequence[Value]]


def _each(b: Builder, c: NodeCall, states: int, step: _Step) -> list[Value]:
    """Return the step for every tensor: all new tensors, then all new states of each kind."""
    rate, count, tensors = c.x(0), c.x(1), c.tensors()[2:]
    n = len(tensors) // (2 + states)
    if n < 1 or len(tensors) != n * (2 + states):
        raise NodeRefused(f"its {len(tensors)} tensors are not {2 + states} for each one that it changes")
    kinds = [tensors[k * n : (k + 1) * n] for k in range(2 + states)]
    found: list[Sequence[Value]] = []
    for x, gradient, *state in zip(*kinds, strict=True):
        rate_of, count_of = (b("Cast", v, to=elem_type(x.dtype)) for v in (rate, count))
        decay = b("Mul", x, c.number("norm_coefficient", 0.0))
        found.append(step(rate_of, count_of, x, b("Add", decay, gradient), state))
    return [results[k] for k in range(1 + states) for results in found]


@rule("Adagrad", domain=TRAINING)
def adagrad(b: Builder, c: NodeCall) -> list[Value]:
    """Gradients divided by the root of the sum of their squares."""

    def step(rate: Value, count: Value, x: Value, g: Value, state: Sequence[Value]) -> Sequence[Value]:
        slower = b("Add", b("Mul", count, c.number("decay_factor", 0.0)), 1)
        squares = b("Add", state[0], b("Mul", g, g))
        root = b("Add", b("Sqrt", squares), c.number("epsilon", 1e-6))
        moved = b("Div", b("Mul", b("Div", rate, slower), g), root)
        return [b("Sub", x, moved), squares]

    return _each(b, c, 1, step)


@rule("Momentum", domain=TRAINING)
def momentum(b: Builder, c: NodeCall) -> list[Value]:
    """Gradients accumulated over steps, plain or by Nesterov's rule."""
    mode = c.text("mode", "standard")

    def step(rate: Value, count: Value, x: Value, g: Value, state: Sequence[Value]) -> Sequence[Value]:
        alpha = b.like(c.number("alpha", 0.0), x)
        later = b("Less", 0, count)
        beta = b("Where", later, b.like(c.number("beta", 1.0), x), b.like(1, x))
        gathered = b("Add", b("Mul", state[0], alpha), b("Mul", beta, g))
        way = b("Add", g, b("Mul", alpha, gathered)) if mode == "nesterov" else gathered
        return [b("Sub", x, b("Mul", rate, way)), gathered]

    return _each(b, c, 1, step)


@rule("Adam", domain=TRAINING)
def adam(b: Builder, c: NodeCall) -> list[Value]:
    """Running means of gradients and their squares, corrected for the initial bias."""
    alpha, beta = c.number("alpha", 0.9), c.number("beta", 0.999)
    if "epsilon" not in c.attrs:
        raise NodeRefused(
            "on the default of epsilon ONNX's text and its tests contradict each other; give it"
        )

    def step(rate: Value, count: Value, x: Value, g: Value, state: Sequence[Value]) -> Sequence[Value]:
        mean, square = mix(b, state[0], g, alpha), mix(b, state[1], b("Mul", g, g), beta)
        root = b("Add", b("Sqrt", square), c.number("epsilon", 1e-6))
        one = b.like(1, x)
        later = b("Less", 0, count)
        steps = b("Where", later, count, one)  # At step 0 the quotient is not used, but must exist
        mean_bias, square_bias = (b("Sub", one, b("Pow", k, steps)) for k in (alpha, beta))
        adjusted = b("Where", later, b("Div", b("Mul", rate, b("Sqrt", square_bias)), mean_bias), rate)
        moved = b("Sub", x, b("Mul", adjusted, b("Div", mean, root)))
        return [b("Mul", moved, 1 - c.number("norm_coefficient_post", 0.0)), mean, square]

    return _each(b, c, 2, step)


@rule("Binarizer", domain=CLASSIC)
def binarizer(b: Builder, c: NodeCall) -> Value:
    """1 above the threshold, else 0."""
    x = c.x()
    return b("Cast", b("Less", c.number("threshold", 0.0), x), to=elem_type(x.dtype))


@rule("ArrayFeatureExtractor", domain=CLASSIC)
def extract(b: Builder, c: NodeCall) -> Value:
    """Elements along the last axis, by indices."""
    x, places = c.x(0), c.x(1)
    b.rely(places, 0, x.shape[-1] - 1, "numbers of features")
    found = b("Gather", x, reshape(b, places, [places.size]), axis=x.rank - 1)
    return reshape(b, found, [1, *found.shape]) if x.rank == 1 else found
