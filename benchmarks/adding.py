"""Processor time to add models: `python -m benchmarks.adding MODEL.onnx... [--quantised]`.

For each model a service of its own, on the first OpenCL device, compiles it, without the CPU engine, twice:
with an empty cache of PoCL's and with the cache that this fills. The first is the whole time, and the
difference is the OpenCL compiler's; on other drivers it means nothing. The processor time of the service and
all of its children counts, less that of a service that adds nothing, so a busy machine matters little. With
`--quantised` each model of float32 is followed by itself in uint8: QuantizeLinear and DequantizeLinear around
its nodes, as ONNX Runtime's tools put them, weights by channel, with ranges of generated inputs.
"""

from __future__ import annotations

import argparse
import logging
import resource
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import version_converter
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from honed.protocol.errors import HonedError
from honed.runtime.client import Client

from .serving import service

_CONFIG = '[serve]\nengine = "opencl"\n[tuner]\nspawn = false\n'
_OPSET = 13  # The first that quantises by channel
_SECONDS = 3600.0  # Limit of adding one model
_SETS = 2  # Sets of inputs for the ranges of quantisation


class _Inputs(CalibrationDataReader):  # type: ignore[misc]
    """Normally distributed inputs, the same every time; open sizes are 1."""

    def __init__(self, path: Path) -> None:
        rng = np.random.default_rng(0)
        given = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).get_inputs()
        shapes = {i.name: [n if isinstance(n, int) else 1 for n in i.shape] for i in given}
        self._sets = iter(
            [{n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()} for _ in range(_SETS)]
        )

    def get_next(self) -> Mapping[str, np.ndarray] | None:
        """Return the next set, None after the last."""
        return next(self._sets, None)


def main() -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adding", description=__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--quantised", action="store_true", help="each of float32 in uint8, too")
    options = parser.parse_args()
    logging.getLogger().setLevel(logging.ERROR)  # The tools' advice
    print("| model | all, s | OpenCL compiler, s | the rest, s |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="honed-adding-") as name:
        folder = Path(name)
        idle = _spent(folder, None)
        for each in options.models:
            for path in (each, *(_quantised(each, folder) if options.quantised else ())):
                try:
                    cold, warm = (_spent(folder, path) - idle for _ in range(2))
                    row = f"{cold:.1f} | {cold - warm:.1f} | {warm:.1f}"
                except HonedError as error:
                    row = f"{error} | | "
                print(f"| {path.stem} | {row} |", flush=True)


def _quantised(path: Path, folder: Path) -> Iterator[Path]:
    """Yield the model in uint8, if it is one of float32."""
    model = onnx.load(path)
    if any(v.type.tensor_type.elem_type != onnx.TensorProto.FLOAT for v in model.graph.input):
        return
    if max(o.version for o in model.opset_import if o.domain in ("", "ai.onnx")) < _OPSET:
        model = version_converter.convert_version(model, _OPSET)
    given, made = folder / "given.onnx", folder / f"{path.stem}_uint8.onnx"
    onnx.save(model, given)
    quantize_static(
        given,
        made,
        _Inputs(given),
        quant_format=QuantFormat.QDQ,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        per_channel=True,
    )
    yield made


def _spent(folder: Path, model: Path | None) -> float:
    """Return the processor seconds of a new service that adds a model, and of its children."""
    before = _of_children()
    with tempfile.TemporaryDirectory(dir=folder) as own:
        cache = folder / f"pocl-{model.stem if model else ''}"
        with service(Path(own), _CONFIG, {"POCL_CACHE_DIR": str(cache)}) as client:
            if model is not None:
                with Client(client.socket, timeout=_SECONDS) as patient:
                    patient.add(model)
    return _of_children() - before


def _of_children() -> float:
    """Return the seconds of all children that ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
