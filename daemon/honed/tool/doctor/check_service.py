"""Findings on honed itself: the service, its folders, and the Python packages."""

from __future__ import annotations

import sys

from .finding import Finding, Topic
from .readings import Daemon, Folder, OwnPrior, Package, Readings

SERVICE = Topic("Service")
SOFTWARE = Topic("Software")
LOW_DISK_BYTES = 1 << 30  # a model, its source and a compile need a few hundred MiB
_MIB = 1 << 20
_START = "start it with 'systemctl start honed', or 'honed' as an ordinary user"


def check(readings: Readings) -> list[Finding]:
    """Everything about honed's own parts."""
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
    return findings + _worker(daemon) + [_lost(device) for device in daemon.lost]


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


def _lost(device: str) -> Finding:
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
    """How to come by it: from the system, or in an environment of its own from PyPI."""
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
