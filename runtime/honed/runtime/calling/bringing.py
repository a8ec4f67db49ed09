"""Files that an app brings to the service, from the disk or out of memory: names, descriptors and hashes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from honed.protocol import methods
from honed.protocol.errors import InvalidArgument, MissingFiles
from honed.protocol.params import BringOptions, BringParams
from honed.protocol.results import ModelBrought

from . import additions
from .endpoint import Progress
from .steps import Ask, Steps

Given = str | os.PathLike[str] | bytes | bytearray | memoryview  # a path, or the contents of a file
_UNNAMED = "model.onnx"  # what a model is called that came without a file


@dataclass(slots=True, eq=False)
class BroughtFiles:
    """An ONNX file and its external data, open for reading until `close`."""

    model: Path | None  # None: it came as bytes
    options: BringOptions
    descriptors: dict[str, int] = field(default_factory=dict)  # by name, the model first
    _digests: dict[str, str] = field(default_factory=dict)

    @property
    def params(self) -> BringParams:
        """What ModelBring is told; raises InvalidArgument where a file cannot be read."""
        for name, descriptor in self.descriptors.items():
            if name not in self._digests:
                self._digests[name] = _digest(name, descriptor)
        digests = tuple(self._digests[name] for name in self.descriptors)
        return BringParams(files=tuple(self.descriptors), sha256=digests, parameters=self.options)

    def add_missing(self, missing: MissingFiles) -> None:
        """Open the external data that the service wants, from beside the model; raises `missing`."""
        if self.model is None:
            raise missing
        self.descriptors |= additions.open_beside(self.model, missing)

    def close(self) -> None:
        """Close all of them."""
        while self.descriptors:
            os.close(self.descriptors.popitem()[1])


def steps(
    model: Given,
    external: Mapping[str, Given],
    shapes: additions.Shapes | None,
    precision: str,
    engine: str | None,
    progress: Progress | None,
) -> Steps[ModelBrought]:
    """Send the files, and once more with external data that the service misses."""
    options = BringOptions(
        shapes=additions.shapes_of(shapes) if shapes else None,
        precision=None if precision == "auto" else precision,
        engine=engine,
    )
    files = brought(model, external, options)
    try:
        for last in (False, True):
            sent = list(files.descriptors.values())
            try:
                answer = yield Ask(methods.MODEL_BRING, files.params, None, sent, progress)
            except MissingFiles as missing:
                if last:
                    raise
                files.add_missing(missing)
            else:
                return methods.MODEL_BRING.result_of(answer.result)
        raise AssertionError("the loop above returns or raises")
    finally:
        files.close()


def brought(model: Given, external: Mapping[str, Given], options: BringOptions) -> BroughtFiles:
    """The files opened; raises NotFound or InvalidArgument."""
    path = None if isinstance(model, bytes | bytearray | memoryview) else Path(model)
    files = BroughtFiles(path, options)
    try:
        files.descriptors[path.name if path is not None else _UNNAMED] = _open(model)
        for name, given in external.items():
            files.descriptors[name] = _open(given)
    except BaseException:
        files.close()
        raise
    return files


def _open(given: Given) -> int:
    if not isinstance(given, bytes | bytearray | memoryview):
        return additions.open_model(Path(given))
    descriptor = os.memfd_create("honed-model", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(given)
    return descriptor


def _digest(name: str, descriptor: int) -> str:
    try:
        with os.fdopen(os.dup(descriptor), "rb") as file:
            file.seek(0)
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InvalidArgument(f"{name} cannot be read ({error.strerror}); give an ordinary file") from error
