"""Read the content of a Parquet file of a table, or report its damage in one line."""

from __future__ import annotations

import ctypes
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator.common.errors import RunError
from orchestrator.store.tables import JSON_COLUMNS, REQUIRED_COLUMNS, with_types
from tasks.spec.messages import error_text

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_THRESHOLD_BYTES = 128 * 1024  # glibc's default of both


def return_freed_memory() -> None:
    """Have this process return freed memory to the system, which takes up to a tenth more time.

    pyarrow's own allocator keeps it, and glibc keeps blocks of up to 32 MiB once one was freed.
    Only a command calls this: it also holds for other libraries in the process.
    """
    pa.set_memory_pool(pa.system_memory_pool())
    with suppress(OSError, AttributeError):  # another C library
        for threshold in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            ctypes.CDLL(None).mallopt(threshold, _THRESHOLD_BYTES)


@contextmanager
def damage_as_run_error(file: object, remedy: str) -> Iterator[None]:
    """Raise RunError if the body fails. It converts the content of a file, and opens none."""
    try:
        yield
    except Exception as error:  # pyarrow and JSON of another program raise many kinds
        reason = error_text(error).splitlines()[0]
        raise RunError(f"{file}: cannot be read: {reason}", remedy) from error


def read_parquet(content: bytes, schema: pa.Schema, columns: Sequence[str] | None) -> pa.Table:
    """Return rows with the types of a schema. Columns that the file lacks are left out.

    schema: text columns of dictionaries are read as such. Raise ArrowInvalid, or what pyarrow
    raises, for the file of another program.
    """
    metadata = pq.read_metadata(pa.BufferReader(content))
    names = metadata.schema.names
    missing = sorted(REQUIRED_COLUMNS.intersection(schema.names).difference(names))
    if missing:
        raise pa.ArrowInvalid(f"it is no part of a run: it has no column {', '.join(missing)}")
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise pa.ArrowInvalid(f"it is no part of a run: it has two columns {', '.join(twice)}")
    texts = {field.name for field in schema if pa.types.is_dictionary(field.type)}
    file = pq.ParquetFile(
        pa.BufferReader(content),
        metadata=metadata,
        read_dictionary=[name for name in names if name in texts],
    )
    if columns is not None:
        columns = [name for name in columns if name in names]
    # The files are too small to gain from threads, and every thread would hold on to memory.
    table = file.read(columns=columns, use_threads=False)
    table.validate(full=True)  # text that is not UTF-8 would raise an error far from here
    return with_types(table, schema)


def require_valid_rows(table: pa.Table) -> None:
    """Raise ArrowInvalid, or an error about JSON, for rows that this program does not write."""
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
