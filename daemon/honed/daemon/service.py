"""The daemon: `honed`. Puts the parts together, runs until told to stop, and leaves nothing behind."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from honed.protocol.errors import HonedError
from honed.protocol.service import ServicePlaces
from honed.runtime.version import own_version

from . import lock, server
from .apps.sharesfile import SharesFile
from .blocking import in_thread
from .chains.between import BetweenMemory
from .chains.served import Chains
from .chains.stored import ChainStore
from .changes.enginepins import EnginePins
from .changes.jobs import Jobs, failure
from .changes.publishing import Publisher
from .changes.sizekeeper import SizeKeeper
from .changes.variantkeeper import VariantKeeper
from .changes.variantmaking import VariantMaker
from .config import Config, load
from .core.events import Added, Damaged, NotRestored
from .core.registry import Registry
from .idle.leasing import Leasing
from .methods import api
from .methods.batcher import Batcher
from .methods.bringer import Bringer
from .methods.inferring import Inferring
from .methods.metrics import MetricsCollector
from .methods.modelsettings import SettingsKeeper
from .methods.receiving import Receiver
from .methods.removing import Remover
from .notify import Systemd
from .observe.kernelwatch import KernelWatch
from .observe.latencies import Keeper
from .observe.ledger import Ledger
from .reload import Reloader
from .serving.commits import Commits
from .serving.engines import cpu_serves, unfinished
from .serving.pool import Pool
from .serving.sequencing import Sequencer
from .settings.places import records_in
from .store.compiled import Compiled
from .store.inspection import SECONDS, Inspector, inspect_all
from .store.store import Manifest, Store
from .store.variantnames import is_variant
from .transport.peers import current_policy
from .tuning.child import TunerChild
from .tuning.runs import TunerRuns

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
    """Run the service; gives the exit status: 0 stopped when told to, 1 failed, 2 used wrongly."""
    options = _parser().parse_args(arguments)
    os.umask(0o077)  # what the service and its children write is for nobody else
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
    parser.add_argument("--version", action="version", version=f"honed {own_version()}")
    return parser


def _serve(read: Callable[[], Config], systemd: Systemd) -> None:
    """Take the places that the configuration names, serve, and give them back."""
    config = read()
    _allow_many_descriptors()
    places = config.service
    passed = systemd.socket()
    locks = [lock.acquire(places.state_dir / "lock", f"state folder {places.state_dir}")]
    try:
        if passed is None:
            socket_lock = places.socket.with_name(places.socket.name + ".lock")
            locks.append(lock.acquire(socket_lock, f"socket {places.socket}", 0o755))
        store = Store(places.state_dir)
        models, damaged = store.open()
        listening = passed or server.listen(places.socket)
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
    started = time.monotonic()
    places, limits, policy = config.service, config.limits, config.serve.engine
    registry = Registry()
    curves = await in_thread(Keeper, places.state_dir / "latencies.json")
    commits, inspector = Commits(store, registry), Inspector()
    pool = Pool(
        limits,
        places,
        registry,
        store,
        commits,
        inspector,
        curves.latencies,
        config.cpu,
        policy,
        config.apps.memory_mib,
    )
    broken = await _fill(pool, store, models, systemd, policy)
    damaged = [*damaged, *(f"{manifest.name}: {reason}" for manifest, reason in broken)]
    for sentence in damaged:
        _log.error("damaged: %s", sentence)
    records = records_in(places.state_dir)
    jobs = Jobs(limits, store, registry, pool, commits, inspector, curves.latencies, records, policy)
    clients = server.Server(listening, limits, pool)
    ledger = Ledger(places.state_dir / "usage.json", config.usage, clock=time.monotonic, wall=time.time)
    ledger.keep_only(models)
    apps = await in_thread(SharesFile, places.state_dir / "apps.json")
    apps.shares.keep_only(models, time.time())

    sequencer = Sequencer(config.sequences)
    leasing = Leasing(config.idle, lambda: pool.default.state)
    watch = KernelWatch(pool.workers)

    def changed(new: Config) -> None:
        ledger.change(new.usage)
        sequencer.change(new.sequences)
        leasing.change(new.idle)
        pool.limits_changed()
        clients.limits_changed()

    tuner = TunerChild(config.tuner, places.socket)
    reloader = Reloader(config, read, systemd, changed)
    loop.add_signal_handler(signal.SIGHUP, reloader.signalled)
    chains = Chains(
        registry=registry,
        jobs=jobs,
        limits=limits,
        store=ChainStore(places.state_dir),
        memory=BetweenMemory(pool.release),
    )
    damaged += await chains.restore()
    metrics = MetricsCollector(
        version=own_version(),
        started=started,
        registry=registry,
        chains=chains,
        pool=pool,
        ledger=ledger,
        tuner=tuner,
        connections=lambda: clients.connections,
        lease=leasing.metrics,
        gpu_faults=watch.figures,
    )
    variants = VariantKeeper(
        maker=VariantMaker(
            limits=limits,
            store=store,
            registry=registry,
            pool=pool,
            jobs=jobs,
            commits=commits,
            policy=policy,
        ),
        registry=registry,
        ledger=ledger,
        leasing=leasing,
        settings=lambda: reloader.config.variants,
    )
    remover = Remover(
        registry=registry,
        chains=chains,
        jobs=jobs,
        variants=variants,
        ledger=ledger,
        sequencer=sequencer,
        leasing=leasing,
        shares=apps.shares,
        cache_dir=places.cache_dir,
    )
    bringer = Bringer(
        settings=lambda: reloader.config.apps,
        registry=registry,
        store=store,
        jobs=jobs,
        remover=remover,
        receiver=Receiver(limits.load_seconds),
        shares=apps.shares,
        policy=policy,
    )
    pins = EnginePins(limits, store, pool, jobs, commits, policy)
    publisher = Publisher(limits, store, registry, pool, jobs, commits, inspector, curves.latencies, pins)
    sizes = SizeKeeper(
        store=store,
        registry=registry,
        pool=pool,
        jobs=jobs,
        publisher=publisher,
        ledger=ledger,
        leasing=leasing,
        policy=policy,
        settings=lambda: reloader.config.variants,
    )
    inferring = Inferring(
        limits=limits,
        registry=registry,
        pool=pool,
        bringer=bringer,
        chains=chains,
        sequencer=sequencer,
        batcher=Batcher(pool, variants, ledger),
        variants=variants,
        sizes=sizes,
        leasing=leasing,
        ledger=ledger,
    )
    clients.api = api.Api(
        limits=limits,
        policy=current_policy(os.getuid()),
        places=ServicePlaces(
            socket=str(places.socket), state_dir=str(places.state_dir), cache_dir=str(places.cache_dir)
        ),
        registry=registry,
        fleet=pool,
        jobs=jobs,
        bringer=bringer,
        chains=chains,
        remover=remover,
        publisher=publisher,
        ledger=ledger,
        variants=variants,
        inferring=inferring,
        settings=SettingsKeeper(limits, store, pool, jobs, commits),
        sequencer=sequencer,
        metrics=metrics,
        leasing=leasing,
        tuner=tuner,
        tuner_runs=TunerRuns(
            limits=limits,
            store=store,
            registry=registry,
            fleet=pool,
            jobs=jobs,
            publisher=publisher,
            tuner=tuner,
            records=records,
            cache_dir=places.cache_dir,
            tuner_mib=config.tuner.memory_mib,
            hints=lambda: reloader.config.hub.trials,
        ),
        reloader=reloader,
        connections=lambda: clients.connections,
        damaged=damaged,
    )
    async with contextlib.AsyncExitStack() as running:
        running.push_async_callback(ledger.save)
        running.push_async_callback(curves.save)
        running.push_async_callback(apps.save)
        for work in (
            pool.run(),
            _keep_watchdog(systemd),
            ledger.keep(),
            curves.keep(),
            apps.keep(),
            leasing.run(),
            watch.run(),
            tuner.run(),
            variants.run(),
            sizes.run(),
            bringer.run(),
        ):
            task = asyncio.ensure_future(work)
            task.add_done_callback(partial(_stop_if_failed, stop))
            running.push_async_callback(_end, task)
        running.push_async_callback(jobs.close)
        running.push_async_callback(bringer.close)
        for manifest in models.values():
            if manifest.owner is None and pool.cpu is not None and unfinished(manifest, policy):
                running.push_async_callback(_end, asyncio.ensure_future(jobs.resume(manifest)))
        for manifest, _ in broken:
            running.push_async_callback(_end, asyncio.ensure_future(_restore(jobs, pool, manifest)))
        _settle_memory()
        clients.start_accepting()
        _log.info("listening at %s with %d models", places.socket, len(models))
        systemd.tell("READY=1", f"STATUS=Serving {len(models)} models")
        await stop.wait()
        _log.info("stopping")
        systemd.tell("STOPPING=1", "STATUS=Finishing what is queued")
        clients.api.inferring.stopping = True
        clients.stop_accepting()
        await pool.drain(limits.stop_seconds)
        await clients.close()


async def _fill(
    pool: Pool, store: Store, models: dict[str, Manifest], systemd: Systemd, policy: str
) -> list[tuple[Manifest, str]]:
    """Enter the stored models; gives those whose compiled file cannot be used, with the reason."""
    paths = {
        manifest.name: store.object(manifest.compiled)
        for manifest in models.values()
        if manifest.compiled is not None
    }
    found: dict[Path, Compiled | HonedError] = {}
    async for inspected, said in inspect_all(sorted(set(paths.values()))):
        found[inspected] = said
        systemd.tell(f"EXTEND_TIMEOUT_USEC={round(2 * SECONDS * 1e6)}")
    broken: list[tuple[Manifest, str]] = []
    for manifest in models.values():
        path = paths.get(manifest.name)
        answer = found[path] if path is not None else None
        home = pool.home(manifest.name, manifest.device, manifest.placed).name
        if is_variant(manifest.name) and not isinstance(answer, Compiled):
            # It is compiled again when it is asked for often enough.
            told = answer or "it has no compiled file"
            _log.error("variant %s is damaged and dropped: %s", manifest.name, told)
            remaining = [each for each in models.values() if each.name != manifest.name]
            await in_thread(store.remove, manifest.name, remaining)
            continue
        if not isinstance(answer, HonedError):
            cpu, rests = cpu_serves(manifest, policy), is_variant(manifest.name)
            pool.handle(
                Added(manifest=manifest, compiled=answer, home=home, proof=None, cpu=cpu, rests=rests)
            )
            continue
        await in_thread(store.set_aside, manifest)
        reason = f"its compiled file is damaged ({answer})"
        if manifest.owner is not None and manifest.interface is not None and pool.cpu is not None:
            # It is compiled again when it is its user's turn.
            _log.error("damaged: %s: %s", manifest.name, reason)
            bare = dataclasses.replace(manifest, compiled=None, why="", chosen="", times=None)
            pool.handle(Added(manifest=bare, compiled=None, home=home, proof=None, cpu=True))
            continue
        if manifest.interface is not None and pool.cpu is not None:
            bare = dataclasses.replace(manifest, compiled=None, why=reason)
            pool.handle(Added(manifest=bare, compiled=None, home=home, proof=None, cpu=True))
        else:
            pool.handle(Damaged(manifest=manifest, home=home, reason=reason))
        broken.append((manifest, str(answer)))
    return broken


async def _restore(jobs: Jobs, pool: Pool, manifest: Manifest) -> None:
    """Compile a damaged model again from its stored source; where that fails, the trouble stays its own."""
    try:
        await jobs.restore(manifest)
    except HonedError as error:
        told = failure(error)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with one model must not end the service
        _log.error("restoring model %s failed", manifest.name, exc_info=error)
        told = f"the service failed in it ({error!r:.200})"
    else:
        _log.info("model %s was compiled again from its source", manifest.name)
        return
    _log.error("model %s could not be restored: %s", manifest.name, told)
    pool.handle(NotRestored(manifest.name, told))


def _settle_memory() -> None:
    """Spare the collector what is here for good: looking at it would hold up the loop again and again."""
    gc.collect()
    gc.freeze()


async def _keep_watchdog(systemd: Systemd) -> None:
    """Tell systemd twice per period that the loop turns."""
    while systemd.watchdog_seconds:
        systemd.tell("WATCHDOG=1")
        await asyncio.sleep(systemd.watchdog_seconds / 2)


def _stop_if_failed(stop: asyncio.Event, task: asyncio.Task[None]) -> None:
    """A part that fails in a way nobody foresaw ends the service, so that it is noticed and started again."""
    if not task.cancelled() and task.exception() is not None:
        _log.critical("the service cannot go on: %r", task.exception())
        stop.set()


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for its end; what it failed with before is raised."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _allow_many_descriptors() -> None:
    """As many open files as the system lets this process have: regions and clients are descriptors."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    sys.exit(main())
