"""`hone` without a service: usage, errors, JSON, exit status, interruption."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from honed.protocol.values import DevicePeaks
from honed.tool.commands import GROUPS
from honed.tool.commands.models import peaks_text
from honed.tool.main import main, parser
from honed.tool.output import figure_text
from honed.tool.parser import parse_named_file, shape
from tests.daemon.running import DEADLINE

ROOT = Path(__file__).parents[3]
COMMANDS = [
    "status",
    "list",
    "add",
    "show",
    "remove",
    "infer",
    "bench",
    "profile",
    "compile",
    "demo",
    "doctor",
]


def hone(
    *arguments: str, environ: dict[str, str] | None = None, timeout: float = DEADLINE
) -> subprocess.CompletedProcess[str]:
    """The real tool in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "honed.tool.main", *arguments],
        env=os.environ | {"COLUMNS": "80"} | (environ or {}),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.fixture(autouse=True)
def _no_service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HONED_SOCKET", str(tmp_path / "nobody.sock"))


def test_the_installed_command_runs() -> None:
    script = Path(sys.executable).with_name("hone")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("hone 0.")


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert f"\n    {command} " in text
    assert "HONED_SOCKET" in text
    assert "HONED_DEVICE" in text


def test_without_arguments_it_shows_how_to_begin(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    begun = [
        shlex.split(line.strip().split("   ")[0])[1:] for line in text.splitlines() if line[:7] == "  hone "
    ]
    assert len(begun) == 5
    for words in begun:
        assert parser().parse_args(words).run
    assert len(text.splitlines()) < 12


def test_help_groups_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    places = [text.index(f"\n  {group}:\n") for group in GROUPS]
    assert places == sorted(places)
    for group, place, end in zip(GROUPS, places, [*places[1:], len(text)], strict=True):
        for row in GROUPS[group]:
            assert place < text.index(f"\n    {row.name} ") < end


@pytest.mark.parametrize("command", COMMANDS)
def test_each_help_has_examples_that_parse(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    examples = [line.strip() for line in text.partition("examples:")[2].splitlines() if line.strip()]
    assert examples
    for example in examples:
        words = example.partition("#")[0].split()
        assert words[:2] == ["hone", command]
        assert parser().parse_args(words[1:]).run


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--socket", "s"], "the following arguments are required: COMMAND; see 'hone --help'"),
        (["frob"], "invalid choice: 'frob'"),
        (["add"], "required: FILE; see 'hone add --help'"),
        (["add", "x", "--shape", "a=1,b"], "'a=1,b' is not of the form IN=1,3,224,224"),
        (["compile", "x", "-o", "y", "--shape", "a=1", "--shape", "a=2"], "--shape is given twice for 'a'"),
        (["add", "x", "--precision", "int8"], "invalid choice: 'int8'"),
        (["infer", "m", "--input", "nofile"], "'nofile' is not of the form NAME=FILE.npy"),
        (["infer", "m", "--timeout", "-1"], "not a positive number of seconds"),
        (["bench", "m", "-n", "0"], "not a whole number of at least 1"),
        (["compile", "x"], "required: -o/--output"),
        (["demo", "resnet", "-o", "x"], "invalid choice: 'resnet'"),
        (["demo", "lightglue", "-o", "x", "--symbolic", "--keypoints", "8"], "leave out --keypoints"),
        (["--socket"], "expected one argument"),
        (["status", "--frob"], "unrecognized arguments: --frob"),
        (["status", "--js"], "unrecognized arguments: --js"),
    ],
)
def test_wrong_use_is_one_sentence_and_status_2(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith("hone: ")
    assert said.err.count("\n") == 1
    assert part in said.err
    assert said.out == ""


def test_wrong_use_under_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "INVALID_ARGUMENT"
    assert "M" in error["message"]
    assert error["reasons"] == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["list"],
        ["show", "m"],
        ["remove", "m"],
        ["infer", "m", "--random"],
        ["bench", "m"],
        ["profile", "m"],
        ["add", str(ROOT / "README.md")],
    ],
)
def test_no_service_says_where_it_looked_and_how_to_start(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("hone: ")
    assert str(tmp_path / "nobody.sock") in message
    assert "systemctl start honed" in message
    assert main([*arguments, "--json", "--socket", str(tmp_path / "other.sock")]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "UNAVAILABLE"
    assert "other.sock" in error["message"]


@pytest.mark.parametrize("order", [["--json", "status"], ["status", "--json"]])
def test_global_options_stand_before_or_after_the_command(
    order: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    socket = ["--socket", str(tmp_path / "x.sock")]
    for arguments in ([*socket, *order], [*order, *socket]):
        assert main(arguments) == 1
        assert "x.sock" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_values_of_options() -> None:
    assert shape("images=1,3,416,416") == ("images", (1, 3, 416, 416))
    assert shape("a=b=2") == ("a=b", (2,))
    assert shape("n= 1, 0") == ("n", (1, 0))
    assert parse_named_file("x=dir/a=b.npy") == ("x", Path("dir/a=b.npy"))


def test_the_peaks_of_a_slow_device_are_not_rounded_away() -> None:
    board = DevicePeaks(fp32_gflops=471.6, fp16_gflops=903.2, bandwidth_gbs=21.46, launch_us=38.25)
    slow = DevicePeaks(fp32_gflops=0.0317, fp16_gflops=None, bandwidth_gbs=0.0482, launch_us=1200.0)
    assert peaks_text(board) == "472 GFLOP/s fp32, 903 GFLOP/s fp16, 21.5 GB/s, 38.2 us a launch"
    assert peaks_text(slow) == "0.032 GFLOP/s fp32, 0.048 GB/s, 1200.0 us a launch"


def test_peaks_say_that_they_were_measured_on_a_busy_machine() -> None:
    peaks = DevicePeaks(fp32_gflops=77.0, fp16_gflops=None, bandwidth_gbs=9.0, launch_us=2.0, busy=0.5)
    assert peaks_text(peaks).endswith("2.0 us a launch (measured while the machine was busy)")
    assert "busy" not in peaks_text(replace(peaks, busy=0.02))


@pytest.mark.parametrize(
    ("value", "decimals", "text"),
    [(12.3, 0, "12"), (1.234, 0, "1.2"), (9.99, 0, "10"), (0.99, 1, "0.99"), (1.06, 1, "1.1"), (0.0, 1, "0")],
)
def test_figures_keep_two_digits(value: float, decimals: int, text: str) -> None:
    assert figure_text(value, decimals) == text


def test_a_missing_model_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["add", str(tmp_path / "no.onnx")]) == 1
    assert "no.onnx does not exist" in capsys.readouterr().err


def test_unprintable_names_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["add", str(tmp_path / "\x1b[31mred\n.onnx")]) == 1
    error = capsys.readouterr().err
    assert "\x1b" not in error
    assert error.count("\n") == 1


def test_an_error_of_our_own_is_one_sentence_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("surprise")

    monkeypatch.setattr("honed.runtime.client.Client.ask", broken)
    assert main(["status"]) == 1
    error = capsys.readouterr().err
    assert "an error in hone itself (KeyError: 'surprise')" in error
    assert error.count("\n") == 1
    monkeypatch.setenv("HONED_TRACEBACK", "1")
    with pytest.raises(KeyError):
        main(["status"])


def test_a_reader_that_goes_away_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "honed.tool.main", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=DEADLINE) in (0, 128 + signal.SIGPIPE)
    process.stderr.close()


