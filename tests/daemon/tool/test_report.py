"""`hone report`: a page that tells what the service told, and in which no name becomes markup."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from itertools import count, cycle, pairwise
from pathlib import Path
from typing import Any

import html5lib
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from honed.protocol import strict
from honed.protocol.errors import PermissionDenied
from honed.protocol.results import LatencyPoint
from honed.report.charts import Scale, heights, latency_chart, times
from honed.report.command import page
from honed.report.contents import Report, gain, median_in_service, task_shares
from honed.runtime import Client
from honed.tool.main import main
from honed.tool.output import clean
from tests.daemon.conftest import SIZE
from tests.daemon.running import Service

from .report_sample import sample

HTML, SVG = "{http://www.w3.org/1999/xhtml}", "{http://www.w3.org/2000/svg}"
ONE_OF = {"whose", "raised"}  # words of ours, not of others
HOSTILE = (
    "<script>alert(1)</script>", "</style><img src=x onerror=alert(1)>", "'\"><svg onload=alert(1)>", "]]>",
    "</title>", "<!--", "&lt;b&gt;", "&#60;b>", "</svg><iframe src=//x>", "\x00\x1b[2J", "\u202e", "\ud800",
    "a\nb", "javascript:alert(1)", "\N{FULLWIDTH LESS-THAN SIGN}b>", "</textarea>", "${x}{{7*7}}", "@", " ",
)  # fmt: skip
TEXTS = st.one_of(
    st.sampled_from(HOSTILE), st.text(min_size=1), st.text("<>&\"'/=!- abcsvgonERR", min_size=1)
)


def parsed(text: str) -> Any:
    """The document as browsers read it; it has no error."""
    parser = html5lib.HTMLParser()
    tree = parser.parse(text.encode())
    assert parser.errors == []
    return tree


def elements(tree: Any) -> Iterator[Any]:
    return (each for each in tree.iter() if isinstance(each.tag, str))


def counted(tree: Any) -> Counter[str]:
    """How many elements of which kind there are, but for places where lines may break."""
    return Counter(each.tag for each in elements(tree) if each.tag != f"{HTML}wbr")


def words(tree: Any) -> str:
    return " ".join("".join(tree.itertext()).split())


def changed(plain: object, text: Any, key: str = "") -> object:
    """A report as it travels, each text of others in it given by `text`."""
    if isinstance(plain, str):
        return plain if key in ONE_OF or not plain else text()
    if isinstance(plain, dict):
        fields = key in ("tasks", "gains", "temperatures", "trials", "failures", "engines")
        return {text() if fields else name: changed(value, text, name) for name, value in plain.items()}
    if isinstance(plain, list):
        return [changed(each, text, key) for each in plain]
    return plain


def report_of(text: Any) -> Report:
    return strict.from_plain(Report, changed(strict.to_plain(sample()), text), where="report")


@cache
def harmless() -> Counter[str]:
    return counted(parsed(page(report_of(numbered(["x"])))))


def numbered(texts: Sequence[str]) -> Callable[[], str]:
    """These in turn, each with a number behind it: names are different."""
    given = zip(cycle(texts), count(), strict=False)
    return lambda: "".join(map(str, next(given)))


@settings(max_examples=20)
@given(st.lists(TEXTS, min_size=1, max_size=4))
@example([*HOSTILE])
def test_no_name_becomes_markup(texts: list[str]) -> None:
    tree = parsed(page(report_of(numbered(texts))))
    assert counted(tree) == harmless()
    for each in elements(tree):
        assert not [name for name in each.attrib if name.startswith("on") or name in ("src", "srcdoc")]
        assert each.get("href", "#").startswith("#")
    told = words(tree)
    for text in texts:
        assert all(clean(word) in told for word in text.split())


def test_what_it_tells() -> None:
    tree = parsed(page(sample()))
    told = words(tree)
    for text in (
        "honed on board", "lightglue", "opencl, pinned +2", "4 workers in a row failed running it",
        "idle tuning: 120 trials in 90 s", "gone back to", "it is slower in service", "191x200 (by hand)",
        "2.00\N{MULTIPLICATION SIGN}", "the CPU engine answered all requests so far",
        "No inference was served yet", "120 of 129 nodes", "fused_matmul0_add", "here, evolution",
        "translation fault, level 1",
        "every queue of the process was lost", "it was killed by signal 11", "Mali-G610 r0p0", "kbase",
        "903 GFLOP/s", "at least 22.4 GB/s", "61.0 ms at most", "requests not answered yet",
        "something could not be asked for: the reason", "no verdict", "served, pinned, on trial",
    ):  # fmt: skip
        assert text in told, text
    tags = counted(tree)
    assert not {f"{HTML}{tag}" for tag in ("script", "link", "img", "iframe", "object", "form")} & set(tags)
    ids = [each.get("id") for each in elements(tree) if each.get("id")]
    assert len(ids) == len(set(ids))
    assert {each.get("href")[1:] for each in elements(tree) if each.get("href")} <= set(ids)
    assert "http" not in re.sub(r"http-equiv", "", page(sample())), "it needs nothing from elsewhere"


def test_pictures_are_told_in_words_too() -> None:
    tree = parsed(page(sample()))
    pictures = [each for each in elements(tree) if each.get("role") == "img"]
    assert len(pictures) == 3
    for picture in pictures:
        named = picture.get("aria-labelledby").split()
        texts = {each.get("id"): "".join(each.itertext()) for each in picture}
        assert all(texts[name] for name in named)
    assert "91 ms" in words(tree)
    for table in tree.iter(f"{HTML}table"):
        assert words(table.find(f"{HTML}caption"))
        assert all(each.get("scope") and words(each) for each in table.iter(f"{HTML}th"))


STYLE = resources.files("honed.report").joinpath("page.css").read_text()
THEMES = re.findall(r":root \{(.*?)\}", STYLE, re.S)
ON = {
    "ground": ("ink", "soft", "accent", "good", "warn", "bad"),
    "card": ("ink", "soft", "accent", "bad"),
    "good-soft": ("good",),
    "warn-soft": ("warn",),
    "bad-soft": ("bad",),
    "plain-soft": ("ink",),
}


@pytest.mark.parametrize("theme", THEMES, ids=["light", "dark", "print"])
def test_letters_stand_out(theme: str) -> None:
    """As WCAG 2.2 wants it of small ones: 4.5 to 1."""
    colours = dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]+)", theme))
    for ground, letters in ON.items():
        for each in letters:
            light, dark = sorted((luminance(colours[ground]), luminance(colours[each])), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, f"{each} on {ground}"


def luminance(colour: str) -> float:
    """Relative luminance of #rgb or #rrggbb, as WCAG defines it."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    shares = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_without_anything() -> None:
    """A service that was just started."""
    whole = sample()
    metrics = strict.copy_fields(type(whole.metrics), whole.metrics, tuning=None, devices=(), temperatures={})
    faults = replace(whole.faults, quarantined=None, log=(), log_reason="it cannot be read")
    bare = replace(whole, models=(), metrics=metrics, faults=faults, notes=())
    told = words(parsed(page(bare)))
    for text in (
        "There are no models yet", "No model took any time yet", "Not told; the notes say why",
        "It cannot be read.", "None ended by itself",
    ):  # fmt: skip
        assert text in told, text


