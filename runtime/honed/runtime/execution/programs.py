"""Builds OpenCL programs from source, and keeps the driver's binaries between processes.

pyopencl's own cache is not used: it writes below $HOME, which a service may not have. A binary's path depends
on device, driver version, options and source, so a new driver never reads an old binary. The file starts with
the SHA-256 of its name and the binary: a damaged or misplaced one is built again. Models of one process share
equal programs.
"""

from __future__ import annotations

import hashlib
import logging
import math
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from honed.machine.devices import Device
from honed.machine.files import replacing
from honed.machine.opencl import DOTS_EXTENSION, cl, context, driver_call, most_work_items
from honed.process.limits import data_is_short, data_left
from honed.protocol.errors import DeviceError, HonedError
from honed.protocol.strict import to_plain
from honed.runtime.compiled.model import CompiledModel, Kernel
from honed.runtime.compiled.plan import allocations, constants_of

OPTIONS: tuple[str, ...] = ()
_DIGEST_BYTES = 32
_POCL, _POCL_BINARY = "Portable Computing Language", 272 << 20  # Bytes: 256 MiB and a margin
_log = logging.getLogger(__name__)
_in_use: WeakValueDictionary[tuple[str, str], Any] = WeakValueDictionary()  # Programs by device and source


class NotBuilt(DeviceError):
    """Raised when the driver cannot compile a kernel; `complaint` is the most informative line of its log."""

    def __init__(self, device: Device, complaint: str) -> None:
        super().__init__(
            f"{device.spec} cannot compile a kernel of this model ({complaint}); "
            "compile the model again for this device"
        )
        self.complaint = complaint


def build(device: Device, source: str, cache_dir: Path | None) -> Any:
    """Return the built pyopencl Program of `source`; raise NotBuilt with the compiler's first error.

    Raises MemoryError if memory ran out.
    """
    key = device.spec, source
    if (program := _in_use.get(key)) is None:
        program = _in_use[key] = _build(device, source, cache_dir)
    return program


def _build(device: Device, source: str, cache_dir: Path | None) -> Any:
    kept = _cache_path(device, source, cache_dir) if cache_dir else None
    if kept is not None:
        program = _from_binary(device, kept)
        if program is not None:
            return program
    try:
        program = cl.Program(context(device.cl), source).build(options=list(OPTIONS), cache_dir=False)
    except cl.Error as error:
        if data_is_short():  # A driver short of memory reports the program as wrong
            raise MemoryError(f"{device.spec} built a kernel of the model") from error
        raise NotBuilt(device, complaint(error)) from error
    if kept is not None and _gives_binary(device):
        _keep(program, kept)
    return program


def _cache_path(device: Device, source: str, cache_dir: Path) -> Path:
    identity = repr(sorted(to_plain(device.profile.identity).items())).encode()
    folder = hashlib.sha256(identity).hexdigest()[:32]
    name = hashlib.sha256("\0".join((*OPTIONS, source)).encode()).hexdigest()
    return cache_dir / "programs" / folder / name


def _from_binary(device: Device, kept: Path) -> Any | None:
    """Return the program in the file `kept`; None if it is missing, damaged or refused by the driver."""
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


def _gives_binary(device: Device) -> bool:
    """Return whether the driver can safely return a binary: PoCL crashes if memory is short."""
    return device.profile.identity.platform != _POCL or data_left() > _POCL_BINARY


def _keep(program: Any, kept: Path) -> None:
    """Store a program's binary if possible: a full disk must not stop a model from running."""
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


def complaint(error: Exception) -> str:
    """Return the most informative line of a build log: the first with "error", else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = (line for line in lines if "error" in line.casefold() and "BUILD_PROGRAM" not in line)
    return next(telling, lines[0] if lines else type(error).__name__)[:200]


_DOTS = "_4x8packed_"  # Part of the names of cl_khr_integer_dot_product's functions


def check(model: CompiledModel, device: Device) -> None:
    """Raise DeviceError if the device lacks something that `model` needs."""
    limits = device.profile.limits
    needs = {arg.dtype for kernel in model.kernels for arg in kernel.args}
    for dtype, extension, has in (
        ("float16", "cl_khr_fp16", limits.fp16),
        ("float64", "cl_khr_fp64", limits.fp64),
    ):
        if dtype in needs and not has:
            raise _unfit(device, f"has no {extension}, which the model's {dtype} kernels need")
    # A driver with the extension but without instructions for it can still compute the products.
    has_dots = limits.int8_dots or DOTS_EXTENSION in device.cl.extensions.split()
    if not has_dots and any(_DOTS in source for source in model.sources):
        raise _unfit(device, f"has no {DOTS_EXTENSION}, which the model's kernels of bytes need")
    for kernel in model.kernels:
        if not limits.allows_group(kernel.block):
            raise _unfit(
                device,
                f"allows work-groups of {limits.max_work_group_size} work-items and kernel {kernel.name!r} "
                f"has {list(kernel.block)}",
            )
    cut = [
        b for b in model.buffers if b.nbytes and (b.place in ("prepared", "scratch") or b.within is not None)
    ]
    if any(b.offset % limits.base_align_bytes for b in cut):
        raise _unfit(
            device, f"needs buffers aligned to {limits.base_align_bytes} bytes and the model's are not"
        )
    sections = [*allocations(model.buffers, "scratch"), *allocations(model.buffers, "prepared")]
    largest = max((*map(len, sections), *(b.nbytes for b in model.buffers)), default=0)
    if largest > limits.max_alloc_bytes:
        raise _unfit(
            device, f"allocates at most {limits.max_alloc_bytes} bytes at once and the model needs {largest}"
        )
    total = _most_bytes(model)
    if total > limits.global_mem_bytes:
        raise _unfit(device, f"has {limits.global_mem_bytes} bytes of memory and the model needs {total}")


def _most_bytes(model: CompiledModel) -> int:
    """Return the peak of device memory in bytes: resident buffers, and one preparation step's constants."""
    kept = constants_of(model, model.steps)
    held = model.arena_bytes + model.prepared_bytes
    own = (b for b in model.buffers if b.within is None)
    held += sum(b.nbytes for b in own if b.place in ("input", "output"))
    held += sum(model.buffers[index].nbytes for index in kept)
    lent = (constants_of(model, (step,)) - kept for step in model.prepare)
    return held + max((sum(model.buffers[index].nbytes for index in step) for step in lent), default=0)


def check_built(built: Any, kernel: Kernel, device: Device) -> None:
    """Raise DeviceError if a built pyopencl Kernel has other arguments or cannot run its work-groups."""
    if built.num_args != len(kernel.args):
        raise DeviceError(
            f"kernel {kernel.name!r} has {built.num_args} arguments in its source and {len(kernel.args)} in "
            "its model; compile the model again"
        )
    with driver_call(f"describe kernel {kernel.name!r}"):
        most = most_work_items(built, device.cl, kernel.block)
    if math.prod(kernel.block) > most:
        raise _unfit(
            device,
            f"runs kernel {kernel.name!r} with at most {most} work-items and it needs "
            f"{math.prod(kernel.block)}",
        )


def _unfit(device: Device, why: str) -> DeviceError:
    return DeviceError(
        f"the model does not fit {device.spec}: it {why}; compile the model again for this device"
    )
