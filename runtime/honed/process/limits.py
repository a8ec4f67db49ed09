"""Limits that a process sets itself: it ends with its parent, and uses bounded memory.

python -m honed.process.limits PARENT_PID MEMORY_MIB ADDRESS_MIB CPU_SECONDS NICENESS PROGRAM ARGUMENT...

becomes a program within such limits; `children.start` starts it. It runs between fork and exec of a child,
where a threaded parent must not run Python itself. Each child waits for it, so this module imports little:
pathlib alone took a quarter of its time.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import sys
import threading
from contextlib import suppress

MEMORY_PERCENT = 60  # Percent of the memory that honed may use; the rest is for apps
_PR_SET_PDEATHSIG = 1  # From linux/prctl.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # From malloc.h
_ATTRIBUTES = 128  # Bytes; a pthread_attr_t has 56 or 64
_OWN_STACK = 8 << 20  # Bytes of the stack of a Python thread, Linux's default
# The kernel should kill the child first if memory runs out, no app and not its parent; among children, those
# with more niceness.
_OOM_SCORE, _OOM_NICE = 500, 10
_MEMORY_RAN_OUT = (  # Phrases in libraries' messages, in lower case
    "bad_alloc",
    "out of memory",
    "cannot allocate memory",
    "failed to allocate",
    "memory allocation",  # OpenBLAS
    "memoryerror",
    "pthread_create failed",  # Lacks room for a thread's stack
)


def out_of_memory(error: Exception | str) -> bool:
    """Return whether a library's error, or a process's last line, says that memory ran out."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(sign in text for sign in _MEMORY_RAN_OUT)


def die_with(parent: int) -> None:
    """Make the kernel end this process when its parent (a process id) ends, whatever it hangs in.

    More exactly, when the parent's thread that started it ends. If the parent is gone already, this process
    ends at once.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(127)


def limit(kind: int, most: int) -> None:
    """Lower a limit (a RLIMIT of `resource`) of this process and its children; keep a lower one."""
    _, hard = resource.getrlimit(kind)
    if hard == resource.RLIM_INFINITY or most < hard:
        resource.setrlimit(kind, (most, most))


def limit_data(most: int) -> None:
    """Limit writable memory, in bytes.

    RLIMIT_DATA and not RLIMIT_AS: OpenCL drivers reserve address space far beyond what they use.
    """
    limit(resource.RLIMIT_DATA, most)


def thread_stacks(nbytes: int) -> None:
    """Set the stacks of threads that libraries start from now on to `nbytes` bytes; Python's own get 8 MiB.

    `limit_data` counts whole stacks, not their used part.
    """
    library = ctypes.CDLL(None)
    attributes = ctypes.create_string_buffer(_ATTRIBUTES)
    wrong = (
        library.pthread_attr_init(attributes)
        or library.pthread_attr_setstacksize(attributes, ctypes.c_size_t(nbytes))
        or library.pthread_setattr_default_np(attributes)
    )
    if wrong:
        raise OSError(wrong, f"threads cannot have stacks of {nbytes} bytes: {os.strerror(wrong)}")
    threading.stack_size(_OWN_STACK)


def keep_freed(nbytes: int) -> None:
    """Make malloc keep up to twice `nbytes` bytes that were freed in blocks of no more than `nbytes`.

    glibc caps these at 32 MiB. By default it may return each large block, and the kernel clears its pages for
    the next one.
    """
    library = ctypes.CDLL(None)
    library.mallopt(_MMAP_THRESHOLD, nbytes)
    library.mallopt(_TRIM_THRESHOLD, 2 * nbytes)


def one_heap() -> None:
    """Make all threads that start from now on allocate from one heap.

    By default glibc gives each thread its own, which no other can use, and which seldom shrinks: `limit_data`
    counts memory freed there.
    """
    ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


def give_back_freed() -> None:
    """Make malloc return freed memory to the kernel."""
    ctypes.CDLL(None).malloc_trim(0)


def data_bytes() -> int:
    """Return the present bytes of memory that `limit_data` limits."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData:"))


def data_left() -> float:
    """Return the bytes that `limit_data` leaves this process; infinity without a limit."""
    most, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return math.inf if most == resource.RLIM_INFINITY else most - data_bytes()


def data_is_short() -> bool:
    """Return whether this process has used nine tenths of what `limit_data` allows it."""
    most, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return data_left() < 0.1 * most


def memory_mib(proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> int:
    """Return the memory of this machine, or of the cgroup if that has less, in MiB.

    The limit of honed's own systemd unit is MEMORY_PERCENT of the machine's memory, and is scaled back to
    that.
    """
    with open(f"{proc}/meminfo") as meminfo:
        most = next(int(line.split()[1]) << 10 for line in meminfo if line.startswith("MemTotal:"))
    with open(f"{proc}/self/cgroup") as lines:
        for line in lines:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if controllers not in ("", "memory"):
                continue
            root = f"{cgroups}/memory" if controllers else cgroups
            file = "memory.limit_in_bytes" if controllers else "memory.max"
            while True:
                given = _limit_in(f"{root}{path.rstrip('/')}/{file}")
                if path.endswith(".service"):
                    given = given * 100 / MEMORY_PERCENT
                most = int(min(most, given))
                if path in ("", "/"):
                    break
                path = path.rpartition("/")[0]
    return most >> 20


def _limit_in(file: str) -> float:
    """Return the bytes that a cgroup's file allows; infinity without a file or a limit."""
    with suppress(OSError, ValueError), open(file) as opened:
        return int(opened.read())  # Conversion fails on "max", which is no limit
    return math.inf


def no_memory(what: str, said: str, bound: str) -> str:
    """Return a sentence about memory that ran out, with the library's message and the limit that applied."""
    sentence = f"{what} ({said})" if said else what
    if not bound:
        return f"{sentence}; remove models or use smaller ones"
    return (
        f"{sentence}; it may have {bound}: raise that in the configuration, remove models or use smaller ones"
    )


def main(arguments: list[str]) -> None:
    """Replace this process by the program, or exit with status 127; never return."""
    parent, memory_mib, address_mib, cpu_seconds, niceness = map(int, arguments[:5])
    program = arguments[5:]
    die_with(parent)
    if memory_mib:
        limit_data(memory_mib << 20)
    if address_mib:
        limit(resource.RLIMIT_AS, address_mib << 20)
    if cpu_seconds:
        limit(resource.RLIMIT_CPU, cpu_seconds)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    score, wanted = "/proc/self/oom_score_adj", _OOM_SCORE + _OOM_NICE * max(0, niceness)
    with open(score) as file:
        low = int(file.read()) < wanted
    if low:
        with open(score, "w") as file:
            file.write(str(wanted))
    os.nice(niceness)
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # ONNX Runtime's wheels report to Microsoft otherwise
    os.execvp(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
