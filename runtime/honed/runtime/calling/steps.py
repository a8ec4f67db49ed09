"""What operations of clients are made of: calls that they yield, answers that they are given.

`Client` performs them in the calling thread, `AsyncClient` awaits them.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, ParamSpec, TypeVar, overload

from honed.protocol import strict
from honed.protocol.errors import InvalidArgument
from honed.protocol.methods import MAX_TIMEOUT_US, Method
from honed.protocol.peer import ResponseReceived
from honed.protocol.streams import Progress
from honed.protocol.strict import Map
from honed.protocol.wire import close_all

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Usual(enum.Enum):
    """Stands for the client's own timeout."""

    USUAL = enum.auto()


USUAL: Final = Usual.USUAL
_MOST_SECONDS: Final = MAX_TIMEOUT_US / 1e6


def limit_of(timeout: float | None) -> float | None:
    """Return the seconds until a call is given up; None: no limit, as for infinity and a day or more.

    Raises InvalidArgument for what is no number of at least 0.
    """
    if timeout is None:
        return None
    try:
        seconds = float(timeout)
    except (TypeError, ValueError):
        seconds = math.nan
    except OverflowError:  # An int that no float can be
        seconds = math.inf if timeout > 0 else -math.inf
    if not seconds >= 0 or isinstance(timeout, str | bytes):
        raise InvalidArgument(
            f"timeout is {timeout!r:.40}; give seconds, 0 or more, or infinity for no limit"
        )
    return seconds if seconds < _MOST_SECONDS else None


@dataclass(slots=True)
class Reply:
    """The result of a call as it travelled, and the descriptors that came with it, now the operation's."""

    result: Map
    descriptors: list[int]


@dataclass(slots=True)
class RpcRequest:
    """A call to make. `timeout` in seconds, None: none; the descriptors stay the operation's.

    `params` are those of the method, or how they travel.
    """

    method: Method[Any, Any]
    params: Any
    timeout: float | Usual | None = USUAL
    descriptors: Sequence[int] = ()
    progress: Progress | None = None

    def limit(self, usual: float | None) -> float | None:
        """Return the seconds until the call is given up; `usual` are the client's. Raise InvalidArgument."""
        return limit_of(usual if isinstance(self.timeout, Usual) else self.timeout)

    def plain(self) -> Map:
        """Return the parameters as they travel."""
        if type(self.params) is dict:
            return self.params
        plain: Map = strict.to_plain(self.params, omit_defaults=True)
        return plain

    def taken(self, answered: ResponseReceived) -> Reply:
        """Return the answer as a reply, and close descriptors that the method does not give.

        Raises InvalidArgument where the answer is no map.
        """
        descriptors = answered.descriptors
        if not self.method.returns_descriptors or not isinstance(answered.result, dict):
            close_all(descriptors)
            descriptors = []
        if not isinstance(answered.result, dict):
            raise InvalidArgument("the service answered something that is no map; compare versions")
        return Reply(answered.result, descriptors)


RpcSteps = Generator[RpcRequest, Reply, T]


class operation(Generic[P, R]):  # noqa: N801 - a decorator
    """A method of both clients, made of its steps when their classes are."""

    def __init__(self, steps: Callable[Concatenate[Any, P], RpcSteps[R]]) -> None:
        self.steps = steps

    if TYPE_CHECKING:

        @overload
        def __get__(self, client: AbstractContextManager[Any, Any], owner: Any = ...) -> Callable[P, R]: ...
        @overload
        def __get__(
            self, client: AbstractAsyncContextManager[Any, Any], owner: Any = ...
        ) -> Callable[P, Coroutine[Any, Any, R]]: ...
        def __get__(self, client: Any, owner: Any = None) -> Any:
            """Return what a type checker sees: a method that returns for a client that takes `with`.

            For any other client, it is a method to await.
            """
