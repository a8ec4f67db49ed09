"""The graph of a model of the service as SVG, alone or in an HTML page: legible on light and on dark ground.

Names come from model files, so every text is escaped, and what XML has no character for is left out.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby, pairwise
from pathlib import Path

from honed.machine.files import replacing
from honed.protocol.dataclass import dataclass
from honed.protocol.errors import Unavailable
from honed.protocol.methods import MODEL_PROFILE
from honed.protocol.results import ModelProfile
from honed.runtime.client import Client
from honed.runtime.compiled import modelfile
from honed.runtime.compiled.model import CompiledModel, HostCall, Launch
from honed.tool.output import Output, bytes_text, clean, line
from honed.tool.parser import UsageError

from .boxes import Box, BoxLine, GraphLayout, draw
from .layered import GAP_Y, BoxSize, Layout, Point, lay_out
from .tables import compiled_share

_RUNS = 5  # inferences that times are the mean of
_LETTER, _ROW, _PAD = 6.7, 16.0, 8.0  # of a letter of 11 px and a row of text, and around text; pixels
_LEAST, _MOST = 18, 46  # letters in a row of a box
_CHIP = 15.0  # the height of the row of passes
_SIDE, _MARGIN = 110.0, 24.0  # for the names of groups, and around everything
# Colours by class, literal: librsvg, and with it many viewers, knows no variables of CSS.
_SHAPE = """
text{font:11px monospace;white-space:pre}
.title{font-weight:bold}.head{font-size:15px;font-weight:bold}.copy{stroke-dasharray:4 3}
.edge{fill:none;stroke-width:1.2}.chip{fill:none}.chips{font-size:9px}
g.node:hover .box{stroke-width:2}
"""
_LIGHT = """
text{fill:#1d2430}.soft,.chips{fill:#5c6675}.once{fill:#7a5ea8}.ground{fill:#fff}.band{fill:#eef2f7}
.box{fill:#f6f8fb;stroke:#9aa5b5}.port{fill:#dcebfa}.heat{fill:#e4572e}
.edge{stroke:#8793a5}.chip{stroke:#5c6675}g.node:hover .box{stroke:#e4572e}
"""
_DARK = """
text{fill:#e6eaf0}.soft,.chips{fill:#9aa6b6}.once{fill:#b79be6}.ground{fill:#14181f}.band{fill:#191f28}
.box{fill:#1f2630;stroke:#5a6675}.port{fill:#1c3550}.heat{fill:#ff7a4d}
.edge{stroke:#66758a}.chip{stroke:#9aa6b6}g.node:hover .box{stroke:#ff7a4d}
"""
_STYLE = f"{_SHAPE}{_LIGHT}@media (prefers-color-scheme:dark){{{_DARK}}}"
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="color-scheme" content="light dark">
<style>
body{{margin:0;font:13px sans-serif}}nav{{position:fixed;right:1em;top:.6em}}
#graph{{overflow:auto;height:100vh}}
</style>
</head><body>
<nav><label>Scale <input type="range" min="0.1" max="2" step="0.05" value="1" id="scale"></label></nav>
<div id="graph">{svg}</div>
<script>
const drawn = document.querySelector("svg");
const wide = drawn.width.baseVal.value, high = drawn.height.baseVal.value;
document.getElementById("scale").addEventListener("input", event => {{
  drawn.setAttribute("width", wide * event.target.value);
  drawn.setAttribute("height", high * event.target.value);
}});
</script></body></html>
"""


def checked(path: Path | None) -> Path:
    """Return the file to draw to; raise UsageError where its name does not say how."""
    if path is None:
        raise UsageError("--graph draws to a file; name it with -o FILE.svg or -o FILE.html")
    if path.suffix not in (".svg", ".html"):
        raise UsageError(f"{path} is neither .svg nor .html; give a name that ends so")
    return path


def show_graph(socket: str | None, model: str, path: Path, output: Output) -> None:
    """Draw the graph of a model to a file."""
    with Client(socket) as client:
        compiled = _compiled(client, model)
        profile = _profile(client, model)
    drawing = draw(compiled, _times(profile))
    drawn = picture(drawing, model, list(_facts(compiled, profile)))
    text = drawn.svg if path.suffix == ".svg" else page(drawn, model)
    with replacing(path) as file:
        file.write(text.encode())
    boxes = len(drawing.boxes)
    document = {"file": str(path), "boxes": boxes, "width": drawn.width, "height": drawn.height}
    said = f"{path} has the graph: {boxes} boxes, {drawn.width} x {drawn.height} pixels."
    output.emit(document, lambda console: line(console, said))


def _compiled(client: Client, model: str) -> CompiledModel:
    """Return the contents of the compiled file. The service hands them out to users who may change models."""
    with tempfile.TemporaryDirectory(prefix="hone-") as folder, client.export(model) as files:
        path = files.save_compiled(Path(folder) / "model.honed")
        return modelfile.read(path, verify=False).model


def _profile(client: Client, model: str) -> ModelProfile | None:
    """Where the model's time goes; None where it is not served."""
    try:
        return MODEL_PROFILE.result_of(client.profile(model, _RUNS))
    except Unavailable:
        return None


def _times(profile: ModelProfile | None) -> dict[str, float]:
    """Microseconds of one launch by the names of kernels."""
    rows = profile.rows if profile else ()
    return {row.name: row.us / row.count for row in rows if row.kind == "kernel"}


def _facts(model: CompiledModel, profile: ModelProfile | None) -> Iterator[str]:
    launches = sum(isinstance(step, Launch) for step in model.steps)
    calls = sum(isinstance(step, HostCall) for step in model.steps)
    kernels = len({step.kernel for step in model.steps if isinstance(step, Launch)})
    copies = len(model.steps) - launches - calls
    source = model.source
    yield f"{source.filename}, computed in {source.precision}, for {model.device.identity.name}"
    if model.split is not None:
        split, parts = model.split, model.split.parts
        nodes = split.nodes, split.nodes + sum(part.nodes for part in parts)
        flops = split.flops, split.flops + sum(part.flops for part in parts)
        yield f"{compiled_share(nodes, flops)}; the CPU engine runs the rest in {len(parts)} parts"
    yield (
        f"{launches} launches of {kernels} kernels, {copies} copies, {calls} calls of partitions; "
        f"scratch {bytes_text(model.arena_bytes)}, constants {bytes_text(model.constant_bytes)}, "
        f"prepared {bytes_text(model.prepared_bytes)}"
    )
    if profile:
        yield (
            f"kernels take {profile.sum_us:,.0f} us of {profile.whole_us:,.0f} us for the whole, "
            f"mean of {profile.runs} inferences on {profile.device.name}"
        )
    else:
        yield "not profiled: the model is not served now"
    found = Counter(name for part in model.parts for one in part.operators for name in one.passes)
    if not model.parts:
        yield "an older honed compiled it, so its operators are not known; add it again to see them"
    elif found:
        said = ", ".join(f"{name} {times}" for name, times in found.most_common())
        yield f"operators made or changed by passes over the graph: {said}"


@dataclass(frozen=True, slots=True)
class Picture:
    """An SVG document and its size in pixels."""

    svg: str
    width: int
    height: int


def picture(drawing: GraphLayout, title: str, facts: Sequence[str]) -> Picture:
    """Return the graph below a title and facts about it, a row each."""
    sizes = [_size(box) for box in drawing.boxes]
    layout = lay_out(sizes, drawing.edges)
    left, top = _MARGIN + _SIDE, 2 * _MARGIN + _ROW * (len(facts) + 1)
    letters = max(map(len, facts), default=0)
    width = max(left + layout.width + _MARGIN, 2 * _MARGIN + _LETTER * letters)
    height = top + layout.height + _MARGIN
    whole = sum(box.us for box in drawing.boxes)
    most = max((box.us for box in drawing.boxes), default=0.0)
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">',
        f"<title>{_safe(title)}</title><style>{_STYLE}</style>",
        '<rect class="ground" width="100%" height="100%"/>',
        _text(_MARGIN, _MARGIN + 6, title, "head"),
        *(_text(_MARGIN, _MARGIN + 6 + _ROW * (n + 1), fact, "soft") for n, fact in enumerate(facts)),
        f'<g transform="translate({left:.1f} {top:.1f})">',
        *_bands(drawing.boxes, layout),
        *(_edge(points) for points in layout.lines.values()),
        *(
            part
            for box, corner, size in zip(drawing.boxes, layout.corners, sizes, strict=True)
            for part in _node(box, corner, size, whole, most)
        ),
        "</g></svg>\n",
    ]
    return Picture("\n".join(body), round(width), round(height))


def page(drawn: Picture, title: str) -> str:
    """Return the picture in an HTML page that scrolls and scales it."""
    return _PAGE.format(title=_safe(title), svg=drawn.svg)


def _rows(box: Box) -> list[str]:
    return [box.title, *(_timed(step) for step in box.steps), *box.notes]


def _timed(step: BoxLine) -> str:
    """Return a step and its time, with the time at the right end of a row."""
    if step.prepared:
        return f"{step.text}  once"
    return step.text if step.us is None else f"{step.text}  {step.us:,.1f} us"


def _letters(box: Box) -> int:
    chips = sum(len(one) + 2 for one in box.passes)
    return min(_MOST, max(_LEAST, chips, *map(len, _rows(box))))


def _size(box: Box) -> BoxSize:
    chips = _CHIP if box.passes else 0.0
    return BoxSize(_letters(box) * _LETTER + 2 * _PAD, len(_rows(box)) * _ROW + 2 * _PAD + chips)


def _node(box: Box, corner: Point, size: BoxSize, whole: float, most: float) -> Iterator[str]:
    """Yield a box with its rows; how much of the time it takes is a bar along its left edge."""
    x, y = corner
    letters = _letters(box)
    share = f"\n{box.us:,.1f} us, {box.us / whole:.1%} of all kernels" if box.us and whole else ""
    kind = {"part": "box", "copy": "box copy"}.get(box.kind, "box port")
    yield f'<g class="node"><title>{_safe(box.detail + share)}</title>'
    yield (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{size.width:.1f}" height="{size.height:.1f}" '
        'rx="5"/>'
    )
    if box.us and most:
        bar = (size.height - 6) * box.us / most
        yield (
            f'<rect class="heat" x="{x + 1:.1f}" y="{y + size.height - 3 - bar:.1f}" width="4" '
            f'height="{bar:.1f}"/>'
        )
    at, row = x + _PAD, y + _PAD + 10
    yield _text(at, row, _cut(box.title, letters), "title")
    for step in box.steps:
        row += _ROW
        yield from _step(step, at, row, letters)
    for note in box.notes:
        row += _ROW
        yield _text(at, row, _cut(note, letters), "soft")
    yield from _chips(box.passes, at, row + _ROW / 2)
    yield "</g>"


def _step(step: BoxLine, x: float, y: float, letters: int) -> Iterator[str]:
    time = _timed(step)[len(step.text) :].strip()
    name = _cut(step.text, letters - len(time) - 2 if time else letters)
    yield f'<g class="step"><title>{_safe(step.detail)}</title>'
    yield _text(x, y, name, "once" if step.prepared else "")
    if time:
        yield _text(x + _LETTER * (letters - len(time)), y, time, "once" if step.prepared else "")
    yield "</g>"


def _chips(passes: Sequence[str], x: float, y: float) -> Iterator[str]:
    for name in passes:
        width = len(name) * 5.5 + 8
        yield (
            f'<rect class="chip" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_CHIP - 2}" rx="6"/>'
            + _text(x + 4, y + 9.5, name, "chips")
        )
        x += width + 4


def _edge(points: Sequence[Point]) -> str:
    """Return a line that bends between layers and runs straight past boxes."""
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for (x, y), (to_x, to_y) in pairwise(points):
        if x == to_x:
            path += f"V{to_y:.1f}"
        else:
            bend = max(to_y - GAP_Y, y)  # boxes of one layer end at different heights
            middle = (bend + to_y) / 2
            path += f"V{bend:.1f}C{x:.1f} {middle:.1f} {to_x:.1f} {middle:.1f} {to_x:.1f} {to_y:.1f}"
    return f'<path class="edge" d="{path}"/>'


def _bands(boxes: Sequence[Box], layout: Layout) -> Iterator[str]:
    """Yield a band behind the layers of each group, with its name beside it."""
    groups = [_group([boxes[n] for n in layer]) for layer in layout.layers]
    rows = list(zip(groups, layout.layers, strict=True))
    for number, (name, run) in enumerate(groupby(rows, key=lambda row: row[0])):
        inside = [n for _, layer in run for n in layer]
        top = min(layout.corners[n][1] for n in inside) - GAP_Y / 2
        bottom = max(layout.corners[n][1] + _size(boxes[n]).height for n in inside) + GAP_Y / 2
        if number % 2:
            yield (
                f'<rect class="band" x="{-_SIDE:.0f}" y="{top:.1f}" width="{layout.width + _SIDE:.1f}" '
                f'height="{bottom - top:.1f}"/>'
            )
        yield _text(-_SIDE + 6, top + _ROW, _cut(name, int(_SIDE / _LETTER) - 2), "soft")


def _group(layer: Sequence[Box]) -> str:
    """Return the group of most of a layer's boxes."""
    names = [box.group for box in layer]
    return max(names, key=names.count)


def _text(x: float, y: float, text: str, kind: str) -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{named}>{_safe(text)}</text>'


def _cut(text: str, letters: int) -> str:
    return text if len(text) <= letters else text[: max(letters - 1, 0)] + "…"


def _safe(text: str) -> str:
    """Text of a document: printable, lines kept, marks escaped."""
    return escape("\n".join(clean(line) for line in text.split("\n")))
