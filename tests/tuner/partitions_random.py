"""Random graphs to cut in parts: what only the CPU engine runs stands among what is compiled.

    python -m tests.tuner.partitions_random FOLDER [--first 0] [--count 100]

compiles the graphs of these seeds and keeps the files of those that go wrong.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from honed.machine import devices
from honed.machine.devices import Device
from honed.protocol.errors import HonedError, Internal
from honed.runtime.execution.executor import load
from honed.tuner.compiler import compile as compiling
from honed.tuner.compiler.compile import compile_file
from honed.tuner.compiler.partition import partition_model
from honed.tuner.compiler.partition.divide import PartitionThresholds
from honed.tuner.verify import confined
from tests.tuner.requests import request_for

RIGHT, REFUSED = "right", "refused"
CHEAP = PartitionThresholds(share=0.0, work=0, most=1000, whole=0.0)  # every stretch pays
OPSETS = [helper.make_opsetid(*each) for each in (("", 17), ("ai.onnx.ml", 3), ("com.microsoft", 1))]
_ELEMENTS = {name: helper.np_dtype_to_tensor_dtype(np.dtype(name)) for name in
             ("float32", "int64", "bool", "int32", "float64", "float16", "uint8")}  # fmt: skip
_SHAPES = [(4,), (2, 3), (1, 4, 4), (), (1,), (3, 3), (1, 3, 4, 4), (2, 1)]
_FLOATS = ("float32", "float64")
_ML = "ai.onnx.ml"
Array = np.ndarray[Any, np.dtype[Any]]


def in_this_process(module: str, folder: Path, arguments: Sequence[str], *_: object) -> dict[str, Any]:
    """Stand for `confined.run` with models that are trusted: a child takes a second to start."""
    found: dict[str, Any] = {}
    told = nullcontext(lambda answer: found.update(json.loads(json.dumps(answer))))
    with patch.object(confined, "answering", lambda: told):
        importlib.import_module(module).main([str(folder), *arguments, "--threads", "1"])
    return found


def session(model: bytes) -> onnxruntime.InferenceSession:
    """A model as it stands, with little to say."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


