"""Judges the readings: findings on the hardware and its kernel, on OpenCL, and on honed itself."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Literal

from honed.machine.families import mali_model, mesa_version
from honed.machine.vendors import Stack

from .readings import (
    Account,
    Clock,
    Daemon,
    DeviceNode,
    Folder,
    GpuHardware,
    Hardware,
    IcdFile,
    OpenCLDevice,
    OwnPrior,
    Package,
    Readings,
)

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding: `what` is a sentence without its full stop, `remedy` says what to do, or is ""."""

    topic: str
    level: Level
    what: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Topic:
    """A heading that findings belong to."""

    name: str

    def ok(self, what: str) -> Finding:
        """Return a finding that nothing is wrong."""
        return Finding(self.name, "ok", what)

    def warn(self, what: str, remedy: str) -> Finding:
        """Return a finding that needs a look."""
        return Finding(self.name, "warn", what, remedy)

    def fail(self, what: str, remedy: str) -> Finding:
        """Return a finding that must be fixed before honed can serve."""
        return Finding(self.name, "fail", what, remedy)


def has_failures(findings: list[Finding]) -> bool:
    """Return whether anything must be fixed before honed can serve."""
    return any(finding.level == "fail" for finding in findings)


HARDWARE = Topic("Machine")
STACK_OF_DRIVER: dict[str, Stack] = {"mali": "libmali", "panthor": "rusticl", "panfrost": "rusticl"}
FIRMWARE_REMEDY = (
    "boot a kernel with kbase (vendor) or panthor (mainline 6.10 or later); panthor also needs "
    "/lib/firmware/arm/mali/arch10.8/mali_csffw.bin from linux-firmware, then see: dmesg | grep -i panthor"
)
LOW_MEMORY_BYTES = 1 << 30  # LightGlue compiles in about this much
_RK3588, _RK3588_HZ = "fb000000.gpu", 1_000_000_000  # RK3588's GPU, and its clock in vendors' kernels
PASSIVE_CELSIUS = 85.0  # The temperature at which RK3588's device tree starts to throttle
_MIB = 1 << 20
_GIB = 1 << 30


def check_machine(readings: Readings) -> list[Finding]:
    """Return the findings on the machine itself."""
    machine = readings.machine
    cpus, gib = machine.cpus, machine.memory_bytes / _GIB
    return [
        HARDWARE.ok(f"{machine.model or 'this machine'}, {cpus} CPUs, {gib:.1f} GiB, Linux {machine.kernel}"),
        *_gpus(machine),
        *_nodes(readings),
        *(_clock(clock) for clock in machine.clocks),
        *_temperature(machine),
        _memory(machine),
    ]


def gpu_with_driver(machine: Hardware) -> GpuHardware | None:
    """Return the first GPU with a driver in the kernel, systems on chip before PCI; None if there is none."""
    return next((gpu for gpu in machine.gpus if gpu.driver), None)


def node_problem(readings: Readings, account: Account) -> tuple[str, str] | None:
    """Return why `account` cannot use the bound GPU's nodes, and what to do; None if it can."""
    gpu = gpu_with_driver(readings.machine)
    if gpu is None:
        return None
    present = {node.path: node for node in readings.machine.nodes}
    nodes = [present[path] for path in gpu.nodes if path in present]
    expected = "/dev/mali0" if gpu.driver == "mali" else "/dev/dri/renderD*"
    if not nodes:
        return (
            f"the kernel drives {gpu.name} with {driver_name(gpu)}, but there is no {expected}",
            "in a container pass the device through; elsewhere see: dmesg | grep -i gpu",
        )
    for node in nodes:
        if not may_open(node, account, readings.user):
            return f"user {account.name} may not open {node.path}", _permission_remedy(node, account)
    return None


def may_open(node: DeviceNode, account: Account, running: Account) -> bool:
    """Return whether `account` may read and write `node`; for the running user, as the kernel says."""
    if account == running:
        return node.openable
    if account.uid == 0:
        return True
    if account.uid == node.uid:
        return node.mode & 0o600 == 0o600
    if node.gid in account.gids:
        return node.mode & 0o060 == 0o060
    return node.mode & 0o006 == 0o006


