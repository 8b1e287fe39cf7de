"""Read a Parquet file of a table, or report its damage in one line with what to do about it."""

from __future__ import annotations

import ctypes
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator.common.errors import LIMIT_REMEDIES, RunError
from orchestrator.common.hashing import bytes_digest
from orchestrator.store.tables import JSON_COLUMNS, REQUIRED_COLUMNS
from tasks.spec.messages import error_text

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_THRESHOLD_BYTES = 128 * 1024  # glibc's default of both
_JSON_ERRORS = (ValueError, TypeError, AttributeError, RecursionError)

# Versions of files whose content is known to be what was written: path, time, size and digest.
_CHECKED: set[tuple[Path, int, int, str]] = set()


def return_freed_memory() -> None:
    """Have this process return freed memory to the system, which takes up to a tenth more time.

    pyarrow's own allocator keeps it, and glibc keeps blocks of up to 32 MiB once one was freed.
    Only a command calls this: it also holds for other libraries in the process.
    """
    pa.set_memory_pool(pa.system_memory_pool())
    with suppress(OSError, AttributeError):  # another C library
        for threshold in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            ctypes.CDLL(None).mallopt(threshold, _THRESHOLD_BYTES)


def is_as_written(path: Path, digest: str) -> bool:
    """Return True if a file exists and has this SHA-256."""
    try:
        status = path.stat()
        version = (path, status.st_mtime_ns, status.st_size, digest)
        if version not in _CHECKED:
            if bytes_digest(path.read_bytes()) != digest:
                return False
            _CHECKED.add(version)
    except FileNotFoundError:
        return False
    return True


@contextmanager
def open_parquet(path: Path, schema: pa.Schema, remedy: str) -> Iterator[pq.ParquetFile]:
    """Yield a file that has the columns of a table. Raise RunError if it or the body fails.

    schema: text columns of dictionaries are read as such. remedy: what to do about damage.
    """
    # Python opens the file: pyarrow would encode the path by the locale, take "a:b/x" for an
    # address, and "~" for a home.
    with _damage_as_run_error(path, remedy), path.open("rb") as file:
        categories = [one.name for one in schema if pa.types.is_dictionary(one.type)]
        if categories:
            names = pq.read_metadata(file).schema.names
            categories = [name for name in categories if name in names]
        with pq.ParquetFile(
            file, read_dictionary=categories, page_checksum_verification=True
        ) as opened:
            _require_columns(opened.metadata.schema.names, schema)
            yield opened


def read_rows(opened: pq.ParquetFile, schema: pa.Schema, columns: Sequence[str] | None) -> pa.Table:
    """Return the rows of a file, with the types of the schema. Columns that it lacks are left out."""
    if columns is not None:
        columns = [name for name in columns if name in opened.schema_arrow.names]
    # The files are too small to gain from threads, and every thread would hold on to memory.
    table = opened.read(columns=columns, use_threads=False)
    table.validate(full=True)  # text that is not UTF-8 would raise an error far from here
    fields = []
    for field in table.schema:
        # A column of a newer program stays as it is.
        fields.append(schema.field(field.name) if field.name in schema.names else field)
    return table.cast(pa.schema(fields))


def is_readable(path: Path, schema: pa.Schema) -> bool:
    """Return True if a file has the columns of a table and all its rows can be read."""
    try:
        with open_parquet(path, schema, "") as file:
            read_rows(file, schema, None)
    except RunError:
        return False
    return True


def require_valid_rows(table: pa.Table) -> None:
    """Raise ArrowInvalid for rows that this program does not write."""
    names = REQUIRED_COLUMNS.intersection(table.column_names)
    empty = sorted(name for name in names if table[name].null_count)
    if empty:
        raise pa.ArrowInvalid(f"it is no part of a run: it has rows without {', '.join(empty)}")
    for name in sorted(JSON_COLUMNS.intersection(table.column_names)):
        for text in table[name].drop_null().to_pylist():
            value = json.loads(text)
            if not isinstance(value, dict):
                raise pa.ArrowInvalid(f"it is no part of a run: its {name} are no JSON objects")
            if r"\ud" in text.lower():  # half of a surrogate pair could not be printed
                json.dumps(value, ensure_ascii=False).encode()


def _require_columns(names: Sequence[str], schema: pa.Schema) -> None:
    missing = sorted(REQUIRED_COLUMNS.intersection(schema.names).difference(names))
    if missing:
        raise pa.ArrowInvalid(f"it is no part of a run: it has no column {', '.join(missing)}")
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise pa.ArrowInvalid(f"it is no part of a run: it has two columns {', '.join(twice)}")


@contextmanager
def _damage_as_run_error(path: Path, remedy: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except (pa.ArrowException, OSError, *_JSON_ERRORS) as error:
        if getattr(error, "errno", None) in LIMIT_REMEDIES:
            raise
        reason = error_text(error).splitlines()[0]
        raise RunError(f"{path}: cannot be read: {reason}", remedy) from error
