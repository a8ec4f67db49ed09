"""Serves users' own models: apps upload them for their user only, and they are compiled after all others.

This module has the quotas of users, the reader of their files, which may lie on a file system of the user
whose reads never end, and the feature.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final
from weakref import WeakValueDictionary

from honed.daemon.aio import cancel_all, in_thread
from honed.daemon.changes.add import ModelInstaller, check_files
from honed.daemon.changes.change import RECEIVED, Changes, Notify, Staged, is_compiled
from honed.daemon.core.model import ServedModel, State
from honed.daemon.core.state import Registry
from honed.daemon.feature import BackgroundTask, Feature, FeatureRequest, Handler, Infer, MethodCall
from honed.daemon.idle.leasing import Leasing
from honed.daemon.observe.statefile import StateFile, save_at_intervals
from honed.daemon.serving.selection import is_unfinished
from honed.daemon.settings import places
from honed.daemon.settings.schema import setting
from honed.daemon.store.files import StoredFile, receive
from honed.daemon.store.names import is_own, own_name
from honed.daemon.store.store import Manifest
from honed.protocol import strict
from honed.protocol.errors import (
    Busy,
    DeadlineExceeded,
    HonedError,
    InvalidArgument,
    ModelRefused,
    OutOfMemory,
    PermissionDenied,
    ResourceExhausted,
)
from honed.protocol.methods import MODEL_BRING
from honed.protocol.params import UploadOptions, UploadParams
from honed.protocol.results import InferredTensor, UploadResult
from honed.protocol.strict import Map
from honed.protocol.values import ENGINE_NAMES
from honed.protocol.wire import close_all
from honed.runtime.dtypes import dtype

IN_USE_SECONDS = 60.0  # Time after a request in which a model is not removed for another
DAY = 86_400.0
PATIENCE_SECONDS = 600.0  # Maximum wait for an idle machine of a model that its app runs by itself
LOOK_SECONDS = 1.0  # Interval of checks whether an administrator's model waits for compilation
MAX_WAITING = 8  # Simultaneous uploads of a user, which are processed one after the other
ENGINES: Final = ("fastest", "cpu", "gpu")
_MAX_READING = 2  # Files of one user being read: one, and one whose upload was abandoned
_MIB = 1 << 20
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_Received = tuple[StoredFile, Path]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppsSettings:
    """The [apps] table: models of their own that members of the group honed may upload."""

    enabled: bool = setting("false: apps cannot bring models. Existing ones stay", True)
    max_users: int = setting(
        "Users who have models of their own at the same time", share=lambda its: its.users
    )
    max_models: int = setting("Models of one user. They do not count for `limits.max_models`", 128)
    disk_mib: int = setting("Files of one user's models, with compiled forms and versions", 4096, unit="MiB")
    memory_mib: int = setting(
        "Memory of each CPU process of one user; files and device memory of the user's models",
        share=lambda its: its.app,
        unit="MiB",
        minimum=64,
        effect="restart",
    )
    compile_seconds: float = setting(
        "Compiling one user's models in a day. 0: never", 1800.0, unit="s", minimum=0
    )

    @property
    def disk_bytes(self) -> int:
        """The limit `disk_mib` in bytes."""
        return self.disk_mib * _MIB

    @property
    def all_mib(self) -> int:
        """The memory of all users' engines together, in MiB."""
        return self.max_users * self.memory_mib

    @property
    def memory_bytes(self) -> int:
        """The limit `memory_mib` in bytes."""
        return self.memory_mib * _MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class UserModelUsage:
    """A user's own model with the bytes of its files (`nbytes`) and its bytes of `memory_mib` (`memory`).

    `used` is the time of its upload or last request, in seconds since 1970.
    """

    name: str
    user: int
    nbytes: int
    memory: int
    used: float


@dataclass(slots=True, kw_only=True)
class CompileUsage:
    """The seconds spent on compiling within a day that began at `since`."""

    seconds: float
    since: float  # Seconds since 1970


