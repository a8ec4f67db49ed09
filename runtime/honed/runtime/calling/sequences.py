"""A sequence of requests to one model, whose state the service keeps between them.

    with client.sequence("vad") as vad:
        for frame in frames:
            speech = vad.infer({"input": frame, "sr": 16000})["output"]

The first request begins the sequence, with zeros for the state that it does not bring; the end of the block
ends it. Where the service lost it, requests raise SequenceLost until `restart` was called.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from numpy.typing import ArrayLike, NDArray

from honed.protocol.errors import HonedError

from .calls import InSequence

Answers = dict[str, NDArray[Any]]


class _Course:
    """What the next request says of its sequence."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.id = uuid.uuid4().hex
        self.begun = False

    def restart(self) -> None:
        """The next request begins anew, with zeros or what it brings for state."""
        self.begun = False

    @contextlib.contextmanager
    def _next(self) -> Iterator[InSequence]:
        """For one request; a first one that fails has begun nothing."""
        first, self.begun = not self.begun, True
        try:
            yield InSequence(self.id, start=first)
        except BaseException:
            if first:
                self.begun = False
            raise

    @property
    def _last(self) -> InSequence:
        return InSequence(self.id, end=True)


class Sequence(_Course):
    """Of a `Client`. Requests of it run one after the other, in the order in which they are sent."""

    def __init__(self, infer: Callable[..., Answers], model: str) -> None:
        """`infer` is `Client.infer`."""
        super().__init__(model)
        self._infer = infer

    def infer(self, inputs: Mapping[str, ArrayLike], **options: Any) -> Answers:
        """As `Client.infer`, without the state; inputs that are state may be brought all the same."""
        with self._next() as sequence:
            return self._infer(self.model, inputs, sequence=sequence, **options)

    def close(self) -> None:
        """End it; a later request begins anew. What the service does not know any more has ended."""
        if self.begun:
            self.begun = False
            with contextlib.suppress(HonedError):
                self._infer(self.model, {}, sequence=self._last)

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncSequence(_Course):
    """Of an `AsyncClient`, with `await`."""

    def __init__(self, infer: Callable[..., Awaitable[Answers]], model: str) -> None:
        """`infer` is `AsyncClient.infer`."""
        super().__init__(model)
        self._infer = infer

    async def infer(self, inputs: Mapping[str, ArrayLike], **options: Any) -> Answers:
        """As `AsyncClient.infer`, without the state; inputs that are state may be brought all the same."""
        with self._next() as sequence:
            return await self._infer(self.model, inputs, sequence=sequence, **options)

    async def close(self) -> None:
        """End it; a later request begins anew. What the service does not know any more has ended."""
        if self.begun:
            self.begun = False
            with contextlib.suppress(HonedError):
                await self._infer(self.model, {}, sequence=self._last)

    async def __aenter__(self) -> AsyncSequence:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
