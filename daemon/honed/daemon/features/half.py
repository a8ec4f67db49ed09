"""Chooses fp16 for models that ONNX Runtime runs on processors with fp16 arithmetic.

In idle time the compiler converts a model to fp16 and verifies its outputs. If they are right, both files run
in turns, and the fp16 file serves if it is faster. The choice is stored with the check of ONNX Runtime's
optimisations (`changes/optimisations.py`). It is repeated with another version of ONNX Runtime, on other
processors, and if other programs were busy during the trial.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from honed.daemon.aio import clearing_in_thread, in_thread
from honed.daemon.background import Pauses
from honed.daemon.changes.change import Changes
from honed.daemon.core.model import ServedModel
from honed.daemon.core.state import Registry
from honed.daemon.feature import BackgroundTask, Feature
from honed.daemon.idle.leasing import Leasing
from honed.daemon.serving.loader import zero_inputs
from honed.daemon.serving.trial import paired_trial
from honed.daemon.store.store import Manifest, Store
from honed.daemon.worker.calls import ComparisonRun, UnloadModel
from honed.machine.processors import ThreadPlacement
from honed.protocol.values import OrtSessionConfig, SessionSettings

_FASTER = 0.97  # Maximum time of fp16 relative to fp32, as its outputs are less exact
_WARM = 3  # Warm-up runs of a session before the trial
_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class HalfForms(Feature):
    """A feature that chooses between fp32 and fp16 for the models that the CPU engine serves.

    `placed` describes the threads that models run on.
    """

    changes: Changes
    registry: Registry
    leasing: Leasing
    store: Store
    placed: ThreadPlacement
    _pauses: Pauses = field(init=False, default_factory=Pauses)

    def forget(self, model: str) -> None:
        """Drop the pause of a removed model."""
        self._pauses.forget(model)

    def background(self, *, idle: bool) -> BackgroundTask | None:
        """Return the choice for the next model that is due, if any."""
        for entry in self.registry.models() if idle else ():
            if self._is_due(entry):
                return BackgroundTask(
                    f"choosing between fp32 and fp16 for {entry.name}", partial(self._choose, entry)
                )
        return None

    def _is_due(self, entry: ServedModel) -> bool:
        manifest = entry.manifest
        check, interface = manifest.optimisation, manifest.interface
        if check is None or not check.checked or manifest.owner is not None or not entry.on_cpu:
            return False
        if interface is None or any(t.shape is None or min(t.shape, default=0) < 0 for t in interface.inputs):
            return False  # Conversion to fp16 needs static shapes
        chosen = check.session
        if chosen is not None and chosen.first == str(self.placed) and chosen.others_percent is None:
            return False
        return self._pauses.over(entry.name)

    async def _choose(self, entry: ServedModel) -> None:
        with self.leasing.adding(0, "how ONNX Runtime runs a model is being chosen"):
            async with self.changes.begin(entry.name):
                self._pauses.begin(entry.name)
                manifest, checks = entry.manifest, self.changes.checks
                async with clearing_in_thread(self.store.staging()) as folder:
                    form = folder / "fp16.onnx"
                    settings = SessionSettings(us=0.0, first_us=0.0, first=str(self.placed))
                    if await checks.write_half(manifest, self.placed.threads, form):
                        settings = await self._compare(manifest, form)
                    kept = await checks.settle(manifest, settings)
                    if kept is not None and kept.half is not None:
                        await in_thread(self.store.keep, form)  # A sweep may have deleted it in between
        if kept is not None:
            _log.info("model %s: ONNX Runtime takes %s", entry.name, kept)

    async def _compare(self, manifest: Manifest, form: Path) -> SessionSettings:
        """Run the fp32 and fp16 files in turns in separate sessions; return the settings that serve.

        Raises a HonedError if a session cannot be loaded or run.
        """
        assert manifest.optimisation is not None
        assert manifest.interface is not None
        loader = self.changes.pool.require_cpu(None).loader
        level, half = manifest.optimisation.level, await in_thread(self.store.keep, form)
        path = str(await in_thread(self.store.form, manifest, manifest.source_key))
        compiled = self.store.object(manifest.compiled) if manifest.compiled is not None else None
        zeros = zero_inputs(manifest.interface.inputs, manifest.shapes | manifest.settings.warm_up_shapes)
        keys = [f"{manifest.source_key} in {precision}" for precision in ("fp32", "fp16")]

        async def run(key: str, turn: int) -> ComparisonRun:
            if compiled is not None:  # The inputs of probes are more realistic than zeros
                return await loader.time_cpu_run(key, compiled, turn)
            return await loader.time_run_on_zeros(key, zeros)

        try:
            await loader.try_session(keys[0], path, OrtSessionConfig(level))
            await loader.try_session(keys[1], str(form), OrtSessionConfig(level, half))
            for key in keys:
                for turn in range(_WARM):
                    await run(key, turn)
            first, second = (partial(run, key) for key in keys)
            async with loader.comparing:
                result = await paired_trial(first, second, _FASTER, (loader.pid,))
        finally:
            for key in keys:
                await loader.tell(UnloadModel(key=key))
        chosen = result.second_us if result.runs.within_allowance else result.first_us
        return SessionSettings(
            us=round(chosen, 2),
            first_us=round(result.first_us, 2),
            first=str(self.placed),
            others_percent=result.others_percent,
            half=half if result.runs.within_allowance else None,
        )
