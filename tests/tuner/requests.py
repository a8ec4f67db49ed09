"""What tests that compile share: a request to compile a file on a device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from honed.machine.devices import Device
from honed.tuner.compiler.compile import CompileRequest
from honed.tuner.frontend import Precision


def request_for(path: Path, device: Device, precision: Precision = "fp32", **changes: Any) -> CompileRequest:
    """Compile a file beside itself, in the shapes that it states, and verify it on a device."""
    request = CompileRequest(
        path=path,
        output=path.with_suffix(".honed"),
        profile=device.profile,
        device=device,
        shapes={},
        precision=precision,
        filename=path.name,
    )
    return replace(request, **changes)
