"""The state of sequences: what their next requests start from, within bounds. No I/O and no clock.

A sequence belongs to the user that began it. Its tensors are those of its last answered request: one that
fails leaves them as they were. Times are seconds on one monotonic clock that the caller passes in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from honed.daemon.settings.schema import setting
from honed.daemon.store.state_pairs import StatePair
from honed.protocol.errors import ResourceExhausted, SequenceLost

_REMEMBERED = 1000  # sequences that are gone, to say why
_SHOWN = 80  # letters of a sequence's name in messages


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSettings:
    """The [sequences] table.

    idle_seconds: a sequence without a request for so long is forgotten.
    max_per_model: sequences of one user and model at the same time.
    max_mib: state of all sequences of one user.
    """

    idle_seconds: float = setting(300.0, unit="s", minimum=0.1)
    max_per_model: int = setting(64)
    max_mib: int = setting(64, unit="MiB")


class SequenceKey(NamedTuple):
    """Tells a sequence from others: those of other users may have the same name."""

    user: int
    model: str
    name: int | str

    @property
    def shown(self) -> str:
        """For messages."""
        name = self.name if isinstance(self.name, int) else repr(self.name[:_SHOWN])
        return f"sequence {name} of model {self.model!r}"


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A state tensor as it travels, row-major."""

    shape: tuple[int, ...]
    data: bytes


@dataclass(slots=True, kw_only=True)
class HeldSequence:
    """One sequence. `source` is the model it was begun with, which may be replaced under its name.

    `tensors` are by input; `busy` while a request is under way.
    """

    key: SequenceKey
    source: str
    pairs: tuple[StatePair, ...]
    used: float
    tensors: dict[str, StateTensor] = field(default_factory=dict)
    busy: bool = True

    @property
    def nbytes(self) -> int:
        """Of its state."""
        return sum(len(tensor.data) for tensor in self.tensors.values())


class Sequences:
    """All sequences. One request of each at a time: begin or resume, then keep or fail; end at any time."""

    def __init__(self, settings: SequenceSettings) -> None:
        self.settings = settings
        self._all: dict[SequenceKey, HeldSequence] = {}
        self._gone: dict[SequenceKey, str] = {}  # why

    def __len__(self) -> int:
        return len(self._all)

    @property
    def nbytes(self) -> int:
        """Of all state."""
        return sum(sequence.nbytes for sequence in self._all.values())

    def begin(self, key: SequenceKey, source: str, pairs: tuple[StatePair, ...], now: float) -> HeldSequence:
        """A new sequence, in the place of one of that name.

        Raises ResourceExhausted where its user has as many of the model.
        """
        self.expire(now)
        self._all.pop(key, None)
        mine = sum((other.user, other.model) == (key.user, key.model) for other in self._all)
        if mine >= self.settings.max_per_model:
            raise ResourceExhausted(
                f"{mine} sequences of model {key.model!r} are under way already; end one of them, or raise "
                "max_per_model of [sequences] in the configuration"
            )
        self._gone.pop(key, None)
        sequence = self._all[key] = HeldSequence(key=key, source=source, pairs=pairs, used=now)
        return sequence

    def resume(self, key: SequenceKey, source: str, now: float) -> HeldSequence:
        """The sequence for its next request; raises SequenceLost where there is none."""
        sequence = self._all.get(key)
        if sequence is not None and (sequence.source != source or self._idle(sequence, now)):
            self.drop(key, "its model was replaced" if sequence.source != source else self._why_idle)
            sequence = None
        if sequence is None:
            why = self._gone.get(key, "it was never begun, has ended, or the service was started anew since")
            raise SequenceLost(f"{key.shown} is not known: {why}; begin it with sequence_start")
        sequence.busy, sequence.used = True, now
        return sequence

    def keep(self, sequence: HeldSequence, tensors: Mapping[str, StateTensor], now: float) -> None:
        """A request was computed: the next one starts from `tensors`.

        Raises ResourceExhausted where that is more than the user's share; they are then as before.
        """
        if self._all.get(sequence.key) is not sequence:
            return  # it was ended meanwhile
        user, more = sequence.key.user, sum(len(tensor.data) for tensor in tensors.values())
        others = (s for k, s in self._all.items() if k.user == user and s is not sequence)
        if sum(s.nbytes for s in others) + more > self.settings.max_mib << 20:
            raise ResourceExhausted(
                f"the state of {sequence.key.shown} is {more} bytes, with which the sequences of user {user} "
                f"hold more than {self.settings.max_mib} MiB; end some, or raise max_mib of [sequences]"
            )
        sequence.tensors, sequence.used, sequence.busy = dict(tensors), now, False

    def failed(self, sequence: HeldSequence, *, first: bool) -> None:
        """A request was not answered: the next starts from where it did; there is none after the first."""
        sequence.busy = False
        if first and self._all.get(sequence.key) is sequence:
            self.drop(sequence.key, "its first request failed")

    def drop(self, key: SequenceKey, why: str = "it has ended") -> None:
        """Forget a sequence, if there is one, and remember why."""
        if self._all.pop(key, None) is not None:
            self._gone[key] = why
            while len(self._gone) > _REMEMBERED:
                del self._gone[next(iter(self._gone))]

    def expire(self, now: float) -> None:
        """Forget what nobody asked for."""
        for key in [key for key, sequence in self._all.items() if self._idle(sequence, now)]:
            self.drop(key, self._why_idle)

    def _idle(self, sequence: HeldSequence, now: float) -> bool:
        return not sequence.busy and now - sequence.used >= self.settings.idle_seconds

    @property
    def _why_idle(self) -> str:
        return f"it had no request for {self.settings.idle_seconds:g} s (idle_seconds of [sequences])"

    def forget_model(self, model: str) -> None:
        """A model was removed."""
        for key in [key for key in self._all if key.model == model]:
            self.drop(key, "its model was removed")

    def next_end(self) -> float | None:
        """When the next sequence is to be forgotten; None where all are busy, or none is there."""
        ends = [s.used + self.settings.idle_seconds for s in self._all.values() if not s.busy]
        return min(ends, default=None)
