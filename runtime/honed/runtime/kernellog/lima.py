"""Records of lima, the open driver of Mali-400 and Mali-450. None names a process.

The processor (`gp`, `pp0`, ...) is first; before Linux 6.12 it was written out in the message.
"""

from __future__ import annotations

from typing import Final

from .fault import Severity
from .pattern import Pattern, in_file

_LIMA_PP: Final = in_file("drivers/gpu/drm/lima/lima_pp.c", "Linux ")
_LIMA_GP: Final = in_file("drivers/gpu/drm/lima/lima_gp.c", "Linux ")
_LIMA_MMU: Final = in_file("drivers/gpu/drm/lima/lima_mmu.c", "Linux ")
_LIMA_SCHED: Final = in_file("drivers/gpu/drm/lima/lima_sched.c", "Linux ")
_LIMA_L2_CACHE: Final = in_file("drivers/gpu/drm/lima/lima_l2_cache.c", "Linux ")
_LIMA_PMU: Final = in_file("drivers/gpu/drm/lima/lima_pmu.c", "Linux ")

_QUEUE, _CONTEXT, _RESET, _LOST = Severity.QUEUE, Severity.CONTEXT, Severity.RESET, Severity.DEVICE_LOST

PATTERNS: Final = (
    Pattern(
        "%s error irq state=%x status=%x",
        _QUEUE,
        "job-error",
        _LIMA_PP("lima_pp_handle_irq", "5.10 to 6.18") + _LIMA_GP("lima_gp_irq_handler", "5.10 to 6.18"),
    ),
    Pattern(
        "%s task error int_state=%x status=%x",
        _QUEUE,
        "job-fault",
        _LIMA_GP("lima_gp_task_error", "5.10 to 6.18"),
    ),
    Pattern(
        "%s task error %d int_state=%x status=%x",
        _QUEUE,
        "job-fault",
        _LIMA_PP("lima_pp_task_error", "5.10 to 6.18"),
    ),
    Pattern(
        "%s page fault at 0x%x from bus id %d of type %s",
        _CONTEXT,
        "page-fault",
        _LIMA_MMU("lima_mmu_irq_handler", "5.10 to 6.18"),
        fields=(None, "address", None, "access"),
    ),
    Pattern("%s irq bus error", _CONTEXT, "bus-fault", _LIMA_MMU("lima_mmu_irq_handler", "6.12 to 6.18")),
    Pattern(
        "%s job timeout",
        _RESET,
        "job-timeout",
        _LIMA_SCHED("lima_sched_timedout_job", "5.10 to 6.18"),
        hang=True,
    ),
    Pattern(
        "%s soft reset time out",
        _RESET,
        "soft-reset-failed",
        _LIMA_GP("lima_gp_soft_reset_async_wait", "5.10 to 6.18"),
    ),
    Pattern(
        "%s reset time out",
        _RESET,
        "soft-reset-failed",
        _LIMA_PP("lima_pp_soft_reset_async_wait_one", "5.10 to 6.18"),
    ),
    Pattern(
        "%s bus stop timeout",
        _RESET,
        "soft-reset-failed",
        _LIMA_PP("lima_pp_hard_reset", "6.12 to 6.18") + _LIMA_GP("lima_gp_hard_reset", "5.10 to 6.18"),
    ),
    Pattern(
        "%s hard reset timeout",
        _LOST,
        "reset-failed",
        _LIMA_PP("lima_pp_hard_reset", "5.10 to 6.18") + _LIMA_GP("lima_gp_hard_reset", "5.10 to 6.18"),
    ),
    Pattern("%s command %x timeout", _RESET, "mmu-stuck", _LIMA_MMU("lima_mmu_send_command", "5.10 to 6.18")),
    Pattern(
        "%s wait command timeout",
        _RESET,
        "flush-stuck",
        _LIMA_L2_CACHE("lima_l2_cache_wait_idle", "5.10 to 6.18"),
    ),
    Pattern("%s timeout wait pmu cmd", _RESET, "power-stuck", _LIMA_PMU("lima_pmu_wait_cmd", "6.12 to 6.18")),
    Pattern("timeout wait pmu cmd", _RESET, "power-stuck", _LIMA_PMU("lima_pmu_wait_cmd", "5.10 to 6.1")),
)
