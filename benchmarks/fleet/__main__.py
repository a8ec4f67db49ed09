"""A fleet and its hub: `python -m benchmarks.fleet HUB RECORDS.jsonl`.

HUB is the folder of a real hub, whose files' sizes are taken; RECORDS what `hone records export` wrote of a
search, whose trials and times are taken. Prints tables; nothing is sent.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from .search import Search
from .simulate import HOUR, Fleet, Outcome, Reading, simulate
from .sizes import Http, Sizes


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description=__doc__)
    parser.add_argument("hub", type=Path)
    parser.add_argument("records", type=Path)
    parser.add_argument("--boards", type=int, default=1000)
    parser.add_argument("--hours", type=float, default=6.0, help="between two pulls")
    parser.add_argument("--line-mbit", type=float, default=100.0, help="a second, out of the hub")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    sizes, http, search = Sizes.of(options.hub), Http(), Search.of(options.records)
    print(
        f"A board's index has {sizes.index:.0f} bytes, its signature {sizes.index_signature:.0f}, its "
        f"{sizes.count:.0f} records {sizes.records:.0f}; the keyring {sizes.keyring:.0f} a board."
    )
    print(
        f"The search behind {options.records.name}: {search.tasks} tasks, {search.trials} trials in "
        f"{search.seconds:.0f} s; one trial of each best schedule: {search.tasks} in {search.hinted_s:.0f} s."
    )
    fleet = Fleet(boards=options.boards, hours=options.hours, line_mbit=options.line_mbit, seed=options.seed)
    pushers = sorted({n for n in (1, 10, 100, options.boards) if n <= options.boards})
    tables = {
        f"{options.boards} boards, pulls every {options.hours:g} h, 2 % off for a day": [
            (f"{n} push; {way.value}", replace(fleet, pushers=n, reading=way))
            for n in pushers
            for way in Reading
        ],
        "All on again at the same moment, 10 push": [
            (f"{way.value}; {'apart' if apart else 'at once'}", replace(
                fleet, pushers=10, reading=way, together=True, apart=apart))
            for way in (Reading.CONDITIONAL, Reading.LISTED)
            for apart in (False, True)
        ],
        "The hub is away for a day from the last push on, 10 push": [
            (way.value, replace(fleet, pushers=10, reading=way, down_h=24.0)) for way in Reading
        ],
        "How often, 10 push": [
            (f"every {hours:g} h; {way.value}", replace(fleet, pushers=10, reading=way, hours=hours))
            for hours in (1.0, 6.0, 24.0)
            for way in (Reading.CONDITIONAL, Reading.LISTED)
        ],
        "How many, a hundredth push": [
            (f"{n} boards; {way.value}", replace(fleet, boards=n, pushers=n // 100, reading=way))
            for n in (100, 300, 1000, 3000)
            for way in (Reading.CONDITIONAL, Reading.LISTED)
        ],
    }  # fmt: skip
    for title, rows in tables.items():
        print(f"\n{title}")
        _table(rows, sizes, http)
    return 0


def _table(rows: Iterable[tuple[str, Fleet]], sizes: Sizes, http: Http) -> None:
    print(
        "| what | requests a day | MB a day out of the hub | KB a day of a board | most requests a second "
        "| longest pull, s | notes lost | half have all, h | all that are on, h | all, h |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for what, fleet in rows:
        print(_row(what, simulate(fleet, sizes, http)))


def _row(what: str, one: Outcome) -> str:
    cells = (
        f"{one.requests_a_day:,.0f}",
        f"{one.bytes_a_day / 1e6:,.1f}",
        f"{one.board_bytes_a_day / 1e3:,.0f}",
        f"{one.most_a_second:,}",
        f"{one.longest_pull_s:,.1f}",
        f"{one.lost}",
        f"{one.half_s / HOUR:.1f}",
        f"{one.on_s / HOUR:.1f}",
        f"{one.all_s / HOUR:.1f}",
    )
    return f"| {what} | {' | '.join(cells)} |"


if __name__ == "__main__":
    raise SystemExit(main())