@dataclass(slots=True, kw_only=True)
class UserQuotas:
    """The stored usage of users' quotas, as far as manifests do not contain it.

    `used` holds the last use by model, `spent` the compile time by user (uid as text). Times are in seconds
    since 1970.
    """

    used: dict[str, float] = field(default_factory=dict)
    spent: dict[str, CompileUsage] = field(default_factory=dict)

    def use(self, name: str, now: float) -> None:
        """Record that a user uploaded or requested a model."""
        self.used[name] = now

    def keep_only(self, names: Iterable[str], now: float) -> None:
        """Drop the usage of all models but `names`, and days that are over."""
        known = set(names)
        self.used = {name: at for name, at in self.used.items() if name in known}
        self.spent = {user: spent for user, spent in self.spent.items() if 0 <= now - spent.since < DAY}

    def count_compile_seconds(self, user: int, seconds: float, now: float) -> None:
        """Add `seconds` to the time spent on compiling a user's models today."""
        spent = self.spent.get(str(user))
        if spent is None or not 0 <= now - spent.since < DAY:
            spent = self.spent[str(user)] = CompileUsage(seconds=0.0, since=now)
        spent.seconds += seconds

    def seconds_spent(self, user: int, now: float) -> float:
        """Return the seconds spent on compiling a user's models today."""
        spent = self.spent.get(str(user))
        return spent.seconds if spent is not None and 0 <= now - spent.since < DAY else 0.0

    def seconds_left(self, user: int, settings: AppsSettings, now: float) -> float:
        """Return the remaining seconds of a user's daily compile time, at least 0."""
        return max(0.0, settings.compile_seconds - self.seconds_spent(user, now))


def going(new: UserModelUsage, kept: Sequence[UserModelUsage], settings: AppsSettings) -> tuple[str, ...]:
    """Return the models to remove, in this order, so that the quotas admit a new one, which was `used` now.

    `kept` are the models of all users. Only the user's own are removed, the least recently used first, and
    none in use. Raises ResourceExhausted, naming the quota, if that is not enough.
    """
    if new.nbytes > settings.disk_bytes or new.memory > settings.memory_bytes:
        setting = "disk_mib" if new.nbytes > settings.disk_bytes else "memory_mib"
        raise ResourceExhausted(
            f"the model takes {-(-new.nbytes >> 20)} MiB, which is more than a user's models may; "
            f"raise apps.{setting} in the configuration"
        )
    own = sorted((model for model in kept if model.user == new.user), key=lambda model: model.used)
    others = {model.user for model in kept} - {new.user}
    if not own and len(others) >= settings.max_users:
        raise ResourceExhausted(
            f"{settings.max_users} users have models of their own already; raise apps.max_users in the "
            "configuration"
        )
    left = list(own)
    gone: list[str] = []
    while quota := _quota_exceeded([*left, new], settings):
        if not left or new.used - left[0].used < IN_USE_SECONDS:
            raise ResourceExhausted(
                f"your models take all that apps.{quota} allows, and those that are left were used within "
                "the last minute; remove one, or try again later"
            )
        gone.append(left.pop(0).name)
    return tuple(gone)


def _quota_exceeded(models: Sequence[UserModelUsage], settings: AppsSettings) -> str:
    """Return the quota that one user's models exceed; "" for none."""
    if len(models) > settings.max_models:
        return "max_models"
    if sum(model.nbytes for model in models) > settings.disk_bytes:
        return "disk_mib"
    if sum(model.memory for model in models) > settings.memory_bytes:
        return "memory_mib"
    return ""


def next_user(
    waiting: Mapping[int, float], shares: UserQuotas, settings: AppsSettings, now: float
) -> int | None:
    """Return the user whose model is compiled next: the one with the least compile time today, then by wait.

    `waiting` maps users to when their wait began, in seconds since 1970. Returns None if none has time left.
    """
    may = [user for user in waiting if shares.seconds_left(user, settings, now) > 0]
    return min(may, key=lambda user: (shares.seconds_spent(user, now), waiting[user], user), default=None)


class QuotaFile:
    """The file with the usage of users' quotas."""

    def __init__(self, path: Path) -> None:
        self._file = StateFile(path, UserQuotas, "what apps used")
        self.shares = self._file.read() or UserQuotas()

    async def keep(self) -> None:
        """Save the usage at intervals, and when cancelled."""
        await save_at_intervals(lambda: self._file.save(self.shares))