class Drawn:
    """A graph while it is drawn. Each node is run with one set of values; one that cannot be is left out."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, Array] = {}
        self.values: dict[str, Any] = {}  # arrays, and lists that are sequences
        self.open: set[str] = set()  # of a shape that depends on the data
        self.inputs = [f"x{n}" for n in range(self.draw.randint(1, 3))]
        for name in self.inputs:
            kind = self.draw.choice(["float32"] * 5 + ["int64", "bool", "float64", "int32", "float16"])
            self.values[name] = self.array(kind, self.draw.choice(_SHAPES))
        for _ in range(self.draw.randint(0, 2)):
            self.constant(self.array(self.draw.choice(["float32", "int64"]), self.draw.choice(_SHAPES)))

    def array(self, dtype: str, shape: tuple[int, ...]) -> Array:
        r = np.random.default_rng(self.draw.randrange(1 << 30))
        if dtype == "bool":
            return np.asarray(r.integers(0, 2, shape)).astype(bool)
        return np.asarray(r.normal(size=shape) if "float" in dtype else r.integers(-3, 4, shape)).astype(
            dtype
        )

    def constant(self, value: Any, dtype: str | None = None) -> str:
        name = f"k{len(self.constants)}"
        self.constants[name] = self.values[name] = np.asarray(value, dtype)
        return name

    def pick(self, *dtypes: str, rank: int | None = None, closed: bool = False) -> str:
        """Some tensor; "" where there is none of the kind."""
        found = [
            name
            for name, v in self.values.items()
            if isinstance(v, np.ndarray)
            and (not dtypes or v.dtype.name in dtypes)
            and (rank is None or v.ndim == rank)
            and not (closed and name in self.open)
        ]
        return self.draw.choice(found) if found else ""

    def add(self, op: str, given: Sequence[str | None], outputs: int = 1, **attrs: Any) -> str:
        """A node, whose first output is given; "" where ONNX Runtime does not run it on these values."""
        opens = attrs.pop("opens", False)
        outer = attrs.pop("outer", [])
        read = [name for name in dict.fromkeys([*given, *outer]) if name is not None]
        if any(not name for name in read if name != "") or not read or given[0] == "":
            return ""
        read = [name for name in read if name]
        names = [f"v{len(self.nodes)}" + f"_{n}" * bool(n) for n in range(outputs)]
        node = helper.make_node(op, [name or "" for name in given], names, **attrs)
        if any(isinstance(self.values[name], list) for name in read):
            return ""
        try:
            made = self.run([node], read, names)
        except Exception:  # noqa: BLE001  ONNX Runtime has several, and the node is left out
            return ""
        if any(not isinstance(one, np.ndarray) or one.dtype.name not in _ELEMENTS for one in made):
            return ""
        self.nodes.append(node)
        self.values.update(zip(names, made, strict=True))
        if opens or not self.open.isdisjoint(read):
            self.open.update(names)
        return names[0]

    def chain(self, given: Sequence[str], nodes: Sequence[onnx.NodeProto]) -> None:
        """Nodes with values between them that are no tensors."""
        try:
            (made,) = self.run(nodes, list(dict.fromkeys(given)), list(nodes[-1].output))
        except Exception:  # noqa: BLE001  likewise
            return
        self.nodes += nodes
        self.values[nodes[-1].output[0]] = made
        if not self.open.isdisjoint(given):
            self.open.update(nodes[-1].output)

    def run(self, nodes: Sequence[onnx.NodeProto], given: list[str], wanted: list[str]) -> list[Any]:
        infos = [_info(name, self.values[name].dtype, self.values[name].shape) for name in given]
        graph = helper.make_graph(nodes, "g", infos, [onnx.ValueInfoProto(name=name) for name in wanted])
        model = helper.make_model(graph, opset_imports=OPSETS, ir_version=8)
        found = session(model.SerializeToString()).run(None, {name: self.values[name] for name in given})
        return list(found)

    def number(self, most: float, dtype: int) -> str:
        """A scalar from 0 to `most` that is computed at run time."""
        total = self.add("Cast", [self.pick(*_FLOATS, "int64", "bool")], to=TensorProto.FLOAT)
        bounded = self.add("Sigmoid", [self.add("ReduceSum", [total], keepdims=0)])
        return self.add("Cast", [self.add("Mul", [bounded, self.constant(most, "float32")])], to=dtype)

    def model(self) -> onnx.ModelProto:
        """The graph with some of its values as outputs, whose shapes are declared, open or left out."""
        for _ in range(self.draw.randint(3, 16)):
            self.draw.choice(
                [self.compiled, self.viewed, self.chosen, self.learnt, self.flow, self.compiled]
            )()
        tensors = [name for name, v in self.values.items() if isinstance(v, np.ndarray)]
        pool = [name for name in tensors if name[0] == "v"] * 3 + tensors
        outputs = [self.draw.choice(pool) for _ in range(self.draw.randint(1, 5))]
        infos = []
        for name in dict.fromkeys(outputs) if self.draw.random() < 0.9 else outputs:
            value, style = self.values[name], self.draw.random()
            sizes: list[Any] = [None if name in self.open else size for size in value.shape]
            infos.append(_info(name, value.dtype, sizes if style < 0.6 else None))
            if 0.6 < style < 0.8:
                infos[-1].CopyFrom(_info(name, value.dtype, [None] * value.ndim))
        nodes = self.nodes[::-1] if self.draw.random() < 0.1 else self.nodes
        inputs = [_info(name, self.values[name].dtype, self.values[name].shape) for name in self.inputs]
        graph = helper.make_graph(nodes, "random", inputs, infos)
        graph.initializer.extend(numpy_helper.from_array(v, name) for name, v in self.constants.items())
        return helper.make_model(graph, opset_imports=OPSETS, ir_version=8)

    def compiled(self) -> None:
        """What is compiled wherever its values have static shapes."""
        x, op = self.pick(*_FLOATS), self.draw.choice(["Tanh", "Relu", "Neg", "Sigmoid", "Abs", "Floor"])
        same = [n for n, v in self.values.items() if x and getattr(v, "dtype", 0) == self.values[x].dtype]
        match self.draw.randrange(6):
            case 0 if x:
                self.add(self.draw.choice(["Add", "Mul", "Sub", "Max", "Less"]), [x, self.draw.choice(same)])
            case 1:
                self.add(self.draw.choice(["ReduceSum", "ReduceMax"]), [x], keepdims=self.draw.randint(0, 1))
            case 2 if x and self.values[x].ndim:
                weights = self.constant(self.array(self.values[x].dtype.name, (self.values[x].shape[-1], 3)))
                self.add("MatMul", [x, weights])
            case 3 if x:
                self.add("Where", [self.pick("bool") or self.constant(True), x, self.draw.choice(same)])
            case 4:
                self.add("Cast", [self.pick()], to=self.draw.choice([1, 1, 7, 9, 6, 11]))
            case _:
                self.add(op, [x])

    def viewed(self) -> None:
        """Views, copies and what is known while compiling."""
        x = self.pick()
        shape = self.values[x].shape
        match self.draw.randrange(9):
            case 0:
                self.add("Reshape", [x, self.constant([-1])])
            case 1 if x not in self.open and shape:
                self.add("Reshape", [x, self.constant(shape[::-1])])
            case 2:
                self.add("Transpose", [x])
            case 3:
                self.add("Unsqueeze", [x, self.constant([0])])
            case 4 if x not in self.open:
                self.add("Squeeze", [x])
            case 5:
                self.add("Identity", [self.add("Identity", [x])])
            case 6:
                self.add("Concat", [x, x], axis=0)
            case 7:
                self.add("ConstantOfShape", [self.add("Shape", [x])])
            case _:
                self.add("Gather", [x, self.constant(self.draw.choice([0, [0], [0, 0]]))], axis=0)

    def chosen(self) -> None:
        """Shapes that depend on the data, sequences, optionals and texts."""
        x, name = self.pick(), f"v{len(self.nodes)}_q"
        match self.draw.randrange(9):
            case 0:
                self.add("NonZero", [self.pick("float32", "bool", "int64")], opens=True)
            case 1:
                self.add("Compress", [x, self.pick("bool", rank=1) or None], opens=True, axis=0)
            case 2:
                self.add("Unique", [self.pick("float32", "int64")], self.draw.choice([1, 4]), opens=True)
            case 3:
                given = [self.constant(0), self.number(4, TensorProto.INT64) or None, self.constant(1)]
                self.add("Range", given, opens=True)
            case 4 | 5:
                at = self.number(1, TensorProto.INT64) or self.constant(0)
                nodes = [helper.make_node("SequenceConstruct", [x, x], [f"{name}s"])]
                if self.draw.random() < 0.3:
                    nodes.append(helper.make_node("SequenceInsert", [f"{name}s", x, at], [f"{name}t"]))
                last = self.draw.choice(["SequenceAt", "SequenceLength"])
                more = [at] if last == "SequenceAt" else []
                nodes.append(helper.make_node(last, [nodes[-1].output[0], *more], [name]))
                self.chain([x, at] if at in [i for n in nodes for i in n.input] else [x], nodes)
            case 6:
                first = helper.make_node("Optional", [x], [f"{name}o"])
                self.chain([x], [first, helper.make_node("OptionalGetElement", [f"{name}o"], [name])])
            case 7 if self.values[x].dtype.name in ("int64", "float32"):
                first = helper.make_node("Cast", [x], [f"{name}t"], to=TensorProto.STRING)
                self.chain([x], [first, helper.make_node("Cast", [f"{name}t"], [name], to=TensorProto.FLOAT)])
            case _:
                k = self.add("Add", [self.number(1, TensorProto.INT64), self.constant([1])])
                self.add("TopK", [self.pick(*_FLOATS, rank=1), k or None], 2, opens=True)

    def learnt(self) -> None:
        """Operators without a rule, of whose shapes ONNX's inference knows some."""
        x = self.pick("float32", rank=2, closed=True)
        columns = self.values[x].shape[1] if x else 1
        weights: dict[str, Any] = {"coefficients": [0.5, -0.4] * columns, "intercepts": [0.1, 0.2]}
        match self.draw.randrange(9):
            case 0:
                given = self.pick("float32", "int64", rank=2)
                self.add("Scaler", [given], domain=_ML, offset=[0.5], scale=[2.0])
            case 1:
                self.add("Normalizer", [self.pick("float32", rank=2)], domain=_ML, norm="L2")
            case 2:
                self.add("Binarizer", [self.pick("float32")], domain=_ML, threshold=0.1)
            case 3:
                self.add("LinearRegressor", [x], domain=_ML, targets=2, **weights)
            case 4:
                self.add("LinearClassifier", [x], 2, domain=_ML, classlabels_ints=[3, 5], **weights)
            case 5:
                keys: dict[str, Any] = {"keys_int64s": [0, 1], "values_floats": [0.5, 1.5]}
                self.add("LabelEncoder", [self.pick("int64")], domain=_ML, default_float=-1.0, **keys)
            case 6:
                self.add("Det", [self.pick("float32")])
            case 7:
                given = self.pick("float32", rank=1)
                self.add("CumSum", [given, self.number(0.5, TensorProto.INT64) or None])
            case _:
                self.recurrent()

    def recurrent(self) -> None:
        x = self.pick("float32", rank=3, closed=True)
        if not x or 0 in self.values[x].shape:
            return
        steps, batch, width = self.values[x].shape
        length = self.add(
            "Add", [self.number(0.5, TensorProto.INT32), self.constant([steps] * batch, "int32")]
        )
        op, gates = self.draw.choice([("LSTM", 4), ("GRU", 3)])
        both = self.draw.choice([1, 2])
        w, r = (self.constant(self.array("float32", (both, gates * 2, n))) for n in (width, 2))
        direction = "bidirectional" if both == 2 else "forward"
        self.add(op, [x, w, r, "", length or None], 2, hidden_size=2, direction=direction)

    def flow(self) -> None:
        """Branches and loops over a value from outside."""
        x, kind = self.pick(*_FLOATS), self.draw.choice(["if", "other shape", "loop", "gathers", "scan"])
        if not x:
            return
        dtype = self.values[x].dtype
        if kind in ("if", "other shape"):
            other = helper.make_node("Identity", [x], ["e"])
            if kind == "other shape":
                other = helper.make_node("Concat", [x, x], ["e"], axis=0)
            then, orelse = (
                helper.make_graph([n], n.output[0], [], [_info(n.output[0], dtype, None)])
                for n in (helper.make_node("Neg", [x], ["t"]), other)
            )
            on = self.add("Cast", [self.number(1.5, TensorProto.INT64)], to=TensorProto.BOOL)
            opens = kind == "other shape"
            self.add("If", [on], then_branch=then, else_branch=orelse, outer=[x], opens=opens)
            return
        if kind == "scan":
            inner = [_info(name, dtype, None) for name in ("s", "r")]
            body = helper.make_graph([helper.make_node("Neg", ["s"], ["r"])], "b", inner[:1], inner[1:])
            self.add("Scan", [x], body=body, num_scan_inputs=1)
            return
        gathers = kind == "gathers"
        nodes = [helper.make_node("Identity", ["on"], ["go"]), helper.make_node("Mul", ["s", x], ["r"])]
        nodes += [helper.make_node("Identity", ["r"], ["g"])] * gathers
        carried = [_info("i", "int64", []), _info("on", "bool", []), _info("s", dtype, None)]
        made = [_info("go", "bool", []), _info("r", dtype, None), *[_info("g", dtype, None)] * gathers]
        count = self.number(3, TensorProto.INT64) if self.draw.random() < 0.7 else self.constant(3)
        body = helper.make_graph(nodes, "b", carried, made)
        self.add("Loop", [count, "", x], 1 + gathers, body=body, opens=gathers)


