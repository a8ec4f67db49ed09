"""Calibration inputs of the user's, checked against what a model takes."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from honed.protocol.errors import InvalidArgument
from honed.runtime.calling.calibration import files_in
from honed.tuner.frontend.signature import TensorSpec
from honed.tuner.halves import Array

# What zipfile and NumPy raise for files that are none, damaged, encrypted or packed in other ways.
_DAMAGED = (OSError, EOFError, ValueError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error)


def load(folder: Path, inputs: Sequence[TensorSpec]) -> list[dict[str, Array]]:
    """The sets of a folder, in the order of their files' names.

    Raises InvalidArgument where there is none, or one does not fit the inputs of the model.
    """
    return [_set(path, inputs) for path in files_in(folder)]


def _set(path: Path, inputs: Sequence[TensorSpec]) -> dict[str, Array]:
    try:
        with zipfile.ZipFile(path) as archive:
            _check_names(path, {name.removesuffix(".npy") for name in archive.namelist()}, inputs)
            for spec in inputs:
                with archive.open(f"{spec.name}.npy") as member:
                    _check_header(path, member, spec)
        with np.load(path, allow_pickle=False) as arrays:
            found = {spec.name: np.asarray(arrays[spec.name]) for spec in inputs}
    except _DAMAGED as error:
        raise InvalidArgument(
            f"calibration file {path.name} is no .npz file, or damaged; write it with numpy.savez"
        ) from error
    for name, value in found.items():
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise InvalidArgument(
                f"in calibration file {path.name} {name!r} holds NaN or infinity; give finite values"
            )
    return found


def _check_names(path: Path, names: set[str], inputs: Sequence[TensorSpec]) -> None:
    wanted = ", ".join(repr(spec.name) for spec in inputs)
    for spec in inputs:
        if spec.name not in names:
            raise InvalidArgument(
                f"calibration file {path.name} has no {spec.name!r}; give one array for each input: {wanted}"
            )
    for name in sorted(names - {spec.name for spec in inputs}):
        raise InvalidArgument(
            f"calibration file {path.name} has {name[:80]!r}, no input of the model; it takes {wanted}"
        )


def _check_header(path: Path, member: IO[bytes], spec: TensorSpec) -> None:
    """Look at type and shape before memory is taken for them."""
    first = npy.read_magic(member) == (1, 0)
    shape, _, dtype = (npy.read_array_header_1_0 if first else npy.read_array_header_2_0)(member)
    if dtype != spec.numpy or shape != spec.shape:
        raise InvalidArgument(
            f"in calibration file {path.name} {spec.name!r} is {dtype}{list(shape)} and the model takes "
            f"{spec.dtype}{list(spec.shape)}; convert it"
        )
