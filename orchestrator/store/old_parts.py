"""Parquet parts, as versions before stored.json wrote them. They are read and stay as they are.

A part CELL-NUMBER.parquet has the rows of an attempt, merged-TIME.parquet those of the parts that it
names in its metadata, all.parquet those of a whole table; predictions are named by a time. A name in
the metadata is compared with names of files, and is never a path.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from orchestrator.common.errors import RunError
from orchestrator.store.tables import (
    JSON_COLUMNS,
    REQUIRED_COLUMNS,
    damage_as_run_error,
    read_parquet,
)

_MERGED = "merged-"
_RESTORE = "Copy it again, or move it away to measure its cells again, if needed with --retry ok"
# Copies that file managers and synchronisers make are named "x (copy)" or "x.sync-conflict".
_PART = re.compile(r"[\w-]+")
# It precedes the checksum of a file, in front of the footer.
_CHECKSUM_MARK = bytes.fromhex("9d1f6b0c57e24ab38f40c2d6715ae839")
_KEY = ("cell", "attempt", "predicted_at")  # each table has two of them


def read_parts(
    files: Iterable[Path], schema: pa.Schema, columns: list[str] | None
) -> Iterator[pa.Table]:
    """Yield the rows of a table's parts, without parts that are in a merged part.

    Raise RunError for a damaged part, a copy, and rows that two parts have.
    """
    replaced: set[str] = set()
    owners: dict[tuple[Any, ...], Path] = {}
    # A killed driver may have left parts that it had merged, also merged ones. The newest is first.
    files = sorted(files, key=lambda path: path.stem.startswith(_MERGED))
    for path in reversed(files):
        if not _PART.fullmatch(path.stem):
            raise RunError(
                f"{path}: is not the name of a part",
                "Move it away: a copy of a part would count twice",
            )
        if path.stem in replaced:
            continue
        content = path.read_bytes()
        before, mark, after = content.rpartition(_CHECKSUM_MARK)
        checksum = zlib.crc32(after[4:], zlib.crc32(before)).to_bytes(4, "little")
        with damage_as_run_error(path, _RESTORE):
            if mark and checksum != after[:4]:
                raise pa.ArrowInvalid("its rows differ from the rows that were written")
            rows = read_parquet(content, schema, columns and [*_KEY, *columns])
            # A part with a checksum was written by this program, and its rows are valid.
            if not mark:
                _require_valid_rows(rows)
            replaced |= _replaced_by(rows, path)
            # Grouping imports pandas, and a single part, as in publications, has no twin.
            keys = _keys(rows) if len(files) > 1 else []
        for cell, number in keys:
            twin = owners.setdefault((cell, number), path)
            if twin != path:
                raise RunError(
                    f"{path}: contains the rows of attempt {number} of {cell}, which {twin.name}"
                    " also contains",
                    "Move one of the files away",
                )
        yield rows.select([name for name in rows.column_names if not columns or name in columns])


def _keys(rows: pa.Table) -> list[tuple[Any, ...]]:
    """Return the cell and the attempt, or the time of prediction, that rows belong to, each once."""
    names = [name for name in _KEY if name in rows.column_names]
    keys = rows.select(names).unify_dictionaries().group_by(names).aggregate([])
    return [tuple(key.values()) for key in keys.to_pylist()]


def _require_valid_rows(table: pa.Table) -> None:
    """Raise ArrowInvalid, or an error about JSON, for rows that this program does not write."""
    names = REQUIRED_COLUMNS.intersection(table.column_names)
    empty = sorted(name for name in names if table[name].null_count)
    if empty:
        raise pa.ArrowInvalid(f"it is no part of a run: it has rows without {', '.join(empty)}")
    for name in sorted(JSON_COLUMNS.intersection(table.column_names)):
        # `drop_null` imports pyarrow.compute.
        for text in (text for text in table[name].to_pylist() if text is not None):
            value = json.loads(text)
            if not isinstance(value, dict):
                raise pa.ArrowInvalid(f"it is no part of a run: its {name} are no JSON objects")
            if r"\ud" in text.lower():  # half of a surrogate pair could not be printed
                json.dumps(value, ensure_ascii=False).encode()


def _replaced_by(rows: pa.Table, path: Path) -> set[str]:
    """Return the names of the parts whose rows a merged one has, without their suffix."""
    if not path.stem.startswith(_MERGED):
        return set()
    metadata = rows.schema.metadata or {}
    names = json.loads(metadata.get(b"replaces", b"[]"))
    if not names:
        raise ValueError("it names no parts that it has the rows of")
    return {str(name).removesuffix(".parquet") for name in names}
