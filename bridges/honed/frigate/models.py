"""The models that Frigate asks for, as honed has them."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from numpy.typing import NDArray

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

from .messages import Frame
from .settings import FrigateSettings

_LOOK_SECONDS: Final = 0.1  # between two looks whether something is ready
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """Whether honed has a model, and whether it can be run."""

    known: bool
    ready: bool


class Models:
    """The service's models, by the names of Frigate's files."""

    def __init__(self, client: AsyncClient, settings: FrigateSettings) -> None:
        self._client = client
        self._settings = settings
        self._inputs: dict[str, str] = {}  # by model
        self._own: dict[str, str] = {}  # what models that were brought are called by the service

    def name_for(self, file: str) -> str:
        """The model that stands for a file of Frigate's."""
        return self._settings.model or model_name_for(Path(file))

    async def status(self, model: str) -> ModelStatus:
        """Whether the model is there and ready; waits for a service and a model that are not ready yet."""
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
        """Bring the file, to stand for `model`; what the service says against it is told in the log."""
        if not self._settings.take_models:
            _log.error("%s was not taken; add it with 'hone add', or give take_models = true", file)
            return ModelStatus(known=False, ready=False)
        try:
            self._own[model] = (await self._client.bring(bytes(data))).model_name
        except PermissionDenied:
            _log.error("the service takes no models of apps; run 'hone add %s --name %s'", file, model)
            return ModelStatus(known=False, ready=False)
        except HonedError as error:
            _log.error("%s cannot be served: %s", file, error)
            return ModelStatus(known=False, ready=False)
        return await self.status(model)

    async def infer(self, model: str, tensor: NDArray[Any]) -> list[NDArray[Any]]:
        """The model's outputs, in its order; waits for a service that is being started anew."""
        deadline = time.monotonic() + self._settings.retry_seconds
        while True:
            try:
                name = self._inputs.get(model) or await self._input_of(model)
                served = self._own.get(model, model)
                return list((await self._client.infer(served, {name: tensor})).values())
            except (InvalidArgument, NotFound):
                self._inputs.pop(model, None)  # it may have been replaced
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
