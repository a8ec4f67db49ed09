"""Which variants are made, kept and loaded: names, counts, and bounds."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from honed.daemon.features.variants import VariantUsage, next_shapes, surplus, variants_to_suspend
from honed.daemon.observe.usage import MOST, ShapeDemand, UsageLog, UsageSettings
from honed.daemon.settings.schema import VariantSettings
from honed.daemon.store.compiled import Interface, TensorSpec
from honed.daemon.store.names import STORED, is_variant, model_of, variant_name

MIB = 1 << 20
SIZES = st.integers(1, 9)


def interface(*inputs: tuple[int | str, ...]) -> Interface:
    """Inputs a, b, ... with sizes, symbols, or "" for no name."""
    return Interface(
        inputs=tuple(
            TensorSpec(
                name="abcdef"[n],
                dtype="float32",
                shape=tuple(size if isinstance(size, int) else -1 for size in sizes),
                symbols=tuple("" if isinstance(size, int) else size for size in sizes),
            )
            for n, sizes in enumerate(inputs)
        ),
        outputs=(),
        opset=17,
        producer="",
    )


def test_a_name_tells_each_open_size_and_those_of_one_symbol_once() -> None:
    taken = interface((1, "n", 2), (1, "m", 2), (1, "n", 8))
    shapes = {"a": (1, 191, 2), "b": (1, 200, 2), "c": (1, 191, 8)}
    assert variant_name("lightglue", shapes, taken) == "lightglue@191x200"
    unnamed = interface((1, 3, "", ""))
    assert variant_name("yolo", {"a": (1, 3, 640, 480)}, unnamed) == "yolo@640x480"
    assert variant_name("m", {"a": (1, 2), "b": (3,)}, None) == "m@1x2_3", "it is not known which are open"
    odd = shapes | {"c": (1, 7, 8)}
    assert variant_name("lightglue", odd, taken) == "lightglue@191x200x7", "sizes of one symbol that differ"
    long = {"a": tuple(range(1000, 1020))}
    assert variant_name("m", long, interface(("",) * 20)).startswith("m@z")


@given(st.lists(st.tuples(SIZES, SIZES, SIZES, SIZES), min_size=2, max_size=2, unique=True), st.booleans())
def test_other_shapes_have_other_names(sizes: list[tuple[int, ...]], known: bool) -> None:
    taken = interface(("n", ""), ("n", "m")) if known else None
    names = [variant_name("m", {"a": each[:2], "b": each[2:]}, taken) for each in sizes]
    assert names[0] != names[1]
    for name in names:
        assert STORED.fullmatch(name)
        assert is_variant(name)
        assert model_of(name) == "m"


def test_counts_are_bounded_and_the_least_asked_for_go() -> None:
    seconds = itertools.count(0.0, 0.5)
    known = UsageLog(
        Path("/nowhere/usage.json"),
        UsageSettings(half_life_days=1e6 / 86_400),
        clock=seconds.__next__,
        wall=lambda: 0.0,
    )
    for n in range(3 * MOST):
        known.count_requests("m", "often", {"a": (1,)})
        known.count_requests("m", f"once {n}", {"a": (n,)})
    found = {wish.name: wish.requests for wish in known.wishes("m", "")}
    assert len(found) == MOST
    assert found["often"] > 2 * MOST


def test_counts_and_failures_outlast_the_service(tmp_path: Path) -> None:
    def ledger() -> UsageLog:
        return UsageLog(tmp_path / "u.json", UsageSettings(), clock=lambda: 0.0, wall=lambda: 0.0)

    first = ledger()
    first.count_requests("m", "m@5", {"a": (5,)})
    first.count_requests("m", "m@5", {"a": (5,)})
    first.record_failure("m", "m@6", {"a": (6,)}, "it has no kernel", "honed 1")
    asyncio.run(first.save())
    [five, six] = ledger().wishes("m", "honed 1")
    assert (five.shapes, five.requests, five.failed) == ({"a": (5,)}, 2.0, "")
    assert six.failed == "it has no kernel"
    assert [wish.failed for wish in ledger().wishes("m", "honed 2")] == ["", ""], "that is tried again"


def wish(name: str, requests: float, failed: str = "") -> ShapeDemand:
    return ShapeDemand(name=name, model=model_of(name), shapes={}, requests=requests, failed=failed)


def kept(name: str, requests: float, **more: float) -> VariantUsage:
    return VariantUsage(
        name=name,
        model=model_of(name),
        requests=requests,
        by_hand=bool(more.get("by_hand")),
        nbytes=round(more.get("nbytes", 1.0) * MIB),
        loaded=round(more.get("loaded", 1.0) * MIB),
        used=more.get("used", 0.0),
    )


SETTINGS = VariantSettings(requests=10.0, per_model=2, disk_mib=8, memory_mib=4)


def chosen(wishes: list[ShapeDemand], there: list[VariantUsage], nbytes: float = 1.0) -> str | None:
    found = next_shapes(wishes, there, SETTINGS, dict.fromkeys(("m", "o"), round(nbytes * MIB)))
    return found.name if found is not None else None


def test_what_is_asked_for_most_is_made_first_and_only_once() -> None:
    assert chosen([wish("m@1", 9)], []) is None, "not often enough"
    assert chosen([wish("m@1", 11), wish("m@2", 12)], []) == "m@2"
    assert chosen([wish("m@1", 11), wish("m@2", 12)], [kept("m@2", 12)]) == "m@1"
    assert chosen([wish("m@1", 11, "refused")], []) is None


def test_what_no_shape_helps_is_not_tried_again_and_again() -> None:
    failed = [wish("m@1", 99, "a GRU"), wish("m@2", 99, "a GRU")]
    assert chosen([*failed[:1], wish("m@3", 50)], []) == "m@3"
    assert chosen([*failed, wish("m@3", 50)], []) is None
    assert chosen([*failed, wish("m@3", 50)], [kept("m@9", 1)]) == "m@3", "some could be compiled"
    assert chosen([*failed, wish("o@3", 50)], []) == "o@3"


def test_another_takes_the_place_of_one_only_where_it_is_asked_for_much_more() -> None:
    full = [kept("m@1", 20), kept("m@2", 30)]
    assert chosen([wish("m@3", 25)], full) is None
    assert chosen([wish("m@3", 31)], full) == "m@3"
    assert chosen([wish("m@3", 99)], [kept("m@1", 1, by_hand=1), kept("m@2", 1, by_hand=1)]) is None
    assert chosen([wish("m@3", 25)], [kept("o@1", 20, nbytes=4)], nbytes=5) is None, "the disk's bound"
    assert chosen([wish("m@3", 99)], [], nbytes=9) is None, "too large for the bound by itself"


KEPT = st.builds(
    lambda model, n, requests, by_hand, nbytes, loaded, used: kept(
        f"{model}@{n}", requests, by_hand=by_hand, nbytes=nbytes, loaded=loaded, used=used
    ),
    st.sampled_from("mo"),
    st.integers(1, 9),
    st.floats(0, 100),
    st.booleans(),
    st.integers(0, 5),
    st.integers(0, 3),
    st.floats(0, 1000),
)
SOME = st.lists(KEPT, max_size=8, unique_by=lambda each: each.name)


@given(SOME)
def test_the_bounds_on_number_and_disk_hold_but_for_what_was_added_by_hand(there: list[VariantUsage]) -> None:
    going = set(surplus(there, SETTINGS))
    left = [each for each in there if each.name not in going]
    assert not any(each.by_hand for each in there if each.name in going)
    for model in "mo":
        of_model = [each for each in left if each.model == model]
        assert len(of_model) <= SETTINGS.per_model or all(each.by_hand for each in of_model)
    assert sum(each.nbytes for each in left) <= SETTINGS.disk_bytes or all(each.by_hand for each in left)


@given(SOME, st.floats(0, 1200), st.integers(0, 5))
def test_the_bound_on_memory_holds_and_what_is_asked_for_stays(
    serving: list[VariantUsage], now: float, loaded: int
) -> None:
    resting = variants_to_suspend(loaded * MIB, serving, SETTINGS, now)
    least = min((each.used for each in serving if each.name not in (resting or ())), default=float("inf"))
    if resting is None:
        return
    gone = [each for each in serving if each.name in resting]
    assert all(now - each.used >= 60 for each in gone)
    assert all(each.used <= least for each in gone), "the longest unused first"
    assert loaded * MIB + sum(each.loaded for each in serving) - sum(each.loaded for each in gone) <= (
        SETTINGS.memory_bytes
    )


def test_there_is_no_room_without_what_is_asked_for() -> None:
    serving = [kept("m@1", 5, loaded=2, used=100.0), kept("m@2", 5, loaded=2, used=50.0)]
    assert variants_to_suspend(1 * MIB, serving, SETTINGS, 120.0) == ["m@2"]
    assert variants_to_suspend(3 * MIB, serving, SETTINGS, 120.0) is None
    assert variants_to_suspend(5 * MIB, [], SETTINGS, 0.0) is None, "larger than the bound"
    assert variants_to_suspend(0, serving, SETTINGS, 120.0) == []


def test_a_name_that_is_no_variant() -> None:
    assert not is_variant("m")
    assert model_of("m") == "m"
    for name in ("m@", "@5", "m@5@6", "m@5/6", "m@A"):
        assert STORED.fullmatch(name) is None


def test_none_is_kept_where_none_may_be() -> None:
    settings = VariantSettings(per_model=0)
    assert next_shapes([wish("m@1", 99)], [], settings, {"m": 1}) is None
