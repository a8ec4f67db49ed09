"""Calibration inputs of the user's, checked against what a model takes."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from honed.runtime.calibration import files_in
from honed.runtime.errors import InvalidArgument
from honed.tuner.frontend.signature import TensorSpec

from .halves import Array

_HEADER = 1 << 16  # bytes of an array's header in a file, at most


def load(folder: Path, inputs: Sequence[TensorSpec]) -> list[dict[str, Array]]:
    """The sets of a folder, in the order of their files' names.

    Raises InvalidArgument where there is none, or one does not fit the inputs of the model.
    """
    return [_set(path, inputs) for path in files_in(folder)]


def _set(path: Path, inputs: Sequence[TensorSpec]) -> dict[str, Array]:
    try:
        with zipfile.ZipFile(path) as archive:
            sizes = {info.filename.removesuffix(".npy"): info.file_size for info in archive.infolist()}
        _check_names(path, sizes, inputs)
        with np.load(path, allow_pickle=False) as arrays:
            return {spec.name: _value(path, arrays, spec, sizes[spec.name]) for spec in inputs}
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise InvalidArgument(
            f"calibration file {path.name} is no .npz file, or damaged; write it with numpy.savez"
        ) from error


def _check_names(path: Path, names: dict[str, int], inputs: Sequence[TensorSpec]) -> None:
    wanted = ", ".join(repr(spec.name) for spec in inputs)
    for spec in inputs:
        if spec.name not in names:
            raise InvalidArgument(
                f"calibration file {path.name} has no {spec.name!r}; give one array for each input: {wanted}"
            )
    for name in names.keys() - {spec.name for spec in inputs}:
        raise InvalidArgument(
            f"calibration file {path.name} has {name[:80]!r}, no input of the model; it takes {wanted}"
        )


def _value(path: Path, arrays: np.lib.npyio.NpzFile, spec: TensorSpec, size: int) -> Array:
    wanted = f"{spec.dtype}{list(spec.shape)}"
    where = f"in calibration file {path.name} {spec.name!r}"
    if size > int(np.prod(spec.shape)) * spec.numpy.itemsize + _HEADER:
        raise InvalidArgument(f"{where} is larger than the {wanted} that the model takes; convert it")
    value = arrays[spec.name]
    if value.dtype != spec.numpy or value.shape != spec.shape:
        raise InvalidArgument(
            f"{where} is {value.dtype}{list(value.shape)} and the model takes {wanted}; convert it"
        )
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        raise InvalidArgument(f"{where} holds NaN or infinity; give finite values")
    return np.asarray(value)
