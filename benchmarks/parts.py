"""Models in partitions: what is compiled of them, and their times beside the CPU engine's.

python -m benchmarks.parts MODEL.onnx... [--shape INPUT=1,3,640,640] [--scale X] [--yolox YOLOX.onnx]

All in turns, on the first device, with kernels that need no trial. `--yolox` adds a detector out of YOLOX's
network, followed by the decoding of boxes and non-maximum suppression.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from honed.cpu.session import Session
from honed.machine.devices import select
from honed.runtime import load
from honed.runtime.execution.executor import Executor
from honed.tuner.compiler.compile import CompileRequest, compile_file

from .running import Arrays, apart, in_turns

_TURNS = 60


def main() -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser(prog="benchmarks.parts", description=__doc__)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--shape", action="append", default=[], metavar="INPUT=1,3,640,640")
    parser.add_argument("--scale", type=float, default=1.0, help="standard deviation of inputs")
    parser.add_argument("--yolox", type=Path)
    arguments = parser.parse_args()
    shapes = {}
    for text in arguments.shape:
        name, _, sizes = text.partition("=")
        shapes[name] = tuple(map(int, sizes.split(",")))
    print("| model | nodes compiled | operations | in parts, ms | last part, ms | ORT, ms | ratio | apart |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        more = [_detector(arguments.yolox, folder)] if arguments.yolox else []
        for path in (*arguments.models, *more):
            print(_row(path, folder, shapes, arguments.scale), flush=True)


def _row(path: Path, folder: Path, shapes: dict[str, tuple[int, ...]], scale: float) -> str:
    device = select(None)
    output = folder / f"{path.stem}.honed"
    request = CompileRequest(
        path=path,
        output=output,
        profile=device.profile,
        device=device,
        shapes=shapes,
        precision="auto",
        filename=path.name,
    )
    compile_file(request, lambda _stage, _done, _text: None)
    with load(output, device) as executor:
        split = executor.model.split
        if split is None:
            return f"| {path.stem} | all |"
        given = _made_up(executor, scale)
        whole = Session(path, 0)
        made = executor.run_compiled(given)
        times = in_turns(
            {
                "parts": lambda: executor.run(given),
                "behind": lambda: executor.run_behind(made, given),
                "ort": lambda: whole.run(given),
            },
            _TURNS,
        )
        nodes = split.nodes + sum(part.nodes for part in split.parts)
        flops = split.flops + sum(part.flops for part in split.parts)
        return (
            f"| {path.stem} | {split.nodes} of {nodes} | {split.flops / flops:.1%} | "
            f"{times['parts'] * 1e3:.2f} | {times['behind'] * 1e3:.2f} | {times['ort'] * 1e3:.2f} | "
            f"{times['parts'] / times['ort']:.2f} | {_apart(executor, whole, given)} |"
        )


def _made_up(executor: Executor, scale: float) -> Arrays:
    rng = np.random.default_rng(0)
    return {t.name: (rng.normal(size=t.shape) * scale).astype(t.dtype) for t in executor.model.inputs}


def _apart(executor: Executor, whole: Session, given: Arrays) -> str:
    """Return the largest difference of outputs, or that they have other shapes."""
    found, expected = executor.run(given), whole.run(given)
    if any(found[name].shape != value.shape for name, value in expected.items()):
        return "other shapes"
    return f"{max(apart(value, found[name]) for name, value in expected.items()):.1g}"


def _detector(path: Path, folder: Path) -> Path:
    """Write YOLOX's network for images of 416 by 416, with the operators that follow it in apps."""
    model = onnx.load(path)
    output = model.graph.output[0].name
    cells = []
    for stride in (8, 16, 32):
        side = 416 // stride
        places = np.stack(np.meshgrid(np.arange(side), np.arange(side)), -1).reshape(-1, 2)
        cells.append(np.concatenate([places, np.full((side * side, 1), stride)], 1))
    grid = np.concatenate(cells).astype(np.float32)
    constants = {
        "n_at": grid[None, :, :2],
        "n_stride": grid[None, :, 2:],
        "n_half": np.array(0.5, np.float32),
        "n_most": np.array([100]),
        "n_overlap": np.array([0.45], np.float32),
        "n_least": np.array([0.001], np.float32),
        "n_two": np.array([2]),
        "n_flat": np.array([-1]),
    }
    nodes = [
        _split(model, constants, output, ["n_c", "n_s", "n_o", "n_k"], [2, 2, 1, 80]),
        helper.make_node("Add", ["n_c", "n_at"], ["n_c1"]),
        helper.make_node("Mul", ["n_c1", "n_stride"], ["n_centre"]),
        helper.make_node("Exp", ["n_s"], ["n_s1"]),
        helper.make_node("Mul", ["n_s1", "n_stride"], ["n_size"]),
        helper.make_node("Mul", ["n_size", "n_half"], ["n_part"]),
        helper.make_node("Sub", ["n_centre", "n_part"], ["n_from"]),
        helper.make_node("Add", ["n_centre", "n_part"], ["n_to"]),
        helper.make_node("Concat", ["n_from", "n_to"], ["n_boxes"], axis=2),
        helper.make_node("Mul", ["n_o", "n_k"], ["n_p"]),
        helper.make_node("Transpose", ["n_p"], ["n_scores"], perm=[0, 2, 1]),
        helper.make_node(
            "NonMaxSuppression", ["n_boxes", "n_scores", "n_most", "n_overlap", "n_least"], ["chosen"]
        ),
        helper.make_node("Gather", ["chosen", "n_two"], ["n_row"], axis=1),
        helper.make_node("Reshape", ["n_row", "n_flat"], ["n_rows"]),
        helper.make_node("Gather", ["n_boxes", "n_rows"], ["found"], axis=1),
    ]
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    del model.graph.output[:]
    model.graph.output.extend(
        [
            helper.make_tensor_value_info("chosen", TensorProto.INT64, ["n", 3]),
            helper.make_tensor_value_info("found", TensorProto.FLOAT, [1, "n", 4]),
        ]
    )
    onnx.checker.check_model(model)
    target = folder / f"{path.stem}_nms.onnx"
    onnx.save(model, target)
    return target


def _split(
    model: onnx.ModelProto, constants: Arrays, value: str, names: list[str], sizes: list[int]
) -> onnx.NodeProto:
    """Return a Split of the last axis, in the form of the model's opset."""
    opset = next(i.version for i in model.opset_import if i.domain in ("", "ai.onnx"))
    if opset < 13:
        return helper.make_node("Split", [value], names, split=sizes, axis=2)
    constants["n_sizes"] = np.array(sizes)
    return helper.make_node("Split", [value, "n_sizes"], names, axis=2)


if __name__ == "__main__":
    main()
