"""Tokens a second of a decoder that is added by plain `hone add`: by the service, its form alone, PyTorch.

python -m tests.tuner.nvidia.serving [--size 135m|small] [--told both|mask|nothing] [--no-torch]

For a machine with an NVIDIA GPU, where `install.sh` was run and PyTorch is; without PyTorch, anywhere. The
model is drawn here: Llama's architecture in operators of ONNX alone, with its caches joined by Concat. The
service counts as idle at once and compiles for steps that came twice; else it has its defaults. Nothing is
pinned: the run ends with an error where the compiled form of a token does not serve. Then sequences of one
client generate, the form runs alone in this process, and PyTorch replays a CUDA graph.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx
from benchmarks.decoders.__main__ import LLAMA
from benchmarks.serving import service
from onnx import TensorProto, helper, numpy_helper

from honed.cpu.session import Session
from honed.daemon.features.decoding import Decoder, Form, Piece, decoder_of
from honed.daemon.worker.step_inputs import Step
from honed.daemon.worker.steps import growth
from honed.machine.devices import select
from honed.runtime.calling.calls import InSequence
from honed.runtime.client import Client
from honed.runtime.compiled import modelfile
from honed.runtime.execution.executor import load

_CONFIG = """
[tuner]
spawn = false
[variants]
requests = 2
memory_mib = 16384
[sequences]
max_mib = 4096
[limits]
compile_seconds = 400
compile_memory_mib = 32768
[idle]
quiet_seconds = 0.5
settle_seconds = 0
max_pressure_percent = 100
max_load_per_core = 1000
max_gpu_percent = 100
max_temperature_c = 1000
"""
_FORM = Form(1, 256)
_PROMPT, _TOKENS, _TURNS = 32, 150, 5
_SECONDS = 420.0  # for the form to serve
_PLACES = 2048


def main() -> None:
    """Print tokens a second by each, and their ratios."""
    parser = argparse.ArgumentParser(prog="python -m tests.tuner.nvidia.serving", description=__doc__)
    parser.add_argument("--size", choices=sorted(LLAMA), default="135m")
    parser.add_argument("--told", choices=("both", "mask", "nothing"), default="both")
    parser.add_argument("--no-torch", dest="torch", action="store_false")
    options = parser.parse_args()
    begun = time.monotonic()

    def tell(text: str) -> None:
        print(f"{time.monotonic() - begun:6.1f} s  {text}", flush=True)

    with tempfile.TemporaryDirectory(prefix="honed-serving-") as name:
        folder = Path(name)
        path = llama(folder / "llama.onnx", LLAMA[options.size], options.told)
        tell(f"drew {path.stat().st_size >> 20} MiB")
        with service(folder, _CONFIG) as client:
            client.add(path, name="llama")
            tell("hone add llama.onnx")
            _until_served(client, tell)
            rates = [_generated(client) for _ in range(_TURNS)]
            tell(client.show("llama")["forms"])
        through = median(rates)
        tell(f"through the service: {', '.join(f'{rate:.0f}' for rate in rates)} tokens a second")
        alone = _alone(folder, path)
        tell(f"the form alone: {alone:.0f} tokens a second")
        print(f"through the service {through:.0f}, the form alone {alone:.0f}: ratio {through / alone:.2f}")
        if options.torch:
            graph = _torch(LLAMA[options.size])
            print(f"PyTorch's CUDA graph {graph:.0f}: the service is {through / graph:.2f} times as fast")


def _until_served(client: Client, tell: Any) -> None:
    """Generate now and then, until the form of a token serves; end the program if it does not."""
    end, shown = time.monotonic() + _SECONDS, ""
    while time.monotonic() < end:
        engines = _engines(client, 3)
        said = client.show("llama")["forms"]
        if said != shown:
            tell(said)
            shown = said
        if engines[-1] == "gpu":
            return
        time.sleep(3.0)  # it is idle meanwhile
    raise SystemExit(f"no form serves after {_SECONDS:.0f} s: {shown}")


def _engines(client: Client, tokens: int) -> list[str]:
    return [
        client.answer(
            "llama",
            {"input_ids": ids},
            sequence=InSequence(0, start=not at, end=at == tokens, last_token=True),
        ).engine
        for at, ids in enumerate(_tokens(tokens))
    ]


def _tokens(count: int) -> Iterator[Any]:
    yield np.arange(1, 1 + _PROMPT)[None]
    for token in range(count):
        yield np.array([[token % 7]])


def _generated(client: Client) -> float:
    """Return tokens a second of a sequence, each chosen from the logits of the one before."""
    with client.sequence("llama") as sequence:
        ids = np.arange(1, 1 + _PROMPT)[None]
        ids = sequence.infer({"input_ids": ids}, last_token=True)["logits"][:, -1:].argmax(-1)
        ids = sequence.infer({"input_ids": ids}, last_token=True)["logits"][:, -1:].argmax(-1)
        begun = time.perf_counter()
        for _ in range(_TOKENS):
            ids = sequence.infer({"input_ids": ids}, last_token=True)["logits"][:, -1:].argmax(-1)
        return _TOKENS / (time.perf_counter() - begun)


def _alone(folder: Path, path: Path) -> float:
    """Return tokens a second of the service's compiled form, in this process."""
    known = decoder_of(Session(path, 1).interface, {})
    assert known is not None
    device = select(None)
    with load(_file(folder, known), device) as executor:
        growing = growth(known.held(Step(1, 1, 0)))
        executor.restore(growing, {})
        rates = []
        for _ in range(_TURNS):
            begun, ids = time.perf_counter(), np.zeros((1, 1), np.int64)
            for before in range(_PROMPT, _PROMPT + _TOKENS):
                found = executor.step(_given(known, before, ids), growing, before, 1)["logits"]
                ids = found[:, -1:].argmax(-1)
            rates.append(_TOKENS / (time.perf_counter() - begun))
        return median(rates)


