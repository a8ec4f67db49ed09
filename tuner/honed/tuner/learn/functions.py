"""The functions that records are of: a record names its task by a hash, and a model has the function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tvm import tirx

from honed.jobs.events import Note, Stage
from honed.machine.profile import DeviceProfile
from honed.protocol.errors import HonedError, NotFound
from honed.tuner.frontend import Precision
from honed.tuner.lower.schedule import narrow_indices
from honed.tuner.tune.extract import extract

Emit = Callable[[Stage | Note], None]


def functions(models: Path, profile: DeviceProfile, emit: Emit) -> Mapping[str, tirx.PrimFunc]:
    """Functions by their tasks' keys, of an ONNX file or of all in a folder, in each precision.

    A model that cannot be compiled is told of and left. Raises NotFound where there is none.
    """
    files = sorted(models.rglob("*.onnx")) if models.is_dir() else [models]
    if not files or not files[0].exists():
        raise NotFound(f"there is no ONNX file at {models}; give the models that the records are of")
    found: dict[str, tirx.PrimFunc] = {}
    for n, file in enumerate(files):
        emit(Stage(stage="models", fraction=n / len(files), text=file.name))
        for precision in _precisions(profile):
            try:
                found |= _of(file, precision, profile)
            except HonedError as error:
                emit(Note(text=f"{file.name} in {precision} is left out: {error}"))
    return found


def _precisions(profile: DeviceProfile) -> Iterable[Precision]:
    return ("fp32", "fp16") if profile.limits.fp16 else ("fp32",)


def _of(file: Path, precision: Precision, profile: DeviceProfile) -> dict[str, tirx.PrimFunc]:
    tasks = extract(file, {}, precision, profile)
    return {one.task.key: narrow_indices(one.func) for one in (*tasks.tasks, *tasks.rivals)}
