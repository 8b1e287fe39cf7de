"""A run's folder: what is in it, how it is written so that nothing is lost, how it is read.

    run.json        the config, the fingerprint, who ran what when: rewritten by rename
    attempts/       one Parquet part an attempt, written last: its presence is completion
    samples/        one Parquet part an attempt that measured something
    kernels/        one Parquet part an attempt whose kernels were watched
    allocations/    one Parquet part an attempt of which a snapshot of the device's memory was taken
    live/           how much memory lived when in those
    predictions/    one Parquet part a run that predicted the memory of its cells
    artifacts/      CELL/NUMBER/: attempt.json, journal.jsonl, log.txt, and what instruments leave
    cells.parquet   one wide row a cell: derived from the parts, rewritten by rename
    report/         what `sweep report` renders
    cache/          compiled kernels, shared by the cells of the run

Runs that were published (publishing) lie side by side in a folder with a list of their files, and are read only.

Only the driver that holds the lock writes. Parts are merged, a batch at a time, into larger ones; a merged part names
the parts it replaces, so that a crash between the two writes leaves nothing counted twice. How a part is read
and written says `parts`. A run may also lie elsewhere, with its working copy here (remote).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from orchestrator.common.errors import RunError, suggestion
from orchestrator.common.files import Content, replace_file, trim_memory, writing
from orchestrator.store.layout import PUBLICATION_FILE
from orchestrator.store.manifest import MANIFEST_FILE, RESTORED_BY, read_manifest
from orchestrator.store.parquet_parts import (
    is_merged,
    read_parts,
    replaced_parts,
)
from orchestrator.store.tables import (
    MEASURED_TABLES,
    SCHEMA_VERSION,
    SCHEMAS,
    empty_table,
    with_categories,
)

if TYPE_CHECKING:
    import pandas as pd

_BATCH_ROWS = 10_000
_PARTS_AT_ONCE = 16
_SUGGESTED, _NAMED = (
    20,
    5,
)  # of the cells of a run, where one is looked for in vain, or several are found


class Run:
    """A results folder, to read. `open_for_writing` gives it to one driver at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __str__(self) -> str:
        """As the command line names it."""
        return str(self.folder)

    @property
    def exists(self) -> bool:
        return (self.folder / MANIFEST_FILE).exists()

    @property
    def is_published(self) -> bool:
        """Whether it is a publication, or one of its runs: to read only."""
        return any(
            (folder / PUBLICATION_FILE).exists() for folder in (self.folder, self.folder.parent)
        )

    def fetch_artifacts(self, cell: str = "") -> None:
        """Has here what people read of attempts, of one cell or of all: of a folder of this host it is. Raises RunUnreachable."""

    def require(self) -> Run:
        """Raises RunError where there is no run."""
        if (self.folder / PUBLICATION_FILE).exists() and not self.exists:
            within = ", ".join(
                sorted(shlex.quote(str(path.parent)) for path in self.folder.glob("*/run.json"))
            )
            raise RunError(
                f"{self.folder}: holds runs that were published", f"Name one of them: {within}"
            )
        if not self.exists and any((self.folder / "attempts").glob("*.parquet")):
            raise RunError(f"{self}: its {MANIFEST_FILE} is gone", f"Restore it: {RESTORED_BY}")
        if not self.exists:
            raise RunError(
                f"{self}: holds no run",
                "Name a folder that `sweep run` wrote, such as results/demo",
            )
        return self

    def read_manifest(self) -> dict[str, Any]:
        """run.json; empty before the first run. Raises RunError for what is none, RunMismatch for one of a newer program."""
        return (
            read_manifest(self.folder / MANIFEST_FILE, f"{self}/{MANIFEST_FILE}", SCHEMA_VERSION)
            if self.exists
            else {}
        )

    def read(
        self, table: str, columns: list[str] | None = None, categories: bool = False
    ) -> pd.DataFrame:
        """One of the tables as a frame, all parts with their schemas unified; missing columns are null.

        categories: texts as such, which of millions of rows that name few things takes a tenth of the memory.
        """
        if categories:
            return self._read_categories(table, columns)
        frame: pd.DataFrame = self._read_table(table, columns).to_pandas()
        return frame

    def _read_categories(self, table: str, columns: list[str] | None) -> pd.DataFrame:
        """Some parts at a time: they take several times as much while they are read, and pandas its time for each time."""
        import pandas as pd
        from pandas.api.types import union_categoricals

        schema = with_categories(SCHEMAS[table])
        empty = empty_table(schema, columns)

        def as_columns(parts: list[pa.Table]) -> dict[str, pd.Series[Any]]:
            whole = pa.concat_tables(
                [empty, *parts], promote_options="permissive"
            ).unify_dictionaries()
            return {name: whole[name].to_pandas() for name in whole.column_names}

        parts = [
            as_columns([]),
            *read_parts(self.folder / table, schema, columns, as_columns, _PARTS_AT_ONCE),
        ]
        joined: dict[str, Any] = {
            name: union_categoricals([_of_texts(part.pop(name)) for part in parts])
            if isinstance(parts[0][name].dtype, pd.CategoricalDtype)
            else pd.concat([part.pop(name) for part in parts], ignore_index=True)
            for name in empty.column_names
        }
        trim_memory()
        return pd.DataFrame(joined, copy=False)

    def rows(self, table: str, columns: list[str]) -> Iterator[tuple[Any, ...]]:
        """The same row by row, for what should not wait until pandas is imported, or not have all of it in memory."""
        for batch in self._read_table(table, columns).to_batches(_BATCH_ROWS):
            yield from zip(*(batch.column(name).to_pylist() for name in columns), strict=True)

    def unfinished_count(self) -> int:
        """How many of the cells that the last command asked for, at least, have not ended yet."""
        asked = int(self.read_manifest().get("asked", 0))
        return max(0, asked - len(set(self.rows("attempts", ["cell"])))) if asked else 0

    def unfinished_runs(self) -> dict[str, str]:
        """`121 of 360` under the name of each run of which so much is missing."""
        missing = self.unfinished_count()
        return (
            {self.folder.name: f"{missing} of {self.read_manifest()['asked']}"} if missing else {}
        )

    def write_report(self, files: Iterable[tuple[str, Content]]) -> None:
        """Each by its path in the report. Raises RunUnwritable: a run may be somebody else's, to read only."""
        trim_memory()
        with writing(self.folder, "Copy the run to a folder of your own, and report that"):
            for name, content in files:
                path = self.folder / "report" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(path, content)

    def attempt_folder(self, cell: str, number: int) -> Path:
        return self.folder.absolute().joinpath("artifacts", cell, str(number))

    def highest_attempts(self) -> dict[str, int]:
        """The highest attempt number of each cell of which anything is here, finished or not: its folder, or what it measured."""
        highest: dict[str, int] = {}
        for cell, number in (*self._attempt_folders(), *self._measured_attempts()):
            highest[cell] = max(number, highest.get(cell, 0))
        return highest

    def _read_table(self, table: str, columns: list[str] | None) -> pa.Table:
        parts = read_parts(self.folder / table, SCHEMAS[table], columns)
        return pa.concat_tables(
            [empty_table(SCHEMAS[table], columns), *parts], promote_options="permissive"
        )

    def _attempt_folders(self) -> Iterator[tuple[str, int]]:
        for path in sorted((self.folder / "artifacts").glob("*/*")):
            if path.name.isdigit():
                yield path.parent.name, int(path.name)

    def _measured_attempts(self) -> Iterator[tuple[str, int]]:
        """With or without a row: another host's driver, cut off from where the run is, may have left what it measured alone."""
        for table in MEASURED_TABLES:
            folder = self.folder / table
            for name in {path.name for path in folder.glob("*.parquet")} | replaced_parts(folder):
                cell, _, number = name.removesuffix(".parquet").rpartition("-")
                if cell and number.isdigit() and not is_merged(Path(name)):
                    yield cell, int(number)


def find_cell(prefix: str, cells: Iterable[str], run: Run, what: str = "cell") -> str:
    """The one of these cells of a run whose id begins so. what: as which they are named. Raises RunError for none, or several."""
    known = list(map(str, cells))
    found = [cell for cell in known if cell.startswith(prefix)]
    if not found:
        raise RunError(f"{run}: has no {what} {prefix!r}", suggestion(prefix, known[:_SUGGESTED]))
    if len(found) > 1:
        raise RunError(
            f"{run}: {prefix!r} begins {len(found)} {what}s",
            f"Say which: {', '.join(found[:_NAMED])}",
        )
    return found[0]


def _of_texts(column: pd.Series[Any]) -> pd.Series[Any]:
    """A categorical column, which is one of texts also where it is all null."""
    return column if len(column.cat.categories) else column.cat.set_categories([""])
