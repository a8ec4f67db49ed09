"""A model being added, for whoever waits for that, and its files and manifest before it is compiled."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from honed.daemon.core.states import ServedModel
from honed.daemon.store.compiled import Compiled
from honed.daemon.store.store import Manifest
from honed.daemon.store.versions import NO_HISTORY
from honed.protocol import strict
from honed.protocol.results import ModelAdded, ModelSettings

from .build import Notify
from .staging import Staged


class Adding:
    """One addition, for whoever waits for it."""

    def __init__(self, *, name: str, notify: Notify) -> None:
        self.notify = notify
        self.served: asyncio.Future[ModelAdded] = asyncio.get_running_loop().create_future()
        self._name = name
        self._begun = time.monotonic()

    def report_to(self, progress: dict[str, Any]) -> None:
        """Pass on how far it is, while somebody listens."""
        self.notify(progress)

    def is_served(self, manifest: Manifest) -> None:
        """The CPU engine serves it."""
        if not self.served.done():
            self.served.set_result(self.told(manifest))

    def told(self, manifest: Manifest) -> ModelAdded:
        """The result while the CPU engine serves the model as it was given."""
        return ModelAdded(
            model_name=self._name,
            sha256=manifest.source_key,
            seconds=time.monotonic() - self._begun,
            notes=(),
            kernels=0,
            launches=0,
            engine="cpu",
            engine_why=manifest.why or "it is being compiled",
        )

    def added(self, model: Compiled, sha256: str, manifest: Manifest | None = None) -> ModelAdded:
        """The result with a compiled form."""
        return ModelAdded(
            model_name=self._name,
            sha256=sha256,
            seconds=time.monotonic() - self._begun,
            notes=tuple(model.source.notes),
            kernels=sum(kernel.launches > 0 for kernel in model.kernels),
            launches=model.launches,
            engine="cpu" if manifest is not None and manifest.chosen == "cpu" else model.engine,
            engine_why=manifest.why if manifest is not None else "",
        )


def as_given(name: str, staged: Staged, wanted: str, replaced: ServedModel | None) -> Manifest:
    """Of a file that the CPU engine is to serve."""
    before = replaced.manifest if replaced is not None and staged.device is None else None
    return strict.like(
        Manifest,
        staged,
        name=name,
        added=time.time(),
        compiled=None,
        history=NO_HISTORY,
        sources=tuple(source for source, _ in staged.sources),
        device=before.device if before is not None else "",
        placed=before.placed if before is not None else "",
        wanted=wanted,
        settings=replaced.manifest.settings if replaced is not None else ModelSettings(),
    )
