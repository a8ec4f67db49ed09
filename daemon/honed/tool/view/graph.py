"""Writes the graph of a model in DOT, the language of Graphviz, which draws it if installed.

Names come from model files, so every text is escaped, unprintable characters too.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final, Literal

from honed.machine.files import replacing
from honed.protocol.errors import Unavailable
from honed.protocol.methods import MODEL_PROFILE
from honed.protocol.values import ModelProfile
from honed.runtime.client import Client
from honed.runtime.compiled import modelfile
from honed.runtime.compiled.model import (
    Buffer,
    CompiledModel,
    CpuPartition,
    FusedGroup,
    HostCall,
    Launch,
    Operator,
    SizeSpecialisation,
    Step,
    View,
)
from honed.runtime.compiled.plan import bytes_of, family_of, share_bytes, uses
from honed.tool.output import Output, bytes_text, clean
from honed.tool.parser import UsageError

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
    layout = lay_out(compiled, {row.name: row.us / row.count for row in rows if row.kind == "kernel"})
    text = to_dot(layout, model, list(_facts(compiled, profile)))
    with replacing(path) as target:
        target.write(text.encode() if path.suffix == _DOT else _draw(text, path.suffix[1:]))
    boxes = len(layout.boxes)
    document = {"file": str(path), "boxes": boxes}
    output.say(document, f"{path} has the graph: {boxes} boxes.")


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
    rows = [box.title, *box.steps, *box.notes, *(f"[{name}]" for name in box.passes)]
    heat = box.us / longest if longest else 0.0
    style = _STYLES.get(box.kind, "filled")
    label, tooltip = _quote(rows, ending="l"), _quote(box.detail.split("\n"))
    return f'n{number} [label={label} style="{style}" fillcolor="0.04 {heat:.3f} 1.0" tooltip={tooltip}]'


def _quote(rows: Sequence[str], ending: str = "n") -> str:
    """Return rows of text as a quoted string; each row ends with `ending`, and l aligns it left."""
    shortened = (
        row if len(row) <= _MAX_LETTERS else row[: _MAX_LETTERS - 1] + "…" for row in map(clean, rows)
    )
    escaped = (row.replace("\\", "\\\\").replace('"', '\\"') for row in shortened)
    separator = f"\\{ending}"
    text = separator.join(escaped) + (separator if ending != "n" else "")
    return f'"{text}"'


# The layout: what is computed together is a box, with its time; edges are its inputs.

Kind = Literal["input", "part", "copy", "output"]


@dataclass(frozen=True, slots=True)
class Box:
    """A box of the graph: a fused group, a partition or a copy, or an input or output of the model."""

    kind: Kind
    title: str
    group: str  # Layer of the model, from operators' names; equal for the boxes of one layer
    steps: tuple[str, ...]
    notes: tuple[str, ...]  # Results, views, prepared constants
    passes: tuple[str, ...]
    detail: str
    us: float = 0.0  # Microseconds that the steps take in an inference, as far as they are known


@dataclass(frozen=True, slots=True)
class GraphLayout:
    """Boxes in an order in which they can be computed; edges lead from writers to readers."""

    boxes: tuple[Box, ...]
    edges: tuple[tuple[int, int], ...]


def lay_out(model: CompiledModel, times: Mapping[str, float]) -> GraphLayout:
    """Return the boxes of a model; `times` are the microseconds of one launch, by kernel name."""
    readers = _readers(model)
    boxes = [
        Box("input", t.name, "", (), (_buffer_type(model.buffers[t.buffer]),), (), f"input {t.name}")
        for t in model.inputs
    ]
    writers = _Writers(model.buffers, {t.buffer: {t.buffer: n} for n, t in enumerate(model.inputs)})
    edges: list[tuple[int, int]] = []
    for part in _parts(model):
        number = len(boxes)
        boxes.append(_box(model, part, times, readers))
        for use in (use for step in _steps(model, part) for use in uses(model.kernels, step)):
            if use.writes:
                writers.add(use.buffer, number)
            else:
                edges += ((box, number) for box in writers.of(use.buffer) if box != number)
    made = {t.name: writers.of(t.buffer) for t in model.outputs}
    given = {t.name: [n] for n, t in enumerate(model.inputs)}
    split = model.split
    for n, one in [(n, split.parts[n]) for n in split.tail] if split is not None else ():
        edges += ((box, len(boxes)) for t in one.inputs for box in (made | given)[t.name])
        made |= {t.name: [len(boxes)] for t in one.outputs}
        boxes.append(_tail_box(model, n, one))
    for output in model.model_outputs:
        edges += ((box, len(boxes)) for box in made[output.name])
        typed = f"{output.dtype} {_shape(output.shape)}"
        boxes.append(Box("output", output.name, "", (), (typed,), (), f"output {output.name}"))
    return GraphLayout(tuple(boxes), tuple(dict.fromkeys(edges)))


@dataclass(frozen=True, slots=True)
class _Writers:
    """A table of the last writers: for each root buffer, the boxes by the buffers in it that they wrote."""

    buffers: Sequence[Buffer]
    boxes: dict[int, dict[int, int]]

    def add(self, buffer: int, box: int) -> None:
        self.boxes.setdefault(family_of(self.buffers, buffer), {})[buffer] = box

    def of(self, buffer: int) -> list[int]:
        """Return the boxes that wrote any of a buffer's bytes."""
        written = self.boxes.get(family_of(self.buffers, buffer), {})
        return [box for other, box in written.items() if share_bytes(self.buffers, other, buffer)]


