"""The Click group of the program. It turns errors that a user can mend into one line and an exit
code.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from typing import TYPE_CHECKING, Any

import click

from orchestrator.common.errors import (
    EXIT_INTERRUPTED,
    EXIT_USER,
    SweepError,
)

if TYPE_CHECKING:
    pass


class SweepGroup(click.Group):
    """Turns what the user can mend into one line on stderr and exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SweepError as error:
            click.echo(f"sweep: {error}", err=True)
            ctx.exit(EXIT_USER)
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx else "sweep"
            said = re.sub(r"(?<![.?])$", ".", error.format_message())
            click.echo(f"{command}: {said} See `{command} --help`", err=True)
            ctx.exit(EXIT_USER)
        except (
            KeyboardInterrupt
        ):  # before a sweep began or after it ended: click would say 1, as of cells that failed
            click.echo("sweep: stopped by SIGINT", err=True)
            ctx.exit(EXIT_INTERRUPTED)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            from orchestrator.sweep.console import drop_output

            drop_output(sys.stdout)
            click.echo(
                f"sweep: its output cannot be written: {os.strerror(error.errno)}. Free some space and run again",
                err=True,
            )
            ctx.exit(EXIT_USER)