def driver_name(gpu: GpuHardware) -> str:
    """Return the name that people call the driver."""
    return "kbase (mali)" if gpu.driver == "mali" else gpu.driver


def _gpus(machine: Hardware) -> list[Finding]:
    findings = []
    for gpu in machine.gpus:
        named = f"{gpu.name} ({gpu.compatible})" if gpu.compatible else gpu.name
        if gpu.driver:
            findings.append(HARDWARE.ok(f"GPU {named} is driven by {driver_name(gpu)}"))
        elif gpu_with_driver(machine) is None:
            remedy = (
                FIRMWARE_REMEDY if "mali" in gpu.compatible else "boot a kernel with a driver for this GPU"
            )
            findings.append(HARDWARE.fail(f"GPU {named} has no driver in this kernel", remedy))
    if not machine.gpus:
        findings.append(HARDWARE.ok("the kernel shows no GPU; honed will use the CPU if PoCL is there"))
    return findings


def _nodes(readings: Readings) -> list[Finding]:
    findings = [
        HARDWARE.ok(f"{_listing(node)}: {readings.user.name} may open it")
        for node in readings.machine.nodes
        if node.openable
    ]
    findings += [
        HARDWARE.fail(
            f"{_listing(node)}: {readings.user.name} may not open it", _permission_remedy(node, readings.user)
        )
        for node in readings.machine.nodes
        if not node.openable
    ]
    gpu = gpu_with_driver(readings.machine)
    if gpu is not None and STACK_OF_DRIVER.get(gpu.driver) and not readings.machine.nodes:
        problem = node_problem(readings, readings.user)
        if problem:
            findings.append(HARDWARE.fail(*problem))
    service = readings.service_user
    findings += [
        HARDWARE.fail(
            f"{node.path}: the service's user {service.name} may not open it",
            _permission_remedy(node, service),
        )
        for node in readings.machine.nodes
        if service is not None and not may_open(node, service, readings.user)
    ]
    return findings


def _listing(node: DeviceNode) -> str:
    return f"{node.path} {node.owner}:{node.group} {node.mode:04o}"


def _permission_remedy(node: DeviceNode, account: Account) -> str:
    if node.mode & 0o060 == 0o060 and node.group not in ("root", str(node.gid)):
        return f"run 'sudo usermod -aG {node.group} {account.name}' and log in again (or restart the service)"
    name = node.path.rpartition("/")[2]
    subsystem = "drm" if "/dri/" in node.path else "misc"
    rule = f'SUBSYSTEM=="{subsystem}", KERNEL=="{name}", GROUP="render", MODE="0660"'
    return f"give the node to group render with a udev rule ({rule}), then add {account.name} to that group"


def _clock(clock: Clock) -> Finding:
    span = f"{clock.minimum // 10**6} to {clock.maximum // 10**6} MHz"
    what = f"{clock.name} runs at {clock.current // 10**6} MHz ({span}), governor {clock.governor}"
    if clock.governor == "powersave":
        remedy = f"echo simple_ondemand | sudo tee /sys/class/devfreq/{clock.name}/governor"
        return HARDWARE.warn(f"{what}, which keeps it at its slowest", remedy)
    if clock.governor == "simple_ondemand":
        what += ", which is slow to clock up: the first runs take longer"
    if clock.name == _RK3588 and 0 < clock.maximum < _RK3588_HZ:
        what += (
            f"; this kernel ties it to {clock.maximum // 10**6} MHz, where it can reach {_RK3588_HZ // 10**6}"
        )
    return HARDWARE.ok(what)


def _temperature(machine: Hardware) -> list[Finding]:
    celsius = machine.gpu_celsius
    if celsius is None:
        return []
    if celsius < PASSIVE_CELSIUS:
        return [HARDWARE.ok(f"the GPU is at {celsius:.0f} °C")]
    what = f"the GPU is at {celsius:.0f} °C and is throttled from {PASSIVE_CELSIUS:.0f} °C on"
    return [HARDWARE.warn(what, "cool it: figures measured now are too low")]


