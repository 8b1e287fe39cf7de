"""Text that commands print: functions that turn results into lines."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a plain table, without the columns that are empty in every row."""
    # 60 ms to import, which most commands need not spend.
    from tabulate import tabulate

    used = [column for column in range(len(header)) if any(row[column] for row in rows)]
    return tabulate(
        [[row[column] for column in used] for row in rows],
        [header[column] for column in used],
        disable_numparse=True,  # numbers are formatted already
    )
