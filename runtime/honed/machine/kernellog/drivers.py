"""Records of all drivers but kbase: the open ones of boards' GPUs, Rockchip's NPU, and PCs' GPUs.

Of a PC's GPU it is enough to know that it hung, was reset or was lost, and to which process that happened:
honed serves boards.
"""

from __future__ import annotations

from typing import Final

from honed.machine.kernellog.fault import (
    UNRECOVERABLE,
    Driver,
    Pattern,
    RecordTable,
    Severity,
    SourceTree,
)

_QUEUE, _CONTEXT, _RESET, _LOST = Severity.QUEUE, Severity.CONTEXT, Severity.RESET, Severity.DEVICE_LOST
_FATAL_CODES = {UNRECOVERABLE: _RESET}

# fmt: off
# panthor, the open driver of command-stream Mali GPUs. Newer kernels write the process
# (`CS_FATAL: pid=..., comm=...`) in a record of its own just before.
_panthor = SourceTree("drivers/gpu/drm/panthor/", "Linux ").rows
_PANTHOR_ROWS = (
    *_panthor("cs-fatal", _QUEUE, by_code=_FATAL_CODES)(
        ("CSG slot %d CS slot: %d\nCS_FATAL.EXCEPTION_TYPE: 0x%x (%s)",
         "panthor_sched.c cs_slot_process_fatal_event_locked 6.12 to 7.3", "slot stream code name"),
    ),
    *_panthor("cs-fault", _QUEUE)(
        ("CSG slot %d CS slot: %d\nCS_FAULT.EXCEPTION_TYPE: 0x%x (%s)",
         "panthor_sched.c cs_slot_process_fault_event_locked 6.12 to 7.3", "slot stream code name"),
    ),
    *_panthor("cs-fatal", _QUEUE, announces=True)(
        ("CS_FATAL: pid=%d, comm=%s",
         "panthor_sched.c cs_slot_process_fatal_event_locked 6.18 to 7.3", "tgid comm"),
    ),
    *_panthor("cs-fault", _QUEUE, announces=True)(
        ("CS_FAULT: pid=%d, comm=%s",
         "panthor_sched.c cs_slot_process_fault_event_locked 6.18 to 7.3", "tgid comm"),
    ),
    *_panthor("progress-timeout", _QUEUE, hang=True, announces=True)(
        ("CSG_PROGRESS_TIMER_EVENT: pid=%d, comm=%s",
         "panthor_sched.c csg_slot_process_progress_timer_event_locked 6.18 to 7.3", "tgid comm"),
    ),
    *_panthor("progress-timeout", _QUEUE, hang=True)(
        ("CSG slot %d progress timeout",
         "panthor_sched.c csg_slot_process_progress_timer_event_locked 6.12 to 7.3", "slot"),
    ),
    *_panthor("job-timeout", _QUEUE, hang=True)(
        ("job timeout: pid=%d, comm=%s, seqno=%llu",
         "panthor_sched.c queue_timedout_job 6.18 to 7.3", "tgid comm"),
        ("job timeout", "panthor_sched.c queue_timedout_job 6.12"),
    ),
    *_panthor("tiler-out-of-memory", _QUEUE)(
        ("Failed to extend the tiler heap", "panthor_sched.c group_process_tiler_oom 6.12 to 7.3"),
    ),
    *_panthor("suspension-timeout", _QUEUE, hang=True)(
        ("CSG suspend failed, escalating to termination",
         "panthor_sched.c panthor_sched_suspend 6.12 to 7.3"),
    ),
    *_panthor("group-timeout", _RESET, hang=True)(
        ("CSG %d update request timedout", "panthor_sched.c csgs_upd_ctx_apply_locked 6.12 to 7.3", "slot"),
    ),
    *_panthor("page-fault", _CONTEXT)(
        ("Unhandled Page fault in AS%d at VA 0x%016llX",
         "panthor_mmu.c panthor_mmu_irq_handler 6.12 to 7.3", "address_space address"),
    ),
    *_panthor("gpu-fault", _CONTEXT)(
        ("GPU Fault 0x%08x (%s) at 0x%016llx",
         "panthor_gpu.c panthor_gpu_irq_handler 6.12 to 7.3", "status name address"),
        ("GPU Fault in protected mode", "panthor_gpu.c panthor_gpu_irq_handler 6.12 to 7.3"),
    ),
    *_panthor("mmu-stuck", _RESET)(
        ("AS_ACTIVE bit stuck", "panthor_mmu.c wait_ready 6.12 to 7.3"),
    ),
    *_panthor("flush-stuck", _RESET)(
        ("Flush caches timeout", "panthor_gpu.c panthor_gpu_flush_caches 6.12 to 7.3"),
    ),
    *_panthor("power-stuck", _RESET)(
        ("timeout waiting on %s:%llx power transition",
         "panthor_gpu.c panthor_gpu_block_power_on 6.12 to 7.3"),
        ("timeout waiting on %s:%llx readiness", "panthor_gpu.c panthor_gpu_block_power_on 6.12 to 7.3"),
        ("timeout waiting on %s power domain transition",
         "panthor_pwr.c panthor_pwr_domain_transition 6.18 to 7.3"),
        ("Retracting %s domain timeout", "panthor_pwr.c retract_domain 6.18 to 7.3"),
        ("Delegating %s domain timeout", "panthor_pwr.c delegate_domain 6.18 to 7.3"),
        ("%s domain power in transition, pwrtrans(0x%llx)",
         "panthor_pwr.c panthor_pwr_domain_wait_transition 7.2 to 7.3"),
        ("%s domain retract pending", "panthor_pwr.c retract_domain 7.2 to 7.3"),
    ),
    *_panthor("firmware-fault", _RESET)(
        ("Invalid state on CSG %d (state=%d)",
         "panthor_sched.c csg_slot_sync_state_locked 7.2 to 7.3", "slot"),
    ),
    *_panthor("firmware-timeout", _RESET, hang=True)(
        ("FW ping timeout, scheduling a reset", "panthor_fw.c panthor_fw_ping_work 6.12 to 7.3"),
        ("Timed out waiting for MCU to halt", "panthor_fw.c panthor_fw_wait_mcu_halted 6.18 to 7.3"),
        ("Failed to stop MCU", "panthor_fw.c panthor_fw_stop 6.12 to 7.3"),
    ),
    *_panthor("soft-reset-failed", _RESET)(
        ("Soft reset timeout", "panthor_gpu.c panthor_gpu_soft_reset 6.12 to 7.3"),
        ("RESET timed out (0x%x)", "panthor_pwr.c panthor_pwr_reset 6.18 to 7.3"),
        ("FW %s reset failed", "panthor_fw.c panthor_fw_post_reset 6.12 to 7.3"),
        ("Fast reset failed, trying a slow reset", "panthor_device.c panthor_device_resume 6.12 to 7.3"),
    ),
    *_panthor("reset-failed", _LOST)(
        ("Failed to boot MCU after reset, making device unusable.",
         "panthor_device.c panthor_device_reset_work 6.12 to 7.3"),
        ("Failed to boot MCU (status=%s)", "panthor_fw.c panthor_fw_start 6.12 to 7.3"),
    ),
)

