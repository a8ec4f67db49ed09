"""Manifests of models that are added: as they were given, and built."""

from __future__ import annotations

import dataclasses
import time

from honed.daemon.core.model import ServedModel
from honed.daemon.store.compiled import Compiled
from honed.daemon.store.files import StoredFile
from honed.daemon.store.store import Manifest, begin, new_version
from honed.daemon.store.versions import NO_HISTORY, VersionHistory, succeed
from honed.protocol import strict
from honed.protocol.results import ModelSettings

from .build import Built
from .staging import Staged


def as_given(name: str, staged: Staged, wanted: str, replaced: ServedModel | None) -> Manifest:
    """Of a file that the CPU engine is to serve."""
    before = replaced.manifest if replaced is not None and staged.device is None else None
    manifest = strict.like(
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
    if replaced is not None and replaced.manifest.source_key == manifest.source_key:
        manifest = dataclasses.replace(manifest, optimisation=replaced.manifest.optimisation)
    return manifest


def made_manifest(
    name: str, made: Built, staged: Staged, replaced: ServedModel | None, restored: Manifest | None
) -> Manifest:
    """The manifest of a model just built; `restored` is the one whose file was found damaged."""
    now, why = time.time(), "added" if restored is None else "compiled again: its file was damaged"
    before = restored or (replaced.manifest if replaced is not None else None)
    if staged.device is not None:
        device, placed = made.server.name, made.measured or "asked for"
    else:
        device, placed = (before.device, before.placed) if before is not None else ("", "")
    manifest = strict.like(
        Manifest,
        staged,
        name=name,
        added=now if restored is None else restored.added,
        compiled=made.file,
        history=_history(made.file, made.model.schedules, why, now, replaced),
        sources=tuple(source for source, _ in staged.sources),
        device=device,
        placed=placed,
        settings=before.settings if before is not None else ModelSettings(),
    )
    if not staged.sources and replaced is not None and same_but_schedules(made.model, replaced):
        kept = replaced.manifest
        same = dataclasses.replace(
            manifest, sources=kept.sources, shapes=kept.shapes, precision=kept.precision
        )
        return _same_engines(same, kept)
    return manifest if restored is None else _same_engines(manifest, restored)


def same_source(variant: Manifest, model: Manifest) -> bool:
    """Whether a variant is of a model as that is now."""

    def of(manifest: Manifest) -> tuple[str, str, str, bool]:
        return manifest.source_key, manifest.precision, manifest.device, manifest.interface is None

    return of(variant) == of(model)


def _same_engines(manifest: Manifest, before: Manifest) -> Manifest:
    """What is known of engines is of the source, and holds for another compiled form of it."""
    return dataclasses.replace(
        manifest,
        interface=before.interface,
        wanted=before.wanted,
        chosen=before.chosen,
        why=before.why,
        pinned_engine=before.pinned_engine,
        state=before.state,
        optimisation=before.optimisation,
    )


def _history(
    file: StoredFile, schedules: str, why: str, now: float, replaced: ServedModel | None
) -> VersionHistory:
    """The history of a model given by a user: earlier versions may answer otherwise, so they are not kept."""
    if replaced is None or not replaced.manifest.history.versions:
        return begin(file, schedules=schedules, why=why, now=now)
    before = replaced.manifest.history
    version = new_version(file, before.next_number, schedules=schedules, why=why, now=now, settled=True)
    return succeed(before, version, now, keep=False)


def same_but_schedules(model: Compiled, replaced: ServedModel) -> bool:
    """Whether a model made elsewhere is what the stored source compiles to as it was asked for."""
    manifest, before = replaced.manifest, replaced.compiled
    if not manifest.sources or manifest.sources[0].sha256 != model.source.sha256:
        return False
    shapes = {tensor.name: tensor.shape for tensor in model.inputs}
    return all(shapes.get(name) == shape for name, shape in manifest.shapes.items()) and (
        before is None or before.source.precision == model.source.precision
    )
