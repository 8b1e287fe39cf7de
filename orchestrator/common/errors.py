"""What the user can mend. Each is one line with its remedy; the command line prints it and exits with 2.

SweepError
├── ConfigError        the YAML, or a selection on the command line, says something that cannot be
├── PlatformError   this machine or cluster cannot do what is asked
│   ├── NoGpuLeft       no GPU is left that works
│   └── NoNodeLeft      no node is left that a cell could come to
└── RunError           the results folder
    ├── RunLocked      another driver is at work in it
    ├── RunUnreachable it lies in a bucket, or elsewhere, that does not answer or lets nobody in
    ├── RunUnwritable  read-only, full, or not a folder
    └── RunMismatch    it holds results of other hardware or software, or of a newer version of this program

What a cell does wrong is not here: that is a row with evidence.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

# How the program ends, beside 0.
EXIT_FAILURES = 1  # the sweep came to its end, and some cell failed
EXIT_USER = 2  # something that the user can mend: a SweepError
EXIT_TIME_LIMIT = 75  # EX_TEMPFAIL: run again to go on
EXIT_INTERRUPTED = 130
COMPLETED = (0, EXIT_FAILURES)  # a sweep, where a cell may have failed

_LONGEST = 500  # of what may repeat somebody's whole file


class SweepError(Exception):
    """`message` says what is wrong and where; `remedy` what to do about it."""

    def __init__(self, message: str, remedy: str = "") -> None:
        message = message if len(message) <= _LONGEST else f"{message[:_LONGEST]}…"
        super().__init__(f"{message}. {remedy}" if remedy else message)
        self.message = message
        self.remedy = remedy


class ConfigError(SweepError):
    pass


class PlatformError(SweepError):
    pass


class NoGpuLeft(PlatformError):
    pass


class NoNodeLeft(PlatformError):
    pass


class RunError(SweepError):
    pass


class RunLocked(RunError):
    pass


class RunUnreachable(RunError):
    pass


class RunUnwritable(RunError):
    pass


class RunMismatch(RunError):
    pass


def suggestion(word: object, allowed: Iterable[object]) -> str:
    """The remedy for a misspelt word: the closest allowed one, or all of them."""
    words = [str(name) for name in allowed]
    close = get_close_matches(str(word), words, n=1)
    return f"Did you mean {close[0]!r}?" if close else f"Allowed: {', '.join(words)}"
