"""ModelInfer from request to answer: through the features that its model uses, and to a worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NamedTuple

import msgpack

from honed.daemon.core.model import ServedModel
from honed.daemon.core.queue import Replaced, service_stops
from honed.daemon.core.state import Registry
from honed.daemon.core.statistics import Statistics
from honed.daemon.feature import ApiCall, Feature, Infer, InferAnswer, InferCall
from honed.daemon.idle.leasing import Leasing
from honed.daemon.observe.usage import UsageLog
from honed.daemon.serving import compiled_only
from honed.daemon.serving import plan as plans
from honed.daemon.serving.in_flight import PendingRequest
from honed.daemon.serving.plan import CheckedForm, InferencePlan
from honed.daemon.serving.pool import Pool
from honed.daemon.settings.schema import Limits
from honed.daemon.store.compiled import Compiled
from honed.daemon.store.names import is_variant
from honed.daemon.store.store import Manifest
from honed.daemon.transport.connection import Connection, Done
from honed.daemon.worker.calls import InferenceResult
from honed.protocol.errors import HonedError
from honed.protocol.methods import check_version, parse
from honed.protocol.params import Data, InferParams
from honed.protocol.results import Inferred
from honed.protocol.strict import Map

_DATA: Final = "raw_input_contents"
_OWN: Final = frozenset({_DATA, "id"})  # each request's
_BYTES: Final = frozenset({bytes, memoryview})
_MOST_KEPT, _MOST_KEPT_BYTES = 16, 4096  # forms of a connection, and of one


@dataclass(frozen=True, slots=True)
class _Wrapped:
    """What answers requests for a version of a model, as long as its manifest and compiled form are these.

    One that is `plain` uses no feature.
    """

    entry: ServedModel
    manifest: Manifest
    compiled: Compiled | None
    infer: Infer
    plain: bool


class _Checked(NamedTuple):
    """What requests have in common, as long as what answers them and the limits are these.

    Of those for a model that uses features, that is what they say, without data.
    """

    form: CheckedForm | InferParams
    wrapped: _Wrapped
    limits: tuple[int, bool]


@dataclass(kw_only=True)
class InferencePipeline:
    """Answers inferences, until the service is `stopping`. `features` are those from the outside in."""

    limits: Limits
    registry: Registry
    pool: Pool
    leasing: Leasing
    ledger: UsageLog
    features: Sequence[Feature] = ()
    stopping: bool = False
    _wrapped: dict[str, _Wrapped] = field(init=False, default_factory=dict)  # by model
    # Of checked requests, by connection and by what does not change between them.
    _checked: dict[int, dict[bytes, _Checked]] = field(init=False, default_factory=dict)

    def check_running(self) -> None:
        """Raise Unavailable while the service stops."""
        if self.stopping:
            raise service_stops()

    def start(self, call: ApiCall, params: InferParams) -> Coroutine[Any, Any, InferAnswer] | PlainInference:
        """Return the work for ModelInfer."""
        connection, entry = call.connection, self.registry.find(params.model_name)
        if entry is None or is_variant(entry.name):
            return self.infer(connection, params)
        wanted = compiled_only.wants_compiled(params)
        if wanted:
            params = compiled_only.with_scalars(params, entry.manifest.interface)
        if wanted or not self._of(entry).plain:
            self._keep(connection, entry, call.params, _with_data(params, None, None))
            return self.infer(connection, params)
        return PlainInference(self, connection, entry, call.params, params)

    def again(self, call: ApiCall) -> Coroutine[Any, Any, InferAnswer] | PlainInference | None:
        """Return the work for a request like one before on its connection, or None: it is to be checked."""
        params = call.params
        known = self._checked.get(call.connection.number)
        checked = known.get(_form(params)) if known else None
        data = _data(params)
        if checked is None or data is None or checked.limits != self._limits():
            return None
        entry, form = checked.wrapped.entry, checked.form
        if not self.registry.serves(entry) or self._of(entry) is not checked.wrapped:
            return None
        if isinstance(form, InferParams):
            self.check_running()
            return self.infer(call.connection, _with_data(form, tuple(data), params.get("id")))
        if not form.fits(data, call.connection.regions):
            return None
        return PlainInference(self, call.connection, entry, params, form)

    def _limits(self) -> tuple[int, bool]:
        """Return what plans depend on that the configuration may change."""
        return self.limits.max_message_bytes, self.ledger.settings.keep_inputs

    def checked(
        self, connection: Connection, entry: ServedModel, params: Map, plan: InferencePlan
    ) -> CheckedForm:
        """Return the form of a checked request, which is kept for those like it."""
        form = CheckedForm(plan)
        if form.kept:
            self._keep(connection, entry, params, form)
        return form

    def _keep(
        self, connection: Connection, entry: ServedModel, params: Map, form: CheckedForm | InferParams
    ) -> None:
        if len(packed := _form(params)) <= _MOST_KEPT_BYTES:
            known = self._checked.get(connection.number)
            if known is None:
                known = self._checked[connection.number] = {}
                connection.when_closed(partial(self._checked.pop, connection.number, None))
            if len(known) >= _MOST_KEPT:
                known.clear()
            known[packed] = _Checked(form, self._of(entry), self._limits())

    async def infer(self, connection: Connection, params: InferParams) -> InferAnswer:
        """Return the result of ModelInfer; raise its error."""
        begun = time.monotonic()
        with counted(self.registry.statistics(params.model_name)):
            check_version(params.model_version)
            entry = self.registry.model(params.model_name)
            return await self.answer(InferCall(connection=connection, entry=entry, params=params), begun)

    async def answer(self, call: InferCall, begun: float) -> InferAnswer:
        """Return the result of a request that came at `begun`.

        If the model is replaced while the request waits, the request is checked again for the model that took
        its place.
        """
        while True:
            try:
                return await self._of(call.entry).infer(call)
            except Replaced:
                call = self.replaced(call, begun)

    def replaced(self, call: InferCall, begun: float) -> InferCall:
        """Return the request for the model that replaced its own; raise NotFound if there is none."""
        deadline = begun + plans.timeout_us(call.params.parameters) / 1e6
        return replace(call, entry=self.registry.model(call.entry.name), deadline=deadline)

    def _of(self, entry: ServedModel) -> _Wrapped:
        """Return the function that answers requests for a model, wrapped by the features that it uses."""
        known = self._wrapped.get(entry.name)
        if (
            known is not None
            and known.entry is entry
            and known.manifest is entry.manifest
            and known.compiled is entry.compiled
        ):
            return known
        infer: Infer = self._run
        plain = True
        for feature in reversed(self.features):
            wrapped = feature.wrap(entry, infer)
            if wrapped is not None:
                infer, plain = wrapped, False
        self._wrapped = {
            name: each for name, each in self._wrapped.items() if self.registry.serves(each.entry)
        }
        made = self._wrapped[entry.name] = _Wrapped(entry, entry.manifest, entry.compiled, infer, plain)
        return made

    def rewrap(self, model: str) -> None:
        """Ask the features again whether they wrap a model."""
        self._wrapped.pop(model, None)

    async def _run(self, call: InferCall) -> Inferred:
        self.check_running()  # it may have waited in a sequence
        connection, runner = call.connection, call.runner()
        with self.leasing.serving(call.entry.name, connection.peer.pid):
            plan = self.plan(call, runner)
            result, ran = await self.pool.asking.infer(connection.client, runner, plan)
        for answered in call.answered:
            answered(runner, plan, ran.observed)
        self.ran(runner, plan, ran)
        return result

    def ran(self, runner: ServedModel, plan: InferencePlan, ran: InferenceResult) -> None:
        """Note that a request was answered."""
        unfit = plan.open and runner.compiled is not None  # for what could be tuned
        if self.registry.find(runner.name) is not None and not runner.away and not unfit:
            self.ledger.ran(runner.name, ran.infer_ns / 1e9)

    def plan(self, call: InferCall, runner: ServedModel) -> InferencePlan:
        """Check a request against what is to run it; raise InvalidArgument, NotFound, or Unavailable."""
        compiled_only.check(runner, call.params)
        compiled, given = self.registry.interfaces(runner)
        plan = plans.check(
            call.params,
            compiled,
            given,
            call.connection.regions,
            max_bytes=self.limits.max_answer_bytes,
            keep=self.ledger.settings.keep_inputs,
        )
        if call.deadline is None:
            return plan
        return replace(plan, timeout=call.deadline - time.monotonic())


class PlainInference:
    """A request for a model that uses no feature, from one callback to the next.

    Without a task it takes two turns of the event loop, in the place of four.
    """

    __slots__ = (
        "_begun",
        "_connection",
        "_counted",
        "_done",
        "_entry",
        "_known",
        "_params",
        "_pipeline",
        "_task",
        "_work",
    )

    def __init__(
        self,
        pipeline: InferencePipeline,
        connection: Connection,
        entry: ServedModel,
        params: Map,
        known: InferParams | CheckedForm,
    ) -> None:
        """Initialise; what is `known` of the parameters is what they say, or that they are right."""
        self._pipeline = pipeline
        self._connection = connection
        self._entry = entry
        self._params = params
        self._known = known
        self._done: Done | None = None
        self._task: asyncio.Task[InferAnswer] | None = None
        self._work: PendingRequest[Any] | None = None
        self._counted = False

    def begin(self, done: Done) -> None:
        """Ask for it to be run; `done` is called once with the result or an error, perhaps at once."""
        self._done, self._begun = done, time.monotonic()
        pipeline, connection, entry = self._pipeline, self._connection, self._entry
        entry.statistics.arrived()
        try:
            pipeline.check_running()
            self._counted = pipeline.leasing.came(entry.name, connection.peer.pid)
            if isinstance(self._known, InferParams):
                check_version(self._known.model_version)
                plan = pipeline.plan(self._call(self._known), entry)
                self._known = pipeline.checked(connection, entry, self._params, plan)
            form = self._known
            plan = form.plan
            self._work = work = PendingRequest(
                call=partial(form.call, self._params.get(_DATA) or ()),
                regions=form.regions,
                open=plan.open,
                empty=form.empty,
                on_end=self._on_end,
            )
            pipeline.pool.asking.begin(connection.client, entry, plan.priority, plan.timeout, work)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
            self._work = None
            self._end(None, error)

    def _call(self, params: InferParams) -> InferCall:
        return InferCall(connection=self._connection, entry=self._entry, params=params)

    def cancel(self) -> None:
        """Cancel the request: nobody waits for it any more. Nothing happens if it has ended."""
        work, self._work = self._work, None
        if self._task is not None:
            self._task.cancel()
        elif work is not None:
            self._pipeline.pool.asking.end(work, failed=True)
            self._end(None, asyncio.CancelledError())

    def _on_end(self, work: PendingRequest[Any], error: HonedError | None) -> None:
        """Finish the request: a worker has answered, or it is known that none will."""
        pipeline, entry, form = self._pipeline, self._entry, self._known
        self._work = None
        pipeline.pool.asking.end(work, failed=error is not None)
        try:
            if isinstance(error, Replaced):
                self._again()
                return
            if error is not None:
                raise error
            assert isinstance(form, CheckedForm)
            ran, answered = pipeline.pool.asking.inferred(entry, form.plan, work, self._begun)
            pipeline.ran(entry, form.plan, ran)
            result = form.answer(ran, self._params.get("id") or "", answered)
        except Exception as failure:  # noqa: BLE001 - whatever it is, it is the answer
            self._end(None, failure)
        else:
            self._end(result, None)

    def _again(self) -> None:
        """Have the model answer that took the place of its own, which may use features."""
        call = self._pipeline.replaced(self._call(parse(InferParams, self._params)), self._begun)
        self._task = asyncio.ensure_future(self._pipeline.answer(call, self._begun))
        self._task.add_done_callback(self._answered_again)

    def _answered_again(self, task: asyncio.Task[InferAnswer]) -> None:
        self._task = None
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        self._end(None if error is not None else task.result(), error)

    def _end(self, result: InferAnswer | None, error: BaseException | None) -> None:
        done, self._done = self._done, None
        if self._counted:
            self._pipeline.leasing.went(self._entry.name)
        if error is not None:
            ns = round((time.monotonic() - self._begun) * 1e9)
            self._entry.statistics.failed(_code(error), ns)
        assert done is not None
        done(result, error)


def _data(params: Map) -> list[Data] | None:
    """Return the data of a request that is not parsed; None where that, or its `id`, is malformed."""
    data, name = params.get(_DATA), params.get("id")
    if data is None:
        data = []
    if type(data) is not list or not (name is None or type(name) is str):
        return None
    return data if _BYTES.issuperset(map(type, data)) else None


def _with_data(params: InferParams, data: tuple[Data, ...] | None, name: str | None) -> InferParams:
    """Return a request with data and an `id` of its own; `replace` takes five times as long."""
    return InferParams(
        model_name=params.model_name,
        model_version=params.model_version,
        id=name,
        parameters=params.parameters,
        inputs=params.inputs,
        outputs=params.outputs,
        raw_input_contents=data,
    )


def _form(params: Map) -> bytes:
    """Return a request without its data and `id`; requests of which this is the same are checked once."""
    form: bytes = msgpack.packb({key: item for key, item in params.items() if key not in _OWN})
    return form


@contextmanager
def counted(statistics: Statistics) -> Iterator[None]:
    """Count one request around its work, and its failure if it raises."""
    statistics.arrived()
    begun = time.monotonic_ns()
    try:
        yield
    except BaseException as error:
        statistics.failed(_code(error), time.monotonic_ns() - begun)
        raise


def _code(error: BaseException) -> str:
    match error:
        case HonedError():
            return error.code
        case asyncio.CancelledError():
            return "CANCELLED"
        case _:
            return "INTERNAL"
