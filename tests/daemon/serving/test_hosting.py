"""What a worker and the CPU engine's process have in common, without either."""

from __future__ import annotations

import socket
import subprocess
import sys

from honed.daemon.worker.supervisor import FRAMES
from honed.protocol.peer import Peer, write_socket

SECONDS = 60.0
CODE = """
import sys
from honed.daemon.worker.host import Host, by_name, connect
from honed.daemon.worker.calls import OpenDevice
from honed.protocol.peer import Peer
from honed.protocol.values import Empty

class Full(Host):
    LOADING = by_name({OpenDevice: lambda self, call: Empty()})
    METHODS = {}
    def require_loaded(self, key): ...
    def finish_run(self, key, inputs, keep): ...
    def run_step(self, call, inputs): ...

def answer(*_):
    raise MemoryError("there is none left")

Peer.answer = answer
Full(connect(sys.argv)).serve()
"""


def test_a_process_that_has_no_memory_to_answer_a_load_ends() -> None:
    """Its other thread would answer pings for ever, and nothing be loaded again."""
    near, far = socket.socketpair()
    command = [sys.executable, "-c", CODE, str(far.fileno())]
    with near, subprocess.Popen(command, pass_fds=[far.fileno()], stderr=subprocess.PIPE) as process:
        far.close()
        peer = Peer(serves=False, receiving=FRAMES, sending=FRAMES)
        peer.call("OpenDevice", {})
        write_socket(near, peer)
        try:
            _, said = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    assert process.returncode == 1
    assert b"there is none left" in said
