"""Determines which outputs of a model are its state, and the inputs that receive them next. No I/O.

The user declares them (`hone add --state OUT=IN`), or the file does (metadata `honed.state`). Otherwise an
output is state if its type and shape fit an input, its name equals the input's apart from words like "out",
"new" or "present", and a word of it means state. Keys and values of a decoder grow by a row for each token.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from honed.daemon.store.compiled import Interface, TensorSpec
from honed.protocol.errors import InvalidArgument, ModelRefused

METADATA: Final = "honed.state"  # Key in an ONNX file; its value is as `from_text` takes it
_STATE = re.compile(
    r"states?|caches?|hidden|cell|[hc]x?|past|present|kv|mem|memory|memories|rnn|lstm|gru|context|ctx|history"
    r"|buf|buffer"
)
_BEFORE = frozenset(["in", "input", "inputs", "prev", "previous", "past", "old", "last", "init", "initial"])
_AFTER = frozenset(["out", "output", "outputs", "new", "next", "present", "updated", "n"])
_SHORT: Final[Mapping[str, str]] = {"hn": "h", "cn": "c"}  # Outputs of recurrent layers
_ATTENTION = re.compile(r"keys?|values?|kv")
_PAST = re.compile(r"past|present")
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")


@dataclass(frozen=True, slots=True)
class StatePair:
    """An output, and the input of the next request that receives it."""

    output: TensorSpec
    input: TensorSpec

    @property
    def grows_on(self) -> int:
        """The axis on which keys or values of attention grow with each request; -1 for other state.

        The size of this axis has different names in output and input. If it has no name, it is not one of the
        first two axes, which may be a batch.
        """
        return self._growing_axis if self._is_named(_ATTENTION) else -1

    @property
    def may_grow(self) -> bool:
        """Return whether sizes and name are those of a past that grows, though not of keys or values."""
        return self.grows_on < 0 <= self._growing_axis and self._is_named(_PAST)

    def _is_named(self, words: re.Pattern[str]) -> bool:
        return any(map(words.fullmatch, map(str.lower, _WORDS.findall(self.input.name))))

    @property
    def _growing_axis(self) -> int:
        taken, given = self.input, self.output
        if taken.shape is None or given.shape is None:
            return -1

        def grows(axis: int) -> bool:
            before, after = (spec.symbols[axis] if spec.symbols else "" for spec in (taken, given))
            return axis > 0 and before != after if before or after else axis > 1

        sizes = zip(taken.shape, given.shape, strict=True)
        return max((axis for axis, pair in enumerate(sizes) if pair == (-1, -1) and grows(axis)), default=-1)


def pairs(interface: Interface, named: Mapping[str, str]) -> tuple[StatePair, ...]:
    """Return the state of a model: `named` (input by output), else what its file declares, else by the rule.

    Raises InvalidArgument if names are wrong.
    """
    said = named or dict(interface.state)
    return check_pairs(interface, said) if said else find_pairs(interface)


def add_declared_state(interface: Interface, written: str) -> Interface:
    """Return an interface with the state that its file declares; raise ModelRefused if that is wrong."""
    try:
        named = from_text(written)
        check_pairs(interface, named)
    except InvalidArgument as error:
        raise ModelRefused(f"the file's metadata {METADATA} is wrong: {error}") from error
    return dataclasses.replace(interface, state=tuple(named.items()))


def grows(interface: Interface | None, named: Mapping[str, str]) -> bool:
    """Return whether some state of a model grows, so that no single size serves its requests."""
    return interface is not None and any(pair.grows_on >= 0 for pair in pairs(interface, named))


def check_pairs(interface: Interface, named: Mapping[str, str]) -> tuple[StatePair, ...]:
    """Return the pairs `named`; raise InvalidArgument for impossible ones."""
    outputs = {tensor.name: tensor for tensor in interface.outputs}
    inputs = {tensor.name: tensor for tensor in interface.inputs}
    for output, given in named.items():
        for name, known, what in ((output, outputs, "output"), (given, inputs, "input")):
            if name not in known:
                raise InvalidArgument(
                    f"state {output[:80]}={given[:80]}: the model has no {what} {name[:80]!r}; "
                    f"it has {', '.join(known)}"
                )
        if not _fit(outputs[output], inputs[given]):
            raise InvalidArgument(
                f"state {output}={given}: the output is not of the type and shape of the input; name another"
            )
    if len(set(named.values())) < len(named):
        raise InvalidArgument("two outputs are named as the state of one input; name one")
    return tuple(StatePair(outputs[output], inputs[given]) for output, given in named.items())


def find_pairs(interface: Interface) -> tuple[StatePair, ...]:
    """Return the pairs by the rule, except ambiguous ones."""
    fitting = [
        StatePair(output, given)
        for given in interface.inputs
        for output in interface.outputs
        if _fit(output, given) and _has_similar_name(output.name, given.name)
    ]
    return tuple(
        pair
        for pair in fitting
        if sum(other.input is pair.input or other.output is pair.output for other in fitting) == 1
    )


def from_text(text: str) -> dict[str, str]:
    """Parse "OUT=IN" between commas as output: input; raise InvalidArgument for anything else."""
    named: dict[str, str] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        output, equals, given = (word.strip() for word in part.partition("="))
        if not (output and equals and given) or output in named:
            raise InvalidArgument(f"state {part[:80]!r} is not OUT=IN, each output once")
        named[output] = given
    return named


def _fit(output: TensorSpec, target: TensorSpec) -> bool:
    if output.dtype != target.dtype:
        return False
    if output.shape is None or target.shape is None:
        return True
    return len(output.shape) == len(target.shape) and all(
        -1 in sizes or sizes[0] == sizes[1] for sizes in zip(output.shape, target.shape, strict=True)
    )


def _has_similar_name(output: str, input_name: str) -> bool:
    after, before = _words(output), _words(input_name)
    if not any(map(_STATE.fullmatch, (*(_SHORT.get(word, word) for word in after), *before))):
        return False
    stem = [_SHORT.get(word, word) for word in after if word not in _AFTER]
    begun = [word for word in before if word not in _BEFORE]
    if len(begun) == 2 and len(begun[0]) == 1 and begun[1] == "0":  # Names h0 before, hn after
        begun = begun[:1]
    return stem == begun


def _words(name: str) -> list[str]:
    # Input past_key_values.0.key is followed by present.0.key
    return [word.lower() for word in _WORDS.findall(name.replace("key_values", ""))]
