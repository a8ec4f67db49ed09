"""The graph of a model of the service as a picture: fetch, draw, write."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from honed.machine.files import replacing
from honed.protocol.errors import Unavailable
from honed.protocol.methods import MODEL_PROFILE
from honed.protocol.results import ModelProfile
from honed.runtime.client import Client
from honed.runtime.compiled import modelfile
from honed.runtime.compiled.model import CompiledModel, HostCall, Launch
from honed.tool.output import Output, bytes_text, line
from honed.tool.parser import UsageError

from .boxes import draw
from .svg import page, picture
from .tables import compiled_share

_RUNS = 5  # inferences that times are the mean of


def checked(path: Path | None) -> Path:
    """The file to draw to; raises UsageError where its name does not say how."""
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
    """What the compiled file says, which the service hands out to who may change models."""
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
