"""A decoder's step, or a run of its prompt, beside PyTorch with a static cache in a CUDA graph.

python -m tests.tuner.nvidia.generating MODEL.onnx [--tokens N...] [--room N] [--kernels]

For a machine with an NVIDIA GPU, where `install.sh` was run and PyTorch is. The model is one of
`benchmarks.decoders llama --exporter genai --precision fp16`; where its data is not beside it, weights are
drawn. PyTorch runs the same architecture in halves, of the sizes that the graph says, with products by
cuBLAS and attention by its own kernels; prompts also in singles, without TF32. All compute the logits of each
token, and return the last's.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx
import torch  # type: ignore[import-not-found, unused-ignore]
from benchmarks.forms import values
from benchmarks.running import first_served, normalised, ready
from torch.nn import functional  # type: ignore[import-not-found, unused-ignore]

from honed.cpu.session import Session
from honed.daemon.features.decoding import DecoderBucket, decoder_of
from honed.daemon.worker.step_inputs import StepSize
from honed.daemon.worker.steps import growth
from honed.machine.devices import select

_STEPS, _RUNS = 100, 20  # of a turn: steps of a token, and runs of prompts
_TURNS = 7


def main() -> None:
    """Print microseconds of a step by each, in turns, and their ratios."""
    parser = argparse.ArgumentParser(prog="python -m tests.tuner.nvidia.generating", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1], help="of a run: 1, 64, 128 or 256")
    parser.add_argument("--room", type=int, default=512)
    parser.add_argument("--kernels", action="store_true", help="print what each kernel takes, in us")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = _with_data(options.model, Path(folder))
        for tokens in options.tokens:
            _compare(path, DecoderBucket(tokens, options.room), kernels=options.kernels)


def _with_data(path: Path, folder: Path) -> Path:
    """Return a model's file with its data, which is drawn where it is missing."""
    model = onnx.load(path, load_external_data=False)
    outside = [t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    places = [{entry.key: entry.value for entry in tensor.external_data} for tensor in outside]
    if not outside or all((path.parent / place["location"]).exists() for place in places):
        return path
    rng = np.random.default_rng(0)
    for tensor in outside:
        kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        size = tensor.dims[-1] if len(tensor.dims) > 1 else 1
        made = rng.standard_normal(tensor.dims, np.float32) / np.sqrt(size)
        del tensor.external_data[:]
        tensor.data_location = onnx.TensorProto.DEFAULT
        tensor.raw_data = made.astype(kind).tobytes()
    onnx.save(model, folder / path.name)
    return folder / path.name


def _compare(path: Path, form: DecoderBucket, *, kernels: bool) -> None:
    known = decoder_of(Session(path, 1).interface, {})
    if known is None or not known.has_forms:
        raise SystemExit(f"{path} is no decoder that has forms")
    tokens, room = form
    before, device = room // 2, select(None)
    model = normalised(path, device.profile, known.shapes(form))
    state, given, _ = values(known, form, before)
    growing = growth(known.state_tensors(StepSize(1, tokens, 0)))
    kinds = {"halves": torch.half} if tokens == 1 else {"halves": torch.half, "singles": torch.float}
    beside = {name: TorchDecoder(_sizes(path), room, tokens, kind) for name, kind in kinds.items()}
    with ready(model, first_served(model, device.profile), device) as executor:
        executor.restore(growing, state)
        ways: dict[str, Callable[[], object]] = {
            "honed": lambda: executor.step(given, growing, before, tokens, ("logits",))
        }
        ways |= {name: partial(each.step, before) for name, each in beside.items()}
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(_TURNS):
            for name, way in ways.items():
                taken[name].append(_timed(way, _STEPS if tokens == 1 else _RUNS))
        print(f"{device.cl.name}, room for {room} tokens, {before} taken; medians of {_TURNS} turns, us")
        one = median(taken.pop("honed"))
        rate = f"{1e6 * tokens / one:.0f} tokens a second"
        print(f"honed, {tokens} at once: {one:.0f}, {rate}, in {executor.launches} launches")
        for name, times in taken.items():
            other = median(times)
            rate = f"{1e6 * tokens / other:.0f} tokens a second"
            print(f"PyTorch {torch.__version__}, {name}: {other:.0f}, {rate}; honed {other / one:.2f}")
        if kernels:
            zeros = {t.name: np.zeros(t.shape, t.dtype) for t in executor.model.inputs}
            for row in executor.profile(zeros | given).kernels:
                print(f"  {row.us:9.1f} {row.count:4d} {row.name} {row.schedule}")


def _timed(step: Callable[[], object], count: int) -> float:
    """Return the microseconds of a step, with its logits on the host, of `count`."""
    step()
    begun = time.perf_counter()
    for _ in range(count):
        step()
    return 1e6 * (time.perf_counter() - begun) / count


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of Llama's architecture."""

    layers: int
    hidden: int
    heads: int
    of_keys: int
    inner: int
    vocabulary: int


def _sizes(path: Path) -> Sizes:
    graph = onnx.load(path, load_external_data=False).graph
    attentions = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
    numbers = {one.name: one.i for one in attentions[0].attribute}
    shapes = [tuple(tensor.dims) for tensor in graph.initializer if len(tensor.dims) == 2]
    vocabulary = max(max(shape) for shape in shapes)
    hidden = next(min(shape) for shape in shapes if max(shape) == vocabulary)
    inner = max(max(s) for s in shapes if hidden in s and vocabulary not in s)
    heads, of_keys = numbers["num_heads"], numbers["kv_num_heads"]
    return Sizes(len(attentions), hidden, heads, of_keys, inner, vocabulary)


class TorchDecoder:
    """Llama's architecture with caches of fixed size; a step of `tokens` is a CUDA graph."""

    def __init__(self, sizes: Sizes, room: int, tokens: int = 1, kind: Any = torch.half) -> None:
        self._sizes, self._size, self._kind = sizes, sizes.hidden // sizes.heads, kind
        rows = sizes.heads + 2 * sizes.of_keys
        self._layers = [
            {
                "mixed": self._drawn(rows * self._size, sizes.hidden),
                "out": self._drawn(sizes.hidden, sizes.hidden),
                "gates": self._drawn(2 * sizes.inner, sizes.hidden),
                "down": self._drawn(sizes.hidden, sizes.inner),
                "keys": torch.zeros(1, sizes.of_keys, room, self._size, dtype=kind, device="cuda"),
                "values": torch.zeros(1, sizes.of_keys, room, self._size, dtype=kind, device="cuda"),
            }
            for _ in range(sizes.layers)
        ]
        self._embedded, self._head = (
            self._drawn(sizes.vocabulary, sizes.hidden),
            self._drawn(sizes.vocabulary, sizes.hidden),
        )
        self._ones = torch.ones(sizes.hidden, dtype=kind, device="cuda")
        angles = torch.outer(torch.arange(room), 1e4 ** -(torch.arange(0, self._size, 2) / self._size))
        both = torch.cat((angles, angles), dim=-1)
        self._turns = both.cos().to(kind).cuda(), both.sin().to(kind).cuda()
        self._columns, self._offsets = torch.arange(room, device="cuda"), torch.arange(tokens, device="cuda")
        self._token, self._at = (torch.zeros(tokens, dtype=torch.long, device="cuda") for _ in range(2))
        self._graph = self._captured()

    def step(self, before: int, token: int = 0) -> Any:
        """Run a step on equal tokens after so many others, and return the last's logits on the host."""
        torch.add(self._offsets, before, out=self._at)
        self._token.fill_(token)
        self._graph.replay()
        return self._logits[-1:].cpu()

    def _captured(self) -> Any:
        with torch.no_grad():
            aside = torch.cuda.Stream()
            with torch.cuda.stream(aside):
                for _ in range(3):
                    self._run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._logits = self._run()
        return graph

    def _run(self) -> Any:
        sizes, heads = self._sizes, (self._sizes.heads, self._sizes.of_keys, self._sizes.of_keys)
        tokens = len(self._offsets)
        cos, sin = (turn.index_select(0, self._at) for turn in self._turns)
        seen = (self._columns <= self._at[:, None])[None, None]
        x = functional.embedding(self._token, self._embedded)
        for layer in self._layers:
            mixed = functional.linear(self._normed(x), layer["mixed"]).view(1, tokens, sum(heads), self._size)
            query, key, value = mixed.transpose(1, 2).split(heads, dim=1)
            layer["keys"].index_copy_(2, self._at, self._turned(key, cos, sin))
            layer["values"].index_copy_(2, self._at, value)
            attended = functional.scaled_dot_product_attention(
                self._turned(query, cos, sin), layer["keys"], layer["values"], attn_mask=seen, enable_gqa=True
            )
            x = x + functional.linear(attended.transpose(1, 2).reshape(tokens, sizes.hidden), layer["out"])
            gate, up = functional.linear(self._normed(x), layer["gates"]).split(sizes.inner, dim=-1)
            x = x + functional.linear(functional.silu(gate) * up, layer["down"])
        return functional.linear(self._normed(x), self._head)

    def _normed(self, x: Any) -> Any:
        return functional.rms_norm(x, (self._sizes.hidden,), self._ones, 1e-5)

    def _turned(self, x: Any, cos: Any, sin: Any) -> Any:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    def _drawn(self, *shape: int) -> Any:
        return (torch.randn(shape, device="cuda") / shape[-1] ** 0.5).to(self._kind)


if __name__ == "__main__":
    main()
