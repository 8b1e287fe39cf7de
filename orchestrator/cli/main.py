"""The command line: the group `sweep`, the names of its commands, and its errors.

`sweep --help` prints within a fraction of a second and only `sweep run` loads Ray: a command is
imported when it is used, and imports what it needs inside its function. An error that the user can
correct is printed as one line.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from keyword import iskeyword
from typing import NoReturn

import click

from orchestrator.common.errors import (
    EXIT_INTERRUPTED,
    EXIT_USER,
    SweepError,
)
from orchestrator.common.limits import limit_error
from tasks.spec.messages import shorten

_LONGEST_SHOWN = 101  # characters of a path in a message, the "…" for the rest included
_REMEDIES = {
    errno.ENAMETOOLONG: "Give a shorter name",
    errno.ELOOP: "Remove the link that leads to itself",
    errno.EACCES: "Check its permissions and those of the folders above it",
}


@dataclass(frozen=True)
class LazyCommands(Mapping[str, click.Command]):
    """Commands by name, each imported when it is looked up.

    modules: the file in `orchestrator/cli/commands` that defines each command. The function has
    the command's name, with underscores, and one more behind a word of Python such as `import`.
    """

    modules: Mapping[str, str]

    def __getitem__(self, name: str) -> click.Command:
        module = import_module(f"orchestrator.cli.commands.{self.modules[name]}")
        function = name.replace("-", "_") + ("_" if iskeyword(name) else "")
        command: click.Command = getattr(module, function)
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(self.modules)

    def __len__(self) -> int:
        return len(self.modules)


class SweepGroup(click.Group):
    """Group that prints one line on stderr and exits with 2 if the user can correct an error."""

    def invoke(self, ctx: click.Context) -> object:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except SweepError as error:
            _exit(ctx, EXIT_USER, f"sweep: {error}")
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx else "sweep"
            message = error.format_message()
            # Click ends some messages with a full stop or a question, and others with neither.
            if not message.endswith((".", "?")):
                message += "."
            _exit(ctx, EXIT_USER, f"{command}: {message} See `{command} --help`")
        except KeyboardInterrupt:
            # Before a sweep begins or after it ends: during a sweep there is a handler. Click
            # would exit with 1, which means that cells failed.
            _exit(ctx, EXIT_INTERRUPTED, "sweep: stopped by SIGINT")
        except Exception as error:
            number = getattr(error, "errno", None)
            if number not in (errno.ENOSPC, errno.EDQUOT):
                _exit(ctx, EXIT_USER, f"sweep: {_explain(error)}")
            # Python flushes stdout at exit, which would fail again, with a traceback.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            reason = f"its output cannot be written: {os.strerror(number)}"
            _exit(ctx, EXIT_USER, f"sweep: {reason}. Free some space and run again")


def _explain(error: Exception) -> SweepError:
    """Return what the user can do about a file or a limit of the system.

    Raises the error itself if it names neither, such as that of a closed pipe.
    """
    if at_limit := limit_error(error):
        return at_limit
    number = getattr(error, "errno", None) or 0
    if isinstance(error, OSError) and error.filename is not None:
        name = shorten(os.fsdecode(error.filename), _LONGEST_SHOWN)
        reason = f"cannot be used: {os.strerror(number)}"
        return SweepError(f"{name}: {reason}", _REMEDIES.get(number, ""))
    if number == errno.ENOENT:  # of a file, it has a name
        return SweepError("the current folder was removed", "Change to another one")
    raise error


def _exit(ctx: click.Context, code: int, message: str) -> NoReturn:
    click.echo(message, err=True)
    ctx.exit(code)


MODULES = {
    "ab": "ab", "best": "best", "compare": "compare", "doctor": "doctor", "import": "import_traces",
    "max-batch": "capacity", "max-context": "capacity", "plan": "plan", "publish": "publish",
    "report": "report", "run": "run", "schema": "doctor", "show": "status", "status": "status",
}  # fmt: skip


@click.group(cls=SweepGroup, commands=LazyCommands(MODULES))
@click.version_option(package_name="transformer-sweep")
def main() -> None:
    """Sweep a grid of Transformer training configurations over your GPUs, one isolated cell at a
    time.
    """
