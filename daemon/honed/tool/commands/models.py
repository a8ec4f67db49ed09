"""Implements status, list, show, remove, set, metrics, rollback, pin and unpin."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.daemon.observe.faults import SERVICE, AttributedFault, attribute_faults, kernel_log, ours
from honed.machine.profile import measured_while_busy
from honed.protocol import strict
from honed.protocol.methods import (
    METRICS,
    MODEL_HISTORY,
    MODEL_PIN,
    MODEL_ROLLBACK,
    MODEL_SET,
    MODEL_SHOW,
    MODEL_STATISTICS,
    REPOSITORY_INDEX,
    SERVER_STATUS,
)
from honed.protocol.params import (
    HintFigures,
    HistoryParams,
    ModelParams,
    PinParams,
    RollbackParams,
    SetParams,
)
from honed.protocol.results import (
    AppUse,
    IndexedModel,
    ModelSettings,
    ModelShown,
    ServedRequests,
    VersionPinned,
)
from honed.protocol.service import Status
from honed.protocol.values import ComparedOutput, DevicePeaks, OptimisationCheck, engine_name
from honed.runtime.client import Client
from honed.runtime.engines import HIGHEST
from honed.tool.output import (
    Console,
    Output,
    bytes_text,
    clean,
    fields,
    figure_text,
    line,
    moment_text,
    print_json,
    seconds_text,
    shape_text,
    table,
)
from honed.tool.parser import Parser, UsageError, define, shape, unique
from honed.tool.view.tables import (
    NO_MODELS,
    VARIANT_HEADINGS,
    device_text,
    devices_table,
    engine_text,
    in_parts,
    lease_rows,
    placement_text,
    signals,
    variant_rows,
    worker_text,
)

from .tasks import milliseconds

_DELAY_MS = 2.0  # Delay of batches, if none is set


def define_status(status: Parser) -> None:
    """Define the arguments of `hone status`."""
    define(status, _status, examples="hone status\nhone status --json")


def define_list(models: Parser) -> None:
    """Define the arguments of `hone list`."""
    define(models, _list, examples="hone list\nhone list --json")


def define_show(show: Parser) -> None:
    """Define the arguments of `hone show`."""
    define(
        show,
        _show,
        details=(
            "With --graph: write what it computes as a graph, in DOT; Graphviz draws it as .svg, .png or "
            ".pdf. Each box is one fused function, with the time of its kernels, its operators, the "
            "passes over the graph that made them, and which results are views. For those who may change "
            "models."
        ),
        examples="""\
            hone show lightglue
            hone show lightglue --json
            hone show lightglue --graph -o lightglue.svg""",
    )
    _add_model(show)
    show.add_argument("--graph", action="store_true", help="write its compiled graph to a file")
    show.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help="the .dot file to write, or .svg, .png or .pdf, with --graph",
    )


def define_remove(remove: Parser) -> None:
    """Define the arguments of `hone remove`."""
    define(remove, _remove, examples="hone remove lightglue")
    _add_model(remove)


def _status(arguments: argparse.Namespace, output: Output) -> None:
    with Client(arguments.socket) as client:
        status = client.ask(SERVER_STATUS)
        service = ours(client.ask(METRICS), status)
    faults = attribute_faults(kernel_log(), service)
    document = {**strict.to_plain(status), "kernel_faults": faults}
    output.emit(document, lambda console: _print_status(console, status, faults))


def _print_status(console: Console, status: Status, faults: Sequence[AttributedFault]) -> None:
    worker, places, device = status.worker, status.places, status.device
    models = ", ".join(f"{n} {state.lower()}" for state, n in status.models.items() if n) or "none"
    rows = [
        ("service", f"{status.name} {status.version}, process {status.pid}, "
                    f"up {seconds_text(status.uptime_seconds)}"),
        ("socket", places.socket),
        ("models in", places.state_dir),
        ("device", device_text(device)),
        ("worker", worker_text(worker)),
        ("models", models),
        ("requests", f"{status.queue.waiting} waiting, {status.queue.running} running"),
        ("connections", str(status.connections)),
        *lease_rows(status.lease, status.idle),
        ("tuner", status.tuner.text),
    ]  # fmt: skip
    if status.peaks:
        rows.insert(4, ("peaks", peaks_text(status.peaks)))
    if all(each.engine != "cpu" for each in status.devices):
        rows.append(
            ("CPU engine", "not installed; 'apt install honed-cpu' has every ONNX model served at once")
        )
    rows += [
        ("adding", f"{job.model_name}: {job.fraction:.0%} {job.text or job.stage}") for job in status.jobs
    ]
    rows += [("damaged", name) for name in status.damaged]
    rows += [("set aside", text) for text in set_aside(status.hints)]
    if faults:
        ours = sum(fault.whose == SERVICE for fault in faults)
        said = (
            f"{len(faults)} in the kernel log since the machine started, {ours} of a worker of this service"
        )
        rows.append(("GPU faults", f"{said}; 'hone faults' says whose"))
    console.print(fields(rows))
    if len(status.devices) > 1:
        console.print()
        console.print(devices_table(status.devices))
    console.print()
    console.print(signals(status.idle))


def set_aside(hints: Mapping[str, HintFigures]) -> list[str]:
    """Return sentences on sources of a hub that are set aside because their records failed."""
    return [
        f"the hub's records by {name}: {each.failed} of {each.tried} failed here, so no more are tried"
        for name, each in hints.items()
        if each.aside
    ]


def peaks_text(peaks: DevicePeaks) -> str:
    """Return the measured peaks in one line, marked if the machine was too busy to measure them well."""
    fp16 = f"{figure_text(peaks.fp16_gflops)} GFLOP/s fp16, " if peaks.fp16_gflops else ""
    busy = " (measured while the machine was busy)" if measured_while_busy(peaks) else ""
    return (
        f"{figure_text(peaks.fp32_gflops)} GFLOP/s fp32, {fp16}"
        f"{figure_text(peaks.bandwidth_gbs, 1)} GB/s, {peaks.launch_us:.1f} us a launch{busy}"
    )


@dataclass(slots=True, kw_only=True, eq=False)
class ListedModel(IndexedModel):
    """A row of `hone list`.

    `inferences` are those since the service started, `mean_ms` is the mean time of one on the `device` that
    serves it. `engine` is the protocol's word for `engine_name`.
    """

    inferences: int
    mean_ms: float | None


def _list(arguments: argparse.Namespace, output: Output) -> None:
    with Client(arguments.socket) as client:
        models = client.ask(REPOSITORY_INDEX).models
        counted = client.ask(MODEL_STATISTICS).model_stats
    statistics = {entry.name: entry for entry in counted}
    listed = tuple(
        strict.copy_fields(
            ListedModel,
            model,
            inferences=statistics[model.name].inference_count if model.name in statistics else 0,
            mean_ms=_mean_ms(statistics.get(model.name)),
        )
        for model in models
    )
    output.emit({"models": listed}, lambda console: _print_list(console, listed))


def _mean_ms(entry: ServedRequests | None) -> float | None:
    """Return the mean time of an inference on the device, in milliseconds; None if there was none."""
    spent = entry.inference_stats.compute_infer if entry is not None else None
    return spent.ns / spent.count / 1e6 if spent is not None and spent.count else None


def _print_list(console: Console, models: Sequence[ListedModel]) -> None:
    if not models:
        line(console, NO_MODELS)
        return
    owners = any(model.owner for model in models)
    rows = [
        (
            model.name,
            *((model.owner or "-",) if owners else ()),
            model.state.lower(),
            engine_text(model.engine, model.pinned_engine, model.variants),
            model.device,
            str(model.inferences),
            f"{model.mean_ms:.2f}" if model.mean_ms is not None else "-",
            # There is room for the first clause; 'hone show' has all of it.
            model.reason
            or "; ".join(map(_app_text, model.apps[:1]))
            or (model.engine_why.partition(";")[0] if model.engine == "cpu" else ""),
        )
        for model in models
    ]
    owner = ("owner",) * owners
    headings = ("model", *owner, "state", "engine", "device", ">inferences", ">mean ms", "reason")
    console.print(table(headings, rows))


def _remove(arguments: argparse.Namespace, output: Output) -> None:
    with Client(arguments.socket) as client:
        client.remove(arguments.model)
    output.say({"removed": arguments.model}, f"{arguments.model} is removed.")


def _show(arguments: argparse.Namespace, output: Output) -> None:
    if arguments.graph:
        from honed.tool.view.graph import check_path, show_graph

        show_graph(arguments.socket, arguments.model, check_path(arguments.output), output)
        return
    if arguments.output is not None:
        raise UsageError("-o names the file that --graph writes; give both or none")
    with Client(arguments.socket) as client:
        model = client.ask(MODEL_SHOW, ModelParams(name=arguments.model))
    output.emit(model, lambda console: _print_model(console, model))


def _print_model(console: Console, model: ModelShown) -> None:
    source = model.source
    state = model.state.lower() + (f": {model.reason}" if model.reason else "")
    producer = f", by {source.producer}" if source.producer else ""
    shapes = "".join(f", {name} {list(shape)}" for name, shape in model.shapes.items())
    console.print(fields([
        ("model", f"{model.name} ({state})"),
        ("source", f"{source.filename}, opset {source.opset}{producer}"),
        ("its sha256", source.sha256),
        ("file sha256", model.sha256),
        ("added", moment_text(model.added)),
        ("asked for", f"precision {model.precision}{shapes}"),
        ("computes in", source.precision),
        *([("", clean(source.choice["why"]))] if source.choice is not None else []),
        ("served by", placement_text(model.placement)),
        *(("in an app" if n == 0 else "", _app_text(use)) for n, use in enumerate(model.apps)),
        *(_compilation_rows(model) if model.compiler else [("compiled form", "none")]),
        *in_parts(model.parts),
        *_preconditions(model),
        *_state_rows(model),
        *([("set", describe_settings(model.settings))] if model.settings != ModelSettings() else []),
        *_optimisation_rows(model.optimisation, on_cpu=model.placement.engine == "cpu"),
        *(("note", note) for note in model.notes),
    ]))  # fmt: skip
    console.print()
    tensors = [("in", t) for t in model.inputs] + [("out", t) for t in model.outputs]
    rows = [(kind, t.name, shape_text(t.datatype, t.shape)) for kind, t in tensors]
    console.print(table(("", "tensor", "type"), rows))
    if model.variants:
        console.print()
        forms = [cells for _, cells in variant_rows(model.variants)]
        console.print(table(VARIANT_HEADINGS, forms))
    if not model.kernels:
        return
    console.print()
    kernels = [
        (each.name, str(each.launches), _sizes(each.grid), _sizes(each.block), each.schedule)
        for each in model.kernels
    ]
    console.print(table(("kernel", ">launches", ">groups", ">items", "schedule"), kernels))


def _sizes(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))


def _compilation_rows(model: ModelShown) -> list[tuple[str, str]]:
    """Return rows on the compiled model: device, compiler, size, steps and verification."""
    device, kernels = model.device, sum(kernel.launches > 0 for kernel in model.kernels)
    return [
        ("compiled for", f"{device.name} ({device.platform}), driver {device.driver_version}"),
        ("compiled by", ", ".join(f"{name} {version}" for name, version in model.compiler.items())),
        ("size", f"file {bytes_text(model.bytes)}; on the device constants "
                 f"{bytes_text(model.constant_bytes)}, scratch {bytes_text(model.arena_bytes)}"),
        ("steps", f"{model.launches} launches of {kernels} kernels, "
                  f"{model.copies} copies, {model.host_calls} calls of partitions"),
        *_preparation_rows(model),
        *_proof(model),
    ]  # fmt: skip


def _app_text(use: AppUse) -> str:
    """Return a sentence on an app that runs the model by itself: its times, and its routed runs."""
    shapes = ", ".join(_sizes(shape) or "scalar" for shape in use.shapes.values())
    own = milliseconds(use.own_us) if use.own_us else "?"
    form = f"compiled {milliseconds(use.compiled_us)}" if use.compiled_us else "no compiled form"
    routed = f"{use.routed:.0%} of its runs routed" + (f": {clean(use.why)}" if use.why else "")
    return f"{clean(use.app)} ({use.pid}), {shapes}: own {own}, {form}; {routed}"


def _preconditions(model: ModelShown) -> list[tuple[str, str]]:
    """Return rows on the values that the compiled form serves, and on the requests with others."""
    if not model.preconditions:
        return []
    rows = [
        ("serves requests" if not n else "", each) for n, each in enumerate(map(clean, model.preconditions))
    ]
    had = f"{model.broke_preconditions} with other values, since the service started"
    return [*rows, ("to ONNX Runtime", had)]


def _state_rows(model: ModelShown) -> list[tuple[str, str]]:
    """Return rows on the state that the service keeps between requests of a sequence."""
    pairs = ", ".join(f"{clean(output)} to {clean(given)}" for output, given in model.sequence_state.items())
    forms = [("", clean(model.forms))] if model.forms else []
    return [("in sequences", f"state is kept: {pairs}"), *forms] if pairs else []


def _optimisation_rows(check: OptimisationCheck | None, *, on_cpu: bool) -> list[tuple[str, str]]:
    """Return rows on ONNX Runtime's optimisations in the CPU engine: the level checked, and a run's time."""
    if check is None:
        said = "runs it without optimisations until they are checked"
        return [("ONNX Runtime", said)] if on_cpu else []
    if not check.checked:
        verdict = f"runs it without optimisations, which are not checked, because {clean(check.why)}"
    elif check.level == HIGHEST:
        verdict = f"its optimised answers are right: error {check.error or 0.0:.2g} of the largest value"
    else:
        verdict = f"optimises no further than level {check.level}: {clean(check.why)}"
    rows = [("ONNX Runtime", f"{verdict} (checked in {check.seconds:.1f} s)" if check.checked else verdict)]
    return [*rows, ("", f"a run takes {check.session}")] if check.session is not None else rows


def _preparation_rows(model: ModelShown) -> list[tuple[str, str]]:
    """Return a row on what is computed from constants when the model is loaded; none if nothing is."""
    if not model.prepared_bytes:
        return []
    launches = sum(kernel.prepared for kernel in model.kernels)
    kept = bytes_text(model.prepared_bytes)
    of = f"{launches} launches of {sum(kernel.prepared > 0 for kernel in model.kernels)} kernels"
    return [("prepared", f"once, when it is loaded: {of}, {kept} kept")]


def _proof(model: ModelShown) -> list[tuple[str, str]]:
    """Return rows on how the compiled model was verified, when compiled and when loaded here."""
    proof, checked = model.proof, model.checked
    rows = []
    if proof is None:
        rows.append(("proof", "none: the file carries no reference outputs"))
    else:
        where = f" on {proof.device}" if proof.device else ", not run when it was compiled"
        rows.append(("proof", f"{proof.probes} inputs against {proof.reference}{where}"))
        rows += [("", _comparison_text(output)) for output in proof.outputs]
    if checked is not None:
        rows.append(("checked", f"again when it was loaded on {checked.device}"))
        rows += [("", _comparison_text(output)) for output in checked.outputs]
    return rows


def _comparison_text(entry: ComparedOutput) -> str:
    error = "not measured" if entry.error is None else f"error {entry.error:.2g} of the largest value"
    covered = "" if entry.covered is None else f", {entry.covered:.0%} of it covered"
    return f"{clean(entry.name)}: {error}, allowed {entry.tolerance:.2g}{covered}"


def define_set(parser: Parser) -> None:
    """Define the arguments of `hone set`."""
    define(
        parser,
        _set,
        details=(
            "With --batch, requests that differ only in their first size run as one: each waits for "
            "others until the batch is full, or --delay is over. The file must leave the first size of all "
            "inputs and outputs open, and the service tries batches out first. With --warm-up the model runs "
            "on zeros when it is loaded, before it serves."
        ),
        examples=(
            "hone set embedder --batch 8 --delay 2\nhone set embedder --batch 0\n"
            "hone set detector --warm-up 3 --shape images=1,3,640,640"
        ),
    )
    parser.add_argument("model", metavar="M", help="the model's name")
    parser.add_argument("--batch", metavar="N", type=int, help="run up to N rows together; 0: none")
    parser.add_argument(
        "--delay",
        metavar="MS",
        type=float,
        help=f"milliseconds that a request waits ({_DELAY_MS:g})",
    )
    parser.add_argument("--warm-up", metavar="N", type=int, help="runs before it serves; 0: none")
    parser.add_argument(
        "--shape",
        metavar="IN=1,3,224,224",
        action="append",
        type=shape,
        help="the shape in which to warm up an input whose sizes the model leaves open",
    )


def _set(arguments: argparse.Namespace, output: Output) -> None:
    given = (arguments.batch, arguments.delay, arguments.warm_up, arguments.shape)
    if all(each is None for each in given):
        raise UsageError("give --batch, --delay, --warm-up or --shape")
    delay = _DELAY_MS if arguments.delay is None and arguments.batch else arguments.delay
    params = SetParams(
        name=arguments.model,
        max_batch=arguments.batch,
        batch_delay_us=None if delay is None else round(delay * 1000),
        warm_up=arguments.warm_up,
        warm_up_shapes=unique("--shape", arguments.shape) if arguments.shape else None,
    )
    with Client(arguments.socket) as client:
        result = client.ask(MODEL_SET, params, timeout=None)
    _tell(arguments, output, describe_settings(result), **strict.to_plain(result))


def describe_settings(settings: ModelSettings) -> str:
    """Return a model's settings in words."""
    parts = []
    if settings.max_batch:
        delay = settings.batch_delay_us / 1000
        parts.append(f"up to {settings.max_batch} rows run together, after {delay:g} ms at most")
    if settings.warm_up:
        parts.append(f"{settings.warm_up} runs warm it up")
    return ", ".join(parts) or "each request runs by itself, nothing warms it up"


