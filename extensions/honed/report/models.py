"""Draws each model: its engine and why, its latency, the gain of tuning, its versions and shape variants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.etree.ElementTree import Element

from honed.protocol.results import ModelHistory, ModelShown, ModelVersion
from honed.protocol.service import Figures, ModelFigures
from honed.protocol.values import ModelProof, engine_name
from honed.tool.commands.history import version_state
from honed.tool.commands.tasks import milliseconds
from honed.tool.output import bytes_text, shape_text
from honed.tool.view.tables import (
    NO_MODELS,
    VARIANT_HEADINGS,
    engine_text,
    in_parts,
    placement_text,
    variant_rows,
)

from .charts import draw, latency_chart, tuning_chart
from .contents import ReportedModel, gain, median_in_service
from .markup import (
    QUANTILES,
    Cell,
    Ids,
    badge,
    day,
    element,
    facts,
    gain_text,
    moment,
    more,
    name_of,
    state_badge,
    table,
)

_LATENCIES = (">p50", ">p95", ">p99")


def overview(models: Sequence[ReportedModel], anchors: Sequence[str]) -> Element:
    """Return a table of all models; latencies are the last minute's, or of all time if it had no request."""
    if not models:
        return element("p", NO_MODELS, class_="empty")
    return table(
        "Models, their engines and latencies in milliseconds",
        ("model", "state", "engine", *_LATENCIES, ">tuning won", ">requests", ">failed", ">version"),
        [
            (
                element("a", name_of(model.listed.name), href=f"#{anchor}"),
                state_badge(model.listed.state),
                _engine(model),
                *_latencies(model.figures),
                gain_text(gain(model.history)),
                f"{model.figures.served:,}",
                f"{sum(model.figures.failures.values()):,}",
                str(model.figures.version or "-"),
            )
            for model, anchor in zip(models, anchors, strict=True)
        ],
    )


def card(model: ReportedModel, anchor: str, ids: Ids) -> Element:
    """Return the section of one model."""
    shown = model.shown
    return element(
        "section",
        element("h3", name_of(model.listed.name), id=f"{anchor}-name"),
        element("p", state_badge(model.listed.state), badge(_engine(model)), " ", _why(model), class_="why"),
        element("p", model.listed.reason, class_="bad") if model.listed.reason else None,
        element("div", _facts(shown, model.figures), _latency(model.figures), class_="pair"),
        element("div", *_charts(model, ids), class_="charts"),
        _versions(model),
        _variants(model),
        more("Inputs, outputs and proof", _tensors(shown), _proof(shown)),
        class_="card",
        id=anchor,
        aria_labelledby=f"{anchor}-name",
    )


def _engine(model: ReportedModel) -> str:
    return engine_text(model.listed.engine, model.listed.pinned_engine, model.listed.variants)


def _why(model: ReportedModel) -> str:
    why = model.shown.placement.why or model.listed.engine_why
    served = f"by {placement_text(model.shown.placement)}"
    return served if not why or why in served else f"{served}: {why}"


def _latencies(figures: Figures) -> tuple[str, str, str]:
    spans = figures.recent.latency if figures.recent.latency.count else figures.latency
    return _ms(spans.p50), _ms(spans.p95), _ms(spans.p99)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{float(f'{seconds * 1e3:.3g}'):,.10g}"


def _facts(shown: ModelShown, figures: ModelFigures) -> Element:
    source = shown.source
    made = f"{source.filename}{f', opset {source.opset}' if source.opset else ''}"
    kernels = sum(kernel.launches > 0 for kernel in shown.kernels)
    engines = ", ".join(
        f"{count:,} by {engine_name(engine)}" for engine, count in figures.engines.items() if count
    )
    compiled = bool(shown.compiler)
    parts: list[tuple[str, Cell | None]] = [*in_parts(shown.parts)]
    return facts(
        [
            ("from", name_of(made)),
            ("added", day(shown.added)),
            ("precision", f"asked for {shown.precision}, computes in {source.precision}"),
            ("answers", engines),
            ("kernels", f"{kernels}, {shown.launches} launches an inference" if compiled else None),
            ("on the device", f"{bytes_text(shown.constant_bytes)} constants, "
                              f"{bytes_text(shown.arena_bytes)} scratch" if compiled else None),
            *parts,
            *(("note", note) for note in shown.notes),
        ]
    )  # fmt: skip


