"""What both clients can do, said once and without I/O: each operation yields its calls and gets the answers.

`Client` performs them in the calling thread, `AsyncClient` awaits them: neither can have one that the other
lacks.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from numpy.typing import ArrayLike, NDArray

from honed.protocol import methods, params, strict
from honed.protocol.methods import Method
from honed.protocol.params import InferParams
from honed.protocol.results import BringResult, Inferred
from honed.protocol.service import HintsImported
from honed.protocol.streams import Progress
from honed.protocol.strict import Map

from . import files
from .calls import InferenceAnswer, Inferences, InSequence, Outputs, PreparedRequest
from .files import ExportedFiles, Given, exported, exported_file, shapes_of
from .steps import USUAL, Ask, Steps, T, Usual, limit_of, operation


class Operations(Inferences):
    """The methods of both clients.

    Every one raises the errors of `honed.runtime.errors` that the service answered with, and Unavailable
    where there is no service. Maps are returned as docs/protocol.md describes them.
    """

    def __init_subclass__(cls, performing: Callable[..., Any] | None = None) -> None:
        """Give the class its methods: `performing` makes a method from the steps of each operation."""
        if performing is not None:
            for name, found in vars(Operations).items():
                if isinstance(found, operation):
                    setattr(cls, name, functools.wraps(found.steps)(performing(found.steps)))

    @operation
    def ask(
        self, method: Method[Any, T], params: Any = None, *, timeout: float | Usual | None = USUAL
    ) -> Steps[T]:
        """Return the result of any method, typed; `params` None: the parameters that it has by default.

        `timeout` is in seconds; None: no limit. Raises Internal where the result is invalid.
        """
        given = method.params() if params is None else params
        return method.result_of((yield Ask(method, given, timeout)).result)

    @operation
    def infer(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        *,
        outputs: Outputs | None = None,
        timeout: float | None = None,
        priority: int = 2,
        finite: bool = False,
        sequence: InSequence | None = None,
    ) -> Steps[dict[str, NDArray[Any]]]:
        """Run `model` on `inputs`, and return its outputs by name.

        Arrays that lie in a `region` of this client are not copied; other large ones travel in shared memory,
        too. `outputs`: the names wanted, or arrays by name to write them to. `timeout` in seconds, infinity:
        no limit, None: the client's own; `priority`
        1 (first) to 3 (last); `finite` refuses inputs with NaN or infinity. With `sequence` the service keeps
        the model's state for the next request of it, which need not bring it; raises SequenceLost where the
        service does not know the sequence.
        """
        answered = yield from self._answered(model, inputs, outputs, timeout, priority, finite, sequence)
        return answered.outputs

    @operation
    def answer(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        *,
        outputs: Outputs | None = None,
        timeout: float | None = None,
        priority: int = 2,
        finite: bool = False,
        sequence: InSequence | None = None,
        compiled: bool = False,
    ) -> Steps[InferenceAnswer]:
        """Run as `infer` does; return the outputs with the engine that answered, and times.

        With `compiled` only a verified compiled form may answer: raises NotCompiled at once where there is
        none for these shapes.
        """
        asked = model, inputs, outputs, timeout, priority, finite, sequence, compiled
        return (yield from self._answered(*asked))

    @operation
    def request(self, whole: InferParams, *, timeout: float | None = None) -> Steps[Inferred]:
        """Return the result of a request as it travels; the `timeout` of its parameters does not count.

        Requests that differ in their data and `id` alone are prepared.
        """
        options = whole.parameters and dataclasses.replace(whole.parameters, timeout=None)
        like = strict.like(params.PrepareParams, whole, parameters=options)
        prepared = self._known.get(like) or PreparedRequest(like)
        seconds = limit_of(self.timeout if timeout is None else timeout)
        result = yield from self._sent(like, prepared, whole.raw_input_contents or (), seconds, whole.id)
        return methods.MODEL_INFER.result_of(result)

    @operation
    def models(self) -> Steps[list[Map]]:
        """Return all models: name, version, state and reason."""
        return list((yield Ask(methods.REPOSITORY_INDEX, params.Nothing())).result["models"])

    @operation
    def metadata(self, model: str | None = None) -> Steps[Map]:
        """Return the inputs and outputs of `model`; without one, the service's name, version and limits."""
        if model is None:
            return (yield Ask(methods.SERVER_METADATA, params.Nothing())).result
        return (yield Ask(methods.MODEL_METADATA, params.ModelParams(name=model))).result

    @operation
    def live(self) -> Steps[bool]:
        """Return whether the service answers at all; raise Unavailable where it does not."""
        return bool((yield Ask(methods.SERVER_LIVE, params.Nothing())).result["live"])

    @operation
    def ready(self, model: str | None = None) -> Steps[bool]:
        """Return whether `model` can be run; without one, whether the service and all its models can."""
        if model is None:
            return bool((yield Ask(methods.SERVER_READY, params.Nothing())).result["ready"])
        return bool((yield Ask(methods.MODEL_READY, params.ModelParams(name=model))).result["ready"])

    @operation
    def status(self) -> Steps[Map]:
        """Return what the service is doing, on which device."""
        return (yield Ask(methods.SERVER_STATUS, params.Nothing())).result

    @operation
    def statistics(self, model: str | None = None) -> Steps[list[Map]]:
        """Return counts and times of served requests, of `model` or of all models."""
        answer = yield Ask(methods.MODEL_STATISTICS, params.ModelParams(name=model or ""))
        return list(answer.result["model_stats"])

    @operation
    def metrics(self) -> Steps[Map]:
        """Return every figure the service has of itself and its models (docs/metrics.md)."""
        return (yield Ask(methods.METRICS, params.MetricsParams())).result

    @operation
    def openmetrics(self) -> Steps[str]:
        """Return the service's metrics as OpenMetrics text."""
        return str((yield Ask(methods.METRICS, params.MetricsParams(format="openmetrics"))).result["text"])

    @operation
    def config(self) -> Steps[Map]:
        """Return the settings in force, and the settings in the service's files that differ."""
        return (yield Ask(methods.CONFIG_SHOW, params.Nothing())).result

    @operation
    def reload_config(self) -> Steps[Map]:
        """Have the service read its files again; raise InvalidArgument where one is wrong."""
        return (yield Ask(methods.CONFIG_RELOAD, params.Nothing())).result

    @operation
    def show(self, model: str) -> Steps[Map]:
        """Return where `model` comes from, how it was verified, and its kernels."""
        return (yield Ask(methods.MODEL_SHOW, params.ModelParams(name=model))).result

    @operation
    def export(self, model: str) -> Steps[ExportedFiles]:
        """Return the files of `model` as the service keeps them, open for reading: compiled, and sources."""
        answer = yield Ask(methods.MODEL_EXPORT, params.ExportParams(name=model))
        return exported(answer.result, answer.descriptors)

    @operation
    def profile(
        self, model: str, runs: int = 5, *, timeline: bool = False, timeout: float | None = None
    ) -> Steps[Map]:
        """Return the time per kernel of `model`, as the mean of `runs` inferences.

        `timeout` is in seconds; None: no limit. With `timeline`, the result includes when each command of the
        first inference was enqueued and computed.
        """
        options = params.ProfileOptions(runs=runs, timeline=timeline or None)
        given = params.ProfileParams(name=model, parameters=options)
        return (yield Ask(methods.MODEL_PROFILE, given, timeout)).result

    @operation
    def add(
        self,
        path: str | os.PathLike[str],
        *,
        name: str | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
        variants: Sequence[Mapping[str, Sequence[int]]] = (),
        precision: str = "auto",
        replace: bool = False,
        device: str | None = None,
        calibration: str | os.PathLike[str] | None = None,
        engine: str | None = None,
        wait: bool = True,
        state: Mapping[str, str] | None = None,
        progress: Progress | None = None,
    ) -> Steps[Map]:
        """Add an ONNX or `.honed` file; returns when it is compiled, or known why not.

        `name` defaults to the file's stem. `engine` is "fastest", "opencl" or "onnxruntime", None what the
        service is configured for; the CPU engine may serve the model long before it is compiled, and without
        `wait` this returns then. "engine_name" and "engine_why" of the result say which one serves.

        `variants` are more shapes, set by set, that it is compiled for, too; "notes" of the result has what
        came of each. External data is sent along from the file's folder. `device` is one of the service's,
        or "fastest" to have them compared; None leaves that to the service. `calibration` is a folder of .npz
        files, each with one set of inputs, that errors in fp16 are measured on where the precision is "auto".
        `state` are inputs by the output that each is given next in a sequence, where names do not tell.
        `progress` gets each Progress map. Raises ModelRefused with every reason where the model cannot be
        served.
        """
        options = params.LoadOptions(
            shapes=shapes_of(shapes or {}),
            precision=precision,
            replace=replace,
            device=device,
            engine=engine,
            wait=None if wait else False,
            variants=tuple(map(shapes_of, variants)) or None,
            state=dict(state) if state else None,
        )
        return (yield from files.add(Path(path), name, options, calibration, progress))

    @operation
    def bring(
        self,
        model: Given,
        *,
        external: Mapping[str, Given] | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
        precision: str = "auto",
        engine: str | None = None,
        folder: str | os.PathLike[str] | None = None,
        unchanged_since: int | None = None,
        progress: Progress | None = None,
    ) -> Steps[BringResult]:
        """Have the service serve an ONNX file of the app's own; return when it does, or the reason is known.

        `model` is a path or the file's bytes, `external` the files of external data that go with it, by the
        names it has for them; those that are not given are taken from beside a path, or from `folder`. With
        the engine "opencl" the app runs the model by itself, and asks for its compiled form alone
        (`answer`). Files that changed after `unchanged_since`, in nanoseconds since 1970, are refused with
        InvalidArgument. The rest is as for `add`. Nobody but this user, and root, sees the model, whose name
        is in the result; bringing one file again returns at once. Raises ModelRefused with every reason where
        it cannot be served, MissingFiles where external data is not there, ResourceExhausted where the user's
        quota is full, PermissionDenied where the service takes no models of apps.
        """
        options = params.BringOptions(
            shapes=shapes_of(shapes) if shapes else None,
            precision=None if precision == "auto" else precision,
            engine=engine,
        )
        return (yield from files.bring(model, external or {}, options, progress, folder, unchanged_since))

    @operation
    def publish(self, model: str, path: str | os.PathLike[str], *, expected: str, why: str) -> Steps[Map]:
        """Serve a faster form of `model`, a `.honed` file, if the service finds it right and faster.

        `expected` is the SHA-256 of the compiled file served when it was made (`export` tells). The result
        says in "published" whether it is served, and in "sentence" why. Raises AlreadyExists where another
        version came meanwhile, ModelRefused where it is not this model.
        """
        given = params.PublishParams(name=model, expected=expected, why=why)
        descriptor = files.open_model(Path(path))
        try:
            return (yield Ask(methods.MODEL_PUBLISH, given, None, [descriptor])).result
        finally:
            os.close(descriptor)

    @operation
    def history(self, model: str) -> Steps[Map]:
        """Return the versions of `model`: what was served when, and why each came and went."""
        return (yield Ask(methods.MODEL_HISTORY, params.HistoryParams(name=model))).result

    @operation
    def rollback(self, model: str, version: int | None = None) -> Steps[Map]:
        """Serve an earlier version of `model` again, None: the one before; the one left stays out."""
        given = params.RollbackParams(name=model, version=version)
        return (yield Ask(methods.MODEL_ROLLBACK, given, None)).result

    @operation
    def pin(self, model: str, version: int | None = None, *, engine: str | None = None) -> Steps[Map]:
        """Serve a version, None: the present one, and let no other take its place; 0 allows that again.

        With `engine`, "opencl" or "onnxruntime", that serves whichever is faster, and no version is pinned;
        "" lets the service choose again.
        """
        given = params.PinParams(name=model, version=version, engine=engine)
        return (yield Ask(methods.MODEL_PIN, given, None)).result

    @operation
    def set(
        self,
        model: str,
        *,
        max_batch: int | None = None,
        batch_delay_us: int | None = None,
        warm_up: int | None = None,
        warm_up_shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> Steps[Map]:
        """Change how `model` is served (docs/protocol.md, ModelSet), and give all of its settings.

        Raises InvalidArgument where its requests cannot be run together.
        """
        given = params.SetParams(
            name=model,
            max_batch=max_batch,
            batch_delay_us=batch_delay_us,
            warm_up=warm_up,
            warm_up_shapes=None if warm_up_shapes is None else shapes_of(warm_up_shapes),
        )
        return (yield Ask(methods.MODEL_SET, given, None)).result

    @operation
    def report(self, text: str = "", tuning: params.TuningFigures | None = None) -> Steps[None]:
        """Report what a tuner does.

        The service shows `text` in its status while this connection lasts, and from then on its metrics
        include `tuning`, the figures of tuning so far.
        """
        yield Ask(methods.TUNER_REPORT, params.TunerReportParams(text=text, tuning=tuning))

    @operation
    def run_tuner(
        self,
        params: params.TunerRunParams,
        *,
        descriptors: Sequence[int] = (),
        progress: Progress | None = None,
    ) -> Steps[tuple[Map, list[int]]]:
        """Have the service tune, or work on its records (docs/protocol.md, TunerRun).

        Returns the result, and the open files that came with it, which are the caller's.
        """
        answer = yield Ask(methods.TUNER_RUN, params, None, descriptors, progress)
        return answer.result, answer.descriptors

    @operation
    def stop_tuner(self, model: str) -> Steps[None]:
        """End a `run_tuner` of this model soon, which uses what was found; raise NotFound where none runs."""
        yield Ask(methods.TUNER_STOP, params.TunerStopParams(model=model))

    @operation
    def export_hints(self, *, spread: bool = False) -> Steps[BinaryIO]:
        """Return the measurements of tuning here that other machines can use, as JSON lines in an open file.

        With `spread`, the file holds what a prior can be learned from: fast, slow and refused schedules of
        each task.
        """
        given = params.HintsExportParams(spread=spread or None)
        return exported_file((yield Ask(methods.HINTS_EXPORT, given, None)).descriptors)

    @operation
    def import_hints(self, descriptor: int, *, device: str | None = None) -> Steps[HintsImported]:
        """Have the service take in what other machines learned, to be tried before it counts.

        The file holds JSON lines (docs/protocol.md, HintsImport) of a device, by its spec.
        """
        given, row = params.HintsImportParams(device=device), methods.HINTS_IMPORT
        return row.result_of((yield Ask(row, given, None, (descriptor,))).result)

    @operation
    def remove(self, model: str) -> Steps[None]:
        """Remove `model` and its files for good."""
        yield Ask(methods.REPOSITORY_MODEL_UNLOAD, params.UnloadParams(model_name=model))
