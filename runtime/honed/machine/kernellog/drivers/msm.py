"""Records of msm, the open driver of Adreno GPUs. Hangs name the task but not its id."""

from __future__ import annotations

from typing import Final

from honed.machine.kernellog.fault import Severity
from honed.machine.kernellog.pattern import SourceTree

OPENINGS: Final = ("*** gpu fault: ", "*** fault: ")

_QUEUE, _CONTEXT, _RESET, _LOST = Severity.QUEUE, Severity.CONTEXT, Severity.RESET, Severity.DEVICE_LOST

_rows = SourceTree("drivers/gpu/drm/msm/", "Linux ").rows

# fmt: off
PATTERNS: Final = (
    *_rows("hang", _QUEUE, hang=True)(
        ("%s: hangcheck detected gpu lockup rb %d!", "msm_gpu.c hangcheck_handler 5.10 to 6.18", "- slot"),
    ),
    *_rows("reset", _RESET, hang=True)(
        ("%s: hangcheck recover!", "msm_gpu.c recover_worker 5.10 to 6.18"),
    ),
    *_rows("owner", _QUEUE, consequence=True)(
        ("%s: offending task: %s (%s)", "msm_gpu.c recover_worker 5.10 to 6.18", "- comm"),
        ("%s: offending task: unknown", "msm_gpu.c recover_worker 6.12 to 6.18"),
    ),
    *_rows("hang", _RESET, hang=True)(
        ("gpu fault ring %d fence %x status %8.8X",
         "adreno/a6xx_gpu.c a6xx_fault_detect_irq 5.10 to 6.18; adreno/a5xx_gpu.c "
         "a5xx_fault_detect_irq 5.10 to 6.18",
         "slot"),
        ("%s: preemption timed out",
         "adreno/a6xx_preempt.c a6xx_preempt_timer 6.18; adreno/a5xx_preempt.c a5xx_preempt_timer "
         "5.10 to 6.18"),
    ),
    *_rows("job-fault", _RESET)(
        ("!!!!!!!!!!!!!!!! preemption faulted !!!!!!!!!!!!!! irq",
         "adreno/a6xx_preempt.c a6xx_preempt_irq 6.18"),
    ),
    *_rows("hang", _QUEUE, hang=True)(
        ("%s: timeout waiting for GPU to idle!", "adreno/a4xx_gpu.c a4xx_idle 5.10 to 6.18"),
        ("%s: %ps: timeout waiting for GPU to idle: status %8.8X",
         "adreno/a6xx_gpu.c a6xx_idle 5.10 to 6.18; adreno/a5xx_gpu.c a5xx_idle 5.10 to 6.18"),
        ("%s: timeout waiting to drain ringbuffer %d",
         "adreno/adreno_gpu.c adreno_idle 5.10 to 6.18", "- slot"),
        ("timeout waiting for space in ringbuffer %d",
         "adreno/adreno_gpu.c adreno_wait_ring 5.10 to 6.18", "slot"),
    ),
    *_rows("page-fault", _CONTEXT)(
        ("MMU_PAGE_FAULT: %08X", "adreno/a2xx_gpu.c a2xx_irq 5.10 to 6.18", "address"),
    ),
    *_rows("job-error", _QUEUE)(
        ("CP | opcode error | possible opcode=0x%8.8X",
         "adreno/a6xx_gpu.c a6xx_cp_hw_err_irq 5.10 to 6.18; adreno/a5xx_gpu.c a5xx_cp_err_irq 5.10 to 6.18"),
        ("CP illegal instruction error", "adreno/a6xx_gpu.c a6xx_cp_hw_err_irq 5.10 to 6.18"),
        ("CP | protected mode error | %s | addr=0x%8.8X",
         "adreno/a6xx_gpu.c a6xx_cp_hw_err_irq 5.10 to 6.18; adreno/a5xx_gpu.c a5xx_cp_err_irq 5.10 to 6.18",
         "- address"),
        ("CP | HW fault | status=0x%8.8X",
         "adreno/a6xx_gpu.c a6xx_cp_hw_err_irq 5.10 to 6.18; adreno/a5xx_gpu.c a5xx_cp_err_irq 5.10 to 6.18"),
        ("CP | DMA error", "adreno/a5xx_gpu.c a5xx_cp_err_irq 5.10 to 6.18"),
        ("CP | AHB error | addr=%X access=%s error=%d",
         "adreno/a5xx_gpu.c a5xx_cp_err_irq 5.10 to 6.18", "address access"),
        ("CP | AHB bus error", "adreno/a6xx_gpu.c a6xx_irq 5.10 to 6.18"),
        ("CP AHB error interrupt", "adreno/a6xx_gpu.c a6xx_cp_hw_err_irq 5.10 to 6.18"),
        ("CP ucode error interrupt", "adreno/a6xx_gpu.c a6xx_cp_hw_err_irq 5.10 to 6.18"),
        ("CP VSD decoder parity error", "adreno/a6xx_gpu.c a6xx_cp_hw_err_irq 5.10 to 6.18"),
    ),
    *_rows("bus-fault", _QUEUE)(
        ("RBBM | AHB bus error | %s | addr=0x%X",
         "adreno/a5xx_gpu.c a5xx_rbbm_err_irq 5.10 to 6.18", "access address"),
        ("RBBM | AHB transfer timeout", "adreno/a5xx_gpu.c a5xx_rbbm_err_irq 5.10 to 6.18"),
        ("RBBM | ATB ASYNC overflow",
         "adreno/a6xx_gpu.c a6xx_irq 5.10 to 6.18; adreno/a5xx_gpu.c a5xx_rbbm_err_irq 5.10 to 6.18"),
        ("RBBM | ATB bus overflow",
         "adreno/a6xx_gpu.c a6xx_irq 5.10 to 6.18; adreno/a5xx_gpu.c a5xx_rbbm_err_irq 5.10 to 6.18"),
    ),
    *_rows("job-error", _QUEUE)(
        ("UCHE | Out of bounds access | addr=0x%llX",
         "adreno/a5xx_gpu.c a5xx_uche_err_irq 5.10 to 6.18", "address"),
        ("UCHE | Out of bounds access",
         "adreno/a6xx_gpu.c a6xx_irq 5.10 to 6.18; adreno/a5xx_gpu.c a5xx_uche_err_irq 5.10 to 6.18"),
    ),
    *_rows("firmware-timeout", _RESET, hang=True)(
        ("GMU watchdog expired", "adreno/a6xx_gmu.c a6xx_gmu_irq 5.10 to 6.18"),
        ("Timeout waiting for GMU OOB set %s: 0x%x", "adreno/a6xx_gmu.c a6xx_gmu_set_oob 5.10 to 6.18"),
        ("Message %s id %d timed out waiting for response",
         "adreno/a6xx_hfi.c a6xx_hfi_wait_for_msg_interrupt 5.10 to 6.18"),
    ),
    *_rows("firmware-fault", _RESET)(
        ("GMU AHB bus error", "adreno/a6xx_gmu.c a6xx_gmu_irq 5.10 to 6.18"),
        ("GMU fence error: 0x%x", "adreno/a6xx_gmu.c a6xx_gmu_irq 5.10 to 6.18"),
        ("GMU firmware fault", "adreno/a6xx_gmu.c a6xx_hfi_irq 5.10 to 6.18"),
    ),
    *_rows("firmware-timeout", _RESET, hang=True)(
        ("GMU firmware initialization timed out", "adreno/a6xx_gmu.c a6xx_gmu_start 5.10 to 6.18"),
    ),
    *_rows("power-stuck", _RESET)(
        ("cx gdsc didn't collapse", "adreno/a6xx_gpu.c a6xx_recover 6.12 to 6.18"),
        ("GPU RSC sequence stuck while waking up the GPU", "adreno/a6xx_gmu.c a6xx_rpmh_start 5.10 to 6.18"),
    ),
    *_rows("reset-failed", _LOST)(
        ("gpu hw init failed: %d",
         "adreno/adreno_gpu.c adreno_recover 5.10 to 6.18; adreno/adreno_device.c adreno_load_gpu "
         "5.10 to 6.18"),
    ),
    *_rows("page-fault", _CONTEXT)(
        ("*** gpu fault: ttbr0=%.16llx iova=%.16lx dir=%s type=%s source=%s",
         "adreno/adreno_gpu.c adreno_fault_handler 6.12 to 6.18; adreno/a6xx_gpu.c a6xx_fault_handler 6.1",
         "- address access"),
        ("*** gpu fault: iova=%.16lx flags=%d",
         "adreno/adreno_gpu.c adreno_fault_handler 6.12 to 6.18; adreno/a6xx_gpu.c a6xx_fault_handler 6.1",
         "address"),
        ("*** gpu fault: iova=%08lx, flags=%d",
         "adreno/a5xx_gpu.c a5xx_fault_handler 5.10 to 6.1; adreno/a6xx_gpu.c a6xx_fault_handler 5.10",
         "address"),
        ("*** fault: iova=%16lx, flags=%d", "msm_iommu.c msm_gpu_fault_handler 5.10 to 6.18", "address"),
    ),
)
# fmt: on
