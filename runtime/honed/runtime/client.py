"""The client for apps: models on the machine's service, called like functions.

    from honed.runtime import Client
    with Client() as client:
        out = client.infer("lightglue", {"kpts0": a, "kpts1": b})

Needs NumPy and msgpack only.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from honed.protocol.errors import Unavailable
from honed.protocol.peer import ResponseReceived

from .calling.link import Link
from .calling.operations import Operations, register, unregister
from .calling.regions import Region
from .calling.sequences import Sequence
from .calling.steps import Ask, Reply, Steps, T


def _performing(steps: Callable[..., Steps[T]]) -> Callable[..., T]:
    """A method that takes the steps in the calling thread."""

    def method(self: Client, *args: Any, **kwargs: Any) -> T:
        taken = steps(self, *args, **kwargs)
        try:
            ask = next(taken)
            while True:
                try:
                    answer = self._exchange(ask)
                except BaseException as error:  # noqa: BLE001 - the operation has things to close
                    ask = taken.throw(error)
                else:
                    ask = taken.send(answer)
        except StopIteration as done:
            result: T = done.value
            return result

    return method


class Client(Operations, performing=_performing):
    """A connection to the service; threads may share it, and it reconnects if the service restarted.

    Every method raises the errors of `honed.runtime.errors` that the service answered with, and
    Unavailable where there is no service. Maps are returned as docs/protocol.md describes them.
    """

    def __init__(self, socket: str | os.PathLike[str] | None = None, *, timeout: float = 60.0) -> None:
        """`socket`: its path; None looks where honed listens. `timeout`: seconds a call may take."""
        super().__init__(socket, timeout=timeout)
        self._lock = threading.Lock()
        self._link: Link | None = None

    @contextmanager
    def region(self, nbytes: int) -> Iterator[Region]:
        """Shared memory of `nbytes` bytes for the arrays of `infer`; see `Region.array`."""
        with self._lock:
            region = self._new_region(nbytes)
        try:
            self._perform(self._connected(), register(region))
            with self._lock:
                self._regions[region.name] = region
            yield region
        finally:
            with self._lock:
                known = self._regions.pop(region.name, None)
            if known is not None:
                self._unregister(region)
            region.close()

    def sequence(self, model: str) -> Sequence:
        """A sequence of requests to `model`, whose state the service keeps between them."""
        return Sequence(self.infer, model)

    def close(self) -> None:
        """End the connection; a later call opens a new one."""
        with self._lock:
            link, self._link = self._link, None
        self._forget_scratch()
        if link is not None:
            link.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exchange(self, ask: Ask) -> Reply:
        """Make a call and wait for its answer, on the connection there is or a new one."""
        link = self._connected()
        try:
            return self._perform(link, ask)
        except _NotSent:
            # The service went away before it had the whole request, so sending it again is safe.
            self._drop(link)
            return self._perform(self._connected(), ask)

    def _perform(self, link: Link, ask: Ask) -> Reply:
        limit = ask.limit(self.timeout)
        deadline = None if limit is None else time.monotonic() + limit
        try:
            waiting = link.send(ask.method.name, ask.plain(), ask.descriptors)
        except Unavailable as error:
            raise _NotSent(str(error)) from error
        while True:
            news = link.wait(waiting, deadline)
            if isinstance(news, ResponseReceived):
                return ask.taken(news)
            if ask.progress is not None:
                try:
                    ask.progress(news)
                except BaseException:
                    link.cancel(waiting)
                    raise

    def _connected(self) -> Link:
        """A usable connection that knows this client's regions."""
        with self._lock:
            if self._link is not None and self._link.usable():
                return self._link
            if self._link is not None:
                self._link.close()
            self._link = None
            link = Link(self.socket, self.timeout)
            try:
                for region in list(self._regions.values()):
                    self._perform(link, register(region))
            except BaseException:
                link.close()
                raise
            self._link = link
            return link

    def _drop(self, link: Link) -> None:
        with self._lock:
            if self._link is link:
                self._link = None
        link.close()

    def _unregister(self, region: Region) -> None:
        with self._lock:
            link = self._link
        if link is None or not link.usable():
            return  # the service forgets regions with their connection
        try:
            self._perform(link, unregister(region))
        except Unavailable:
            self._drop(link)


class _NotSent(Unavailable):
    """The service did not get the whole request."""