def _memory(machine: Hardware) -> Finding:
    what = f"{machine.available_bytes // _MIB} MiB of memory are available"
    if machine.available_bytes >= LOW_MEMORY_BYTES:
        return HARDWARE.ok(what)
    return HARDWARE.warn(
        f"{what}, less than compiling a model of some size takes",
        "stop what you do not need, or compile elsewhere (hone compile --profile) and add the .honed file",
    )


OPENCL = Topic("OpenCL")


def check_opencl(readings: Readings) -> list[Finding]:
    """Return the findings on OpenCL, from the loader up to the devices."""
    return [
        _loader(readings),
        *(_icd(icd) for icd in readings.icds),
        *_environment(readings),
        *_mismatch(readings),
        *_clash(readings),
        *_platforms(readings),
    ]


def _loader(readings: Readings) -> Finding:
    own = readings.opencl.loader
    if readings.loader.path:
        beside = f", pyopencl brings its own ({own})" if own and "pyopencl" in own else ""
        return OPENCL.ok(f"the loader libOpenCL.so.1 is {readings.loader.path}{beside}")
    if own:
        return OPENCL.ok(f"pyopencl brings its own loader ({own}); the system has none")
    return OPENCL.fail(
        f"the OpenCL loader libOpenCL.so.1 does not load: {readings.loader.error}",
        "install it: apt install ocl-icd-libopencl1",
    )


def _icd(icd: IcdFile) -> Finding:
    if not icd.library:
        return OPENCL.warn(
            f"{icd.path} is empty", "write the path of the driver's library into it, or remove it"
        )
    if icd.ended == "ok":
        return OPENCL.ok(f"{icd.path} names {icd.library}, which loads")
    if icd.ended == "failed":
        return OPENCL.warn(
            f"{icd.path} names {icd.library}, which does not load: {icd.error}",
            "install the package that holds this library, or remove the ICD file",
        )
    return OPENCL.fail(
        f"{icd.path} names {icd.library}, and loading it kills the process: {icd.error}",
        "reinstall that driver in the version for this kernel, or move the ICD file away",
    )


def _environment(readings: Readings) -> list[Finding]:
    shown = [f"{k}={v}" for k, v in sorted(readings.environment.items())]
    if not shown:
        return []
    what = f"these variables change what is found: {', '.join(shown)}"
    return [OPENCL.ok(f"{what} (the service has its own environment)")]


def _mismatch(readings: Readings) -> list[Finding]:
    """Find a driver's library that does not fit the kernel's driver, or a libmali newer than it."""
    gpu = gpu_with_driver(readings.machine)
    wanted = STACK_OF_DRIVER.get(gpu.driver, "") if gpu else ""
    present = {icd.stack for icd in readings.icds} & {"libmali", "rusticl"}
    if gpu is None or not wanted or not present:
        return []
    if wanted in present:
        newer = _newer_libmali(readings)
        return [OPENCL.warn(*newer)] if newer and wanted == "libmali" else []
    if wanted == "rusticl":
        return [
            OPENCL.fail(
                f"the ICD file is libmali's, but the kernel drives {gpu.name} with {gpu.driver}, "
                "which libmali cannot use",
                f"{_INSTALL_RUSTICL}; or boot the vendor kernel, whose driver (kbase) libmali needs",
            )
        ]
    return [
        OPENCL.fail(
            f"the ICD file is rusticl's, but the kernel drives {gpu.name} with kbase, which Mesa cannot use",
            f"{_INSTALL_LIBMALI}; or boot a mainline kernel with panthor",
        )
    ]


_RELEASE = re.compile(r"\bg(\d+)p(\d+)\b")  # Release in file names and versions of Arm's drivers


