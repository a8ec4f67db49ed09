"""Defines the steps of a client's operations: the calls that they yield, and the answers that they receive.

`Client` performs the calls in the calling thread, `AsyncClient` awaits them.
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
    """The default timeout: the client's own."""

    USUAL = enum.auto()


USUAL: Final = Usual.USUAL
_MOST_SECONDS: Final = MAX_TIMEOUT_US / 1e6


def limit_of(timeout: float | None) -> float | None:
    """Return the seconds until a call is given up; None (no limit) for None, infinity and a day or more.

    Raises InvalidArgument for what is no number of at least 0.
    """
    if timeout is None:
        return None
    try:
        seconds = float(timeout)
    except (TypeError, ValueError):
        seconds = math.nan
    except OverflowError:  # An int beyond the range of floats
        seconds = math.inf if timeout > 0 else -math.inf
    if not seconds >= 0 or isinstance(timeout, str | bytes):
        raise InvalidArgument(
            f"timeout is {timeout!r:.40}; give seconds, 0 or more, or infinity for no limit"
        )
    return seconds if seconds < _MOST_SECONDS else None


@dataclass(slots=True)
class Reply:
    """The untyped result of a call, and the descriptors received with it, which the operation closes."""

    result: Map
    descriptors: list[int]


@dataclass(slots=True)
class RpcRequest:
    """A call to make. `timeout` in seconds, None: no limit; the operation keeps and closes the descriptors.

    `params` are the method's, typed or as a map for the wire.
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
        """Return the parameters as a map for the wire."""
        if type(self.params) is dict:
            return self.params
        plain: Map = strict.to_plain(self.params, omit_defaults=True)
        return plain

    def reply_of(self, answered: ResponseReceived) -> Reply:
        """Return the answer as a reply, and close descriptors that the method does not return.

        Raises InvalidArgument if the answer is no map.
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
    """A decorator that makes an operation's steps a method of each client class."""

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
            """Return, for type checkers, a plain method for a client that takes `with`.

            For any other client, it is a method to await.
            """
