"""Each job is the command line that it is parsed from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from honed.farm.jobs import FarmCertificates, FarmScheduler, FarmWorker
from honed.jobs.commands import (
    JOBS,
    Check,
    CheckOptimisations,
    Compile,
    Demo,
    Export,
    Fit,
    Import,
    Job,
    Learn,
    ListFaults,
    ShowHistory,
    Tasks,
    Tune,
    extension,
    parse,
)  # fmt: skip
from honed.jobs.events import CompileDone, Done, Tuned
from honed.protocol.values import ObservedSizes
from honed.runtime.errors import InvalidArgument

FILE, OUT, RECORDS = Path("-m.onnx"), Path("-o"), Path("records")
EXAMPLES: list[Job[Any]] = [
    Compile(file=FILE, output=OUT),
    Compile(
        file=FILE, output=OUT, name="shown", shapes={"a=b": (1, 2), "c": (3,)}, precision="fp16",
        existing_build=OUT, memory_mib=512,
        calibration=Path("sets"), device="-d", profile=Path("p"), records=RECORDS,
        sizes=(ObservedSizes(part=1, sizes=(100, 7)), ObservedSizes(part=2, sizes=(3,))), keep_slower=True,
    ),
    Check(file=FILE, shapes={"x": (1,)}),
    Fit(file=FILE, shapes={"x": (1,)}, profile=FILE),
    CheckOptimisations(file=FILE, shapes={"x": (1,)}, memory_mib=64),
    Tasks(file=FILE, records=RECORDS, cache_dir=Path("c"), current=OUT),
    Tune(
        file=FILE, records=RECORDS, cache_dir=Path("c"), output=OUT,
        instrument="farm", settings={"url": "tls://pc:8786?a=b", "bench": ""},
        trials=3, seconds=0.1, seed=7,
    ),
    Export(records=RECORDS, output=OUT, best=True),
    Import(records=RECORDS, file=FILE, device="0"),
    ShowHistory(records=RECORDS, name="-m"),
    ListFaults(records=RECORDS),
    Learn(file=FILE, models=OUT, output=OUT, bench="mali-g610"),
    Demo(model="lightglue", output=OUT, keypoints=64, symbolic=True, seed=3),
    FarmScheduler(url="tls://pc", certificates=Path("c")),
    FarmWorker(url="-u", device="0", socket="s", alone=True, bench="b", bench_root=Path("r"), cache_dir=OUT),
    FarmCertificates(folder=OUT, names="pc,board"),
]  # fmt: skip


@pytest.mark.parametrize("job", EXAMPLES, ids=lambda job: type(job).__name__)
def test_there_and_back(job: Job[Any]) -> None:
    assert parse(job.arguments(), "") == job


def test_every_kind_has_an_example() -> None:
    kinds = (*JOBS, *extension("farm"))
    assert {type(job) for job in EXAMPLES} == set(kinds)
    assert len({kind.command for kind in kinds}) == len(kinds)


def test_what_a_job_comes_to() -> None:
    assert (Compile.result(), Check.result(), Tune.result()) == (CompileDone, Done, Tuned)


def test_a_job_on_the_same() -> None:
    check = EXAMPLES[1].derive(Check, memory_mib=64)
    assert (check.file, check.shapes, check.profile) == (FILE, {"a=b": (1, 2), "c": (3,)}, Path("p"))
    assert check.memory_mib == 64


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["fly"], ["records"], ["compile", "m"], ["compile", "m", "-o", "x", "--trials=3"]):
        with pytest.raises(SystemExit) as ended:
            parse(arguments, "")
        assert ended.value.code == 2
    assert "python -m honed.tuner" in capsys.readouterr().err
    with pytest.raises(InvalidArgument, match="INPUT=1,3,224,224"):
        parse(["check", "m", "--shape", "nonsense"], "")
    for text in ("nonsense", "x:1", "1:x"):
        with pytest.raises(InvalidArgument, match="PART:100,7"):
            parse(["compile", "m", "-o", "x", "--sizes", text], "")
