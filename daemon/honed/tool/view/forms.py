"""What `hone show` says of a model that runs in parts, on two engines, and of forms for other shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from honed.protocol.results import ShownForm, ShownPart, ShownVariant, TensorMetadata
from honed.tool.output import Table, bytes_text, clean, shape_text, table


def in_parts(parts: Sequence[ShownPart]) -> Iterator[tuple[str, str]]:
    """Rows: how much of the model is compiled, and for each of the other parts what it is and why."""
    if not parts:
        return
    compiled = [part for part in parts if part.engine == "gpu"]
    nodes = sum(part.nodes for part in compiled), sum(part.nodes for part in parts)
    flops = sum(part.flops for part in compiled), sum(part.flops for part in parts)
    yield "in parts", compiled_share(nodes, flops)
    for number, part in enumerate(part for part in parts if part.engine == "cpu"):
        where = "behind that" if part.last else "in between"
        yield "", f"part {number} runs {where} in the CPU engine: {part.nodes} nodes, {_handed(part)}"
        yield from (("", f"because of {clean(why)}") for why in part.why)
        if part.sized:
            yield from (("", _form(form)) for form in part.forms)
            yield "", "it is compiled for the sizes that it meets often, when the machine is idle"


def _form(form: ShownForm) -> str:
    sizes = ", ".join(map(str, form.sizes))
    if form.why:
        return f"not compiled for size {sizes}: {clean(form.why)}"
    if form.compiled_us is None or form.cpu_us is None:
        return f"compiled for size {sizes}"
    return (
        f"compiled for size {sizes}: {form.compiled_us / 1e3:.3g} ms where the CPU engine took "
        f"{form.cpu_us / 1e3:.3g} ms"
    )


def compiled_share(nodes: tuple[int, int], flops: tuple[int, int]) -> str:
    """How many of the nodes, and of the operations, are compiled, of how many."""
    return (
        f"{nodes[0]} of {nodes[1]} nodes and {flops[0] / max(1, flops[1]):.1%} of the operations are compiled"
    )


def _handed(part: ShownPart) -> str:
    return f"of {_tensors(part.inputs)} makes {_tensors(part.outputs)}"


def _tensors(tensors: Sequence[TensorMetadata]) -> str:
    return ", ".join(f"{clean(t.name)} {shape_text(t.datatype, t.shape)}" for t in tensors) or "nothing"


def variants_table(variants: Sequence[ShownVariant]) -> Table:
    """Compiled forms for other shapes, the most asked for first."""
    headings = ("other shapes", ">asked", ">answered", ">version", "engine", ">size", "state", "why")
    return table(
        headings,
        [
            (
                each.name.partition("@")[2] + (" (by hand)" if each.by_hand else ""),
                f"{each.requests:.0f}",
                str(each.answered),
                str(each.version) if each.version else "-",
                each.engine,
                bytes_text(each.bytes),
                each.state.lower(),
                each.why,
            )
            for each in sorted(variants, key=lambda each: (-each.requests, each.name))
        ],
    )
