"""Configuration: where settings come from, which are refused, and that the shipped file tells the truth."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.daemon.config import (
    REMOVED,
    TABLES,
    Config,
    lines_of,
    load,
    memory,
    memory_sentence,
    settings,
)
from honed.daemon.observe.usage import UsageSettings
from honed.daemon.settings import schema
from honed.daemon.settings.schema import Limits, own_shares, shares
from honed.process.limits import memory_mib
from honed.runtime.errors import InvalidArgument

SHIPPED = Path(__file__).parents[2] / "packaging" / "honed.toml"
_NOBODY = 65534
ENVIRON = {"HOME": "/home/u", "XDG_RUNTIME_DIR": "/run/user/7"}


def read(file: Path, **environ: str) -> Config:
    return load(environ=ENVIRON | environ, uid=7, config=file)


def write(folder: Path, text: str, name: str = "honed.toml") -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def refusal(file: Path) -> str:
    with pytest.raises(InvalidArgument) as caught:
        read(file)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_without_any_file_defaults_hold() -> None:
    config = load(environ=ENVIRON | {"XDG_CONFIG_HOME": "/nonexistent"}, uid=7)
    assert config.service.socket == Path("/run/user/7/honed/honed.sock")
    assert config.service.device == ""
    assert config.limits == Limits()
    assert config.files == ()
    assert set(config.origins.values()) == {"default"}
    assert set(config.origins) == set(settings())


def test_later_sources_win_setting_by_setting(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        '[service]\nsocket = "/a"\ndevice = "gpu"\nstate_dir = "/s"\ncache_dir = "/c"\n'
        "[limits]\nmax_queue = 1",
    )
    first = write(tmp_path, "[limits]\nmax_queue = 2\nmax_jobs = 2", "honed.toml.d/10-a.toml")
    second = write(tmp_path, "[limits]\nmax_jobs = 3\nrun_seconds = 5", "honed.toml.d/20-b.toml")
    write(tmp_path, "nonsense", "honed.toml.d/30-c.toml.bak")
    config = load(
        environ=ENVIRON | {"HONED_SOCKET": "/from-environment", "HONED_DEVICE": "pocl"},
        uid=7,
        config=file,
        overrides={"socket": "here.sock", "device": None, "cache_dir": Path("/o"), "state_dir": None},
    )
    assert config.files == (file, first, second)
    assert config.service.socket == Path.cwd() / "here.sock"
    assert config.service.device == "pocl"
    assert config.service.state_dir == Path("/s")
    assert config.service.cache_dir == Path("/o")
    assert (config.limits.max_queue, config.limits.max_jobs, config.limits.run_seconds) == (2, 3, 5.0)
    assert isinstance(config.limits.run_seconds, float)
    assert config.origins["service.socket"] == "option --socket"
    assert config.origins["service.cache_dir"] == "option --cache-dir"
    assert config.origins["service.device"] == "environment variable HONED_DEVICE"
    assert config.origins["service.state_dir"] == f"{file}:4"
    assert config.origins["limits.max_queue"] == f"{first}:2"
    assert config.origins["limits.max_jobs"] == f"{second}:2"
    assert config.origins["limits.max_models"] == "default"


@pytest.mark.parametrize(("given", "engine"), [("opencl", "gpu"), ("onnxruntime", "cpu"), ("gpu", "gpu")])
def test_an_engine_is_named_in_either_way(tmp_path: Path, given: str, engine: str) -> None:
    assert read(write(tmp_path, f'[serve]\nengine = "{given}"')).serve.engine == engine


@pytest.mark.parametrize("name", REMOVED)
def test_a_setting_that_left_is_told_of_and_nothing_else(tmp_path: Path, name: str) -> None:
    table, _, key = name.partition(".")
    config = read(write(tmp_path, f"[{table}]\n{key} = 1\n[limits]\nmax_jobs = 3"))
    assert config.limits.max_jobs == 3
    (note,) = config.notes
    assert f":2: [{table}] {key} has left" in note


def test_empty_variables_are_as_good_as_none(tmp_path: Path) -> None:
    config = read(write(tmp_path, ""), HONED_SOCKET="", HONED_DEVICE="")
    assert config.service.socket == Path("/run/user/7/honed/honed.sock")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "[limit]\n",
            [
                "[limit]",
                "did you mean limits?",
                "[service], [serve], [cpu], [sequences], [limits], [variants]",
            ],
        ),
        ("[limits]\nmax_quue = 4", ["'max_quue'", "did you mean max_queue?", "max_jobs"]),
        ("[service]\nzzz = 4", ["'zzz'", "use one of socket"]),
        ("service = 4", ["write [service]"]),
        ("[limits]\nmax_queue = true", ["max_queue is True", "a whole number"]),
        ("[limits]\nmax_queue = 1.0", ["max_queue is 1.0", "a whole number"]),
        ("[limits]\nmax_queue = 0", ["max_queue is 0", "at least 1"]),
        ("[limits]\nmax_queue = 99999999999999999999", ["below 2^63"]),
        ("[limits]\nmax_message_bytes = 5", ["at least 4096"]),
        ("[limits]\nrun_seconds = nan", ["run_seconds is nan", "at least 0.1"]),
        ("[limits]\nrun_seconds = inf", ["run_seconds is inf"]),
        ('[limits]\nrun_seconds = "5"', ["run_seconds is '5'", "a number"]),
        ('[service]\nsocket = "relative"', ["an absolute path"]),
        ("[service]\nsocket = 5", ["an absolute path"]),
        ("[service]\ndevice = 0", ["device is 0", "a text in quotes"]),
        ("[service\n", ["not TOML", "line 1"]),
        ("[limits]\nmax_jobs = 1\nmax_jobs = 2\n", ["not TOML", "line 3"]),
        ("a = " + "[" * 100_000, ["not TOML"]),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, parts: list[str]) -> None:
    file = write(tmp_path, text)
    message = refusal(file)
    for part in [str(file), *parts]:
        assert part in message


def test_a_drop_in_is_named_too(tmp_path: Path) -> None:
    file = write(tmp_path, "")
    bad = write(tmp_path, "[limits]\nmax_jobs = -1", "honed.toml.d/bad.toml")
    assert str(bad) in refusal(file)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "check its path" in refusal(tmp_path / "none.toml")
    (tmp_path / "folder.toml").mkdir()
    assert "check its path" in refusal(tmp_path / "folder.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    assert "not TOML" in refusal(binary)
    large = write(tmp_path, "# " + "x" * (1 << 20), "large.toml")
    assert "larger than" in refusal(large)


@pytest.mark.parametrize("closed", ["file", "folder"])
def test_a_file_without_permission(closed: str) -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # those above tmp_path are root's alone
    file = write(folder, "")
    file.chmod(0)
    folder.chmod(0 if closed == "folder" else 0o755)
    user = os.geteuid()
    os.seteuid(user or _NOBODY)  # root may read everything
    try:
        told = refusal(file)
    finally:
        os.seteuid(user)
        folder.chmod(0o700)
        shutil.rmtree(folder)
    assert "check its permissions" in told


def test_a_user_without_runtime_dir_must_name_the_socket() -> None:
    environ = {"HOME": "/home/u", "XDG_CONFIG_HOME": "/nonexistent"}
    with pytest.raises(InvalidArgument, match=r"XDG_RUNTIME_DIR .* --socket"):
        load(environ=environ, uid=7)
    assert load(environ=environ, uid=7, overrides={"socket": "/s"}).service.socket == Path("/s")


@pytest.fixture
def documented(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defaults as of the machine that documents speak of."""
    monkeypatch.setattr(schema, "own_shares", lambda: shares(16 << 10))


