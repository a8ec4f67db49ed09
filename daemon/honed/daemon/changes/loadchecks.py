"""What RepositoryModelLoad may be asked for. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from honed.daemon.settings.schema import ENGINES
from honed.daemon.store.names import is_own
from honed.jobs.commands import PRECISIONS
from honed.protocol.errors import InvalidArgument
from honed.protocol.methods import check_name
from honed.protocol.params import LoadOptions, LoadParams

MAX_SHAPES, MAX_RANK, MAX_INPUT_NAME = 256, 32, 1024
MAX_VARIANTS = 64  # of one addition


def check(params: LoadParams, descriptors: Sequence[int], options: LoadOptions) -> None:
    """Raise InvalidArgument for what no addition can be."""
    check_name(params.model_name)
    if is_own(params.model_name):
        raise InvalidArgument(
            f"{params.model_name!r} could only be a model that an app has brought; choose another name"
        )
    check_files(params.files, descriptors, options.precision, options.shapes or {})
    _check_calibration(params.files, options)
    if options.engine not in (None, *ENGINES):
        raise InvalidArgument(f"engine is {options.engine!r}; use one of {', '.join(ENGINES)}")
    if len(options.state or {}) > MAX_SHAPES:
        raise InvalidArgument(f"state names more than {MAX_SHAPES} outputs; name those that are state")
    if options.variants and options.engine == "cpu":
        raise InvalidArgument("the CPU engine takes every shape, and nothing is compiled; leave variants out")
    if len(options.variants or ()) > MAX_VARIANTS:
        raise InvalidArgument(f"more than {MAX_VARIANTS} variants are given; give those that matter most")
    for shapes in options.variants or ():
        _check_shapes(shapes)


def check_files(
    files: Sequence[str],
    descriptors: Sequence[int],
    precision: str | None,
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """The same for what comes with every file that is to be served."""
    if not files or len(files) != len(descriptors):
        raise InvalidArgument(
            f"{len(descriptors)} descriptors came with {len(files)} names in files; send the model "
            "file's descriptor first and one for each name"
        )
    if len(set(files)) != len(files):
        raise InvalidArgument("files names one file twice; give each once")
    if precision not in (None, *PRECISIONS):
        raise InvalidArgument(f"precision is {precision!r}; use one of {', '.join(PRECISIONS)}")
    _check_shapes(shapes)


def _check_shapes(shapes: Mapping[str, tuple[int, ...]]) -> None:
    if len(shapes) > MAX_SHAPES:
        raise InvalidArgument(f"shapes are given for more than {MAX_SHAPES} inputs; give those that are open")
    for name, shape in shapes.items():
        if not shape or min(shape) < 1 or len(shape) > MAX_RANK:
            raise InvalidArgument(
                f"the shape of {name[:80]!r} is {list(shape)[:9]}; give 1 to {MAX_RANK} sizes of at least 1"
            )
        if not name or "\0" in name or len(name) > MAX_INPUT_NAME:
            raise InvalidArgument(f"shapes names an input {name[:80]!r}, which no model has; check its name")


def _check_calibration(files: Sequence[str], options: LoadOptions) -> None:
    count = options.calibration
    if count is None:
        return
    if not 0 < count < len(files):
        raise InvalidArgument(f"calibration is {count} of {len(files)} files; it counts the last of them")
    for name in files[-count:]:
        if "/" in name or not name.endswith(".npz"):
            raise InvalidArgument(f"{name[:80]!r} cannot hold calibration inputs; name it as NAME.npz")
