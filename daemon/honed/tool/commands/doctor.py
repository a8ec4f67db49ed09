"""Implements `hone doctor`: what is right and wrong with this machine, and what to do about it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from honed.daemon.settings.places import places
from honed.machine.files import replacing
from honed.protocol.errors import InvalidArgument
from honed.protocol.service import Status
from honed.runtime.calling import rpc
from honed.tool.doctor import checks, gather
from honed.tool.doctor.checks import Finding, has_failures
from honed.tool.doctor.readings import Readings
from honed.tool.output import Console, Output, Reporter, clean, line
from honed.tool.parser import Parser, define

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def define_doctor(doctor: Parser) -> None:
    """Define the arguments of `hone doctor`."""
    define(
        doctor,
        _doctor,
        details=(
            "Looks at the OpenCL loader and drivers, the GPU's kernel driver, device nodes and permissions, "
            "clock, service, folders and software. The exit status is 1 if something must be mended."
        ),
        examples="""\
            hone doctor
            hone doctor --json
            hone doctor --profile board.toml      # then elsewhere: hone compile --profile board.toml""",
    )
    doctor.add_argument(
        "--profile",
        metavar="FILE",
        type=Path,
        help="instead write the device's profile, its peaks measured, for compiling on another machine",
    )
    doctor.add_argument(
        "--device", metavar="SPEC", help="the device of --profile: a number or part of its name"
    )


def _doctor(arguments: argparse.Namespace, output: Output) -> int | None:
    if arguments.profile is not None:
        _write_profile(arguments, output)
        return None
    readings, troubles = _readings(arguments)
    findings = [
        *checks.check_opencl(readings),
        *checks.check_machine(readings),
        *troubles,
        *checks.check_service(readings),
    ]
    ok = not has_failures(findings)
    document = {"ok": ok, "findings": tuple(findings), "readings": readings}
    output.emit(document, lambda console: _print(console, findings))
    return 0 if ok else 1


def _readings(arguments: argparse.Namespace) -> tuple[Readings, list[Finding]]:
    """Return all that can be read, and findings on what prevents reading more."""
    uid = os.getuid()
    troubles = []
    path = arguments.socket or rpc.default_socket(os.environ)
    system = path == rpc.SYSTEM_SOCKET or not (arguments.socket or os.environ.get("HONED_SOCKET"))
    daemon, status = gather.read_daemon(path, system=system)
    try:
        folders = _folders(status, uid)
    except InvalidArgument as error:
        folders = []
        troubles.append(checks.SERVICE.warn(str(error), "set HOME to the user's folder"))
    readings = gather.gather(
        root=Path("/"),
        environ=os.environ,
        uid=uid,
        gids={os.getgid(), os.getegid(), *os.getgroups()},
        folders=folders,
        daemon=daemon,
    )
    return readings, troubles


def _folders(status: Status | None, uid: int) -> list[tuple[str, Path]]:
    """Return the folders that this user's service writes to; only root judges another user's service."""
    if status:
        folders = status.places
        if uid not in (0, _owner(folders.state_dir)):
            return []
        return [("models", Path(folders.state_dir)), ("caches", Path(folders.cache_dir))]
    usual = places(os.environ, uid)
    return [("models", usual.state_dir), ("caches", usual.cache_dir)]


def _owner(path: str) -> int | None:
    try:
        return os.stat(path).st_uid
    except OSError:
        return None


def _print(console: Console, findings: Sequence[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    for topic in dict.fromkeys(finding.topic for finding in findings):
        line(console, topic, "bold")
        grid = Table.grid(padding=(0, 1))
        grid.add_column(width=4, no_wrap=True)
        grid.add_column(overflow="fold")
        for finding in findings:
            if finding.topic != topic:
                continue
            grid.add_row(Text(finding.level, _STYLES[finding.level]), Text(clean(finding.what)))
            if finding.remedy:
                grid.add_row("", Text(f"-> {clean(finding.remedy)}", "cyan"))
        console.print(grid)
        console.print()
    line(console, _verdict(findings))


def _verdict(findings: Sequence[Finding]) -> str:
    failures = sum(finding.level == "fail" for finding in findings)
    warnings = sum(finding.level == "warn" for finding in findings)
    if failures:
        return f"{failures} to mend, {warnings} to look at."
    return f"Nothing to mend, {warnings} to look at." if warnings else "All is well."


def _write_profile(arguments: argparse.Namespace, output: Output) -> None:
    from honed.machine import peaks  # Needs pyopencl

    cache = places(os.environ, os.getuid()).cache_dir
    with Reporter("profile") as reporter:
        reporter.update("measure", 0.0, "measuring the device's peaks")
        found = peaks.survey(arguments.device, cache)
    with replacing(arguments.profile) as file:
        file.write(found.require_peaks().dumps().encode())
    document = {"output": str(arguments.profile), "device": found.spec}
    output.say(
        document,
        f"{arguments.profile} describes {found.spec}; compile for it elsewhere with: "
        f"hone compile MODEL.onnx -o MODEL.honed --profile {arguments.profile}",
    )