@pytest.mark.parametrize("gib", [1, 2, 4, 8, 16, 32])
def test_defaults_add_up_to_a_share_of_the_memory(gib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "own_shares", lambda: shares(gib << 10))
    config = load(environ=ENVIRON | {"XDG_CONFIG_HOME": "/nonexistent"}, uid=7)
    takes = memory(config)
    assert (0.59 if gib <= 16 else 0.5) * (gib << 10) <= takes <= 0.6 * (gib << 10)
    assert config.limits.max_message_bytes <= config.limits.max_user_bytes <= config.limits.max_all_bytes
    assert config.variants.memory_mib < config.limits.worker_memory_mib
    assert min(config.limits.worker_memory_mib, config.cpu.memory_mib) > (160 if gib > 1 else 64)
    assert config.apps.memory_mib >= (256 if gib > 2 else 32)


def test_more_memory_never_makes_a_limit_smaller() -> None:
    """But those of single users: there are more of them."""
    found = [shares(mib) for mib in range(512, 70_000, 97)]
    for less, more in itertools.pairwise(found):
        for name in ("message", "messages", "worker", "cpu", "users", "variants", "compiler", "tuner"):
            assert 1 <= getattr(less, name) <= getattr(more, name)
        assert less.app * less.users <= more.app * more.users + more.users


