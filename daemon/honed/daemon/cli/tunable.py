"""A model of the service as the tuning child takes it: its source in a folder of ours, and its options."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from honed.daemon.places import records_in
from honed.runtime.client import Client
from honed.runtime.errors import ModelRefused

from .recordsfile import check_access, hand_over, prepare


@dataclass(frozen=True, slots=True, kw_only=True)
class Tunable:
    """`folder` is for files of ours too; it is removed afterwards. `sha256` is of the version served now."""

    folder: Path
    records: Path
    sha256: str
    arguments: tuple[str, ...]  # for the commands `tune` and `tasks` of the child

    @property
    def current(self) -> Path:
        """The version served now."""
        return self.folder / "current.honed"

    @property
    def tuned(self) -> Path:
        """Where the tuned version goes."""
        return self.folder / "tuned.honed"


@contextmanager
def tunable(client: Client, model: str) -> Iterator[Tunable]:
    """Fetch what is needed to tune a model on the service's own device, with its records.

    Raises NotFound, PermissionDenied for users who may not change models or use the records, and
    ModelRefused for a model that was added compiled.
    """
    status = client.status()
    records = records_in(Path(status["places"]["state_dir"]))
    with client.export(model) as given, tempfile.TemporaryDirectory(prefix="honed-tune-") as name:
        folder = Path(name)
        if not given.sources:
            raise ModelRefused(
                f"{model} was added compiled, so there is no source to tune; "
                f"add it as ONNX: 'hone add FILE.onnx --name {model} --replace'"
            )
        check_access(records)
        prepare(records)
        source = given.save_sources(folder / "source")
        shapes = (f"--shape={key}={','.join(map(str, shape))}" for key, shape in given.shapes.items())
        found = Tunable(
            folder=folder,
            records=records,
            sha256=given.sha256,
            arguments=(
                *shapes,
                f"--precision={given.precision}",
                *((f"--device={status['device_spec']}",) if status["device_spec"] else ()),
                f"--records={records}",
                f"--cache-dir={status['places']['cache_dir']}",
                f"--name={model}",
                str(source),
            ),
        )
        with found.current.open("xb") as current:
            shutil.copyfileobj(given.compiled, current, 1 << 20)
        try:
            yield found
        finally:
            hand_over(Path(status["places"]["cache_dir"]))
