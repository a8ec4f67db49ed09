"""Records of NVIDIA's driver: Xid events, and a GPU that is gone or does not start.

Numbers and names of events: `src/common/sdk/nvidia/inc/nverror.h` of NVIDIA's open driver, 595.45.04; those
without a name, and what is to be done about each: NVIDIA's "XID Errors" documentation.
`GPU is lost, skipping ...` is written only to its own debug log and is in no row here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from honed.machine.kernellog.fault import Driver, Pattern, RecordTable, Severity, SourceTree
from honed.protocol.dataclass import dataclass

_CHANNEL: Final = "ROBUST_CHANNEL_"


@dataclass(frozen=True, slots=True)
class Xid:
    """One kind of event; `severity` None where it tells of no fault."""

    number: int
    name: str
    meaning: str
    severity: Severity | None = Severity.QUEUE
    hang: bool = False
    consequence: bool = False


def _engines(name: str, meaning: str, numbers: Mapping[int, int]) -> tuple[Xid, ...]:
    """Return the Xids of an error that several engines report; `numbers` has their indices by Xid number."""
    return tuple(
        Xid(number, f"{_CHANNEL}{name}{index}_ERROR", f"{meaning} {index} error")
        for number, index in numbers.items()
    )


_PROGRAM: Final = (
    Xid(8, "", "GPU stopped processing", hang=True),
    Xid(13, "ROBUST_CHANNEL_GR_EXCEPTION", "graphics engine exception"),
    Xid(20, "ROBUST_CHANNEL_MPEG_ERROR_SW_METHOD", "invalid method of the MPEG engine"),
    Xid(21, "ROBUST_CHANNEL_ME_ERROR_SW_METHOD", "invalid method of the motion engine"),
    Xid(22, "ROBUST_CHANNEL_VP_ERROR_SW_METHOD", "invalid method of the video processor"),
    Xid(27, "ROBUST_CHANNEL_VP_ERROR", "video processor exception"),
    Xid(28, "ROBUST_CHANNEL_VP2_ERROR", "video processor exception"),
    Xid(29, "ROBUST_CHANNEL_BSP_ERROR", "bitstream processor exception"),
    Xid(31, "ROBUST_CHANNEL_FIFO_ERROR_MMU_ERR_FLT", "GPU memory page fault"),
    Xid(32, "ROBUST_CHANNEL_PBDMA_ERROR", "invalid or corrupted push buffer"),
    Xid(33, "ROBUST_CHANNEL_SEC_ERROR", "security engine error"),
    Xid(34, "ROBUST_CHANNEL_MSVLD_ERROR", "video decoder error"),
    Xid(35, "ROBUST_CHANNEL_MSPDEC_ERROR", "video decoder error"),
    Xid(36, "ROBUST_CHANNEL_MSPPP_ERROR", "video decoder error"),
    Xid(38, "", "driver firmware error"),
    Xid(42, "ROBUST_CHANNEL_VIC_ERROR", "video image compositor error"),
    Xid(43, "ROBUST_CHANNEL_RESETCHANNEL_VERIF_ERROR", "GPU stopped processing"),
    Xid(44, "ROBUST_CHANNEL_GR_FAULT_DURING_CTXSW", "graphics engine fault during a context switch"),
    Xid(45, "ROBUST_CHANNEL_PREEMPTIVE_REMOVAL", "preemptive cleanup", consequence=True),
    Xid(46, "", "GPU stopped processing", hang=True),
    Xid(60, "ROBUST_CHANNEL_SEC2_ERROR", "security engine error"),
    Xid(69, "ROBUST_CHANNEL_GR_CLASS_ERROR", "graphics engine class error"),
    Xid(80, "PBDMA_PUSHBUFFER_CRC_MISMATCH", "corrupted push buffer"),
    Xid(81, "ROBUST_CHANNEL_VGA_SUBSYSTEM_ERROR", "VGA subsystem error"),
    Xid(94, "ROBUST_CHANNEL_CONTAINED_ERROR", "contained memory error", Severity.CONTEXT),
    Xid(109, "", "context switch timeout", hang=True),
    Xid(138, "ROBUST_CHANNEL_DLA_ERROR", "deep-learning accelerator error"),
    Xid(141, "ROBUST_CHANNEL_FAST_PATH_ERROR", "fast-path error"),
    Xid(151, "ROBUST_CHANNEL_KEY_ROTATION_ERROR", "key rotation error"),
    Xid(159, "ROBUST_CHANNEL_CHI_NON_DATA_ERROR", "coherent interface error"),
    Xid(174, "ROBUST_CHANNEL_RESETCHANNEL_KILL_PROCESS_SILENT", "channel ended", consequence=True),
    *_engines("CE", "copy engine", {39: 0, 40: 1, 41: 2, 70: 3, 71: 4, 72: 5, 75: 6, 76: 7, 77: 8, 85: 9}),
    *_engines("CE", "copy engine", {number: number - 116 for number in range(126, 136)}),
    *_engines("NVENC", "video encoder", {47: 0, 65: 1, 73: 2, 142: 3}),
    *_engines("NVDEC", "video decoder", {68: 0, 83: 1, 84: 2, 88: 3, 89: 4, 96: 5, 97: 6, 98: 7}),
    *_engines("NVJPG", "JPEG engine", {82: 0, **{number: number - 98 for number in range(99, 106)}}),
    *_engines("OFA", "optical flow engine", {86: 0, 139: 1}),
)

_DEVICE: Final = tuple(
    Xid(number, name, meaning, Severity.DEVICE_LOST)
    for number, name, meaning in (
        (48, "ROBUST_CHANNEL_GPU_ECC_DBE", "double-bit ECC error"),
        (58, "FB_MEMORY_ERROR", "GPU memory error"),
        (59, "PMU_ERROR", "power unit error"),
        (61, "PMU_BREAKPOINT", "power unit stopped"),
        (62, "PMU_HALT_ERROR", "power unit halted"),
        (64, "INFOROM_DRAM_RETIREMENT_FAILURE", "ECC page retirement failed"),
        (74, "NVLINK_ERROR", "NVLink error"),
        (79, "ROBUST_CHANNEL_GPU_HAS_FALLEN_OFF_THE_BUS", "GPU has fallen off the bus"),
        (90, "LTC_ERROR", "level-two cache error"),
        (95, "ROBUST_CHANNEL_UNCONTAINED_ERROR", "uncontained ECC error"),
        (110, "SEC_FAULT_ERROR", "security fault"),
        (119, "GSP_RPC_TIMEOUT", "GSP remote call timeout"),
        (120, "GSP_ERROR", "GSP error"),
        (136, "ALI_TRAINING_FAIL", "link training failed"),
        (140, "UNRECOVERABLE_ECC_ERROR_ESCAPE", "unrecovered ECC error"),
        (143, "GPU_INIT_ERROR", "GPU initialization failed"),
        (157, "RESOURCE_RETIREMENT_FAILURE", "retirement of a resource failed"),
        (158, "GPU_FATAL_TIMEOUT", "fatal GPU timeout"),
        (161, "CHANNEL_RETIREMENT_FAILURE", "retirement of a memory channel failed"),
        (167, "PCIE_FATAL_TIMEOUT", "fatal PCIe timeout"),
        (169, "SEC2_HALT_ERROR", "security engine halted"),
        (171, "UNCORRECTABLE_DRAM_ERROR", "uncorrectable DRAM error"),
        (172, "UNCORRECTABLE_SRAM_ERROR", "uncorrectable SRAM error"),
        (173, "C2C_FATAL_LINK_FAILURE", "fatal chip-to-chip link failure"),
        (175, "MEMORY_SUBSYSTEM_ERROR", "memory subsystem error"),
    )
)

# Logging, what succeeded or was corrected, the display, other machines' parts: nothing of ours is lost.
_NOTICES: Final = tuple(
    Xid(number, name, meaning, None)
    for number, name, meaning in (
        (14, "ROBUST_CHANNEL_FAKE_ERROR", "error made for a test"),
        (16, "ROBUST_CHANNEL_VBLANK_CALLBACK_TIMEOUT", "display callback late"),
        (19, "ROBUST_CHANNEL_DISP_MISSED_NOTIFIER", "display notifier missed"),
        (23, "ROBUST_CHANNEL_RC_LOGGING_ENABLED", "logging enabled"),
        (63, "INFOROM_DRAM_RETIREMENT_EVENT", "ECC page retired or row remapped"),
        (87, "NVTELEMETRY_DRIVER_REPORT", "report for telemetry"),
        (92, "EXCESSIVE_SBE_INTERRUPTS", "many single-bit ECC errors, corrected"),
        (93, "INFOROM_ERASE_LIMIT_EXCEEDED", "flash written too often"),
        (125, "INFOROM_FS_ERROR", "error in the board's flash"),
        (154, "GPU_RECOVERY_ACTION_CHANGED", "what recovers the GPU has changed"),  # but see nvidia
        (156, "RESOURCE_RETIREMENT_EVENT", "resource retired"),
        (160, "CHANNEL_RETIREMENT_EVENT", "memory channel retired"),
        (162, "ISINK_REENGAGED", "power smoothing on again"),
        (163, "ISINK_DISENGAGED", "power smoothing off"),
        (164, "ISINK_LOW_LIFETIME", "power smoothing worn"),
        (165, "ISINK_ZERO_LIFETIME", "power smoothing worn out"),
        (168, "REDUCED_GPU_MEMORY_CAPACITY", "less GPU memory than built in"),
        (176, "PCIE_CORRECTABLE_ERROR_FAULT", "many PCIe errors, corrected"),
    )
)

XIDS: Final[Mapping[int, Xid]] = {xid.number: xid for xid in (*_PROGRAM, *_DEVICE, *_NOTICES)}
"""Meanings by number. What is not here is taken for the program's own doing."""

