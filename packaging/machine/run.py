"""Installs honed in an emulated arm64 machine, runs the tests beside this file, and times its start.

Started by packaging/machine-test, which makes what the options name.
"""

from __future__ import annotations

import argparse
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from machine import CommandError, Machine, MachineError

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1]
VENV = SOURCE / ".venv/bin"
_SECONDS = 5400  # of one test
_BUILDS_ON = {"install": [], "compiled": ["install"], "faults": ["compiled"], "boot": ["compiled"],
              "compiler": ["compiled"], "limits": ["compiler"], "board": ["install"]}  # fmt: skip
_RESULT = re.compile(r"^RESULT (.+): (.+?)\r?$", re.MULTILINE)
_ANSWER = re.compile(r"first answer at ([0-9.]+), asked at ([0-9.]+)")


def models_of(folder: str, run: Path) -> list[Path]:
    """A small model and those a user named, each a folder with references."""
    made = run / "models"
    subprocess.run([VENV / "python", HERE / "references.py", made, *([folder] if folder else [])], check=True)
    return sorted(made.iterdir())


def compile_here(machine: Machine, models: list[Path], run: Path) -> None:
    """Compile the models here for the machine's device, by the profile that the first test wrote there."""
    machine.get("/root/out", run / "out")
    for model in models:
        command: list[str | Path] = [VENV / "hone", "compile", model / "model.onnx"]
        command += ["-o", model / "model.honed", "--profile", run / "out/board.toml"]
        subprocess.run([*command, *(model / "options").read_text().split()], check=True)
    machine.put([(model, model.name) for model in models], "/root/models")


def carry_in(machine: Machine, dist: Path, archives: Path, driver: Path, run: Path) -> None:
    """What the tests need."""
    debs = [path for path in sorted(dist.glob("*.deb")) if path.stem.endswith(("_all", "_arm64"))]
    source = [(SOURCE / name, name) for name in ("debian", "examples") if (SOURCE / name).exists()]
    machine.put([(path, f"debs/{path.name}") for path in debs], "/root")
    machine.put([(HERE / "tests", "tests"), (driver, "mali.ko")], "/root")
    machine.put(source, "/root/source")
    clone = run / "clone.tar"
    subprocess.run(["git", "-C", SOURCE, "archive", f"--output={clone}", "HEAD"], check=True)
    machine.put([(clone, clone.name)], "/root")
    machine.put([(path, path.name) for path in sorted(archives.glob("*.deb"))], "/var/cache/apt/archives")


def time_starts(machine: Machine, boots: int) -> dict[str, str]:
    """From power on to the first answer to an app, the machine having been off."""
    machine.run("/root/tests/prepare-boot", 300)
    rows: list[tuple[float, float]] = []
    for _ in range(boots):
        machine.power_off()
        machine.boot(600)
        whole = machine.said("first answer at", 600) - machine.started
        console = machine.console.read_bytes().decode(errors="replace")
        answer = _ANSWER.search(console)
        assert answer is not None
        rows.append((whole, float(answer[1])))
        machine.run("systemctl is-system-running --wait || true", 300)
        sys.stdout.write(machine.run("systemd-analyze; systemd-analyze blame --no-pager | head -n 8", 300))
        sys.stdout.write(f"power on to first answer {whole:.1f} s, of the kernel's time {answer[1]} s\n")
    return {
        f"power on to first answer, median of {boots}, s": f"{statistics.median(row[0] for row in rows):.1f}",
        "the same from the kernel's first moment, s": f"{statistics.median(row[1] for row in rows):.1f}",
    }


