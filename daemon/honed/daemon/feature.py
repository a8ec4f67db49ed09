"""Defines the interface between the service and its features.

Batching, sequences, variants, sizes and users' own models are features (`features/`). `assembly.py` has a row
for each; other modules use them only through `Feature`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from honed.daemon.aio import Driven
from honed.daemon.core.model import ServedModel
from honed.daemon.serving.loader import VersionComparer
from honed.daemon.serving.plan import InferencePlan
from honed.daemon.store.names import Shapes
from honed.daemon.transport.connection import Connection, WithDescriptors
from honed.protocol.params import LoadParams, PrepareParams
from honed.protocol.service import MetricsText
from honed.protocol.strict import Map
from honed.protocol.values import Data, ObservedSizes

P = TypeVar("P")
R = TypeVar("R")
T = TypeVar("T")
# Values derived from the parameters of requests, each with the other things that it depends on.
Known = dict[Hashable, tuple[object, Any]]


@dataclass(slots=True, kw_only=True)  # Constructing a frozen one takes four times as long
class MethodCall:
    """A request for a method: its connection, number and descriptors."""

    connection: Connection
    msgid: int
    descriptors: list[int]

    def progress(self, news: Map) -> None:
        """Send a Progress notification to the client."""
        self.connection.notify("Progress", {"msgid": self.msgid, **news})


# Answers requests for a method of the socket; before it is awaited, it may only raise HonedError.
Handler = Callable[
    [MethodCall, P], Coroutine[Any, Any, R | WithDescriptors[R] | MetricsText | Map] | Driven[Any]
]
# Called with the model that ran a request, its plan, and the sizes that partitions observed.
Answered = Callable[[ServedModel, InferencePlan, tuple[ObservedSizes, ...]], None]


@dataclass(slots=True, kw_only=True)  # Constructing a frozen one takes four times as long
class FeatureRequest:
    """A request that passes through the features of its model `entry`.

    `params` were prepared, perhaps for several requests that differ in `data` and `id`; `cache` caches values
    derived from them. Features replace fields: `runner_of` returns the model that answers inputs of given
    shapes instead of `entry`; `deadline` (monotonic seconds), which ModelRun sets, overrides the timeout of
    `params`; with `alone` the request is not batched; each of `answered` is called after the answer. What a
    feature answers by itself counts as a request, and not as an inference.
    """

    connection: Connection
    entry: ServedModel
    params: PrepareParams
    data: tuple[Data, ...]
    id: str
    cache: Known = field(default_factory=dict)
    runner_of: Callable[[Shapes, str], ServedModel] | None = None
    deadline: float | None = None
    alone: bool = False
    answered: tuple[Answered, ...] = ()

    def seconds(self, plan: InferencePlan) -> float:
        """Return the seconds that the request may still take."""
        return plan.timeout if self.deadline is None else self.deadline - time.monotonic()

    def compute_once(self, what: Hashable, depends: object, compute: Callable[[], T]) -> T:
        """Return the cached value `what`, or compute it by `compute` if `depends` has changed."""
        held = self.cache.get(what)
        if held is None or held[0] != depends:
            held = self.cache[what] = depends, compute()
        result: T = held[1]
        return result

    @property
    def shapes(self) -> Shapes:
        """The shapes of the request's inputs."""
        return {tensor.name: tensor.shape for tensor in self.params.inputs}

    def runner(self, shapes: Shapes | None = None, variant: str = "") -> ServedModel:
        """Return the model that runs the request, or inputs of `shapes`; `variant` is its name, if known."""
        if self.runner_of is None:
            return self.entry
        return self.runner_of(self.shapes if shapes is None else shapes, variant)


# Answers a request with the result of ModelInfer, as a map to send. It must not use the current task, as
# `asyncio.timeout` does, because it may run without one.
Infer = Callable[[FeatureRequest], Awaitable[Map]]


@dataclass(frozen=True, slots=True)
class BackgroundTask:
    """A task of background work; `what` names it in the log, such as "compiling m as m@5x7".

    If `run` raises HonedError, its source is tried again later.
    """

    what: str
    run: Callable[[], Awaitable[None]]


class Feature:
    """The base class of features; its methods do nothing."""

    __slots__ = ()
    makes_variants: ClassVar[bool] = False  # Compiles variants that are requested with a model

    # Requests

    def methods(self) -> Mapping[str, Handler[Any, Any]]:
        """Return handlers of methods, by their names in `protocol/methods.py`."""
        return {}

    def wrap(self, entry: ServedModel, infer: Infer) -> Infer | None:
        """Return a handler of a model's requests that calls `infer`; None: the feature is not used.

        The pipeline calls this at a model's first request, and again when its version or settings have
        changed, so that requests for a model without features run no code of features. A configuration that
        is read again changes nothing here.
        """
        return None

    async def on_added(self, call: MethodCall, params: LoadParams) -> Sequence[str]:
        """Do the feature's work for an added model; return notes for the answer."""
        return ()

    def status(self) -> Mapping[str, object]:
        """Return fields of ServerStatus."""
        return {}

    def show_fields(self, entry: ServedModel) -> Mapping[str, object]:
        """Return fields of ModelShow."""
        return {}

    def index_fields(self, entry: ServedModel) -> Mapping[str, object]:
        """Return fields of a model in RepositoryIndex."""
        return {}

    def forget(self, model: str) -> None:
        """Drop data of a removed model or variant."""

    def version_comparer(self, entry: ServedModel) -> VersionComparer | None:
        """Return the comparison of a model's versions; None for plain runs.

        Such a feature must also compare the model's engines by itself.
        """
        return None

    # Background work

    async def tidy(self) -> None:
        """Enforce limits; called every few seconds, idle or not."""

    def background(self, *, idle: bool) -> BackgroundTask | None:
        """Return the next task, or None; `idle`: the machine is idle, and no model is being changed."""
        return None

    async def run(self) -> None:
        """Run as long as the service; cancelled at its end, after `close` and `background`."""

    async def close(self) -> None:
        """End work in progress when the service stops."""