def test_gains_are_those_of_the_versions_that_led_to_the_one_served() -> None:
    history = sample().models[0].history
    # 1, 2, 3, 4, back to 3, 5: what 4 won does not count.
    assert gain(history) == pytest.approx((1 / 0.62) ** 3)
    assert gain(sample().models[1].history) is None
    assert median_in_service(history, 2) == pytest.approx(91_000 * 0.62)
    assert median_in_service(history, 9) is None


def test_shares_are_of_the_time_of_all_models() -> None:
    shares = task_shares(sample().models)
    assert sum(share.share for share in shares) == pytest.approx(1.0)
    assert shares == sorted(shares, key=lambda share: -share.seconds)
    outside = [share for share in shares if share.name is None]
    assert {share.model for share in outside} == {"lightglue", "detector"}
    assert task_shares(()) == []


FIGURES = st.floats(1e-3, 1e9)


@given(FIGURES, FIGURES)
def test_every_value_has_a_place(one: float, other: float) -> None:
    least, most = sorted((one, other))
    scale = heights(least, most)
    assert scale.logarithmic == (most > 8 * least)
    _check(scale, least, most)
    assert 2 <= len(scale.labels) <= 14


@given(st.floats(0, 4e9), st.floats(0, 1e9))
def test_moments_are_told_in_order(begin: float, span: float) -> None:
    scale = times(begin, begin + span)
    assert not scale.logarithmic
    _check(scale, begin, begin + span)
    assert len(scale.labels) <= 8
    if span > 10:
        assert len(scale.labels) >= 2


def _check(scale: Scale, least: float, most: float) -> None:
    assert 0 <= scale.at(least) <= scale.at(most) <= 1
    values = [value for value, _ in scale.labels]
    assert values == sorted(values)
    assert all(0 <= scale.at(value) <= 1 for value in values)


POINTS = st.lists(
    st.builds(
        LatencyPoint, time=st.floats(0, 4e9), version=st.integers(0, 5), count=st.integers(1, 9), us=FIGURES
    )
)


@given(POINTS)
def test_any_latencies_are_drawn(points: list[LatencyPoint]) -> None:
    """Also where the clock was set back."""
    history = strict.copy_fields(
        type(sample().models[0].history), sample().models[0].history, latency=tuple(points)
    )
    chart = latency_chart(history)
    assert (chart is None) == (not points)
    if chart is not None:
        assert sum(map(len, chart.lines)) == len(points)
        changes = sum(one.version != other.version for one, other in pairwise(points))
        assert len(chart.rules) == changes + 1


@pytest.mark.service
@pytest.mark.opencl
def test_of_a_service(service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with service.client() as client:
        for _ in range(3):
            client.infer("small", {"x": np.zeros(SIZE, np.float32)})
    file = tmp_path / "report.html"
    assert main(["report", "-o", str(file), f"--socket={service.socket}", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == {
        "file": str(file), "bytes": file.stat().st_size, "models": 1, "notes": [],
    }  # fmt: skip
    told = words(parsed(file.read_text()))
    assert "small" in told
    assert str(service.socket) in told
    assert "3 by opencl" in told
    assert main(["report", "-o", str(file), f"--socket={service.socket}"]) == 0
    assert f"{file} has the report: 1 model, " in " ".join(capsys.readouterr().out.split())


class MayNotChange(Client):
    """What asks for a member of group honed."""

    def __init__(self, client: Client) -> None:
        self.ask = client.ask  # type: ignore[method-assign]

    def run_tuner(self, *_: object, **__: object) -> Any:
        raise PermissionDenied("user 9 may not call TunerRun")


def test_without_a_service_or_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "-o", str(tmp_path / "r.html"), f"--socket={tmp_path / 'none'}"]) == 1
    assert "no service answers" in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()
    assert main(["report"]) == 2
