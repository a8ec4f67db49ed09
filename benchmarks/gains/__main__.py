"""How fast tuning gets where it gets: `python -m benchmarks.gains`.

Tunes LightGlue and MobileNet in three settings, each from an empty folder: cold (an installation without
priors, no records), with kin (the same, after another size of the model was tuned as long), and with the
prior as it ships. Prints a table and draws the best total over seconds into a PNG file a model.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

import honed.tuner
from honed.tool.view.picture import draw
from honed.tool.view.plot import Curve, Mark, microseconds

from .models import MODELS, Model
from .runs import Kind, Moment, Run, tune, within

_HEADS = ("setting", "before", "after", "trials", "90 % of its gain", "90 % of the best's", "products/s")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gains", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="of each of four runs a model (300)")
    parser.add_argument("--only", default="", help="models whose names contain this")
    parser.add_argument("--device", metavar="SPEC", help="the OpenCL device; the best one where not given")
    parser.add_argument("--out", type=Path, default=Path(), help="the folder of the pictures (this one)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for model in MODELS:
        if options.only in model.network:
            runs = _runs(model, options.seconds, options.device)
            _print(model, runs)
            path = options.out / f"gains-{model.network}.png"
            with path.open("wb") as file:
                draw(file, "png", *_curves(model, runs))
            print(f"{path} is drawn.", flush=True)
    return 0


def _runs(model: Model, seconds: float, device: str | None) -> dict[str, Run]:
    with tempfile.TemporaryDirectory(prefix="honed-gains-") as name:
        folder = Path(name)
        bare = without_priors(folder / "without-priors")
        file, kin = model.write(folder, model.size), model.write(folder, model.kin)
        cold = tune(file, folder / "cold", seconds, tuner=bare, device=device)
        tune(kin, folder / "kin", seconds, tuner=bare, device=device)
        return {
            "cold": cold,
            "with kin": tune(file, folder / "kin", seconds, tuner=bare, device=device),
            "with the prior": tune(file, folder / "prior", seconds, tuner=None, device=device),
        }


def without_priors(folder: Path) -> Path:
    """A copy of the tuner that has no priors, for the front of PYTHONPATH."""
    (installed,) = honed.tuner.__path__
    shutil.copytree(installed, folder / "honed/tuner", ignore=shutil.ignore_patterns("priors", "__pycache__"))
    return folder


def _print(model: Model, runs: Mapping[str, Run]) -> None:
    table = Table(*_HEADS, "convolutions/s", title=f"{model.network}, {model.size}")
    bar = within(runs.values())
    for setting, run in runs.items():
        table.add_row(
            setting,
            f"{run.moments[0].total_us / 1e3:.4g} ms after {run.moments[0].seconds:.0f} s",
            f"{run.last.total_us / 1e3:.4g} ms after {run.last.seconds:.0f} s",
            str(run.last.trials),
            _told(run.near),
            _told(run.below(bar)),
            *(
                f"{rate:.2f}" if (rate := run.rate(kind)) else "-"
                for kind in (Kind.PRODUCT, Kind.CONVOLUTION)
            ),
        )
    Console(width=150).print(table)


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.2f}"


def _told(moment: Moment | None) -> str:
    return "not reached" if moment is None else f"{moment.seconds:.0f} s, {moment.trials} trials"


def _curves(model: Model, runs: Mapping[str, Run]) -> list[Curve]:
    size, unit = microseconds(max(run.moments[0].total_us for run in runs.values()))
    return [
        Curve(
            title=f"{model.network} {model.size}: best total of its tasks over seconds of tuning",
            x_name="seconds",
            y_name=f"{unit} an inference",
            points=[(one.seconds, one.total_us / size) for one in run.moments],
            marks=[Mark(x=run.near.seconds, y=run.near.total_us / size, label=f"{setting}: 90 %")],
        )
        for setting, run in runs.items()
    ]


if __name__ == "__main__":
    raise SystemExit(main())
