"""Records of the kernel's out-of-memory killer, for the whole machine and for a control group's limit; and of
the DRM core, which it writes for any driver whose GPU has hung.
"""

from __future__ import annotations

from typing import Final

from honed.machine.kernellog.fault import Severity
from honed.machine.kernellog.pattern import Pattern, SourceTree

OPENINGS: Final = ("Memory cgroup out of memory: ", "Out of memory: ", "Out of memory (")

_RESET, _LOST = Severity.RESET, Severity.DEVICE_LOST

_rows = SourceTree("drivers/gpu/drm/", "Linux ").rows

OUT_OF_MEMORY: Final = (
    Pattern(
        "%s: Killed process %d (%s)",
        Severity.PROCESS_KILLED,
        "killed",
        SourceTree(release="Linux ").sources("mm/oom_kill.c __oom_kill_process 5.10 to 6.18"),
        expression=(
            r"(?:Memory cgroup out of memory|Out of memory[^:\n]{0,60}): "
            r"Kill(?:ed)? process (?P<tgid>\d{1,10})(?: \((?P<comm>[^\n]*?)\))?"
        ),
    ),
)

# fmt: off
DRM: Final = (
    *_rows("reset", _RESET)(
        ("device wedged, but recovered through reset", "drm_drv.c drm_dev_wedged_event 6.18"),
    ),
    *_rows("gpu-lost", _LOST)(
        ("device wedged, needs recovery", "drm_drv.c drm_dev_wedged_event 6.18"),
    ),
)
# fmt: on
