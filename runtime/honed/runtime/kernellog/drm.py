"""Records that the DRM core writes for any driver whose GPU has hung."""

from __future__ import annotations

from typing import Final

from .fault import Severity
from .pattern import Pattern, in_file

_DRM_DRV: Final = in_file("drivers/gpu/drm/drm_drv.c", "Linux ")

_RESET, _LOST = Severity.RESET, Severity.DEVICE_LOST

PATTERNS: Final = (
    Pattern(
        "device wedged, but recovered through reset",
        _RESET,
        "reset",
        _DRM_DRV("drm_dev_wedged_event", "6.18"),
    ),
    Pattern("device wedged, needs recovery", _LOST, "gpu-lost", _DRM_DRV("drm_dev_wedged_event", "6.18")),
)
