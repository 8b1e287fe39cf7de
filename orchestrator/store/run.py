"""Read a results folder: its manifest, its tables as pandas frames or rows, its attempts.

`layout` lists the contents of the folder. `run_writer` writes it, and `stored_tables` reads what is
stored at one moment. That imports pyarrow, a quarter of the time of `sweep plan`: methods import it
when a folder exists.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from orchestrator.common.errors import RunError
from orchestrator.common.files import Content, replace_file, trim_memory, writing
from orchestrator.common.hashing import sha256
from orchestrator.common.suggestions import suggestion
from orchestrator.common.text import cell_count, shell_path
from orchestrator.store.layout import ARTIFACTS, ATTEMPTS, PUBLICATION_FILE, REPORT
from orchestrator.store.manifest import (
    MANIFEST_FILE,
    RESTORE_MANIFEST,
    RESTORED_BY,
    Manifest,
    StoredManifest,
)
from orchestrator.store.untrusted_files import is_plain_name, read_json, require_no_link

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from orchestrator.store.stored_tables import Stored

# The values of a row of a table in the order of the columns that were asked for.
StoredRow: TypeAlias = tuple[Any, ...]
INCOMPLETE = "incomplete"  # the status of a cell whose measured rows are missing in part
_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)  # of an attempt: a column of 32 bits holds it
_BATCH_ROWS = 10_000
_SUGGESTED, _LISTED = 20, 5  # cells in a message


class Run:
    """A results folder, to read. `open_for_writing` gives it to one driver at a time."""

    reference: str | None = None  # the device whose published numbers its report compares with

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __str__(self) -> str:
        return str(self.folder)

    @property
    def exists(self) -> bool:
        return (self.folder / MANIFEST_FILE).exists()

    @property
    def is_published(self) -> bool:
        """True for a publication and for each of its runs, which may only be read."""
        is_publication = (self.folder / PUBLICATION_FILE).exists()
        return is_publication or (self.folder.parent / PUBLICATION_FILE).exists()

    def fetch_artifacts(self, cell: str = "") -> None:
        """Make available what people read of attempts, of one cell or of all.

        A folder on this host has it already. Raise RunUnreachable.
        """

    def require(self) -> Run:
        """Return the run itself. Raise RunError if the folder holds none."""
        if self.exists:
            return self
        if (self.folder / PUBLICATION_FILE).exists():
            runs = sorted(self.folder.glob(f"*/{MANIFEST_FILE}"))
            names = ", ".join(shell_path(path.parent) for path in runs)
            raise RunError(
                f"{self.folder}: holds runs that were published", f"Name one of them: {names}"
            )
        if any((self.folder / ATTEMPTS).glob("*.parquet")):
            raise RunError(f"{self}: its {MANIFEST_FILE} is gone", f"Restore it: {RESTORED_BY}")
        raise RunError(
            f"{self}: holds no run", "Name a folder that `sweep run` wrote, such as results/demo"
        )

    def read_manifest(self) -> Manifest:
        """Return run.json, or an empty dict before the first command.

        Raise RunError if it is damaged, RunMismatch if a newer program wrote it.
        """
        if not self.exists:
            return {}
        content, name = (self.folder / MANIFEST_FILE).read_bytes(), f"{self}/{MANIFEST_FILE}"
        return read_json(content, StoredManifest, name, RESTORE_MANIFEST)[0]

    def read(
        self, table: str, columns: list[str] | None = None, categories: bool = False
    ) -> pd.DataFrame:
        """Return a table as a frame. Columns that a part lacks are null.

        categories: return text columns as categories. A table of millions of rows with few
        different texts then takes a tenth of the memory.
        """
        rows = self.table(table, columns, categories)
        if not categories:
            frame: pd.DataFrame = rows.to_pandas()
            return frame
        import pandas as pd

        series = {}
        for name in rows.column_names:
            series[name] = rows[name].unify_dictionaries().to_pandas()
            rows = rows.drop_columns(name)  # before the next one is converted
        trim_memory()
        return pd.DataFrame(series, copy=False)

    def rows(self, table: str, columns: list[str]) -> Iterator[StoredRow]:
        """Yield the rows of a table, without importing pandas."""
        if not self.exists and not self.folder.exists():
            return
        for batch in self.table(table, columns).to_batches(_BATCH_ROWS):
            yield from zip(*(batch.column(name).to_pylist() for name in columns), strict=True)

    def table(
        self, table: str, columns: list[str] | None = None, categories: bool = False
    ) -> pa.Table:
        """Return a table as pyarrow's. For the arguments see `read`."""
        return self.stored().read(table, columns, categories)

    def table_versions(self, tables: Collection[str]) -> list[object]:
        """Return what changes with every change of some tables."""
        from orchestrator.store.listing import part_files

        stored = self.stored()
        versions: list[object] = [sha256(stored.log)]
        for table in tables:
            files = stored.listing.of_table(table)
            versions += [(name, stored.listing.files[name]) for name in files]
            for path in part_files(self.folder / table):
                versions.append((path.name, path.stat().st_size, path.stat().st_mtime_ns))
        return versions

    def stored(self) -> Stored:
        """Return what is stored now."""
        from orchestrator.store.stored_tables import read_stored

        return read_stored(self.folder, str(self))

    def read_cells(self, key: str) -> tuple[pd.DataFrame, dict[str, Any]] | None:
        """Return cells.parquet and its facts (see `tables`), if it was written with this key."""
        from orchestrator.store.tables import read_cells_file

        digest = self.stored().listing.cells
        return read_cells_file(self.folder, digest, key) if digest else None

    def incomplete_attempts(self) -> dict[tuple[str, int], str]:
        """Return which rows of attempts are missing, by cell and number (see `stored_tables`)."""
        return self.stored().incomplete_attempts() if self.folder.exists() else {}

    def marks(self) -> dict[str, list[int]]:
        """Return the marks of `--fresh` and `--retry` by cell (see `cell_state`)."""
        marks: dict[str, list[int]] = {}
        for invocation in self.read_manifest().get("invocations", []):
            for cell, number in invocation.get("marks", {}).items():
                marks.setdefault(cell, []).append(number)
        return marks

    def unfinished(self) -> dict[str, tuple[int, int]]:
        """Return, by run, how many of its requested cells have no attempt, and how many there are.

        The first number is a lower bound. Runs without such a cell are left out.
        """
        asked = int(self.read_manifest().get("asked", 0))
        missing = asked - len(set(self.rows(ATTEMPTS, ["cell"]))) if asked else 0
        return {self.folder.name: (missing, asked)} if missing > 0 else {}

    def unfinished_count(self) -> int:
        """Return how many requested cells have no attempt yet."""
        return sum(missing for missing, _ in self.unfinished().values())

    def write_report(self, files: Iterable[tuple[str, Content]]) -> None:
        """Write files, by their paths, into the report's folder.

        Raise RunUnwritable: somebody else's run may only be readable.
        """
        trim_memory()
        with writing(self.folder, "Copy the run to a folder of your own, and report that"):
            for name, content in files:
                path = self.folder / REPORT / name
                require_no_link(path, self.folder)
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(path, content)

    def attempt_folder(self, cell: str, number: int) -> Path:
        """Return the folder of an attempt's files. Raise RunError if the cell's id is a path."""
        if not is_plain_name(cell):
            raise RunError(f"{self}: has the cell {cell!r}, which is a path", "Do not use this run")
        return self.folder.absolute() / ARTIFACTS / cell / str(number)

    def highest_attempts(self) -> dict[str, int]:
        """Return each cell's highest attempt number.

        An attempt counts from the moment it has a folder or a row, so that no number is used twice.
        """
        highest: dict[str, int] = {}
        for cell, number in (*self.attempt_folders(), *self.rows(ATTEMPTS, ["cell", "attempt"])):
            highest[cell] = max(number, highest.get(cell, 0))
        return highest

    def attempt_folders(self) -> Iterator[tuple[str, int]]:
        for path in sorted((self.folder / ARTIFACTS).glob("*/*")):
            if _NUMBER.fullmatch(path.name):
                yield path.parent.name, int(path.name)


def find_cell(prefix: str, cells: Iterable[str], run: Run, kind: str = "cell") -> str:
    """Return the one cell whose id begins with the prefix. Raise RunError for none or several.

    kind: what the messages call a cell.
    """
    known = list(map(str, cells))
    found = [cell for cell in known if cell.startswith(prefix)]
    if not found:
        raise RunError(f"{run}: has no {kind} {prefix!r}", suggestion(prefix, known[:_SUGGESTED]))
    if len(found) > 1:
        raise RunError(
            f"{run}: {prefix!r} begins {len(found)} {kind}s",
            f"Write more of one: {', '.join(found[:_LISTED])}",
        )
    return found[0]


def describe_incomplete(run: Run, cells: Collection[str]) -> RunError | None:
    """Return an error that says which rows of these cells are missing. None if there are none."""
    if not cells:
        return None
    incomplete = run.incomplete_attempts()
    (cell, number), missing = min(one for one in incomplete.items() if one[0][0] in cells)
    others = f"; {cell_count(len(cells) - 1)} more incomplete" if len(cells) > 1 else ""
    return RunError(
        f"{run}: attempt {number} of cell {cell} is incomplete: {missing}{others}",
        "Copy the run again, or measure what is missing: `sweep run` with the same config",
    )
