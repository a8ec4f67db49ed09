"""The seam between requests and features: a feature wraps the `infer` of the models that use it.

Batching, sequences, variants, sizes and users' own models are features. The pipeline asks each whether it
wraps a model when the model is first asked for, and again when its version or its settings changed. So a
request for a model that uses no feature runs no feature's code.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from honed.daemon.core.model import ServedModel
from honed.daemon.serving.plan import InferencePlan
from honed.daemon.transport.connection import Connection
from honed.protocol.params import InferParams
from honed.protocol.results import Inferred, MetSizes

# Called with what ran the request, its plan, and the sizes that depend on the data which its parts met.
Answered = Callable[[ServedModel, InferencePlan, tuple[MetSizes, ...]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class InferCall:
    """A request on its way through the features of its model `entry`.

    Features replace what they change: `runner` answers in the place of `entry` where it is there, `deadline`
    (monotonic seconds) counts in the place of the timeout of `params`, with `alone` the request is not joined
    with others, and each of `answered` is called when the request was answered.
    """

    connection: Connection
    entry: ServedModel
    params: InferParams
    runner: ServedModel | None = None
    deadline: float | None = None
    alone: bool = False
    answered: tuple[Answered, ...] = ()


Infer = Callable[[InferCall], Awaitable[Inferred]]


class Feature(Protocol):
    """Optional behaviour of the service."""

    def wrap(self, entry: ServedModel, infer: Infer) -> Infer | None:
        """Return what answers requests for a model around `infer`; None: the model does not use this."""

    def forget(self, model: str) -> None:
        """Forget a model or a variant that was removed."""