def test_limits_beyond_the_memory_are_told_and_not_refused(tmp_path: Path) -> None:
    config = read(write(tmp_path, "[limits]\nworker_memory_mib = 1_000_000\n[tuner]\nmemory_mib = 5"))
    takes = memory(config)
    assert 1_000_000 < takes < 1_000_000 + own_shares().compiler + 20_000
    assert memory_sentence(takes, 4096).startswith(
        f"With these limits honed takes at most {takes:,} MiB of memory,"
    )
    assert "apps may be ended when memory runs out; lower" in memory_sentence(takes, 4096)
    assert memory_sentence(2457, 4096).endswith("2,457 MiB of memory, 60 % of this machine's 4,096 MiB.")
    assert memory(read(write(tmp_path, "[cpu]\nmemory_mib = 0"))) == memory_mib()


def test_the_shipped_file_lists_every_setting_with_its_default(documented: None, tmp_path: Path) -> None:
    text = SHIPPED.read_text()
    assert tomllib.loads(text) == {table: {} for table in TABLES}, "as shipped it must change nothing"
    uncommented = "\n".join(
        line[1:] if line.startswith("#") and not line.startswith("# ") else line for line in text.splitlines()
    )
    found = [f"{table}.{key}" for table, keys in tomllib.loads(uncommented).items() for key in keys]
    assert found == list(settings())
    config = load(environ={}, uid=0, config=write(tmp_path, uncommented))
    assert config.limits == Limits()
    assert config.usage == UsageSettings()
    assert config.service == load(environ={}, uid=0, config=write(tmp_path, "", "empty.toml")).service


def test_lines_are_told_where_they_are_certain() -> None:
    text = "limits.max_queue = 1 # [service]\n\n [ limits ]  # here\n\"max_jobs\"=2\nlong = 'max_jobs = 5'\n"
    assert lines_of(text) == {"limits.max_queue": 1, "limits.max_jobs": 4, "limits.long": 5}
    assert lines_of('[limits]\na = """\nmax_jobs = 1"""\nmax_jobs = 2') == {}


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.getbasetemp() / "fuzz"
    folder.mkdir(exist_ok=True)
    file = folder / "honed.toml"
    file.write_bytes(text.encode(errors="surrogatepass"))
    try:
        assert read(file).limits
    except InvalidArgument as error:
        assert str(file) in str(error)  # noqa: PT017 - both ends are allowed


def test_a_line_that_would_take_the_parser_for_ever_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "honed.toml"
    file.write_text("[limits]\n" + "a." * 100_000 + "a = 1\n")
    with pytest.raises(InvalidArgument, match=r"honed\.toml:2"):
        load(environ={"XDG_RUNTIME_DIR": "/run/u", "HOME": "/h"}, uid=1, config=file)
