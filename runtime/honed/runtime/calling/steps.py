"""What operations of clients are made of: calls that they yield, answers that they are given.

`Client` performs them in the calling thread, `AsyncClient` awaits them.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, ParamSpec, TypeVar, overload

from honed.protocol import strict
from honed.protocol.arrivals import close_all
from honed.protocol.errors import InvalidArgument
from honed.protocol.methods import Method
from honed.protocol.peer import ResponseReceived
from honed.protocol.strict import Map

from .endpoint import Progress

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
USUAL: Final = -1.0  # the client's own timeout


@dataclass(slots=True)
class Reply:
    """The result of a call as it travelled, and the descriptors that came with it, now the operation's."""

    result: Map
    descriptors: list[int]


@dataclass(slots=True)
class Ask:
    """A call to make. `timeout` in seconds, None: none; the descriptors stay the operation's."""

    method: Method[Any, Any]
    params: Any
    timeout: float | None = USUAL
    descriptors: Sequence[int] = ()
    progress: Progress | None = None

    def limit(self, usual: float) -> float | None:
        """Seconds until it is given up; `usual` are the client's."""
        return usual if self.timeout == USUAL else self.timeout

    def plain(self) -> Map:
        """The parameters as they travel."""
        plain: Map = strict.to_plain(self.params, omit_defaults=True)
        return plain

    def taken(self, answered: ResponseReceived) -> Reply:
        """The answer; raises InvalidArgument where it is none, and closes descriptors not asked for."""
        descriptors = answered.descriptors
        if not self.method.gives or not isinstance(answered.result, dict):
            close_all(descriptors)
            descriptors = []
        if not isinstance(answered.result, dict):
            raise InvalidArgument("the service answered something that is no map; compare versions")
        return Reply(answered.result, descriptors)


Steps = Generator[Ask, Reply, T]


class operation(Generic[P, R]):  # noqa: N801 - a decorator
    """A method of both clients, made of its steps when their classes are."""

    def __init__(self, steps: Callable[Concatenate[Any, P], Steps[R]]) -> None:
        self.steps = steps

    if TYPE_CHECKING:

        @overload
        def __get__(self, client: AbstractContextManager[Any, Any], owner: Any = ...) -> Callable[P, R]: ...
        @overload
        def __get__(
            self, client: AbstractAsyncContextManager[Any, Any], owner: Any = ...
        ) -> Callable[P, Coroutine[Any, Any, R]]: ...
        def __get__(self, client: Any, owner: Any = None) -> Any:
            """What a type checker sees: of what takes `with` a method that returns, else one to await."""
