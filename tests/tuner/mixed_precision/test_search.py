"""What is kept in float32 is found from errors alone: little, enough, and in few trials."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from honed.tuner.graph.fp16_casts import Exemptions
from honed.tuner.mixed_precision.child import Deviation, PrecisionTrials, search

Error = Callable[[Exemptions], float]
BOUND = 1.0
OPERATORS = [f"v{n}" for n in range(24)]
PRODUCTS = OPERATORS[::3]


def _summed(rounded: dict[str, float], added: dict[str, float]) -> Error:
    """Errors that add up: of what is in fp16, and of products that are added up in it."""

    def error(keep: Exemptions) -> float:
        halves = [name for name in OPERATORS if name not in keep.single]
        total = sum(rounded.get(name, 0.0) for name in halves)
        return total + sum(added.get(name, 0.0) for name in halves if name not in keep.wide)

    return error


def _found(error: Error, *, usual: frozenset[str] = frozenset(), trials: int = 48) -> Exemptions | None:
    made = PrecisionTrials(lambda keep: Deviation(output="", error=error(keep)), trials)
    return search(OPERATORS, PRODUCTS, usual, made, BOUND)


def test_nothing_is_kept_where_nothing_is_needed() -> None:
    found = _found(_summed(dict.fromkeys(OPERATORS, 0.01), {}))
    assert found is not None
    assert found == Exemptions(single=frozenset())


def test_what_is_usually_kept_stays() -> None:
    found = _found(_summed({}, {}), usual=frozenset({"v1"}))
    assert found is not None
    assert found.single == {"v1"}


def test_only_the_operators_that_err_are_kept() -> None:
    found = _found(_summed({"v5": 3.0, "v16": 2.0, "v20": 0.1}, {}))
    assert found is not None
    assert found == Exemptions(single=frozenset({"v5", "v16"}))


def test_overflow_is_an_error_as_any() -> None:
    found = _found(_summed({"v7": float("inf")}, {}))
    assert found is not None
    assert found.single == {"v7"}


def test_a_product_is_added_up_in_float32_before_it_is_kept() -> None:
    found = _found(_summed({}, {"v3": 2.0, "v9": 0.5}))
    assert found is not None
    assert found == Exemptions(single=frozenset(), wide=frozenset({"v3"}))


def test_everything_stays_where_every_operator_errs() -> None:
    assert _found(_summed(dict.fromkeys(OPERATORS, 2.0), {})) is None


def test_without_trials_for_more_all_products_are_added_up_in_float32() -> None:
    found = _found(_summed({}, {"v3": 2.0}), trials=2)
    assert found is not None
    assert found == Exemptions(single=frozenset(), wide=frozenset(PRODUCTS))


_SIZES = st.one_of(st.just(0.0), st.floats(0, 0.05), st.floats(0, 5), st.just(float("inf")))


@given(
    st.dictionaries(st.sampled_from(OPERATORS), _SIZES),
    st.dictionaries(st.sampled_from(PRODUCTS), _SIZES),
    st.integers(1, 48),
)
def test_what_is_found_is_within_the_bound_and_the_trials(
    rounded: dict[str, float], added: dict[str, float], most: int
) -> None:
    error = _summed(rounded, added)
    tried: list[Exemptions] = []

    def counted(keep: Exemptions) -> float:
        tried.append(keep)
        return error(keep)

    found = _found(counted, trials=most)
    assert len(tried) == len(set(tried)) <= most + 2
    if found is not None:
        assert error(found) <= BOUND
        assert not found.single & found.wide
    assert found == _found(error, trials=most)