def define_metrics(metrics: Parser) -> None:
    """Define the arguments of `hone metrics`."""
    define(
        metrics,
        _metrics,
        details="docs/metrics.md says what each means. With --json it is one document with more detail.",
        examples="hone metrics\nhone metrics --json",
    )


def _metrics(arguments: argparse.Namespace, output: Output) -> None:
    with Client(arguments.socket) as client:
        if output.json:
            print_json(client.ask(METRICS))
        else:
            sys.stdout.write(client.openmetrics())


def define_rollback(rollback: Parser) -> None:
    """Define the arguments of `hone rollback`."""
    define(
        rollback,
        _rollback,
        details=(
            "The version left is set aside: tuning does not publish it again. 'hone history M' lists the "
            "versions; the last three keep their files."
        ),
        examples="hone rollback lightglue\nhone rollback lightglue 2",
    )
    _add_model(rollback)
    _add_version(rollback)


def define_pin(pin: Parser) -> None:
    """Define the arguments of `hone pin`."""
    define(
        pin,
        _pin,
        details="Without VERSION, the one that is served.",
        examples=(
            "hone pin lightglue\nhone pin lightglue 2\nhone pin lightglue --engine onnxruntime\n"
            "hone pin lightglue --off"
        ),
    )
    pin.add_argument("--off", action="store_true", help="let tuning replace it again")
    pin.add_argument(
        "--engine",
        type=engine_name,  # Older names, too
        choices=("opencl", "onnxruntime"),
        help="have the compiled form, or ONNX Runtime, serve it, whichever is faster; no version is pinned",
    )
    _add_model(pin)
    _add_version(pin)


