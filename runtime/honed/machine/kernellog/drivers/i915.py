"""Records of i915, Intel's driver for GPUs before Xe2.

The process is the one that made the context: a thread's id.
"""

from __future__ import annotations

from typing import Final

from honed.machine.kernellog.fault import Severity
from honed.machine.kernellog.pattern import SourceTree

OPENINGS: Final = ("Fence expiration time out i915-", "Asynchronous wait on fence ")

_QUEUE, _CONTEXT, _RESET, _LOST = Severity.QUEUE, Severity.CONTEXT, Severity.RESET, Severity.DEVICE_LOST

_rows = SourceTree("drivers/gpu/drm/i915/", "Linux ").rows

# fmt: off
PATTERNS: Final = (
    *_rows("hang", _QUEUE, hang=True)(
        ("GPU HANG: ecode %d:%x:%08x, in %s [%d]",
         "i915_gpu_error.c error_msg 5.10 to 6.18", "- - - comm tid"),
        ("GPU HANG: ecode %d:%x:%08x", "i915_gpu_error.c error_msg 5.10 to 6.18"),
    ),
    *_rows("context-reset", _CONTEXT, hang=True)(
        ("%s[%d] context reset due to GPU hang", "gt/intel_reset.c mark_guilty 5.10 to 6.18", "comm tid"),
    ),
    *_rows("hang", _QUEUE, hang=True)(
        ("Got hung context on %s with active request", "i915_gpu_error.c capture_engine 6.12 to 6.18"),
    ),
    *_rows("reset", _RESET)(
        ("Resetting chip for %s", "gt/intel_reset.c intel_gt_reset 5.10 to 6.18"),
    ),
    *_rows("engine-reset", _QUEUE)(
        ("Resetting %s for %s", "gt/intel_reset.c __intel_engine_reset_bh 5.10 to 6.18"),
    ),
    *_rows("soft-reset-failed", _RESET)(
        ("%s reset request timed out: {request: %08x, RESET_CTL: %08x}",
         "gt/intel_reset.c gen8_engine_reset_prepare 5.10 to 6.18"),
        ("Engine reset failed on %d:%d (%s) because 0x%08X",
         "gt/uc/intel_guc_submission.c intel_guc_engine_failure_process_msg 6.12 to 6.18"),
        ("GuC engine reset request failed on %d:%d (%s) because 0x%08X",
         "gt/uc/intel_guc_submission.c intel_guc_engine_failure_process_msg 6.1"),
        ("Failed to reset GuC, ret = %d", "gt/uc/intel_uc.c __intel_uc_reset_hw 5.10 to 6.18"),
    ),
    *_rows("firmware-fault", _RESET)(
        ("Crash dump notification", "gt/uc/intel_guc.c intel_guc_crash_process_msg 6.12 to 6.18"),
        ("Exception notification", "gt/uc/intel_guc.c intel_guc_crash_process_msg 6.12 to 6.18"),
        ("Unknown crash notification: 0x%04X", "gt/uc/intel_guc.c intel_guc_crash_process_msg 6.12 to 6.18"),
        ("Received early crash dump notification!",
         "gt/uc/intel_guc.c intel_guc_to_host_process_recv_msg 6.12 to 6.18"),
        ("Received early exception notification!",
         "gt/uc/intel_guc.c intel_guc_to_host_process_recv_msg 6.12 to 6.18"),
        ("Received early GuC crash dump notification!",
         "gt/uc/intel_guc.c intel_guc_to_host_process_recv_msg 6.1"),
        ("Received early GuC exception notification!",
         "gt/uc/intel_guc.c intel_guc_to_host_process_recv_msg 6.1"),
        ("CTB is dead - reason=0x%X", "gt/uc/intel_guc_ct.c ct_dead_ct_worker_func 6.12 to 6.18"),
    ),
    *_rows("flush-stuck", _QUEUE, hang=True)(
        ("TLB invalidation response timed out for seqno %u",
         "gt/uc/intel_guc_submission.c guc_send_invalidate_tlb 6.12 to 6.18"),
    ),
    *_rows("reset-failed", _LOST)(
        ("GPU reset not supported", "gt/intel_reset.c intel_gt_reset 5.10 to 6.18"),
        ("Failed to reset chip", "gt/intel_reset.c intel_gt_reset 5.10 to 6.18"),
        ("Failed to initialise HW following reset (%d)", "gt/intel_reset.c intel_gt_reset 5.10 to 6.18"),
        ("%s timed out, cancelling all in-flight rendering.", "gt/intel_reset.c intel_wedge_me 5.10 to 6.18"),
    ),
    *_rows("gpu-lost", _LOST)(
        ("Failed to initialize GPU, declaring it wedged!", "gt/intel_gt_pm.c intel_gt_resume 6.12 to 6.18"),
        ("Failed to re-initialize GPU[%u], declaring it wedged!",
         "gem/i915_gem_pm.c i915_gem_resume 6.12 to 6.18"),
        ("Lost access to MMIO BAR; all registers now read back as 0xFFFFFFFF!",
         "intel_uncore.c fpga_check_for_unclaimed_mmio 6.1 to 6.18"),
    ),
    *_rows("job-timeout", _QUEUE, hang=True)(
        ("Fence expiration time out i915-%s:%s:%llx!",
         "gt/intel_gt_requests.c intel_gt_watchdog_work 6.1 to 6.18"),
    ),
    *_rows("job-timeout", _QUEUE, hang=True, consequence=True)(
        ("Asynchronous wait on fence %s:%s:%llx timed out (hint:%ps)",
         "i915_sw_fence.c timer_i915_sw_fence_wake 5.10 to 6.18"),
    ),
)
# fmt: on
