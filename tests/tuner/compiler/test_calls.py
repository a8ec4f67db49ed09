"""Each call of a quantised model is compared with the reference, on what the device itself gives it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from honed.machine.devices import Device
from honed.protocol import strict
from honed.runtime.compiled.model import SourceModel
from honed.tuner import frontend
from honed.tuner.compiler import calls, verification
from honed.tuner.compiler.assemble import assemble
from honed.tuner.frontend import Normalised
from honed.tuner.lower.module import LoweredModel, lower_module
from tests.tuner.verify.parsing import generate

Arrays = Mapping[str, np.ndarray]

MODEL = """<ir_version: 8, opset_import: ["": 17]>
f (float[1, 16, 8, 8] x) => (float[1, 32, 8, 8] y)
<float s = {0.03}, float t = {0.25}, float u = {6.0}, uint8 z = {128}> {
  q = QuantizeLinear(x, s, z)
  d = DequantizeLinear(q, s, z)
  c = Conv<pads = [1, 1, 1, 1]>(d, w)
  r = QuantizeLinear(c, t, z)
  e = DequantizeLinear(r, t, z)
  g = Conv(e, v, b)
  o = QuantizeLinear(g, u, z)
  y = DequantizeLinear(o, u, z)
}"""


def model(**changes: Callable[[np.ndarray], np.ndarray]) -> onnx.ModelProto:
    """Two convolutions between roundings, with changes to their weights."""
    made = parser.parse_model(MODEL)
    rng = np.random.default_rng(7)
    for name, shape in {"w": (32, 16, 3, 3), "v": (32, 32, 1, 1), "b": (32,)}.items():
        values = rng.standard_normal(shape).astype(np.float32)
        values = changes[name](values) if name in changes else values
        made.graph.initializer.append(numpy_helper.from_array(values, name))
    return made


def are_right(compiled: onnx.ModelProto, wanted: onnx.ModelProto, device: Device) -> bool:
    """Whether the calls of one model are those of the other."""
    normalised, other = (frontend.normalise(one, profile=device.profile) for one in (wanted, compiled))
    imported = frontend.import_named(other)
    lowered = lower_module(imported.module, device.profile, names=imported.names)
    inputs = generate(wanted, 2)

    def run(program: LoweredModel, shown: Normalised) -> Sequence[Arrays]:
        assert len(shown.outputs) > len(normalised.outputs), "nothing between calls is compared"
        source = strict.copy_fields(
            SourceModel, shown, "choice", sha256="0" * 64, filename="m.onnx", notes=()
        )
        draft = assemble(source, device.profile, shown, program, None)
        with verification.open_executor(*draft, device) as executor:
            return [executor.run(each) for each in inputs]

    return calls.are_right(lowered, normalised, inputs, run)


def part(factor: float, *where: int) -> Callable[[np.ndarray], np.ndarray]:
    """A change of the weights of some channels."""

    def change(values: np.ndarray) -> np.ndarray:
        other = values.copy()
        other[list(where)] *= np.float32(factor)
        return other

    return change


def test_calls_are_right_whatever_side_of_a_boundary_sums_fall_to(device: Device) -> None:
    assert are_right(model(w=lambda values: values * np.float32(1 + 1e-5)), model(), device)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"w": part(1.01, 5)}, id="a channel of the first"),
        pytest.param({"v": part(1.01, 3)}, id="a channel of the last", marks=pytest.mark.slow),
        pytest.param({"b": lambda values: values + np.float32(0.6)}, id="a tenth", marks=pytest.mark.slow),
    ],
)
def test_a_call_that_is_wrong_by_less_than_a_quantum_is_found(
    device: Device, changes: Mapping[str, Callable[[np.ndarray], np.ndarray]]
) -> None:
    assert not are_right(model(**changes), model(), device)


def test_values_behind_many_roundings_are_not_judged(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is known of the values between calls, noise of all roundings would hide what is wrong."""
    steps = "".join(
        f"q{n} = QuantizeLinear(d{n}, s, z) d{n + 1} = DequantizeLinear(q{n}, s, z) " for n in range(5)
    )
    text = f"f (float[8] d0) => (float[8] d5) <float s = {{0.5}}, uint8 z = {{128}}> {{ {steps} }}"
    wanted = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]>\n{text}')
    normalised = frontend.normalise(wanted)
    lowered = lower_module(frontend.import_relax(normalised), device.profile)
    monkeypatch.setattr(calls, "_taps", lambda *_: [])
    assert not calls.are_right(lowered, normalised, generate(wanted, 1), lambda *_: pytest.fail("it ran"))
