"""The TVM target of a device profile."""

from __future__ import annotations

from tvm.target import Target

from honed.machine.profile import DeviceProfile


def target_for(profile: DeviceProfile) -> Target:
    """An OpenCL target with the profile's limits, and an LLVM host that nothing is generated for.

    `thread_warp_size` is 1 because the generator takes the lanes of a wider warp to run in step and leaves
    out or misplaces barriers, which OpenCL does not allow (facts: Apache TVM 0.27, LowerThreadAllreduce).
    """
    threads = min(profile.rules.max_threads, profile.limits.max_work_group_size)
    config = {
        "kind": "opencl",
        "max_num_threads": threads,
        "max_threads_per_block": threads,
        "max_shared_memory_per_block": profile.limits.local_mem_bytes,
        "thread_warp_size": 1,
    }
    if profile.family.target_device:
        config["device"] = profile.family.target_device
    return Target(config, host={"kind": "llvm"})


def alignment_of(profile: DeviceProfile) -> int:
    """Of scratch buffers and what lies in them, in bytes: as sub-buffers need, and whole cache lines (64)."""
    return max(64, profile.limits.base_align_bytes)
