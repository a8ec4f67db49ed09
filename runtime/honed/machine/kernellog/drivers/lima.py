"""Records of lima, the open driver of Mali-400 and Mali-450. None names a process.

The processor (`gp`, `pp0`, ...) is first; before Linux 6.12 it was written out in the message.
"""

from __future__ import annotations

from typing import Final

from honed.machine.kernellog.fault import Severity
from honed.machine.kernellog.pattern import SourceTree

_QUEUE, _CONTEXT, _RESET, _LOST = Severity.QUEUE, Severity.CONTEXT, Severity.RESET, Severity.DEVICE_LOST

_rows = SourceTree("drivers/gpu/drm/lima/", "Linux ").rows

# fmt: off
PATTERNS: Final = (
    *_rows("job-error", _QUEUE)(
        ("%s error irq state=%x status=%x",
         "lima_pp.c lima_pp_handle_irq 5.10 to 6.18; lima_gp.c lima_gp_irq_handler 5.10 to 6.18"),
    ),
    *_rows("job-fault", _QUEUE)(
        ("%s task error int_state=%x status=%x", "lima_gp.c lima_gp_task_error 5.10 to 6.18"),
        ("%s task error %d int_state=%x status=%x", "lima_pp.c lima_pp_task_error 5.10 to 6.18"),
    ),
    *_rows("page-fault", _CONTEXT)(
        ("%s page fault at 0x%x from bus id %d of type %s",
         "lima_mmu.c lima_mmu_irq_handler 5.10 to 6.18", "- address - access"),
    ),
    *_rows("bus-fault", _CONTEXT)(
        ("%s irq bus error", "lima_mmu.c lima_mmu_irq_handler 6.12 to 6.18"),
    ),
    *_rows("job-timeout", _RESET, hang=True)(
        ("%s job timeout", "lima_sched.c lima_sched_timedout_job 5.10 to 6.18"),
    ),
    *_rows("soft-reset-failed", _RESET)(
        ("%s soft reset time out", "lima_gp.c lima_gp_soft_reset_async_wait 5.10 to 6.18"),
        ("%s reset time out", "lima_pp.c lima_pp_soft_reset_async_wait_one 5.10 to 6.18"),
        ("%s bus stop timeout",
         "lima_pp.c lima_pp_hard_reset 6.12 to 6.18; lima_gp.c lima_gp_hard_reset 5.10 to 6.18"),
    ),
    *_rows("reset-failed", _LOST)(
        ("%s hard reset timeout",
         "lima_pp.c lima_pp_hard_reset 5.10 to 6.18; lima_gp.c lima_gp_hard_reset 5.10 to 6.18"),
    ),
    *_rows("mmu-stuck", _RESET)(
        ("%s command %x timeout", "lima_mmu.c lima_mmu_send_command 5.10 to 6.18"),
    ),
    *_rows("flush-stuck", _RESET)(
        ("%s wait command timeout", "lima_l2_cache.c lima_l2_cache_wait_idle 5.10 to 6.18"),
    ),
    *_rows("power-stuck", _RESET)(
        ("%s timeout wait pmu cmd", "lima_pmu.c lima_pmu_wait_cmd 6.12 to 6.18"),
        ("timeout wait pmu cmd", "lima_pmu.c lima_pmu_wait_cmd 5.10 to 6.1"),
    ),
)
# fmt: on
