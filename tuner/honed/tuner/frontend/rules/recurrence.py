"""Rewriting rules of recurrent layers (LSTM, GRU, RNN), unrolled: voice models have a few frames at a time.

Their weights are floats, or integers where ONNX Runtime's quantiser was over them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from honed.tuner.frontend.builder import Builder
from honed.tuner.frontend.rules import rule
from honed.tuner.frontend.values import NodeCall, NodeRefused, Value

from .arithmetic import hard_sigmoid, plus, softplus, softsign
from .layout import cut, join, pick, reshape, transpose, with_axis
from .linear import matmul
from .quantisation import dynamically_quantised, integer_product, scale_product

MAX_STEPS = 64  # Longer sequences make more kernels than their launches are worth
Activation = Callable[[Builder, Value], Value]


def _elu(b: Builder, x: Value, alpha: float) -> Value:
    grown = b("Sub", b("Exp", b("Min", x, 0)), 1)
    return b("Where", b("Less", x, 0), b("Mul", grown, alpha), x)


# Activations by lower-case name: the defaults of those of activation_alpha and activation_beta that each
# takes, and the function.
_ACTIVATIONS: Mapping[str, tuple[tuple[float, ...], Callable[..., Value]]] = {
    "relu": ((), lambda b, x: b("Relu", x)),
    "tanh": ((), lambda b, x: b("Tanh", x)),
    "sigmoid": ((), lambda b, x: b("Sigmoid", x)),
    "softsign": ((), softsign),
    "softplus": ((), softplus),
    "leakyrelu": ((0.01,), lambda b, x, alpha: b("Where", b("Less", x, 0), b("Mul", x, alpha), x)),
    "thresholdedrelu": ((1.0,), lambda b, x, alpha: b("Where", b("Less", x, alpha), 0, x)),
    "elu": ((1.0,), _elu),
    "affine": ((0.0, 0.0), lambda b, x, alpha, beta: b("Add", b("Mul", x, alpha), beta)),
    "scaledtanh": ((0.0, 0.0), lambda b, x, alpha, beta: b("Mul", b("Tanh", b("Mul", x, beta)), alpha)),
    "hardsigmoid": ((0.2, 0.5), hard_sigmoid),
}
_WITHOUT_DEFAULTS = ("affine", "scaledtanh")


def activate(b: Builder, x: Value, name: str, alpha: float, beta: float) -> Value:
    """Return an activation of recurrent layers by its name in lower case."""
    if name not in _ACTIVATIONS:
        raise NodeRefused(f"its activation {name!r} is not one of ONNX's")
    defaults, function = _ACTIVATIONS[name]
    return function(b, x, *(alpha, beta)[: len(defaults)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A matrix [terms, columns] that multiplies from the right: floats, or 8-bit integers with a scale.

    `scale` and `zero` are one number, or one for each column.
    """

    data: Value
    scale: Value | None = None
    zero: Value | None = None

    def product(self, b: Builder, x: Value) -> Value:
        """`x` times the matrix, in float; by integers, `x` is quantised by its own range."""
        if self.scale is None:
            return matmul(b, x, self.data)
        quantised, scale, zero = dynamically_quantised(b, x)
        whole = integer_product(b, quantised, zero, self.data, self.zero)
        return scale_product(b, whole, scale, self.scale, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Direction:
    """A direction of a layer: weights laid out for products from the left, and the initial state.

    `w` is [input, gates * hidden] and `r` [hidden, gates * hidden]; `wb` and `rb` are [gates * hidden]; `h`
    and `c` are [batch, hidden], None where they are 0; `peepholes` is [3 * hidden].
    """

    reverse: bool
    w: Weights
    r: Weights
    wb: Value | None
    rb: Value | None
    h: Value | None
    c: Value | None
    peepholes: Value | None
    activations: tuple[Activation, ...]


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """The state between two steps: [batch, hidden] each, None where it is 0."""

    h: Value | None
    c: Value | None = None


Step = Callable[[Builder, NodeCall, Direction, Value, RecurrentState], RecurrentState]


def _gates(b: Builder, x: Value, count: int) -> list[Value]:
    """Return the columns of each gate."""
    hidden = x.shape[-1] // count
    return [cut(b, x, x.rank - 1, i * hidden, (i + 1) * hidden) for i in range(count)]


def _recurrent(b: Builder, d: Direction, h: Value | None) -> Value | None:
    return None if h is None else d.r.product(b, h)


def lstm_step(b: Builder, call: NodeCall, d: Direction, x: Value, state: RecurrentState) -> RecurrentState:
    """Return the next state; `x` is the input's share of the gates i, o, f, c, with biases."""
    f, g, h = d.activations
    gate_i, gate_o, gate_f, gate_c = _gates(b, plus(b, x, _recurrent(b, d, state.h)), 4)
    peep_i, peep_o, peep_f = [None] * 3 if d.peepholes is None else _gates(b, d.peepholes, 3)

    def with_peephole(gate: Value, peep: Value | None, cell: Value | None) -> Value:
        return gate if peep is None or cell is None else b("Add", gate, b("Mul", peep, cell))

    i = f(b, with_peephole(gate_i, peep_i, state.c))
    cell = b("Mul", i, g(b, gate_c))
    if state.c is not None:
        kept = (
            b("Sub", 1, i) if call.integer("input_forget") else f(b, with_peephole(gate_f, peep_f, state.c))
        )
        cell = b("Add", b("Mul", kept, state.c), cell)
    return RecurrentState(b("Mul", f(b, with_peephole(gate_o, peep_o, cell)), h(b, cell)), cell)


def gru_step(b: Builder, call: NodeCall, d: Direction, x: Value, state: RecurrentState) -> RecurrentState:
    """Return the next state; `x` is the input's share of the gates z, r, h, with its biases."""
    f, g = d.activations
    x_z, x_r, x_h = _gates(b, x, 3)
    bias = None if d.rb is None else _gates(b, d.rb, 3)[2]
    if state.h is None:
        r_z = r_r = None
    else:
        r = _gates(b, d.r.data, 3)
        r_z, r_r = matmul(b, state.h, r[0]), matmul(b, state.h, r[1])
    z = f(b, plus(b, x_z, r_z))
    if call.integer("linear_before_reset"):
        inner = bias if state.h is None else plus(b, matmul(b, state.h, r[2]), bias)
        if inner is not None:
            x_h = b("Add", x_h, b("Mul", f(b, plus(b, x_r, r_r)), inner))
    else:
        x_h = plus(b, x_h, bias)
        if state.h is not None:
            x_h = b("Add", x_h, matmul(b, b("Mul", f(b, plus(b, x_r, r_r)), state.h), r[2]))
    made = b("Mul", b("Sub", 1, z), g(b, x_h))
    return RecurrentState(made if state.h is None else b("Add", made, b("Mul", z, state.h)))


def rnn_step(b: Builder, call: NodeCall, d: Direction, x: Value, state: RecurrentState) -> RecurrentState:
    """Return the next state; `x` is the input's share, with biases."""
    return RecurrentState(d.activations[0](b, plus(b, x, _recurrent(b, d, state.h))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """An operator: its gates, its default activations, whether it has cells, and its step."""

    gates: int
    activations: tuple[str, ...]
    cells: bool
    step: Step


LAYERS = {
    "LSTM": Layer(gates=4, activations=("sigmoid", "tanh", "tanh"), cells=True, step=lstm_step),
    "GRU": Layer(gates=3, activations=("sigmoid", "tanh"), cells=False, step=gru_step),
    "RNN": Layer(gates=1, activations=("tanh",), cells=False, step=rnn_step),
}


@rule("LSTM", "GRU", "RNN")
def recurrence(b: Builder, c: NodeCall) -> list[Value]:
    """Unrolled, up to 64 steps; one product multiplies the inputs of all steps."""
    return _unroll(b, c, LAYERS[c.op])


@rule("DynamicQuantizeLSTM", domain="com.microsoft")
def dynamic_quantize_lstm(b: Builder, c: NodeCall) -> list[Value]:
    """Unrolled, up to 64 steps; products of integers, with input and state quantised by their range."""
    lengths = c.opt_const(4, "sequence lengths")
    if lengths is not None and (lengths != c.x(0).shape[0]).any():
        raise NodeRefused(
            "its sequences differ in length, and are quantised together; export it without quantisation"
        )
    return _unroll(b, c, LAYERS["LSTM"])


def _unroll(b: Builder, c: NodeCall, layer: Layer) -> list[Value]:
    batchwise = bool(c.integer("layout"))
    if c.x(0).rank != 3:
        raise NodeRefused(f"its input has shape {list(c.x(0).shape)}; it takes three dimensions")
    x = transpose(b, c.x(0), [1, 0, 2]) if batchwise else c.x(0)
    steps, batch, _ = x.shape
    if not 0 < steps <= MAX_STEPS:
        raise NodeRefused(f"its sequence of {steps} steps is not unrolled; at most {MAX_STEPS} are")
    directions = _directions(b, c, layer)
    active = _active(b, c, steps, batch)
    sequences, finals = zip(*(_run(b, c, layer, d, x, active) for d in directions), strict=True)
    whole = join(b, sequences, 1)
    sides = [[state.h for state in finals], [state.c for state in finals]]  # Cells exist in an LSTM only
    last = [
        join(b, [with_axis(b, v, 0) for v in side if v is not None], 0)
        for side in sides
        if side[0] is not None
    ]
    if batchwise:
        return [transpose(b, whole, [2, 0, 1, 3]), *(transpose(b, v, [1, 0, 2]) for v in last)]
    return [whole, *last]


def _run(
    b: Builder, c: NodeCall, layer: Layer, d: Direction, x: Value, active: Sequence[Value | None]
) -> tuple[Value, RecurrentState]:
    """Return the hidden states as [steps, 1, batch, hidden], and the last state."""
    steps, batch, width = x.shape
    # A single product serves all steps: [steps * batch, gates * hidden].
    given = plus(b, d.w.product(b, reshape(b, x, [steps * batch, width])), d.wb)
    state = RecurrentState(d.h, d.c)
    shown: dict[int, Value] = {}
    for t in reversed(range(steps)) if d.reverse else range(steps):
        after = layer.step(b, c, d, cut(b, given, 0, t * batch, (t + 1) * batch), state)
        now, mask = after.h, active[t]
        assert now is not None
        if mask is not None:
            after = RecurrentState(_select(b, mask, now, state.h), _select(b, mask, after.c, state.c))
            now = b("Where", mask, now, 0)
        shown[t] = reshape(b, now, [1, 1, *now.shape])
        state = after
    return join(b, [shown[t] for t in range(steps)], 0), state


def _select(b: Builder, mask: Value, new: Value | None, old: Value | None) -> Value | None:
    return None if new is None else b("Where", mask, new, 0 if old is None else old)


def _active(b: Builder, c: NodeCall, steps: int, batch: int) -> list[Value | None]:
    """Return, for each step, the sequences that it belongs to, as [batch, 1].

    None where it belongs to all.
    """
    lengths = c.opt_const(4, "sequence lengths")
    if lengths is None:
        return [None] * steps
    if lengths.shape != (batch,) or lengths.min() < 1 or lengths.max() > steps:
        raise NodeRefused(f"its sequence lengths are not between 1 and {steps} for {batch} sequences")
    masks = [lengths[:, None] > t for t in range(steps)]
    return [None if mask.all() else b.constant(mask) for mask in masks]


def _directions(b: Builder, c: NodeCall, layer: Layer) -> list[Direction]:
    name = c.text("direction", "forward")
    reversals = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}.get(name)
    if reversals is None:
        raise NodeRefused(f"its direction {name!r} is not forward, reverse or bidirectional")
    activations = _activations(c, layer, len(reversals))
    return [
        _direction(b, c, layer, index, activations[index], reverse=reverse)
        for index, reverse in enumerate(reversals)
    ]


def _direction(
    b: Builder, c: NodeCall, layer: Layer, index: int, activations: tuple[Activation, ...], *, reverse: bool
) -> Direction:
    def of(value: Value, axis: int = 0) -> Value:
        return pick(b, value, axis, index)

    def first(place: int) -> Value | None:
        value = c.opt(place)
        if value is None or (value.data is not None and not value.data.any()):
            return None
        return of(value, 1 if c.integer("layout") else 0)

    def weights(place: int, scale: int) -> Weights:
        whole = of(c.x(place))
        if whole.dtype.kind == "f":
            return Weights(data=transpose(b, whole, [1, 0]))
        return Weights(data=whole, scale=of(c.x(scale)), zero=of(c.x(scale + 1)))

    bias, peepholes = c.opt(3), c.opt(7) if layer.cells else None
    wb, rb = (None, None) if bias is None else _merge_biases(b, c, *_gates(b, of(bias), 2))
    return Direction(
        reverse=reverse,
        w=weights(1, 8),
        r=weights(2, 10),
        wb=wb,
        rb=rb,
        h=first(5),
        c=first(6) if layer.cells else None,
        peepholes=None if peepholes is None else of(peepholes),
        activations=activations,
    )


def _merge_biases(b: Builder, c: NodeCall, wb: Value, rb: Value) -> tuple[Value, Value | None]:
    """Return the biases of the recurrence added to those of the input, except that of a GRU's last gate."""
    if c.op != "GRU":
        return b("Add", wb, rb), None
    hidden = rb.shape[0] // 3
    early = np.arange(rb.shape[0]) < 2 * hidden
    return b("Add", wb, b("Mul", rb, b.constant(early, rb.dtype))), rb


def _activations(c: NodeCall, layer: Layer, directions: int) -> list[tuple[Activation, ...]]:
    """Return each direction's activations, clipped where the node says so."""
    count = len(layer.activations)
    given = [n.decode() if isinstance(n, bytes) else str(n) for n in c.attrs.get("activations", [])]
    names = [n.lower() for n in given] or list(layer.activations) * directions
    if len(names) != count * directions:
        raise NodeRefused(f"it names {len(names)} activations, not {count * directions}")
    alphas, betas = ([float(v) for v in c.attrs.get(f"activation_{k}", [])] for k in ("alpha", "beta"))
    clip = c.number("clip", 0.0)
    made: list[Activation] = []
    for index, name in enumerate(names):
        if name not in _ACTIVATIONS:
            raise NodeRefused(f"its activation {name!r} is not one of ONNX's")
        defaults, _ = _ACTIVATIONS[name]
        if name in _WITHOUT_DEFAULTS and not (alphas and betas):
            raise NodeRefused(
                f"its activation {name!r} has no alpha and beta, for which ONNX has no defaults"
            )
        alpha = alphas.pop(0) if alphas and defaults else (*defaults, 0.0)[0]
        beta = betas.pop(0) if betas and len(defaults) == 2 else (*defaults, 0.0, 0.0)[1]
        # ONNX Runtime bounds the inputs of the gates, and not the cell.
        bound = clip if index % count < 2 else 0.0
        made.append(partial(_activate_clipped, name=name, alpha=alpha, beta=beta, bound=bound))
    return [tuple(made[i * count : (i + 1) * count]) for i in range(directions)]


def _activate_clipped(b: Builder, x: Value, *, name: str, alpha: float, beta: float, bound: float) -> Value:
    """Return an activation of `x` clipped to -`bound`..`bound`, unless that is 0."""
    return activate(b, b("Min", b("Max", x, -bound), bound) if bound > 0 else x, name, alpha, beta)
