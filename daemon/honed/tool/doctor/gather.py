"""Reads all that the doctor judges: files beneath a root folder, the service, and children's answers."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Literal

from honed.daemon.idle.signals import temperatures
from honed.jobs import priorfile
from honed.machine.files import gpu_clocks, system_number, system_text
from honed.machine.vendors import driver_environments, icd_files, stack_of
from honed.protocol.errors import HonedError, InvalidArgument, PermissionDenied
from honed.protocol.methods import SERVER_METADATA, SERVER_STATUS
from honed.protocol.service import Status
from honed.runtime.client import Client

from . import probe
from .readings import (
    Account,
    Clock,
    Daemon,
    DeviceNode,
    Folder,
    GpuHardware,
    Hardware,
    IcdFile,
    OpenCL,
    OpenCLLoader,
    OwnPrior,
    Package,
    Part,
    Readings,
)


@dataclass(frozen=True, slots=True)
class AccountNames:
    """The users and groups in /etc/passwd and /etc/group.

    Users that only a directory service knows are not in these files, so the running user's groups come from
    the process itself.
    """

    users: dict[int, tuple[str, int]]  # By uid: name, primary gid
    groups: dict[int, tuple[str, frozenset[str]]]  # By gid: name, members

    def user(self, uid: int) -> str:
        """Return the name of a user id, or the number itself if it has none."""
        return self.users[uid][0] if uid in self.users else str(uid)

    def group(self, gid: int) -> str:
        """Return the name of a group id, or the number itself if it has none."""
        return self.groups[gid][0] if gid in self.groups else str(gid)

    def running(self, uid: int, gids: frozenset[int]) -> Account:
        """Return the account of a process with these ids."""
        return self._account(self.user(uid), uid, gids)

    def find(self, name: str) -> Account | None:
        """Return the account of that name as it would log in; None if there is none."""
        for uid, (user, gid) in self.users.items():
            if user == name:
                gids = {gid} | {g for g, (_, members) in self.groups.items() if name in members}
                return self._account(name, uid, frozenset(gids))
        return None

    def _account(self, name: str, uid: int, gids: frozenset[int]) -> Account:
        groups = {self.group(gid) for gid in gids}
        return Account(name=name, uid=uid, gids=tuple(sorted(gids)), groups=tuple(sorted(groups)))


def read_names(root: Path) -> AccountNames:
    """Read the users and groups in `root`/etc; skip malformed lines, as libc does."""
    users: dict[int, tuple[str, int]] = {}
    for fields in _entries(root / "etc/passwd", 7):
        if fields[2].isdigit() and fields[3].isdigit():
            users.setdefault(int(fields[2]), (fields[0], int(fields[3])))
    groups: dict[int, tuple[str, frozenset[str]]] = {}
    for fields in _entries(root / "etc/group", 4):
        if fields[2].isdigit():
            groups.setdefault(int(fields[2]), (fields[0], frozenset(filter(None, fields[3].split(",")))))
    return AccountNames(users=users, groups=groups)


def _entries(path: Path, width: int) -> list[list[str]]:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return []
    return [fields for line in text.splitlines() if len(fields := line.split(":")) == width]


# Paths: the kernel's ABI documentation (sysfs-class-devfreq, drm render nodes) and Arm's kbase driver, which
# makes /dev/mali0 as a misc device. Links are read by name only, so that any root folder works.
_GPU_DRIVERS = {"amdgpu", "i915", "nouveau", "nvidia", "panfrost", "panthor", "radeon", "xe"}
_FIRMWARE = "lib/firmware/arm/mali/arch10.8/mali_csffw.bin"
_DISPLAY_CLASS = "0x03"  # PCI base class of display controllers


def read_machine(root: Path, names: AccountNames) -> Hardware:
    """Read the hardware and the kernel of the system whose root folder is `root`."""
    kib = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _text(root / "proc/meminfo"), re.MULTILINE))
    gpus = (*_platform_gpus(root), *_pci_gpus(root))
    # Nodes without a device, too, as in containers that hide parts of /sys
    loose = {"/dev/mali0"} | _render_nodes(root, _GPU_DRIVERS)
    paths = sorted({node for gpu in gpus for node in gpu.nodes} | loose)
    return Hardware(
        model=_text(root / "proc/device-tree/model").strip("\0 ") or _text(root / _DMI_NAME),
        kernel=_text(root / "proc/sys/kernel/osrelease"),
        cpus=sum(p.name[3:].isdigit() for p in root.glob("sys/devices/system/cpu/cpu[0-9]*")),
        memory_bytes=int(kib.get("MemTotal", 0)) * 1024,
        available_bytes=int(kib.get("MemAvailable", 0)) * 1024,
        gpus=gpus,
        nodes=tuple(_node(root, path, names) for path in paths if os.path.exists(root / path.lstrip("/"))),
        clocks=tuple(map(_clock, gpu_clocks(root))),
        gpu_celsius=temperatures(root).get("gpu-thermal"),
        kbase=next(filter(None, (_text(root / f"sys/module/{name}/version") for name in _KBASE)), ""),
        panthor_firmware=any(os.path.exists(root / f"{_FIRMWARE}{end}") for end in ("", ".xz", ".zst")),
    )


_DMI_NAME = "sys/class/dmi/id/product_name"
_KBASE = ("bifrost_kbase", "mali_kbase", "midgard_kbase")  # Names of kbase's module


def _platform_gpus(root: Path) -> tuple[GpuHardware, ...]:
    """Return the GPUs of a system on chip: platform devices that the device tree calls something.gpu."""
    places = ("sys/bus/platform/devices", "sys/devices/platform")
    folders = {
        p.name: p for place in places for end in (".gpu", ".gpu-*") for p in root.glob(f"{place}/*{end}")
    }
    found = []
    for _, folder in sorted(folders.items()):
        driver = _link_name(folder / "driver")
        compatible = re.search(r"^OF_COMPATIBLE_0=(.*)$", _text(folder / "uevent"), re.MULTILINE)
        nodes = _named("/dev/dri", folder, "drm/renderD*") | _named("/dev", folder, "misc/mali*")
        if driver == "mali":
            nodes |= _named("/dev", root, "sys/class/misc/mali[0-9]*")
        if driver in _GPU_DRIVERS:
            nodes |= _render_nodes(root, {driver})
        found.append(
            GpuHardware(
                name=folder.name,
                driver=driver,
                compatible=compatible[1] if compatible else "",
                nodes=tuple(sorted(nodes)),
            )
        )
    return tuple(found)


def _pci_gpus(root: Path) -> tuple[GpuHardware, ...]:
    found = []
    for folder in sorted(root.glob("sys/bus/pci/devices/*")):
        if not _text(folder / "class").startswith(_DISPLAY_CLASS):
            continue
        nodes = _named("/dev/dri", folder, "drm/renderD*")
        driver = _link_name(folder / "driver")
        if driver == "nvidia":
            nodes |= _named("/dev", root, "dev/nvidia[0-9]*") | {"/dev/nvidiactl"}
        found.append(GpuHardware(name=folder.name, driver=driver, compatible="", nodes=tuple(sorted(nodes))))
    return tuple(found)


def _named(place: str, folder: Path, pattern: str) -> set[str]:
    """Return the nodes in `place` with the names of the files that match `pattern` below a folder."""
    return {f"{place}/{path.name}" for path in folder.glob(pattern)}


def _render_nodes(root: Path, drivers: set[str]) -> set[str]:
    renderers = root.glob("sys/class/drm/renderD*")
    return {f"/dev/dri/{p.name}" for p in renderers if _link_name(p / "device/driver") in drivers}


def _node(root: Path, path: str, names: AccountNames) -> DeviceNode:
    place = root / path.lstrip("/")
    status = place.stat()
    return DeviceNode(
        path=path,
        owner=names.user(status.st_uid),
        uid=status.st_uid,
        group=names.group(status.st_gid),
        gid=status.st_gid,
        mode=status.st_mode & 0o7777,
        openable=os.access(place, os.R_OK | os.W_OK),
    )


def _clock(folder: Path) -> Clock:
    return Clock(
        name=folder.name,
        current=system_number(folder / "cur_freq") or 0,
        minimum=system_number(folder / "min_freq") or 0,
        maximum=system_number(folder / "max_freq") or 0,
        governor=_text(folder / "governor"),
    )


def _link_name(link: Path) -> str:
    """Return the last part of the path that a link points to, "" if it is no link."""
    try:
        return os.path.basename(os.readlink(link))
    except OSError:
        return ""


def _text(path: Path) -> str:
    """Return a small file's text, "" if it cannot be read.

    The doctor does not distinguish unreadable files from absent ones.
    """
    return system_text(path) or ""


_TIMEOUT = 5.0  # Seconds; the service answers such questions at once, whatever it is working on
_UNIT = "honed.service"
State = Literal["answers", "absent", "refused", "forbidden", "silent"]


def read_daemon(path: str, *, system: bool = False) -> tuple[Daemon, Status | None]:
    """Return what a client sees at the socket `path`, and the service's status.

    The status is None if the service does not report it. With `system` the socket is that of the system's
    service; if nothing answers there, systemd is asked for the reason.
    """
    state, error = _connect(path)
    if state != "answers":
        unit = _unit_failure() if system else ""
        return Daemon(socket=path, state=state, error=error, unit=unit), None
    with Client(path, timeout=_TIMEOUT) as client:
        try:
            version = client.ask(SERVER_METADATA).version
            status = client.ask(SERVER_STATUS)
        except PermissionDenied as denied:
            return Daemon(socket=path, state="answers", error=str(denied), version=version), None
        except HonedError as failure:
            unit = _unit_failure() if system else ""
            return Daemon(socket=path, state="silent", error=str(failure), unit=unit), None
    device = status.device
    lost = (each for each in status.devices[1:] if each.worker.state == "failed")
    found = Daemon(
        socket=path,
        state="answers",
        version=version,
        may_infer=True,
        worker=status.worker.state,
        worker_reason=status.worker.reason,
        device=f"{device.name} ({device.platform})" if device else "",
        lost=tuple(f"{each.spec or each.name} ({each.worker.reason})" for each in lost),
        cpu_engine=any(each.engine == "cpu" for each in status.devices),
    )
    return found, status


def _connect(path: str) -> tuple[State, str]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_TIMEOUT)
        try:
            connection.connect(path)
        except PermissionError as error:
            return "forbidden", str(error.strerror)
        except FileNotFoundError:
            return "absent", "the socket is not there" if Path(
                path
            ).parent.is_dir() else "its folder is not there"
        except OSError as error:  # Refused, timed out, or the path is too long for a socket
            return "refused", str(error.strerror or error)
    return "answers", ""


def _unit_failure() -> str:
    """Return why systemd's service failed, in the service's own words; "" if it did not, or is not known."""
    command = ["systemctl", "show", "--property=ActiveState,SubState,Result,StatusText", _UNIT]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return explain(dict(each.partition("=")[::2] for each in printed.splitlines()))


def explain(unit: dict[str, str]) -> str:
    """Return a sentence on a unit that failed or restarts, from its systemd properties; "" for others."""
    if unit.get("ActiveState") != "failed" and unit.get("SubState") != "auto-restart":
        return ""
    said = unit.get("StatusText", "")
    return f"{_UNIT} has failed ({unit.get('Result', 'unknown')}){f': {said}' if said else ''}"


LOADER = "libOpenCL.so.1"
VARIABLES = (
    "HONED_DEVICE",
    "LD_LIBRARY_PATH",
    "OCL_ICD_FILENAMES",
    "OCL_ICD_VENDORS",
    "OPENCL_VENDOR_PATH",
    "RUSTICL_DEVICE_TYPE",
    "RUSTICL_ENABLE",
    "RUSTICL_FEATURES",
)
_PACKAGES: dict[Part, dict[str, str]] = {  # Part -> name -> the only version known to work, or ""
    "runtime": {"honed": "", "numpy": "", "msgpack": ""},
    "daemon": {"pyopencl": "", "rich": "", "systemd-python": ""},
    "tuner": {"apache-tvm": "0.27.0.post1", "apache-tvm-ffi": "0.1.14.post1", "onnx": ""},
}


def load_library(library: str, environ: Mapping[str, str]) -> probe.ProbeAnswer:
    """Return how loading a library in a child ended; `library` is "" for an ICD file that names none."""
    if not library:  # A dlopen("") would return the program itself
        return probe.ProbeAnswer(ended="failed", error="it names no library")
    return probe.load_library(library, environ)


def list_platforms(environ: Mapping[str, str]) -> OpenCL:
    """List the platforms in a child, or in several if installed drivers must not share a process."""
    found = [probe.list_platforms({**environ, **variables}) for variables in driver_environments(environ)]
    chosen = next((one for one in found if one.ended != "ok"), found[0])
    return replace(chosen, platforms=tuple(platform for one in found for platform in one.platforms))


def gather(
    *,
    root: Path,
    environ: Mapping[str, str],
    uid: int,
    gids: Iterable[int],
    folders: Iterable[tuple[str, Path]],
    daemon: Daemon,
) -> Readings:
    """Read the system beneath `root`; `folders` are (purpose, path) of the folders that honed writes to."""
    names = read_names(root)
    files = icd_files(root, environ)
    with ThreadPoolExecutor(max_workers=2) as pool:  # Boards have few cores, and drivers are large
        opencl = pool.submit(list_platforms, environ)
        libraries = [LOADER, *(library for _, library in files)]
        loader, *loaded = pool.map(lambda name: load_library(name, environ), libraries)
        icds = tuple(
            IcdFile(
                path=file,
                library=library,
                stack=stack_of(library),
                ended=each.ended,
                loaded=each.path,
                error=each.error,
            )
            for (file, library), each in zip(files, loaded, strict=True)
        )
    service, groups = names.find("honed"), {group for group, _ in names.groups.values()}
    return Readings(
        user=names.running(uid, frozenset(gids)),
        service_user=service if service is not None and service.uid != uid else None,
        groups=tuple(g for g in ("video", "render", "honed", "honed-admin") if g in groups),
        environment={name: environ[name] for name in VARIABLES if environ.get(name)},
        loader=OpenCLLoader(path=loader.path, error=loader.error),
        icds=icds,
        opencl=opencl.result(),
        mesa=_debian_version(root, "mesa-opencl-icd"),
        machine=read_machine(root, names),
        folders=tuple(folder(purpose, place) for purpose, place in folders),
        daemon=daemon,
        python=platform.python_version(),
        venv=sys.prefix != sys.base_prefix,
        packages=packages(),
        priors=tuple(_own_priors(root, environ)),
    )


def _own_priors(root: Path, environ: Mapping[str, str]) -> Iterator[OwnPrior]:
    for folder in priorfile.own_folders(environ):
        for path in sorted((root / str(folder).lstrip("/")).glob(f"*{priorfile.SUFFIX}")):
            named = f"/{path.relative_to(root)}"
            try:
                yield OwnPrior(path=named, digest=priorfile.usable(path).digest, error="")
            except InvalidArgument as error:
                yield OwnPrior(path=named, digest="", error=str(error))


def folder(purpose: str, path: Path) -> Folder:
    """Return the state of a folder; if it is missing, that of the nearest folder above."""
    exists = os.path.isdir(path)  # Path.is_dir raises if a folder above may not be searched
    nearest = next((p for p in (path, *path.parents) if os.path.isdir(p)), Path("/"))
    return Folder(
        path=str(path),
        purpose=purpose,
        exists=exists,
        writable=os.access(nearest, os.W_OK | os.X_OK),
        free_bytes=shutil.disk_usage(nearest).free,
    )


def packages() -> tuple[Package, ...]:
    """Return the versions in the packages' metadata; nothing is imported."""
    tuner = importlib.util.find_spec("honed.tuner")
    bundle = [str(Path(tuner.origin).with_name("bundled"))] if tuner is not None and tuner.origin else []
    found = [
        Package(
            name=name, part=part, version=_version(name, bundle if part == "tuner" else []), wanted=wanted
        )
        for part, names in _PACKAGES.items()
        for name, wanted in names.items()
    ]
    version = None if tuner is None else _version("honed-tuner") or _version("honed") or "present"
    return (*found, Package(name="honed-tuner", part="tuner", version=version, wanted=""))


def _debian_version(root: Path, package: str) -> str:
    """Return the version of an installed Debian package; "" if there is none, or no dpkg."""
    try:
        text = (root / "var/lib/dpkg/status").read_text(errors="replace")
    except OSError:
        return ""
    found = re.search(rf"^Package: {re.escape(package)}\n(?:.+\n)*?Version: (.+)$", text, re.MULTILINE)
    return found[1] if found else ""


def _version(name: str, first: Sequence[str] = ()) -> str | None:
    """Return the version of an installed distribution; `first` is searched before Python's own folders."""
    found = metadata.distributions(name=name, path=[*first, *sys.path])
    return next((distribution.version for distribution in found), None)
