"""Findings on OpenCL: loader, ICD files, platforms, devices, and why there is none."""

from __future__ import annotations

from honed.machine.mali import model_of

from .check_machine import FIRMWARE_REMEDY, STACK_OF_DRIVER, bound_gpu, node_problem
from .finding import Finding, Topic
from .readings import IcdFile, OpenCLDevice, Readings

TOPIC = Topic("OpenCL")
_MIB = 1 << 20


def check(readings: Readings) -> list[Finding]:
    """Everything about OpenCL, from the loader up to the devices."""
    return [
        _loader(readings),
        *(_icd(icd) for icd in readings.icds),
        *_environment(readings),
        *_mismatch(readings),
        *_platforms(readings),
    ]


def _loader(readings: Readings) -> Finding:
    own = readings.opencl.loader
    if readings.loader.path:
        beside = f", pyopencl brings its own ({own})" if own and "pyopencl" in own else ""
        return TOPIC.ok(f"the loader libOpenCL.so.1 is {readings.loader.path}{beside}")
    if own:
        return TOPIC.ok(f"pyopencl brings its own loader ({own}); the system has none")
    return TOPIC.fail(
        f"the OpenCL loader libOpenCL.so.1 does not load: {readings.loader.error}",
        "install it: apt install ocl-icd-libopencl1",
    )


def _icd(icd: IcdFile) -> Finding:
    if not icd.library:
        return TOPIC.warn(
            f"{icd.path} is empty", "write the path of the driver's library into it, or remove it"
        )
    if icd.ended == "ok":
        return TOPIC.ok(f"{icd.path} names {icd.library}, which loads")
    if icd.ended == "failed":
        return TOPIC.warn(
            f"{icd.path} names {icd.library}, which does not load: {icd.error}",
            "install the package that holds this library, or remove the ICD file",
        )
    return TOPIC.fail(
        f"{icd.path} names {icd.library}, and loading it kills the process: {icd.error}",
        "reinstall that driver in the version for this kernel, or move the ICD file away",
    )


def _environment(readings: Readings) -> list[Finding]:
    shown = [f"{k}={v}" for k, v in sorted(readings.environment.items())]
    if not shown:
        return []
    what = f"these variables change what is found: {', '.join(shown)}"
    return [TOPIC.ok(f"{what} (the service has its own environment)")]


def _mismatch(readings: Readings) -> list[Finding]:
    """A driver's library and the kernel's driver must belong together: one excludes the other."""
    gpu = bound_gpu(readings.machine)
    wanted = STACK_OF_DRIVER.get(gpu.driver, "") if gpu else ""
    present = {icd.stack for icd in readings.icds} & {"libmali", "rusticl"}
    if gpu is None or not wanted or not present or wanted in present:
        return []
    if wanted == "rusticl":
        return [
            TOPIC.fail(
                f"the ICD file is libmali's, but the kernel drives {gpu.name} with {gpu.driver}, "
                "which libmali cannot use",
                f"{_INSTALL_RUSTICL}; or boot the vendor kernel, whose driver (kbase) libmali needs",
            )
        ]
    return [
        TOPIC.fail(
            f"the ICD file is rusticl's, but the kernel drives {gpu.name} with kbase, which Mesa cannot use",
            f"{_INSTALL_LIBMALI}; or boot a mainline kernel with panthor",
        )
    ]


_INSTALL_RUSTICL = "install Mesa's OpenCL (apt install mesa-opencl-icd, Debian 13 or later)"
_INSTALL_LIBMALI = (
    "install the vendor's libmali for this GPU and kernel, and write its path into "
    "/etc/OpenCL/vendors/mali.icd"
)


def _platforms(readings: Readings) -> list[Finding]:
    opencl = readings.opencl
    if opencl.ended in ("crashed", "hung"):
        return [TOPIC.fail(f"listing the OpenCL platforms does not work: {opencl.error}", _blame(readings))]
    if opencl.ended == "failed":
        remedy = (
            "install pyopencl (apt install python3-pyopencl)"
            if "pyopencl" in opencl.error
            else _blame(readings)
        )
        return [TOPIC.fail(f"OpenCL cannot be used: {opencl.error}", remedy)]
    findings = [_device(p.name, d) for p in opencl.platforms for d in p.devices]
    empty = [p.name for p in opencl.platforms if not p.devices]
    if any(d.usable for p in opencl.platforms for d in p.devices):
        findings += [TOPIC.warn(f"platform {name} has no device", _cause(readings)[1]) for name in empty]
        return findings + _gpu_left_out(readings)
    what = f"{len(opencl.platforms)} platforms" if not empty else f"platform {', '.join(empty)} has no device"
    because, remedy = _cause(readings)
    return [*findings, TOPIC.fail(f"no OpenCL device ({what}): {because}", remedy)]


