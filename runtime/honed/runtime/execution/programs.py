"""OpenCL programs built from source, with the driver's binaries kept between processes.

pyopencl's own cache is not used: it writes below $HOME, which a service may not have. A kept binary is filed
under device, driver version, options and source, so a new driver never sees an old binary. It starts with the
SHA-256 of its name and itself: a damaged or misplaced one is built again.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

from honed.machine.devices import Device
from honed.machine.files import replacing
from honed.machine.opencl import cl, context, driver_call
from honed.protocol.errors import DeviceError, HonedError
from honed.protocol.strict import to_plain

OPTIONS: tuple[str, ...] = ()
_DIGEST_BYTES = 32
_log = logging.getLogger(__name__)


def build(device: Device, source: str, cache_dir: Path | None) -> Any:
    """The built pyopencl Program of `source`; raises DeviceError with the compiler's first complaint."""
    kept = _kept_at(device, source, cache_dir) if cache_dir else None
    if kept is not None:
        program = _from_binary(device, kept)
        if program is not None:
            return program
    try:
        program = cl.Program(context(device.cl), source).build(options=list(OPTIONS), cache_dir=False)
    except cl.Error as error:
        raise DeviceError(
            f"{device.spec} cannot compile a kernel of this model ({_complaint(error)}); "
            "compile the model again for this device"
        ) from error
    if kept is not None:
        _keep(program, kept)
    return program


def _kept_at(device: Device, source: str, cache_dir: Path) -> Path:
    identity = repr(sorted(to_plain(device.profile.identity).items())).encode()
    folder = hashlib.sha256(identity).hexdigest()[:32]
    name = hashlib.sha256("\0".join((*OPTIONS, source)).encode()).hexdigest()
    return cache_dir / "programs" / folder / name


def _from_binary(device: Device, kept: Path) -> Any | None:
    """The program kept at `kept`; None where there is none, it is damaged, or the driver refuses it."""
    try:
        data = kept.read_bytes()
    except OSError:
        return None
    binary = data[_DIGEST_BYTES:]
    if _digest(kept, binary) != data[:_DIGEST_BYTES]:
        _log.warning("%s is damaged; it is built again", kept)
        return None
    try:
        return cl.Program(context(device.cl), [device.cl], [binary]).build(options=list(OPTIONS))
    except cl.Error as error:
        _log.warning("the driver refuses %s (%s); it is built again", kept, error)
        return None


def _keep(program: Any, kept: Path) -> None:
    """Best effort: a full disk must not stop a model from running."""
    with driver_call("give a program's binary"):
        binary = program.get_info(cl.program_info.BINARIES)[0]
    if not binary:
        return
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with replacing(kept) as file:
            file.write(_digest(kept, binary) + binary)
    except (OSError, HonedError) as error:
        _log.warning("a compiled program was not kept: %s", error)


def _digest(kept: Path, binary: bytes) -> bytes:
    return hashlib.sha256(kept.name.encode() + binary).digest()


def _complaint(error: Any) -> str:
    """The line of a build log that says most: the first with "error", else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next(
        (line for line in lines if "error" in line.casefold() and "BUILD_PROGRAM" not in line), lines[0]
    )[:200]