class Receiver:
    """A reader of users' files, each in a thread of its own, as a read may never end."""

    def __init__(self, seconds: float) -> None:
        """Initialise; reading the files of one model may take `seconds`."""
        self._seconds = seconds
        self._reading: Counter[int] = Counter()  # Number of files being read by user

    async def receive(
        self, params: UploadParams, descriptors: Sequence[int], folder: Path, user: int, limit: int
    ) -> Staged:
        """Receive the files of a user's own model, of `limit` bytes at most, and check their SHA-256.

        Raises InvalidArgument if a SHA-256 differs, PermissionDenied for a compiled file, ResourceExhausted
        if the files are larger, and DeadlineExceeded.
        """
        options = params.parameters or UploadOptions()
        files: list[_Received] = []
        try:
            async with asyncio.timeout(self._seconds):
                for name, sha256, descriptor in zip(params.files, params.sha256, descriptors, strict=True):
                    file, path = await self._read(user, descriptor, name, folder / "given", limit)
                    if file.sha256 != sha256:
                        raise InvalidArgument(
                            f"the SHA-256 of {name[:80]!r} is {file.sha256} and not {sha256}; "
                            "send what the file holds"
                        )
                    limit -= file.nbytes
                    files.append((file, path))
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"reading the files took longer than {self._seconds:g} s; copy them to a local disk"
            ) from error
        if await in_thread(is_compiled, files[0][1]):
            raise PermissionDenied(
                "compiled files are taken from administrators only (hone add); bring the ONNX file"
            )
        return Staged(
            folder=folder,
            sources=tuple(files),
            model_file=files[0][1],
            shapes=dict(options.shapes or {}),
            precision=options.precision or "auto",
            device=None,
            owner=user,
        )

    async def _read(self, user: int, descriptor: int, name: str, folder: Path, limit: int) -> _Received:
        """Read a file as `files.receive` does; after cancellation the thread ends when its read returns."""
        if self._reading[user] >= _MAX_READING:
            raise Busy("files that you brought before are still being read; let them end first")
        loop, copy = asyncio.get_running_loop(), os.dup(descriptor)
        given: Future[_Received] = Future()
        given.set_running_or_notify_cancel()  # Cancellation does not end the thread

        def count_down() -> None:
            self._reading[user] -= 1
            if not self._reading[user]:
                del self._reading[user]

        def read() -> None:
            try:
                given.set_result(receive(copy, name, folder, limit))
            except Exception as error:  # noqa: BLE001 - the awaiting task raises it
                given.set_exception(error)
            finally:
                os.close(copy)
            if not loop.is_closed():  # The service may have ended during the read
                loop.call_soon_threadsafe(count_down)

        self._reading[user] += 1
        threading.Thread(target=read, daemon=True, name=f"file of user {user}").start()
        return await asyncio.wrap_future(given)


