"""Fixtures for every part: the OpenCL devices there are, their peaks, and what all tests of a run share."""

from __future__ import annotations

import fcntl
import gc
import os
import random
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.internal.conjecture import providers

if TYPE_CHECKING:
    from honed.machine.devices import Device
    from honed.machine.profile import DeviceProfile


# The same of the same code every time: examples follow from the test alone, and nothing is remembered. How
# long one takes says more of the machine's load than of the code. `make test-slow` draws more of them, and
# tests/explore.py draws others.
settings.register_profile(
    "honed", deadline=None, derandomize=True, database=None, print_blob=True, max_examples=30
)
settings.register_profile("more", settings.get_profile("honed"), max_examples=150)
settings.register_profile(
    "explore",
    settings.get_profile("honed"),
    derandomize=False,
    print_blob=False,
    max_examples=300,
    phases=(Phase.generate, Phase.shrink),
)
settings.load_profile("honed")
gc.disable()  # What is imported and collected stays; see pytest_collection_finish
_constants_of_modules = providers._get_local_constants
os.environ.setdefault("PYTHONHASHSEED", "0")  # of workers, and of the programs that tests start
# Arrays of tests are small, and threads for them, one a core in each process, get in each other's way.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Tests that the table in slow.txt moves to the slow ones, by file and name.
SLOW = [
    f"{file}::{name}"
    for file, names in re.findall(
        r"^\| `(tests/.+?)` \| (.+?) \|", Path(__file__).with_name("slow.txt").read_text(), re.MULTILINE
    )
    for name in re.findall("`(.+?)`", names)
]
_SLOW = re.compile("|".join(re.escape(name).replace(r"\*", ".*") for name in SLOW))


@pytest.hookimpl(trylast=True)  # after Hypothesis, which reads --hypothesis-profile
def pytest_configure() -> None:
    """Give Ctrl-C back to children: a shell that runs pytest in the background has all ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Output is buffered in the programs tested, as it is for users, whatever the environment says; and their
    # code is compiled once, not by each of many processes: a service starts in 1.4 s of CPU instead of 1.9.
    for name in ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"):
        os.environ.pop(name, None)
    sys.dont_write_bytecode = False
    # Hypothesis draws constants of the modules that are loaded, too: which ones these are is chance, as tests
    # are dealt out to processes.
    steady = settings.get_current_profile_name() != "explore"
    providers._get_local_constants = (lambda: providers._local_constants) if steady else _constants_of_modules


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Each test draws the same numbers and builds its own programs, whatever ran before it.

    Programs are shared while an executor holds them, and one that a test left in a cycle holds them until
    garbage is collected.
    """
    random.seed(0)
    np.random.seed(0)
    if (programs := sys.modules.get("honed.runtime.execution.programs")) is not None:
        programs._in_use.clear()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run what is marked `child` in a child, which it may crash or hang, without an end to other tests."""
    if pyfuncitem.get_closest_marker("child") is None:
        return None
    names = pyfuncitem._fixtureinfo.argnames
    _in_child(lambda: pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def _in_child(run: Callable[[], object]) -> None:
    """Fails as it does in a fork of this process, or with the signal that the fork died of."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(reader)
            told = _failure(run)
            with os.fdopen(writer, "wb") as stream:
                stream.write(told)
        finally:
            os._exit(0)
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as stream:
            told = stream.read()
    except BaseException:  # it took too long, or Ctrl-C
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        pytest.fail(f"the test's process died of {signal.Signals(os.WTERMSIG(status)).name}", pytrace=False)
    if told.startswith(b"skipped"):
        pytest.skip(told.removeprefix(b"skipped").decode())
    if told:
        pytest.fail(told.decode(), pytrace=False)


def _failure(run: Callable[[], object]) -> bytes:
    """What a test raises, in words; nothing where all is well."""
    try:
        run()
    except pytest.skip.Exception as skipped:
        return f"skipped{skipped}".encode()
    except BaseException as error:  # noqa: BLE001 - its parent raises it
        found = pytest.ExceptionInfo.from_exception(error)
        return str(found.getrepr(style="short", chain=True)).encode(errors="replace")
    return b""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `device` runs on every OpenCL device of the machine."""
    if "device" in metafunc.fixturenames:
        found = _devices()
        missing = pytest.param(
            None, marks=pytest.mark.skip(reason="this machine has no OpenCL device"), id="none"
        )
        params = [pytest.param(d, id=f"{i}-{d.profile.rules.family}") for i, d in enumerate(found)]
        metafunc.parametrize("device", params or [missing], scope="session")


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Whatever needs a device carries the marker `opencl`, so that -m can leave it out.

    What is slow has more time, since a busy machine makes minutes of it. What fills the machine's kernel log
    is run where it is asked for.
    """
    if "HONED_TEST_FLOOD_KMSG" not in os.environ:
        flooding = [item for item in items if item.get_closest_marker("flood")]
        items[:] = [item for item in items if item not in flooding]
        config.hook.pytest_deselected(items=flooding)
    for item in items:
        if _SLOW.fullmatch(item.nodeid):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(2400))
        if "device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.opencl)


def pytest_collection_finish() -> None:
    """What is collected stays: no collection of garbage looks at it again, nor often at what tests make."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """Makes something for all tests of a run, whichever of its processes asks first: `made_once(name, make)`.

    `make(path)` makes a file or folder at the path; the others wait for it.
    """
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if base.name.startswith("popen-") else base) / "shared"
    shared.mkdir(exist_ok=True)

    def made(name: str, make: Callable[[Path], object]) -> Path:
        path, done = shared / name, shared / f"{name}.done"
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                make(path)
                done.touch()
        return path

    return made


@pytest.fixture(scope="session")
def cache_dir(made_once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    """One cache for all daemons, tuners and tests, in which the peaks of this machine's devices are."""

    def make(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        for device in _devices():
            from honed.machine import peaks

            peaks.load_or_measure(device, folder)

    return made_once("cache", make)


@pytest.fixture(scope="session")
def profile(device: Device, cache_dir: Path) -> DeviceProfile:
    """The device's profile with its peaks."""
    from honed.machine import peaks

    return peaks.load_or_measure(device, cache_dir)


def _devices() -> list[Device]:
    try:
        import pyopencl  # noqa: F401
    except ImportError:
        return []
    from honed.machine import devices

    return devices.discover()
