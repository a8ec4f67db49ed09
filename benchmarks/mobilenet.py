"""Tunes MobileNet (case 3) and prints its tasks: every one tuned or left for a reason, none lost.

    python -m benchmarks.mobilenet [--trials 160] [--model FILE]

Exit status 1 where a task was lost or the answers are not as before.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests import models
from tests.tuner.running import Tuning


def main() -> int:
    """Tune the model, and print its tasks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=160)
    parser.add_argument("--model", type=Path, default=models.path("mobilenet_v2_035_128"))
    parser.add_argument("--shape", action="append", default=[], metavar="INPUT=1,3,128,128")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        more = [f"--trials={options.trials}", f"--output={folder / 'tuned.honed'}"]
        more += [f"--shape={shape}" for shape in options.shape]
        with Tuning(options.model, folder / "records.sqlite", folder, *more) as run:
            done = run.finish()
    if done["event"] != "done":
        print(done)
        return 1
    print(f"{'task':40s} {'weight':>6} {'default us':>10} {'best us':>8} {'trials':>6}  state")
    for row in done["tasks"]:
        default, best = (0 if row[key] is None else row[key] for key in ("default_us", "best_us"))
        state = f"{row['state']}: {row['reason']}" if row["reason"] else row["state"]
        failures = f" {row['failures']}" if row["failures"] else ""
        print(
            f"{row['name'][:40]:40s} {row['weight']:6d} {default:10.1f} {best:8.1f} {row['trials']:6d}  "
            f"{state}{failures}"
        )
    print(
        f"{done['tuned']} tuned, {done['skipped']} skipped, {done['lost']} lost, failures {done['failures']}"
    )
    print(f"{done['trials']} trials in {done['seconds']:.0f} s; {done['sentence']}")
    return 1 if done["lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