def _latency(figures: ModelFigures) -> Element | None:
    """Return a table of latency quantiles: of the last minute if it had requests, and since the start."""
    rows = [
        ("last minute", figures.recent.latency),
        ("since the service started", figures.latency),
        ("of that, waiting", figures.queue_time),
    ]
    if not figures.latency.count:
        return None
    return table(
        "Latency in milliseconds",
        ("of requests", *(f">{name}" for name in QUANTILES)),
        [
            (name, *map(_ms, (spans.p50, spans.p95, spans.p99, spans.max)))
            for name, spans in rows
            if spans.count
        ],
    )


def _charts(model: ReportedModel, ids: Ids) -> Iterator[Element]:
    for caption, chart, empty in (
        ("Latency served", latency_chart(model.history), _not_served(model)),
        (
            "Estimate while tuning",
            tuning_chart(model.listed.name, model.tuned),
            "Nothing is known of its tuning."
            if model.shown.compiler
            else "What is not compiled is not tuned.",
        ),
    ):
        caption_made = element("figcaption", caption, element("span", f" {chart.title}" if chart else ""))
        body = draw(chart, ids) if chart else element("p", empty, class_="empty")
        yield element("figure", caption_made, body)


def _not_served(model: ReportedModel) -> str:
    if model.figures.engines.get("cpu"):
        return "The curve is of compiled forms; the CPU engine answered all requests so far."
    return "No inference was served yet."


def _versions(model: ReportedModel) -> Element | None:
    history = model.history
    versions = {version.number: version for version in history.versions}
    rows, numbers = list[tuple[Cell, ...]](), set[int]()
    for span in history.deployments:
        version, end = versions[span.number], span.end or version_state(history)
        if span.number in numbers:  # The versions were compared at the first deployment
            rows.append((str(span.number), moment(span.since), *"----", "gone back to", end))
        else:
            rows.append(
                (str(span.number), moment(span.since), *_comparison_cells(version, history), version.why, end)
            )
        numbers.add(span.number)
    never = [version for version in history.versions if version.number not in numbers]
    rows += [(str(each.number), "never", *"----", each.why, each.quarantine) for each in never]
    if not rows:
        return None
    headings = ("version", "since", ">before", ">with it", ">won", ">served", "~why it came", "~why it went")
    return table(
        "Versions. Before and with it: side by side when it came; served: median in service", headings, rows
    )


def _comparison_cells(version: ModelVersion, history: ModelHistory) -> tuple[str, str, str, str]:
    """Return four cells: the former and the new time, the gain, and the time in service; - if unknown."""
    median_us = median_in_service(history, version.number)
    taken = milliseconds(median_us) if median_us is not None else "-"
    if not version.old_us or not version.new_us:
        return "-", "-", "-", taken
    won = gain_text(version.old_us / version.new_us)
    return milliseconds(version.old_us), milliseconds(version.new_us), won, taken


def _variants(model: ReportedModel) -> Element | None:
    variants, measured = model.shown.variants, {each.figures.name: each for each in model.variants}
    if not variants:
        return None
    rows = list[tuple[Cell, ...]]()
    for each, (shapes, asked, answered, *others, _, why) in variant_rows(variants):
        median = won = "-"
        if each.name in measured:
            median = _ms(measured[each.name].figures.latency.p50)
            won = gain_text(gain(measured[each.name].history))
        rows.append((name_of(shapes), asked, answered, median, won, *others, state_badge(each.state), why))
    shapes, asked, answered, *others, why = VARIANT_HEADINGS
    headings = (shapes, asked, answered, ">p50 ms", ">won", *others, f"~{why}")
    return table("Compiled forms for other shapes, the most asked for first", headings, rows)


def _tensors(shown: ModelShown) -> Element:
    rows = [("input", tensor) for tensor in shown.inputs] + [("output", tensor) for tensor in shown.outputs]
    return table(
        "Inputs and outputs",
        ("name", "use", "type"),
        [(name_of(each.name), kind, shape_text(each.datatype, each.shape)) for kind, each in rows],
    )


def _proof(shown: ModelShown) -> Element:
    proof: ModelProof | None = shown.proof
    if proof is None:
        why = "the file carries no reference outputs" if shown.compiler else "it is not compiled"
        return element("p", f"Nothing was compared with a reference: {why}.")
    outputs = shown.checked.outputs if shown.checked is not None else proof.outputs
    where = shown.checked.device if shown.checked is not None else proof.device or "no device"
    return table(
        f"Compared on {where} with {proof.reference} on {proof.probes} sets of inputs",
        ("output", ">largest error", ">allowed"),
        [
            (
                name_of(each.name),
                "-" if each.error is None else f"{each.error:.2g}",
                f"{each.tolerance:.2g}",
            )
            for each in outputs
        ],
    )
