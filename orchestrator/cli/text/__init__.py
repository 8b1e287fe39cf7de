"""Text that commands print: functions that turn results into lines."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from orchestrator.store.run import Run


def warn_of_incomplete(run: Run, cells: Collection[str]) -> None:
    """Print on stderr which rows of these cells are missing, if there are any cells."""
    from orchestrator.store.run import describe_incomplete

    if incomplete := describe_incomplete(run, cells):
        click.echo(f"sweep: {incomplete}", err=True)
