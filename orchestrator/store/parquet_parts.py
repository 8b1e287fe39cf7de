"""The files that a run is made of: one Parquet part an attempt, or a merged one of many, each a table with one of these schemas.

A part is written aside and renamed, so that it is whole or not there. What cannot be read is named, with its remedy: half a copy,
or another program's.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator.common.errors import RunError
from orchestrator.common.files import flush_folder, replace_file, return_freed_memory
from orchestrator.store.tables import JSON_COLUMNS, REQUIRED_COLUMNS

_MERGED = "merged-"
# A copy that a file manager or a synchroniser made beside a part has more in its name: " (copy)", ".sync-conflict".
_NAMES = re.compile(r"[\w-]+")
_REPLACES = b"replaces"
_READ_TRIES = 5

# The system's allocator returns freed memory; pyarrow's own keeps it. A report first reads large
# tables and then builds large texts, so that one would add to the other.
pa.set_memory_pool(pa.system_memory_pool())
return_freed_memory()


def read_parts(
    folder: Path,
    schema: pa.Schema,
    columns: list[str] | None,
    made_of: Callable[[list[pa.Table]], Any] = lambda parts: parts[0],
    at_once: int = 1,
) -> list[Any]:
    """What is made of so many parts at once, of all that no merged one replaces. One is open at a time: a run may have more parts
    than a process files.

    A driver may merge parts while a reader reads; the reader then begins anew.
    """
    for _ in range(_READ_TRIES):
        try:
            parts = _that_count(folder)
            starts = range(0, len(parts), at_once)
            return [
                made_of(
                    [_read_part(path, schema, columns) for path in parts[start : start + at_once]]
                )
                for start in starts
            ]
        except FileNotFoundError:
            continue
    raise RunError(f"{folder}: changes faster than it can be read", "Try again")


def require_readable_parts(folder: Path, schema: pa.Schema) -> None:
    """Raises RunError for the first that cannot be read, as far as its footer tells: soon, however much there is."""
    for path in _that_count(folder):
        with _opened(path, schema):
            pass


def _that_count(folder: Path) -> list[Path]:
    """All parts that no merged one replaces. Raises FileNotFoundError where they are merged meanwhile."""
    listed = _listed(folder)
    replaced = _replaced_by(filter(is_merged, listed))
    parts = [path for path in listed if path.name not in replaced]
    for path in parts:
        if not _NAMES.fullmatch(path.stem):
            raise RunError(
                f"{path}: has not the name of a part",
                "Move it away: a copy of one would count twice",
            )
    return parts


def _read_part(path: Path, schema: pa.Schema, columns: list[str] | None) -> pa.Table:
    """As the schema has it: where that is one of categories, texts are read as such."""
    with _opened(path, schema) as part:
        present = columns and [name for name in columns if name in part.schema_arrow.names]
        read = part.read(
            columns=present, use_threads=False
        )  # each would keep memory of its own, and parts are small
        read = read.cast(
            pa.schema(
                [
                    schema.field(field.name) if field.name in schema.names else field
                    for field in read.schema
                ]
            )
        )
        _require_rows(read)
        return read


@contextmanager
def _opened(path: Path, schema: pa.Schema) -> Iterator[pq.ParquetFile]:
    """Raises RunError for what no Parquet reader takes, and for what has no column that each part of this table has."""
    with _reading(path):
        names = pq.read_schema(_as_a_file(path)).names
        if missing := REQUIRED_COLUMNS.intersection(schema.names).difference(names):
            raise pa.ArrowInvalid(
                f"it is no part of a run: it has no column {', '.join(sorted(missing))}"
            )
        categories = [
            field.name
            for field in schema
            if pa.types.is_dictionary(field.type) and field.name in names
        ]
        with pq.ParquetFile(_as_a_file(path), read_dictionary=categories) as part:
            yield part


def _as_a_file(path: Path) -> Path:
    """Absolute: of a relative one, pyarrow takes `a:b/…` for an address and `~/…` for what is in a home."""
    return path.absolute()


def _require_rows(read: pa.Table) -> None:
    names = REQUIRED_COLUMNS.intersection(read.column_names)
    if empty := sorted(name for name in names if read[name].null_count):
        raise pa.ArrowInvalid(f"it is no part of a run: it has rows without {', '.join(empty)}")
    for name in sorted(JSON_COLUMNS.intersection(names)):
        if not all(isinstance(json.loads(text), dict) for text in read[name].to_pylist()):
            raise pa.ArrowInvalid(f"it is no part of a run: its {name} are no JSON objects")


def _listed(folder: Path) -> list[Path]:
    """Its parts at one moment: a merged one that comes while they are listed may be missed, and those that go with it."""
    listed = sorted(folder.glob("*.parquet"))
    while set(filter(is_merged, listed)) != set(folder.glob(f"{_MERGED}*.parquet")):
        listed = sorted(folder.glob("*.parquet"))
    return listed


def replaced_parts(folder: Path) -> set[str]:
    """The names of the parts whose rows are in a merged one."""
    return _replaced_by(folder.glob(f"{_MERGED}*.parquet"))


def _replaced_by(merged: Iterable[Path]) -> set[str]:
    replaced: set[str] = set()
    for path in merged:
        with _reading(path):
            replaced |= set(
                json.loads((pq.read_schema(_as_a_file(path)).metadata or {}).get(_REPLACES, b"[]"))
            )
    return replaced


def is_merged(part: Path) -> bool:
    return part.name.startswith(_MERGED)


def merge(parts: list[Path], schema: pa.Schema) -> None:
    """Raises RunError where one cannot be read, and leaves all as they are."""
    whole = pa.concat_tables(
        [_read_part(path, schema, None) for path in parts], promote_options="permissive"
    )
    names = json.dumps([path.name for path in parts]).encode()
    write_part(
        parts[0].with_name(f"{_MERGED}{time.time_ns()}.parquet"),
        whole.replace_schema_metadata({_REPLACES: names}),
    )
    flush_folder(parts[0].parent)
    for path in parts:
        path.unlink()


def write_part(path: Path, table: pa.Table) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    replace_file(path, sink.getvalue().to_pybytes())


@contextmanager
def _reading(part: Path) -> Iterator[None]:
    """Turns what no Parquet reader takes, such as half a copy, into one line with its remedy."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:  # of Parquet, and of the JSON in it
        reason = str(error).splitlines()[0]
        raise RunError(
            f"{part}: cannot be read: {reason}",
            f"Copy it again, or move it away {_to_measure_anew(part)}",
        ) from error


def _to_measure_anew(part: Path) -> str:
    """A cell is done where there is a row of its attempt, whatever is left of what it measured."""
    row = part.parent.with_name("attempts") / part.name
    if part == row:
        return "to measure its cells anew"
    return (
        f"with {row} to measure its cell anew"
        if row.exists()
        else "and measure again what it held with --retry ok"
    )
