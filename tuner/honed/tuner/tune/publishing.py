"""What a run comes to in the end: a file compiled with the best schedules, and a sentence on it.

The functions here give what they add to the run's last event.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from honed.runtime import profilefile
from honed.tuner.shapes import parse_shapes

from .compare import Comparison, compare
from .compiling import Compilation, compile_apart
from .opening import Opened
from .session import Session

Emit = Callable[[dict[str, Any]], None]
# Below this, a difference between two medians is noise.
_GAIN = 1.02


def measured(arguments: argparse.Namespace, emit: Emit, run: Opened) -> dict[str, Any]:
    """Compile the best and compare it with what is served now: only what is faster is kept."""
    session, spec = run.session, run.spec
    if arguments.output is None or all(p.best_trace is None for p in session.tasks):
        return {"sentence": _nothing(session)}
    assert spec is not None
    emit({"event": "stage", "stage": "publish", "fraction": 0.0, "text": "compile with the best schedules"})
    with tempfile.TemporaryDirectory(prefix="honed-publish-") as folder:
        wanted = replace(_compilation(arguments, run, folder), device=spec)
        compile_apart(wanted)
        current = arguments.current or Path(folder) / "default.honed"
        if arguments.current is None:
            compile_apart(replace(wanted, output=current, records=None, like=wanted.output))
        emit({"event": "stage", "stage": "publish", "fraction": 0.7, "text": "compare side by side"})
        found = compare(current, arguments.output, spec)
    event = {"before_us": found.old * 1e6, "after_us": found.new * 1e6}
    sentence = _sentence(found)
    if found.wrong or found.new * _GAIN > found.old:
        arguments.output.unlink(missing_ok=True)
        return event | {"sentence": sentence}
    why = f"tuned: {session.trials} trials in {session.seconds:.0f} s"
    run.records.add_version(session.name, why, found.new)
    return event | {"output": str(arguments.output), "sentence": sentence}


def predicted(arguments: argparse.Namespace, emit: Emit, run: Opened) -> dict[str, Any]:
    """Compile with the best predicted schedules; nothing is compared, for the device is not here."""
    event = {"sentence": _foretold(run.session, run.profile.identity.name)}
    if arguments.output is None or not run.session.tasks:
        return event
    emit({"event": "stage", "stage": "publish", "fraction": 0.0, "text": "compile with the best schedules"})
    with tempfile.TemporaryDirectory(prefix="honed-publish-") as folder:
        compile_apart(_compilation(arguments, run, folder))
    return event | {"output": str(arguments.output)}


def _compilation(arguments: argparse.Namespace, run: Opened, folder: str) -> Compilation:
    """For the device that was tuned on; its profile goes to a file in `folder`."""
    profile = Path(folder) / "profile.toml"
    profile.write_text(profilefile.dumps(run.profile))
    return Compilation(
        source=arguments.file,
        output=arguments.output,
        device=None,
        precision=arguments.precision,
        shapes=parse_shapes(arguments.shape),
        records=arguments.records,
        profile=profile,
        calibration=arguments.calibration,
        like=arguments.current,
    )


def _nothing(session: Session) -> str:
    """Why nothing faster is there."""
    if session.trials:
        return "no schedule faster than the present ones was found"
    if session.stopped:
        return "it was stopped before a candidate was tried"
    reasons = Counter(p.reason for p in session.tasks if p.reason)
    most = f", most often because: {reasons.most_common(1)[0][0]}" if reasons else ""
    return f"nothing could be tried: no task is left to tune{most}"


def _sentence(found: Comparison) -> str:
    times = f"{found.old * 1e3:.3g} ms before, {found.new * 1e3:.3g} ms now, {found.runs} runs each"
    if found.wrong:
        return f"the tuned model is not used: as a whole it answers wrong ({found.wrong})"
    if found.new * _GAIN > found.old:
        return f"the tuned model is not used: side by side it is not faster ({times})"
    return f"{found.old / found.new:.2f} times faster, measured side by side ({times})"


def _foretold(session: Session, device: str) -> str:
    model = session.table()["model"]
    if all(p.best_trace is None for p in session.tasks):
        found = _nothing(session)
    else:
        found = (
            f"{model['before_us'] / 1e3:.3g} ms with default schedules, {model['now_us'] / 1e3:.3g} ms now"
        )
    return f"predicted for {device}: {found}; times are bounds, and no answer was checked on the device"
