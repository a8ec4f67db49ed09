"""Reads the service's state for its tuner, and keeps what the tuner remembers of models between starts."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from honed.machine.files import replacing
from honed.protocol import methods, strict
from honed.protocol.errors import HonedError, Unavailable
from honed.protocol.params import HistoryParams, ModelParams, TuningFigures
from honed.protocol.results import ModelHistory
from honed.protocol.service import ModelFigures, Status
from honed.runtime.client import Client
from honed.tuner.records.store import Records
from honed.tuner.setup import setup_for, tuning_key

from .choice import TuningCandidate, TuningHistory, Unprofiled, after_hints, worth_profiling

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    models: dict[str, TuningHistory]


class TuningState:
    """A file beside the records with each model's `TuningHistory`; its loss costs nothing but time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._models = self._read()

    def get(self, name: str, key: str) -> TuningHistory:
        """Return the history of a model; an empty one where its key is no longer `key`."""
        known = self._models.get(name)
        return known if known is not None and known.key == key else TuningHistory(key=key)

    def put(self, name: str, history: TuningHistory) -> None:
        """Store a model's history; warn where the disk is full."""
        self._models[name] = history
        try:
            with replacing(self._path) as file:
                file.write(json.dumps(strict.to_plain(_File(models=self._models)), indent=1).encode())
        except HonedError as error:
            _log.warning("what was tuned is not remembered: %s", error)

    def _read(self) -> dict[str, TuningHistory]:
        try:
            plain = json.loads(self._path.read_bytes())
            return dict(strict.from_plain(_File, plain, where=self._path.name, none_omitted=True).models)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            _log.warning(
                "%s cannot be read (%s): models that were tuned are looked at again", self._path, error
            )
            return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerView:
    """The service as last read, and the folders of it and its tuner."""

    wanted: tuple[TuningCandidate, ...]
    unprofiled: tuple[Unprofiled, ...]  # Versions to profile, of models that are not finished
    devices: dict[str, str]  # Specs, by the models that may be tuned
    memory: TuningState
    records: Path
    cache_dir: Path
    hints: int  # Records of a hub that may be tried per task and day


class _Devices:
    """The service's devices, and the models placed on each."""

    def __init__(self, status: Status) -> None:
        gpus = {each.spec: each for each in status.devices if each.engine == "gpu"}
        self.default = status.device_spec
        self.setups = {spec: setup_for(each.device) for spec, each in gpus.items() if each.device is not None}
        self.homes = {name: spec for spec in self.setups for name in gpus[spec].models}
        self.away = {name for each in status.devices for name in each.away}


def look(client: Client) -> TunerView:
    """Return the present state of the service; raise Unavailable while it has no device."""
    status = client.ask(methods.SERVER_STATUS)
    if status.device is None:
        raise Unavailable("its worker has no device yet")
    state_dir = Path(status.places.state_dir)
    records, memory = state_dir / "records.sqlite", TuningState(state_dir / "tuner.json")
    devices, metrics = _Devices(status), client.ask(methods.METRICS)
    variants = {each.name for each in metrics.variants}
    hints = next(each.value for each in client.ask(methods.CONFIG_SHOW).settings if each.name == "hub.trials")
    latest = _latest_hints(records, [model.name for model in (*metrics.models, *metrics.variants)])
    wanted, unprofiled = [], []
    for model in (*metrics.models, *metrics.variants):
        history = client.ask(methods.MODEL_HISTORY, HistoryParams(name=model.name))
        one = _candidate_of(client, model, history, devices, memory, is_variant=model.name in variants)
        one = replace(one, history=after_hints(one.history, latest.get(model.name, 0)))
        wanted.append(one)
        if one.obstacle or one.history.finished or model.engine != "gpu" or not model.ready:
            continue
        version = Unprofiled(model.name, model.sha256)
        if worth_profiling(version, model.spent, history.latency):
            unprofiled.append(version)
    return TunerView(
        wanted=tuple(wanted),
        unprofiled=tuple(unprofiled),
        devices=devices.homes,
        memory=memory,
        records=records,
        cache_dir=Path(status.places.cache_dir),
        hints=hints,
    )


def _candidate_of(
    client: Client,
    model: ModelFigures,
    history: ModelHistory,
    devices: _Devices,
    memory: TuningState,
    *,
    is_variant: bool,
) -> TuningCandidate:
    name, spent, shown = model.name, model.spent, None
    # Variants that rest can be tuned, too: they may become the faster engine for their shapes.
    if model.ready or is_variant:
        shown = client.ask(methods.MODEL_SHOW, ModelParams(name=name))
    # A model served by the CPU engine keeps its device, where its compiled form may become faster.
    rests = is_variant or model.engine == "cpu"
    if shown and rests and shown.kernels and shown.placement.device in devices.setups:
        devices.homes[name] = shown.placement.device
    setup = devices.setups[devices.homes.get(name, devices.default)]
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
    known = memory.get(name, tuning_key(source, setup))
    return TuningCandidate(
        name=name, seconds=spent.seconds, tasks=spent.tasks, obstacle=obstacle, history=known
    )


def _latest_hints(path: Path, models: Sequence[str]) -> dict[str, int]:
    """Return `Records.latest_hint` of each model; nothing where the records are missing or unreadable."""
    if not path.exists():
        return {}
    try:
        with Records.open(path) as records:
            return {model: records.latest_hint(model) for model in models}
    except HonedError as error:
        _log.warning("what a hub brought is not known: %s", error)
        return {}


def figures_in(path: Path) -> TuningFigures | None:
    """Return figures on all tuning so far; None where there are no records yet."""
    if not path.exists():
        return None
    try:
        with Records.open(path) as records:
            return records.figures()
    except HonedError as error:
        return TuningFigures(trials={}, faults=0, gains={}, reason=f"the records cannot be read: {error}")