# Driver panfrost, the open one of job-manager Mali GPUs. None names a process.
_panfrost = SourceTree("drivers/gpu/drm/panfrost/", "Linux ").rows
_PANFROST_ROWS = (
    *_panfrost("job-fault", _QUEUE)(
        ("js fault, js=%d, status=%s, head=0x%x, tail=0x%x",
         "panfrost_job.c panfrost_job_handle_err 5.10 to 7.3", "slot name"),
    ),
    *_panfrost("job-stopped", _QUEUE, hang=True)(
        ("Soft-stop failed", "panfrost_job.c panfrost_reset 6.1 to 7.3"),
    ),
    *_panfrost("job-timeout", _RESET, hang=True)(
        ("gpu sched timeout, js=%d, config=0x%x, status=0x%x",
         "panfrost_job.c panfrost_job_timedout 5.10 to 7.3", "slot"),
    ),
    *_panfrost("page-fault", _CONTEXT)(
        ("Unhandled Page fault in AS%d at VA 0x%016llX",
         "panfrost_mmu.c panfrost_mmu_irq_handler_thread 5.10 to 7.3", "address_space address"),
    ),
    *_panfrost("gpu-fault", _CONTEXT)(
        ("GPU Fault 0x%08x (%s) at 0x%016llx",
         "panfrost_gpu.c panfrost_gpu_irq_handler 5.10 to 7.3", "status name address"),
    ),
    *_panfrost("gpu-fault", _CONTEXT, consequence=True)(
        ("There were multiple GPU faults - some have not been reported",
         "panfrost_gpu.c panfrost_gpu_irq_handler 5.10 to 7.3"),
    ),
    *_panfrost("mmu-stuck", _RESET)(
        ("AS_ACTIVE bit stuck", "panfrost_mmu.c wait_ready 5.10 to 7.3"),
    ),
    *_panfrost("power-stuck", _RESET)(
        ("error powering up gpu", "panfrost_gpu.c panfrost_gpu_power_on 5.10 to 7.3"),
        ("shader power transition timeout", "panfrost_gpu.c panfrost_gpu_power_off 6.1 to 7.3"),
        ("tiler power transition timeout", "panfrost_gpu.c panfrost_gpu_power_off 6.1 to 7.3"),
        ("l2 power transition timeout", "panfrost_gpu.c panfrost_gpu_power_off 6.1 to 7.3"),
    ),
    *_panfrost("soft-reset-failed", _RESET)(
        ("gpu soft reset timed out, attempting hard reset",
         "panfrost_gpu.c panfrost_gpu_soft_reset 6.12 to 7.3"),
    ),
    *_panfrost("reset-failed", _LOST)(
        ("gpu soft reset timed out", "panfrost_gpu.c panfrost_gpu_soft_reset 5.10 to 6.1"),
        ("gpu hard reset timed out", "panfrost_gpu.c panfrost_gpu_soft_reset 6.12 to 7.3"),
    ),
)

