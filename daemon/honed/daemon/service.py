"""Runs the daemon `honed` until it is stopped, and removes its traces."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import gc
import logging
import os
import resource
import signal
import socket
import stat
import sys
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from honed.process.limits import memory_mib
from honed.protocol.errors import AlreadyExists, HonedError, PermissionDenied
from honed.runtime import HONED_VERSION

from . import assembly, listener, restoring
from .config import Config, Reloader, load, memory, memory_sentence
from .store.store import Manifest, Store
from .systemd import Systemd

_MAX_DESCRIPTORS = 65_536
_EXAMPLES = """examples:
  honed                                    as this user, at $XDG_RUNTIME_DIR/honed/honed.sock
  honed --device mali                      on the OpenCL device whose name holds "mali"
  honed --socket /tmp/h.sock --state-dir /tmp/h --cache-dir /tmp/h-cache
                                           apart from any other service

'hone status' shows whether it runs, 'hone doctor' what is wrong if it does not.
"""
_log = logging.getLogger("honed.daemon")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the service, and return the exit status: 0 stopped as requested, 1 failed, 2 wrong usage."""
    options = _parser().parse_args(arguments)
    os.umask(0o077)  # Other users must not read files of the service and its children
    systemd = None
    try:
        systemd = Systemd(os.environ)
        systemd.set_up_logging(options.verbose)
        read = partial(
            load,
            environ=os.environ,
            uid=os.getuid(),
            config=options.config,
            overrides={
                "socket": options.socket,
                "state_dir": options.state_dir,
                "cache_dir": options.cache_dir,
                "device": options.device,
            },
        )
        _serve(read, systemd)
    except HonedError as error:
        print(f"honed: {error}", file=sys.stderr)
        if systemd is not None:
            systemd.tell(f"STATUS={error}")
        return 1
    return 0


def lock(path: Path, what: str, folder_mode: int = 0o700) -> int:
    """Lock the file `path`, created if missing; return its descriptor, which holds the lock until closed.

    A missing folder is created with `folder_mode`, regardless of the umask. Raises AlreadyExists if another
    process holds the lock; `what` names the locked thing in the message.
    """
    try:
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.parent.chmod(folder_mode)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        raise PermissionDenied(
            f"{path} cannot be opened ({error.strerror}); run as the user that owns {path.parent}, "
            "or choose other places with --socket and --state-dir"
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise AlreadyExists(f"{path} is there and is no regular file; remove it")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise AlreadyExists(
            f"another honed (process {holder or 'unknown'}) uses {what}; stop it, or choose other places "
            "with --socket and --state-dir"
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="honed",
        description="Serve compiled models to the apps of this machine over a Unix socket.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--socket", type=Path, metavar="PATH", help="where to listen (or HONED_SOCKET)")
    parser.add_argument("--state-dir", type=Path, metavar="DIR", help="where models are kept")
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="what can be made again")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings, in TOML")
    parser.add_argument(
        "--device", metavar="SPEC", help="OpenCL device: its number or part of its name (or HONED_DEVICE)"
    )
    parser.add_argument("--verbose", action="store_true", help="log more")
    parser.add_argument("--version", action="version", version=f"honed {HONED_VERSION}")
    return parser


def _serve(read: Callable[[], Config], systemd: Systemd) -> None:
    """Lock the configured folders, serve, and release them."""
    config = read()
    _allow_many_descriptors()
    places = config.service
    passed = systemd.socket()
    locks = [lock(places.state_dir / "lock", f"state folder {places.state_dir}")]
    try:
        if passed is None:
            socket_lock = places.socket.with_name(places.socket.name + ".lock")
            locks.append(lock(socket_lock, f"socket {places.socket}", 0o755))
        store = Store(places.state_dir)
        models, damaged = store.open()
        listening = passed or listener.listen(places.socket)
        try:
            asyncio.run(_run(config, read, systemd, listening, store, models, damaged))
        finally:
            listening.close()
            if passed is None:
                with contextlib.suppress(OSError):
                    places.socket.unlink()
    finally:
        for descriptor in locks:
            os.close(descriptor)


