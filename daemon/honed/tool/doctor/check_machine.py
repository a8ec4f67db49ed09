"""Findings on the hardware and its kernel: drivers, device nodes, permissions, clock, memory."""

from __future__ import annotations

from .finding import Finding, Topic
from .readings import Account, Clock, DeviceNode, GpuHardware, Hardware, Readings, Stack

TOPIC = Topic("Machine")
STACK_OF_DRIVER: dict[str, Stack] = {"mali": "libmali", "panthor": "rusticl", "panfrost": "rusticl"}
FIRMWARE_REMEDY = (
    "boot a kernel with kbase (vendor) or panthor (mainline 6.10 or later); panthor also needs "
    "/lib/firmware/arm/mali/arch10.8/mali_csffw.bin from linux-firmware, then see: dmesg | grep -i panthor"
)
LOW_MEMORY_BYTES = 1 << 30  # LightGlue compiles in about this much
PASSIVE_CELSIUS = 85.0  # where RK3588's device tree starts to throttle
_MIB = 1 << 20
_GIB = 1 << 30


def check(readings: Readings) -> list[Finding]:
    """Everything about the machine itself."""
    machine = readings.machine
    return [
        TOPIC.ok(_description(machine)),
        *_gpus(machine),
        *_nodes(readings),
        *(_clock(clock) for clock in machine.clocks),
        *_temperature(machine),
        _memory(machine),
    ]


def bound_gpu(machine: Hardware) -> GpuHardware | None:
    """The GPU the kernel drives; the first where there are several, systems on chip before PCI."""
    return next((gpu for gpu in machine.gpus if gpu.driver), None)


def node_problem(readings: Readings, account: Account) -> tuple[str, str] | None:
    """Why `account` cannot use the bound GPU's nodes, and what to do; None where it can."""
    gpu = bound_gpu(readings.machine)
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
    """Whether `account` may read and write `node`; for the running user the kernel was asked."""
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
    """What people call the driver."""
    return "kbase (mali)" if gpu.driver == "mali" else gpu.driver


def _description(machine: Hardware) -> str:
    name = machine.model or "this machine"
    return f"{name}, {machine.cpus} CPUs, {machine.memory_bytes / _GIB:.1f} GiB, Linux {machine.kernel}"


def _gpus(machine: Hardware) -> list[Finding]:
    findings = []
    for gpu in machine.gpus:
        named = f"{gpu.name} ({gpu.compatible})" if gpu.compatible else gpu.name
        if gpu.driver:
            findings.append(TOPIC.ok(f"GPU {named} is driven by {driver_name(gpu)}"))
        elif bound_gpu(machine) is None:
            remedy = (
                FIRMWARE_REMEDY if "mali" in gpu.compatible else "boot a kernel with a driver for this GPU"
            )
            findings.append(TOPIC.fail(f"GPU {named} has no driver in this kernel", remedy))
    if not machine.gpus:
        findings.append(TOPIC.ok("the kernel shows no GPU; honed will use the CPU if PoCL is there"))
    return findings


def _nodes(readings: Readings) -> list[Finding]:
    findings = [
        TOPIC.ok(f"{_listing(node)}: {readings.user.name} may open it")
        for node in readings.machine.nodes
        if node.openable
    ]
    findings += [
        TOPIC.fail(
            f"{_listing(node)}: {readings.user.name} may not open it", _permission_remedy(node, readings.user)
        )
        for node in readings.machine.nodes
        if not node.openable
    ]
    gpu = bound_gpu(readings.machine)
    if gpu is not None and STACK_OF_DRIVER.get(gpu.driver) and not readings.machine.nodes:
        problem = node_problem(readings, readings.user)
        if problem:
            findings.append(TOPIC.fail(*problem))
    service = readings.service_user
    findings += [
        TOPIC.fail(
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
        return TOPIC.warn(f"{what}, which keeps it at its slowest", remedy)
    if clock.governor == "simple_ondemand":
        what += ", which is slow to clock up: the first runs take longer"
    return TOPIC.ok(what)


def _temperature(machine: Hardware) -> list[Finding]:
    celsius = machine.gpu_celsius
    if celsius is None:
        return []
    if celsius < PASSIVE_CELSIUS:
        return [TOPIC.ok(f"the GPU is at {celsius:.0f} °C")]
    what = f"the GPU is at {celsius:.0f} °C and is throttled from {PASSIVE_CELSIUS:.0f} °C on"
    return [TOPIC.warn(what, "cool it: figures measured now are too low")]


def _memory(machine: Hardware) -> Finding:
    what = f"{machine.available_bytes // _MIB} MiB of memory are available"
    if machine.available_bytes >= LOW_MEMORY_BYTES:
        return TOPIC.ok(what)
    return TOPIC.warn(
        f"{what}, less than compiling a model of some size takes",
        "stop what you do not need, or compile elsewhere (hone compile --profile) and add the .honed file",
    )
