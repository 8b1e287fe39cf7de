"""The Click group of the program: it imports a command when it is used, and prints an error that
the user can correct as one line.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import click

from orchestrator.common.errors import EXIT_INTERRUPTED, EXIT_USER, SweepError


@dataclass(frozen=True)
class LazyCommands(Mapping[str, click.Command]):
    """Commands by name, each imported when it is looked up.

    modules: the file in `orchestrator/cli/commands` that defines each command. The function has
    the command's name, with underscores.
    """

    modules: Mapping[str, str]

    def __getitem__(self, name: str) -> click.Command:
        module = import_module(f"orchestrator.cli.commands.{self.modules[name]}")
        command: click.Command = getattr(module, name.replace("-", "_"))
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(self.modules)

    def __len__(self) -> int:
        return len(self.modules)


class SweepGroup(click.Group):
    """Group that prints one line on stderr and exits with 2 if the user can correct an error."""

    def invoke(self, ctx: click.Context) -> Any:
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
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # Python flushes stdout at exit, which would fail again, with a traceback.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            reason = f"its output cannot be written: {os.strerror(error.errno)}"
            _exit(ctx, EXIT_USER, f"sweep: {reason}. Free some space and run again")


def _exit(ctx: click.Context, code: int, message: str) -> None:
    click.echo(message, err=True)
    ctx.exit(code)
