"""The job that learns a prior."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from statistics import mean

from honed.jobs import commands, events
from honed.jobs.events import News, Note
from honed.jobs.priorfile import PriorFile
from honed.machine import devices, profilefile
from honed.machine.files import replacing
from honed.machine.profile import DeviceProfile
from honed.protocol.errors import InvalidArgument
from honed.tuner.valhall.benches import BENCHES, predicted

from .functions import functions
from .judged import LEAST_CANDIDATES, LEAST_TASKS, better, held_out, learned
from .lines import files, records
from .samples import samples


def learn(job: commands.Learn, emit: Callable[[News], None]) -> events.Learned:
    """Learn, judge, and write the prior where it picks better than what serves without one."""
    profile, found = _profile(job), files(job.file)
    known = functions(job.models, profile, emit)
    lines = chain.from_iterable(records(path) for path in found)
    gathered, left_out = samples(lines, known, profile, emit)
    emit(events.Stage(stage="learn", fraction=0.0, text=f"learn from {len(gathered)} candidates"))
    tasks = held_out(gathered)
    if len(tasks) < LEAST_TASKS:
        reasons = "".join(f"; {count} are {why}" for why, count in left_out.most_common())
        raise InvalidArgument(
            f"a prior is judged by {LEAST_TASKS} tasks with {LEAST_CANDIDATES} candidates at least, and of "
            f"these there are {len(tasks)}{reasons}; give more records, and the models that they are of"
        )
    good = better(tasks)
    if good:
        made = PriorFile(
            family=profile.rules.family,
            knows_rules=gathered.knows_rules,
            model=bytes(learned(gathered).save_raw("ubj")),
        )
        with replacing(job.output) as file:
            file.write(made.written())
    for why, count in left_out.most_common():
        emit(Note(text=f"{count} records are {why}, and were left out"))
    return events.Learned(
        output=str(job.output) if good else None,
        family=profile.rules.family,
        tasks=tuple(tasks),
        candidates=len(gathered),
        left_out=dict(left_out),
        prior=mean(one.prior for one in tasks),
        without=mean(one.without for one in tasks),
        correlation=mean(one.correlation for one in tasks),
    )


def _profile(job: commands.Learn) -> DeviceProfile:
    if job.bench is not None:
        if job.bench not in BENCHES:
            raise InvalidArgument(f"there is no bench {job.bench!r}; there is {', '.join(BENCHES)}")
        return predicted(job.bench)
    return profilefile.load(job.profile) if job.profile else devices.select(job.device).profile
