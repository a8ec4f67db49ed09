"""A detector as Frigate's `zmq` plug-in is one (frigate/detectors/plugins/zmq_ipc.py of July 2026).

It is so in what it sends, how long it waits, and when it gives up and begins anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from numpy.typing import NDArray

MODEL_SECONDS = 30


class Detector:
    """Asks whether its model is there, sends it where not, then sends pictures one at a time."""

    def __init__(self, endpoint: str, model: Path, model_type: str, *, timeout_ms: int = 200) -> None:
        self._endpoint = endpoint
        self._model = model
        self._model_type = model_type
        self._timeout_ms = timeout_ms
        self._context = zmq.Context()
        self._socket: Any = None
        self.lost = 0  # pictures without an answer in time
        self._connect()
        self.ready = self._introduce()

    def detect(self, picture: NDArray[Any], *, timeout_ms: int | None = None) -> NDArray[np.float32]:
        """The answer, float32 [20, 6]; zeros, as Frigate has it, where there was none in time."""
        if not self.ready:
            return self._nothing()
        header = {"shape": list(picture.shape), "dtype": picture.dtype.name, "model_type": self._model_type}
        try:
            frames = self._exchange([json.dumps(header).encode(), picture.tobytes()], timeout_ms)
        except zmq.Again:
            self._connect()
            self.ready = self._introduce()
            return self._nothing()
        if len(frames) == 1:
            return np.frombuffer(frames[0], np.float32).reshape(20, 6)
        told = json.loads(frames[0])
        return np.frombuffer(frames[1], np.dtype(told["dtype"])).reshape(told["shape"])

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()

    def _nothing(self) -> NDArray[np.float32]:
        self.lost += 1
        return np.zeros((20, 6), np.float32)

    def _connect(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
        self._socket = self._context.socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDTIMEO, self._timeout_ms)
        self._socket.connect(self._endpoint)

    def _introduce(self) -> bool:
        try:
            told = self._told({"model_request": True})
            if told.get("model_available"):
                return bool(told.get("model_loaded"))
            told = self._told({"model_data": True}, self._model.read_bytes())
            return bool(told.get("model_saved") and told.get("model_loaded"))
        except zmq.Again:
            return False

    def _told(self, header: dict[str, Any], *more: bytes) -> dict[str, Any]:
        frame = json.dumps({**header, "model_name": self._model.name}).encode()
        (answer,) = self._exchange([frame, *more], max(MODEL_SECONDS * 1000, self._timeout_ms))
        told: dict[str, Any] = json.loads(answer)
        return told

    def _exchange(self, frames: list[bytes], timeout_ms: int | None = None) -> list[bytes]:
        """Raises zmq.Again where no answer comes in time."""
        self._socket.setsockopt(zmq.RCVTIMEO, timeout_ms or self._timeout_ms)
        self._socket.send_multipart(frames)
        answer: list[bytes] = self._socket.recv_multipart()
        return answer
