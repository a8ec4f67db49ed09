"""Several sets of shapes on the command line, and variants as `hone` shows them."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from honed.protocol.results import ShownVariant
from honed.tool.output import table
from honed.tool.parser import shape_sets
from honed.tool.view.tables import VARIANT_HEADINGS, variant_rows


def test_an_input_given_again_begins_another_set() -> None:
    assert shape_sets([]) == [{}]
    assert shape_sets([("a", (1,)), ("b", (2,))]) == [{"a": (1,), "b": (2,)}]
    pairs = [("a", (1,)), ("b", (2,)), ("a", (3,)), ("b", (2,)), ("b", (4,))]
    assert shape_sets(pairs) == [{"a": (1,), "b": (2,)}, {"a": (3,), "b": (2,)}, {"b": (4,)}]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.tuples(st.integers(1, 9)))))
def test_no_shape_is_lost(pairs: list[tuple[str, tuple[int, ...]]]) -> None:
    assert [pair for each in shape_sets(pairs) for pair in each.items()] == pairs


def shown(name: str, requests: float, **more: object) -> ShownVariant:
    fields: dict[str, object] = {
        "shapes": {},
        "answered": 7,
        "state": "READY",
        "engine": "gpu",
        "version": 3,
        "why": "it is faster",
        "by_hand": False,
        "bytes": 1 << 20,
        "loaded_bytes": 0,
    }
    return ShownVariant(name=name, requests=requests, **(fields | more))  # type: ignore[arg-type]


def test_the_most_asked_for_come_first_with_what_failed() -> None:
    console = Console(file=io.StringIO(), width=160)
    failed = shown("m@9", 50.4, state="FAILED", version=0, why="no kernel", engine="cpu", answered=0)
    rows = variant_rows([shown("m@5x6", 12.0, by_hand=True), failed])
    console.print(table(VARIANT_HEADINGS, [cells for _, cells in rows]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    [first, second] = [
        line.split() for line in text.splitlines() if "m@" in line or "x6" in line or "9 " in line
    ]
    assert first[:4] == ["9", "50", "0", "-"]
    assert first[-2:] == ["no", "kernel"]
    assert second[:6] == ["5x6", "(by", "hand)", "12", "7", "3"]
