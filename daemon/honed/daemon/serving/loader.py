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
from honed.daemon.store.compiled import TensorSpec
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
from honed.protocol.results import ModelChecked
from honed.protocol.values import ComparedOutput, Empty, OrtSessionConfig
from honed.runtime import HONED_VERSION
from honed.runtime.engines import MAX_PAIRS

from .trial import PairedTrialResult, paired_trial

# ---- The cache of files verified on a device, which outlasts restarts of the service ----
#
# A cached file serves after its first probe, so that a restart is fast; the other probes follow then.
# An entry is valid for the same device, driver and honed only. It is an empty marker file; if it is lost, the
# start only takes longer.

REMEMBERED = 500
_log = logging.getLogger(__name__)


class ProofCache:
    """A cache of the files verified on a device, by SHA-256. Its I/O blocks, but is little."""

    def __init__(self, cache_dir: Path, identity: DeviceIdentity) -> None:
        self._folder = cache_dir / "proven"
        self._device = repr((sorted(strict.to_plain(identity).items()), HONED_VERSION))

    def knows(self, key: str) -> bool:
        """Return whether all probes of the file passed."""
        try:
            return self._marker(key).exists()
        except OSError:  # An unreadable folder counts as empty
            return False

    def note(self, key: str) -> None:
        """Record that all probes of the file passed, and drop the oldest entries."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._marker(key).touch()
            kept = sorted(self._folder.iterdir(), key=lambda marker: marker.stat().st_mtime)
            for marker in kept[:-REMEMBERED]:
                marker.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("that a model was verified cannot be remembered: %s", error)

    def forget(self, key: str) -> None:
        """Delete a file's entry, so that the file is verified again; log it if that fails."""
        try:
            self._marker(key).unlink(missing_ok=True)
        except OSError as error:
            _log.error("that a model is to be proven anew cannot be remembered: %s", error)

    def _marker(self, key: str) -> Path:
        return self._folder / hashlib.sha256(f"{key} {self._device}".encode()).hexdigest()


# ---- Loading files into a worker, verifying them with probes, and comparing them with each other ----

# Pause for requests after each other run: a multiple of the run's time, with a maximum.
_PAUSE_RUNS, _LONGEST_PAUSE_SECONDS = 10, 2.0
_LOOK_SECONDS = 0.05  # Interval of checks whether the engine is quiet
LONGEST_OWN_MS = 500.0  # Maximum run of a user's own model on a device, because others wait for it
OWN_ROUNDS = 7  # Pairs of runs that time a user's own model
_Ran = TypeVar("_Ran", CheckedProbe, ComparisonRun)


