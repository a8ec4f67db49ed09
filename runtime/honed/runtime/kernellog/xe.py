"""Records of xe, Intel's driver for newer GPUs."""

from __future__ import annotations

from typing import Final

from .fault import Severity
from .pattern import Pattern, in_file

_XE_GUC_SUBMIT: Final = in_file("drivers/gpu/drm/xe/xe_guc_submit.c", "Linux ")
_XE_DEVCOREDUMP: Final = in_file("drivers/gpu/drm/xe/xe_devcoredump.c", "Linux ")
_XE_GUC_CT: Final = in_file("drivers/gpu/drm/xe/xe_guc_ct.c", "Linux ")
_XE_GUC: Final = in_file("drivers/gpu/drm/xe/xe_guc.c", "Linux ")
_XE_TLB_INVAL: Final = in_file("drivers/gpu/drm/xe/xe_tlb_inval.c", "Linux ")
_XE_GT_TLB_INVALIDATION: Final = in_file("drivers/gpu/drm/xe/xe_gt_tlb_invalidation.c", "Linux ")
_XE_GT: Final = in_file("drivers/gpu/drm/xe/xe_gt.c", "Linux ")
_XE_DEVICE: Final = in_file("drivers/gpu/drm/xe/xe_device.c", "Linux ")
_XE_SURVIVABILITY_MODE: Final = in_file("drivers/gpu/drm/xe/xe_survivability_mode.c", "Linux ")

_QUEUE, _CONTEXT, _RESET, _LOST = Severity.QUEUE, Severity.CONTEXT, Severity.RESET, Severity.DEVICE_LOST

PATTERNS: Final = (
    Pattern(
        "Timedout job: seqno=%u, lrc_seqno=%u, guc_id=%d, flags=0x%lx in %s [%d]",
        _QUEUE,
        "job-timeout",
        _XE_GUC_SUBMIT("guc_exec_queue_timedout_job", "6.12 to 6.18"),
        fields=(None, None, None, None, "comm", "tgid"),
        hang=True,
    ),
    Pattern(
        "Timedout job: seqno=%u",
        _QUEUE,
        "job-timeout",
        _XE_GUC_SUBMIT("guc_exec_queue_timedout_job", "6.12 to 6.18"),
        hang=True,
    ),
    Pattern(
        "Check job timeout: seqno=%u",
        _QUEUE,
        "job-timeout",
        _XE_GUC_SUBMIT("check_timeout", "6.12 to 6.18"),
        hang=True,
    ),
    Pattern(
        "Engine reset: engine_class=%s, logical_mask: 0x%x, guc_id=%d",
        _QUEUE,
        "engine-reset",
        _XE_GUC_SUBMIT("xe_guc_exec_queue_reset_handler", "6.12 to 6.18"),
    ),
    Pattern(
        "Memory CAT error reported by GuC!",
        _CONTEXT,
        "memory-error",
        _XE_GUC_SUBMIT("xe_guc_exec_queue_memory_cat_error_handler", "6.18"),
    ),
    Pattern(
        "Xe device coredump has been created",
        _QUEUE,
        "coredump",
        _XE_DEVCOREDUMP("xe_devcoredump", "6.12 to 6.18"),
        consequence=True,
    ),
    Pattern(
        "GuC engine reset request failed on %d:%d because 0x%08X",
        _RESET,
        "soft-reset-failed",
        _XE_GUC_SUBMIT("xe_guc_exec_queue_reset_failure_handler", "6.12 to 6.18"),
    ),
    Pattern(
        "Schedule disable failed to respond",
        _RESET,
        "firmware-timeout",
        _XE_GUC_SUBMIT("guc_exec_queue_timedout_job", "6.12 to 6.18"),
        hang=True,
    ),
    Pattern(
        "No forward process on H2G, reset required",
        _RESET,
        "firmware-timeout",
        _XE_GUC_CT("guc_ct_send_locked", "6.12 to 6.18"),
        hang=True,
    ),
    Pattern(
        "Timed out wait for G2H, fence %u, action %04x",
        _RESET,
        "firmware-timeout",
        _XE_GUC_CT("guc_ct_send_recv", "6.12 to 6.18"),
        hang=True,
    ),
    Pattern(
        "G2H channel broken on read, avail=%d, len=%d, reset required",
        _RESET,
        "firmware-fault",
        _XE_GUC_CT("g2h_read", "6.12 to 6.18"),
    ),
    Pattern(
        "G2H channel broken on read, origin=%u, reset required",
        _RESET,
        "firmware-fault",
        _XE_GUC_CT("parse_g2h_msg", "6.12 to 6.18"),
    ),
    Pattern(
        "G2H channel broken on read, type=%u, reset required",
        _RESET,
        "firmware-fault",
        _XE_GUC_CT("parse_g2h_msg", "6.12 to 6.18"),
    ),
    Pattern(
        "GuC Crash dump notification", _RESET, "firmware-fault", _XE_GUC_CT("guc_crash_process_msg", "6.18")
    ),
    Pattern(
        "GuC Exception notification", _RESET, "firmware-fault", _XE_GUC_CT("guc_crash_process_msg", "6.18")
    ),
    Pattern(
        "Unknown GuC crash notification: 0x%04X",
        _RESET,
        "firmware-fault",
        _XE_GUC_CT("guc_crash_process_msg", "6.18"),
    ),
    Pattern(
        "Received early GuC crash dump notification!",
        _RESET,
        "firmware-fault",
        _XE_GUC("guc_handle_mmio_msg", "6.12 to 6.18"),
    ),
    Pattern(
        "Received early GuC exception notification!",
        _RESET,
        "firmware-fault",
        _XE_GUC("guc_handle_mmio_msg", "6.12 to 6.18"),
    ),
    Pattern(
        "TLB invalidation fence timeout, seqno=%d recv=%d",
        _QUEUE,
        "flush-stuck",
        _XE_TLB_INVAL("xe_tlb_inval_fence_timeout", "6.18")
        + _XE_GT_TLB_INVALIDATION("xe_gt_tlb_fence_timeout", "6.12"),
        hang=True,
    ),
    Pattern("trying reset from %ps", _RESET, "reset", _XE_GT("xe_gt_reset_async", "6.18")),
    Pattern("trying reset", _RESET, "reset", _XE_GT("xe_gt_reset_async", "6.12")),
    Pattern("reset queued", _RESET, "reset", _XE_GT("xe_gt_reset_async", "6.12 to 6.18")),
    Pattern("reset started", _RESET, "reset", _XE_GT("gt_reset", "6.12 to 6.18")),
    Pattern("reset done", _RESET, "reset", _XE_GT("gt_reset", "6.12 to 6.18")),
    Pattern("reset block failed to get lifted", _RESET, "soft-reset-failed", _XE_GT("gt_reset", "6.18")),
    Pattern(
        "GuC reset timed out, GDRST=%#x", _RESET, "soft-reset-failed", _XE_GUC("xe_guc_reset", "6.12 to 6.18")
    ),
    Pattern("reset failed (%pe)", _LOST, "reset-failed", _XE_GT("gt_reset", "6.12 to 6.18")),
    Pattern(
        "CRITICAL: Xe has declared device %s as wedged.",
        _LOST,
        "gpu-lost",
        _XE_DEVICE("xe_device_declare_wedged", "6.12 to 6.18"),
    ),
    Pattern(
        "Runtime Survivability mode enabled",
        _LOST,
        "gpu-lost",
        _XE_SURVIVABILITY_MODE("xe_survivability_mode_runtime_enable", "6.18"),
    ),
)
