"""Records that the DRM core writes for any driver whose GPU has hung."""

from __future__ import annotations

from typing import Final

from honed.machine.kernellog.fault import Severity
from honed.machine.kernellog.pattern import SourceTree

_RESET, _LOST = Severity.RESET, Severity.DEVICE_LOST

_rows = SourceTree("drivers/gpu/drm/", "Linux ").rows

# fmt: off
PATTERNS: Final = (
    *_rows("reset", _RESET)(
        ("device wedged, but recovered through reset", "drm_drv.c drm_dev_wedged_event 6.18"),
    ),
    *_rows("gpu-lost", _LOST)(
        ("device wedged, needs recovery", "drm_drv.c drm_dev_wedged_event 6.18"),
    ),
)
# fmt: on
