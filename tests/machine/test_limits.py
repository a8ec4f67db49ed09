"""What a process may take."""

from __future__ import annotations

import sys
import threading

import pytest

from honed.machine.children import run
from honed.machine.limits import thread_stacks

STACK = 512 << 10
THREADS = 32
CODE = f"""
import ctypes, threading
from honed.machine.limits import data_bytes, thread_stacks

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


def test_threads_of_libraries_get_small_stacks_and_those_of_python_do_not() -> None:
    said, death = run((sys.executable, "-c", CODE), seconds=60)
    assert death.status == 0, said
    usual, small, own = map(int, said.split())
    assert STACK <= small / THREADS < usual / THREADS
    assert threading.stack_size() == 0
    assert own > STACK


def test_a_stack_of_no_size_is_refused() -> None:
    with pytest.raises(OSError, match="stacks of 1 bytes"):
        thread_stacks(1)
