"""Records of xe, Intel's driver for newer GPUs."""

from __future__ import annotations

from typing import Final

from honed.machine.kernellog.fault import Severity
from honed.machine.kernellog.pattern import SourceTree

_QUEUE, _CONTEXT, _RESET, _LOST = Severity.QUEUE, Severity.CONTEXT, Severity.RESET, Severity.DEVICE_LOST

_rows = SourceTree("drivers/gpu/drm/xe/", "Linux ").rows

# fmt: off
PATTERNS: Final = (
    *_rows("job-timeout", _QUEUE, hang=True)(
        ("Timedout job: seqno=%u, lrc_seqno=%u, guc_id=%d, flags=0x%lx in %s [%d]",
         "xe_guc_submit.c guc_exec_queue_timedout_job 6.12 to 6.18", "- - - - comm tgid"),
        ("Timedout job: seqno=%u", "xe_guc_submit.c guc_exec_queue_timedout_job 6.12 to 6.18"),
        ("Check job timeout: seqno=%u", "xe_guc_submit.c check_timeout 6.12 to 6.18"),
    ),
    *_rows("engine-reset", _QUEUE)(
        ("Engine reset: engine_class=%s, logical_mask: 0x%x, guc_id=%d",
         "xe_guc_submit.c xe_guc_exec_queue_reset_handler 6.12 to 6.18"),
    ),
    *_rows("memory-error", _CONTEXT)(
        ("Memory CAT error reported by GuC!",
         "xe_guc_submit.c xe_guc_exec_queue_memory_cat_error_handler 6.18"),
    ),
    *_rows("coredump", _QUEUE, consequence=True)(
        ("Xe device coredump has been created", "xe_devcoredump.c xe_devcoredump 6.12 to 6.18"),
    ),
    *_rows("soft-reset-failed", _RESET)(
        ("GuC engine reset request failed on %d:%d because 0x%08X",
         "xe_guc_submit.c xe_guc_exec_queue_reset_failure_handler 6.12 to 6.18"),
    ),
    *_rows("firmware-timeout", _RESET, hang=True)(
        ("Schedule disable failed to respond", "xe_guc_submit.c guc_exec_queue_timedout_job 6.12 to 6.18"),
        ("No forward process on H2G, reset required", "xe_guc_ct.c guc_ct_send_locked 6.12 to 6.18"),
        ("Timed out wait for G2H, fence %u, action %04x", "xe_guc_ct.c guc_ct_send_recv 6.12 to 6.18"),
    ),
    *_rows("firmware-fault", _RESET)(
        ("G2H channel broken on read, avail=%d, len=%d, reset required", "xe_guc_ct.c g2h_read 6.12 to 6.18"),
        ("G2H channel broken on read, origin=%u, reset required", "xe_guc_ct.c parse_g2h_msg 6.12 to 6.18"),
        ("G2H channel broken on read, type=%u, reset required", "xe_guc_ct.c parse_g2h_msg 6.12 to 6.18"),
        ("GuC Crash dump notification", "xe_guc_ct.c guc_crash_process_msg 6.18"),
        ("GuC Exception notification", "xe_guc_ct.c guc_crash_process_msg 6.18"),
        ("Unknown GuC crash notification: 0x%04X", "xe_guc_ct.c guc_crash_process_msg 6.18"),
        ("Received early GuC crash dump notification!", "xe_guc.c guc_handle_mmio_msg 6.12 to 6.18"),
        ("Received early GuC exception notification!", "xe_guc.c guc_handle_mmio_msg 6.12 to 6.18"),
    ),
    *_rows("flush-stuck", _QUEUE, hang=True)(
        ("TLB invalidation fence timeout, seqno=%d recv=%d",
         "xe_tlb_inval.c xe_tlb_inval_fence_timeout 6.18; xe_gt_tlb_invalidation.c "
         "xe_gt_tlb_fence_timeout 6.12"),
    ),
    *_rows("reset", _RESET)(
        ("trying reset from %ps", "xe_gt.c xe_gt_reset_async 6.18"),
        ("trying reset", "xe_gt.c xe_gt_reset_async 6.12"),
        ("reset queued", "xe_gt.c xe_gt_reset_async 6.12 to 6.18"),
        ("reset started", "xe_gt.c gt_reset 6.12 to 6.18"),
        ("reset done", "xe_gt.c gt_reset 6.12 to 6.18"),
    ),
    *_rows("soft-reset-failed", _RESET)(
        ("reset block failed to get lifted", "xe_gt.c gt_reset 6.18"),
        ("GuC reset timed out, GDRST=%#x", "xe_guc.c xe_guc_reset 6.12 to 6.18"),
    ),
    *_rows("reset-failed", _LOST)(
        ("reset failed (%pe)", "xe_gt.c gt_reset 6.12 to 6.18"),
    ),
    *_rows("gpu-lost", _LOST)(
        ("CRITICAL: Xe has declared device %s as wedged.",
         "xe_device.c xe_device_declare_wedged 6.12 to 6.18"),
        ("Runtime Survivability mode enabled",
         "xe_survivability_mode.c xe_survivability_mode_runtime_enable 6.18"),
    ),
)
# fmt: on