def _given(known: Decoder, before: int, ids: Any) -> dict[str, Any]:
    contents = known.contents(Piece(_FORM, before, 0, 1), ids.tobytes())
    types = {tensor.name: tensor.dtype for tensor in known.of_forms.inputs}
    return {
        each.name: np.frombuffer(data, types[each.name]).reshape(each.shape)
        for each, data in zip(known.inputs(_FORM), contents, strict=True)
    }


def _file(folder: Path, known: Decoder) -> Path:
    """Return the compiled file of the form in the service's store."""
    for path in sorted((folder / "state" / "objects").iterdir()):
        with path.open("rb") as file:
            compiled = file.read(len(modelfile.MAGIC)) == modelfile.MAGIC
        if compiled:
            with modelfile.read(path, verify=False) as found:
                shapes = {tensor.name: tensor.shape for tensor in found.model.inputs}
            if shapes == known.shapes(_FORM):
                return path
    raise SystemExit("the form is not in the service's store")


def _torch(sizes: tuple[int, ...]) -> float:
    """Return tokens a second of PyTorch in halves, with a static cache, each chosen on the host."""
    from .generating import Sizes, TorchDecoder

    decoder, rates = TorchDecoder(Sizes(*sizes), _FORM.capacity), []
    for _ in range(_TURNS):
        begun, token = time.perf_counter(), 0
        for before in range(_PROMPT, _PROMPT + _TOKENS):
            token = int(decoder.step(before, token).argmax())
        rates.append(_TOKENS / (time.perf_counter() - begun))
    return median(rates)


