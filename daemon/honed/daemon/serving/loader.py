"""Loads models into a worker, verifies them there, and compares them with each other."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from honed.daemon.aio import in_thread
from honed.daemon.core import messages
from honed.daemon.core.messages import LoadReport
from honed.daemon.core.model import Engine, is_cpu
from honed.daemon.core.state import Registry
from honed.daemon.settings.schema import Limits
from honed.daemon.store.compiled import Interface, TensorSpec
from honed.daemon.store.store import Manifest, Store
from honed.daemon.store.versions import LOSS
from honed.daemon.worker.builder import BuilderLost, BuildProcess, Progress
from honed.daemon.worker.calls import (
    BuildModel,
    BuiltModel,
    CheckedProbe,
    CheckProbe,
    ComparisonRun,
    InputSpec,
    RunComparison,
    RunOnProbe,
    UnloadModel,
    WarmUp,
    WorkerCall,
)
from honed.daemon.worker.supervisor import NoWorker, Supervisor, WorkerDied
from honed.machine.profile import DeviceIdentity
from honed.process.rpc import R
from honed.protocol import strict
from honed.protocol.errors import DeviceError, HonedError, ModelRefused, OutOfMemory
from honed.protocol.results import ComparedOutput, Empty, ModelChecked, OrtSessionConfig
from honed.runtime import HONED_VERSION
from honed.runtime.comparison import MOST

from .trial import PairedTrial, PairedTrialResult

# ---- Which files a device has answered rightly for, remembered over restarts of the service ----
#
# A file that is known serves after its first probe, as a restart must not take long; the others follow then.
# What is remembered counts for the same device, driver and honed only. It is one empty file for each, so that
# all can be lost at any time, at the cost of a slower start.

REMEMBERED = 500
_log = logging.getLogger(__name__)


class ProofCache:
    """The files proven on one device; `key` is always a compiled file's SHA-256. Blocking I/O, but little."""

    def __init__(self, cache_dir: Path, identity: DeviceIdentity) -> None:
        self._folder = cache_dir / "proven"
        self._device = repr((sorted(strict.to_plain(identity).items()), HONED_VERSION))

    def knows(self, key: str) -> bool:
        """Return whether every probe of the file was answered correctly."""
        try:
            return self._marker(key).exists()
        except OSError:  # A folder that cannot be looked into has nothing to tell
            return False

    def note(self, key: str) -> None:
        """Note that every probe of the file was answered correctly."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._marker(key).touch()
            kept = sorted(self._folder.iterdir(), key=lambda marker: marker.stat().st_mtime)
            for marker in kept[:-REMEMBERED]:
                marker.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("that a model was verified cannot be remembered: %s", error)

    def forget(self, key: str) -> None:
        """Forget that a file was verified, so that it is verified again.

        Raises OSError where that cannot be written.
        """
        self._marker(key).unlink(missing_ok=True)

    def _marker(self, key: str) -> Path:
        return self._folder / hashlib.sha256(f"{key} {self._device}".encode()).hexdigest()


# ---- Loads compiled files into one worker, and compares them with their proofs and with each other ----

# After each run that is not a request's, requests have the device to themselves for so many times as long.
_PAUSE_RUNS, _LONGEST_PAUSE_SECONDS = 10, 2.0
_LOOK_SECONDS = 0.05  # Between two looks whether the engine is quiet
LONGEST_OWN_MS = 500.0  # Of a run of a user's own model on a device, for which others wait
OWN_ROUNDS = 7  # Pairs of runs by which one is timed
_Ran = TypeVar("_Ran", CheckedProbe, ComparisonRun)


class Loader:
    """What is done with compiled files in the worker of `engine`, beside requests."""

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        supervisor: Supervisor,
        models: Registry,
        store: Store,
        cache_dir: Path,
    ) -> None:
        """Initialise; `cache_dir` remembers which files were verified."""
        self._models = models
        self.builder = BuildProcess(limits, cache_dir, supervisor)
        self.engine = engine
        self._cache_dir = cache_dir
        self._limits = limits
        self._supervisor = supervisor
        self._store = store
        self._unloading: dict[str, asyncio.Event] = {}  # By key, while the worker forgets a file
        self.comparing = asyncio.Lock()  # The worker knows one pair at a time

    @property
    def pid(self) -> int:
        """Of its process; 0: there is none."""
        return self._supervisor.pid

    async def load(
        self, key: str, path: str, *, foreground: bool = True, progress: Progress = lambda _, __: None
    ) -> LoadReport:
        """Have a compiled file built and proven in a process of its own, and then loaded by the worker.

        A file that the device has proven before is not built in it again. Inferences go on meanwhile, and
        wait for one probe at most. `foreground` and `progress` as in `BuildProcess.prove`. Raises
        ModelRefused where an answer is wrong, DeviceError where the device cannot build or hold the model,
        and WorkerDied where the worker, or the process that builds, died of it.
        """
        await self._prove_in_subprocess(key, path, foreground=foreground, progress=progress)
        return dataclasses.replace(await self._load(key, path, give_way=True), left=())

    async def restore(self, action: messages.Load) -> messages.Event | None:
        """Have the worker load a model of the store; return the event that reports the result."""
        key = action.model.key_on(self.engine.name)
        try:
            path = str(await in_thread(self._store.form, action.model.manifest, key))
            proven_now = await self._prove_in_subprocess(key, path)
            proof = await self._load(key, path, give_way=not action.awaited)
            await self._warm_up(action.model.manifest, key, proof, give_way=not action.awaited)
        except NoWorker:
            return None  # It ended for another reason, and the next one loads the model
        except WorkerDied as error:
            if not isinstance(error, BuilderLost):
                self._forget(
                    key
                )  # This may have been its doing: it is proven apart before it is loaded again
            return messages.LoadCrashed(action.deployment, str(error), apart=isinstance(error, BuilderLost))
        except HonedError as error:
            short = isinstance(error, OutOfMemory)
            return messages.LoadRefused(action.deployment, self.engine.name, key, str(error), short)
        if proven_now or not action.awaited:
            proof = dataclasses.replace(proof, left=())
        return messages.Loaded(action.deployment, key, proof)

    async def _warm_up(self, manifest: Manifest, key: str, proof: LoadReport, *, give_way: bool) -> None:
        """Run a model as its settings say, before it serves; where that fails, say so and go on."""
        settings = manifest.settings
        inputs = warm_up_inputs(manifest, proof.interface)
        if not settings.warm_up or not inputs:
            return
        begun = time.monotonic()
        try:
            for _ in range(settings.warm_up):
                await self._careful(WarmUp(key=key, inputs=inputs), give_way=give_way)
        except WorkerDied:
            raise
        except HonedError as error:
            _log.warning("model %s: it is not warmed up: %s", manifest.name, error)
        else:
            took = time.monotonic() - begun
            _log.info("model %s: warmed up by %d runs in %.2f s", manifest.name, settings.warm_up, took)

    async def prove(self, action: messages.VerifyProbe) -> messages.Event | None:
        """Compare a model that serves already with one more of its probes; None where the worker ended."""
        key = action.model.key_on(self.engine.name)
        try:
            outputs = await self._check(key, action.probe, give_way=True)
        except WorkerDied:
            self._forget(key)  # This may have been its doing: the next worker proves it before it serves
            return None
        except HonedError as error:
            self._forget(key)
            return messages.ProbeFailed(action.deployment, str(error))
        return messages.ProbePassed(action.deployment, outputs)

    async def judge(self, action: messages.CompareCanary, comparer: VersionComparer | None) -> messages.Event:
        """Compare a successor with the version before on what clients sent since; None: by plain runs."""
        model, before = action.model, action.before
        try:
            # It is there already, unless the worker was started anew.
            await self.load(before.key, str(self._store.form(before.manifest, before.key)))
            compared = await (comparer or Loader.compare)(self, before.key, model.key, LOSS)
        except WorkerDied as error:
            return messages.CanaryComparisonCrashed(model.number, str(error))
        except HonedError as error:
            _log.warning("model %s: its new version is not compared again: %s", model.name, error)
            return messages.CanaryCompared(model.number, "")
        return messages.CanaryCompared(model.number, compared.objection)

    async def _prove_in_subprocess(
        self, key: str, path: str, *, foreground: bool = True, progress: Progress = lambda _, __: None
    ) -> bool:
        """Verify a file in a process of its own; return False if that was not needed."""
        proofs = self._proofs()
        if proofs.knows(key):
            return False
        await self.builder.prove(key, path, foreground=foreground, progress=progress)
        proofs.note(key)
        return True

    async def _load(self, key: str, path: str, *, give_way: bool) -> LoadReport:
        """Have the worker load a compiled file that this device has proven before: its first probe is enough.

        One that requests may wait for does not `give_way` to others.
        """
        worker = self._supervisor.starts
        asked = self._models.asked(key)
        built = await self.try_session(key, self._store.run_as(path, asked.half), asked)
        outputs: tuple[ComparedOutput, ...] = ()
        probes = tuple(range(built.probes))
        enough = 1 if self._proofs().knows(key) else len(probes)
        try:
            for probe in probes[:enough]:
                outputs = await self._check(key, probe, give_way=give_way)
        except ModelRefused:
            self._forget(key)
            raise
        left = probes[enough:]
        if not left:
            self._proofs().note(key)
        checked = ModelChecked(device=built.device, outputs=outputs)
        return LoadReport(
            engine=self.engine.name, worker=worker, checked=checked, left=left, interface=built.interface
        )

    async def try_session(self, key: str, path: str, asked: OrtSessionConfig) -> BuiltModel:
        """Have the worker load a file, perhaps once more under another `key`; the CPU engine as `asked`.

        It loads files beside its other calls, and would find one there that it is about to unload.
        """
        await self._supervisor.open()
        while (unloaded := self._unloading.get(key)) is not None:
            await unloaded.wait()
        build = BuildModel(key=key, path=path, **asked._asdict())
        return await self._supervisor.call(build, seconds=self._limits.load_seconds)

    async def _check(self, key: str, probe: int, *, give_way: bool) -> tuple[ComparedOutput, ...]:
        """Run a probe, and return the worst of every output so far.

        Raises ModelRefused if an answer is wrong.
        """
        return (await self._careful(CheckProbe(key=key, probe=probe), give_way=give_way)).outputs

    def _proofs(self) -> ProofCache:
        assert self._supervisor.identity is not None
        return ProofCache(self._cache_dir, self._supervisor.identity)

    def _forget(self, key: str) -> None:
        try:
            self._proofs().forget(key)
        except OSError as error:
            _log.error("that a model is to be proven anew cannot be remembered: %s", error)

    async def compare(self, old: str, new: str, allowance: float, *, most: int = MOST) -> PairedTrialResult:
        """Run two loaded files in turns, `most` pairs at most; inferences wait for one run at most.

        Raises WorkerDied where the worker died of it.
        """

        async def run(which: int, turn: int) -> ComparisonRun:
            return await self._careful(RunComparison(old=old, new=new, pair=turn, which=which))

        async with self.comparing:
            return await PairedTrial(partial(run, 0), partial(run, 1), allowance, most=most).run()

    async def time_cpu_run(self, key: str, compiled: Path, turn: int) -> ComparisonRun:
        """Run a model of the CPU engine once, on inputs of the probes of its compiled form."""
        await self._quiet()
        return await self._careful(RunOnProbe(key=key, compiled=str(compiled), turn=turn))

    async def time_run_on_zeros(self, key: str, inputs: tuple[InputSpec, ...]) -> ComparisonRun:
        """Run a loaded model once on zeros."""
        await self._quiet()
        return await self._careful(WarmUp(key=key, inputs=inputs))

    async def time_compiled_run(self, key: str, turn: int) -> ComparisonRun:
        """Run a loaded compiled file once on the inputs of its probes, turn 0 first.

        The caller holds `comparing`.
        """
        return await self._careful(RunComparison(old=key, new=key, pair=turn, which=0))

    async def run_us(self, key: str, runs: int) -> float:
        """Return the microseconds of a run of a loaded file, of `runs` pairs of runs; raise as `compare`."""
        return (await self.compare(key, key, 1.0, most=runs)).first_us

    async def own_us(self, key: str) -> float:
        """Return the microseconds of a run of a user's own model; raise ModelRefused where it is too long.

        Others would wait for it.
        """
        us = await self.run_us(key, OWN_ROUNDS)
        if us > 1e3 * LONGEST_OWN_MS:
            raise ModelRefused(
                f"a run on the device takes {us / 1e3:.0f} ms and would keep others waiting for more than "
                f"{LONGEST_OWN_MS:g} ms"
            )
        return us

    async def _careful(self, call: WorkerCall[_Ran], *, give_way: bool = True) -> _Ran:
        """Make a call that runs a model; if the device fails in it, kill the worker and raise WorkerDied.

        With `give_way` requests may run before the next call.
        """
        begun = time.monotonic()
        answer = await self._supervisor.call(call, seconds=self._limits.run_seconds)
        if answer.device_error:
            self._supervisor.kill(f"the device failed: {answer.device_error}")
            raise WorkerDied(answer.device_error)
        if give_way:
            await self._give_way(time.monotonic() - begun)
        return answer

    async def _give_way(self, taken: float) -> None:
        """Let requests run, if there are any, so that a series of runs delays each of them by one at most."""
        end = time.monotonic() + min(_PAUSE_RUNS * taken, _LONGEST_PAUSE_SECONDS)
        while self.engine.idle_seconds(now := time.monotonic()) < taken and (left := end - now) > 0:
            await asyncio.sleep(min(taken, left))

    async def _quiet(self) -> None:
        """Wait until no run that takes long would make another one seem slower, but not for ever."""
        end = time.monotonic() + self._limits.run_seconds
        while any(each.long for each in self.engine.running.values()) and time.monotonic() < end:
            await asyncio.sleep(_LOOK_SECONDS)

    async def step(self, call: WorkerCall[R]) -> R:
        """Run a step of a made-up sequence, or move one, between requests.

        Kills the worker and raises WorkerDied where the device fails in it.
        """
        begun = time.monotonic()
        try:
            answer = await self._supervisor.call(call, seconds=self._limits.run_seconds)
        except DeviceError as error:
            if isinstance(error, OutOfMemory) and is_cpu(self.engine.name):
                raise
            self._supervisor.kill(f"the device failed: {error}")
            raise WorkerDied(str(error)) from error
        await self._give_way(time.monotonic() - begun)
        return answer

    async def unload(self, key: str) -> None:
        """Have the worker forget a file; what loads it again waits for that."""
        unloaded = self._unloading[key] = asyncio.Event()
        try:
            await self.tell(UnloadModel(key=key))
        finally:
            unloaded.set()
            if self._unloading.get(key) is unloaded:
                del self._unloading[key]

    async def tell(self, call: WorkerCall[Empty]) -> None:
        """Make a call whose answer changes nothing; a worker that is gone has forgotten anyway."""
        try:
            await self._supervisor.call(call, seconds=self._limits.run_seconds)
        except WorkerDied:
            pass
        except HonedError as error:
            _log.warning("the worker refused %s: %s", call.method, error)


# Compares two loaded versions of a model: with the device's loader, their keys and the allowance.
VersionComparer = Callable[[Loader, str, str, float], Awaitable[PairedTrialResult]]


def warm_up_inputs(manifest: Manifest, interface: Interface | None) -> tuple[InputSpec, ...]:
    """Return the inputs on which a model runs before it serves; `interface` is that of the loaded form."""
    if interface is None:
        return ()
    return made_up(interface.inputs, manifest.shapes | manifest.settings.warm_up_shapes)


def made_up(tensors: tuple[TensorSpec, ...], shapes: dict[str, tuple[int, ...]]) -> tuple[InputSpec, ...]:
    """Return inputs in the given shapes for open ones, else with 1 for each open size."""
    return tuple(
        InputSpec(name=tensor.name, dtype=tensor.dtype, shape=_closed(tensor, shapes), place=None)
        for tensor in tensors
    )


def _closed(tensor: TensorSpec, shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    wanted = shapes.get(tensor.name)
    if wanted is not None and tensor.takes(wanted):
        return wanted
    return tuple(1 if size < 0 else size for size in tensor.shape or ())
