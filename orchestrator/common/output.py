"""Output of a command while it works: lines on the standard output, and its progress.

If the reader of the output ends, as in `| head`, a sweep continues without output, because its
purpose is the rows that it stores.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import TextIO

import click

from orchestrator.common.text import format_seconds
from tasks.spec.messages import escape_unprintable, shorten

_FIRST_S, _REDRAWN_S = 2.0, 0.5  # of a progress line on a terminal
_FIRST_IN_LOG_S, _LONGEST_IN_LOG_S = 10.0, 60.0  # the pause doubles up to the longest
_REMOVE_LINE = "\r\x1b[2K"

Notify = Callable[[str], None]  # shows one message to the user


def say(line: str) -> None:
    """Print a line, unless the reader of the output has ended."""
    try:
        click.echo(escape_unprintable(line))
    except BrokenPipeError:
        continue_unread()


def warn(text: str) -> None:
    """Print a line on the standard error, unless nobody reads it."""
    with suppress(OSError):
        print(f"sweep: {text}", file=sys.stderr)


def _drop_output(stream: TextIO) -> None:
    """Redirect what is still printed to a stream to /dev/null."""
    # Python flushes the stream when it exits, which would fail with a traceback otherwise.
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def continue_unread() -> None:
    """Drop what is still printed, and say so once on the standard error."""
    _drop_output(sys.stdout)
    try:
        click.echo(
            "sweep: the output is closed; the sweep continues without it,"
            " and `sweep status RUN` shows its progress",
            err=True,
        )
    except BrokenPipeError:
        _drop_output(sys.stderr)


class ProgressLine(AbstractContextManager["ProgressLine"]):
    """Context manager that shows on the standard error how long its body takes, after two seconds.

    On a terminal the line is drawn again and again, and removed at the end. In a log, a line is
    printed now and then. Nothing else may be printed in the meantime.

    total: number of steps, 0 if there are none to count. The body may change both numbers.
    """

    def __init__(self, text: str, total: int = 0) -> None:
        self.text = text
        self.total = total
        self.done = 0
        self._file = sys.stderr
        self._is_live = self._file.isatty() and os.environ.get("TERM") != "dumb"
        self._started_s = time.monotonic()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    def _show(self) -> None:
        pause_s = _FIRST_S if self._is_live else _FIRST_IN_LOG_S
        is_drawn = False
        while not self._end.wait(pause_s):
            width = shutil.get_terminal_size().columns - 1
            count = f" {self.done:,} of {self.total:,}," if self.total else ""
            passed = format_seconds(time.monotonic() - self._started_s)
            line = f"{self.text}:{count} {passed}"
            self._write(f"{_REMOVE_LINE}{shorten(line, width)}" if self._is_live else f"{line}\n")
            is_drawn = self._is_live
            pause_s = _REDRAWN_S if self._is_live else min(2 * pause_s, _LONGEST_IN_LOG_S)
        if is_drawn:
            self._write(_REMOVE_LINE)

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # it was closed, which is no reason to stop
            self._file.write(text)
            self._file.flush()
