"""Schedule rules per family of devices, as data, and the space of schedules that they open for a function.

`space` is the entry point of the search: it gives the schedules with open numbers that a family's rules make
of a function, and `postprocs` what the search must do to each draw from them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tvm import tirx
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from honed.machine.profile import DeviceProfile, ScheduleRules

from .budget import Budget, Size, Threads
from .gpu import GroupRules, Tiling, group_postprocs, group_space
from .parts import SketchLimits
from .sketches import attention_sketches, grouped_sketches, point_sketches, separable_sketches, sketches
from .sketches.grouped import GroupTile


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyRules:
    """What is tried on a family of devices.

    `most` is what a schedule may ask for: accumulators that spill cost more than a larger tile wins.
    """

    sketches: SketchLimits
    groups: GroupRules | None  # work-groups that share work; None where they win nothing
    most: Size
    least_threads: int  # work-items of a work-group, where there are several groups
    warp: int = 1  # work-items that run in step; groups are whole warps
    element_bits: int = 1  # that an element takes of a register at least


# Work-groups of one: a work-group is one thread of the processor. 32 vector registers of 64 bytes with
# AVX-512 hold 512 fp32 accumulators.
_CPU = FamilyRules(
    sketches=SketchLimits(
        vector_bytes=64,
        tile=16,
        vectors=4,
        unroll=8,
        tail_unroll=64,
        threads=(1,),
        row_bytes=16 << 10,
        contractions=True,
        accumulators=512,
    ),
    groups=None,
    most=Size(registers=512, statements=512),
    least_threads=1,
)
# facts: 64 registers a thread, then spills: 48 accumulators leave room for operands and addresses; Mesa gives
# a half a register of its own. Warps of 16. Local memory is ordinary memory, so nothing is copied into it (a
# reduction's partial results still travel through it). Loads up to 128 bits.
_MALI = FamilyRules(
    sketches=SketchLimits(
        vector_bytes=16,
        tile=8,
        vectors=2,
        unroll=8,
        tail_unroll=16,
        threads=(16, 32, 64, 128),
        row_bytes=1 << 10,
        contractions=True,
        accumulators=48,
    ),
    groups=GroupRules(
        tile=GroupTile(
            shared=False,
            copied=(),
            registers=8,
            threads=16,
            virtual=1,
            reduced=16,
            sliced=1 << 14,
            unroll=(0, 4, 16),
        ),
        tiling=Tiling(shared_reads=False, vector_lens=(1, 2, 4), innermost=8),
        threads=(16, 32, 64, 128, 256),
        grid=1024,
        unroll=(0, 4, 16),
    ),
    most=Size(registers=48, statements=256),
    least_threads=1,
    warp=16,
    element_bits=32,
)
# NVIDIA: 255 registers a thread; 64 to 128 accumulators leave room for operands and addresses. Groups smaller
# than a warp of 32 leave lanes idle.
_GPU = FamilyRules(
    sketches=SketchLimits(
        vector_bytes=16,
        tile=8,
        vectors=2,
        unroll=8,
        tail_unroll=64,
        threads=(32, 64, 128, 256),
        row_bytes=1 << 10,
        contractions=False,
        accumulators=160,
    ),
    groups=GroupRules(
        tile=GroupTile(
            shared=True,
            copied=(1, 2, 4),
            registers=16,
            threads=64,
            virtual=4,
            reduced=32,
            sliced=1 << 18,
            unroll=(0, 16, 64, 512),
        ),
        tiling=Tiling(shared_reads=True, vector_lens=(1, 2, 4), innermost=64),
        threads=(32, 64, 128, 256, 512, 1024),
        grid=4096,
        unroll=(0, 16, 64, 512),
    ),
    most=Size(registers=160, statements=1024),
    least_threads=32,
)
# For functions that no sketch fits where no groups are wanted: every loop nest bound to the grid.
_LAST_RESORT = GroupRules(tile=None, tiling=None, threads=(1,), grid=1 << 16, unroll=())
_MANY = 1 << 14
_FAMILIES = {"cpu": _CPU, "mali": _MALI, "gpu": _GPU}


def rules_of(rules: ScheduleRules) -> FamilyRules:
    """The family's rules, within what the profile allows."""
    family = _FAMILIES[rules.family]
    limits = family.sketches
    return replace(
        family,
        sketches=replace(
            limits,
            vector_bytes=min(limits.vector_bytes, rules.max_vector_bytes),
            unroll=min(limits.unroll, rules.max_unroll),
            threads=tuple(t for t in limits.threads if t <= rules.max_threads),
        ),
        groups=family.groups and family.groups.within(rules),
    )


def space(func: tirx.PrimFunc, target: Target, profile: DeviceProfile) -> list[Schedule]:
    """Schedules of `func` with open numbers; each stands for as many candidates as they have values.

    Candidates are draws that went through `postprocs`. Empty only for functions without blocks (opaque).
    """
    rules = rules_of(profile.rules)
    if attended := attention_space(func, profile):
        return attended
    if separated := separable_space(func, profile):
        return separated
    if transforming := point_sketches(func, rules.sketches):
        return transforming
    found = sketches(func, rules.sketches)
    if rules.groups is None:
        return found or group_space(func, target, _LAST_RESORT)
    if rules.groups.tile is not None:
        tiled = grouped_sketches(func, rules.groups.tile, rules.sketches)
        found += tiled
        if tiled and _elements(func) >= _MANY:
            return found
        if tiled:  # too few elements to keep the device busy: have groups reduce together, too
            return found + group_space(func, target, replace(rules.groups, tiling=None))
    return found + group_space(func, target, rules.groups)


def attention_space(func: tirx.PrimFunc, profile: DeviceProfile) -> list[Schedule]:
    """`space` of an attention; empty for all other functions, and where its rows do not fit."""
    rules = rules_of(profile.rules)
    tile = rules.groups.tile if rules.groups is not None else None
    return attention_sketches(func, tile, rules.sketches)


def separable_space(func: tirx.PrimFunc, profile: DeviceProfile) -> list[Schedule]:
    """`space` of two convolutions in one function; empty for all other functions."""
    return separable_sketches(func, rules_of(profile.rules).sketches)


def transforms(func: tirx.PrimFunc, profile: DeviceProfile) -> bool:
    """Whether a function transforms tiles, for which default rules write all sums out for each element."""
    return bool(point_sketches(func, rules_of(profile.rules).sketches))


def _elements(func: tirx.PrimFunc) -> int:
    """Of the function's last output."""
    return math.prod(int(extent) for extent in func.params[-1].shape)


def postprocs(profile: DeviceProfile) -> list[ms.Postproc]:
    """What every draw from the profile's spaces goes through, in order; new objects for each search."""
    found = completing(profile)
    if rules_of(profile.rules).groups is not None:
        found.append(ms.postproc.VerifyGPUCode())
    return found


def completing(profile: DeviceProfile) -> list[ms.Postproc]:
    """`postprocs` without the last, which lowers the draw to check what lowering it checks again."""
    groups = rules_of(profile.rules).groups
    return [budget(profile), *(group_postprocs(groups) if groups is not None else [])]


def budget(profile: DeviceProfile) -> Budget:
    """What refuses draws that the profile's devices would run badly."""
    rules = rules_of(profile.rules)
    threads = Threads(least=rules.least_threads, most=profile.rules.max_threads, warp=rules.warp)
    return Budget(rules.most, threads, rules.element_bits)