@dataclass(slots=True, eq=False)
class _UploadTask:
    """An upload in progress, and the number of requests that wait for it."""

    user: int
    work: asyncio.Task[UploadResult]
    waiting: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class UserModels(Feature):
    """A feature that adds, compiles and evicts users' own models; `settings` returns those in force."""

    settings: Callable[[], AppsSettings]
    registry: Registry
    changes: Changes
    installer: ModelInstaller
    leasing: Leasing
    receiver: Receiver
    shares_file: QuotaFile
    policy: str  # The setting serve.engine
    _under_way: dict[str, _UploadTask] = field(init=False, default_factory=dict)  # Uploads by model
    _turns: WeakValueDictionary[int, asyncio.Lock] = field(
        init=False, default_factory=WeakValueDictionary
    )  # Locks by user
    _failed: set[str] = field(init=False, default_factory=set)  # Models excluded until a restart

    def __post_init__(self) -> None:
        self.shares.keep_only((entry.name for entry in self.registry.models()), time.time())

    @property
    def shares(self) -> UserQuotas:
        """The usage of users' quotas."""
        return self.shares_file.shares

    def methods(self) -> Mapping[str, Handler[Any, Any]]:
        """Return the handler of ModelBring."""
        return {MODEL_BRING.name: self._bring}

    async def _bring(self, call: MethodCall, params: UploadParams) -> UploadResult:
        peer = call.connection.peer
        meanwhile = self.leasing.adding(peer.pid, "an app's model is being added")
        return await self.bring(peer.uid, params, call.descriptors, call.progress, meanwhile)

    async def bring(
        self,
        user: int,
        params: UploadParams,
        descriptors: Sequence[int],
        notify: Notify,
        meanwhile: AbstractContextManager[None],
    ) -> UploadResult:
        """Add a model for a user (uid) and return the result of ModelBring.

        The caller keeps the descriptors. `meanwhile` is entered while the model is added. Cancellation ends
        the upload, unless another request waits for it.
        """
        if not self.settings().enabled:
            raise PermissionDenied(
                "apps may not bring models here; have an administrator add it, or set enabled in [apps]"
            )
        check(params, descriptors)
        name = own_name(user, params)
        entry = self.registry.find(name)
        if entry is not None:
            self.record_use(name)
            return _result(entry, params.sha256[0])
        bring = self._under_way.get(name)
        if bring is None:
            if sum(bring.user == user for bring in self._under_way.values()) >= MAX_WAITING:
                raise Busy(
                    f"you bring {MAX_WAITING} models at a time already; wait for one of them to be served"
                )
            copies = [os.dup(descriptor) for descriptor in descriptors]
            bring = self._begin(user, name, copies, self._take(user, name, params, copies, notify, meanwhile))
        bring.waiting += 1
        try:
            return await asyncio.shield(bring.work)
        finally:
            bring.waiting -= 1
            if not bring.waiting and not bring.work.done():
                await cancel_all(bring.work)

    def wrap(self, entry: ServedModel, infer: Infer) -> Infer | None:
        """Record each use of a user's own model."""
        if not is_own(entry.name):
            return None

        async def infer_own(call: FeatureRequest) -> Map:
            self.record_use(call.entry.name)
            if call.entry.on_cpu:
                self.changes.checks.begin(call.entry.manifest)
            return await infer(call)

        return infer_own

    def forget(self, model: str) -> None:
        """Drop the last use of a removed model."""
        self.shares.used.pop(model, None)

    def record_use(self, name: str) -> None:
        """Record that a user's own model was requested."""
        self.shares.use(name, time.time())

    def _begin(
        self, user: int, name: str, copies: list[int], taking: Coroutine[Any, Any, UploadResult]
    ) -> _UploadTask:
        work = asyncio.ensure_future(taking)
        bring = self._under_way[name] = _UploadTask(user, work)

        def finish(done: asyncio.Task[UploadResult]) -> None:
            close_all(copies)
            del self._under_way[name]
            if not done.cancelled():
                done.exception()  # The requests that wait for it raise the error

        work.add_done_callback(finish)
        return bring

    async def _take(
        self,
        user: int,
        name: str,
        params: UploadParams,
        descriptors: Sequence[int],
        notify: Notify,
        meanwhile: AbstractContextManager[None],
    ) -> UploadResult:
        """Receive, try out and serve an upload; remove the models evicted for it once it is served."""
        turn = self._turns.setdefault(user, asyncio.Lock())
        async with turn:
            nbytes = sum(_size(*each) for each in zip(params.files, descriptors, strict=True))
            options = params.parameters or UploadOptions()
            memory = 0 if options.engine == "gpu" else nbytes
            new = UserModelUsage(name=name, user=user, nbytes=nbytes, memory=memory, used=time.time())
            leaving = going(new, self._usage_of_all(), self.settings())
            with meanwhile:
                async with self.changes.begin(name, notify, replace=False, owner=user) as change:
                    change.report("receive", 0.0)
                    limit = min(self.settings().disk_bytes, self.changes.limits.max_model_bytes)
                    folder = await change.folder()
                    staged = await self.receiver.receive(params, descriptors, folder, user, limit)
                    change.report("receive", RECEIVED)
                    try:
                        if options.engine == "gpu":
                            await self.installer.keep_for_app(change, staged)
                        else:
                            await self.installer.serve_as_given(change, staged, options.engine or "fastest")
                    except ModelRefused as error:
                        if not isinstance(error.__cause__, OutOfMemory):
                            raise
                        raise ResourceExhausted(
                            "the model does not fit in the memory of your models' CPU engine, "
                            f"{self.settings().memory_mib} MiB of apps.memory_mib; remove some of "
                            "them, or raise it in the configuration"
                        ) from error
            self.record_use(name)
            for each in leaving:
                try:
                    await self.installer.remove(each)
                except HonedError as error:
                    _log.error("model %s cannot be removed: %s", each, error)
                else:
                    _log.info("model %s made room for another of user %d", each, user)
        return _result(self.registry.get(name), params.sha256[0])

    def _usage_of_all(self) -> list[UserModelUsage]:
        """Return every user's own models."""
        kept: list[UserModelUsage] = []
        for entry in self.registry.models():
            manifest = entry.manifest
            if manifest.owner is None:
                continue
            forms = (entry, *self.registry.variants(entry.name))
            versions = (v for form in forms for v in form.manifest.history.versions)
            files = {file.sha256: file.nbytes for file in manifest.files}
            files |= {version.sha256: version.nbytes for version in versions if version.kept}
            compiled = sum(form.compiled.device_bytes for form in forms if form.compiled is not None)
            loaded = 0 if manifest.for_app else sum(file.nbytes for file in manifest.sources)
            kept.append(
                UserModelUsage(
                    name=entry.name,
                    user=manifest.owner,
                    nbytes=sum(files.values()),
                    memory=compiled + loaded,
                    used=self.shares.used.get(entry.name, manifest.added),
                )
            )
        return kept

    # Compiling

    def background(self, *, idle: bool) -> BackgroundTask | None:
        """Return the next compilation, none while an administrator's is in progress.

        A model that its app runs by itself waits up to PATIENCE_SECONDS for an idle machine.
        """
        if self.changes.adding or not places.compiler():
            return None
        waiting = self._waiting(idle=idle)
        since = {user: entry.manifest.added for user, entry in waiting.items()}
        user = next_user(since, self.shares, self.settings(), time.time())
        if user is None:
            return None
        return BackgroundTask(f"compiling {waiting[user].name}", partial(self._compile, waiting[user]))

    def _waiting(self, *, idle: bool) -> dict[int, ServedModel]:
        """Return each user's oldest model that is to be compiled now, by user."""
        waiting: dict[int, ServedModel] = {}
        since = time.time() - PATIENCE_SECONDS
        for entry in sorted(self.registry.models(), key=lambda each: each.manifest.added):
            manifest = entry.manifest
            if manifest.owner is None or entry.name in self._failed | self.installer.leaving:
                continue
            if manifest.for_app and not idle and manifest.added > since:
                continue
            if entry.on_cpu and is_unfinished(manifest, self.policy):
                waiting.setdefault(manifest.owner, entry)
        return waiting

    async def _compile(self, entry: ServedModel) -> None:
        """Compile a model; stop if an administrator's model is to be compiled, and begin again later."""
        owner = entry.manifest.owner
        assert owner is not None
        begun, stopped = time.monotonic(), False
        seconds = self.settings().compile_seconds
        work = asyncio.ensure_future(self.installer.resume(entry.manifest, seconds))
        try:
            while not work.done():
                await asyncio.wait([work], timeout=LOOK_SECONDS)
                if self.changes.adding and not work.done():
                    _log.info("model %s is compiled later: an administrator's comes first", entry.name)
                    stopped = True
                    await self.installer.stop_compiling(entry.name)
            now = self.registry.find(entry.name)
            if not stopped and now is not None and is_unfinished(now.manifest, self.policy):
                _log.warning("model %s is not compiled before the next start", entry.name)
                self._failed.add(entry.name)
        finally:
            self.shares.count_compile_seconds(owner, time.monotonic() - begun, time.time())
            if not work.done():
                await self.installer.stop_compiling(entry.name)

    def may_compile(self, manifest: Manifest) -> bool:
        """Return whether further files of a model may be compiled.

        A user's model must be compiled for an app, and the user must have compile time left today.
        """
        owner = manifest.owner
        if owner is None:
            return True
        return manifest.for_app and self.shares.seconds_left(owner, self.settings(), time.time()) > 0

    def count_compile_seconds(self, owner: int, seconds: float) -> None:
        """Count the seconds that variants or specialisations of a user's models took to compile."""
        self.shares.count_compile_seconds(owner, seconds, time.time())

    async def run(self) -> None:
        """Save the usage of quotas until cancelled."""
        await self.shares_file.keep()

    async def close(self) -> None:
        """Cancel all uploads in progress."""
        await cancel_all(*(bring.work for bring in self._under_way.values()))