def _parts(model: CompiledModel) -> Iterator[FusedGroup]:
    """Yield the model's fused groups as they run; a step that belongs to none is a group by itself."""
    prepared = {n for part in model.parts for n in part.prepare}
    numbered = {n for part in model.parts for n in part.steps}
    found = [(min(part.steps, default=-1), part) for part in model.parts]
    alone = [n for n in range(len(model.steps)) if n not in numbered]
    found += [(n, FusedGroup(operators=(), prepare=(), steps=(n,))) for n in alone]
    alone = [n for n in range(len(model.prepare)) if n not in prepared]
    found += [(-1, FusedGroup(operators=(), prepare=(n,), steps=())) for n in alone]
    # Groups that are only prepared come first, in the order of preparation.
    yield from (part for _, part in sorted(found, key=lambda one: (one[0], one[1].prepare)))


def _steps(model: CompiledModel, part: FusedGroup) -> list[Step]:
    return [*(model.prepare[n] for n in part.prepare), *(model.steps[n] for n in part.steps)]


def _box(
    model: CompiledModel, part: FusedGroup, times: Mapping[str, float], readers: Mapping[int, set[int]]
) -> Box:
    once = [f"{_step_text(model, model.prepare[n])}  once" for n in part.prepare]
    texts = [_step_text(model, model.steps[n]) for n in part.steps]
    steps = [f"{text}  {times[text]:,.1f} us" if text in times else text for text in texts]
    copies = not part.operators and not any(isinstance(s, Launch | HostCall) for s in _steps(model, part))
    passes = Counter(one for operator in part.operators for one in operator.passes)
    title = "copy" if copies else _title(part.operators) or _step_text(model, _steps(model, part)[0])
    return Box(
        kind="copy" if copies else "part",
        title=title,
        group=part.operators[0].name.rpartition("/")[0].split("/")[0] if part.operators else "",
        steps=(*once, *steps),
        notes=tuple(_notes(model, part, readers)),
        passes=tuple(passes),
        detail="\n".join(_describe(operator) for operator in part.operators),
        us=sum(times.get(text, 0.0) for text in texts),
    )


def _tail_box(model: CompiledModel, number: int, part: CpuPartition) -> Box:
    """Return the box of a tail partition, which the CPU engine runs after all steps.

    It lists the size specialisations that are compiled.
    """
    lines = [f"{part.nodes} nodes in the CPU engine"]
    for form in (form for form in model.forms if form.part == number):
        launches = sum(isinstance(step, Launch) for step in form.model.steps)
        lines.append(f"{_sizes(form.sizes)}: {launches} launches{_faster(form)}")
    notes = [f"= {t.name} {t.dtype} {_shape(t.shape)}" for t in part.outputs]
    assert model.split is not None
    left_out = [f"{_sizes(out.sizes)}: {out.why}" for out in model.split.left_out if out.part == number]
    title = "dense part" if part.sized else "last part"
    why = "\n".join(part.why)
    return Box("part", title, "", tuple(lines), (*part.why, *left_out, *notes), (), why)