def define_unpin(unpin: Parser) -> None:
    """Define the arguments of `hone unpin`."""
    define(unpin, _unpin, examples="hone unpin lightglue")
    _add_model(unpin)


def _add_model(command: Parser) -> None:
    command.add_argument("model", metavar="M", help="name of the model")


def _add_version(command: Parser) -> None:
    command.add_argument("version", metavar="VERSION", nargs="?", type=_number, help="its number")


def _rollback(arguments: argparse.Namespace, output: Output) -> None:
    model = arguments.model
    with Client(arguments.socket) as client:
        left = client.ask(MODEL_HISTORY, HistoryParams(name=model)).version
        params = RollbackParams(name=model, version=arguments.version)
        result = client.ask(MODEL_ROLLBACK, params, timeout=None)
    said = f"version {result.version} is served again, {left} is set aside"
    _tell(arguments, output, said, left=left, version=result.version)


def _pin(arguments: argparse.Namespace, output: Output) -> None:
    if sum((arguments.off, arguments.version is not None, arguments.engine is not None)) > 1:
        raise UsageError("give one of VERSION, --engine and --off")
    if arguments.engine is not None:
        result = _send_pin(arguments, version=None, engine=arguments.engine)
        engine = "the CPU engine" if result.engine == "cpu" else "the compiled form"
        said, name = f"{engine} serves it until you let it go", engine_name(result.engine)
        _tell(arguments, output, said, engine=result.engine, engine_name=name)
        return
    result = _send_pin(arguments, version=0 if arguments.off else arguments.version)
    kept = "stays until you let it go" if result.pinned else "may be replaced by tuning"
    said = f"version {result.version} {kept}"
    _tell(arguments, output, said, version=result.version, pinned=result.pinned)


def _unpin(arguments: argparse.Namespace, output: Output) -> None:
    result = _send_pin(arguments, version=0, engine="")
    _tell(arguments, output, "nothing is pinned", version=result.version, pinned=False, engine="")


def _send_pin(
    arguments: argparse.Namespace, *, version: int | None, engine: str | None = None
) -> VersionPinned:
    with Client(arguments.socket) as client:
        params = PinParams(name=arguments.model, version=version, engine=engine)
        return client.ask(MODEL_PIN, params, timeout=None)


def _tell(arguments: argparse.Namespace, output: Output, said: str, **found: Any) -> None:
    output.say({"model": arguments.model, **found}, f"{arguments.model}: {said}.")


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 31):
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a version")
    return int(text)