def check(params: UploadParams, descriptors: Sequence[int]) -> None:
    """Raise InvalidArgument for invalid parameters of an upload."""
    options = params.parameters or UploadOptions()
    check_files(params.files, descriptors, options.precision, options.shapes or {})
    if options.engine not in (None, *ENGINES):
        raise InvalidArgument(
            f"engine is {options.engine!r:.40}; use fastest, {ENGINE_NAMES['cpu']} or {ENGINE_NAMES['gpu']}"
        )
    if len(params.sha256) != len(params.files) or not all(map(_SHA256.fullmatch, params.sha256)):
        raise InvalidArgument("sha256 must be the SHA-256 of each of the files, 64 lower-case hex digits")


def _size(name: str, descriptor: int) -> int:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise InvalidArgument(f"{name[:80]!r} is not a regular file; send the model as a file or memfd")
    return status.st_size


def _result(entry: ServedModel, sha256: str) -> UploadResult:
    manifest = entry.manifest
    waits = manifest.compiled is None and manifest.decision.requested != "cpu"
    outputs = manifest.interface.outputs if manifest.interface is not None else ()
    return UploadResult(
        model_name=entry.name,
        sha256=sha256,
        ready=entry.state is not State.UNAVAILABLE,  # An engine that loads it again keeps requests waiting
        engine=entry.kind,
        engine_name=ENGINE_NAMES[entry.kind],
        engine_why=entry.remark or manifest.decision.reason or ("it is being compiled" if waits else ""),
        outputs=tuple(
            strict.copy_fields(InferredTensor, each, datatype=dtype(each.dtype).datatype) for each in outputs
        ),
    )
