"""Asks OpenCL in a child process, because drivers crash and hang.

    python -m honed.tool.doctor.probe library LIBRARY       loads one driver's library
    python -m honed.tool.doctor.probe platforms             lists platforms and devices

A child answers with one JSON map on its original stdout; output of drivers goes to its stderr.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from honed.process.children import answering, python, run
from honed.protocol import strict

from .readings import OpenCL, OpenCLDevice, Platform

DEADLINE = 20.0  # Seconds; the slowest driver measured, rusticl under emulation, starts in under 10
_PLATFORM_NOT_FOUND = -1001  # CL_PLATFORM_NOT_FOUND_KHR: the loader works and found no driver


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswer(OpenCL):
    """The answer of a child; `path` is that of the library it had to load."""

    path: str = ""


def ask(arguments: Sequence[str], environ: Mapping[str, str], deadline: float = DEADLINE) -> ProbeAnswer:
    """Run this module in a child with `environ`, which is killed after `deadline` seconds."""
    answers, death = run(python(__name__, *arguments), seconds=deadline, environment=environ)
    if death.late:
        return ProbeAnswer(ended="hung", error=f"it did not answer within {deadline:g} s")
    if death.status != 0 or not answers:
        return ProbeAnswer(ended="crashed", error=str(death))
    answer = strict.from_plain(ProbeAnswer, answers[-1], where="answer")
    if answer.ended == "failed" and death.said:
        return replace(answer, error=f"{answer.error} (it said last: {death.said})")
    return answer


def load_library(library: str, environ: Mapping[str, str]) -> ProbeAnswer:
    """Return whether a child can load `library`, from which path, and the error."""
    return ask(["library", library], environ)


def list_platforms(environ: Mapping[str, str]) -> OpenCL:
    """Return the OpenCL platforms that a process of honed with this environment sees."""
    return strict.copy_fields(OpenCL, ask(["platforms"], environ))


def _library(library: str) -> ProbeAnswer:
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return ProbeAnswer(ended="failed", error=str(error))
    # The library's name may be a link to a file that says more: libmali.so.1 to
    # libmali-valhall-g610-g24p0.so.
    return ProbeAnswer(path=_library_path(os.path.basename(library).partition(".so")[0]) or library)


def _library_path(part: str) -> str:
    """Return the path of the loaded library whose file name contains `part`; "" if this process has none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if part in path.rpartition("/")[2]:
            return f"/{path}"
    return ""


def _platforms() -> ProbeAnswer:
    try:
        import pyopencl as cl
    except ImportError as error:
        return ProbeAnswer(ended="failed", error=f"pyopencl cannot be imported ({error})")
    try:
        platforms = cl.get_platforms()
    except cl.Error as error:
        if error.code != _PLATFORM_NOT_FOUND:
            return ProbeAnswer(ended="failed", error=f"the OpenCL loader answered {error}")
        platforms = []
    return ProbeAnswer(
        loader=_library_path("libOpenCL"), platforms=tuple(_platform(cl, p) for p in platforms)
    )


def _platform(cl: Any, platform: Any) -> Platform:
    try:
        devices = platform.get_devices()
    except cl.Error as error:
        # Usually CL_DEVICE_NOT_FOUND; with any other code the platform has no device either.
        print(f"{platform.name}: {error}", file=sys.stderr)
        devices = []
    return Platform(
        name=platform.name.strip("\0 "),
        version=platform.version.strip("\0 "),
        devices=tuple(_device(cl, d) for d in devices),
    )


def _device(cl: Any, device: Any) -> OpenCLDevice:
    kinds = {
        cl.device_type.GPU: "GPU",
        cl.device_type.ACCELERATOR: "accelerator",
        cl.device_type.CPU: "CPU",
    }
    return OpenCLDevice(
        name=device.name.strip("\0 "),
        kind=next((name for bit, name in kinds.items() if device.type & bit), "other"),
        driver_version=device.driver_version.strip("\0 "),
        fp16="cl_khr_fp16" in device.extensions.split(),
        compute_units=device.max_compute_units,
        memory_bytes=device.global_mem_size,
        usable=bool(device.available and device.compiler_available),
    )


def main(arguments: Sequence[str]) -> int:
    """Answer the question in `arguments` on stdout."""
    with answering() as say:
        what, *of = arguments
        say(strict.to_plain(_library(*of) if what == "library" else _platforms()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
