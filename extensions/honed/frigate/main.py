"""Runs the program `honed-frigate`, which answers Frigate's detectors by models that honed serves."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import zmq
import zmq.asyncio
from numpy.typing import NDArray

from honed import bridge
from honed.bridge import check_endpoint, check_numbers
from honed.protocol import methods
from honed.protocol.errors import (
    DeadlineExceeded,
    HonedError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unavailable,
)
from honed.protocol.params import ModelParams
from honed.runtime import AsyncClient
from honed.runtime.calling.files import model_name_for

from . import detections, messages
from .messages import CameraPicture, Frame, ModelAsked, ModelSent

_LOOK_SECONDS: Final = 0.1  # Time between two checks whether something is ready
_log = logging.getLogger(__name__)
_MAX_CLIENTS: Final = 1024  # Maximum clients whose model is remembered; the longest silent are forgotten
_COMPLAIN_SECONDS: Final = 10.0  # Time between two equal lines of the log
_SOCKET_MODE: Final = 0o660  # User and group may connect


@dataclass(frozen=True, slots=True, kw_only=True)
class FrigateSettings:
    """The settings and their defaults; values that are not allowed raise InvalidArgument.

    endpoint: where Frigate connects to, ipc://PATH or tcp://ADDRESS:PORT.
    network: whether the address may be one that other machines reach.
    model: the honed model that serves, whatever file Frigate names; "": the one with that file's name.
    take_models: whether a file that Frigate sends is added to honed.
    retry_seconds: how long a picture waits for a service that restarts.
    ready_seconds: how long Frigate waits for a model it asked for to be ready; it allows 30.
    max_message_mib: of one frame; a model's file is one frame.
    max_requests: answered at a time, of all clients together.
    """

    endpoint: str = "ipc:///run/honed-frigate/detector"
    network: bool = False
    model: str = ""
    take_models: bool = True
    retry_seconds: float = 5.0
    ready_seconds: float = 25.0
    max_message_mib: int = 512
    max_requests: int = 16

    def __post_init__(self) -> None:
        check_endpoint(self.endpoint, network=self.network)
        check_numbers(self, retry_seconds=0, ready_seconds=0, max_message_mib=1, max_requests=1)
        if self.max_message_mib > 16384:
            raise InvalidArgument(f"max_message_mib is {self.max_message_mib}; give at most 16384")


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """The state of a model in honed: whether it is known, and whether it can be run."""

    known: bool
    ready: bool


class Models:
    """The service's models, by the names of Frigate's files."""

    def __init__(self, client: AsyncClient, settings: FrigateSettings) -> None:
        self._client = client
        self._settings = settings
        self._inputs: dict[str, str] = {}  # Names of inputs, by model
        self._own: dict[str, str] = {}  # The service's names of uploaded models

    def name_for(self, file: str) -> str:
        """Return the model that serves a file of Frigate's."""
        return self._settings.model or model_name_for(Path(file))

    async def status(self, model: str) -> ModelStatus:
        """Return whether the model is known and ready; wait for a service or model that is not ready yet."""
        deadline = time.monotonic() + self._settings.ready_seconds
        status = ModelStatus(known=False, ready=False)
        while True:
            try:
                ready = await self._client.ready(self._own.get(model, model))
                status = ModelStatus(known=True, ready=ready)
            except NotFound:
                return ModelStatus(known=False, ready=False)
            except (Unavailable, DeadlineExceeded) as error:
                _log.debug("%s", error)
            if status.ready or time.monotonic() >= deadline:
                return status
            await asyncio.sleep(_LOOK_SECONDS)

    async def add(self, model: str, file: str, data: Frame) -> ModelStatus:
        """Upload the file as `model`, and return its status; log why the service refuses it."""
        if not self._settings.take_models:
            _log.error("%s was not taken; add it with 'hone add', or give take_models = true", file)
            return ModelStatus(known=False, ready=False)
        try:
            self._own[model] = (await self._client.upload(bytes(data))).model_name
        except PermissionDenied:
            _log.error("the service takes no models of apps; run 'hone add %s --name %s'", file, model)
            return ModelStatus(known=False, ready=False)
        except HonedError as error:
            _log.error("%s cannot be served: %s", file, error)
            return ModelStatus(known=False, ready=False)
        return await self.status(model)

    async def infer(self, model: str, tensor: NDArray[Any]) -> list[NDArray[Any]]:
        """Return the model's outputs, in its order; wait for a service that restarts."""
        deadline = time.monotonic() + self._settings.retry_seconds
        while True:
            try:
                name = self._inputs.get(model) or await self._input_of(model)
                served = self._own.get(model, model)
                return list((await self._client.infer(served, {name: tensor})).values())
            except (InvalidArgument, NotFound):
                self._inputs.pop(model, None)  # The model may have been replaced
                raise
            except Unavailable:
                if time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(_LOOK_SECONDS)

    async def _input_of(self, model: str) -> str:
        metadata = await self._client.ask(
            methods.MODEL_METADATA, ModelParams(name=self._own.get(model, model))
        )
        if len(metadata.inputs) != 1:
            names = ", ".join(each.name for each in metadata.inputs)
            raise InvalidArgument(f"{model} takes {names}; a detector takes one picture and nothing else")
        self._inputs[model] = metadata.inputs[0].name
        return self._inputs[model]


