"""The records of one fault, counted once.

One bug writes three to five records: a page fault, the bus faults of the queues that ran into it, the
queues ended for it, perhaps a reset. `group` puts together what belongs together. Pure: times come in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from .fault import CS_BUS_FAULT, Driver, Fault, Severity

QUIET_S: Final = 1.0  # a record later than this after the last one begins another story
RESET_QUIET_S: Final = 5.0  # the same for resets: kbase waits up to 3 s for jobs, then 0.5 s for the GPU
LONGEST_S: Final = 15.0  # of a story; a process that faults on and on makes one after the other


@dataclass(frozen=True, slots=True, kw_only=True)
class DatedFault:
    """A fault and when the kernel wrote it, in seconds of CLOCK_MONOTONIC."""

    fault: Fault
    monotonic_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultStory:
    """All records of one fault, oldest first, and what they say together. What none says is None."""

    seen: tuple[DatedFault, ...]
    driver: Driver
    device: str | None
    severity: Severity  # of the worst record
    tgid: int | None
    tid: int | None
    context: int | None
    group: int | None

    @property
    def first_s(self) -> float:
        """When it began, seconds of CLOCK_MONOTONIC."""
        return self.seen[0].monotonic_s

    @property
    def last_s(self) -> float:
        """When its last record was written, seconds of CLOCK_MONOTONIC."""
        return self.seen[-1].monotonic_s

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The records without their times."""
        return tuple(seen.fault for seen in self.seen)

    @property
    def cause(self) -> Fault:
        """The record that tells most of what went wrong: the first that is no consequence of another."""
        return next((fault for fault in self.faults if not self.is_consequence(fault)), self.faults[0])

    def is_consequence(self, fault: Fault) -> bool:
        """Whether `fault`, one of this story's, only follows from another record of it.

        A queue's bus fault does where there is a page fault, whichever was written first: page faults are
        reported by a work queue.
        """
        paged = any(other.severity is Severity.CONTEXT for other in self.faults)
        return fault.consequence or (paged and _is_stream_bus_fault(fault))


def group(seen: Iterable[DatedFault], *, threads: Mapping[int, int] | None = None) -> list[FaultStory]:
    """One story per (process, context, queue group) and span of time, in the order in which they began.

    `threads` gives the process (tgid) of threads (tid) the caller knows, in the initial pid namespace; it
    lets a page fault, which names a thread, join the queue faults of its process where several fault at once.
    A record that names no owner joins the only story its device has at that time, or the one whose owner the
    driver announced just before; where it could belong to several it stays a story of its own.
    """
    drafts: list[_StoryDraft] = []
    growing: list[_StoryDraft] = []
    for item in sorted(seen, key=lambda one: one.monotonic_s):
        growing = [draft for draft in growing if item.monotonic_s - draft.last_s <= RESET_QUIET_S]
        draft = _home(growing, item, threads or {})
        if draft is None:
            draft = _StoryDraft()
            drafts.append(draft)
            growing.append(draft)
        draft.seen.append(item)
    return [draft.story() for draft in drafts]


