"""The loop: wait for the lease, choose a model, tune it, publish what is faster."""

from __future__ import annotations

import logging
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from honed.protocol import methods
from honed.protocol.errors import DeadlineExceeded, HonedError, ModelRefused, NotFound, Unavailable
from honed.protocol.params import HistoryParams, ModelParams
from honed.protocol.results import ModelShown
from honed.protocol.service import ModelFigures, Status
from honed.protocol.tuning import TuningFigures
from honed.protocol.versions import ModelHistory
from honed.runtime.calling.leaseclient import LeaseHolder
from honed.runtime.client import Client
from honed.tuner.records import Records, Setup
from honed.tuner.setup import setup_for

from . import profiles
from .choice import PassPlan, Wanted, choose, failed, hinted, passed
from .memory import TuningState
from .onepass import TuningPass, TuningPlaces

REST_SECONDS = 20.0  # between two looks at the service while nothing is to be tuned
# Of one candidate under `onepass.LIMITS`: building it, running it on three inputs, and timing it.
CANDIDATE_SECONDS = 10.0
_SLICE_SECONDS = 0.5
STOP_SECONDS = 15.0  # within which a session ends that was told to
_log = logging.getLogger(__name__)


class Tuner:
    """Tunes the models of one service until told to stop."""

    def __init__(self, socket: str | None) -> None:
        """`socket` None: where honed listens."""
        self._socket = socket
        self._lease = LeaseHolder(CANDIDATE_SECONDS, socket=socket)
        self._told = False  # to stop; no Event, whose lock a handler may have interrupted
        self._session: Callable[[], None] | None = None  # stops the present session
        self._unprofiled: set[profiles.Unprofiled] = set()  # those that could not be

    def stop(self) -> None:
        """From a signal handler: end at once, by SystemExit, or after the candidate being measured.

        A session that then waits for a service that has gone is left after STOP_SECONDS.
        """
        self._told = True
        if self._session is None:
            raise SystemExit(0)
        self._session()
        signal.signal(signal.SIGALRM, _leave)
        signal.setitimer(signal.ITIMER_REAL, STOP_SECONDS)

    def run(self) -> None:
        """Until told to stop. Raises PermissionDenied where the service does not let this user tune."""
        with self._lease:
            while not self._told:
                try:
                    worked = self._step()
                except (Unavailable, NotFound) as error:
                    _log.info("waiting for the service: %s", error)
                    worked = False
                if not worked:
                    self._lease.release()
                    if not self._told:
                        time.sleep(REST_SECONDS)  # `stop` ends it by SystemExit

    def _step(self) -> bool:
        """Tune one model for a while; False where there is nothing to do or the lease is not granted."""
        with Client(self._socket) as client:
            view = _look(client)
            plan = choose(view.wanted, time.time())
            if plan is None:
                client.report("nothing is left to tune", figures_in(view.records))
                return False
            client.report(f"waiting for the lease to tune {plan.name}", figures_in(view.records))
            if not self._granted():
                return False
            view = _look(client)  # that may have taken a while
            if self._profile(client, view):
                view = _look(client)
            plan = choose(view.wanted, time.time())
            if plan is not None:
                self._tune(client, view, plan)
            return True

    def _profile(self, client: Client, view: _View) -> bool:
        """Ask where the time of used models goes, while the lease is held; whether anything was learnt."""
        learnt = False
        for version in view.unprofiled:
            if version in self._unprofiled or self._told or not self._lease.may_run():
                continue
            try:
                client.profile(version.model, runs=1, timeout=profiles.PATIENCE_SECONDS)
            except (Unavailable, NotFound):
                raise
            except DeadlineExceeded:
                break  # requests came first: another time
            except HonedError as error:
                _log.warning("%s is not profiled: %s", version.model, error)
                self._unprofiled.add(version)
            else:
                learnt = True
        return learnt

    def _granted(self) -> bool:
        """Wait a while for the lease, in slices: a signal does not end a wait."""
        end = time.monotonic() + REST_SECONDS
        while not self._told and time.monotonic() < end:
            if self._lease.wait_until_granted(_SLICE_SECONDS):
                return True
        return False

    def _tune(self, client: Client, view: _View, plan: PassPlan) -> None:
        known = next(m.known for m in view.wanted if m.name == plan.name)
        _log.info("tuning %s for up to %.0f s", plan.name, plan.seconds)
        client.report(f"tuning {plan.name}: preparing")
        try:
            with (
                client.export(plan.name) as given,
                tempfile.TemporaryDirectory(prefix="honed-tune-") as folder,
            ):
                if not given.sources:
                    raise ModelRefused(f"{plan.name} was added compiled, so there is no source to tune")
                one = TuningPass(client, self._lease, view.places[plan.name], plan, given, Path(folder))
                self._session = one.stop
                if not self._told:
                    known = one.run(known)
        except ModelRefused as error:
            _log.warning("%s is not tuned: %s", plan.name, error)
            known = passed(known, finished=True, headroom=0.0, hints=known.hints)
        except (Unavailable, NotFound):
            raise
        except HonedError as error:
            known = failed(known, str(error), time.time())
            _log.warning("tuning %s failed, it is tried again later: %s", plan.name, error)
        finally:
            self._session = None
        view.memory.put(plan.name, known)