def test_closed_output_is_no_error_of_its_own() -> None:
    done = subprocess.run(
        ["sh", "-c", '"$0" -m honed.tool.main doctor --json >&- 2>&-', sys.executable], check=False
    )
    assert done.returncode in (0, 1)


def test_interruption_is_quiet(tmp_path: Path) -> None:
    """Ctrl-C while the compiler runs: status 130, no traceback, and the child is gone."""
    stub = tmp_path / "honed" / "tuner"
    stub.mkdir(parents=True)
    (stub / "__init__.py").touch()
    (stub / "__main__.py").write_text(
        "import json, os, time\n"
        "print(json.dumps({'event': 'stage', 'stage': 'check', 'fraction': 0.1, 'text': str(os.getpid())}),"
        " flush=True)\ntime.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "honed.tool.main", "compile", "x.onnx", "-o", "y"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    child = int(process.stderr.readline().split()[-1])
    process.send_signal(signal.SIGINT)
    assert process.stderr.read() == ""
    assert process.wait(timeout=DEADLINE) == 130
    process.stderr.close()
    assert not Path(f"/proc/{child}").exists()


def test_status_starts_quickly() -> None:
    """It loads neither the compiler nor OpenCL nor the terminal's library before it needs it."""
    code = (
        "import sys; from honed.tool.main import main; main(['status']); "
        "print(sorted({'tvm', 'pyopencl', 'onnx', 'rich', 'asyncio', 'psutil'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_doctor_of_this_machine(tmp_path: Path) -> None:
    done = hone("doctor", "--json", environ={"XDG_STATE_HOME": str(tmp_path), "HOME": str(tmp_path)})
    document = json.loads(done.stdout)
    assert done.stderr == ""
    assert done.returncode == (0 if document["ok"] else 1)
    assert {f["topic"] for f in document["findings"]} == {"OpenCL", "Machine", "Service", "Software"}
    assert document["readings"]["machine"]["kernel"] == os.uname().release
    assert document["readings"]["daemon"]["state"] == "absent"
    assert all(f["remedy"] for f in document["findings"] if f["level"] != "ok")


def test_doctor_of_a_user_without_a_home(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    for name in ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert main(["doctor", "--json"]) in (0, 1)
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert any("nor HOME names a folder" in f["what"] and f["level"] == "warn" for f in findings)


def test_doctor_without_any_driver(tmp_path: Path) -> None:
    """No platform is something to mend; the text fits 80 columns."""
    pytest.importorskip("pyopencl")
    done = hone("doctor", environ={"OCL_ICD_VENDORS": str(tmp_path)})
    assert done.returncode == 1
    text = " ".join(done.stdout.split())
    assert "no OpenCL device (0 platforms)" in text
    assert "apt install pocl-opencl-icd" in text
    assert "OCL_ICD_VENDORS=" in text
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.slow
@pytest.mark.opencl
def test_doctor_writes_a_profile(tmp_path: Path) -> None:
    from honed.machine.profile import DeviceProfile

    file = tmp_path / "board.toml"
    environ = {"CACHE_DIRECTORY": str(tmp_path / "cache")}
    done = hone("doctor", "--profile", str(file), "--json", environ=environ)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["output"] == str(file)
    profile = DeviceProfile.load(file)
    assert profile.peaks is not None
    refused = hone("doctor", "--profile", str(file), "--device", "no such device", environ=environ)
    assert refused.returncode == 1
    assert "fits no device" in refused.stderr
