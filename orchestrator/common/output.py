"""Lines on the standard output that may lose their reader.

If the reader of the output ends, as in `| head`, a sweep continues without output, because its
purpose is the rows that it stores.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TextIO

import click

from tasks.spec.messages import escape_unprintable

Notify = Callable[[str], None]  # shows one message to the user


def say(line: str) -> None:
    """Print a line, unless the reader of the output has ended."""
    try:
        click.echo(escape_unprintable(line))
    except BrokenPipeError:
        continue_unread()


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
