"""Records of i915, Intel's driver for GPUs before Xe2.

The process is the one that made the context: a thread's id.
"""

from __future__ import annotations

from typing import Final

from .fault import Severity
from .pattern import Pattern, in_file

_I915_GPU_ERROR: Final = in_file("drivers/gpu/drm/i915/i915_gpu_error.c", "Linux ")
_INTEL_RESET: Final = in_file("drivers/gpu/drm/i915/gt/intel_reset.c", "Linux ")
_INTEL_GUC_SUBMISSION: Final = in_file("drivers/gpu/drm/i915/gt/uc/intel_guc_submission.c", "Linux ")
_INTEL_UC: Final = in_file("drivers/gpu/drm/i915/gt/uc/intel_uc.c", "Linux ")
_INTEL_GUC: Final = in_file("drivers/gpu/drm/i915/gt/uc/intel_guc.c", "Linux ")
_INTEL_GUC_CT: Final = in_file("drivers/gpu/drm/i915/gt/uc/intel_guc_ct.c", "Linux ")
_INTEL_GT_PM: Final = in_file("drivers/gpu/drm/i915/gt/intel_gt_pm.c", "Linux ")
_I915_GEM_PM: Final = in_file("drivers/gpu/drm/i915/gem/i915_gem_pm.c", "Linux ")
_INTEL_UNCORE: Final = in_file("drivers/gpu/drm/i915/intel_uncore.c", "Linux ")
_INTEL_GT_REQUESTS: Final = in_file("drivers/gpu/drm/i915/gt/intel_gt_requests.c", "Linux ")
_I915_SW_FENCE: Final = in_file("drivers/gpu/drm/i915/i915_sw_fence.c", "Linux ")

OPENINGS: Final = ("Fence expiration time out i915-", "Asynchronous wait on fence ")

_QUEUE, _CONTEXT, _RESET, _LOST = Severity.QUEUE, Severity.CONTEXT, Severity.RESET, Severity.DEVICE_LOST