_TREE: Final = SourceTree()

_PCI = r"(?P<device>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})(?:\.[0-7])?"
_INSTANCE = r"(?: GPU-I:\d{1,5}(?: GPU-CI:\d{1,5})?)?"  # of a GPU that is divided among several users
_XID = rf"NVRM: Xid \(PCI:{_PCI}{_INSTANCE}\): "
_PROCESS = r"(?:, pid='?(?:(?P<tgid>\d{1,10})|[^,\n]{0,40}?)'?(?=,|$))?(?:, name=(?P<comm>[^,\n]*))?"
_ADDRESS = r"(?:[^\n]* faulted @ 0x(?P<address>[0-9A-Fa-f]{1,8}_?[0-9A-Fa-f]{1,8})\b)?"
_CHANGED = r"(?P<xid>154), [^\n]{0,200}? to 0x[0-9A-Fa-f]{1,8} \((?:GPU Reset|Node Reboot) Required\)"
_NOTICE_NUMBERS = "|".join(str(xid.number) for xid in XIDS.values() if xid.severity is None)


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
    """Return the row for all events with the severity, hang and consequence of `example`."""
    alike = [
        str(xid.number)
        for xid in XIDS.values()
        if (xid.severity, xid.hang, xid.consequence) == (example.severity, example.hang, example.consequence)
    ]
    severity = example.severity or Severity.QUEUE
    return _events(severity, "|".join(alike), hang=example.hang, consequence=example.consequence)


_ROWS = (
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
    _events(Severity.QUEUE, rf"(?!(?:{_NOTICE_NUMBERS})\b)\d{{1,5}}"),
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

NVIDIA: Final = RecordTable(
    driver=Driver.NVIDIA,
    openings=("NVRM: Xid (PCI:", "NVRM: GPU ", "NVRM: The NVIDIA GPU "),
    patterns=_ROWS,
)
