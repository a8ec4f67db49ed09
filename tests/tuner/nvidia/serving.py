"""Tokens a second of a decoder that is added by plain `hone add`: by the service, its form alone, PyTorch.

python -m tests.tuner.nvidia.serving [--size 135m|small] [--told KIND] [--no-torch]

For a machine with an NVIDIA GPU, where `install.sh` was run and PyTorch is; without PyTorch, anywhere. The
model is drawn here: Llama's architecture in halves, with GroupQueryAttention as onnxruntime-genai exports it
(`--told genai`), or in operators of ONNX alone, its caches joined by Concat, told masks and positions
(`both`), a `mask` or `nothing`. The service counts as idle at once and compiles for steps that came twice;
else it has its defaults. Nothing is pinned: the run ends with an error where the compiled form of a token
does not serve. Then tokens are generated in turns: by sequences of one client, a token a request, which the
client chooses, and 16, which the service does; by the form alone in this process; by PyTorch's CUDA graph.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx
import psutil
from benchmarks.decoders.__main__ import LLAMA
from benchmarks.serving import service
from onnx import TensorProto, helper, numpy_helper

from honed.cpu.session import Session
from honed.daemon.features.decoding import DecoderBucket, DecoderModel, TokenChunk, decoder_of
from honed.daemon.worker.step_inputs import StepSize
from honed.daemon.worker.steps import growth
from honed.machine.devices import select
from honed.runtime.calling.calls import SequenceOptions
from honed.runtime.client import Client
from honed.runtime.compiled import modelfile
from honed.runtime.execution.executor import Executor, load

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
_FORM = DecoderBucket(1, 256)
_PROMPT, _TOKENS, _TURNS = 32, 160, 15
_GREEDY = 16  # Tokens of a request for which the service chooses them
_SECONDS = 330.0  # for the form to serve
_ALONE, _GRAPH = "the form alone", "PyTorch's CUDA graph"
_PLACES = 2048


def main() -> None:
    """Print tokens a second by each, and their ratios."""
    parser = argparse.ArgumentParser(prog="python -m tests.tuner.nvidia.serving", description=__doc__)
    parser.add_argument("--size", choices=sorted(LLAMA), default="135m")
    parser.add_argument("--told", choices=("genai", "both", "mask", "nothing"), default="genai")
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
            tell(client.show("llama")["forms"])
            for line in _where(client):
                tell(line)
            rates = _in_turns(client, folder, path, LLAMA[options.size] if options.torch else None)
        for what, each in rates.items():
            tell(f"{what}: {', '.join(f'{rate:.0f}' for rate in each)} tokens a second")
        for what in rates:
            shares = [
                f"{median(a / b for a, b in zip(rates[what], rates[other], strict=True)):.2f} of {other}"
                for other in (_ALONE, _GRAPH)
                if other in rates and other != what
            ]
            print(f"{what}: {median(rates[what]):.0f} tokens a second, {', '.join(shares)}")


def _in_turns(
    client: Client, folder: Path, path: Path, sizes: tuple[int, ...] | None
) -> dict[str, list[float]]:
    """Return tokens a second by each, in turns; with the `sizes` of PyTorch's decoder, of that, too."""
    known = decoder_of(Session(path, 1).interface, {})
    assert known is not None
    with load(_file(folder, known), select(None)) as executor:
        ways: dict[str, Callable[[], float]] = {
            "the service, a token a request": lambda: _generated(client),
            f"the service, {_GREEDY} tokens a request": lambda: _chosen(client),
            _ALONE: lambda: _alone(executor, known),
        }
        if sizes is not None:
            ways[_GRAPH] = _torch(sizes)
        rates: dict[str, list[float]] = {what: [] for what in ways}
        for _ in range(_TURNS):
            for what, generate in ways.items():
                rates[what].append(generate())
    return rates


def _until_served(client: Client, tell: Any) -> None:
    """Generate now and then, until the form of a token serves; end the program if it does not."""
    end, shown = time.monotonic() + _SECONDS, ""
    while time.monotonic() < end:
        engines = _engines(client, 3)
        said = client.show("llama")["forms"]
        if said != shown:
            tell(said)
            shown = said
        # The form for prompts follows, whose compilation would take processors from what is measured.
        if engines[-1] == "gpu" and ("64 tokens" in said or time.monotonic() > end - _SECONDS / 3):
            return
        time.sleep(3.0)  # it is idle meanwhile
        while client.status()["jobs"] and time.monotonic() < end:
            time.sleep(1.0)
    raise SystemExit(f"no form serves after {_SECONDS:.0f} s: {shown}")