PATTERNS: Final = (
    Pattern(
        "GPU HANG: ecode %d:%x:%08x, in %s [%d]",
        _QUEUE,
        "hang",
        _I915_GPU_ERROR("error_msg", "5.10 to 6.18"),
        fields=(None, None, None, "comm", "tid"),
        hang=True,
    ),
    Pattern(
        "GPU HANG: ecode %d:%x:%08x", _QUEUE, "hang", _I915_GPU_ERROR("error_msg", "5.10 to 6.18"), hang=True
    ),
    Pattern(
        "%s[%d] context reset due to GPU hang",
        _CONTEXT,
        "context-reset",
        _INTEL_RESET("mark_guilty", "5.10 to 6.18"),
        fields=("comm", "tid"),
        hang=True,
    ),
    Pattern(
        "Got hung context on %s with active request",
        _QUEUE,
        "hang",
        _I915_GPU_ERROR("capture_engine", "6.12 to 6.18"),
        hang=True,
    ),
    Pattern("Resetting chip for %s", _RESET, "reset", _INTEL_RESET("intel_gt_reset", "5.10 to 6.18")),
    Pattern(
        "Resetting %s for %s", _QUEUE, "engine-reset", _INTEL_RESET("__intel_engine_reset_bh", "5.10 to 6.18")
    ),
    Pattern(
        "%s reset request timed out: {request: %08x, RESET_CTL: %08x}",
        _RESET,
        "soft-reset-failed",
        _INTEL_RESET("gen8_engine_reset_prepare", "5.10 to 6.18"),
    ),
    Pattern(
        "Engine reset failed on %d:%d (%s) because 0x%08X",
        _RESET,
        "soft-reset-failed",
        _INTEL_GUC_SUBMISSION("intel_guc_engine_failure_process_msg", "6.12 to 6.18"),
    ),
    Pattern(
        "GuC engine reset request failed on %d:%d (%s) because 0x%08X",
        _RESET,
        "soft-reset-failed",
        _INTEL_GUC_SUBMISSION("intel_guc_engine_failure_process_msg", "6.1"),
    ),
    Pattern(
        "Failed to reset GuC, ret = %d",
        _RESET,
        "soft-reset-failed",
        _INTEL_UC("__intel_uc_reset_hw", "5.10 to 6.18"),
    ),
    Pattern(
        "Crash dump notification",
        _RESET,
        "firmware-fault",
        _INTEL_GUC("intel_guc_crash_process_msg", "6.12 to 6.18"),
    ),
    Pattern(
        "Exception notification",
        _RESET,
        "firmware-fault",
        _INTEL_GUC("intel_guc_crash_process_msg", "6.12 to 6.18"),
    ),
    Pattern(
        "Unknown crash notification: 0x%04X",
        _RESET,
        "firmware-fault",
        _INTEL_GUC("intel_guc_crash_process_msg", "6.12 to 6.18"),
    ),
    Pattern(
        "Received early crash dump notification!",
        _RESET,
        "firmware-fault",
        _INTEL_GUC("intel_guc_to_host_process_recv_msg", "6.12 to 6.18"),
    ),
    Pattern(
        "Received early exception notification!",
        _RESET,
        "firmware-fault",
        _INTEL_GUC("intel_guc_to_host_process_recv_msg", "6.12 to 6.18"),
    ),
    Pattern(
        "Received early GuC crash dump notification!",
        _RESET,
        "firmware-fault",
        _INTEL_GUC("intel_guc_to_host_process_recv_msg", "6.1"),
    ),
    Pattern(
        "Received early GuC exception notification!",
        _RESET,
        "firmware-fault",
        _INTEL_GUC("intel_guc_to_host_process_recv_msg", "6.1"),
    ),
    Pattern(
        "CTB is dead - reason=0x%X",
        _RESET,
        "firmware-fault",
        _INTEL_GUC_CT("ct_dead_ct_worker_func", "6.12 to 6.18"),
    ),
    Pattern(
        "TLB invalidation response timed out for seqno %u",
        _QUEUE,
        "flush-stuck",
        _INTEL_GUC_SUBMISSION("guc_send_invalidate_tlb", "6.12 to 6.18"),
        hang=True,
    ),
    Pattern("GPU reset not supported", _LOST, "reset-failed", _INTEL_RESET("intel_gt_reset", "5.10 to 6.18")),
    Pattern("Failed to reset chip", _LOST, "reset-failed", _INTEL_RESET("intel_gt_reset", "5.10 to 6.18")),
    Pattern(
        "Failed to initialise HW following reset (%d)",
        _LOST,
        "reset-failed",
        _INTEL_RESET("intel_gt_reset", "5.10 to 6.18"),
    ),
    Pattern(
        "%s timed out, cancelling all in-flight rendering.",
        _LOST,
        "reset-failed",
        _INTEL_RESET("intel_wedge_me", "5.10 to 6.18"),
    ),
    Pattern(
        "Failed to initialize GPU, declaring it wedged!",
        _LOST,
        "gpu-lost",
        _INTEL_GT_PM("intel_gt_resume", "6.12 to 6.18"),
    ),
    Pattern(
        "Failed to re-initialize GPU[%u], declaring it wedged!",
        _LOST,
        "gpu-lost",
        _I915_GEM_PM("i915_gem_resume", "6.12 to 6.18"),
    ),
    Pattern(
        "Lost access to MMIO BAR; all registers now read back as 0xFFFFFFFF!",
        _LOST,
        "gpu-lost",
        _INTEL_UNCORE("fpga_check_for_unclaimed_mmio", "6.1 to 6.18"),
    ),
    Pattern(
        "Fence expiration time out i915-%s:%s:%llx!",
        _QUEUE,
        "job-timeout",
        _INTEL_GT_REQUESTS("intel_gt_watchdog_work", "6.1 to 6.18"),
        hang=True,
    ),
    Pattern(
        "Asynchronous wait on fence %s:%s:%llx timed out (hint:%ps)",
        _QUEUE,
        "job-timeout",
        _I915_SW_FENCE("timer_i915_sw_fence_wake", "5.10 to 6.18"),
        hang=True,
        consequence=True,
    ),
)
