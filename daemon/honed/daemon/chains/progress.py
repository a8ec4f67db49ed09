"""How far a chain is: which steps may run, and whose tensors nobody needs any more. No I/O."""

from __future__ import annotations

from collections.abc import Collection

from honed.protocol.chains import ChainStep

from .definition import Chain, source


class ChainProgress:
    """One run of a chain, for some of its outputs. Steps are told by their names."""

    def __init__(self, chain: Chain, wanted: Collection[str]) -> None:
        """`wanted` are outputs of the chain."""
        self._answered = {source(chain.outputs[name]) for name in wanted}
        self._steps = self._kept(chain)
        self._waiting = dict.fromkeys(step.name for step in self._steps)
        self._done: set[str] = set()
        takes = {step.name: {source(text) for text in step.inputs.values()} for step in self._steps}
        self._takes_from = {name: {of.step for of in found} - {""} for name, found in takes.items()}
        # The steps that still are to read what one gives.
        self._readers = {
            name: {reader for reader, given in self._takes_from.items() if name in given} for name in takes
        }
        self._read = {of for found in takes.values() for of in found}

    @property
    def steps(self) -> tuple[ChainStep, ...]:
        """Those that run; what nobody wants is left out."""
        return self._steps

    @property
    def finished(self) -> bool:
        """Whether all have run."""
        return len(self._done) == len(self._steps)

    def begun(self) -> list[str]:
        """The steps that may begin now; they count as begun."""
        ready = [name for name in self._waiting if self._takes_from[name] <= self._done]
        for name in ready:
            del self._waiting[name]
        return ready

    def done(self, step: str) -> list[str]:
        """A step has run; gives those whose tensors no step is to read any more, and the answer does not."""
        self._done.add(step)
        freed = []
        for name in sorted(self._takes_from[step]):
            self._readers[name].discard(step)
            if not self._readers[name] and not any(of.step == name for of in self._answered):
                freed.append(name)
        return freed

    def needed(self, step: str) -> list[str]:
        """The outputs of a step that somebody needs, by name."""
        return sorted({of.tensor for of in self._read | self._answered if of.step == step})

    def read_later(self, step: str, output: str) -> bool:
        """Whether a step takes this output."""
        return any((of.step, of.tensor) == (step, output) for of in self._read)

    def _kept(self, chain: Chain) -> tuple[ChainStep, ...]:
        """The steps that the answer depends on, in order."""
        needed = {of.step for of in self._answered}
        kept: list[ChainStep] = []
        for step in reversed(chain.steps):
            if step.name in needed:
                kept.append(step)
                needed |= {source(text).step for text in step.inputs.values()}
        return tuple(reversed(kept))