def _newer_libmali(readings: Readings) -> tuple[str, str] | None:
    """Return that libmali is newer than the kernel's driver, and what to do; None if not, or not known."""
    versions = [platform.version for platform in readings.opencl.platforms]
    versions += [icd.loaded for icd in readings.icds if icd.stack == "libmali"]
    library = next(filter(None, map(_RELEASE.search, versions)), None)
    kernel = _RELEASE.search(readings.machine.kbase)
    if library is None or kernel is None or _numbers(library) <= _numbers(kernel):
        return None
    return (
        f"libmali is {library[0]}, newer than the kernel's driver, {kernel[0]}: the kernel's may be newer "
        "than the library, never older",
        f"install a libmali of {kernel[0]} or older, or boot a kernel with a driver of {library[0]} or newer",
    )


def _numbers(release: re.Match[str]) -> tuple[int, int]:
    return int(release[1]), int(release[2])


# PoCL and rusticl each load LLVM. On Debian 13 a process that loads both can crash.
_CLASHING: frozenset[Stack] = frozenset({"pocl", "rusticl"})


def _clash(readings: Readings) -> list[Finding]:
    """Warn of two drivers that can crash a process which loads both."""
    files = [icd.path for icd in readings.icds if icd.stack in _CLASHING and icd.ended == "ok"]
    if not {icd.stack for icd in readings.icds if icd.ended == "ok"} >= _CLASHING:
        return []
    return [
        OPENCL.warn(
            f"PoCL and rusticl are both installed ({', '.join(files)}): each brings LLVM, and a program that "
            "loads both can crash; honed loads them in processes of their own",
            f"for a program that crashes set OCL_ICD_VENDORS={files[0]}, or remove one of the drivers",
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
        return [OPENCL.fail(f"listing the OpenCL platforms does not work: {opencl.error}", _blame(readings))]
    if opencl.ended == "failed":
        remedy = (
            "install pyopencl (apt install python3-pyopencl)"
            if "pyopencl" in opencl.error
            else _blame(readings)
        )
        return [OPENCL.fail(f"OpenCL cannot be used: {opencl.error}", remedy)]
    findings = [_device(p.name, d) for p in opencl.platforms for d in p.devices]
    empty = [p.name for p in opencl.platforms if not p.devices]
    if any(d.usable for p in opencl.platforms for d in p.devices):
        findings += [OPENCL.warn(f"platform {name} has no device", _cause(readings)[1]) for name in empty]
        return findings + _gpu_left_out(readings)
    what = f"{len(opencl.platforms)} platforms" if not empty else f"platform {', '.join(empty)} has no device"
    because, remedy = _cause(readings)
    return [*findings, OPENCL.fail(f"no OpenCL device ({what}): {because}", remedy)]


def _device(platform: str, device: OpenCLDevice) -> Finding:
    figures = (
        f"{device.compute_units} compute units, {device.memory_bytes // _MIB} MiB, "
        f"{'fp16' if device.fp16 else 'no fp16'}, driver {device.driver_version}"
    )
    what = f"{device.kind} {_device_name(device.name)} on {platform}: {figures}"
    if device.usable:
        return OPENCL.ok(what)
    return OPENCL.warn(
        f"{what}, but it is not available or has no compiler",
        "install the driver's full package, compiler included",
    )


def _device_name(name: str) -> str:
    """Return a device's name, with its model if the driver gives a Mali an internal name."""
    model = mali_model(name)
    if model is None or model.name.casefold() in name.casefold():
        return name
    return f"{name}, a {model.name},"


def _gpu_left_out(readings: Readings) -> list[Finding]:
    """Warn that OpenCL works, but does not see the kernel's GPU."""
    gpu = gpu_with_driver(readings.machine)
    kinds = {d.kind for p in readings.opencl.platforms for d in p.devices if d.usable}
    if gpu is None or "GPU" in kinds:
        return []
    because, remedy = _cause(readings)
    return [OPENCL.warn(f"OpenCL does not see the GPU {gpu.name}: {because}", remedy)]


def _cause(readings: Readings) -> tuple[str, str]:
    """Return the likeliest cause of missing devices and what to do.

    Causes are checked in the order of use, from the kernel's driver up to the OpenCL devices.
    """
    machine = readings.machine
    gpu = gpu_with_driver(machine)
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
    if wanted == "rusticl" and readings.environment.get("RUSTICL_ENABLE") is None:
        mesa = mesa_version(readings.mesa)
        if mesa is not None and mesa >= (26, 2):
            return (
                f"rusticl loads but finds no device, and Mesa {readings.mesa} needs no variable for that",
                "see: dmesg | grep -i panthor",
            )
        return (
            "before Mesa 26.2 rusticl takes no device unless RUSTICL_ENABLE names its driver",
            "set RUSTICL_ENABLE=panfrost (panthor's devices go by that name too); for the service: "
            "systemctl edit honed, Environment=RUSTICL_ENABLE=panfrost",
        )
    if wanted == "libmali":
        return _newer_libmali(readings) or (
            "libmali loads but finds no device, so it is not the build for this GPU and this kbase",
            "install the libmali build whose name has this GPU (valhall-g610 on RK3588) and kbase's version",
        )
    if not readings.icds:
        return "there is no ICD file in /etc/OpenCL/vendors", _any_driver(readings)
    if not stacks:
        return "none of the ICD files names a library that loads", _any_driver(readings)
    return "the drivers that load have no device for this machine", _any_driver(readings)


def _any_driver(readings: Readings) -> str:
    if gpu_with_driver(readings.machine) is not None:
        return "install the OpenCL driver of this GPU, or the CPU's: apt install pocl-opencl-icd"
    return "install a driver; one for the CPU is: apt install pocl-opencl-icd"


def _blame(readings: Readings) -> str:
    bad = [icd.path for icd in readings.icds if icd.ended in ("crashed", "hung")]
    if bad:
        return f"move {bad[0]} away and run this again"
    if len(readings.icds) == 1:
        return f"reinstall the driver that {readings.icds[0].path} names, in the version for this kernel"
    return "find the driver at fault by setting OCL_ICD_VENDORS to one ICD file at a time"


SERVICE = Topic("Service")
SOFTWARE = Topic("Software")
LOW_DISK_BYTES = 1 << 30  # A model, its source and a compile need a few hundred MiB
_START = "start it with 'systemctl start honed', or 'honed' as an ordinary user"


def check_service(readings: Readings) -> list[Finding]:
    """Return the findings on the service, its folders, its packages and local priors."""
    folders = [finding for folder in readings.folders for finding in _folder(folder)]
    return [*_daemon(readings), *folders, *_packages(readings), *map(_prior, readings.priors)]


def _daemon(readings: Readings) -> list[Finding]:
    daemon = readings.daemon
    if daemon.unit:
        remedy = "mend that, then run 'systemctl restart honed'; 'journalctl -u honed' has all it said"
        return [SERVICE.fail(daemon.unit, remedy)]
    if daemon.state in ("absent", "refused"):
        return [SERVICE.warn(f"no service answers at {daemon.socket} ({daemon.error})", _START)]
    if daemon.state == "forbidden":
        return [
            SERVICE.fail(
                f"user {readings.user.name} may not connect to {daemon.socket}",
                _membership(readings, "honed"),
            )
        ]
    if daemon.state == "silent":
        return [
            SERVICE.fail(
                f"the service at {daemon.socket} does not answer: {daemon.error}",
                "look into its log (journalctl -u honed) and restart it",
            )
        ]
    findings = [SERVICE.ok(f"honed {daemon.version} answers at {daemon.socket}")]
    if not daemon.may_infer:
        what = f"user {readings.user.name} may not run models: {daemon.error}"
        return [*findings, SERVICE.warn(what, _membership(readings, "honed"))]
    if not daemon.cpu_engine:
        what = "it has no CPU engine: models are served once they are compiled, and apps can bring none"
        findings.append(SERVICE.warn(what, "install it: apt install honed-cpu"))
    return findings + _worker(daemon) + [_no_worker(device) for device in daemon.lost]


def _worker(daemon: Daemon) -> list[Finding]:
    if daemon.worker == "ready":
        return [SERVICE.ok(f"its worker is ready on {daemon.device}")]
    if daemon.worker == "starting":
        return [SERVICE.warn("its worker is still starting", "wait, then run this again")]
    return [
        SERVICE.fail(
            f"its worker does not run: {daemon.worker_reason}",
            "mend what is wrong above, then restart the service",
        )
    ]


def _no_worker(device: str) -> Finding:
    return SERVICE.warn(
        f"it has no worker on {device}",
        "mend the device, or take it out of the configuration ('hone status' says what stands in for it)",
    )


def _membership(readings: Readings, group: str) -> str:
    if group in readings.groups:
        return f"run 'sudo usermod -aG {group} {readings.user.name}' and log in again"
    return f"there is no group {group} here: run as root or as the user of the service"


def _folder(folder: Folder) -> list[Finding]:
    free = f"{folder.free_bytes // _MIB} MiB free"
    findings = []
    if not folder.writable:
        below = "" if folder.exists else " (it would have to be made)"
        findings.append(
            SERVICE.fail(
                f"{folder.path}{below} cannot be written, and it is where {folder.purpose} go",
                f"give it to the user of the service: chown honed: {folder.path}, or choose another folder",
            )
        )
    if folder.free_bytes < LOW_DISK_BYTES:
        findings.append(
            SERVICE.warn(f"{folder.path} ({folder.purpose}) has only {free}", "free some disk space")
        )
    if not findings:
        findings.append(SERVICE.ok(f"{folder.path} ({folder.purpose}) is writable, {free}"))
    return findings


def _packages(readings: Readings) -> list[Finding]:
    runtime = [p for p in readings.packages if p.part != "tuner"]
    findings = [SOFTWARE.ok(f"Python {readings.python}, {_versions(runtime)}")]
    findings += [_missing(p, readings) for p in runtime if p.version is None and p.name != "honed"]
    return [*findings, *_compiler([p for p in readings.packages if p.part == "tuner"], readings)]


def _missing(package: Package, readings: Readings) -> Finding:
    if package.name == "systemd-python":
        what = (
            "systemd-python is missing: the kernel log cannot be read from the journal, and systemd cannot "
            "be notified, nor pass a socket"
        )
        return SOFTWARE.warn(what, _install(readings, "python3-systemd", "systemd"))
    what = f"{package.name} is missing, which honed needs"
    return SOFTWARE.fail(what, _install(readings, f"python3-{package.name}", "all"))


def _install(readings: Readings, debian: str, extra: str) -> str:
    """Return how to install a missing package: from the system, or from PyPI in a virtual environment."""
    if not readings.venv:
        return f"install it: apt install {debian}"
    needs = ", which needs gcc, pkg-config and libsystemd-dev" if extra == "systemd" else ""
    return f"install honed[{extra}] into {sys.prefix}{needs}"


def _compiler(packages: list[Package], readings: Readings) -> list[Finding]:
    absent = [p.name for p in packages if p.version is None]
    if absent:
        what = f"the compiler is not complete ({', '.join(absent)} missing): only .honed files can be added"
        return [SOFTWARE.warn(what, _install(readings, "honed-tuner", "all"))]
    findings = [SOFTWARE.ok(f"the compiler is installed: {_versions(packages)}")]
    findings += [
        SOFTWARE.warn(
            f"{p.name} is {p.version}; the compiler was made for {p.wanted}",
            f"install that version: pip install {p.name}=={p.wanted}",
        )
        for p in packages
        if p.wanted and p.version != p.wanted
    ]
    return findings


def _prior(prior: OwnPrior) -> Finding:
    if prior.error:
        remedy = "learn another with 'hone hub learn', or remove it: the one that comes with honed is used"
        return SOFTWARE.warn(f"an own prior is not used: {prior.error}", remedy)
    what = f"schedules are chosen by an own prior, {prior.path} ({prior.digest})"
    return SOFTWARE.ok(what)


def _versions(packages: list[Package]) -> str:
    return ", ".join(f"{p.name} {p.version}" for p in packages if p.version is not None)
