"""Implements `hone infer`, which runs a model once, and `hone bench`, which times it as an app sees it."""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from honed.machine.files import replacing
from honed.protocol.errors import InvalidArgument, NotFound, PermissionDenied
from honed.protocol.methods import METRICS, MODEL_METADATA, MODEL_SHOW, MODEL_STATISTICS
from honed.protocol.params import ModelParams
from honed.protocol.results import InferenceStatistics, Tallied
from honed.protocol.values import TensorMetadata, engine_name
from honed.runtime.calling.calls import InferenceResponse
from honed.runtime.client import Client, RequestSequence
from honed.runtime.dtypes import STRING, from_datatype, is_text
from honed.tool.output import Console, Output, Reporter, fields, line, shape_text, table
from honed.tool.parser import Parser, UsageError, count, define, parse_named_file, patience, unique

Array = NDArray[Any]
Tensors = Sequence[TensorMetadata]
_WORD = "honed"  # Value of made-up text
_TOKENS = ("input_ids", "decoder_input_ids")
_MADE_UP = 10  # Exclusive maximum of made-up tokens
_LABELS = {  # What the table of hone bench calls its figures
    "median_ms": "median",
    "mean_ms": "mean",
    "std_ms": "std",
    "p95_ms": "95 % within",
    "min_ms": "fastest",
    "max_ms": "slowest",
    "device_ms": "in the engine",
    "queue_ms": "in the queue",
}
_WARM_UP = 3  # Inferences before the clock starts, while caches fill and the device clocks up


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySummary:
    """The range of an array's finite values, None if there are none, and the number of others."""

    dtype: str
    shape: tuple[int, ...]
    min: float | None
    max: float | None
    not_finite: int


def collect(
    inputs: Tensors, files: Mapping[str, Path], *, model: str, random: bool, seed: int
) -> dict[str, Array]:
    """Return an array for every input: from its file, or made up with `random`.

    Raises UsageError for unknown and missing names, and the errors of `load`.
    """
    wanted = {tensor.name: tensor for tensor in inputs}
    for name in files:
        if name not in wanted:
            raise UsageError(f"{model} has no input {name!r}; its inputs are {describe(inputs)}")
    missing = [tensor for name, tensor in wanted.items() if name not in files]
    if missing and not random:
        raise UsageError(
            f"{model} {'also ' if files else ''}needs {describe(missing)}; "
            "give each with --input NAME=FILE.npy, or --random to have them made up"
        )
    generator = np.random.default_rng(seed)
    return {
        name: load(files[name], tensor) if name in files else generate_values(tensor, generator)
        for name, tensor in wanted.items()
    }


def describe(tensors: Tensors) -> str:
    """Return the names and types of tensors in one line."""
    return ", ".join(f"{t.name} ({_type(t)})" for t in tensors) or "none"


def load(file: Path, tensor: TensorMetadata) -> Array:
    """Return the array of a .npy file, never unpickled.

    Raises NotFound or InvalidArgument unless it can be read and has the tensor's type and shape.
    """
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        raise NotFound(f"there is no file {file} for input {tensor.name}; check the path") from error
    except OSError as error:
        raise InvalidArgument(f"{file} cannot be read ({error.strerror}); check it") from error
    except (ValueError, EOFError) as error:
        raise InvalidArgument(f"{file} is not a .npy file of numbers; write it with numpy.save") from error
    if not isinstance(array, np.ndarray):
        array.close()
        raise InvalidArgument(f"{file} holds several arrays (.npz); save each one with numpy.save")
    expected = from_datatype(tensor.datatype).name
    found = STRING.name if is_text(array) else array.dtype.name
    if found != expected or not _takes(tensor.shape, array.shape):
        raise InvalidArgument(
            f"{file} is {shape_text(found, array.shape)} and input {tensor.name} is "
            f"{_type(tensor)}; convert it with astype and reshape"
        )
    return array


def _takes(shape: Sequence[int], actual: Sequence[int]) -> bool:
    """Return whether a tensor of this shape, in which -1 is any size, accepts an array of shape `actual`."""
    return len(shape) == len(actual) and all(size in (-1, n) for size, n in zip(shape, actual, strict=True))


def generate_values(tensor: TensorMetadata, generator: np.random.Generator) -> Array:
    """Return made-up values: normal floats, a word for text, 0 or 1 for the rest, seldom out of range.

    Dynamic sizes are 1.
    """
    kind = from_datatype(tensor.datatype).numpy
    shape = tuple(1 if size < 0 else size for size in tensor.shape)
    if tensor.datatype == STRING.datatype:
        return np.full(shape, _WORD, object)
    if kind.kind == "f":
        return generator.standard_normal(shape).astype(kind)
    return generator.integers(0, 2, shape).astype(kind)


