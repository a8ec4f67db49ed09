"""The child process that decides: `python -m honed.tuner.mixed.child FOLDER --sets N ...`.

It reads `model.onnx`, normalised and in float32, and `input.SET.NUMBER.npy` from FOLDER, and writes what is
`Answer` there as `result.json`, or `{"failure": "one sentence", "kind": KIND}` as
`honed.tuner.prove.evaluator` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
import onnx

from honed.tuner.halves import Exemptions, usually
from honed.tuner.prove import confined

from .search import PrecisionTrials, search
from .simulate import Deviation, Simulation

# Of an output's range, the largest |reference value|: four roundings to fp16 of a value as large as that.
BOUND = 2.0**-9
# What a decision may cost, counted and not timed: the same model and inputs give the same decision anywhere.
_OPERATIONS = 200_000_000_000
_MOST_TRIALS = 48
_LEAST_TRIALS = 14  # that the number of runs of each leaves room for
_MOST_RUNS = 3  # of each set


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionAnswer:
    """What is kept, None where everything would be, and what was found on the way.

    `plain` is the largest error with what is usually kept only, of output `output`, `error` that with
    `single` and `wide`; both are None where no trial was made. `halves` is the share of the multiply-adds
    whose operands are of fp16.
    """

    single: tuple[str, ...] | None
    wide: tuple[str, ...]
    operators: int
    products: int
    trials: int
    sets: int  # of inputs, the first of those given
    plain: float | None
    output: str
    error: float | None
    halves: float


def main(argv: list[str] | None = None) -> int:
    """Decide; the exit status is 0 wherever a result was written."""
    arguments = confined.parser("honed.tuner.mixed.child").parse_args(argv)

    def work() -> Mapping[str, object]:
        model = onnx.load(arguments.folder / confined.MODEL)
        names = [info.name for info in model.graph.input]
        sets = list(confined.sets_in(arguments.folder, names, arguments.sets))
        return asdict(decided(model, sets, arguments.threads))

    return confined.answer(arguments.folder, work)


def decided(
    model: onnx.ModelProto,
    sets: list[dict[str, np.ndarray]],
    threads: int = 1,
    operations: int = _OPERATIONS,
) -> PrecisionAnswer:
    """The decision on a normalised model whose floats are all float32, within so many operations."""
    simulation = Simulation(model, sets, threads)
    names, work = simulation.operators, simulation.multiply_adds
    usual = usually(model.graph).single
    deviations: dict[Exemptions, Deviation] = {}

    def error(keep: Exemptions) -> float:
        deviations[keep] = simulation.deviation(keep, runs)
        return deviations[keep].error

    affordable = operations // simulation.cost  # runs, with those in float32
    runs = min(_MOST_RUNS * len(sets), max(1, affordable // _LEAST_TRIALS))
    most = min(_MOST_TRIALS, affordable // runs - 1)
    trials = PrecisionTrials(error, most)
    found = search(names, list(work), usual, trials, BOUND) if most > 0 else None
    plain = deviations.get(Exemptions(single=usual))
    single = found.keep.single if found else frozenset(names)
    halves = sum(n for name, n in work.items() if name not in single)
    return PrecisionAnswer(
        single=tuple(sorted(single)) if found else None,
        wide=tuple(sorted(found.keep.wide)) if found else (),
        operators=len(names),
        products=len(work),
        trials=len(deviations),
        sets=min(runs, len(sets)),
        plain=plain.error if plain else None,
        output=plain.output if plain else "",
        error=found.error if found else None,
        halves=halves / sum(work.values()) if work else float(len(single) < len(names)),
    )


if __name__ == "__main__":
    raise SystemExit(main())
