"""Variants of a model as a table."""

from __future__ import annotations

from collections.abc import Sequence

from honed.protocol.results import ShownVariant
from honed.tool.output import Table, bytes_text, table


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