def _engines(client: Client, tokens: int) -> list[str]:
    return [
        client.infer_response(
            "llama",
            {"input_ids": ids},
            sequence=SequenceOptions("bench", start=not at, end=at == tokens, last_token=True),
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
        for _ in range(2):
            ids = _likeliest(sequence.infer({"input_ids": ids}, last_token=True)["logits"])
        begun = time.perf_counter()
        for _ in range(_TOKENS):
            ids = _likeliest(sequence.infer({"input_ids": ids}, last_token=True)["logits"])
        return _TOKENS / (time.perf_counter() - begun)


def _chosen(client: Client) -> float:
    """Return tokens a second of a sequence whose tokens the service chooses."""
    with client.sequence("llama") as sequence:
        ids = sequence.generate({"input_ids": np.arange(1, 1 + _PROMPT)[None]}, 2)
        begun, done = time.perf_counter(), 0
        while done < _TOKENS:
            ids = sequence.generate({"input_ids": ids[:, -1:]}, _GREEDY)
            done += ids.size
        return done / (time.perf_counter() - begun)


def _likeliest(logits: Any) -> Any:
    """Return the likeliest token, [1, 1]; NumPy takes ten times as long to compare halves."""
    return logits[:, -1:].astype(np.float32).argmax(-1)


def _where(client: Client) -> Iterator[str]:
    """Yield where the time of a step goes: by the answers' own times, and processor time of each process."""
    status = client.status()
    server = psutil.Process(status["pid"])
    processes = {"client": psutil.Process(), "service": server}
    processes |= {f"child {child.pid}": child for child in server.children(recursive=True)}
    before = {name: _cpu(process) for name, process in processes.items()}
    whole, compute, queued, chosen = [], [], [], []
    for at, ids in enumerate(_tokens(_TOKENS)):
        begun = time.perf_counter()
        sequence = SequenceOptions("where", start=not at, end=at == _TOKENS, last_token=True)
        answer = client.infer_response("llama", {"input_ids": ids}, sequence=sequence)
        whole.append(1e6 * (time.perf_counter() - begun))
        begun = time.perf_counter()
        _likeliest(answer.outputs["logits"])
        chosen.append(1e6 * (time.perf_counter() - begun))
        compute.append(answer.compute_us)
        queued.append(answer.queue_us)
    spent = {name: 1e6 * (_cpu(process) - before[name]) / _TOKENS for name, process in processes.items()}
    yield (
        f"a step: {median(whole):.0f} us for the client, {median(compute):.0f} of them in the run, "
        f"{median(queued):.0f} in the queue; then {median(chosen):.0f} us to choose the token"
    )
    yield "processor time of a step, us: " + ", ".join(
        f"{name} {us:.0f}" for name, us in spent.items() if us > 5
    )


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _alone(executor: Executor, known: DecoderModel) -> float:
    """Return tokens a second of the service's compiled form, in this process."""
    growing = growth(known.state_tensors(StepSize(1, 1, 0)))
    executor.restore(growing, {})
    begun, ids = time.perf_counter(), np.zeros((1, 1), np.int64)
    for before in range(_PROMPT, _PROMPT + _TOKENS):
        ids = _likeliest(executor.step(_given(known, before, ids), growing, before, 1)["logits"])
    return _TOKENS / (time.perf_counter() - begun)


def _given(known: DecoderModel, before: int, ids: Any) -> dict[str, Any]:
    contents = known.contents(TokenChunk(_FORM, before, 0, 1), ids.tobytes())
    types = {tensor.name: tensor.dtype for tensor in known.of_forms.inputs}
    return {
        each.name: np.frombuffer(data, types[each.name]).reshape(each.shape)
        for each, data in zip(known.inputs(_FORM), contents, strict=True)
    }


def _file(folder: Path, known: DecoderModel) -> Path:
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


def _torch(sizes: tuple[int, ...]) -> Callable[[], float]:
    """Return what measures PyTorch in halves, with a static cache, each token chosen on the host."""
    from .generating import Sizes, TorchDecoder

    decoder = TorchDecoder(Sizes(*sizes), _FORM.capacity)

    def generate() -> float:
        begun, token = time.perf_counter(), 0
        for before in range(_PROMPT, _PROMPT + _TOKENS):
            token = int(decoder.step(before, token).argmax())
        return _TOKENS / (time.perf_counter() - begun)

    return generate


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


class _Attention:
    """Attention of one kind of decoder: what it is told, and how it reads and writes its caches."""

    def __init__(self, w: _Writer, sizes: tuple[int, ...], told: str) -> None:
        self._w, self._told = w, told
        _, hidden, self._heads, self._of_keys, *_ = sizes
        self._size = hidden // self._heads
        angles = np.outer(np.arange(_PLACES), 1e4 ** -(np.arange(0, self._size, 2) / self._size))
        self._scale = w.const(self._size**-0.5, np.float16)
        if told == "genai":
            self._cos, self._sin = (w.const(turn, np.float16) for turn in (np.cos(angles), np.sin(angles)))
            ones = w.op("ReduceSum", "attention_mask", w.const([1]), keepdims=0)
            self._ends = w.op("Cast", w.op("Sub", ones, w.const(1)), to=TensorProto.INT32)
            columns = w.op("Gather", w.op("Shape", "attention_mask"), w.const(1))
            self._whole = w.op("Cast", columns, to=TensorProto.INT32)
            return
        one, before = w.const(1), w.op("Gather", w.op("Shape", "past_key_values.0.key"), w.const(2))
        whole = w.op("Add", before, w.op("Gather", w.op("Shape", "input_ids"), one))
        rows = w.op("Range", before, whole, one)
        self._seen = w.op(
            "LessOrEqual", w.op("Range", w.const(0), whole, one), w.op("Unsqueeze", rows, w.const([1]))
        )
        if told != "nothing":
            given = w.op("Unsqueeze", w.op("Cast", "attention_mask", to=TensorProto.BOOL), w.const([1, 2]))
            self._seen = w.op("And", self._seen, given)
        places = "position_ids" if told == "both" else w.op("Unsqueeze", rows, w.const([0]))
        both = np.concatenate([angles, angles], axis=1)
        self._cos, self._sin = (
            w.op("Unsqueeze", w.op("Gather", w.const(table, np.float16), places), w.const([1]))
            for table in (np.cos(both), np.sin(both))
        )
        self._least = w.const(-6e4, np.float16)

    def attend(self, layer: int, parts: list[str]) -> str:
        """Return what queries, keys and values [B, S, heads * size] give, [B, S, hidden]."""
        w, names = self._w, [f"past_key_values.{layer}.{what}" for what in ("key", "value")]
        presents = [f"present.{layer}.{what}" for what in ("key", "value")]
        if self._told == "genai":
            mixed = f"mixed{layer}"
            node = helper.make_node(
                "GroupQueryAttention",
                [*parts, *names, self._ends, self._whole, self._cos, self._sin],
                [mixed, *presents],
                domain="com.microsoft",
                num_heads=self._heads,
                kv_num_heads=self._of_keys,
                do_rotary=1,
            )
            w.nodes.append(node)
            return mixed
        counts = self._heads, self._of_keys, self._of_keys
        query, *new = (self._split(part, count) for part, count in zip(parts, counts, strict=True))
        query = w.op("Mul", w.turned(query, self._cos, self._sin, self._size), self._scale)
        new[0] = w.turned(new[0], self._cos, self._sin, self._size)
        tiles, state = w.const([1, 1, self._heads // self._of_keys, 1, 1]), []
        for name, present, each in zip(names, presents, new, strict=True):
            w.op("Concat", name, each, name=present, axis=2)
            tiled = w.op("Tile", w.op("Unsqueeze", present, w.const([2])), tiles)
            state.append(w.op("Reshape", tiled, w.const([0, self._heads, -1, self._size])))
        scores = w.op("MatMul", query, w.op("Transpose", state[0], perm=[0, 1, 3, 2]))
        weights = w.op("Softmax", w.op("Where", self._seen, scores, self._least), axis=-1)
        mixed = w.op("Transpose", w.op("MatMul", weights, state[1]), perm=[0, 2, 1, 3])
        return w.op("Reshape", mixed, w.const([0, 0, self._heads * self._size]))

    def _split(self, part: str, count: int) -> str:
        split = self._w.op("Reshape", part, self._w.const([0, 0, count, self._size]))
        return self._w.op("Transpose", split, perm=[0, 2, 1, 3])


def llama(path: Path, sizes: tuple[int, ...], told: str) -> Path:
    """Write a decoder of Llama's architecture; `told` is as on the command line."""
    layers, hidden, heads, of_keys, inner, vocabulary = sizes
    w, info, half, size = _Writer(), helper.make_tensor_value_info, TensorProto.FLOAT16, hidden // heads
    whole = "total" if told == "genai" else "past + tokens"
    inputs = [info("input_ids", TensorProto.INT64, ["batch", "tokens"])]
    if told != "nothing":
        inputs.append(info("attention_mask", TensorProto.INT64, ["batch", whole]))
    if told == "both":
        inputs.append(info("position_ids", TensorProto.INT64, ["batch", "tokens"]))
    outputs = [info("logits", half, ["batch", "tokens", vocabulary])]
    for layer in range(layers):
        for what in ("key", "value"):
            inputs.append(info(f"past_key_values.{layer}.{what}", half, ["batch", of_keys, "past", size]))
            outputs.append(info(f"present.{layer}.{what}", half, ["batch", of_keys, whole, size]))
    attention = _Attention(w, sizes, told)
    x = w.op("Gather", w.drawn(vocabulary, hidden), "input_ids")
    for layer in range(layers):
        normed = w.normed(x, hidden)
        parts = [w.op("MatMul", normed, w.drawn(hidden, n * size)) for n in (heads, of_keys, of_keys)]
        x = w.op("Add", x, w.op("MatMul", attention.attend(layer, parts), w.drawn(hidden, hidden)))
        normed = w.normed(x, hidden)
        gate, up = (w.op("MatMul", normed, w.drawn(hidden, inner)) for _ in range(2))
        gate = w.op("Mul", gate, w.op("Sigmoid", gate))
        x = w.op("Add", x, w.op("MatMul", w.op("Mul", gate, up), w.drawn(inner, hidden)))
    w.op("MatMul", w.normed(x, hidden), w.drawn(hidden, vocabulary), name="logits")
    graph = helper.make_graph(w.nodes, "llama", inputs, outputs, w.weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


if __name__ == "__main__":
    main()
