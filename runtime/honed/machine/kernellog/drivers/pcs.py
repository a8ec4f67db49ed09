"""Records of the drivers of PCs' GPUs, in general: that a GPU hung, was reset or was lost, and NVIDIA's Xids.

honed serves boards; elsewhere it is enough to know that something happened to the GPU, and to which process
where the record says so.
"""

from __future__ import annotations

from typing import Final

from honed.machine.kernellog.fault import Driver, Pattern, RecordTable, Severity, SourceTree

_ANY: Final = r"[^\n]{0,120}?"


def _words(severity: Severity, kind: str, words: str, source: str, *, hang: bool = False) -> Pattern:
    """Return the row for records of any driver that hold one of these words."""
    return Pattern(
        kind,
        severity,
        kind,
        SourceTree("drivers/gpu/drm/", "Linux ").sources(source),
        expression=f"{_ANY}(?:{words})",
        hang=hang,
    )


_RESETS: Final = (
    "drm_drv.c drm_dev_wedged_event 6.18; amd/amdgpu/amdgpu_device.c amdgpu_device_gpu_recover 5.10 to 6.18; "
    "i915/gt/intel_reset.c intel_gt_reset 5.10 to 6.18; xe/xe_gt.c gt_reset 6.12 to 6.18"
)
_ROWS: Final = (
    _words(
        Severity.DEVICE_LOST,
        "gpu-lost",
        r"wedged, needs recovery|declaring it wedged|declared device \S{1,40} as wedged|device lost|"
        r"[Rr]eset(?:\(\d{1,5}\))? failed|[Rr]ecovery [Ff]ailed|Failed to reset chip|GPU reset not supported",
        _RESETS,
    ),
    _words(
        Severity.RESET,
        "reset",
        "GPU reset|Resetting |recovered through reset|reset (?:started|queued|done)",
        _RESETS,
    ),
    _words(
        Severity.QUEUE,
        "hang",
        r"GPU HANG|due to GPU hang|Timedout job|ring \S{1,60} timeout|page fault",
        "amd/amdgpu/amdgpu_job.c amdgpu_job_timedout 5.10 to 6.18; "
        "i915/i915_gpu_error.c error_msg 5.10 to 6.18; "
        "xe/xe_guc_submit.c guc_exec_queue_timedout_job 6.12 to 6.18",
        hang=True,
    ),
)

# Logging, what was corrected, the display: no work is lost. Numbers: NVIDIA's "XID Errors".
_NOTICES: Final = "14|16|19|23|63|87|92|93|125|154|156|160|162|163|164|165|168|176"
_LOST: Final = "48|62|64|74|79|95|119|120|140|143|158"
_PCI: Final = r"(?P<device>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})(?:\.[0-7])?"
_INSTANCE: Final = r"(?: GPU-I:\d{1,5}(?: GPU-CI:\d{1,5})?)?"  # Instance of a GPU that several users share
_PROCESS: Final = r"(?:, pid='?(?:(?P<tgid>\d{1,10})|[^,\n]{0,40}?)'?(?=,|$))?(?:, name=(?P<comm>[^,\n]*))?"
_ADDRESS: Final = r"(?:[^\n]* faulted @ 0x(?P<address>[0-9A-Fa-f]{1,8}_?[0-9A-Fa-f]{1,8})\b)?"


def _xids(severity: Severity, numbers: str, *, consequence: bool = False) -> Pattern:
    """Return the row for the Xids with these numbers."""
    return Pattern(
        "NVRM: Xid (PCI:%04x:%02x:%02x): %d, pid=%s, name=%s, %s",
        severity,
        "xid",
        SourceTree().sources("src/nvidia/src/kernel/gpu/rc/kernel_rc.c krcReportXid_IMPL 595.45.04"),
        expression=rf"NVRM: Xid \(PCI:{_PCI}{_INSTANCE}\): (?P<xid>{numbers})\b{_PROCESS}{_ADDRESS}",
        consequence=consequence,
    )


AMDGPU: Final = RecordTable(
    driver=Driver.AMDGPU, words=("amdgpu",), functions=("amdgpu",), openings=("amdgpu: ",), patterns=_ROWS
)
I915: Final = RecordTable(driver=Driver.I915, words=("i915",), functions=("i915", "intel"), patterns=_ROWS)
XE: Final = RecordTable(driver=Driver.XE, words=("xe",), functions=("xe",), patterns=_ROWS)
NVIDIA: Final = RecordTable(
    driver=Driver.NVIDIA,
    openings=("NVRM: Xid (PCI:", "NVRM: GPU "),
    patterns=(
        _xids(Severity.DEVICE_LOST, _LOST),
        _xids(Severity.QUEUE, "45", consequence=True),  # Channels that are removed after another fault
        _xids(Severity.QUEUE, rf"(?!(?:{_NOTICES})\b)\d{{1,5}}"),
        Pattern(
            "NVRM: GPU %04x:%02x:%02x.%x: GPU has fallen off the bus.",
            Severity.DEVICE_LOST,
            "gpu-lost",
            SourceTree().sources("src/nvidia/arch/nvalloc/unix/src/osinit.c osHandleGpuLost 595.45.04"),
            expression=rf"NVRM: GPU {_PCI}: GPU has fallen off the bus",
        ),
    ),
)