# Driver lima, the open one of Mali-400 and Mali-450. None names a process. The processor (`gp`, `pp0`, ...)
# is first; before Linux 6.12 it was written out in the message.
_lima = SourceTree("drivers/gpu/drm/lima/", "Linux ").rows
_LIMA_ROWS = (
    *_lima("job-error", _QUEUE)(
        ("%s error irq state=%x status=%x",
         "lima_pp.c lima_pp_handle_irq 5.10 to 7.3; lima_gp.c lima_gp_irq_handler 5.10 to 7.3"),
    ),
    *_lima("job-fault", _QUEUE)(
        ("%s task error int_state=%x status=%x", "lima_gp.c lima_gp_task_error 5.10 to 7.3"),
        ("%s task error %d int_state=%x status=%x", "lima_pp.c lima_pp_task_error 5.10 to 7.3"),
    ),
    *_lima("page-fault", _CONTEXT)(
        ("%s page fault at 0x%x from bus id %d of type %s",
         "lima_mmu.c lima_mmu_irq_handler 5.10 to 7.3", "- address - access"),
    ),
    *_lima("bus-fault", _CONTEXT)(
        ("%s irq bus error", "lima_mmu.c lima_mmu_irq_handler 6.12 to 7.3"),
    ),
    *_lima("job-timeout", _RESET, hang=True)(
        ("%s job timeout", "lima_sched.c lima_sched_timedout_job 5.10 to 7.3"),
    ),
    *_lima("soft-reset-failed", _RESET)(
        ("%s soft reset time out", "lima_gp.c lima_gp_soft_reset_async_wait 5.10 to 7.3"),
        ("%s reset time out", "lima_pp.c lima_pp_soft_reset_async_wait_one 5.10 to 7.3"),
        ("%s bus stop timeout",
         "lima_pp.c lima_pp_hard_reset 6.12 to 7.3; lima_gp.c lima_gp_hard_reset 5.10 to 7.3"),
    ),
    *_lima("reset-failed", _LOST)(
        ("%s hard reset timeout",
         "lima_pp.c lima_pp_hard_reset 5.10 to 7.3; lima_gp.c lima_gp_hard_reset 5.10 to 7.3"),
    ),
    *_lima("mmu-stuck", _RESET)(
        ("%s command %x timeout", "lima_mmu.c lima_mmu_send_command 5.10 to 7.3"),
    ),
    *_lima("flush-stuck", _RESET)(
        ("%s wait command timeout", "lima_l2_cache.c lima_l2_cache_wait_idle 5.10 to 7.3"),
    ),
    *_lima("power-stuck", _RESET)(
        ("%s timeout wait pmu cmd", "lima_pmu.c lima_pmu_wait_cmd 6.12 to 7.3"),
        ("timeout wait pmu cmd", "lima_pmu.c lima_pmu_wait_cmd 5.10 to 6.1"),
    ),
)

