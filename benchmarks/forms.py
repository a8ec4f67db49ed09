"""What measuring both forms brings, one kernel or several: `python -m benchmarks.forms [MODEL.onnx...]`.

Without models, attentions of LightGlue's heads for several numbers of keypoints, and the networks behind
them. Has `honed.tuner` time each model's tasks on PoCL, in both forms (with `--seconds` tunes them as long),
and compiles with these records twice: with the forms that the roofline expects, and with those that the
records say. Prints both forms' times, and, where forms differ, whole inferences in turns.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx.parser

from benchmarks.running import apart, in_turns, made_up, normalised, ready
from honed.machine import devices
from honed.machine.devices import Device
from honed.runtime.compiled.model import Launch
from honed.tuner import frontend
from honed.tuner.attend import Joining, joins
from honed.tuner.contest import Contest
from honed.tuner.lower.module import lower_module
from honed.tuner.schedules import Recorded, first_kernels, recorded

_TURNS = 41
_KEYPOINTS = (8, 24, 48, 192, 768)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forms", description=__doc__)
    parser.add_argument("models", type=Path, nargs="*")
    parser.add_argument("--seconds", type=float, default=0.0, help="of tuning each model (0)")
    options = parser.parse_args()
    device = devices.select("cpu")
    with tempfile.TemporaryDirectory(prefix="honed-forms-") as name:
        folder = Path(name)
        for path in options.models or [_layers(folder / "layers.onnx")]:
            records = folder / f"{path.stem}.sqlite"
            _measure(path, records, folder / "cache", options.seconds, device)
            _compare(path, recorded(records, device.profile), device)
    return 0


def _layers(path: Path) -> Path:
    """For each number of keypoints an attention of four heads, and a product, normalisation and product."""
    given, made, nodes = [], [], []
    for n in _KEYPOINTS:
        given += [
            f"float[1,4,{n},64] q{n}, float[1,4,64,{n}] k{n}, float[1,4,{n},64] v{n}, float[{n},512] x{n}"
        ]
        made += [f"float[1,4,{n},64] a{n}, float[{n},256] f{n}"]
        nodes += [
            f"p{n} = MatMul(q{n}, k{n}) s{n} = Mul(p{n}, root) t{n} = Softmax <axis = -1> (s{n}) "
            f"a{n} = MatMul(t{n}, v{n}) h{n} = MatMul(x{n}, w) "
            f"l{n} = LayerNormalization <axis = -1> (h{n}, scale) g{n} = Tanh(l{n}) f{n} = MatMul(g{n}, u)"
        ]
    text = f"({', '.join(given)}) => ({', '.join(made)}) {{ {' '.join(nodes)} }}"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {text}')
    rng = np.random.default_rng(0)
    constants = {
        "root": np.array([0.125]),
        "scale": np.ones(512),
        "w": 0.05 * rng.standard_normal((512, 512)),
        "u": 0.05 * rng.standard_normal((512, 256)),
    }
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(one.astype(np.float32), name) for name, one in constants.items()
    )
    onnx.save(model, path)
    return path


def _measure(path: Path, records: Path, cache: Path, seconds: float, device: Device) -> None:
    command = [sys.executable, "-m", "honed.tuner", "tune" if seconds else "tasks", str(path)]
    command += ["--records", str(records), "--cache-dir", str(cache), "--device", device.spec]
    command += ["--precision", "fp32"]
    command += ["--seconds", str(seconds)] if seconds else []
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _compare(path: Path, known: Recorded, device: Device) -> None:
    model = normalised(path, device.profile)
    forms = {"expected": joins(device.profile), "measured": joins(device.profile, known.times)}
    lowered = {
        label: lower_module(
            frontend.import_relax(model),
            device.profile,
            choose=known.schedules,
            first=first_kernels,
            joins=one,
        )
        for label, one in forms.items()
    }
    print(_forms(forms["measured"], known), flush=True)
    if all(one.expected == one.taken(known.times) for one, _ in forms["measured"].contests):
        print(f"{path.stem}: the forms are as expected")
        return
    made = {label: ready(model, one, device) for label, one in lowered.items()}
    given = made_up(model)
    answers = {label: executor.run(given) for label, executor in made.items()}
    worst = max(apart(answers["expected"][o], answers["measured"][o]) for o in answers["expected"])
    taken = in_turns({label: partial(one.run, given) for label, one in made.items()}, _TURNS)
    launches = {
        label: sum(isinstance(step, Launch) for step in one.plan(device.profile).steps)
        for label, one in lowered.items()
    }
    for label, seconds in taken.items():
        print(f"{path.stem}, forms as {label}: {1e3 * seconds:.2f} ms, {launches[label]} launches")
    ratio = taken["expected"] / taken["measured"]
    print(f"ratio {ratio:.3f} (medians of {_TURNS} in turns), answers {worst:.1e} apart", flush=True)
    for executor in made.values():
        executor.close()


def _forms(joining: Joining, known: Recorded) -> str:
    rows = [_row(one, known) for one, _ in joining.contests]
    head = "| function | calls | one kernel, us | several, us | expected | taken |\n|" + "---|" * 6
    return "\n".join([head, *rows])


def _row(one: Contest, known: Recorded) -> str:
    times = one.times(known.times)
    shown = " | ".join("-" if t is None else f"{1e6 * t:.0f}" for t in (times.joined, times.apart))
    return f"| {one.name[:48]} | {one.calls} | {shown} | {one.expected} | {one.taken(known.times)} |"


if __name__ == "__main__":
    raise SystemExit(main())
