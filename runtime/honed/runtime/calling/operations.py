"""The operations of both clients, without I/O: each operation yields its calls and receives the answers.

`Client` performs them in the calling thread, `AsyncClient` awaits them, so both have the same ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Concatenate, Generic, ParamSpec, TypeVar, overload

from numpy.typing import ArrayLike, NDArray

from honed.protocol import methods, params, strict
from honed.protocol.errors import HonedError
from honed.protocol.methods import Method
from honed.protocol.params import InferParams
from honed.protocol.peer import Progress
from honed.protocol.results import InferResult, UploadResult
from honed.protocol.service import HintsImported
from honed.protocol.strict import Map

from . import files
from .calls import InferenceBase, InferenceResponse, Outputs, PreparedRequest, SequenceOptions
from .files import ExportedFiles, Given, open_export, open_single_file, shapes_of
from .rpc import USUAL, RpcRequest, RpcSteps, T, Usual, limit_of

P = ParamSpec("P")
R = TypeVar("R")


class operation(Generic[P, R]):  # noqa: N801 - a decorator
    """A decorator that makes an operation's steps a method of each client class."""

    def __init__(self, steps: Callable[Concatenate[Any, P], RpcSteps[R]]) -> None:
        self.steps = steps

    if TYPE_CHECKING:

        @overload
        def __get__(self, client: AbstractContextManager[Any, Any], owner: Any = ...) -> Callable[P, R]: ...
        @overload
        def __get__(
            self, client: AbstractAsyncContextManager[Any, Any], owner: Any = ...
        ) -> Callable[P, Coroutine[Any, Any, R]]: ...
        def __get__(self, client: Any, owner: Any = None) -> Any:
            """Return, for type checkers, a plain method for a client that takes `with`.

            For any other client, it is a method to await.
            """


class WithOperations:
    """A base of classes with operations, which a subclass for threads and one for event loops perform."""

    def __init_subclass__(cls, performing: Callable[..., Any] | None = None) -> None:
        """Give the class its methods: `performing` makes a method from the steps of each operation."""
        if performing is not None:
            for name in dir(cls):
                if isinstance(found := getattr(cls, name), operation):
                    setattr(cls, name, functools.wraps(found.steps)(performing(found.steps)))


