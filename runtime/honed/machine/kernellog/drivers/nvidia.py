"""Records of NVIDIA's driver: Xid events, and a GPU that is gone or does not start.

`GPU is lost, skipping ...` is written only to its own debug log and is in no row here.
"""

from __future__ import annotations

from typing import Final

from honed.machine.kernellog.fault import Severity
from honed.machine.kernellog.pattern import Pattern, SourceTree

from .xids import XIDS, Xid

_TREE: Final = SourceTree()

OPENINGS: Final = ("NVRM: Xid (PCI:", "NVRM: GPU ", "NVRM: The NVIDIA GPU ")

_PCI = r"(?P<device>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})(?:\.[0-7])?"
_INSTANCE = r"(?: GPU-I:\d{1,5}(?: GPU-CI:\d{1,5})?)?"  # of a GPU that is divided among several users
_XID = rf"NVRM: Xid \(PCI:{_PCI}{_INSTANCE}\): "
_PROCESS = r"(?:, pid='?(?:(?P<tgid>\d{1,10})|[^,\n]{0,40}?)'?(?=,|$))?(?:, name=(?P<comm>[^,\n]*))?"
_ADDRESS = r"(?:[^\n]* faulted @ 0x(?P<address>[0-9A-Fa-f]{1,8}_?[0-9A-Fa-f]{1,8})\b)?"
_CHANGED = r"(?P<xid>154), [^\n]{0,200}? to 0x[0-9A-Fa-f]{1,8} \((?:GPU Reset|Node Reboot) Required\)"
_NOTICES = "|".join(str(xid.number) for xid in XIDS.values() if xid.severity is None)


def _events(severity: Severity, numbers: str, *, hang: bool = False, consequence: bool = False) -> Pattern:
    return Pattern(
        "NVRM: Xid (PCI:%04x:%02x:%02x): %d, pid=%s, name=%s, %s",
        severity,
        "xid",
        _TREE.sources("src/nvidia/src/kernel/gpu/rc/kernel_rc.c krcReportXid_IMPL 595.45.04"),
        expression=rf"{_XID}(?P<xid>{numbers})\b{_PROCESS}{_ADDRESS}",
        hang=hang,
        consequence=consequence,
    )


def _like(example: Xid) -> Pattern:
    """The row of all events that reach as far as `example`."""
    alike = [
        str(xid.number)
        for xid in XIDS.values()
        if (xid.severity, xid.hang, xid.consequence) == (example.severity, example.hang, example.consequence)
    ]
    severity = example.severity or Severity.QUEUE
    return _events(severity, "|".join(alike), hang=example.hang, consequence=example.consequence)


PATTERNS: Final = (
    Pattern(
        "NVRM: Xid (PCI:%04x:%02x:%02x): %d, GPU recovery action changed from 0x%x (%s) to 0x%x (%s)",
        Severity.DEVICE_LOST,
        "xid",
        _TREE.sources("src/nvidia/src/kernel/gpu/gpu.c _gpuRefreshRecoveryActionInLock 595.45.04"),
        expression=_XID + _CHANGED,
        consequence=True,
    ),
    _like(XIDS[79]),
    _like(XIDS[94]),
    _like(XIDS[8]),
    _like(XIDS[45]),
    _events(Severity.QUEUE, rf"(?!(?:{_NOTICES})\b)\d{{1,5}}"),
    Pattern(
        "NVRM: GPU %04x:%02x:%02x.%x: GPU has fallen off the bus.",
        Severity.DEVICE_LOST,
        "gpu-lost",
        _TREE.sources("src/nvidia/arch/nvalloc/unix/src/osinit.c osHandleGpuLost 595.45.04"),
        expression=rf"NVRM: GPU {_PCI}: GPU has fallen off the bus",
    ),
    Pattern(
        "NVRM: The NVIDIA GPU %04x:%02x:%02x.%x\nNVRM: (PCI ID: %04x:%04x) installed in this system has\n"
        "NVRM: fallen off the bus and is not responding to commands.",
        Severity.DEVICE_LOST,
        "gpu-lost",
        _TREE.sources("src/nvidia/arch/nvalloc/unix/src/osapi.c rm_is_supported_device 595.45.04"),
        expression=rf"NVRM: The NVIDIA GPU {_PCI}\nNVRM: [^\n]{{0,100}}\nNVRM: fallen off the bus",
    ),
    Pattern(
        "NVRM: GPU %04x:%02x:%02x.%x: RmInitAdapter failed! (0x%x:0x%x:%d)",
        Severity.DEVICE_LOST,
        "start-failed",
        _TREE.sources("src/nvidia/arch/nvalloc/unix/src/osinit.c RmInitAdapter 595.45.04"),
        expression=rf"NVRM: GPU {_PCI}: RmInitAdapter failed!",
    ),
    Pattern(
        "NVRM: GPU %04x:%02x:%02x.%x: rm_init_adapter failed, device minor number %d",
        Severity.DEVICE_LOST,
        "start-failed",
        _TREE.sources("kernel-open/nvidia/nv.c nv_start_device 595.45.04"),
        expression=rf"NVRM: GPU {_PCI}: rm_init_adapter failed",
        consequence=True,
    ),
)
