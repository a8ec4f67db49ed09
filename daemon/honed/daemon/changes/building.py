"""Compiles a model for a device within a change, and has the device's worker build and verify it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from honed.daemon.aio import in_thread
from honed.daemon.serving.engine_server import EngineServer, check_memory
from honed.daemon.settings.schema import CHECKING_MIB
from honed.daemon.store.files import describe
from honed.jobs.commands import Check, Compile
from honed.jobs.events import Stage
from honed.machine.files import replacing
from honed.protocol import strict
from honed.protocol.errors import HonedError, ModelRefused, Unavailable

from .change import BUILT, COMPILED, RECEIVED, Built, Change, Staged
from .compilation import compile_model

# Lower bounds, from the models of tests/models and LightGlue: compiling each took 330 MiB, plus 7 to 30 times
# the size of its file.
_COMPILER_MIB, _COMPILER_TIMES = 320, 4
_ROUNDS = 7  # Pairs of runs that compare devices
_NICENESS = 15  # Niceness of background compilation
_log = logging.getLogger(__name__)


async def build(change: Change, staged: Staged, servers: Sequence[EngineServer]) -> Built:
    """Compile and load a model on the only device, or on the fastest of several.

    Raises ModelRefused if it cannot be compiled or its outputs are wrong, Unavailable if a worker does not
    start. Of several devices, those that fail so are skipped, unless all do.
    """
    if len(servers) == 1:
        return await _Building(change, staged, 0, 1).run(servers[0])
    best: tuple[float, Built] | None = None
    lines: list[str] = []
    failures: list[HonedError] = []
    for index, server in enumerate(servers):
        try:
            made = await _Building(change, staged, index, len(servers)).run(server)
            us = await server.loader.run_us(made.file.sha256, _ROUNDS)
        except (ModelRefused, Unavailable) as error:
            failures.append(error)
            lines.append(f"not on {server.label}: {error}")
            _log.info("model %s is not placed on %s: %s", change.name, server.label, error)
            continue
        lines.append(f"{us / 1000:.3g} ms on {server.label}")
        if best is None or us < best[0]:
            best = us, made
    if best is None:
        raise failures[0]
    return replace(best[1], measured=f"measured when it was added: {', '.join(lines)}")


@dataclass(frozen=True, slots=True)
class _Building:
    """The build for a device within a change; its share of the progress is one of `count` equal parts."""

    change: Change
    staged: Staged
    index: int
    count: int

    async def run(self, server: EngineServer) -> Built:
        change, staged, compiled = self.change, self.staged, self.staged.model_file
        if staged.sources:
            compiled = staged.folder / f"compiled-{self.index}.honed"
            await self._compile(compiled, server)
        model = await change.changes.inspector.inspect(compiled)
        server.check_fits(model.device_bytes)
        file = await in_thread(describe, compiled, f"{change.name}.honed")
        self._report("load", COMPILED, "building kernels and checking the answers on the device")

        def report_build(done: int, of: int) -> None:
            fraction = COMPILED + (BUILT - COMPILED) * done / of
            self._report("load", fraction, f"built {done} of {of} kernels")

        proof = await change.load(server, file.sha256, compiled, report_build, foreground=staged.foreground)
        return Built(server=server, path=compiled, file=file, model=model, proof=proof)

    async def _compile(self, output: Path, server: EngineServer) -> None:
        staged, changes = self.staged, self.change.changes
        seconds = changes.limits.compile_seconds

        def report(stage: Stage) -> None:
            self._report(stage.stage, RECEIVED + (COMPILED - RECEIVED) * stage.fraction, stage.text)

        self.change.keep(server, output.name)  # Starts a stopped engine, whose profile is needed
        needs = _COMPILER_MIB + (_COMPILER_TIMES * sum(file.nbytes for file, _ in staged.sources) >> 20)
        check_memory("compiling it", needs, changes.limits.compile_memory_mib, "limits.compile_memory_mib")
        if changes.compiling.locked() and staged.foreground:
            # A model that will be refused should not wait for other compilations.
            async with changes.checking:
                job = await self._job(output, server)
                check = job.derive(Check, memory_mib=min(CHECKING_MIB, job.memory_mib))
                await compile_model(check, seconds, lambda _: None)
            self._report("check", RECEIVED, "waiting for another compilation")
        async with changes.compiling:
            job = await self._job(output, server)
            niceness = 0 if staged.foreground else _NICENESS
            if staged.seconds is not None:
                seconds = min(seconds, staged.seconds)
            await compile_model(job, seconds, report, niceness=niceness)

    async def _job(self, output: Path, server: EngineServer) -> Compile:
        staged, changes = self.staged, self.change.changes
        limits, records = changes.limits, changes.records
        await server.wait_ready(limits.load_seconds)
        profile = server.supervisor.profile
        assert profile is not None
        with replacing(output.with_suffix(".toml")) as file:
            file.write(profile.dumps().encode())
        return strict.copy_fields(
            Compile,
            staged,
            file=staged.model_file,
            output=output,
            name=staged.sources[0][0].name,
            profile=output.with_suffix(".toml"),
            device=server.engine.spec,
            memory_mib=limits.compile_memory_mib,
            records=records if records.exists() else None,
        )

    def _report(self, stage: str, fraction: float, text: str = "") -> None:
        """Report progress; `fraction` is that of this build. The first build begins at RECEIVED."""
        done = (self.index + (fraction - RECEIVED) / (1 - RECEIVED)) / self.count
        self.change.report(stage, RECEIVED + (1 - RECEIVED) * done, text)
