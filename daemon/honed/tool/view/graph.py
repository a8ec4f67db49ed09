"""Writes the graph of a model in DOT, the language of Graphviz, which draws it if installed.

Names come from model files, so every text is escaped, unprintable characters too.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Final

from honed.machine.files import replacing
from honed.protocol.errors import Unavailable
from honed.protocol.methods import MODEL_PROFILE
from honed.protocol.results import ModelProfile
from honed.runtime.client import Client
from honed.runtime.compiled import modelfile
from honed.runtime.compiled.model import CompiledModel, HostCall, Launch
from honed.tool.output import Output, bytes_text, clean, line
from honed.tool.parser import UsageError

from .boxes import Box, BoxLine, GraphLayout, draw
from .tables import compiled_share

_RUNS: Final = 5  # Number of inferences that times are the mean of
_DOT: Final = ".dot"
_BY_GRAPHVIZ: Final = (".svg", ".png", ".pdf")
_MAX_LETTERS: Final = 160  # Maximum characters of a row of text
_SECONDS: Final = 120.0  # Time limit of Graphviz
_STYLES: Final = {"copy": "rounded,dashed,filled", "part": "rounded,filled"}


def check_path(path: Path | None) -> Path:
    """Return the file to write; raise UsageError if its suffix is unknown, or Graphviz is missing."""
    if path is None:
        raise UsageError(
            "--graph writes a file; name it with -o FILE.dot, or FILE.svg with Graphviz installed"
        )
    if path.suffix not in (_DOT, *_BY_GRAPHVIZ):
        raise UsageError(f"{path} is none of {', '.join((_DOT, *_BY_GRAPHVIZ))}; give a name that ends so")
    if path.suffix != _DOT and shutil.which("dot") is None:
        raise UsageError(f"{path} needs Graphviz (Debian's graphviz); install it, or name a file .dot")
    return path


def show_graph(socket: str | None, model: str, path: Path, output: Output) -> None:
    """Write the graph of a model to a file."""
    profile: ModelProfile | None = None
    with Client(socket) as client:
        # The service hands the compiled file out to users who may change models.
        with tempfile.TemporaryDirectory(prefix="hone-") as folder, client.export(model) as files:
            file = files.save_compiled(Path(folder) / "model.honed")
            compiled = modelfile.read(file, verify=False).model
        with suppress(Unavailable):  # The model is not served now
            profile = MODEL_PROFILE.result_of(client.profile(model, _RUNS))
    rows = profile.rows if profile else ()
    layout = draw(compiled, {row.name: row.us / row.count for row in rows if row.kind == "kernel"})
    text = to_dot(layout, model, list(_facts(compiled, profile)))
    with replacing(path) as target:
        target.write(text.encode() if path.suffix == _DOT else _draw(text, path.suffix[1:]))
    boxes = len(layout.boxes)
    document = {"file": str(path), "boxes": boxes}
    output.emit(document, lambda console: line(console, f"{path} has the graph: {boxes} boxes."))


def _draw(text: str, kind: str) -> bytes:
    """Draw a graph with Graphviz; raise Unavailable if that fails."""
    try:
        return subprocess.run(
            ["dot", f"-T{kind}"], input=text.encode(), capture_output=True, check=True, timeout=_SECONDS
        ).stdout
    except subprocess.CalledProcessError as error:
        said = clean(error.stderr.decode(errors="replace").strip())[:200]
        raise Unavailable(f"Graphviz could not draw the graph ({said}); write it to a .dot file") from None
    except subprocess.TimeoutExpired:
        raise Unavailable(f"Graphviz took more than {_SECONDS:g} s; write the graph to a .dot file") from None


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


def to_dot(layout: GraphLayout, title: str, facts: Sequence[str]) -> str:
    """Return a graph in DOT below a title and facts; boxes of one layer of the model are a cluster."""
    longest = max((box.us for box in layout.boxes), default=0.0)
    numbered = list(enumerate(layout.boxes))
    lines = [
        f"digraph {_quote([title])} {{",
        f"label={_quote([title, *facts], ending='l')} labelloc=t labeljust=l",
        'node [shape=box fontname="monospace" fontsize=10]',
    ]
    for number, (group, run) in enumerate(groupby(numbered, key=lambda pair: pair[1].group)):
        nodes = [_node(n, box, longest) for n, box in run]
        if group:
            nodes = [f"subgraph cluster_{number} {{", f"label={_quote([group])}", *nodes, "}"]
        lines += nodes
    lines += (f"n{writer} -> n{reader}" for writer, reader in layout.edges)
    return "\n".join([*lines, "}\n"])


def _node(number: int, box: Box, longest: float) -> str:
    """Return a box with its rows; the more of the time it takes, the redder it is."""
    rows = [box.title, *map(_row, box.steps), *box.notes, *(f"[{name}]" for name in box.passes)]
    heat = box.us / longest if longest else 0.0
    style = _STYLES.get(box.kind, "filled")
    label, tooltip = _quote(rows, ending="l"), _quote(box.detail.split("\n"))
    return f'n{number} [label={label} style="{style}" fillcolor="0.04 {heat:.3f} 1.0" tooltip={tooltip}]'


def _row(step: BoxLine) -> str:
    if step.prepared:
        return f"{step.text}  once"
    return step.text if step.us is None else f"{step.text}  {step.us:,.1f} us"


def _quote(rows: Sequence[str], ending: str = "n") -> str:
    """Return rows of text as a quoted string; each row ends with `ending`, and l aligns it left."""
    shortened = (
        row if len(row) <= _MAX_LETTERS else row[: _MAX_LETTERS - 1] + "…" for row in map(clean, rows)
    )
    escaped = (row.replace("\\", "\\\\").replace('"', '\\"') for row in shortened)
    separator = f"\\{ending}"
    text = separator.join(escaped) + (separator if ending != "n" else "")
    return f'"{text}"'