class Bridge:
    """A bridge that answers the detectors connected to one endpoint."""

    def __init__(self, settings: FrigateSettings, client: AsyncClient) -> None:
        self._settings = settings
        self._models = Models(client, settings)
        self._asked: OrderedDict[bytes, str] = OrderedDict()  # The model that each client named
        self._reported: dict[str, float] = {}  # Time of the last log line, by sentence
        self._answering: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Answer until cancelled; raise Unavailable if it cannot listen at the endpoint."""
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
        socket.setsockopt(zmq.RCVHWM, 2)  # Messages queued per client, which waits for its answer anyway
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
        if not frames or frames[0]:  # A REQ socket puts an empty frame first
            self._complain("something else than a detector is connected; it is not answered")
            return
        reply = await self.answer(client, frames[1:])
        if reply is not None:
            with contextlib.suppress(zmq.ZMQError):  # The client has gone
                await socket.send_multipart([client, b"", *reply])

    async def answer(self, client: bytes, frames: list[bytes]) -> list[bytes] | None:
        """Return the frames to send back to the client of that identity; None for no answer.

        Errors are logged and answered with no detection, since detectors understand no error.
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
        return messages.encode_detections(detections.nothing())

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
            # The client named its model to a bridge that has ended. Without an answer it gives up this
            # request, and names its model again.
            _log.info("a detector is connected that has not said which model; it will when it has no answer")
            return None
        width, height = picture.size
        decode = detections.decoder(picture.model_type)
        outputs = await self._models.infer(model, picture.tensor)
        if not outputs:
            raise InvalidArgument(f"{model} gives no output")
        return messages.encode_detections(decode(outputs, width, height))

    def _remember(self, client: bytes, model: str) -> None:
        self._asked[client] = model
        self._asked.move_to_end(client)
        if len(self._asked) > _MAX_CLIENTS:
            self._asked.popitem(last=False)

    def _complain(self, sentence: str) -> None:
        """Log a sentence, but not for each of thirty pictures a second."""
        now = time.monotonic()
        self._reported = {
            said: when for said, when in self._reported.items() if now - when < _COMPLAIN_SECONDS
        }
        if sentence not in self._reported and len(self._reported) < 20:
            self._reported[sentence] = now
            _log.warning("%s", sentence)


CONFIG: Final = Path("/etc/honed/honed-frigate.toml")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bridge, and return the exit status."""
    return bridge.launch(
        parser(), arguments, FrigateSettings, CONFIG, lambda *given: asyncio.run(_serve(*given))
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the program's options."""
    return bridge.parser(
        "honed-frigate", "Detect objects for Frigate by models that a honed service runs.", CONFIG
    )


async def _serve(settings: FrigateSettings, socket: str | None) -> None:
    loop = asyncio.get_running_loop()
    async with AsyncClient(socket, timeout=settings.retry_seconds or 1.0) as client:
        serving = asyncio.create_task(Bridge(settings, client).serve())
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, serving.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await serving


if __name__ == "__main__":
    sys.exit(main())
