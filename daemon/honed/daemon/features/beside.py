"""Offers compiled files for models that apps run in their own ONNX Runtime.

An app asks whether a compiled file answers its runs in given shapes, and reports its times. Its own runs
never reach the service, so the reports count as use, for which shapes are compiled and schedules tuned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from honed.daemon.core.model import ServedModel
from honed.daemon.core.state import Registry
from honed.daemon.feature import Feature, Handler, MethodCall
from honed.daemon.observe.usage import UsageLog
from honed.daemon.serving.plan import compiled_answers, scalars
from honed.daemon.store.names import Shapes
from honed.daemon.transport.connection import Connection
from honed.protocol.errors import InvalidArgument
from honed.protocol.methods import MODEL_FORM
from honed.protocol.params import FormParams
from honed.protocol.results import AppUse, ModelForm

from .user_models import UserModels
from .variants import ShapeVariants

MOST_KINDS = 64  # Kinds of runs recorded for a connection
MOST_SIZES, MOST_LETTERS = 512, 16_384  # Limits of the shapes and names of a kind
MOST_RUNS = 1_000_000  # Maximum number of runs counted for a report
_LETTERS = 200  # Limit of an app's texts
Kind = tuple[str, tuple[tuple[str, tuple[int, ...]], ...]]  # Model name, and shapes by input


@dataclass(slots=True, kw_only=True, eq=False)
class Beside(Feature):
    """A feature that answers and records what apps report of their own runs."""

    registry: Registry
    users: UserModels
    variants: ShapeVariants
    usage_log: UsageLog
    # Reports by connection and kind; they end with the connection.
    _uses: dict[int, dict[Kind, AppUse]] = field(init=False, default_factory=dict)

    def methods(self) -> Mapping[str, Handler[FormParams, ModelForm]]:
        """Return the handler of ModelForm."""
        return {MODEL_FORM.name: self._form}

    async def _form(self, call: MethodCall, params: FormParams) -> ModelForm:
        entry = self.registry.model(params.name)
        _check(params.shapes)
        self.users.record_use(entry.name)
        report, shapes = params.report, scalars(params.shapes, entry.manifest.interface)
        runs = 1 if report is None else min(max(report.own_runs, 0), MOST_RUNS)
        failed = self.variants.wish(entry, shapes, runs)
        runner = self.variants.runner_of(entry, shapes)
        form = _form_of(entry, runner, shapes, failed)
        if form.verified:
            self.usage_log.count_seconds(runner.name, runs * form.time_us / 1e6)
        if report is not None and not call.connection.closed:
            every = report.own_runs + report.routed_runs
            kind = entry.name, tuple(sorted(params.shapes.items()))
            self._of(call.connection)[kind] = AppUse(
                app=report.app[:_LETTERS],
                pid=call.connection.peer.pid,
                shapes=dict(params.shapes),
                own_us=report.own_us,
                routed_us=report.routed_us,
                compiled_us=form.time_us if form.verified else None,
                routed=report.routed_runs / every if every > 0 else 0.0,
                why=(report.why if form.verified else form.why)[:_LETTERS],
            )
        return form

    def _of(self, connection: Connection) -> dict[Kind, AppUse]:
        """Return a connection's reports, after evicting the oldest if there are MOST_KINDS."""
        if connection.number not in self._uses:
            connection.when_closed(partial(self._uses.pop, connection.number, None))
        kinds = self._uses.setdefault(connection.number, {})
        while len(kinds) >= MOST_KINDS:
            del kinds[next(iter(kinds))]
        return kinds

    def index_fields(self, entry: ServedModel) -> Mapping[str, object]:
        """Return the apps' reports of a model."""
        every = (each for kinds in self._uses.values() for each in kinds.items())
        return {"apps": tuple(use for (model, _), use in every if model == entry.name)}

    show_fields = index_fields

    def forget(self, model: str) -> None:
        """Drop the reports of a removed model."""
        for kinds in self._uses.values():
            for kind in [each for each in kinds if each[0] == model]:
                del kinds[kind]


def _check(shapes: Shapes) -> None:
    """Raise InvalidArgument if there are more shapes than any model has."""
    sizes, letters = sum(map(len, shapes.values())), sum(map(len, shapes))
    if sizes > MOST_SIZES or letters > MOST_LETTERS:
        raise InvalidArgument(f"shapes has more than {MOST_SIZES} sizes, or too long names; give the inputs")


def _form_of(entry: ServedModel, runner: ServedModel, shapes: Shapes, failed: str) -> ModelForm:
    """Return the answer for these shapes; `failed` is why they could not be compiled, or ""."""
    if compiled_answers(runner, shapes) and runner.compiled is not None:
        us = runner.manifest.history.current.new_us
        times = runner.manifest.decision.times
        if us is None and times is not None:
            us = 1e3 * times.gpu_ms
        half = entry.manifest.precision != "fp32" and runner.compiled.source.precision != "fp32"
        if us is not None:
            return ModelForm(verified=True, time_us=max(1, round(us)), precision="fp16" if half else "fp32")
    manifest = entry.manifest
    if manifest.compiled is None:
        why = manifest.decision.reason or "it is being compiled"
    elif (
        runner is entry
        and not compiled_answers(entry, shapes)
        and entry.on_preferred_engine
        and entry.on_device
    ):
        why = failed or "it is not compiled for these shapes; it is once the machine is idle"
    else:
        why = runner.remark or "it is not loaded on the device"
    return ModelForm(verified=False, why=why)
