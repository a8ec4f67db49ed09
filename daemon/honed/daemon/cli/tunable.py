"""A model of the service as the tuning child takes it: its source in a folder of ours, and its options."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from honed.daemon.places import records_in
from honed.jobs.commands import Tasks
from honed.protocol.errors import ModelRefused, Unavailable
from honed.protocol.methods import SERVER_STATUS
from honed.protocol.service import Status
from honed.runtime.client import Client

from .recordsfile import check_access

_CURRENT = "current.honed"  # the version served now


@dataclass(frozen=True, slots=True, kw_only=True)
class Tunable:
    """`folder` is for files of ours; it is removed afterwards. `sha256` is of the version served now."""

    folder: Path
    sha256: str
    tasks: Tasks

    @property
    def tuned(self) -> Path:
        """Where the tuned version goes."""
        return self.folder / "tuned.honed"


@contextmanager
def tunable(client: Client, model: str) -> Iterator[Tunable]:
    """Fetch what is needed to tune a model on its device of the service, with its records.

    Raises NotFound, PermissionDenied for users who may not change models or use the records, and
    ModelRefused for a model that was added compiled.
    """
    status = client.ask(SERVER_STATUS)
    device = _device(status, model)
    records = records_in(Path(status.places.state_dir))
    with client.export(model) as given, tempfile.TemporaryDirectory(prefix="honed-tune-") as name:
        folder = Path(name)
        if not given.sources:
            raise ModelRefused(
                f"{model} was added compiled, so there is no source to tune; "
                f"add it as ONNX: 'hone add FILE.onnx --name {model} --replace'"
            )
        check_access(records)
        tasks = Tasks(
            file=given.save_sources(folder / "source"),
            name=model,
            shapes=given.shapes,
            precision=given.precision,
            device=device or None,
            current=given.save_compiled(folder / _CURRENT),
            records=records,
            cache_dir=Path(status.places.cache_dir),
        )
        yield Tunable(folder=folder, sha256=given.sha256, tasks=tasks)


def _device(status: Status, model: str) -> str:
    """How the device that a model belongs to is selected; raises Unavailable where that is lost."""
    for device in status.devices:
        if model in device.away:
            raise Unavailable(
                f"{model} is served by another device while its own is lost; tune it when that is back"
            )
        if model in device.models:
            return device.spec
    return status.device_spec