class _Writer:
    """Nodes and weights of halves, drawn in order."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._rng = np.random.default_rng(0)

    def op(self, kind: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        name = name or f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], name=name, **attributes))
        return name

    def const(self, value: Any, kind: Any = np.int64) -> str:
        name = f"c{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value, kind), name))
        return name

    def drawn(self, *shape: int) -> str:
        return self.const(self._rng.standard_normal(shape, np.float32) / np.sqrt(shape[0]), np.float16)

    def normed(self, x: str, width: int) -> str:
        wide = self.op("Cast", x, to=TensorProto.FLOAT)
        mean = self.op("ReduceMean", self.op("Mul", wide, wide), axes=[-1])
        root = self.op("Sqrt", self.op("Add", mean, self.const(1e-5, np.float32)))
        narrow = self.op("Cast", self.op("Div", wide, root), to=TensorProto.FLOAT16)
        return self.op("Mul", narrow, self.const(np.ones(width), np.float16))

    def turned(self, x: str, cos: str, sin: str, size: int) -> str:
        half, axis = size // 2, self.const([3])
        first = self.op("Slice", x, self.const([0]), self.const([half]), axis)
        second = self.op("Slice", x, self.const([half]), self.const([size]), axis)
        other = self.op("Concat", self.op("Neg", second), first, axis=3)
        return self.op("Add", self.op("Mul", x, cos), self.op("Mul", other, sin))


def llama(path: Path, sizes: tuple[int, ...], told: str) -> Path:
    """Write a decoder in Optimum's convention; `told` says whether masks and positions are inputs."""
    layers, hidden, heads, of_keys, inner, vocabulary = sizes
    size, w, half = hidden // heads, _Writer(), TensorProto.FLOAT16
    info = helper.make_tensor_value_info
    inputs = [info("input_ids", TensorProto.INT64, ["batch", "tokens"])]
    if told != "nothing":
        inputs.append(info("attention_mask", TensorProto.INT64, ["batch", "past + tokens"]))
    if told == "both":
        inputs.append(info("position_ids", TensorProto.INT64, ["batch", "tokens"]))
    outputs = [info("logits", half, ["batch", "tokens", vocabulary])]
    zero, one = w.const(0), w.const(1)
    before = w.op("Gather", w.op("Shape", "past_key_values.0.key"), w.const(2))
    whole = w.op("Add", before, w.op("Gather", w.op("Shape", "input_ids"), one))
    rows, columns = w.op("Range", before, whole, one), w.op("Range", zero, whole, one)
    seen = w.op("LessOrEqual", columns, w.op("Unsqueeze", rows, w.const([1])))
    if told != "nothing":
        given = w.op("Unsqueeze", w.op("Cast", "attention_mask", to=TensorProto.BOOL), w.const([1, 2]))
        seen = w.op("And", seen, given)
    angles = np.outer(np.arange(_PLACES), 1e4 ** -(np.arange(0, size, 2) / size))
    both = np.concatenate([angles, angles], axis=1)
    places = "position_ids" if told == "both" else w.op("Unsqueeze", rows, w.const([0]))
    cos, sin = (
        w.op("Unsqueeze", w.op("Gather", w.const(table, np.float16), places), w.const([1]))
        for table in (np.cos(both), np.sin(both))
    )
    x = w.op("Gather", w.drawn(vocabulary, hidden), "input_ids")
    least, scale = w.const(-6e4, np.float16), w.const(size**-0.5, np.float16)
    for layer in range(layers):
        normed = w.normed(x, hidden)
        parts = []
        for count in (heads, of_keys, of_keys):
            product = w.op("MatMul", normed, w.drawn(hidden, count * size))
            split = w.op("Reshape", product, w.const([0, 0, count, size]))
            parts.append(w.op("Transpose", split, perm=[0, 2, 1, 3]))
        query = w.op("Mul", w.turned(parts[0], cos, sin, size), scale)
        state = []
        for what, new in (("key", w.turned(parts[1], cos, sin, size)), ("value", parts[2])):
            past, present = f"past_key_values.{layer}.{what}", f"present.{layer}.{what}"
            inputs.append(info(past, half, ["batch", of_keys, "past", size]))
            outputs.append(info(present, half, ["batch", of_keys, "past + tokens", size]))
            w.op("Concat", past, new, name=present, axis=2)
            one_more = w.op("Unsqueeze", present, w.const([2]))
            tiled = w.op("Tile", one_more, w.const([1, 1, heads // of_keys, 1, 1]))
            state.append(w.op("Reshape", tiled, w.const([0, heads, -1, size])))
        scores = w.op("MatMul", query, w.op("Transpose", state[0], perm=[0, 1, 3, 2]))
        weights = w.op("Softmax", w.op("Where", seen, scores, least), axis=-1)
        mixed = w.op("Transpose", w.op("MatMul", weights, state[1]), perm=[0, 2, 1, 3])
        joined = w.op("Reshape", mixed, w.const([0, 0, hidden]))
        x = w.op("Add", x, w.op("MatMul", joined, w.drawn(hidden, hidden)))
        normed = w.normed(x, hidden)
        gate = w.op("MatMul", normed, w.drawn(hidden, inner))
        gate = w.op("Mul", gate, w.op("Sigmoid", gate))
        up = w.op("MatMul", normed, w.drawn(hidden, inner))
        x = w.op("Add", x, w.op("MatMul", w.op("Mul", gate, up), w.drawn(inner, hidden)))
    w.op("MatMul", w.normed(x, hidden), w.drawn(hidden, vocabulary), name="logits")
    graph = helper.make_graph(w.nodes, "llama", inputs, outputs, w.weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


if __name__ == "__main__":
    main()