async def _run(
    config: Config,
    read: Callable[[], Config],
    systemd: Systemd,
    listening: socket.socket,
    store: Store,
    models: dict[str, Manifest],
    damaged: list[str],
) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    base = await assembly.build_shared_services(config, store, listening)
    models = restoring.without_raced_devices(base.pool, restoring.without_chosen_sessions(models))
    broken = await restoring.fill(base.pool, store, models, systemd, config.serve.engine)
    damaged = [*damaged, *(f"{manifest.name}: {reason}" for manifest, reason in broken)]
    for sentence in config.notes:
        _log.warning("%s", sentence)
    for sentence in damaged:
        _log.error("damaged: %s", sentence)
    base.usage_log.keep_only(models)
    reloader = Reloader(config, read, systemd, base.apply_config)
    loop.add_signal_handler(signal.SIGHUP, reloader.handle_signal)
    parts = await assembly.assemble(base, reloader)
    base.clients.answer = assembly.methods(parts, reloader, damaged).answer
    async with contextlib.AsyncExitStack() as running:
        _begin(running, parts, (_keep_watchdog(systemd), *parts.works()), stop)
        base.changes.checks.start_restoring()
        for change in restoring.work_to_finish(
            base.installer, base.pool, models, broken, config.serve.engine
        ):
            running.push_async_callback(_end, asyncio.ensure_future(change))
        # Permanent objects are exempt from garbage collection, which would block the loop.
        gc.collect()
        gc.freeze()
        base.clients.start_accepting()
        many = f"{len(models)} model{'' if len(models) == 1 else 's'}"
        _log.info("listening at %s with %s", config.service.socket, many)
        if (takes := memory(config)) >= (machine := memory_mib()):
            _log.warning("%s", memory_sentence(takes, machine))
        systemd.tell("READY=1", f"STATUS=Serving {many}")
        await stop.wait()
        await _finish(base, parts, systemd)


def _begin(
    running: contextlib.AsyncExitStack,
    parts: assembly.ServiceComponents,
    works: Iterable[Coroutine[Any, Any, None]],
    stop: asyncio.Event,
) -> None:
    """Start tasks that run as long as the service, and end them with `running`."""
    for work in works:
        task = asyncio.ensure_future(work)
        task.add_done_callback(partial(_stop_if_failed, stop))
        running.push_async_callback(_end, task)
    running.push_async_callback(parts.base.installer.close)
    for feature in parts.features:
        running.push_async_callback(feature.close)


async def _finish(base: assembly.SharedServices, parts: assembly.ServiceComponents, systemd: Systemd) -> None:
    """Answer the queued requests, and accept no new ones."""
    _log.info("stopping")
    systemd.tell("STOPPING=1", "STATUS=Finishing what is queued")
    parts.pipeline.stopping = True
    base.clients.stop_accepting()
    await base.pool.drain(base.config.limits.stop_seconds)
    await base.clients.close()


async def _keep_watchdog(systemd: Systemd) -> None:
    """Notify systemd's watchdog twice per period that the loop runs."""
    while systemd.watchdog_seconds:
        systemd.tell("WATCHDOG=1")
        await asyncio.sleep(systemd.watchdog_seconds / 2)


def _stop_if_failed(stop: asyncio.Event, task: asyncio.Task[None]) -> None:
    """End the service if one of its tasks failed unexpectedly, so that it is restarted."""
    if not task.cancelled() and task.exception() is not None:
        _log.critical("the service cannot go on: %r", task.exception())
        stop.set()


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for its end; raise the error that it failed with before."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _allow_many_descriptors() -> None:
    """Allow as many open files as the system lets this process have: regions and clients are descriptors."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    sys.exit(main())
