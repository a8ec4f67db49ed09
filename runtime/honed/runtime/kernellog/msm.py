"""Records of msm, the open driver of Adreno GPUs. Hangs name the task but not its id."""

from __future__ import annotations

from typing import Final

from .fault import Severity
from .pattern import Pattern, in_file

_MSM_GPU: Final = in_file("drivers/gpu/drm/msm/msm_gpu.c", "Linux ")
_A6XX_GPU: Final = in_file("drivers/gpu/drm/msm/adreno/a6xx_gpu.c", "Linux ")
_A5XX_GPU: Final = in_file("drivers/gpu/drm/msm/adreno/a5xx_gpu.c", "Linux ")
_A6XX_PREEMPT: Final = in_file("drivers/gpu/drm/msm/adreno/a6xx_preempt.c", "Linux ")
_A5XX_PREEMPT: Final = in_file("drivers/gpu/drm/msm/adreno/a5xx_preempt.c", "Linux ")
_A4XX_GPU: Final = in_file("drivers/gpu/drm/msm/adreno/a4xx_gpu.c", "Linux ")
_ADRENO_GPU: Final = in_file("drivers/gpu/drm/msm/adreno/adreno_gpu.c", "Linux ")
_A2XX_GPU: Final = in_file("drivers/gpu/drm/msm/adreno/a2xx_gpu.c", "Linux ")
_A6XX_GMU: Final = in_file("drivers/gpu/drm/msm/adreno/a6xx_gmu.c", "Linux ")
_A6XX_HFI: Final = in_file("drivers/gpu/drm/msm/adreno/a6xx_hfi.c", "Linux ")
_ADRENO_DEVICE: Final = in_file("drivers/gpu/drm/msm/adreno/adreno_device.c", "Linux ")
_MSM_IOMMU: Final = in_file("drivers/gpu/drm/msm/msm_iommu.c", "Linux ")

OPENINGS: Final = ("*** gpu fault: ", "*** fault: ")

_QUEUE, _CONTEXT, _RESET, _LOST = Severity.QUEUE, Severity.CONTEXT, Severity.RESET, Severity.DEVICE_LOST

