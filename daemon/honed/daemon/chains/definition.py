"""What a chain consists of, its steps in an order in which they can run, and how far one is. No I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from honed.protocol.errors import InvalidArgument
from honed.protocol.methods import NAME
from honed.protocol.params import ChainStep

MAX_STEPS = 64
MAX_TENSORS = 256  # inputs of a step, and outputs of a chain
_LONGEST = 1024  # letters of a tensor's name


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Where a tensor comes from: an output of a step, or, where `step` is "", an input of the chain."""

    step: str
    tensor: str

    def __str__(self) -> str:
        return f"{self.step}:{self.tensor}" if self.step else self.tensor


def source(text: str) -> TensorSource:
    """`STEP:OUTPUT`, or the name of an input of the chain; outputs may have colons in their names."""
    step, colon, tensor = text.partition(":")
    return TensorSource(step, tensor) if colon else TensorSource("", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Models run one after the other in one request; each step stands behind those that it takes from.

    `added` in seconds since 1970; `outputs` are the chain's, each with the step's output that it is.
    """

    name: str
    added: float
    steps: tuple[ChainStep, ...]
    outputs: dict[str, str]

    @property
    def models(self) -> tuple[str, ...]:
        """The models of the steps, in order, each once."""
        return tuple(dict.fromkeys(step.model for step in self.steps))

    def uses(self) -> Iterator[tuple[ChainStep, str, TensorSource]]:
        """Each input of each step, with where it comes from."""
        for step in self.steps:
            for name, text in step.inputs.items():
                yield step, name, source(text)


def chained(name: str, added: float, steps: Sequence[ChainStep], outputs: dict[str, str]) -> Chain:
    """The chain of these steps, in any order; raises InvalidArgument for what cannot be one."""
    if not 1 <= len(steps) <= MAX_STEPS:
        raise InvalidArgument(f"a chain of {len(steps)} steps is not possible; give 1 to {MAX_STEPS}")
    if not 1 <= len(outputs) <= MAX_TENSORS:
        raise InvalidArgument(f"a chain with {len(outputs)} outputs is not possible; give 1 to {MAX_TENSORS}")
    named = tuple(dataclasses.replace(step, name=step.name or step.model) for step in steps)
    known: set[str] = set()
    for step in named:
        _check_step(step, known)
        known.add(step.name)
    chain = Chain(name=name, added=added, steps=_ordered(named, known), outputs=dict(outputs))
    _check_outputs(chain, known)
    return chain


def _check_step(step: ChainStep, before: set[str]) -> None:
    if not NAME.fullmatch(step.name):
        raise InvalidArgument(
            f"{step.name[:80]!r} cannot name a step; use 1 to 64 letters, digits, '.', '_' and '-', "
            "a letter or digit first"
        )
    if step.name in before:
        raise InvalidArgument(f"two steps are called {step.name!r}; give each a name of its own")
    if len(step.inputs) > MAX_TENSORS:
        raise InvalidArgument(f"step {step.name!r} has more than {MAX_TENSORS} inputs; no model has so many")
    for name, text in step.inputs.items():
        _check_source(text, f"input {name[:80]!r} of step {step.name!r}")


def _check_source(text: str, what: str) -> None:
    found = source(text)
    if not found.tensor or len(text) > _LONGEST or "\0" in text or text.startswith(":"):
        raise InvalidArgument(
            f"{what} comes from {text[:80]!r}; write STEP:OUTPUT, or the name of an input of the chain"
        )


def _check_outputs(chain: Chain, known: set[str]) -> None:
    taken: dict[TensorSource, str] = {}
    for name, text in chain.outputs.items():
        if not name or len(name) > _LONGEST or "\0" in name:
            raise InvalidArgument(f"{name[:80]!r} cannot name an output of a chain; use another name")
        _check_source(text, f"output {name[:80]!r}")
        found = source(text)
        if not found.step:
            raise InvalidArgument(
                f"output {name[:80]!r} comes from {text[:80]!r}, which is no step's; write STEP:OUTPUT"
            )
        if found.step not in known:
            raise InvalidArgument(
                f"output {name[:80]!r} comes from step {found.step[:80]!r}, and there is none; "
                "name a step of the chain"
            )
        if found in taken:
            raise InvalidArgument(f"outputs {taken[found]!r} and {name!r} are both {text!r}; give it once")
        taken[found] = name
    used = {each.step for _, _, each in chain.uses()} | {each.step for each in taken}
    for step in chain.steps:
        if step.name not in used:
            raise InvalidArgument(
                f"nothing takes what step {step.name!r} gives; use it, or leave the step out"
            )


def _ordered(steps: Sequence[ChainStep], known: set[str]) -> tuple[ChainStep, ...]:
    """Each behind those that it takes from; otherwise as given."""
    ordered: list[ChainStep] = []
    done: set[str] = {""}
    left = list(steps)
    for step in steps:
        for name, text in step.inputs.items():
            if (of := source(text).step) and of not in known:
                raise InvalidArgument(
                    f"input {name[:80]!r} of step {step.name!r} comes from step {of[:80]!r}, "
                    "and there is none; name a step of the chain"
                )
    while left:
        ready = [step for step in left if all(source(text).step in done for text in step.inputs.values())]
        if not ready:
            cycle = _cycle(left)
            around = " for ".join(f"step {step.name!r}" for step in (*cycle[1:], cycle[0]))
            raise InvalidArgument(f"step {cycle[0].name!r} waits for {around}; a chain cannot be a circle")
        ordered += ready
        done |= {step.name for step in ready}
        left = [step for step in left if step.name not in done]
    return tuple(ordered)


def _cycle(left: Sequence[ChainStep]) -> list[ChainStep]:
    """Steps of which each takes from the next, and the last from the first."""
    by_name = {step.name: step for step in left}
    path = [left[0]]
    while True:
        of = next(each for text in path[-1].inputs.values() if (each := source(text).step) in by_name)
        if by_name[of] in path:
            return path[path.index(by_name[of]) :]
        path.append(by_name[of])


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
