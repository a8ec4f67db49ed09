"""The seam between the service and its features: what a feature may add, and what it is given.

Batching, sequences, variants, sizes and users' own models are features (`features/`). `assembly.py` has a row
for each, and nothing else knows them: layers ask `Feature`s by what is here.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from honed.daemon.core.model import ServedModel
from honed.daemon.serving.loader import VersionComparer
from honed.daemon.serving.plan import InferencePlan
from honed.daemon.store.names import Shapes
from honed.daemon.transport.connection import Callbacks, Connection, WithDescriptors
from honed.protocol.params import Data, LoadParams, PrepareParams
from honed.protocol.results import ObservedSizes
from honed.protocol.service import MetricsText
from honed.protocol.strict import Map

P = TypeVar("P")
R = TypeVar("R")
T = TypeVar("T")
# What was found out of the parameters of requests, by what it is, with what it depends on beside them.
Known = dict[Hashable, tuple[object, Any]]


@dataclass(slots=True, kw_only=True)  # Frozen takes four times as long to make
class MethodCall:
    """A request, by whom, with its number, parameters and descriptors."""

    connection: Connection
    msgid: int
    params: Map
    descriptors: list[int]

    def progress(self, news: Map) -> None:
        """Tell how far it is."""
        self.connection.notify("Progress", {"msgid": self.msgid, **news})


# Answers requests for a method of the socket; until it is awaited, it may raise HonedError alone.
Handler = Callable[
    [MethodCall, P], Coroutine[Any, Any, R | WithDescriptors[R] | MetricsText | Map] | Callbacks
]
# Called with what ran the request, its plan, and the sizes that depend on the data which its parts met.
Answered = Callable[[ServedModel, InferencePlan, tuple[ObservedSizes, ...]], None]


@dataclass(slots=True, kw_only=True)  # Frozen takes four times as long to make
class FeatureRequest:
    """A request on its way through the features of its model `entry`.

    `data` and `id` are its own, `params` what it was prepared with; `known` has what was found out of these,
    for all requests of them. Features replace what they change: `runner_of` gives what answers inputs of
    some shapes in the place of `entry`, `deadline` (monotonic seconds) counts in the place of the timeout of
    `params`, with `alone` the request is not joined with others, and each of `answered` is called when the
    request was answered.
    """

    connection: Connection
    entry: ServedModel
    params: PrepareParams
    data: tuple[Data, ...]
    id: str
    known: Known = field(default_factory=dict)
    runner_of: Callable[[Shapes, str], ServedModel] | None = None
    deadline: float | None = None
    alone: bool = False
    answered: tuple[Answered, ...] = ()

    def instead(self, params: PrepareParams, data: tuple[Data, ...]) -> FeatureRequest:
        """Return the request with other parameters and data."""
        return replace(self, params=params, data=data, known={})

    def seconds(self, plan: InferencePlan) -> float:
        """Return how long the request may still take."""
        return plan.timeout if self.deadline is None else self.deadline - time.monotonic()

    def kept(self, what: Hashable, depends: object, found: Callable[[], T]) -> T:
        """Return `what` was found out of `params` before, as long as what it `depends` on is equal."""
        held = self.known.get(what)
        if held is None or held[0] != depends:
            held = self.known[what] = depends, found()
        result: T = held[1]
        return result

    @property
    def shapes(self) -> Shapes:
        """The shapes of its inputs."""
        return {tensor.name: tensor.shape for tensor in self.params.inputs}

    def runner(self, shapes: Shapes | None = None, variant: str = "") -> ServedModel:
        """Return what is to run it, or inputs of other shapes, whose `variant` the caller may know."""
        if self.runner_of is None:
            return self.entry
        return self.runner_of(self.shapes if shapes is None else shapes, variant)


# Answers a request: with the result of ModelInfer, as it travels. It asks for no task of its own, in which it
# does not run: `asyncio.timeout` would.
Infer = Callable[[FeatureRequest], Awaitable[Map]]


@dataclass(frozen=True, slots=True)
class BackgroundTask:
    """Something to do in the background. `what` names it in the log, as "compiling m as m@5x7".

    `run` raises HonedError for failures that may pass; then it is tried again later.
    """

    what: str
    run: Callable[[], Awaitable[None]]


class Feature:
    """Optional behaviour of the service. What a feature does not change stays as it is here."""

    __slots__ = ()
    makes_variants: ClassVar[bool] = False  # That a client asks for with a model

    # Requests

    def methods(self) -> Mapping[str, Handler[Any, Any]]:
        """Return what answers methods of the socket, by their names in `protocol/methods.py`."""
        return {}

    def wrap(self, entry: ServedModel, infer: Infer) -> Infer | None:
        """Return what answers requests for a model around `infer`; None: the model does not use this.

        The pipeline asks when a model is first asked for, and again when its version or settings changed, so
        that a request for a model without features runs no feature's code.
        """
        return None

    async def added(self, call: MethodCall, params: LoadParams) -> Sequence[str]:
        """Do what else is asked for with a model that was added; return notes for the answer."""
        return ()

    def status(self) -> Mapping[str, object]:
        """Return fields of ServerStatus."""
        return {}

    def shown(self, entry: ServedModel) -> Mapping[str, object]:
        """Return fields of ModelShow."""
        return {}

    def listed(self, entry: ServedModel) -> Mapping[str, object]:
        """Return fields of a model in RepositoryIndex."""
        return {}

    def forget(self, model: str) -> None:
        """Forget a model or a variant that was removed."""

    def version_comparer(self, entry: ServedModel) -> VersionComparer | None:
        """Return what compares versions of a model in the place of plain runs; None: these will do.

        The feature then compares the model's engines by itself, too.
        """
        return None

    # While nobody asks

    async def tidy(self) -> None:
        """Keep the bounds; called every few seconds, whether the machine is idle or not."""

    def background(self, *, idle: bool) -> BackgroundTask | None:
        """Return what is to be done next, or None. `idle`: so is the machine, and no model is changed."""
        return None

    async def run(self) -> None:
        """Do what lasts as long as the service; cancelled in the end, after `close` and `background`."""

    async def close(self) -> None:
        """End what is under way, when the service stops."""
