"""Text that commands print: functions that turn results into lines."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import click

from orchestrator.common.units import GIB

if TYPE_CHECKING:
    from orchestrator.store.run import Run


def warn_of_incomplete(run: Run, cells: Collection[str]) -> None:
    """Print on stderr which rows of these cells are missing, if there are any cells."""
    from orchestrator.store.run import describe_incomplete

    if incomplete := describe_incomplete(run, cells):
        click.echo(f"sweep: {incomplete}", err=True)


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a plain table, without the columns that are empty in every row."""
    # 60 ms to import, which most commands need not spend.
    from tabulate import tabulate

    columns = [column for column in zip(header, *rows, strict=True) if any(column[1:])]
    used_header, *used_rows = zip(*columns, strict=True)
    return tabulate(used_rows, used_header, disable_numparse=True)  # numbers are texts already


def format_gib(nbytes: float | None, digits: int = 2) -> str:
    """Return a size in GiB, or an empty text for none."""
    return f"{nbytes / GIB:.{digits}f}" if nbytes else ""


def format_counts(counts: Iterable[tuple[str, int]]) -> str:
    """Return counts by status, such as "3 ok, 1 oom"."""
    return ", ".join(f"{count} {status}" for status, count in counts)