# Driver msm, the open one of Adreno GPUs. Hangs name the task but not its id.
_msm = SourceTree("drivers/gpu/drm/msm/", "Linux ").rows
_MSM_ROWS = (
    *_msm("hang", _QUEUE, hang=True)(
        ("%s: hangcheck detected gpu lockup rb %d!", "msm_gpu.c hangcheck_handler 5.10 to 6.18", "- slot"),
    ),
    *_msm("reset", _RESET, hang=True)(
        ("%s: hangcheck recover!", "msm_gpu.c recover_worker 5.10 to 6.18"),
    ),
    *_msm("owner", _QUEUE, consequence=True)(
        ("%s: offending task: %s (%s)", "msm_gpu.c recover_worker 5.10 to 6.18", "- comm"),
        ("%s: offending task: unknown", "msm_gpu.c recover_worker 6.12 to 6.18"),
    ),
    *_msm("hang", _RESET, hang=True)(
        ("gpu fault ring %d fence %x status %8.8X",
         "adreno/a6xx_gpu.c a6xx_fault_detect_irq 5.10 to 6.18; adreno/a5xx_gpu.c "
         "a5xx_fault_detect_irq 5.10 to 6.18",
         "slot"),
        ("%s: preemption timed out",
         "adreno/a6xx_preempt.c a6xx_preempt_timer 6.18; adreno/a5xx_preempt.c a5xx_preempt_timer "
         "5.10 to 6.18"),
    ),
    *_msm("job-fault", _RESET)(
        ("!!!!!!!!!!!!!!!! preemption faulted !!!!!!!!!!!!!! irq",
         "adreno/a6xx_preempt.c a6xx_preempt_irq 6.18"),
    ),
    *_msm("hang", _QUEUE, hang=True)(
        ("%s: timeout waiting for GPU to idle!", "adreno/a4xx_gpu.c a4xx_idle 5.10 to 6.18"),
        ("%s: %ps: timeout waiting for GPU to idle: status %8.8X",
         "adreno/a6xx_gpu.c a6xx_idle 5.10 to 6.18; adreno/a5xx_gpu.c a5xx_idle 5.10 to 6.18"),
        ("%s: timeout waiting to drain ringbuffer %d",
         "adreno/adreno_gpu.c adreno_idle 5.10 to 6.18", "- slot"),
        ("timeout waiting for space in ringbuffer %d",
         "adreno/adreno_gpu.c adreno_wait_ring 5.10 to 6.18", "slot"),
    ),
    *_msm("page-fault", _CONTEXT)(
        ("MMU_PAGE_FAULT: %08X", "adreno/a2xx_gpu.c a2xx_irq 5.10 to 6.18", "address"),
    ),
    *_msm("job-error", _QUEUE)(
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
    *_msm("bus-fault", _QUEUE)(
        ("RBBM | AHB bus error | %s | addr=0x%X",
         "adreno/a5xx_gpu.c a5xx_rbbm_err_irq 5.10 to 6.18", "access address"),
        ("RBBM | AHB transfer timeout", "adreno/a5xx_gpu.c a5xx_rbbm_err_irq 5.10 to 6.18"),
        ("RBBM | ATB ASYNC overflow",
         "adreno/a6xx_gpu.c a6xx_irq 5.10 to 6.18; adreno/a5xx_gpu.c a5xx_rbbm_err_irq 5.10 to 6.18"),
        ("RBBM | ATB bus overflow",
         "adreno/a6xx_gpu.c a6xx_irq 5.10 to 6.18; adreno/a5xx_gpu.c a5xx_rbbm_err_irq 5.10 to 6.18"),
    ),
    *_msm("job-error", _QUEUE)(
        ("UCHE | Out of bounds access | addr=0x%llX",
         "adreno/a5xx_gpu.c a5xx_uche_err_irq 5.10 to 6.18", "address"),
        ("UCHE | Out of bounds access",
         "adreno/a6xx_gpu.c a6xx_irq 5.10 to 6.18; adreno/a5xx_gpu.c a5xx_uche_err_irq 5.10 to 6.18"),
    ),
    *_msm("firmware-timeout", _RESET, hang=True)(
        ("GMU watchdog expired", "adreno/a6xx_gmu.c a6xx_gmu_irq 5.10 to 6.18"),
        ("Timeout waiting for GMU OOB set %s: 0x%x", "adreno/a6xx_gmu.c a6xx_gmu_set_oob 5.10 to 6.18"),
        ("Message %s id %d timed out waiting for response",
         "adreno/a6xx_hfi.c a6xx_hfi_wait_for_msg_interrupt 5.10 to 6.18"),
    ),
    *_msm("firmware-fault", _RESET)(
        ("GMU AHB bus error", "adreno/a6xx_gmu.c a6xx_gmu_irq 5.10 to 6.18"),
        ("GMU fence error: 0x%x", "adreno/a6xx_gmu.c a6xx_gmu_irq 5.10 to 6.18"),
        ("GMU firmware fault", "adreno/a6xx_gmu.c a6xx_hfi_irq 5.10 to 6.18"),
    ),
    *_msm("firmware-timeout", _RESET, hang=True)(
        ("GMU firmware initialization timed out", "adreno/a6xx_gmu.c a6xx_gmu_start 5.10 to 6.18"),
    ),
    *_msm("power-stuck", _RESET)(
        ("cx gdsc didn't collapse", "adreno/a6xx_gpu.c a6xx_recover 6.12 to 6.18"),
        ("GPU RSC sequence stuck while waking up the GPU", "adreno/a6xx_gmu.c a6xx_rpmh_start 5.10 to 6.18"),
    ),
    *_msm("reset-failed", _LOST)(
        ("gpu hw init failed: %d",
         "adreno/adreno_gpu.c adreno_recover 5.10 to 6.18; adreno/adreno_device.c adreno_load_gpu "
         "5.10 to 6.18"),
    ),
    *_msm("page-fault", _CONTEXT)(
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

# Rockchip's NPU: rknpu is its own driver, rocket the open one. None names a process. Page faults of rocket's
# are the IOMMU driver's.
_rknpu = SourceTree("drivers/rknpu/", "rknpu ").rows
_rocket = SourceTree("drivers/accel/rocket/", "Linux ").rows
_RKNPU_ROWS = (
    *_rknpu("job-timeout", _RESET, hang=True)(
        ("job timeout, flags: %#x:", "rknpu_job.c rknpu_job_abort 0.9.8"),
    ),
    *_rknpu("job-timeout", _QUEUE, hang=True)(
        ("failed to wait job, task counter: %d, flags: %#x, ret = %d", "rknpu_job.c rknpu_job_wait 0.9.8"),
    ),
    *_rknpu("job-error", _QUEUE)(
        ("job commit failed", "rknpu_job.c rknpu_job_wait 0.9.8"),
    ),
    *_rknpu("job-error", _QUEUE, consequence=True)(
        ("job abort, flags: %#x, ret: %d", "rknpu_job.c rknpu_job_abort 0.9.8"),
    ),
    *_rknpu("job-error", _QUEUE)(
        ("invalid irq status: %#x, raw status: %#x, require mask: %#x",
         "rknpu_job.c rknpu_irq_handler 0.9.8"),
    ),
    *_rknpu("reset", _RESET)(
        ("soft reset", "rknpu_reset.c rknpu_soft_reset 0.9.8"),
    ),
    *_rknpu("reset-failed", _LOST)(
        ("failed to soft reset for rknpu: %d", "rknpu_reset.c rknpu_soft_reset 0.9.8"),
        ("failed to assert rknpu reset: %d", "rknpu_reset.c rknpu_reset_assert 0.9.8"),
        ("failed to deassert rknpu reset: %d", "rknpu_reset.c rknpu_reset_deassert 0.9.8"),
    ),
)
_ROCKET_ROWS = (
    *_rocket("job-timeout", _RESET, hang=True)(
        ("NPU job timed out", "rocket_job.c rocket_job_timedout 6.12 to 7.3"),
    ),
)
# fmt: on

PANTHOR: Final = RecordTable(
    driver=Driver.PANTHOR, words=("panthor",), functions=("panthor",), patterns=_PANTHOR_ROWS
)
PANFROST: Final = RecordTable(
    driver=Driver.PANFROST, words=("panfrost",), functions=("panfrost",), patterns=_PANFROST_ROWS
)
LIMA: Final = RecordTable(driver=Driver.LIMA, words=("lima",), functions=("lima",), patterns=_LIMA_ROWS)
MSM: Final = RecordTable(
    driver=Driver.MSM,
    words=("msm", "msm_dpu", "msm_mdp", "msm_mdss", "mdp4", "adreno"),
    functions=("msm", "adreno", "a2xx", "a3xx", "a4xx", "a5xx", "a6xx", "a8xx"),
    openings=("*** gpu fault: ", "*** fault: "),
    patterns=_MSM_ROWS,
)
ROCKET: Final = RecordTable(driver=Driver.ROCKET, words=("rocket",), patterns=_ROCKET_ROWS)
RKNPU: Final = RecordTable(
    driver=Driver.RKNPU, words=("RKNPU",), openings=("RKNPU: ",), inner="RKNPU: ", patterns=_RKNPU_ROWS
)

# PCs

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
_PC_ROWS: Final = (
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
_LOSSES: Final = "48|62|64|74|79|95|119|120|140|143|158"
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
    driver=Driver.AMDGPU, words=("amdgpu",), functions=("amdgpu",), openings=("amdgpu: ",), patterns=_PC_ROWS
)
I915: Final = RecordTable(driver=Driver.I915, words=("i915",), functions=("i915", "intel"), patterns=_PC_ROWS)
XE: Final = RecordTable(driver=Driver.XE, words=("xe",), functions=("xe",), patterns=_PC_ROWS)
NVIDIA: Final = RecordTable(
    driver=Driver.NVIDIA,
    openings=("NVRM: Xid (PCI:", "NVRM: GPU "),
    patterns=(
        _xids(Severity.DEVICE_LOST, _LOSSES),
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
