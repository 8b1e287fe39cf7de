"""Errors that the user can correct, and the exit codes of the program.

    SweepError
    ├── ConfigError         config or selection
    ├── PlatformError       this machine or cluster
    │   ├── NoGpuLeft
    │   └── NoNodeLeft
    └── RunError            results folder
        ├── RunLocked
        ├── RunUnreachable
        ├── RunUnwritable
        └── RunMismatch

The command line prints each as one line with its remedy and exits with 2. A cell that fails is not
an error here: its attempt has a status and evidence.
"""

from __future__ import annotations

import errno

from tasks.spec.messages import escape_unprintable, shorten

EXIT_FAILURES = 1  # the sweep is complete, and some cell failed
EXIT_USER = 2  # a SweepError
EXIT_UNDECIDED = 3  # a comparison that could not be decided
EXIT_TIME_LIMIT = 75  # EX_TEMPFAIL of sysexits.h: cells are left, run again
EXIT_INTERRUPTED = 130
COMPLETED = (0, EXIT_FAILURES)  # exit codes of a complete sweep

# Errors of a process or a system that is at its limits, whatever file it opens.
LIMIT_REMEDIES = {
    errno.EMFILE: "Raise it with `ulimit -n`",
    errno.ENFILE: "Have other programs close files",
    errno.EAGAIN: "Raise it with `ulimit -u`, or end other processes",
    errno.ENOMEM: "Free some memory, or raise it with `ulimit -v`",
    errno.E2BIG: "Unset large environment variables",
    errno.EFBIG: "Raise it with `ulimit -f`",
}

_LONGEST = 500  # characters; a message may quote a file of any length


class SweepError(Exception):
    """An error with what is wrong (`message`) and what to do about it (`remedy`)."""

    def __init__(self, message: str, remedy: str = "") -> None:
        # Names of files and values may hold line breaks, and an error is one line.
        self.message = shorten(escape_unprintable(message), _LONGEST)
        self.remedy = escape_unprintable(remedy)
        # A message that quotes another program may end with a full stop.
        sentence = self.message.removesuffix(".") if remedy else self.message
        super().__init__(". ".join(filter(None, [sentence, self.remedy])))


class ConfigError(SweepError):
    """A value in the YAML or in a selection on the command line that is not allowed."""


class PlatformError(SweepError):
    """A request that this machine or cluster cannot fulfil."""


class NoGpuLeft(PlatformError):
    """A sweep whose GPUs have all failed."""


class NoNodeLeft(PlatformError):
    """A sweep without a healthy node for the cells that are left."""


class RunError(SweepError):
    """A results folder that is missing, damaged or unsuitable."""


class RunLocked(RunError):
    """A results folder or bucket that another driver writes to."""


class RunUnreachable(RunError):
    """A bucket that does not answer or denies access."""


class RunUnwritable(RunError):
    """A results folder that is read-only, full or not a folder."""


class RunMismatch(RunError):
    """Results of other hardware or software, or of a newer version of this program."""
