"""Whether the steps of a chain fit each other, and what the chain then takes and gives. No I/O.

Sizes that files leave open become one where tensors meet, and wherever a file calls them by one name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from honed.daemon.serving.inference import describe
from honed.daemon.store.interface import Interface, OpenTensor
from honed.protocol.errors import InvalidArgument
from honed.protocol.params import ChainStep
from honed.runtime.dtypes import dtype

from .definition import Chain, TensorSource, source


def interface(chain: Chain, models: Mapping[str, Interface]) -> Interface:
    """What a chain takes and gives, of models with these interfaces, by the models' names.

    Raises InvalidArgument where a name is not there, a type differs, or shapes cannot be the same.
    """
    found = _Tensors(chain, models)
    for step in chain.steps:
        _check_inputs(step, models[step.model])
    for step, name, of in chain.uses():
        found.meet(step, found.input_of(step, name), of)
    inputs = tuple(found.shown(tensor, name) for name, tensor in found.inputs.items())
    outputs = tuple(
        found.shown(found.output_of(source(text), f"output {name!r}"), name)
        for name, text in chain.outputs.items()
    )
    return Interface(inputs=inputs, outputs=outputs, opset=0, producer="")


def _check_inputs(step: ChainStep, takes: Interface) -> None:
    names = [tensor.name for tensor in takes.inputs]
    for name in step.inputs:
        if name not in names:
            raise InvalidArgument(
                f"step {step.name!r}: model {step.model!r} has no input {name[:80]!r}; "
                f"it has {', '.join(names)}"
            )
    for name in names:
        if name not in step.inputs:
            raise InvalidArgument(
                f"step {step.name!r}: input {name!r} of model {step.model!r} comes from nowhere; "
                "say from where"
            )


@dataclass(slots=True, eq=False)
class _Size:
    """A size that is known or not yet, and the sizes that are the same."""

    value: int = -1
    same: _Size | None = None

    def root(self) -> _Size:
        size = self
        while size.same is not None:
            size = size.same
        return size

    def unify(self, other: _Size) -> bool:
        """Make both one; False where they cannot be."""
        one, two = self.root(), other.root()
        if one is two:
            return True
        if -1 not in (one.value, two.value) and one.value != two.value:
            return False
        one.value = max(one.value, two.value)
        two.same = one
        return True


@dataclass(slots=True, eq=False)
class _Tensor:
    """A tensor of a step; `sizes` None: any number of dimensions."""

    of: OpenTensor
    sizes: list[_Size] | None

    @property
    def text(self) -> str:
        shape = None if self.sizes is None else tuple(size.root().value for size in self.sizes)
        shown = describe(OpenTensor(name=self.of.name, dtype=self.of.dtype, shape=shape))
        return f"{shown.datatype} {list(shown.shape) if shape is not None else '[any]'}"


@dataclass(slots=True)
class _Tensors:
    """All of a chain; `inputs` are the chain's own, by name."""

    chain: Chain
    models: Mapping[str, Interface]
    inputs: dict[str, _Tensor] = field(default_factory=dict)
    _symbols: dict[tuple[str, str], _Size] = field(default_factory=dict)  # by step and name
    _known: dict[tuple[str, str, str], _Tensor] = field(default_factory=dict)

    def input_of(self, step: ChainStep, name: str) -> _Tensor:
        tensors = {tensor.name: tensor for tensor in self.models[step.model].inputs}
        return self._tensor(step.name, "in", tensors[name])

    def output_of(self, of: TensorSource, what: str) -> _Tensor:
        """Raises InvalidArgument where the step's model has none of that name."""
        model = next(step.model for step in self.chain.steps if step.name == of.step)
        tensors = {tensor.name: tensor for tensor in self.models[model].outputs}
        if of.tensor not in tensors:
            raise InvalidArgument(
                f"{what} comes from {str(of)[:160]!r}, and model {model!r} has no output {of.tensor[:80]!r}; "
                f"it has {', '.join(tensors)}"
            )
        return self._tensor(of.step, "out", tensors[of.tensor])

    def meet(self, step: ChainStep, taken: _Tensor, of: TensorSource) -> None:
        """An input of a step is given what comes from there."""
        what = f"input {taken.of.name!r} of step {step.name!r}"
        if of.step:
            given = self.output_of(of, what)
        elif of.tensor not in self.inputs:
            self.inputs[of.tensor] = _Tensor(taken.of, taken.sizes)
            return
        else:
            given = self.inputs[of.tensor]
        before = given.text, taken.text
        if not _unify(given, taken):
            raise InvalidArgument(f"{what} is {before[1]}, and what comes from {str(of)!r} is {before[0]}")

    def shown(self, tensor: _Tensor, name: str) -> OpenTensor:
        """As the chain's own, by this name."""
        if tensor.sizes is None:
            return OpenTensor(name=name, dtype=tensor.of.dtype, shape=None)
        shape = tuple(size.root().value for size in tensor.sizes)
        return OpenTensor(name=name, dtype=tensor.of.dtype, shape=shape)

    def _tensor(self, step: str, kind: str, tensor: OpenTensor) -> _Tensor:
        key = (step, kind, tensor.name)
        if key not in self._known:
            self._known[key] = _Tensor(tensor, self._sizes(step, tensor))
        return self._known[key]

    def _sizes(self, step: str, tensor: OpenTensor) -> list[_Size] | None:
        if tensor.shape is None:
            return None
        symbols = tensor.symbols or ("",) * len(tensor.shape)
        return [
            self._symbols.setdefault((step, symbol), _Size()) if size < 0 and symbol else _Size(size)
            for size, symbol in zip(tensor.shape, symbols, strict=True)
        ]


def _unify(given: _Tensor, taken: _Tensor) -> bool:
    if dtype(given.of.dtype).datatype != dtype(taken.of.dtype).datatype:
        return False
    if given.sizes is None or taken.sizes is None:
        given.sizes = taken.sizes if given.sizes is None else given.sizes
        return True
    return len(given.sizes) == len(taken.sizes) and all(
        one.unify(two) for one, two in zip(given.sizes, taken.sizes, strict=True)
    )
