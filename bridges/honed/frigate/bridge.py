"""The bridge itself: messages from a ZeroMQ socket, answered by the service."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import OrderedDict
from typing import Final

import zmq
import zmq.asyncio

from honed.protocol.errors import HonedError, InvalidArgument, Unavailable
from honed.runtime import AsyncClient

from . import detections, messages
from .messages import CameraPicture, Frame, ModelAsked, ModelSent
from .models import Models
from .settings import FrigateSettings

_MAX_CLIENTS: Final = 1024  # whose model is remembered; those heard of the longest ago are forgotten
_COMPLAIN_SECONDS: Final = 10.0  # between two lines of the log of the same kind
_SOCKET_MODE: Final = 0o660  # its user and group may connect
_log = logging.getLogger(__name__)


class Bridge:
    """Answers the detectors that are connected to one endpoint."""

    def __init__(self, settings: FrigateSettings, client: AsyncClient) -> None:
        self._settings = settings
        self._models = Models(client, settings)
        self._asked: OrderedDict[bytes, str] = OrderedDict()  # the model each client asked for
        self._told: dict[str, float] = {}  # when it was last complained of
        self._answering: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Answer until cancelled; raises Unavailable where the endpoint cannot be had."""
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.ROUTER)
        try:
            self._bind(socket)
            while True:
                client, *frames = await socket.recv_multipart()
                if len(self._answering) >= self._settings.max_requests:
                    await asyncio.wait(self._answering, return_when=asyncio.FIRST_COMPLETED)
                task = asyncio.create_task(self._serve_one(socket, client, frames))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
        finally:
            for task in self._answering:
                task.cancel()
            await asyncio.gather(*self._answering, return_exceptions=True)
            socket.close(linger=0)
            context.term()

    def _bind(self, socket: zmq.asyncio.Socket) -> None:
        endpoint = self._settings.endpoint
        socket.setsockopt(zmq.MAXMSGSIZE, self._settings.max_message_mib << 20)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 2)  # of each client, which waits for its answer anyway
        socket.setsockopt(zmq.SNDHWM, 2)
        socket.setsockopt(zmq.IPV6, 1)
        try:
            socket.bind(endpoint)
            if endpoint.startswith("ipc://"):
                os.chmod(endpoint.removeprefix("ipc://"), _SOCKET_MODE)
        except (OSError, zmq.ZMQError) as error:
            raise Unavailable(
                f"{endpoint} cannot be listened at ({error.strerror}); check endpoint"
            ) from error
        _log.info("listening at %s", endpoint)

    async def _serve_one(self, socket: zmq.asyncio.Socket, client: bytes, frames: list[bytes]) -> None:
        if not frames or frames[0]:  # what a REQ socket puts before its message
            self._complain("something else than a detector is connected; it is not answered")
            return
        reply = await self.answer(client, frames[1:])
        if reply is not None:
            with contextlib.suppress(zmq.ZMQError):  # it has gone
                await socket.send_multipart([client, b"", *reply])

    async def answer(self, client: bytes, frames: list[bytes]) -> list[bytes] | None:
        """What to send back to the client of that identity; None: nothing.

        What is wrong is told in the log and answered with no detection, since detectors understand no error.
        """
        try:
            match messages.parse(frames):
                case ModelAsked(file=file):
                    return await self._model_asked(client, file)
                case ModelSent(file=file, data=data):
                    return await self._model_sent(client, file, data)
                case CameraPicture() as picture:
                    return await self._picture(client, picture)
        except HonedError as error:
            self._complain(str(error))
        return messages.found(detections.nothing())

    async def _model_asked(self, client: bytes, file: str) -> list[bytes]:
        model = self._models.name_for(file)
        self._remember(client, model)
        status = await self._models.status(model)
        if not status.ready:
            _log.info("%s is asked for; %s is %s", file, model, "not ready" if status.known else "unknown")
        return messages.model_status(available=status.known, loaded=status.ready)

    async def _model_sent(self, client: bytes, file: str, data: Frame) -> list[bytes]:
        model = self._models.name_for(file)
        self._remember(client, model)
        status = await self._models.add(model, file, data)
        return messages.model_kept(saved=status.known, loaded=status.ready)

    async def _picture(self, client: bytes, picture: CameraPicture) -> list[bytes] | None:
        model = self._asked.get(client) or self._settings.model
        if not model:
            # It asked a bridge before this one. Without an answer it gives up this request and asks anew.
            _log.info("a detector is connected that has not said which model; it will when it has no answer")
            return None
        width, height = picture.size
        decode = detections.decoder(picture.model_type)
        outputs = await self._models.infer(model, picture.tensor)
        if not outputs:
            raise InvalidArgument(f"{model} gives no output")
        return messages.found(decode(outputs, width, height))

    def _remember(self, client: bytes, model: str) -> None:
        self._asked[client] = model
        self._asked.move_to_end(client)
        if len(self._asked) > _MAX_CLIENTS:
            self._asked.popitem(last=False)

    def _complain(self, sentence: str) -> None:
        """Tell the log, but not for each of thirty pictures a second."""
        now = time.monotonic()
        self._told = {said: when for said, when in self._told.items() if now - when < _COMPLAIN_SECONDS}
        if sentence not in self._told and len(self._told) < 20:
            self._told[sentence] = now
            _log.warning("%s", sentence)