def _faster(form: SizeSpecialisation) -> str:
    times = form.times
    if times is None:
        return ""
    return f", {times.compiled_us:,.0f} us where the CPU engine took {times.cpu_us:,.0f}"


def _sizes(sizes: Sequence[int]) -> str:
    return f"size {', '.join(map(str, sizes))}"


def _title(operators: Sequence[Operator]) -> str:
    """Return operators in their order, repeated ones counted."""
    runs = [(op, len(list(same))) for op, same in groupby(one.op for one in operators)]
    return " + ".join(op if count == 1 else f"{op} x{count}" for op, count in runs)


def _describe(operator: Operator) -> str:
    passes = f" ({', '.join(operator.passes)})" if operator.passes else ""
    return f"{operator.op} {operator.name}{passes}"


def _step_text(model: CompiledModel, step: Step) -> str:
    """Return what a step is; for a launch it is the kernel's name."""
    if isinstance(step, Launch):
        return model.kernels[step.kernel].name
    if isinstance(step, HostCall):
        number = step.attrs["part"]
        assert isinstance(number, int)
        assert model.split is not None
        return f"{model.split.parts[number].nodes} nodes in the CPU engine"
    return f"copy of {model.buffers[step.source].nbytes} bytes"


def _notes(model: CompiledModel, part: FusedGroup, readers: Mapping[int, set[int]]) -> Iterator[str]:
    """Yield the results of a fused group, and the constants that it reads."""
    touched = [use for step in _steps(model, part) for use in uses(model.kernels, step)]
    written = list(dict.fromkeys(use.buffer for use in touched if use.writes))
    for index in written:
        buffer = model.buffers[index]
        if buffer.place == "output" or not readers.get(index, set()) <= set(part.steps):
            yield f"= {_buffer_type(buffer)}"
        yield from _views(model, index)
        if buffer.place == "prepared":
            yield f"prepared constant {_buffer_type(buffer)}"
    read = dict.fromkeys(use.buffer for use in touched if not use.writes)
    constants = [index for index in read if model.buffers[index].place == "constant"]
    yield from (f"constant {_buffer_type(model.buffers[index])}" for index in constants)


def _views(model: CompiledModel, index: int) -> Iterator[str]:
    """Yield the views of a buffer or of bytes in it, and the smallest view that contains it."""
    around: list[View] = []
    mine = bytes_of(model.buffers, index)
    for view in model.views:
        if not share_bytes(model.buffers, view.buffer, index):
            continue
        if len(bytes_of(model.buffers, view.buffer)) <= len(mine):
            yield f"seen as {_shape(view.shape)}: {view.operator.op}, a view"
        else:
            around.append(view)
    if around:
        least = min(around, key=lambda view: model.buffers[view.buffer].nbytes)
        yield f"part of {_shape(least.shape)}: {least.operator.op}, a view"


def _readers(model: CompiledModel) -> dict[int, set[int]]:
    """Return, for each buffer, the numbers of the inference's steps that read any of its bytes."""
    read: dict[int, set[int]] = {}
    for n, step in enumerate(model.steps):
        for use in uses(model.kernels, step):
            if not use.writes:
                read.setdefault(use.buffer, set()).add(n)
    beside: dict[int, list[int]] = {}
    for index in read:
        beside.setdefault(family_of(model.buffers, index), []).append(index)
    return {
        index: set().union(
            *(
                read[other]
                for other in beside.get(family_of(model.buffers, index), ())
                if share_bytes(model.buffers, other, index)
            )
        )
        for index in range(len(model.buffers))
    }


def _buffer_type(buffer: Buffer) -> str:
    return f"{buffer.dtype} {_shape(buffer.shape)}"


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"
