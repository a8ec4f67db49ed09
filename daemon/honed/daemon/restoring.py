"""Restores the stored models at the start of the service, and their unfinished work."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from honed.protocol.errors import HonedError, OtherFormat

from .aio import in_thread
from .changes.add import ModelInstaller, failure
from .core.messages import Added, Damaged, NotRestored
from .serving.pool import EngineManager
from .serving.selection import cpu_serves, is_unfinished
from .store.compiled import CompiledFileInfo
from .store.inspector import SECONDS, inspect_all
from .store.names import is_variant
from .store.store import Manifest, Store
from .systemd import Systemd

_log = logging.getLogger(__name__)


def without_raced_devices(pool: EngineManager, models: Mapping[str, Manifest]) -> dict[str, Manifest]:
    """Return the models; those for which honed 0.1 chose the processor beside a GPU are compiled again.

    The CPU engine serves them meanwhile; without one, the service's device runs the present compiled file.
    """

    def on_default(manifest: Manifest) -> Manifest:
        if manifest.compared_devices is None:
            return manifest
        placed = dataclasses.replace(manifest, device="", compared_devices=None)
        if not manifest.device or pool.cpu is None or manifest.interface is None:
            return placed
        _log.warning(
            "model %s is compiled anew: honed no longer chooses %s beside a GPU by itself; `hone add %s "
            "--device %s` puts it there",
            manifest.name, manifest.device, manifest.name, manifest.device,
        )  # fmt: skip
        return dataclasses.replace(placed, compiled=None).with_decision(chosen="", reason="", times=None)

    return {name: on_default(manifest) for name, manifest in models.items()}


def without_chosen_sessions(models: Mapping[str, Manifest]) -> dict[str, Manifest]:
    """Return the models without the choices of threads and arenas that honed 0.1 made."""
    found, altered = dict(models), []
    for name, manifest in models.items():
        check = manifest.optimisation
        if check is None or (session := check.session) is None:
            continue
        on_first = session.first.startswith(f"{session.threads} thread")  # The threads that all models use
        kept = dataclasses.replace(session, threads=0, spinning=True, arena=None)
        if kept != session:
            altered.append(name)
            check = dataclasses.replace(check, session=kept if session.half and on_first else None)
            found[name] = dataclasses.replace(manifest, optimisation=check)
    if altered:
        _log.warning(
            "honed no longer chooses threads and memory arenas of ONNX Runtime for each model: %s %s as all "
            "others do, and there is nothing to do",
            ", ".join(altered), "runs" if len(altered) == 1 else "run",
        )  # fmt: skip
    return found


async def fill(
    pool: EngineManager, store: Store, models: Mapping[str, Manifest], systemd: Systemd, policy: str
) -> list[tuple[Manifest, str]]:
    """Add the stored models; return those whose compiled file cannot be used, with the reason."""
    found = await _inspect_all(store, models, systemd)
    broken: list[tuple[Manifest, str]] = []
    for manifest in models.values():
        compiled = found.get(store.object(manifest.compiled)) if manifest.compiled is not None else None
        can_be_made_anew = pool.cpu is not None and manifest.interface is not None
        if isinstance(compiled, CompiledFileInfo) and compiled.may_assume_values and can_be_made_anew:
            compiled = OtherFormat("it does not say for which values of its inputs it is right")
        if is_variant(manifest.name) and not isinstance(compiled, CompiledFileInfo):
            # The variant is compiled again when it is requested often enough.
            _log.error("variant %s is dropped: its compiled file is %s", manifest.name, _unusable(compiled))
            remaining = [each for each in models.values() if each.name != manifest.name]
            await in_thread(store.remove, manifest.name, remaining)
        elif isinstance(compiled, HonedError):
            await in_thread(store.set_aside, manifest)
            if not _serve_damaged(pool, manifest, compiled):
                broken.append((manifest, str(compiled)))
        else:
            cpu, rests = cpu_serves(manifest, policy), is_variant(manifest.name)
            home = _home(pool, manifest)
            pool.handle(
                Added(
                    manifest=manifest,
                    compiled=compiled,
                    preferred_engine=home,
                    proof=None,
                    cpu=cpu,
                    rests=rests,
                )
            )
    return broken


async def _inspect_all(
    store: Store, models: Mapping[str, Manifest], systemd: Systemd
) -> dict[Path, CompiledFileInfo | HonedError]:
    """Return the summary of each compiled file, or its error."""
    paths = {store.object(each.compiled) for each in models.values() if each.compiled is not None}
    found: dict[Path, CompiledFileInfo | HonedError] = {}
    async for inspected, said in inspect_all(sorted(paths)):
        found[inspected] = said
        systemd.tell(f"EXTEND_TIMEOUT_USEC={round(2 * SECONDS * 1e6)}")
    return found


def _serve_damaged(pool: EngineManager, manifest: Manifest, error: HonedError) -> bool:
    """Serve a model without its compiled file if the CPU engine can.

    Returns whether nothing is left to do: a user's own model is compiled again at the user's turn.
    """
    reason, home = f"its compiled file is {_unusable(error)}", _home(pool, manifest)
    if manifest.interface is None or pool.cpu is None:
        pool.handle(Damaged(manifest=manifest, preferred_engine=home, reason=reason))
        return False
    bare = dataclasses.replace(manifest, compiled=None).with_decision(reason=reason)
    if manifest.owner is not None:
        _log.error("damaged: %s: %s", manifest.name, reason)
        bare = bare.with_decision(reason="", chosen="", times=None)
    pool.handle(Added(manifest=bare, compiled=None, preferred_engine=home, proof=None, cpu=True))
    return manifest.owner is not None


def _unusable(error: HonedError | None) -> str:
    """Return why a compiled file cannot be served."""
    if error is None:
        return "missing"
    return (
        f"of another version of honed ({error})" if isinstance(error, OtherFormat) else f"damaged ({error})"
    )


def _home(pool: EngineManager, manifest: Manifest) -> str:
    return pool.home(manifest.name, manifest.device, manifest.placement_reason).name


def work_to_finish(
    jobs: ModelInstaller,
    pool: EngineManager,
    models: Mapping[str, Manifest],
    broken: Sequence[tuple[Manifest, str]],
    policy: str,
) -> Iterator[Coroutine[Any, Any, None]]:
    """Yield the work to compile models whose compilation was interrupted, and damaged ones."""
    for manifest in models.values():
        if manifest.owner is None and pool.cpu is not None and is_unfinished(manifest, policy):
            yield jobs.resume(manifest)
    for manifest, _ in broken:
        yield _restore(jobs, pool, manifest)


async def _restore(jobs: ModelInstaller, pool: EngineManager, manifest: Manifest) -> None:
    """Compile a damaged model again from its stored source; a failure affects only this model."""
    try:
        await jobs.restore(manifest)
    except HonedError as error:
        reason = failure(error)
    except Exception as error:  # noqa: BLE001 - an error of a model must not end the service
        _log.error("restoring model %s failed", manifest.name, exc_info=error)
        reason = f"the service failed in it ({error!r:.200})"
    else:
        _log.info("model %s was compiled again from its source", manifest.name)
        return
    _log.error("model %s could not be restored: %s", manifest.name, reason)
    pool.handle(NotRestored(manifest.name, reason))