def run_test(machine: Machine, name: str, figures: dict[str, str]) -> None:
    """One of tests/; adds its figures, also where it fails."""

    def hear(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    work = f"/var/tmp/{name}"
    said = ""
    try:
        said = machine.run(f"mkdir -p {work} && AUTOPKGTEST_TMP={work} /root/tests/{name}", _SECONDS, hear)
    except CommandError as error:
        said = error.said
        raise
    finally:
        figures |= _RESULT.findall(said)


def with_needs(tests: list[str]) -> list[str]:
    """These tests, or all, and what they build on, in the order they run in."""
    wanted = set(tests or _BUILDS_ON)
    for name in reversed(_BUILDS_ON):
        if name in wanted:
            wanted.update(_BUILDS_ON[name])
    return [name for name in _BUILDS_ON if name in wanted]


def run_tests(
    machine: Machine, tests: list[str], models: list[Path], options: argparse.Namespace
) -> list[str]:
    """Run them all, each of them whatever became of those before; gives those that failed."""
    figures: dict[str, str] = {}
    outcomes: dict[str, str] = {}
    try:
        for name in tests:
            print(f"\n### {name}", flush=True)
            begun = time.monotonic()
            outcomes[name] = "broken off"
            try:
                if name == "boot":
                    figures |= time_starts(machine, options.boots)
                else:
                    if name == "compiled":
                        compile_here(machine, models, options.run)
                    run_test(machine, next((HERE / "tests").glob(f"[1-9]-{name}")).name, figures)
                outcomes[name] = "passed"
            except (CommandError, subprocess.CalledProcessError) as error:
                print(error, file=sys.stderr)
                outcomes[name] = "failed"
            print(f"### {name} {outcomes[name]} after {time.monotonic() - begun:.0f} s", flush=True)
    finally:
        print()
        for row in (*figures.items(), *outcomes.items()):
            print(f"{row[0]:70} {row[1]}", flush=True)
    return [name for name in tests if outcomes.get(name) != "passed"]


def main() -> int:
    """As the module says."""
    parser = argparse.ArgumentParser()
    for option in ("--run", "--boot", "--dist", "--archives", "--driver"):
        parser.add_argument(option, type=Path, required=True)
    for option in ("--cores", "--memory", "--boots"):
        parser.add_argument(option, type=int, required=True)
    parser.add_argument("--models", required=True)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("tests", nargs="*")
    options = parser.parse_args()
    if unknown := set(options.tests) - set(_BUILDS_ON):
        parser.error(f"no such test: {', '.join(unknown)}; there are {', '.join(_BUILDS_ON)}")
    if not (VENV / "python").exists():
        parser.error("models are compiled by the .venv of this source: run make setup")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    machine = Machine(
        options.run,
        kernel=next(options.boot.glob("vmlinuz-*")),
        initrd=next(options.boot.glob("initrd.img-*-arm64")),
        cores=options.cores,
        memory_mib=options.memory,
    )
    try:
        models = models_of(options.models, options.run)
        print(f"the machine runs after {machine.boot(600):.0f} s", flush=True)
        print(machine.run("uname -a; cat /etc/debian_version; free -m; grep -m 1 part /proc/cpuinfo", 60))
        carry_in(machine, options.dist, options.archives, options.driver, options.run)
        machine.put([(model, model.name) for model in models], "/root/models")
        failed = run_tests(machine, with_needs(options.tests), models, options)
        if failed:
            print(f"machine-test: failed: {', '.join(failed)}", file=sys.stderr)
        if options.keep:
            keep(machine, options.run)
    except MachineError as error:
        print(f"machine-test: {error}", file=sys.stderr)
        return 1
    finally:
        machine.kill()
    return 1 if failed else 0


def keep(machine: Machine, run: Path) -> None:
    """Run lines of shell from our standard input in the machine, until it ends."""
    print(
        f"the machine runs on, its files are in {run}; lines of shell are run in it until end of file",
        flush=True,
    )
    for text in sys.stdin:
        try:
            machine.run(text.strip(), _SECONDS, lambda said: print(said, end="", flush=True))
        except MachineError as error:
            print(error, flush=True)


if __name__ == "__main__":
    sys.exit(main())
