"""What a process sees to itself: that it ends with its parent, and takes no more than it may."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import threading
from contextlib import suppress

MEMORY_PERCENT = 60  # Of the memory, which honed may take at most; the rest is for apps
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # malloc.h
_ATTRIBUTES = 128  # Bytes; a pthread_attr_t has 56 or 64
_OWN_STACK = 8 << 20  # Bytes, of a thread of Python's; what Linux gives by itself
_MEMORY_RAN_OUT = (  # What libraries say of it, in lower case
    "bad_alloc",
    "out of memory",
    "cannot allocate memory",
    "failed to allocate",
    "memory allocation",  # OpenBLAS
    "memoryerror",
    "pthread_create failed",  # No room for a thread's stack
)


def out_of_memory(error: Exception | str) -> bool:
    """Return whether an error of any library, or what a process wrote last, says that memory ran out."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(sign in text for sign in _MEMORY_RAN_OUT)


def die_with(parent: int) -> None:
    """Have the kernel end this process when its parent (a process id) ends, whatever it hangs in.

    More exactly, the kernel ends it when the parent's thread that started it ends. Where the parent is gone
    already, this process ends at once.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(127)


def limit(kind: int, most: int) -> None:
    """Lower a limit (a RLIMIT of `resource`) of this process and its children; a lower one stays."""
    _, hard = resource.getrlimit(kind)
    if hard == resource.RLIM_INFINITY or most < hard:
        resource.setrlimit(kind, (most, most))


def limit_data(most: int) -> None:
    """Limit what may be written to, in bytes.

    RLIMIT_DATA and not RLIMIT_AS: OpenCL drivers reserve address space far beyond what they use.
    """
    limit(resource.RLIMIT_DATA, most)


def thread_stacks(nbytes: int) -> None:
    """Set the stacks of threads that libraries start from now on to `nbytes` bytes; Python's own get 8 MiB.

    `limit_data` counts stacks as a whole, and not what of them is used.
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
    """Have malloc keep up to twice `nbytes` bytes that were freed in blocks of no more than `nbytes`.

    These are 32 MiB at most. By itself glibc may give each large block back, and the kernel clears its pages
    for the next one.
    """
    library = ctypes.CDLL(None)
    library.mallopt(_MMAP_THRESHOLD, nbytes)
    library.mallopt(_TRIM_THRESHOLD, 2 * nbytes)


def one_heap() -> None:
    """Have all threads that start from now on allocate from one heap.

    By itself glibc gives each thread one, which no other can use, and which seldom shrinks: `limit_data`
    counts what was freed there.
    """
    ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


def give_back_freed() -> None:
    """Have malloc give the kernel what was freed."""
    ctypes.CDLL(None).malloc_trim(0)


def data_bytes() -> int:
    """Return the bytes of memory that `limit_data` bounds, as they are now."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData:"))


def data_left() -> float:
    """Return the bytes that `limit_data` leaves this process; infinity where there is no limit."""
    most, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return math.inf if most == resource.RLIM_INFINITY else most - data_bytes()


def data_is_short() -> bool:
    """Return whether this process has taken nine tenths of what `limit_data` allows it."""
    most, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return data_left() < 0.1 * most


def memory_mib(proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> int:
    """Return the memory of this machine, or of the cgroup where that has less, in MiB.

    The limit of a systemd unit of honed's own is MEMORY_PERCENT of the machine's, and counts as what it is
    that share of.
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
    """Return the bytes that a cgroup's file allows; infinity where there is no file, or no limit."""
    with suppress(OSError, ValueError), open(file) as opened:
        return int(opened.read())  # "max" is no number
    return math.inf


def no_memory(what: str, said: str, bound: str) -> str:
    """Return a sentence about memory that ran out, with the library's message and the limit that applied."""
    sentence = f"{what} ({said})" if said else what
    if not bound:
        return f"{sentence}; remove models or use smaller ones"
    return (
        f"{sentence}; it may have {bound}: raise that in the configuration, remove models or use smaller ones"
    )
