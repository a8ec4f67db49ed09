"""What a process may take."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from honed.process.children import output
from honed.process.limits import memory_mib, out_of_memory, thread_stacks

STACK = 512 << 10
THREADS = 32
CODE = f"""
import ctypes, threading
from honed.process.limits import data_bytes, thread_stacks

library = ctypes.CDLL(None)
ENTRY = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
held = threading.Event()
entry = ENTRY(lambda _: held.wait() and None)
kept = []

def grown():
    before = data_bytes()
    for _ in range({THREADS}):
        kept.append(ctypes.c_ulong())
        assert library.pthread_create(ctypes.byref(kept[-1]), None, entry, None) == 0
    return data_bytes() - before

usual = grown()
thread_stacks({STACK})
print(usual, grown(), threading.stack_size())
held.set()
for each in kept:
    library.pthread_join(each, None)
"""
FREED = """
import ctypes, resource
from honed.process.limits import keep_freed

library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
SIZE = 8 << 20

def cleared():
    "Return the pages that the kernel clears for three blocks that are written and freed."
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [ctypes.c_void_p(library.malloc(SIZE)) for _ in range(3)]
    for block in blocks:
        ctypes.memset(block, 1, SIZE)
    for block in blocks:
        library.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed(16 << 20)
print(min(cleared() for _ in range(8)))  # A kernel that moves pages clears some now and then
"""


def test_threads_of_libraries_get_small_stacks_and_those_of_python_do_not() -> None:
    said, death = output((sys.executable, "-c", CODE), seconds=60)
    assert death.status == 0, said
    usual, small, own = map(int, said.split())
    assert STACK <= small / THREADS < usual / THREADS
    assert threading.stack_size() == 0
    assert own > STACK


SHORT = """
from honed.process.limits import data_bytes, data_is_short, limit_data

print(data_is_short())
limit_data(10 * data_bytes())
print(data_is_short())
held = bytes(int(8.2 * data_bytes()))
print(data_is_short())
"""


def test_a_process_sees_that_its_memory_is_short() -> None:
    said, death = output((sys.executable, "-c", SHORT), seconds=60)
    assert death.status == 0, said
    assert said.split() == [b"False", b"False", b"True"]


def test_a_stack_of_no_size_is_refused() -> None:
    with pytest.raises(OSError, match="stacks of 1 bytes"):
        thread_stacks(1)


def machine(folder: Path, cgroup: str, limits: dict[str, str]) -> int:
    """What `memory_mib` makes of 4 GiB and files of limits below /sys/fs/cgroup."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/meminfo").write_text(f"MemTotal:       {4 << 20} kB\nMemFree:  5 kB\n")
    (folder / "proc/self/cgroup").write_text(cgroup)
    for file, text in limits.items():
        (folder / "cgroup" / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup" / file).write_text(text)
    return memory_mib(f"{folder}/proc", f"{folder}/cgroup")


@pytest.mark.parametrize(
    ("cgroup", "limits", "mib"),
    [
        ("0::/\n", {}, 4096),
        ("0::/\n", {"memory.max": "max\n"}, 4096),
        ("0::/\n", {"memory.max": f"{1 << 30}\n"}, 1024),  # of a container
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": f"{2 << 30}"}, 2048),
        ("0::/a/b\n", {"a/memory.max": f"{8 << 30}"}, 4096),
        # The limit of honed's own unit is 60 % of the memory; an administrator's counts.
        ("0::/s/h.service\n", {"s/h.service/memory.max": f"{(4 << 30) * 6 // 10}"}, 4096),
        ("0::/s/h.service\n", {"s/h.service/memory.max": f"{600 << 20}"}, 1000),
        ("5:memory:/c\n0::/\n", {"memory/c/memory.limit_in_bytes": f"{512 << 20}"}, 512),
        ("5:memory:/c\n0::/\n", {"memory/c/memory.limit_in_bytes": f"{(1 << 63) - 4096}"}, 4096),
    ],
)
def test_the_memory_is_the_machines_or_the_cgroups(
    tmp_path: Path, cgroup: str, limits: dict[str, str], mib: int
) -> None:
    assert machine(tmp_path, cgroup, limits) in (mib, mib - 1)


def test_freed_memory_is_kept() -> None:
    said, death = output([sys.executable, "-c", FREED], seconds=60)
    assert death.status == 0
    assert int(said) < 16


@pytest.mark.parametrize(
    ("error", "ran_out"),
    [
        (MemoryError(), True),
        (RuntimeError("tvm.error.InternalError: std::bad_alloc"), True),
        (RuntimeError("Failed to allocate memory for requested buffer of size 4096"), True),
        (ValueError("Failed to serialize proto"), False),
        (OSError("[Errno 12] Cannot allocate memory"), True),
        (RuntimeError("clGetDeviceIDs: OUT_OF_HOST_MEMORY, -6"), False),  # a full queue, on an RK3588
        ("OpenBLAS error: Memory allocation still failed after 10 retries, giving up.", True),
        (RuntimeError("memory of another kind"), False),
        ("", False),
    ],
)
def test_what_libraries_say_where_memory_runs_out(error: Exception | str, ran_out: bool) -> None:
    assert out_of_memory(error) is ran_out
