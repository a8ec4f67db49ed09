"""The seam between the service and its features: what a feature may add, and what it is given.

Batching, sequences, variants, sizes and users' own models are features (`features/`). `assembly.py` has a row
for each, and nothing else knows them: layers ask `Feature`s by what is here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from honed.daemon.core.model import ServedModel
from honed.daemon.serving.loader import VersionComparer
from honed.daemon.serving.plan import InferencePlan
from honed.daemon.store.names import Shapes
from honed.daemon.transport.connection import Callbacks, Connection, WithDescriptors
from honed.protocol.params import InferParams, LoadParams
from honed.protocol.results import Inferred, ObservedSizes
from honed.protocol.service import MetricsText
from honed.protocol.strict import Map

P = TypeVar("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiCall:
    """A request, by whom, with its number, parameters and descriptors."""

    connection: Connection
    msgid: int
    params: Map
    descriptors: list[int]

    def progress(self, news: Map) -> None:
        """Tell how far it is."""
        self.connection.notify("Progress", {"msgid": self.msgid, **news})


# Answers requests for a method of the socket; until it is awaited, it may raise HonedError alone.
Handler = Callable[[ApiCall, P], Coroutine[Any, Any, R | WithDescriptors[R] | MetricsText | Map] | Callbacks]
# Called with what ran the request, its plan, and the sizes that depend on the data which its parts met.
Answered = Callable[[ServedModel, InferencePlan, tuple[ObservedSizes, ...]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class InferCall:
    """A request on its way through the features of its model `entry`.

    Features replace what they change: `runner_of` gives what answers inputs of some shapes in the place of
    `entry`, `deadline` (monotonic seconds) counts in the place of the timeout of `params`, with `alone` the
    request is not joined with others, and each of `answered` is called when the request was answered.
    """

    connection: Connection
    entry: ServedModel
    params: InferParams
    runner_of: Callable[[Shapes, str], ServedModel] | None = None
    deadline: float | None = None
    alone: bool = False
    answered: tuple[Answered, ...] = ()

    @property
    def shapes(self) -> Shapes:
        """The shapes of its inputs."""
        return {tensor.name: tensor.shape for tensor in self.params.inputs}

    def runner(self, shapes: Shapes | None = None, variant: str = "") -> ServedModel:
        """Return what is to run it, or inputs of other shapes, whose `variant` the caller may know."""
        if self.runner_of is None:
            return self.entry
        return self.runner_of(self.shapes if shapes is None else shapes, variant)


InferAnswer = Inferred | Map  # the result of ModelInfer, perhaps as it travels
Infer = Callable[[InferCall], Awaitable[InferAnswer]]


@dataclass(frozen=True, slots=True)
class Work:
    """Something to do in the background. `what` names it in the log, as "compiling m as m@5x7".

    `run` raises HonedError for failures that may pass; then it is tried again later.
    """

    what: str
    run: Callable[[], Awaitable[None]]


class Feature:
    """Optional behaviour of the service. What a feature does not change stays as it is here."""

    __slots__ = ()
    makes_variants: ClassVar[bool] = False  # that a client asks for with a model

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

    async def added(self, call: ApiCall, params: LoadParams) -> Sequence[str]:
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

    def background(self, *, idle: bool) -> Work | None:
        """Return what is to be done next, or None. `idle`: so is the machine, and no model is changed."""
        return None

    async def run(self) -> None:
        """Do what lasts as long as the service; cancelled in the end, after `close` and `background`."""

    async def close(self) -> None:
        """End what is under way, when the service stops."""