def save(folder: Path, arrays: Mapping[str, Array]) -> dict[str, Path]:
    """Write each array to a .npy file in `folder`, whole or not at all; create the folder if need be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except PermissionError as error:
        raise PermissionDenied(f"folder {folder} cannot be made; check who owns the one above it") from error
    except OSError as error:
        raise InvalidArgument(f"folder {folder} cannot be made ({error.strerror}); name another") from error
    files = {name: folder / file for name, file in file_names(list(arrays)).items()}
    for name, file in files.items():
        with replacing(file) as stream:
            array = arrays[name]
            np.save(stream, array.astype(str) if is_text(array) else array, allow_pickle=False)
    return files


def file_names(names: Sequence[str]) -> dict[str, str]:
    """Return a file name for each output, all different; characters unfit for file names become "_"."""
    found: dict[str, str] = {}
    for name in names:
        stem = re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".")[:200] or "output"
        taken = {file.casefold() for file in found.values()}
        candidates = (f"{stem}.npy", *(f"{stem}_{i}.npy" for i in range(1, len(names) + 1)))
        found[name] = next(file for file in candidates if file.casefold() not in taken)
    return found


def summary(array: Array) -> ArraySummary:
    """Return an array's type, shape and range, which are shown in a line."""
    if is_text(array):
        return ArraySummary(dtype=STRING.name, shape=array.shape, min=None, max=None, not_finite=0)
    finite = np.isfinite(array)
    values = array[finite]
    return ArraySummary(
        dtype=array.dtype.name,
        shape=array.shape,
        min=values.min().item() if values.size else None,
        max=values.max().item() if values.size else None,
        not_finite=int(array.size - values.size),
    )


def _type(tensor: TensorMetadata) -> str:
    return shape_text(from_datatype(tensor.datatype).name, tensor.shape)


def define_infer(infer: Parser) -> None:
    """Define the arguments of `hone infer`."""
    define(
        infer,
        _infer,
        details="Prints a summary of each output and writes it to OUTPUT-DIR/<output>.npy.",
        examples="""\
            hone infer lightglue --random
            hone infer mobilenet --input image=cat.npy --output-dir out
            hone infer mobilenet --input image=cat.npy --output-dir out --json""",
    )
    add_input_options(infer)
    infer.add_argument(
        "--output-dir", metavar="D", type=Path, help="folder for the outputs (default: they are not kept)"
    )
    infer.add_argument(
        "--timeout",
        metavar="S",
        type=patience,
        default=60.0,
        help="seconds to wait (default 60); inf: no limit",
    )


def add_input_options(parser: Parser) -> None:
    """Add the model and the options for its inputs, as infer and bench accept them."""
    parser.add_argument("model", metavar="M", help="name of the model")
    parser.add_argument(
        "--input",
        action="append",
        type=parse_named_file,
        default=[],
        metavar="NAME=FILE.npy",
        help="an input; give one for each",
    )
    parser.add_argument("--random", action="store_true", help="make up the inputs that are not given")
    parser.add_argument("--seed", type=int, default=0, help="of made-up inputs (default 0)")


def inputs(client: Client, arguments: argparse.Namespace, *, random: bool) -> dict[str, Array]:
    """Return an array for every input of the model: from its file, or made up with `random`.

    Made-up inputs have the shapes for which the model was added, where its file leaves sizes open.
    """
    model = ModelParams(name=arguments.model)
    wanted, files = client.ask(MODEL_METADATA, model).inputs, unique("--input", arguments.input)
    if random and any(size < 0 for each in wanted for size in each.shape):
        added = {
            name: shape for name, shape in client.ask(MODEL_SHOW, model).shapes.items() if name not in files
        }
        wanted = tuple(replace(each, shape=added.get(each.name, each.shape)) for each in wanted)
    return collect(
        wanted,
        files,
        model=arguments.model,
        random=random,
        seed=arguments.seed,
    )