class Loader:
    """A loader of files into the worker of `engine`, which also verifies and times them beside requests."""

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        supervisor: Supervisor,
        models: Registry,
        store: Store,
        cache_dir: Path,
    ) -> None:
        """Initialise; `cache_dir` holds the cache of verified files."""
        self._models = models
        self.builder = BuildProcess(limits, cache_dir, supervisor)
        self.engine = engine
        self._cache_dir = cache_dir
        self._limits = limits
        self._supervisor = supervisor
        self._store = store
        self._unloading: dict[str, asyncio.Event] = {}  # Files being unloaded, by key
        self.comparing = asyncio.Lock()  # The worker keeps the state of one comparison at a time

    @property
    def pid(self) -> int:
        """The id of the worker's process; 0 if there is none."""
        return self._supervisor.pid

    async def load(
        self, key: str, path: str, *, foreground: bool = True, progress: Progress = lambda _, __: None
    ) -> LoadReport:
        """Build and verify a compiled file in the builder, then load it in the worker.

        The builder is skipped if the file is in the cache. Requests run meanwhile, and wait for one probe at
        most. `foreground` and `progress` are those of `BuildProcess.prove`. Raises ModelRefused if an output
        is wrong, DeviceError if the device cannot build or hold the model, and WorkerDied if the worker or
        the builder crashed.
        """
        await self._verify_in_builder(key, path, foreground=foreground, progress=progress)
        return dataclasses.replace(await self._load(key, path, give_way=True), left=())

    async def restore(self, action: messages.Load) -> messages.Event | None:
        """Load a stored model in the worker; return the resulting event, None if no worker runs."""
        key = action.model.key_on(self.engine.name)
        try:
            path = str(await in_thread(self._store.form, action.model.manifest, key))
            proven_now = await self._verify_in_builder(key, path)
            proof = await self._load(key, path, give_way=not action.awaited)
            await self._warm_up(action.model.manifest, key, proof, give_way=not action.awaited)
        except NoWorker:
            return None  # The worker ended for another reason; the next one loads the model
        except WorkerDied as error:
            in_builder = isinstance(error, BuilderLost)
            if not in_builder:  # The file may be to blame: the builder verifies it before it is loaded again
                self._proofs().forget(key)
            return messages.LoadCrashed(action.deployment, str(error), in_builder)
        except HonedError as error:
            short = isinstance(error, OutOfMemory)
            return messages.LoadRefused(action.deployment, self.engine.name, key, str(error), short)
        if proven_now or not action.awaited:
            proof = dataclasses.replace(proof, left=())
        return messages.Loaded(action.deployment, key, proof)

    async def _warm_up(self, manifest: Manifest, key: str, proof: LoadReport, *, give_way: bool) -> None:
        """Warm a model up as its settings say; log a failure and continue, but raise WorkerDied."""
        settings = manifest.settings
        if not settings.warm_up or proof.interface is None or not proof.interface.inputs:
            return
        inputs = zero_inputs(proof.interface.inputs, manifest.shapes | settings.warm_up_shapes)
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
        """Verify one more probe of a model that serves already; return None if the worker ended."""
        key = action.model.key_on(self.engine.name)
        try:
            outputs = await self._check(key, action.probe, give_way=True)
        except WorkerDied:
            self._proofs().forget(key)  # The file may be to blame: it is verified again before it serves
            return None
        except HonedError as error:
            self._proofs().forget(key)
            return messages.ProbeFailed(action.deployment, str(error))
        return messages.ProbePassed(action.deployment, outputs)

    async def judge(self, action: messages.CompareCanary, comparer: VersionComparer | None) -> messages.Event:
        """Compare a canary with the previous version on inputs of clients; `comparer` None: by plain runs."""
        model, before = action.model, action.before
        try:
            # The previous version is loaded already, unless the worker was restarted.
            await self.load(before.key, str(self._store.form(before.manifest, before.key)))
            compared = await (comparer or Loader.compare)(self, before.key, model.key, LOSS)
        except WorkerDied as error:
            return messages.CanaryComparisonCrashed(model.number, str(error))
        except HonedError as error:
            _log.warning("model %s: its new version is not compared again: %s", model.name, error)
            return messages.CanaryCompared(model.number, "")
        return messages.CanaryCompared(model.number, compared.objection)

    async def _verify_in_builder(
        self, key: str, path: str, *, foreground: bool = True, progress: Progress = lambda _, __: None
    ) -> bool:
        """Verify a file in the builder; return False if it is in the cache."""
        proofs = self._proofs()
        if proofs.knows(key):
            return False
        await self.builder.prove(key, path, foreground=foreground, progress=progress)
        proofs.note(key)
        return True

    async def _load(self, key: str, path: str, *, give_way: bool) -> LoadReport:
        """Load a file in the worker and verify it: a cached one by its first probe, another by all.

        With `give_way` requests run between the probes; a load that requests wait for does without.
        """
        worker = self._supervisor.starts
        asked = self._models.session_config(key)
        built = await self.try_session(key, self._store.run_as(path, asked.half), asked)
        outputs: tuple[ComparedOutput, ...] = ()
        probes = tuple(range(built.probes))
        enough = 1 if self._proofs().knows(key) else len(probes)
        try:
            for probe in probes[:enough]:
                outputs = await self._check(key, probe, give_way=give_way)
        except ModelRefused:
            self._proofs().forget(key)
            raise
        left = probes[enough:]
        if not left:
            self._proofs().note(key)
        checked = ModelChecked(device=built.device, outputs=outputs)
        return LoadReport(
            engine=self.engine.name, worker=worker, checked=checked, left=left, interface=built.interface
        )

    async def try_session(self, key: str, path: str, config: OrtSessionConfig) -> BuiltModel:
        """Load a file in the worker under `key`; `config` configures the CPU engine's session.

        Waits until an unload of the same key has ended: the worker loads beside its other calls, and would
        otherwise reuse the file that it is about to drop.
        """
        await self._supervisor.open()
        while (unloaded := self._unloading.get(key)) is not None:
            await unloaded.wait()
        build = BuildModel(key=key, path=path, **config._asdict())
        return await self._supervisor.call(build, seconds=self._limits.load_seconds)

    async def _check(self, key: str, probe: int, *, give_way: bool) -> tuple[ComparedOutput, ...]:
        """Run a probe, and return the largest difference of each output so far.

        Raises ModelRefused if an output is wrong.
        """
        return (await self._careful(CheckProbe(key=key, probe=probe), give_way=give_way)).outputs

    def _proofs(self) -> ProofCache:
        assert self._supervisor.identity is not None
        return ProofCache(self._cache_dir, self._supervisor.identity)

    async def compare(
        self, old: str, new: str, allowance: float, *, most: int = MAX_PAIRS
    ) -> PairedTrialResult:
        """Run two loaded files in turns, at most `most` pairs; requests wait for one run at most.

        Raises WorkerDied if the worker crashes.
        """

        async def run(which: int, turn: int) -> ComparisonRun:
            return await self._careful(RunComparison(old=old, new=new, pair=turn, which=which))

        async with self.comparing:
            return await paired_trial(partial(run, 0), partial(run, 1), allowance, most=most)

    async def time_cpu_run(self, key: str, compiled: Path, turn: int) -> ComparisonRun:
        """Run a model of the CPU engine once, on the probe inputs of its compiled file."""
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
        """Return the microseconds of a run of a user's own model.

        Raises ModelRefused above LONGEST_OWN_MS, because other users would wait for it.
        """
        us = await self.run_us(key, OWN_ROUNDS)
        if us > 1e3 * LONGEST_OWN_MS:
            raise ModelRefused(
                f"a run on the device takes {us / 1e3:.0f} ms and would keep others waiting for more than "
                f"{LONGEST_OWN_MS:g} ms"
            )
        return us

    async def _careful(self, call: WorkerCall[_Ran], *, give_way: bool = True) -> _Ran:
        """Make a call that runs a model; if the device fails, kill the worker and raise WorkerDied.

        With `give_way`, pause afterwards so that requests may run.
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
        """Pause while requests run, so that a series of runs delays each request by one run at most."""
        end = time.monotonic() + min(_PAUSE_RUNS * taken, _LONGEST_PAUSE_SECONDS)
        while self.engine.idle_seconds(now := time.monotonic()) < taken and (left := end - now) > 0:
            await asyncio.sleep(min(taken, left))

    async def _quiet(self) -> None:
        """Wait until no long run would distort a time measured now, for `run_seconds` at most."""
        end = time.monotonic() + self._limits.run_seconds
        while any(each.long for each in self.engine.running.values()) and time.monotonic() < end:
            await asyncio.sleep(_LOOK_SECONDS)

    async def step(self, call: WorkerCall[R]) -> R:
        """Make a call for a synthetic sequence between requests.

        If the device fails, kills the worker and raises WorkerDied.
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
        """Unload a file from the worker; `try_session` waits for that."""
        unloaded = self._unloading[key] = asyncio.Event()
        try:
            await self.tell(UnloadModel(key=key))
        finally:
            unloaded.set()
            if self._unloading.get(key) is unloaded:
                del self._unloading[key]

    async def tell(self, call: WorkerCall[Empty]) -> None:
        """Make a call whose result is not needed; ignore a worker that has ended, log a refusal."""
        try:
            await self._supervisor.call(call, seconds=self._limits.run_seconds)
        except WorkerDied:
            pass
        except HonedError as error:
            _log.warning("the worker refused %s: %s", call.method, error)


# Compares two loaded versions of a model. Arguments: the device's loader, both keys and the allowance.
VersionComparer = Callable[[Loader, str, str, float], Awaitable[PairedTrialResult]]


def zero_inputs(tensors: tuple[TensorSpec, ...], shapes: dict[str, tuple[int, ...]]) -> tuple[InputSpec, ...]:
    """Return inputs of zeros: in `shapes`, if one fits the tensor, else with 1 for each dynamic size."""
    return tuple(
        InputSpec(name=tensor.name, dtype=tensor.dtype, shape=_static_shape(tensor, shapes), place=None)
        for tensor in tensors
    )


def _static_shape(tensor: TensorSpec, shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    wanted = shapes.get(tensor.name)
    if wanted is not None and tensor.takes(wanted):
        return wanted
    return tuple(1 if size < 0 else size for size in tensor.shape or ())
