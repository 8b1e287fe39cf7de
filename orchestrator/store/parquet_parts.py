"""Parquet parts: each attempt writes one file per table; full batches are merged into larger ones.

A part is complete or absent, because it is renamed into place. A merged part names the parts that
it replaces, so that no row counts twice if a driver dies before it removes them. A part that
cannot be read, such as half a copy, is reported with its name and what to do about it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator.common.errors import RunError
from orchestrator.common.files import flush_folder, replace_file, return_freed_memory
from orchestrator.store.layout import ATTEMPTS
from orchestrator.store.tables import JSON_COLUMNS, REQUIRED_COLUMNS
from tasks.spec.error_text import error_text

_MERGED = "merged-"
# Copies that file managers and synchronisers make are named "x (copy)" or "x.sync-conflict".
_PART_NAME = re.compile(r"[\w-]+")
_REPLACES = b"replaces"
_READ_TRIES = 5

Built = TypeVar("Built")

# The system's allocator returns freed memory; pyarrow's own keeps it. A report first reads large
# tables and then builds large texts, so that one would add to the other.
pa.set_memory_pool(pa.system_memory_pool())
return_freed_memory()


def read_parts(folder: Path, schema: pa.Schema, columns: list[str] | None) -> list[pa.Table]:
    """Return the table of each current part. Raise RunError if one cannot be read."""
    return build_from_parts(folder, schema, columns, lambda parts: parts[0], 1)


def build_from_parts(
    folder: Path,
    schema: pa.Schema,
    columns: list[str] | None,
    build: Callable[[list[pa.Table]], Built],
    batch_size: int,
) -> list[Built]:
    """Call `build` with each batch of current parts and return the results.

    Only one part is open at a time: a run may have more parts than a process may open files.
    Raise RunError if a part cannot be read.
    """
    for _ in range(_READ_TRIES):
        built = []
        try:
            parts = _current_parts(folder)
            for start in range(0, len(parts), batch_size):
                batch = parts[start : start + batch_size]
                built.append(build([_read_part(path, schema, columns) for path in batch]))
            return built
        except FileNotFoundError:
            continue  # a driver has merged parts since they were listed
    raise RunError(f"{folder}: changes faster than it can be read", "Try again")


def require_readable_parts(folder: Path, schema: pa.Schema) -> None:
    """Raise RunError for the first part whose footer cannot be read.

    Footers are read in a moment however large the run is; the pages are not checked.
    """
    for path in _current_parts(folder):
        with _open_part(path, schema):
            pass


def replaced_parts(folder: Path) -> set[str]:
    """Return the names of the parts whose rows are in a merged part."""
    return _replaced_by(folder.glob(f"{_MERGED}*.parquet"))


def is_merged(part: Path | str) -> bool:
    return Path(part).name.startswith(_MERGED)


def merge(parts: list[Path], schema: pa.Schema) -> None:
    """Replace parts by a merged one. Raise RunError, changing nothing, if one is damaged."""
    whole = pa.concat_tables(
        [_read_part(path, schema, None) for path in parts], promote_options="permissive"
    )
    names = json.dumps([path.name for path in parts]).encode()
    merged = parts[0].with_name(f"{_MERGED}{time.time_ns()}.parquet")
    write_part(merged, whole.replace_schema_metadata({_REPLACES: names}))
    flush_folder(merged.parent)  # the new part survives a power cut before the old ones go
    for path in parts:
        path.unlink()


def write_part(path: Path, table: pa.Table) -> None:
    """Write a table as a part that is complete or absent."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    replace_file(path, sink.getvalue().to_pybytes())


def _current_parts(folder: Path) -> list[Path]:
    # A listing may miss a merged part that arrives during it, together with the parts that it
    # replaces. It is complete if a second one finds the same merged parts.
    listed = sorted(folder.glob("*.parquet"))
    while set(filter(is_merged, listed)) != set(folder.glob(f"{_MERGED}*.parquet")):
        listed = sorted(folder.glob("*.parquet"))
    replaced = _replaced_by(filter(is_merged, listed))
    parts = [path for path in listed if path.name not in replaced]
    for path in parts:
        if not _PART_NAME.fullmatch(path.stem):
            raise RunError(
                f"{path}: is not the name of a part",
                "Move it away: a copy of a part would count twice",
            )
    return parts


def _replaced_by(merged: Iterable[Path]) -> set[str]:
    replaced: set[str] = set()
    for path in merged:
        with _damage_as_run_error(path), path.open("rb") as file:
            metadata = pq.read_schema(file).metadata or {}
            replaced.update(json.loads(metadata.get(_REPLACES, b"[]")))
    return replaced


def _read_part(path: Path, schema: pa.Schema, columns: list[str] | None) -> pa.Table:
    with _open_part(path, schema) as part:
        names = part.schema_arrow.names
        if columns is not None:
            names = [name for name in columns if name in names]
        # Parts are too small to gain from threads, and every thread would hold on to memory.
        table = part.read(columns=names, use_threads=False)
        fields = []
        for field in table.schema:
            # A column of a newer program stays as it is.
            fields.append(schema.field(field.name) if field.name in schema.names else field)
        table = table.cast(pa.schema(fields))
        _require_valid_rows(table)
        return table


@contextmanager
def _open_part(path: Path, schema: pa.Schema) -> Iterator[pq.ParquetFile]:
    # Python opens the file: pyarrow would encode the path by the locale, take "a:b/x" for an
    # address, and "~" for a home.
    with _damage_as_run_error(path), path.open("rb") as file:
        metadata = pq.read_metadata(file)
        names = metadata.schema.to_arrow_schema().names
        missing = sorted(REQUIRED_COLUMNS.intersection(schema.names).difference(names))
        if missing:
            raise pa.ArrowInvalid(f"it is no part of a run: it has no column {', '.join(missing)}")
        text = [name for name in names if name in schema.names and _is_category(schema, name)]
        with pq.ParquetFile(file, metadata=metadata, read_dictionary=text) as part:
            yield part


def _is_category(schema: pa.Schema, name: str) -> bool:
    return bool(pa.types.is_dictionary(schema.field(name).type))


def _require_valid_rows(table: pa.Table) -> None:
    names = REQUIRED_COLUMNS.intersection(table.column_names)
    empty = sorted(name for name in names if table[name].null_count)
    if empty:
        raise pa.ArrowInvalid(f"it is no part of a run: it has rows without {', '.join(empty)}")
    for name in sorted(JSON_COLUMNS.intersection(names)):
        if not all(isinstance(json.loads(text), dict) for text in table[name].to_pylist()):
            raise pa.ArrowInvalid(f"it is no part of a run: its {name} are no JSON objects")


@contextmanager
def _damage_as_run_error(part: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: of the JSON in it
        reason = error_text(error).splitlines()[0]
        raise RunError(
            f"{part}: cannot be read: {reason}", f"Copy it again, or move it away {_remedy(part)}"
        ) from error


def _remedy(part: Path) -> str:
    # A cell counts as done if it has a row.
    row = part.parent.with_name(ATTEMPTS) / part.name
    if part == row:
        return "to measure its cells again"
    if row.exists():
        return f"with {row} to measure its cell again"
    return "and measure its cells again with --retry ok"