def _device(platform: str, device: OpenCLDevice) -> Finding:
    figures = (
        f"{device.compute_units} compute units, {device.memory_bytes // _MIB} MiB, "
        f"{'fp16' if device.fp16 else 'no fp16'}, driver {device.driver_version}"
    )
    what = f"{device.kind} {_named(device.name)} on {platform}: {figures}"
    if device.usable:
        return TOPIC.ok(what)
    return TOPIC.warn(
        f"{what}, but it is not available or has no compiler",
        "install the driver's full package, compiler included",
    )


def _named(name: str) -> str:
    """A device's name, and what it is where the driver gives a Mali an internal name."""
    model = model_of(name)
    if model is None or model.name.casefold() in name.casefold():
        return name
    return f"{name}, a {model.name},"


def _gpu_left_out(readings: Readings) -> list[Finding]:
    """The kernel has a GPU and OpenCL works, but only without it."""
    gpu = bound_gpu(readings.machine)
    kinds = {d.kind for p in readings.opencl.platforms for d in p.devices if d.usable}
    if gpu is None or "GPU" in kinds:
        return []
    because, remedy = _cause(readings)
    return [TOPIC.warn(f"OpenCL does not see the GPU {gpu.name}: {because}", remedy)]


def _cause(readings: Readings) -> tuple[str, str]:
    """The likeliest cause of missing devices and what to do; the order is that of the chain of use."""
    machine = readings.machine
    gpu = bound_gpu(machine)
    wanted = STACK_OF_DRIVER.get(gpu.driver, "") if gpu else ""
    stacks = {icd.stack for icd in readings.icds if icd.ended == "ok"}
    unbound = [g for g in machine.gpus if not g.driver]
    if gpu is None and unbound:
        if not machine.panthor_firmware and any("mali" in g.compatible for g in unbound):
            return f"the kernel has no driver for {unbound[0].name}", FIRMWARE_REMEDY
        return f"the kernel has no driver for {unbound[0].name}", "boot a kernel with a driver for this GPU"
    if wanted and wanted not in stacks:
        install = _INSTALL_LIBMALI if wanted == "libmali" else _INSTALL_RUSTICL
        return f"no ICD file names a working driver for {gpu.driver if gpu else ''}", install
    problem = node_problem(readings, readings.user) if gpu else None
    if problem:
        return problem
    if wanted == "rusticl" and not readings.environment.get("RUSTICL_ENABLE"):
        return (
            "rusticl takes no device unless RUSTICL_ENABLE names its driver",
            "set RUSTICL_ENABLE=panfrost (panthor's devices go by that name too); for the service: "
            "systemctl edit honed, Environment=RUSTICL_ENABLE=panfrost",
        )
    if wanted == "libmali":
        return (
            "libmali loads but finds no device, so it is not the build for this GPU and this kbase",
            "install the libmali build whose name has this GPU (valhall-g610 on RK3588) and kbase's version",
        )
    if not readings.icds:
        return "there is no ICD file in /etc/OpenCL/vendors", _any_driver(readings)
    if not stacks:
        return "none of the ICD files names a library that loads", _any_driver(readings)
    return "the drivers that load have no device for this machine", _any_driver(readings)


def _any_driver(readings: Readings) -> str:
    if bound_gpu(readings.machine) is not None:
        return "install the OpenCL driver of this GPU, or the CPU's: apt install pocl-opencl-icd"
    return "install a driver; one for the CPU is: apt install pocl-opencl-icd"


def _blame(readings: Readings) -> str:
    bad = [icd.path for icd in readings.icds if icd.ended in ("crashed", "hung")]
    if bad:
        return f"move {bad[0]} away and run this again"
    if len(readings.icds) == 1:
        return f"reinstall the driver that {readings.icds[0].path} names, in the version for this kernel"
    return "find the driver at fault by setting OCL_ICD_VENDORS to one ICD file at a time"