class Operations(InferenceBase, WithOperations):
    """The methods of both clients.

    Every method raises the errors of `honed.runtime.errors` that the service answers with, and Unavailable if
    no service answers. docs/protocol.md describes the maps that methods return.
    """

    @operation
    def ask(
        self, method: Method[Any, T], params: Any = None, *, timeout: float | Usual | None = USUAL
    ) -> RpcSteps[T]:
        """Return the typed result of any method; `params` None uses the method's default parameters.

        `timeout` is in seconds; None: no limit. Raises Internal if the result is invalid.
        """
        given = method.params() if params is None else params
        return method.result_of((yield RpcRequest(method, given, timeout)).result)

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
        sequence: SequenceOptions | None = None,
    ) -> RpcSteps[dict[str, NDArray[Any]]]:
        """Run `model` on `inputs`, and return its outputs by name.

        Types and shapes must be the model's: nothing is converted. Arrays that lie in a `region` of this
        client are not copied; other large ones travel in shared memory, too.

        `outputs` names the outputs to return, or maps names to arrays that they are written to. `timeout` is
        in seconds; infinity sets no limit, and None uses the client's. `priority` is 1 (first) to 3 (last).
        With `finite`, inputs that hold NaN or infinity raise InvalidArgument. With `sequence`, the service
        keeps the model's state for the next request of the sequence, and raises SequenceLost if it does not
        know the sequence.
        """
        answered = yield from self._request_inference(
            model, inputs, outputs, timeout, priority, finite, sequence
        )
        return answered.outputs

    @operation
    def infer_response(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        *,
        outputs: Outputs | None = None,
        timeout: float | None = None,
        priority: int = 2,
        finite: bool = False,
        sequence: SequenceOptions | None = None,
        compiled: bool = False,
    ) -> RpcSteps[InferenceResponse]:
        """Run `model` as `infer` does, and return the outputs with the engine that answered, and times.

        With `compiled`, only a verified compiled model may answer; raises NotCompiled at once if there is
        none for these shapes.
        """
        asked = model, inputs, outputs, timeout, priority, finite, sequence, compiled
        return (yield from self._request_inference(*asked))

    answer = infer_response  # Name in honed 0.1

    @operation
    def request(self, whole: InferParams, *, timeout: float | None = None) -> RpcSteps[InferResult]:
        """Return the result of a request of the protocol; the `timeout` of its parameters is ignored.

        Requests that differ in their data and `id` alone are prepared once.
        """
        options = whole.parameters and dataclasses.replace(whole.parameters, timeout=None)
        like = strict.copy_fields(params.PrepareParams, whole, parameters=options)
        prepared = self._known.get(like) or PreparedRequest(like)
        seconds = limit_of(self.timeout if timeout is None else timeout)
        result = yield from self._send(like, prepared, whole.raw_input_contents or (), seconds, whole.id)
        return methods.MODEL_INFER.result_of(result)

    @operation
    def models(self) -> RpcSteps[list[Map]]:
        """Return all models: name, version, state and reason."""
        return list((yield RpcRequest(methods.REPOSITORY_INDEX, params.Nothing())).result["models"])

    @operation
    def metadata(self, model: str | None = None) -> RpcSteps[Map]:
        """Return the inputs and outputs of `model`, or, without one, the service's version and limits."""
        if model is None:
            return (yield RpcRequest(methods.SERVER_METADATA, params.Nothing())).result
        return (yield RpcRequest(methods.MODEL_METADATA, params.ModelParams(name=model))).result

    @operation
    def live(self) -> RpcSteps[bool]:
        """Return True, or raise Unavailable if no service answers."""
        return bool((yield RpcRequest(methods.SERVER_LIVE, params.Nothing())).result["live"])

    @operation
    def ready(self, model: str | None = None) -> RpcSteps[bool]:
        """Return whether `model` can run, or, without one, whether the service and all its models can."""
        if model is None:
            return bool((yield RpcRequest(methods.SERVER_READY, params.Nothing())).result["ready"])
        return bool((yield RpcRequest(methods.MODEL_READY, params.ModelParams(name=model))).result["ready"])

    @operation
    def status(self) -> RpcSteps[Map]:
        """Return the state of the service: its devices, workers, queues, jobs and the lease."""
        return (yield RpcRequest(methods.SERVER_STATUS, params.Nothing())).result

    @operation
    def statistics(self, model: str | None = None) -> RpcSteps[list[Map]]:
        """Return counts and times of served requests, of `model` or of all models."""
        answer = yield RpcRequest(methods.MODEL_STATISTICS, params.ModelParams(name=model or ""))
        return list(answer.result["model_stats"])

    @operation
    def metrics(self) -> RpcSteps[Map]:
        """Return every figure of the service and its models; docs/metrics.md explains them."""
        return (yield RpcRequest(methods.METRICS, params.MetricsParams())).result

    @operation
    def openmetrics(self) -> RpcSteps[str]:
        """Return the service's metrics as OpenMetrics text."""
        return str(
            (yield RpcRequest(methods.METRICS, params.MetricsParams(format="openmetrics"))).result["text"]
        )

    @operation
    def config(self) -> RpcSteps[Map]:
        """Return the settings in force, and the changes in the service's files that it has not read yet."""
        return (yield RpcRequest(methods.CONFIG_SHOW, params.Nothing())).result

    @operation
    def reload_config(self) -> RpcSteps[Map]:
        """Make the service read its files again; raise InvalidArgument if one is wrong."""
        return (yield RpcRequest(methods.CONFIG_RELOAD, params.Nothing())).result

    @operation
    def show(self, model: str) -> RpcSteps[Map]:
        """Return the origin of `model`, how it was verified, what serves it, and its kernels."""
        return (yield RpcRequest(methods.MODEL_SHOW, params.ModelParams(name=model))).result

    @operation
    def export(self, model: str) -> RpcSteps[ExportedFiles]:
        """Return the files of `model`, open for reading: the compiled file and its sources."""
        answer = yield RpcRequest(methods.MODEL_EXPORT, params.ExportParams(name=model))
        return open_export(answer.result, answer.descriptors)

    @operation
    def profile(
        self, model: str, runs: int = 5, *, timeline: bool = False, timeout: float | None = None
    ) -> RpcSteps[Map]:
        """Return the time per kernel of `model`, as the mean of `runs` inferences.

        `timeout` is in seconds; None: no limit. With `timeline`, the result includes when each command of the
        first inference was enqueued and computed.
        """
        options = params.ProfileOptions(runs=runs, timeline=timeline or None)
        given = params.ProfileParams(name=model, parameters=options)
        return (yield RpcRequest(methods.MODEL_PROFILE, given, timeout)).result

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
    ) -> RpcSteps[Map]:
        """Add an ONNX or `.honed` file, and return when it is compiled, or cannot be.

        Needs an administrator's rights. `name` defaults to the file's stem. External data is sent along from
        the file's folder. The CPU engine serves the model before it is compiled; without `wait`, the call
        returns then. "engine_name" and "engine_why" of the result say which engine serves.

        `shapes` sets open sizes, and `variants` names further sets of shapes to compile; "notes" of the
        result reports on each. `precision` is "auto", "fp32" or "fp16"; `engine` is "fastest", "opencl" or
        "onnxruntime", None as configured. `device` is one of the service's, or "fastest" to compare them.
        `calibration` is a folder of .npz files with one set of inputs each, on which honed measures the
        errors of fp16. `state` maps outputs to the inputs that they become in a sequence, where names do not
        show it. `progress` receives each Progress map. Raises ModelRefused, with every reason, if no engine
        can serve the model.
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
    def upload(
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
    ) -> RpcSteps[UploadResult]:
        """Upload an ONNX file as a model of this user, and return when it is served, or cannot be.

        `model` is a path or the file's bytes. `external` maps the names of external data in the model to
        files; the others are read from the folder of the path, or from `folder`. With engine "opencl", the
        app runs the model itself, and asks for its compiled model alone (`infer_response`).
        `unchanged_since`, in nanoseconds since 1970, refuses files that changed later, with InvalidArgument.
        Other parameters are those of `add`.

        Only this user and root see the model, whose name is in the result; uploading the same file again
        returns at once. Raises ModelRefused, with every reason, if no engine can serve the model,
        MissingFiles if external data is missing, ResourceExhausted if the user's quota is full, and
        PermissionDenied if the service takes no models of apps.
        """
        options = params.UploadOptions(
            shapes=shapes_of(shapes) if shapes else None,
            precision=None if precision == "auto" else precision,
            engine=engine,
        )
        return (yield from files.upload(model, external or {}, options, progress, folder, unchanged_since))

    bring = upload  # Name in honed 0.1

    @operation
    def publish(self, model: str, path: str | os.PathLike[str], *, expected: str, why: str) -> RpcSteps[Map]:
        """Publish a new version of `model`, a `.honed` file, if the service finds it right and faster.

        `expected` is the SHA-256 of the compiled file that `export` returned when the version was compiled.
        The result says in "published" whether it is served, and in "sentence" why. Raises AlreadyExists if
        the model has changed since, and ModelRefused if the file is of another model.
        """
        given = params.PublishParams(name=model, expected=expected, why=why)
        descriptor = files.open_model(Path(path))
        try:
            return (yield RpcRequest(methods.MODEL_PUBLISH, given, None, [descriptor])).result
        finally:
            os.close(descriptor)

    @operation
    def history(self, model: str) -> RpcSteps[Map]:
        """Return the versions of `model`: when each was served, and why it was published and replaced."""
        return (yield RpcRequest(methods.MODEL_HISTORY, params.HistoryParams(name=model))).result

    @operation
    def rollback(self, model: str, version: int | None = None) -> RpcSteps[Map]:
        """Serve an earlier version of `model`, by default the previous one; do not publish this one again."""
        given = params.RollbackParams(name=model, version=version)
        return (yield RpcRequest(methods.MODEL_ROLLBACK, given, None)).result

    @operation
    def pin(self, model: str, version: int | None = None, *, engine: str | None = None) -> RpcSteps[Map]:
        """Serve `version`, by default the present one, and publish no other until `version` 0 is passed.

        With `engine`, "opencl" or "onnxruntime", that engine serves even if it is slower, and no version is
        pinned; "" lets the service choose again.
        """
        given = params.PinParams(name=model, version=version, engine=engine)
        return (yield RpcRequest(methods.MODEL_PIN, given, None)).result

    @operation
    def set(
        self,
        model: str,
        *,
        max_batch: int | None = None,
        batch_delay_us: int | None = None,
        warm_up: int | None = None,
        warm_up_shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> RpcSteps[Map]:
        """Change the settings of `model`, and return all of them; None leaves a setting as it is.

        docs/protocol.md explains them under ModelSet. Raises InvalidArgument if requests of the model cannot
        run as one batch.
        """
        given = params.SetParams(
            name=model,
            max_batch=max_batch,
            batch_delay_us=batch_delay_us,
            warm_up=warm_up,
            warm_up_shapes=None if warm_up_shapes is None else shapes_of(warm_up_shapes),
        )
        return (yield RpcRequest(methods.MODEL_SET, given, None)).result

    @operation
    def report(self, text: str = "", tuning: params.TuningFigures | None = None) -> RpcSteps[None]:
        """Report the work of a tuner.

        The service shows `text` in its status while this connection lasts, and includes `tuning`, the
        figures of tuning so far, in its metrics.
        """
        yield RpcRequest(methods.TUNER_REPORT, params.TunerReportParams(text=text, tuning=tuning))

    @operation
    def run_tuner(
        self,
        params: params.TunerRunParams,
        *,
        descriptors: Sequence[int] = (),
        progress: Progress | None = None,
    ) -> RpcSteps[tuple[Map, list[int]]]:
        """Run a command of the compiler on the service's models and records (docs/protocol.md, TunerRun).

        Returns the result and the descriptors that came with it, which the caller closes.
        """
        answer = yield RpcRequest(methods.TUNER_RUN, params, None, descriptors, progress)
        return answer.result, answer.descriptors

    @operation
    def stop_tuner(self, model: str) -> RpcSteps[None]:
        """Stop a search of `run_tuner`, which publishes its results; raise NotFound if there is none."""
        yield RpcRequest(methods.TUNER_STOP, params.TunerStopParams(model=model))

    @operation
    def export_hints(self, *, spread: bool = False) -> RpcSteps[BinaryIO]:
        """Return the tuning records that other machines can use, as JSON lines in an open file.

        With `spread`, the file holds fast, slow and refused schedules of each task, to learn a prior from.
        """
        given = params.HintsExportParams(spread=spread or None)
        return open_single_file((yield RpcRequest(methods.HINTS_EXPORT, given, None)).descriptors)

    @operation
    def import_hints(self, descriptor: int, *, device: str | None = None) -> RpcSteps[HintsImported]:
        """Import tuning records of other machines as hints, which the tuner verifies and times itself.

        `descriptor` is of a file of JSON lines (docs/protocol.md, HintsImport). `device` is an OpenCL device,
        by default the service's.
        """
        given, row = params.HintsImportParams(device=device), methods.HINTS_IMPORT
        return row.result_of((yield RpcRequest(row, given, None, (descriptor,))).result)

    @operation
    def remove(self, model: str) -> RpcSteps[None]:
        """Remove `model` and its files."""
        yield RpcRequest(methods.REPOSITORY_MODEL_UNLOAD, params.UnloadParams(model_name=model))


class SequenceBase(WithOperations):
    """A sequence of requests to one model, whose state the service keeps between them.

        with client.sequence("vad") as vad:
            for frame in frames:
                speech = vad.infer({"input": frame, "sr": 16000})["output"]

    The first request begins the sequence, with zeros for the state that it does not send; the end of the
    block ends it. If the service has lost it, requests raise SequenceLost until `restart` is called.
    """

    def __init__(self, client: Any, model: str) -> None:
        """Set up the sequence of a client's requests; it performs its operations as the client does."""
        self.model = model
        self.id = uuid.uuid4().hex
        self.begun = False
        self._client = client
        self._exchange = client._exchange

    def restart(self) -> None:
        """Begin again with the next request, whose state is zeros, or what the request sends."""
        self.begun = False

    @operation
    def infer(
        self, /, inputs: Mapping[str, ArrayLike], *, last_token: bool = False, **options: Any
    ) -> RpcSteps[dict[str, NDArray[Any]]]:
        """Run the model as `Client.infer` does; inputs that are state may be left out.

        With `last_token`, a decoder returns the logits of the last token alone.
        """
        return (yield from self._next(inputs, options, last_token=last_token))

    @operation
    def generate(
        self, /, inputs: Mapping[str, ArrayLike], tokens: int, *, stop: Iterable[int] = (), **options: Any
    ) -> RpcSteps[NDArray[Any]]:
        """Run a decoder, and again on each likeliest token; return up to `tokens` of these, int64 [1, n].

        They end with the first in `stop`. The last one has not been run: it is the next request's input.
        """
        made = yield from self._next(inputs, options, greedy_tokens=tokens, stop_tokens=tuple(stop))
        return made["tokens"]

    @operation
    def close(self) -> RpcSteps[None]:
        """End the sequence, if the service still knows it; a later request begins another."""
        if self.begun:
            self.begun = False
            with contextlib.suppress(HonedError):
                sequence = SequenceOptions(self.id, end=True)
                yield from self._client._request_inference(self.model, {}, sequence=sequence)

    def _next(
        self, inputs: Mapping[str, ArrayLike], options: Mapping[str, Any], **how: Any
    ) -> RpcSteps[dict[str, NDArray[Any]]]:
        """Return the outputs of the next request; if the first request fails, the sequence has not begun."""
        first, self.begun = not self.begun, True
        sequence = SequenceOptions(self.id, start=first, **how)
        try:
            answered = yield from self._client._request_inference(
                self.model, inputs, sequence=sequence, **options
            )
        except BaseException:
            if first:
                self.begun = False
            raise
        outputs: dict[str, NDArray[Any]] = answered.outputs
        return outputs