class _StoryDraft:
    """A story that may still grow."""

    def __init__(self) -> None:
        self.seen: list[DatedFault] = []

    @property
    def last_s(self) -> float:
        return self.seen[-1].monotonic_s

    @property
    def device(self) -> str | None:
        """The first that a record names."""
        return next((s.fault.device for s in self.seen if s.fault.device is not None), None)

    def known(self, field: str) -> int | None:
        """What the first record that has `field` says."""
        return next((v for s in self.seen if (v := getattr(s.fault, field)) is not None), None)

    def open_for(self, item: DatedFault) -> bool:
        quiet = RESET_QUIET_S if item.fault.severity.rank >= Severity.RESET.rank else QUIET_S
        begun = self.seen[0].monotonic_s
        return item.monotonic_s - self.last_s <= quiet and item.monotonic_s - begun <= LONGEST_S

    def on_device(self, fault: Fault) -> bool:
        """Same device, or the kernel's end of the same process.

        A record that names no device may be of any of its driver's. What msm says of its GPU it says for the
        GPU, for what powers it or for the display; there is one.
        """
        mine = self.seen[0].fault
        if Driver.KERNEL in (mine.driver, fault.driver):
            return fault.tgid is not None and fault.tgid == self.known("tgid")
        device = self.device
        if mine.driver is fault.driver and (device is None or fault.device is None):
            return True
        return device == fault.device or {mine.driver, fault.driver} == {Driver.MSM}

    def agrees(self, fault: Fault, *fields: str) -> bool:
        """Neither contradicts the other in any of `fields`."""
        return all(
            (mine := self.known(field)) is None or (theirs := getattr(fault, field)) is None or mine == theirs
            for field in fields
        )

    def ends_context(self) -> bool:
        return any(s.fault.severity is Severity.CONTEXT for s in self.seen)

    def has_thread(self, tid: int, threads: Mapping[int, int]) -> bool:
        tgid = self.known("tgid")
        return self.known("tid") == tid or (tgid is not None and tgid in (tid, threads.get(tid)))

    def has_thread_of(self, tgid: int, threads: Mapping[int, int]) -> bool:
        tid = self.known("tid")
        return tid is not None and tgid in (tid, threads.get(tid))

    def story(self) -> FaultStory:
        worst = max((s.fault.severity for s in self.seen), key=lambda severity: severity.rank)
        drivers = [s.fault.driver for s in self.seen]
        return FaultStory(
            seen=tuple(self.seen),
            driver=Driver.KBASE_JM if Driver.KBASE_JM in drivers else drivers[0],
            device=self.device,
            severity=worst,
            tgid=self.known("tgid"),
            tid=self.known("tid"),
            context=self.known("context"),
            group=self.known("group"),
        )


def _home(growing: list[_StoryDraft], item: DatedFault, threads: Mapping[int, int]) -> _StoryDraft | None:
    """The story `item` belongs to, if it is there already."""
    fault = item.fault
    near = [draft for draft in growing if draft.open_for(item) and draft.on_device(fault)]
    near.sort(key=lambda draft: draft.last_s, reverse=True)
    if fault.tgid is not None:
        return _home_of_process(near, fault, fault.tgid, threads)
    if fault.tid is not None:
        return _home_of_thread(near, fault.tid, threads)
    if near and near[0].seen[-1].fault.announces:
        return near[0]
    fitting = [draft for draft in near if draft.agrees(fault, "group", "address_space")]
    latest = [draft for draft in fitting if item.monotonic_s - draft.last_s <= QUIET_S]
    return _only(latest or fitting)


def _home_of_process(
    near: list[_StoryDraft], fault: Fault, tgid: int, threads: Mapping[int, int]
) -> _StoryDraft | None:
    fitting = [draft for draft in near if draft.agrees(fault, "tgid", "context", "group")]
    named = [draft for draft in fitting if draft.known("tgid") == tgid]
    if not named and (fault.consequence or _is_stream_bus_fault(fault)):
        # A page fault ends every group of its context: those of other groups tell nothing new.
        named = [
            draft
            for draft in near
            if draft.known("tgid") == tgid and draft.agrees(fault, "context") and draft.ends_context()
        ]
    if named:
        return named[0]
    by_thread = [draft for draft in fitting if draft.has_thread_of(tgid, threads)]
    return by_thread[0] if by_thread else _only([d for d in fitting if _may_belong(d, tgid, threads)])


def _home_of_thread(near: list[_StoryDraft], tid: int, threads: Mapping[int, int]) -> _StoryDraft | None:
    mine = [draft for draft in near if draft.has_thread(tid, threads)]
    return mine[0] if mine else _only([draft for draft in near if _may_own(draft, tid, threads)])


def _may_own(draft: _StoryDraft, tid: int, threads: Mapping[int, int]) -> bool:
    """Whether nothing says that thread `tid` is another's than this story's owner."""
    if draft.known("tid") is not None:
        return False
    return draft.known("tgid") is None or tid not in threads


def _may_belong(draft: _StoryDraft, tgid: int, threads: Mapping[int, int]) -> bool:
    """Whether this story, which names no process, may be that of process `tgid`."""
    tid = draft.known("tid")
    return tid is None or threads.get(tid, tgid) == tgid


def _only(drafts: list[_StoryDraft]) -> _StoryDraft | None:
    return drafts[0] if len(drafts) == 1 else None


def _is_stream_bus_fault(fault: Fault) -> bool:
    return fault.code == CS_BUS_FAULT and fault.kind in ("cs-fault", "cs-fatal")
