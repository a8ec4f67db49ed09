"""Builds HTML as a tree: no text or attribute can become an element.

Names come from model files, and records of faults from drivers: characters that have no place in a document,
or would turn its reading direction, are shown as escapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import count
from xml.etree.ElementTree import Element, SubElement, tostring

from honed.tool.output import clean

Child = Element | str | None
Cell = Element | str
_KINDS = {">": "figure", "~": "prose"}  # Kinds of columns, by the first character of a heading
# Browsers load nothing and run nothing, whatever else should get in here.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_BREAKABLE = "_./-:,@"  # Characters after which a long name may wrap
QUANTILES = ("p50", "p95", "p99", "longest")
_TIMES = "\N{MULTIPLICATION SIGN}"
_STATES = {"READY": "good", "UNAVAILABLE": "bad", "FAILED": "bad", "ready": "good"}


def element(tag: str, *children: Child, **attributes: str | float | None) -> Element:
    """Return an element with texts and elements in it; None is ignored.

    `class_` is class, an underscore in `stroke_width` is a dash. Line breaks of a text stay.
    """
    made = Element(tag)
    for name, value in attributes.items():
        if value is not None:
            text = value if isinstance(value, str) else f"{value:.6g}"
            made.set(name.rstrip("_").replace("_", "-"), clean(text))
    add(made, *children)
    return made


def add(to: Element, *children: Child) -> Element:
    """Append texts and elements to an element, and return it."""
    for child in children:
        if isinstance(child, Element):
            to.append(child)
        elif child:
            text = "\n".join(clean(line) for line in child.split("\n"))
            if len(to):
                to[-1].tail = (to[-1].tail or "") + text
            else:
                to.text = (to.text or "") + text
    return to


def document(title: str, style: str, *body: Child) -> str:
    """Return a whole page; `style` is trusted and not escaped."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("title", title),
    )
    SubElement(head, "style").text = style
    page = element("html", head, element("body", *body), lang="en")
    return f"<!DOCTYPE html>\n{tostring(page, encoding='unicode', method='html')}\n"


def name_of(text: str) -> Element:
    """Return a name that someone chose, marked as one; it may wrap after some characters."""
    made, part = element("span", class_="name"), ""
    for letter in text:
        part += letter
        if letter in _BREAKABLE:
            add(made, part, element("wbr"))
            part = ""
    return add(made, part)


def table(caption: str, headings: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Element:
    """Return a table that scrolls if it is too wide.

    A column whose heading begins with ">" has figures, one with "~" sentences.
    """
    kinds = [_KINDS.get(heading[:1]) for heading in headings]
    names = [heading.lstrip(">~") for heading in headings]
    made = element(
        "table",
        element("caption", element("span", caption)),
        element("thead", _row("th", names, kinds, "col")),
        element("tbody", *(_row("td", row, kinds, "row") for row in rows)),
    )
    return element("div", made, class_="scroll", role="group", aria_label=caption, tabindex=0)


def _row(tag: str, cells: Sequence[Cell], kinds: Sequence[str | None], scope: str) -> Element:
    """Return a row whose first cell, at least, is a heading."""
    first, *others = zip(cells, kinds, strict=True)
    return element(
        "tr",
        element("th", first[0], scope=scope, class_=first[1]),
        *(element(tag, cell, scope=scope if tag == "th" else None, class_=kind) for cell, kind in others),
    )


def facts(pairs: Iterable[tuple[str, Cell | None]]) -> Element:
    """Return a list of names and values, without None and empty ones; "" repeats the name before."""
    made = element("dl", class_="facts")
    for name, value in pairs:
        if value is None or value == "":
            continue
        if name or not len(made):
            add(made, element("div", element("dt", name)))
        add(made[-1], element("dd", value))
    return made


def badge(text: str, kind: str = "") -> Element:
    """Return a word that is highlighted; `kind` is good, warn or bad."""
    return element("span", text, class_=f"badge {kind}".strip())


def more(summary: str, *children: Child) -> Element:
    """Return an element that opens on a click, and is open in print."""
    return element("details", element("summary", summary), *children)


class Ids:
    """A generator of elements' ids, unique in a page and free of names that someone else chose."""

    def __init__(self) -> None:
        self._numbers = count(1)

    def new(self, what: str) -> str:
        """Return a new id, which begins with `what`."""
        return f"{what}-{next(self._numbers)}"


def day(seconds: float) -> str:
    """Return a moment as day and minute of local time."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")


def moment(seconds: float) -> Element:
    """Return a moment of local time, for a table."""
    iso = datetime.fromtimestamp(seconds).astimezone().isoformat("T", "seconds")
    return element("time", day(seconds), datetime=iso)


def gain_text(gain: float | None) -> str:
    """Return how many times as fast, as in 1.42, with a multiplication sign."""
    if gain is None:
        return "-"
    return f"{gain:,.0f}{_TIMES}" if gain >= 100 else f"{gain:.2f}{_TIMES}"


def state_badge(state: str) -> Element:
    """Return a state in its colour, and in words."""
    return badge(state.lower(), _STATES.get(state, "warn"))
