"""All devices together: each has a lane; a request goes to the lane that serves its model."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from honed.runtime.errors import HonedError, Unavailable

from .config import Service
from .dispatch import PROFILE_SECONDS, Asked, Dispatcher, Moved, removed
from .inference import Plan
from .lane import Lane, make
from .latencies import Latencies
from .limits import Limits
from .loading import Loaded, Loader
from .lost import Losses
from .models import Entry, Registry
from .placement import Placement
from .regions import HeldRegion
from .requests import Client
from .store import Store

_SETTLING_SECONDS = 15.0  # that a device which hangs may keep the next one waiting
_log = logging.getLogger(__name__)


class Fleet:
    """The lanes of one service, and what is done on all of them.

    `on_served`, `on_fault` and `on_broken` are those of `Dispatcher`, for models on their own device.
    """

    def __init__(
        self, limits: Limits, service: Service, registry: Registry, store: Store, latencies: Latencies
    ) -> None:
        self._registry = registry
        self._make: Callable[..., Lane] = partial(
            self._lane, limits, service.cache_dir, store=store, latencies=latencies
        )
        self.placement = Placement(service.device, service.devices, service.placement)
        self.lanes: dict[str, Lane] = {name: self._make(name) for name in self.placement.names}
        self.losses = Losses(registry, store, service.fallback, self)
        self._group: asyncio.TaskGroup | None = None
        self.on_served: Callable[[Entry], None] = lambda _: None
        self.on_fault: Callable[[Entry, str], None] = lambda _, __: None
        self.on_broken: Callable[[Entry, str], bool] = lambda _, __: False

    def _lane(
        self,
        limits: Limits,
        cache_dir: Path,
        name: str,
        *,
        store: Store,
        latencies: Latencies,
        stand_in: bool = False,
    ) -> Lane:
        lane = make(name, limits, cache_dir, self._registry, store, latencies, stand_in=stand_in)
        dispatcher = lane.dispatcher
        dispatcher.on_served = lambda entry: self.on_served(entry) if entry.at_home else None
        dispatcher.on_fault = lambda entry, why: self.on_fault(entry, why) if entry.at_home else None
        dispatcher.on_broken = lambda entry, why: entry.at_home and self.on_broken(entry, why)
        dispatcher.on_ready = lambda: self.losses.back(lane)
        dispatcher.on_failed = lambda: self.losses.lost(lane)
        dispatcher.on_released = self._released
        return lane

    @property
    def default(self) -> Lane:
        """Of models that are not placed elsewhere."""
        return self.lanes[self.placement.default]

    async def run(self) -> None:
        """Keep a worker on each device until cancelled; they are gone when this returns."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            for lane in list(self.lanes.values()):
                self.start(lane)
                # One after the other: where peaks are measured, they are not measured side by side.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_SETTLING_SECONDS):
                        await lane.supervisor.settled()
                self._warn_of_twins(lane)

    def start(self, lane: Lane) -> None:
        """Run a lane's worker, unless it runs."""
        assert self._group is not None
        if lane.running is None or lane.running.done():
            lane.running = self._group.create_task(lane.run())

    def add_stand_in(self, name: str) -> Lane:
        """A lane that runs only while it is needed; it does not run yet."""
        lane = self.lanes[name] = self._make(name, stand_in=True)
        return lane

    def dismiss(self, lane: Lane) -> None:
        """Stop a stand-in that serves nothing any more, once what runs there has ended."""
        if self._group is not None and lane.stand_in and lane.state != "resting":
            self._group.create_task(self._dismiss(lane))

    async def _dismiss(self, lane: Lane) -> None:
        await lane.dispatcher.quiet()
        running = lane.running
        if running is None or self._registry.of(lane.name):
            return
        running.cancel()
        await asyncio.wait([running])
        if self._registry.of(lane.name):  # it was needed again meanwhile
            self.start(lane)

    def _warn_of_twins(self, lane: Lane) -> None:
        for other in self.lanes.values():
            if other is not lane and lane.supervisor.spec and other.supervisor.spec == lane.supervisor.spec:
                _log.warning(
                    "%r and %r are one device, %s; name it once in the configuration",
                    other.name,
                    lane.name,
                    lane.shown,
                )

    def of(self, entry: Entry) -> Lane:
        """The lane that serves a model now."""
        return self.lanes[entry.lane]

    def loader(self, entry: Entry) -> Loader:
        """Of the worker that serves a model now."""
        return self.of(entry).loader

    def check_at_home(self, entry: Entry) -> None:
        """Raise Unavailable where another device stands in for the model's own."""
        if not entry.at_home:
            raise Unavailable(f"{entry.name} has its versions changed on its own device only; {entry.away}")

    def asked(self, model: str, device: str) -> list[Lane]:
        """The lanes that a user's words for a device mean: several for "fastest". Raises NotFound."""
        known = {name: lane.supervisor.spec for name, lane in self.lanes.items() if not lane.stand_in}
        return [self.lanes[name] for name in self.placement.asked(model, device, known)]

    def home(self, model: str, device: str = "", why: str = "") -> Lane:
        """Where a model belongs that was added for `device`, "" for any."""
        return self.lanes[self.placement.home(model, device, why).device]

    def put(self, entry: Entry) -> Entry | None:
        """Enter a model, on the device it belongs to; gives the one it replaces."""
        manifest = entry.manifest
        entry.home = entry.lane = self.home(entry.name, manifest.device, manifest.placed).name
        replaced = self._registry.put(entry)
        if replaced is not None and replaced.lane != entry.lane:
            self.of(replaced).dispatcher.hand_over(entry.name)
        return replaced

    def admit(self, entry: Entry, loaded: Loaded) -> None:
        """A model that was put has been loaded: serve it."""
        self.loader(entry).admit(entry, loaded)

    def drop_model(self, entry: Entry, error: HonedError) -> None:
        """Answer everything that waits for a model with `error`."""
        self.of(entry).dispatcher.drop_model(entry.name, error)

    def unload(self, entry: Entry) -> None:
        """A model left the registry."""
        self.loader(entry).unload(entry.key)
        self.dismiss(self.of(entry))

    async def infer(self, client: Client, entry: Entry, plan: Plan) -> dict[str, Any]:
        """The result of ModelInfer; raises what went wrong."""
        return await self._routed(
            entry, plan.timeout, lambda dispatcher, now, asked: dispatcher.infer(client, now, plan, asked)
        )

    async def profile(self, client: Client, entry: Entry, runs: int, *, timeline: bool) -> dict[str, Any]:
        """The result of ModelProfile; raises what went wrong."""
        return await self._routed(
            entry,
            PROFILE_SECONDS,
            lambda dispatcher, now, asked: dispatcher.profile(client, now, runs, asked, timeline=timeline),
        )

    async def _routed(
        self,
        entry: Entry,
        timeout: float,
        ask: Callable[[Dispatcher, Entry, Asked], Awaitable[dict[str, Any]]],
    ) -> dict[str, Any]:
        """Ask the device that serves the model, and the next one where it moves meanwhile."""
        now = time.monotonic()
        asked = Asked(arrived=now, deadline=now + timeout)
        while True:
            try:
                return await ask(self.of(entry).dispatcher, entry, asked)
            except Moved as moved:
                asked = dataclasses.replace(asked, attempts=moved.attempts)
            present = self._registry.find(entry.name)
            if present is None:
                raise removed(entry.name)
            entry = present

    def release(self, region: HeldRegion) -> None:
        """Let go of a region; with its last holder gone the workers unmap it."""
        if region.release():
            self._released(region.number)

    def _released(self, number: int) -> None:
        for lane in self.lanes.values():
            lane.dispatcher.drop_region(number)

    def forget_client(self, client: Client) -> None:
        """A connection is gone; its requests are cancelled."""
        for lane in self.lanes.values():
            lane.dispatcher.forget_client(client)

    def limits_changed(self) -> None:
        """The limits are others from now on."""
        for lane in self.lanes.values():
            lane.dispatcher.limits_changed()

    async def drain(self, seconds: float) -> None:
        """Let what is queued finish for so long, then answer the rest with Unavailable."""
        await asyncio.gather(*(lane.dispatcher.drain(seconds) for lane in self.lanes.values()))

    @property
    def ready(self) -> bool:
        """Whether some device has a worker, and none is about to get one."""
        states = {lane.state for lane in self.lanes.values()}
        return "ready" in states and "starting" not in states

    def queue(self) -> dict[str, int]:
        """Requests of all devices that wait and run."""
        total: Counter[str] = Counter()
        for lane in self.lanes.values():
            total.update(lane.queue())
        return {"waiting": total["waiting"], "running": total["running"]}

    def waiting(self) -> Counter[str]:
        """Requests that wait, by model."""
        total: Counter[str] = Counter()
        for lane in self.lanes.values():
            total.update(lane.dispatcher.queue.by_model())
        return total

    def workers(self) -> frozenset[int]:
        """Processes that serve, and the last ones that did."""
        supervisors = [lane.supervisor for lane in self.lanes.values()]
        ended = {end["pid"] for supervisor in supervisors for end in supervisor.last_ends}
        building = {pid for lane in self.lanes.values() for pid in lane.loader.builder.pids}
        return frozenset(ended | building | {supervisor.pid for supervisor in supervisors}) - {0}

    def plain(self) -> list[dict[str, Any]]:
        """The part `devices` of ServerStatus."""
        return [
            {
                "name": lane.name,
                "default": lane is self.default,
                "stand_in": lane.stand_in,
                "spec": lane.supervisor.spec,
                "device": lane.identity(),
                "peaks": lane.peaks(),
                "worker": lane.worker(),
                "queue": lane.queue(),
                "models": [entry.name for entry in self._registry.of(lane.name)],
                "away": [
                    entry.name
                    for entry in self._registry.all()
                    if entry.home == lane.name and not entry.at_home
                ],
            }
            for lane in self.lanes.values()
        ]

    def placed(self, entry: Entry) -> dict[str, Any]:
        """The part `placement` of ModelShow."""
        manifest = entry.manifest
        return {
            "device": self.lanes[entry.home].shown,
            "served_by": self.of(entry).shown,
            "why": self.placement.home(entry.name, manifest.device, manifest.placed).why,
            "away": entry.away,
        }
