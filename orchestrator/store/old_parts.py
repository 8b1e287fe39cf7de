"""Parquet parts, as versions before stored.json wrote them. They are read and stay as they are.

A part CELL-NUMBER.parquet has the rows of an attempt, merged-N.parquet those of the parts that it
names in its metadata, all.parquet those of a whole table; predictions are named by a time. A name
is compared with names of files, and is never a path.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator.common.errors import RunError
from orchestrator.store.layout import ATTEMPTS
from orchestrator.store.parquet_file import open_parquet

_BATCH = re.compile(r"[0-9]{4,9}", re.ASCII)
_MERGED = re.compile(r"merged-\d+")
# Copies that file managers and synchronisers make are named "x (copy)" or "x.sync-conflict".
_PART = re.compile(r"[\w-]+")
_ATTEMPT = re.compile(r"(.+)-([0-9]{1,9})", re.ASCII)
_WHOLE_TABLE = "all"
_REPLACES, _DIGESTS, _TABLE = b"replaces", b"rows", b"table"
# It precedes the checksum of a file, in front of the footer.
_CHECKSUM_MARK = bytes.fromhex("9d1f6b0c57e24ab38f40c2d6715ae839")
_CHECKED: dict[tuple[Path, int, int], bool] = {}  # versions of files that need no second look


def current_parts(folder: Path) -> list[Path]:
    """Return the parts of a table, without those that are in a merged part.

    Raise RunError for a file that is neither a part nor a batch.
    """
    # macOS writes attributes of `x.parquet` into a file `._x.parquet` when it copies to others.
    parts = sorted(path for path in folder.glob("*.parquet") if not path.name.startswith("."))
    parts = [path for path in parts if not _BATCH.fullmatch(path.stem)]
    for path in parts:
        if not (_is_merged(path.stem) or _PART.fullmatch(path.stem)):
            raise RunError(
                f"{path}: is not the name of a part",
                "Move it away: a copy of a part would count twice",
            )
    replaced: set[str] = set()
    for path in parts:
        if _is_merged(path.stem):
            with _opened(path, pa.schema([])) as part:
                replaced |= _replaced(part)
    return [path for path in parts if path.stem not in replaced]


class PartOwners:
    """The part that has each attempt's rows, to find rows that would count twice."""

    def __init__(self) -> None:
        self._parts: dict[str, Path] = {}

    @contextmanager
    def opened(self, path: Path, schema: pa.Schema) -> Iterator[pq.ParquetFile]:
        """Open a part. Raise RunError if it is damaged or has the rows of another one."""
        with _opened(path, schema) as part:
            self._require_own_rows(path, part)
            yield part

    def _require_own_rows(self, path: Path, part: pq.ParquetFile) -> None:
        metadata = part.metadata.metadata or {}
        table = metadata.get(_TABLE, path.parent.name.encode()).decode()
        if table != path.parent.name:
            raise RunError(f"{path}: contains rows of the table {table}", _remedy(path))
        is_whole = _is_merged(path.stem) or path.stem == _WHOLE_TABLE
        names = set(json.loads(metadata.get(_DIGESTS, b"{}")))
        if _is_merged(path.stem) and not _replaced(part):
            raise RunError(f"{path}: names no parts that it has the rows of", _remedy(path))
        names |= _replaced(part) if is_whole else _names_in_statistics(part)
        for name in sorted(names):
            twin = self._parts.setdefault(name, path)
            if not is_whole and name != path.stem:
                twin = path.with_name(f"{name}.parquet")
            if twin != path:
                raise _foreign_rows(path, name, twin)


def is_checked(path: Path) -> bool:
    """Return True if a part has a checksum, which it was compared with when it was opened."""
    return _verify_checksum(path)


def attempts_of_parts(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield the cells and numbers in the names of a table's parts."""
    for path in current_parts(folder):
        if found := _ATTEMPT.fullmatch(path.stem):
            yield found[1], int(found[2])


@contextmanager
def _opened(path: Path, schema: pa.Schema) -> Iterator[pq.ParquetFile]:
    _verify_checksum(path)
    with open_parquet(path, schema, _remedy(path)) as part:
        yield part


def _verify_checksum(path: Path) -> bool:
    """Compare a part with the checksum in it. Return False if an older program wrote it without one."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        version = (path, status.st_mtime_ns, status.st_size)
        if version in _CHECKED:
            return _CHECKED[version]
        content = file.read()
    before, mark, after = content.rpartition(_CHECKSUM_MARK)
    if mark:
        checksum = zlib.crc32(after[4:], zlib.crc32(before))
        if checksum.to_bytes(4, "little") != after[:4]:
            raise RunError(
                f"{path}: is damaged: its rows differ from the rows that were written",
                _remedy(path),
            )
    _CHECKED[version] = bool(mark)
    return bool(mark)


def _is_merged(stem: str) -> bool:
    return _MERGED.fullmatch(stem) is not None


def _replaced(part: pq.ParquetFile) -> set[str]:
    """Return the names of the parts that a merged one contains, without their suffix."""
    names = json.loads((part.metadata.metadata or {}).get(_REPLACES, b"[]"))
    return {str(name).removesuffix(".parquet") for name in names}


def _names_in_statistics(part: pq.ParquetFile) -> set[str]:
    """Return the least and the greatest CELL-NUMBER in a part, by its statistics."""
    metadata = part.metadata
    names = metadata.schema.names
    if not {"cell", "attempt"} <= set(names):
        return set()
    found = set()
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        cell = group.column(names.index("cell")).statistics
        number = group.column(names.index("attempt")).statistics
        if cell is None or number is None or not (cell.has_min_max and number.has_min_max):
            continue
        found |= {f"{cell.min}-{number.min}", f"{cell.max}-{number.max}"}
    return found


def _foreign_rows(path: Path, name: str, twin: Path) -> RunError:
    cell, _, number = name.rpartition("-")
    rows = f"attempt {number} of {cell}" if cell else name
    if not twin.exists():
        return RunError(
            f"{path}: contains the rows of {rows}", f"Rename it to {twin.name}, or move it away"
        )
    return RunError(
        f"{path}: contains the rows of {rows}, which {twin.name} also contains",
        "Move one of the files away",
    )


def _remedy(part: Path) -> str:
    # A cell counts as done if it has a row.
    row = part.parent.with_name(ATTEMPTS) / part.name
    end = "and measure its cells again with --retry ok"
    if part == row:
        end = "to measure its cells again"
    elif row.exists():
        end = f"with {row} to measure its cell again"
    elif part.parent.name == "predictions":
        end = "to predict the memory of its cells again"
    return f"Copy it again, or move it away {end}"