def _infer(arguments: argparse.Namespace, output: Output) -> None:
    with Client(arguments.socket) as client:
        values = inputs(client, arguments, random=arguments.random)
        answer = client.infer_response(arguments.model, values, timeout=arguments.timeout)
    outputs = answer.outputs
    files = save(arguments.output_dir, outputs) if arguments.output_dir else {}
    found = {name: summary(array) for name, array in outputs.items()}
    document = {
        "model": arguments.model,
        "engine": answer.engine,
        "engine_name": answer.engine_name,
        "device": answer.device,
        "compute_us": answer.compute_us,
        "outputs": tuple(
            {"name": name, **asdict(summary), "file": str(files[name]) if files else None}
            for name, summary in found.items()
        ),
    }
    output.emit(document, lambda console: _print(console, answer, found, files))


def _print(
    console: Console,
    answer: InferenceResponse,
    outputs: Mapping[str, ArraySummary],
    files: Mapping[str, Path],
) -> None:
    rows = [
        (name, shape_text(each.dtype, each.shape), _number(each.min), _number(each.max))
        for name, each in outputs.items()
    ]
    console.print(table(("output", "type", ">min", ">max"), rows))
    for name, each in outputs.items():
        if each.not_finite:
            line(console, f"{name} has {each.not_finite} elements that are NaN or infinite.")
    for name, file in files.items():
        line(console, f"{name} is in {file}")
    on = f" on {answer.device}" if answer.device else ""
    line(console, f"answered by the engine {answer.engine_name}{on} in {answer.compute_us / 1000:.3f} ms")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def define_bench(bench: Parser) -> None:
    """Define the arguments of `hone bench`."""
    define(
        bench,
        _bench,
        details="Inputs that are not given are made up. Runs one inference after the other. With --tokens, "
        "the likeliest token is the next one's input, in a sequence of the service, or in several at once; "
        "inputs beside the tokens are those of --input.",
        examples="hone bench lightglue\nhone bench lightglue -n 200 --json\n"
        "hone bench llama --tokens 128 --prompt 64",
    )
    add_input_options(bench)
    bench.add_argument("-n", "--runs", metavar="N", type=count, default=50, help="inferences (default 50)")
    bench.add_argument("--tokens", metavar="N", type=count, help="tokens that a decoder generates, greedily")
    bench.add_argument(
        "--prompt", metavar="N", type=count, default=64, help="tokens of its made-up prompt (default 64)"
    )
    bench.add_argument(
        "--sequences", metavar="N", type=count, default=1, help="sequences that generate at once (default 1)"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """The result of generating: times of the first token and of each other, and the size of the state.

    Times are medians over all sequences, `tokens_per_second` is their sum. `state_bytes` are of all the
    service's sequences at the end. `engines` counts each engine's answers during the run, those to other
    clients included.
    """

    model: str
    prompt: int
    tokens: int
    sequences: int
    first_ms: float
    median_ms: float | None
    tokens_per_second: float | None
    state_bytes: int
    engines: dict[str, int]


def _generate(client: Client, arguments: argparse.Namespace) -> Generated:
    """Generate the likeliest tokens in sequences, after made-up prompts."""
    model, count = arguments.model, arguments.sequences
    inputs = client.ask(MODEL_METADATA, ModelParams(name=model)).inputs
    tokens = next((t for t in inputs if t.name in _TOKENS), None)
    if tokens is None or not client.show(model)["sequence_state"]:
        raise UsageError(f"{model} is no decoder: it takes no {_TOKENS[0]}, or keeps no state")
    files = {name: load(file, t) for t in inputs for name, file in arguments.input if name == t.name}
    kind, generator = from_datatype(tokens.datatype).numpy, np.random.default_rng(arguments.seed)
    prompts = [generator.integers(1, _MADE_UP, (1, arguments.prompt)).astype(kind) for _ in range(count)]
    answered = _answers(client, model)

    def step(sequence: RequestSequence, token_ids: Array, more: Mapping[str, Any]) -> tuple[float, Array]:
        """Return the seconds of a request, and the likeliest token after it."""
        start = time.perf_counter()
        logits = next(iter(sequence.infer({tokens.name: token_ids, **more}, last_token=True).values()))
        seconds = time.perf_counter() - start
        # Singles, since NumPy takes thrice as long over halves
        return seconds, logits[:, -1:].astype(np.float32).argmax(-1).astype(kind)

    with Reporter(f"bench {model}") as reporter, ExitStack() as opened:
        clients = [opened.enter_context(Client(arguments.socket)) for _ in prompts]
        sequences = [opened.enter_context(each.sequence(model)) for each in clients]
        pool = opened.enter_context(ThreadPoolExecutor(count))

        def generate(sequence: RequestSequence, token_ids: Array) -> list[float]:
            """Return the seconds of each token after the first."""
            times: list[float] = []
            for done in range(1, arguments.tokens):
                if sequence is sequences[0]:
                    reporter.update("run", done / arguments.tokens, f"{arguments.tokens} tokens")
                seconds, token_ids = step(sequence, token_ids, {})
                times.append(seconds)
            return times

        first = [*pool.map(partial(step, more=files), sequences, prompts)]
        later = [each for each in pool.map(generate, sequences, [token for _, token in first]) if each]
        kept = client.status()["sequences"]["bytes"]
    answers = _answers(client, model)
    return Generated(
        model=model,
        prompt=arguments.prompt,
        tokens=arguments.tokens,
        sequences=count,
        first_ms=1e3 * float(np.median([seconds for seconds, _ in first])),
        median_ms=1e3 * float(np.median(later)) if later else None,
        tokens_per_second=sum(len(seconds) / sum(seconds) for seconds in later) if later else None,
        state_bytes=kept,
        engines=dict(answers - answered),
    )


def _print_generated(console: Console, done: Generated) -> None:
    where = "a sequence" if done.sequences == 1 else f"each of {done.sequences} sequences"
    line(console, f"{done.model}, {done.tokens} tokens after a prompt of {done.prompt}, in {where}:")
    rows = [("first token", f"{done.first_ms:9.3f} ms")]
    if done.median_ms is not None:
        rows.append(("each other, median", f"{done.median_ms:9.3f} ms"))
        rows.append(("tokens a second", f"{done.tokens_per_second:9.1f}"))
    rows.append(("state", f"{done.state_bytes / 1024:9.0f} KiB"))
    console.print(fields([*rows, _answered_row(done.engines)]))


def _bench(arguments: argparse.Namespace, output: Output) -> None:
    with Client(arguments.socket) as client:
        if arguments.tokens:
            generated = _generate(client, arguments)
            output.emit(generated, lambda console: _print_generated(console, generated))
            return
        values = inputs(client, arguments, random=True)
        for _ in range(_WARM_UP):
            client.infer(arguments.model, values)
        before, answered = _inference_statistics(client, arguments.model), _answers(client, arguments.model)
        times = _time_runs(client, arguments.model, values, arguments.runs)
        after, answers = _inference_statistics(client, arguments.model), _answers(client, arguments.model)
    figures = {
        "median_ms": float(np.median(times)),
        "mean_ms": float(times.mean()),
        "std_ms": float(times.std(ddof=1)) if len(times) > 1 else 0.0,  # Of the sample
        "p95_ms": float(np.percentile(times, 95)),
        "min_ms": float(times.min()),
        "max_ms": float(times.max()),
        "device_ms": _mean_between(before.compute_infer, after.compute_infer),
        "queue_ms": _mean_between(before.queue, after.queue),
    }
    engines = dict(answers - answered)  # Those to other clients included
    document = {"model": arguments.model, "runs": len(times), **figures, "engines": engines}

    def show(console: Console) -> None:
        line(console, f"{arguments.model}, {len(times)} inferences through the socket, in milliseconds:")
        rows = [(_LABELS[name], f"{ms:9.3f}") for name, ms in figures.items() if ms is not None]
        console.print(fields([*rows, _answered_row(engines)]))

    output.emit(document, show)


def _time_runs(client: Client, model: str, values: Mapping[str, Any], runs: int) -> NDArray[np.float64]:
    """Return the milliseconds of each inference."""
    times = []
    with Reporter(f"bench {model}") as reporter:
        for run in range(runs):
            reporter.update("run", run / runs, f"{runs} inferences")
            start = time.perf_counter()
            client.infer(model, values)
            times.append(time.perf_counter() - start)
    return np.asarray(times) * 1e3


def _mean_between(before: Tallied, after: Tallied) -> float | None:
    """Return the mean time between two readings, in ms; None if nothing was counted.

    Requests of other clients count, too.
    """
    count = after.count - before.count
    return (after.ns - before.ns) / count / 1e6 if count > 0 else None


def _inference_statistics(client: Client, model: str) -> InferenceStatistics:
    return client.ask(MODEL_STATISTICS, ModelParams(name=model)).model_stats[0].inference_stats


def _answers(client: Client, model: str) -> Counter[str]:
    """Return the number of answers of each engine for a model."""
    return Counter(next((each.engines for each in client.ask(METRICS).models if each.name == model), {}))


def _answered_row(engines: Mapping[str, int]) -> tuple[str, str]:
    counts = (f"{engine_name(kind)} {count}" for kind, count in sorted(engines.items()))
    return "answered by", ", ".join(counts)