PATTERNS: Final = (
    Pattern(
        "%s: hangcheck detected gpu lockup rb %d!",
        _QUEUE,
        "hang",
        _MSM_GPU("hangcheck_handler", "5.10 to 6.18"),
        fields=(None, "slot"),
        hang=True,
    ),
    Pattern("%s: hangcheck recover!", _RESET, "reset", _MSM_GPU("recover_worker", "5.10 to 6.18"), hang=True),
    Pattern(
        "%s: offending task: %s (%s)",
        _QUEUE,
        "owner",
        _MSM_GPU("recover_worker", "5.10 to 6.18"),
        fields=(None, "comm"),
        consequence=True,
    ),
    Pattern(
        "%s: offending task: unknown",
        _QUEUE,
        "owner",
        _MSM_GPU("recover_worker", "6.12 to 6.18"),
        consequence=True,
    ),
    Pattern(
        "gpu fault ring %d fence %x status %8.8X",
        _RESET,
        "hang",
        _A6XX_GPU("a6xx_fault_detect_irq", "5.10 to 6.18")
        + _A5XX_GPU("a5xx_fault_detect_irq", "5.10 to 6.18"),
        fields=("slot",),
        hang=True,
    ),
    Pattern(
        "%s: preemption timed out",
        _RESET,
        "hang",
        _A6XX_PREEMPT("a6xx_preempt_timer", "6.18") + _A5XX_PREEMPT("a5xx_preempt_timer", "5.10 to 6.18"),
        hang=True,
    ),
    Pattern(
        "!!!!!!!!!!!!!!!! preemption faulted !!!!!!!!!!!!!! irq",
        _RESET,
        "job-fault",
        _A6XX_PREEMPT("a6xx_preempt_irq", "6.18"),
    ),
    Pattern(
        "%s: timeout waiting for GPU to idle!",
        _QUEUE,
        "hang",
        _A4XX_GPU("a4xx_idle", "5.10 to 6.18"),
        hang=True,
    ),
    Pattern(
        "%s: %ps: timeout waiting for GPU to idle: status %8.8X",
        _QUEUE,
        "hang",
        _A6XX_GPU("a6xx_idle", "5.10 to 6.18") + _A5XX_GPU("a5xx_idle", "5.10 to 6.18"),
        hang=True,
    ),
    Pattern(
        "%s: timeout waiting to drain ringbuffer %d",
        _QUEUE,
        "hang",
        _ADRENO_GPU("adreno_idle", "5.10 to 6.18"),
        fields=(None, "slot"),
        hang=True,
    ),
    Pattern(
        "timeout waiting for space in ringbuffer %d",
        _QUEUE,
        "hang",
        _ADRENO_GPU("adreno_wait_ring", "5.10 to 6.18"),
        fields=("slot",),
        hang=True,
    ),
    Pattern(
        "MMU_PAGE_FAULT: %08X",
        _CONTEXT,
        "page-fault",
        _A2XX_GPU("a2xx_irq", "5.10 to 6.18"),
        fields=("address",),
    ),
    Pattern(
        "CP | opcode error | possible opcode=0x%8.8X",
        _QUEUE,
        "job-error",
        _A6XX_GPU("a6xx_cp_hw_err_irq", "5.10 to 6.18") + _A5XX_GPU("a5xx_cp_err_irq", "5.10 to 6.18"),
    ),
    Pattern(
        "CP illegal instruction error", _QUEUE, "job-error", _A6XX_GPU("a6xx_cp_hw_err_irq", "5.10 to 6.18")
    ),
    Pattern(
        "CP | protected mode error | %s | addr=0x%8.8X",
        _QUEUE,
        "job-error",
        _A6XX_GPU("a6xx_cp_hw_err_irq", "5.10 to 6.18") + _A5XX_GPU("a5xx_cp_err_irq", "5.10 to 6.18"),
        fields=(None, "address"),
    ),
    Pattern(
        "CP | HW fault | status=0x%8.8X",
        _QUEUE,
        "job-error",
        _A6XX_GPU("a6xx_cp_hw_err_irq", "5.10 to 6.18") + _A5XX_GPU("a5xx_cp_err_irq", "5.10 to 6.18"),
    ),
    Pattern("CP | DMA error", _QUEUE, "job-error", _A5XX_GPU("a5xx_cp_err_irq", "5.10 to 6.18")),
    Pattern(
        "CP | AHB error | addr=%X access=%s error=%d",
        _QUEUE,
        "job-error",
        _A5XX_GPU("a5xx_cp_err_irq", "5.10 to 6.18"),
        fields=("address", "access"),
    ),
    Pattern("CP | AHB bus error", _QUEUE, "job-error", _A6XX_GPU("a6xx_irq", "5.10 to 6.18")),
    Pattern("CP AHB error interrupt", _QUEUE, "job-error", _A6XX_GPU("a6xx_cp_hw_err_irq", "5.10 to 6.18")),
    Pattern("CP ucode error interrupt", _QUEUE, "job-error", _A6XX_GPU("a6xx_cp_hw_err_irq", "5.10 to 6.18")),
    Pattern(
        "CP VSD decoder parity error", _QUEUE, "job-error", _A6XX_GPU("a6xx_cp_hw_err_irq", "5.10 to 6.18")
    ),
    Pattern(
        "RBBM | AHB bus error | %s | addr=0x%X",
        _QUEUE,
        "bus-fault",
        _A5XX_GPU("a5xx_rbbm_err_irq", "5.10 to 6.18"),
        fields=("access", "address"),
    ),
    Pattern(
        "RBBM | AHB transfer timeout", _QUEUE, "bus-fault", _A5XX_GPU("a5xx_rbbm_err_irq", "5.10 to 6.18")
    ),
    Pattern(
        "RBBM | ATB ASYNC overflow",
        _QUEUE,
        "bus-fault",
        _A6XX_GPU("a6xx_irq", "5.10 to 6.18") + _A5XX_GPU("a5xx_rbbm_err_irq", "5.10 to 6.18"),
    ),
    Pattern(
        "RBBM | ATB bus overflow",
        _QUEUE,
        "bus-fault",
        _A6XX_GPU("a6xx_irq", "5.10 to 6.18") + _A5XX_GPU("a5xx_rbbm_err_irq", "5.10 to 6.18"),
    ),
    Pattern(
        "UCHE | Out of bounds access | addr=0x%llX",
        _QUEUE,
        "job-error",
        _A5XX_GPU("a5xx_uche_err_irq", "5.10 to 6.18"),
        fields=("address",),
    ),
    Pattern(
        "UCHE | Out of bounds access",
        _QUEUE,
        "job-error",
        _A6XX_GPU("a6xx_irq", "5.10 to 6.18") + _A5XX_GPU("a5xx_uche_err_irq", "5.10 to 6.18"),
    ),
    Pattern(
        "GMU watchdog expired",
        _RESET,
        "firmware-timeout",
        _A6XX_GMU("a6xx_gmu_irq", "5.10 to 6.18"),
        hang=True,
    ),
    Pattern(
        "Timeout waiting for GMU OOB set %s: 0x%x",
        _RESET,
        "firmware-timeout",
        _A6XX_GMU("a6xx_gmu_set_oob", "5.10 to 6.18"),
        hang=True,
    ),
    Pattern(
        "Message %s id %d timed out waiting for response",
        _RESET,
        "firmware-timeout",
        _A6XX_HFI("a6xx_hfi_wait_for_msg_interrupt", "5.10 to 6.18"),
        hang=True,
    ),
    Pattern("GMU AHB bus error", _RESET, "firmware-fault", _A6XX_GMU("a6xx_gmu_irq", "5.10 to 6.18")),
    Pattern("GMU fence error: 0x%x", _RESET, "firmware-fault", _A6XX_GMU("a6xx_gmu_irq", "5.10 to 6.18")),
    Pattern("GMU firmware fault", _RESET, "firmware-fault", _A6XX_GMU("a6xx_hfi_irq", "5.10 to 6.18")),
    Pattern(
        "GMU firmware initialization timed out",
        _RESET,
        "firmware-timeout",
        _A6XX_GMU("a6xx_gmu_start", "5.10 to 6.18"),
        hang=True,
    ),
    Pattern("cx gdsc didn't collapse", _RESET, "power-stuck", _A6XX_GPU("a6xx_recover", "6.12 to 6.18")),
    Pattern(
        "GPU RSC sequence stuck while waking up the GPU",
        _RESET,
        "power-stuck",
        _A6XX_GMU("a6xx_rpmh_start", "5.10 to 6.18"),
    ),
    Pattern(
        "gpu hw init failed: %d",
        _LOST,
        "reset-failed",
        _ADRENO_GPU("adreno_recover", "5.10 to 6.18") + _ADRENO_DEVICE("adreno_load_gpu", "5.10 to 6.18"),
    ),
    Pattern(
        "*** gpu fault: ttbr0=%.16llx iova=%.16lx dir=%s type=%s source=%s",
        _CONTEXT,
        "page-fault",
        _ADRENO_GPU("adreno_fault_handler", "6.12 to 6.18") + _A6XX_GPU("a6xx_fault_handler", "6.1"),
        fields=(None, "address", "access"),
    ),
    Pattern(
        "*** gpu fault: iova=%.16lx flags=%d",
        _CONTEXT,
        "page-fault",
        _ADRENO_GPU("adreno_fault_handler", "6.12 to 6.18") + _A6XX_GPU("a6xx_fault_handler", "6.1"),
        fields=("address",),
    ),
    Pattern(
        "*** gpu fault: iova=%08lx, flags=%d",
        _CONTEXT,
        "page-fault",
        _A5XX_GPU("a5xx_fault_handler", "5.10 to 6.1") + _A6XX_GPU("a6xx_fault_handler", "5.10"),
        fields=("address",),
    ),
    Pattern(
        "*** fault: iova=%16lx, flags=%d",
        _CONTEXT,
        "page-fault",
        _MSM_IOMMU("msm_gpu_fault_handler", "5.10 to 6.18"),
        fields=("address",),
    ),
)
