"""What one measurement may use."""

from __future__ import annotations

from dataclasses import dataclass

# Cores from which on what runs on one of them disturbs a device that is the processor little.
SPARE_CORES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureLimits:
    """Bounds of one measurement; seconds are wall time."""

    start_seconds: float = 60.0  # to open the device, build the yardstick and load a workload
    build_seconds: float = 20.0  # of the driver's compiler, for one candidate
    # One run of all launches. Well below what kernel drivers grant a healthy kernel (panfrost 0.5 s a job,
    # kbase and panthor 2.6 s without progress); a candidate this slow is of no use anyway.
    run_seconds: float = 2.0
    host_seconds: float = 30.0  # to move and compare the tensors of one run
    memory_bytes: int = 2 << 30  # all buffers of a candidate; also what the child may take beyond its start
    builder_bytes: int = 512 << 20  # what a building child may take beyond its start
    timing_seconds: float = 0.12  # after which no more repeats are begun
    warm_seconds: float = 0.1  # at most, until the device's clock is up
    precision: float = 0.03  # half the width of the confidence interval, of the median
    max_repeats: int = 40
    give_up_beyond: float = 2.5  # times the best known time: slower than that is timed few times only
    few_repeats: int = 2  # for a candidate that is clearly slow
    max_queued: int = 256  # launches per finish, where the device's profile has no cap


# Under a lease a request may be waiting: a candidate is bounded more tightly than one of `hone tune`, so that
# the device is left within CANDIDATE_SECONDS (building, running on three inputs, timing) when it is revoked.
LEASED = MeasureLimits(build_seconds=5.0, run_seconds=0.7)
CANDIDATE_SECONDS = 10.0
