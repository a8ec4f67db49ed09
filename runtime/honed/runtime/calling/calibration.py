"""Folders of calibration inputs: one .npz file a set, holding an array for each input of a model by name."""

from __future__ import annotations

from pathlib import Path

from honed.protocol.errors import InvalidArgument, NotFound

MAX_SETS = 16


def files_in(folder: Path) -> list[Path]:
    """The sets of a folder by name; raises NotFound without it, InvalidArgument for none or too many."""
    try:
        found = sorted(path for path in folder.iterdir() if path.suffix == ".npz")
    except FileNotFoundError as error:
        raise NotFound(f"there is no folder {folder} of calibration inputs; check --calibration") from error
    except OSError as error:
        raise InvalidArgument(
            f"calibration folder {folder} cannot be read ({error.strerror}); give a folder you may read"
        ) from error
    if not found:
        raise InvalidArgument(
            f"calibration folder {folder} holds no .npz file; write one for each set of inputs, "
            "as numpy.savez('0.npz', INPUT=array) does"
        )
    if len(found) > MAX_SETS:
        raise InvalidArgument(
            f"calibration folder {folder} holds {len(found)} sets of inputs; give at most {MAX_SETS}"
        )
    return found