def _info(name: str, dtype: Any, shape: Sequence[Any] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, _ELEMENTS[np.dtype(dtype).name], shape)


def outcome(model: onnx.ModelProto, folder: Path, device: Device) -> str:
    """`RIGHT`, `REFUSED`, "" where ONNX Runtime refuses it, or what went wrong.

    The caller has `prepare.partition_model` cut where it does not pay.
    """
    path, output = folder / "random.onnx", folder / "random.honed"
    path.write_bytes(model.SerializeToString())
    try:
        own = session(path.read_bytes())
    except Exception:  # noqa: BLE001  ONNX Runtime has several
        return ""
    request = request_for(path, device)
    try:
        compile_file(request, lambda *_: None)
        with load(output, device.spec) as executor:
            given = executor.file.inputs(executor.model.probes[0])
            found = executor.run(given)
    except HonedError as error:
        return repr(error) if isinstance(error, Internal) else REFUSED
    except Exception:  # noqa: BLE001  this is what is looked for
        return traceback.format_exc()
    try:
        expected = own.run(None, given)
    except Exception:  # noqa: BLE001  likewise; what it cannot run another reference evaluated
        return ""
    for one, value in zip(own.get_outputs(), expected, strict=True):
        if (found[one.name].shape, found[one.name].dtype) != (value.shape, value.dtype):
            return f"{one.name} is {found[one.name].dtype}{found[one.name].shape}"
        if not np.allclose(found[one.name], value, rtol=1e-3, atol=1e-4, equal_nan=True):
            return f"{one.name} has other values"
    return RIGHT


def main() -> None:
    """Compile the graphs of some seeds."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    options = parser.parse_args()
    compiling.partition_model = partial(partition_model, worth=CHEAP)
    confined.run = in_this_process
    device, counted = devices.discover()[0], Counter[str]()
    for seed in range(options.first, options.first + options.count):
        model = Drawn(seed).model()
        found = outcome(model, options.folder, device)
        counted[found if found in (RIGHT, REFUSED, "") else "wrong"] += 1
        if found not in (RIGHT, REFUSED, ""):
            (options.folder / f"{seed}.onnx").write_bytes(model.SerializeToString())
            print(seed, found[-900:], flush=True)
    print(dict(counted))


if __name__ == "__main__":
    main()
