"""A terminal with a screen, for tests: runs `hone` in it and tells what a person would see."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence

from tests.daemon.running import DEADLINE

_CONTROL = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])")


def _take_terminal() -> None:
    """In the child: make standard input its controlling terminal, so that Ctrl-C reaches it."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """A terminal of a given size. Knows the few controls that rich uses; an unknown one is an error."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], columns: int, lines: int
    ) -> None:
        self._size = (columns, lines)
        self._main, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "honed.tool.main", *arguments],
            env={**kept, "TERM": "xterm", "LANG": "C.UTF-8", **environment},
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            preexec_fn=_take_terminal,
        )
        os.close(terminal)
        self._lines = [""]
        self._row = self._column = 0
        self._unread = ""
        self._bytes = b""
        self.cursor_shown = True

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._main)

    @property
    def screen(self) -> str:
        """What is to be seen, and what scrolled away above it."""
        return "\n".join(self._lines)

    def until(self, text: str) -> str:
        """The screen as soon as it shows `text`."""
        end = time.monotonic() + DEADLINE
        while text not in self.screen:
            if time.monotonic() > end or not self._read(end):
                raise AssertionError(f"{text!r} is not to be seen:\n{self.screen}")
        return self.screen

    def until_gone(self, text: str) -> str:
        """The screen as soon as it no longer shows `text`."""
        end = time.monotonic() + DEADLINE
        while text in self.screen:
            if time.monotonic() > end or not self._read(end):
                raise AssertionError(f"{text!r} is still to be seen:\n{self.screen}")
        return self.screen

    def type(self, text: str) -> None:
        """Press these keys."""
        os.write(self._main, text.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self.type("\x03")

    @property
    def echoes(self) -> bool:
        """Whether keys are shown, as they are by default."""
        return bool(termios.tcgetattr(self._main)[3] & termios.ECHO)

    def finish(self) -> tuple[int, str]:
        """Exit status, and the screen as it is left."""
        end = time.monotonic() + DEADLINE
        while self._read(end):
            pass
        return self._process.wait(DEADLINE), self.screen

    def _read(self, end: float) -> bool:
        ready, _, _ = select.select([self._main], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return False
        try:
            data = os.read(self._main, 1 << 16)
        except OSError:  # EIO: the other end is closed
            return False
        self._bytes += data
        whole = len(self._bytes)
        while whole and self._bytes[whole - 1] & 0xC0 == 0x80:  # the middle of a UTF-8 letter
            whole -= 1
        if whole and self._bytes[whole - 1] >= 0xC0:
            try:
                self._bytes[whole - 1 :].decode()
                whole = len(self._bytes)
            except UnicodeDecodeError:
                whole -= 1
        else:
            whole = len(self._bytes)
        self._unread += self._bytes[:whole].decode()
        self._bytes = self._bytes[whole:]
        self._show()
        return True

    def _show(self) -> None:
        text = self._unread
        at = 0
        while at < len(text):
            if text[at] == "\x1b":
                found = _CONTROL.match(text, at)
                if found is None:
                    break  # the rest comes with the next read
                self._control(found[1], found[2])
                at = found.end()
                continue
            self._put(text[at])
            at += 1
        self._unread = text[at:]

    def _put(self, letter: str) -> None:
        if letter == "\n":
            self._move(self._row + 1)
        elif letter == "\r":
            self._column = 0
        else:
            if self._column == self._size[0]:
                self._move(self._row + 1)
                self._column = 0
            line = self._lines[self._row].ljust(self._column)
            self._lines[self._row] = line[: self._column] + letter + line[self._column + 1 :]
            self._column += 1

    def _move(self, row: int) -> None:
        # A terminal cannot move its cursor into what has scrolled away.
        top = max(0, len(self._lines) - self._size[1])
        self._row = max(row, top)
        while len(self._lines) <= self._row:
            self._lines.append("")

    def _control(self, parameters: str, kind: str) -> None:
        match kind:
            case "m":
                pass  # colours
            case "A":
                self._move(self._row - int(parameters or 1))
            case "K":
                self._lines[self._row] = "" if parameters == "2" else self._lines[self._row][: self._column]
            case "l" | "h" if parameters == "?25":
                self.cursor_shown = kind == "h"
            case _:
                raise AssertionError(f"an unknown control: ESC [{parameters}{kind}")