def _leave(_number: int, _frame: object) -> None:
    raise SystemExit(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """The service as it was last seen; a place for each model that may be tuned."""

    wanted: tuple[Wanted, ...]
    unprofiled: tuple[profiles.Unprofiled, ...]  # of models that are not finished
    places: dict[str, TuningPlaces]
    memory: TuningState
    records: Path


class _Devices:
    """The service's devices, and which models live on them."""

    def __init__(self, status: Status) -> None:
        self._default = status.device_spec
        gpus = [each for each in status.devices if each.engine == "gpu"]
        self._setups = {each.spec: setup_for(each.device) for each in gpus if each.device is not None}
        self.homes = {name: each.spec for each in gpus if each.device is not None for name in each.models}
        self.away = {name for each in status.devices for name in each.away}

    def house(self, name: str, shown: ModelShown) -> None:
        """The device of a model that the CPU engine serves: its compiled form's, which may become faster."""
        if shown.kernels and shown.placement.device in self._setups:
            self.homes[name] = shown.placement.device

    def setup(self, name: str) -> Setup:
        """What the model is tuned on."""
        return self._setups[self.homes.get(name, self._default)]


def _look(client: Client) -> _View:
    status = client.ask(methods.SERVER_STATUS)
    if status.device is None:
        raise Unavailable("its worker has no device yet")
    state_dir, cache_dir = Path(status.places.state_dir), Path(status.places.cache_dir)
    records, memory = state_dir / "records.sqlite", TuningState(state_dir / "tuner.json")
    devices, metrics = _Devices(status), client.ask(methods.METRICS)
    variants = {each.name for each in metrics.variants}
    hints = next(each.value for each in client.ask(methods.CONFIG_SHOW).settings if each.name == "hub.trials")
    latest = _latest_hints(records, [model.name for model in (*metrics.models, *metrics.variants)])
    wanted, unprofiled = [], []
    for model in (*metrics.models, *metrics.variants):
        history = client.ask(methods.MODEL_HISTORY, HistoryParams(name=model.name))
        one = _wanted(client, model, history, devices, memory, is_variant=model.name in variants)
        one = replace(one, known=hinted(one.known, latest.get(model.name, 0)))
        wanted.append(one)
        if one.obstacle or one.known.finished or model.engine != "gpu" or not model.ready:
            continue
        version = profiles.Unprofiled(model.name, model.sha256)
        if profiles.wanted(version, model.spent, history.latency):
            unprofiled.append(version)
    return _View(
        wanted=tuple(wanted),
        unprofiled=tuple(unprofiled),
        places={
            name: TuningPlaces(device=spec, records=records, cache_dir=cache_dir, hints=hints)
            for name, spec in devices.homes.items()
        },
        memory=memory,
        records=records,
    )


def _wanted(
    client: Client,
    model: ModelFigures,
    history: ModelHistory,
    devices: _Devices,
    memory: TuningState,
    *,
    is_variant: bool,
) -> Wanted:
    name, spent, shown = model.name, model.spent, None
    # Variants that rest can be tuned, too: they may become the faster engine for their shapes.
    if model.ready or is_variant:
        shown = client.ask(methods.MODEL_SHOW, ModelParams(name=name))
    if shown and (is_variant or model.engine == "cpu"):
        devices.house(name, shown)
    setup = devices.setup(name)
    source = shown.source.sha256 if shown else ""
    obstacle = "" if shown and name in devices.homes else "it is not served"
    if shown and not shown.kernels:
        obstacle = "it has no compiled form"
    if name in devices.away or (is_variant and model.away):
        obstacle = "its device is lost"
    elif history.pinned:
        obstacle = f"version {history.version} is pinned"
    elif history.on_trial:
        obstacle = "its new version is on trial"
    known = memory.get(name, f"{source} {setup.device_key} {setup.driver} {setup.compiler}")
    return Wanted(name=name, seconds=spent.seconds, tasks=spent.tasks, obstacle=obstacle, known=known)


def _latest_hints(path: Path, models: Sequence[str]) -> dict[str, int]:
    """What a hub has brought for models, as `Records.latest_hint` counts it."""
    if not path.exists():
        return {}
    try:
        with Records.open(path) as records:
            return {model: records.latest_hint(model) for model in models}
    except HonedError as error:
        _log.warning("what a hub brought is not known: %s", error)
        return {}


def figures_in(path: Path) -> TuningFigures | None:
    """What tuning has done so far; None where there are no records yet."""
    if not path.exists():
        return None
    try:
        with Records.open(path) as records:
            return records.figures()
    except HonedError as error:
        return TuningFigures(trials={}, faults=0, gains={}, reason=f"the records cannot be read: {error}")
