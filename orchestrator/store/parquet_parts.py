"""Parquet parts: each attempt writes one file per table; full batches are merged into larger ones.

A part is complete or absent, because it is renamed into place. A merged part names the parts that
it replaces, so that no row counts twice if a driver dies before it removes them. The footer of each
part records the digest of every attempt's rows. A part that cannot be read, such as half a copy,
differs from what was written, or holds rows of another part, is reported with its name and what to
do about it.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator.common.errors import LIMIT_REMEDIES, RunError
from orchestrator.common.files import flush_folder, replace_file
from orchestrator.store.layout import ATTEMPTS
from orchestrator.store.row_digests import RowsDigest, digests_by_attempt, parse_digests
from orchestrator.store.tables import JSON_COLUMNS, MEASURED_TABLES, REQUIRED_COLUMNS
from tasks.spec.messages import error_text

WHOLE_TABLE = "all"  # the name of the only part of a published table
_MERGED = "merged-"
_MERGED_NAME = re.compile(rf"{_MERGED}\d+")
# Copies that file managers and synchronisers make are named "x (copy)" or "x.sync-conflict".
_PART_NAME = re.compile(r"[\w-]+")
_REPLACES = b"replaces"
_DIGESTS = b"rows"
_TABLE = b"table"
# It precedes the checksum of a file. pyarrow 26 may crash when it parses a damaged footer, which
# page checksums do not cover: of 300 flipped bits, one ended the process.
_CHECKSUM_MARK = bytes.fromhex("9d1f6b0c57e24ab38f40c2d6715ae839")
_CHECKSUM_BYTES = 4
_READ_TRIES = 5
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_THRESHOLD_BYTES = 128 * 1024  # glibc's default of both

Built = TypeVar("Built")
_CHECKED: dict[tuple[Path, int, int], bool] = {}  # versions of files that need no second look


class StoredRows(NamedTuple):
    """The rows of an attempt in a part: their number and digest."""

    rows: int
    digest: str
    part: Path


def return_freed_memory() -> None:
    """Have this process return freed memory to the system, which takes up to a tenth more time.

    pyarrow's own allocator keeps it, and glibc keeps blocks of up to 32 MiB once one was freed.
    Only a command calls this: it also holds for other libraries in the process.
    """
    pa.set_memory_pool(pa.system_memory_pool())
    with suppress(OSError, AttributeError):  # another C library
        for threshold in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            ctypes.CDLL(None).mallopt(threshold, _THRESHOLD_BYTES)


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

    def build_all() -> list[Built]:
        built, owners = [], _Owners()
        parts = _current_parts(folder)
        for start in range(0, len(parts), batch_size):
            batch = parts[start : start + batch_size]
            built.append(build([_read_part(path, schema, columns, owners) for path in batch]))
        return built

    return _while_merging(folder, build_all)


def stored_rows(
    folder: Path, schema: pa.Schema, attempts: Collection[str]
) -> dict[str, StoredRows]:
    """Return the rows of each attempt by CELL-NUMBER, as the footers of the parts record them.

    Footers are read in a moment however large the run is. The rows themselves are read where the
    footer disagrees with their number, and where it records nothing and one of `attempts` is
    missing. Raise RunError for a part whose footer cannot be read or that holds rows of another.
    """

    def read_all() -> dict[str, StoredRows]:
        found: dict[str, StoredRows] = {}
        owners, unrecorded = _Owners(), []
        for path in _current_parts(folder):
            with _open_part(path, schema) as part:
                recorded, rows = _recorded_digests(part), part.metadata.num_rows
                owners.add(path, part, recorded)
            if recorded is None:
                unrecorded.append(path)
                continue
            if rows != _total(recorded):
                recorded = _read_digests(path)
            for name, digest in recorded.items():
                found[name] = StoredRows(*digest, path)
        if not found.keys() >= set(attempts):  # a part of an older program, or rewritten by another
            for path in unrecorded:
                for name, digest in _read_digests(path).items():
                    found[name] = StoredRows(*digest, path)
        return found

    return _while_merging(folder, read_all)


def damaged(part: Path) -> RunError:
    """Return the error for a part whose rows are not those that were written."""
    return RunError(
        f"{part}: is damaged: its rows differ from the rows that were written",
        f"Copy it again, or move it away {_remedy(part)}",
    )


def _while_merging(folder: Path, read: Callable[[], Built]) -> Built:
    for _ in range(_READ_TRIES):
        try:
            return read()
        except FileNotFoundError:
            continue  # a driver has merged parts since they were listed
    raise RunError(f"{folder}: changes faster than it can be read", "Try again")


def part_versions(folder: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time in ns of each part of a table.

    A part is renamed into place and never changed: these stand for its rows.
    """

    def read_all() -> list[tuple[str, int, int]]:
        versions = []
        for path in _part_files(folder):
            status = path.stat()
            versions.append((path.name, status.st_size, status.st_mtime_ns))
        return versions

    return _while_merging(folder, read_all)


def replaced_parts(folder: Path) -> set[str]:
    """Return the names of the parts whose rows are in a merged part."""
    return _replaced_by(folder.glob(f"{_MERGED}*.parquet"))


def unmerged_parts(folder: Path) -> set[str]:
    """Return the parts that were written one by one, also those that are merged since.

    They are named without `.parquet`: by CELL-NUMBER, except for predictions. Raise RunError for a
    file with another name.
    """
    files = _part_files(folder)
    _require_part_names(files)
    names = {path.name for path in files} | replaced_parts(folder)
    return {name.removesuffix(".parquet") for name in names if not is_merged(name)}


def is_merged(part: Path | str) -> bool:
    return Path(part).name.startswith(_MERGED)


def merge(parts: list[Path], schema: pa.Schema) -> None:
    """Replace parts by a merged one. Raise RunError, changing nothing, if one is damaged."""
    owners = _Owners()
    whole = pa.concat_tables(
        [_read_part(path, schema, None, owners) for path in parts], promote_options="permissive"
    )
    names = json.dumps([path.name for path in parts]).encode()
    merged = parts[0].with_name(f"{_MERGED}{time.time_ns()}.parquet")
    write_part(merged, whole.replace_schema_metadata({_REPLACES: names}))
    flush_folder(merged.parent)  # the new part survives a power cut before the old ones go
    for path in parts:
        path.unlink()


def write_part(path: Path, table: pa.Table) -> dict[str, RowsDigest]:
    """Write a table as a part that is complete or absent. Return its digests by attempt."""
    digests = digests_by_attempt(table, path.stem)
    own = {_DIGESTS: json.dumps(digests), _TABLE: path.parent.name}
    metadata = {**(table.schema.metadata or {}), **own}
    replace_file(path, to_parquet(table.replace_schema_metadata(metadata)))
    return digests


def to_parquet(table: pa.Table) -> bytes:
    """Return the content of a Parquet file with a checksum of each page and of the whole file."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    content: bytes = sink.getvalue().to_pybytes()
    # Readers find the footer by its length, which is in front of the last 4 bytes. No offset in the
    # footer refers to what lies directly before it.
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    checksum = zlib.crc32(content).to_bytes(_CHECKSUM_BYTES, "little")
    return content[:footer] + _CHECKSUM_MARK + checksum + content[footer:]


def _current_parts(folder: Path) -> list[Path]:
    # A listing may miss a merged part that arrives during it, together with the parts that it
    # replaces. It is complete if a second one finds the same merged parts.
    listed = _part_files(folder)
    while set(filter(is_merged, listed)) != set(folder.glob(f"{_MERGED}*.parquet")):
        listed = _part_files(folder)
    replaced = _replaced_by(filter(is_merged, listed))
    parts = [path for path in listed if path.name not in replaced]
    _require_part_names(parts)
    return parts


def _part_files(folder: Path) -> list[Path]:
    # macOS writes attributes of `x.parquet` into a file `._x.parquet` when it copies to others.
    return sorted(path for path in folder.glob("*.parquet") if not path.name.startswith("."))


def _require_part_names(parts: Iterable[Path]) -> None:
    for path in parts:
        pattern = _MERGED_NAME if is_merged(path) else _PART_NAME
        if not pattern.fullmatch(path.stem):
            raise RunError(
                f"{path}: is not the name of a part",
                "Move it away: a copy of a part would count twice",
            )


def _replaced_by(merged: Iterable[Path]) -> set[str]:
    replaced: set[str] = set()
    for path in merged:
        with _damage_as_run_error(path), path.open("rb") as file:
            _verify_checksum(path)
            replaced |= _replaced(pq.read_metadata(file))
    return replaced


def _replaced(metadata: pq.FileMetaData) -> set[str]:
    """Return the names of the parts that a part replaces.

    Raise ValueError for a name that no part has. These files are deleted, and whoever made the part
    may have written the path of any file.
    """
    names: list[str] = json.loads((metadata.metadata or {}).get(_REPLACES, b"[]"))
    for name in names:
        stem = name.removesuffix(".parquet")
        if stem == name or is_merged(name) or not _PART_NAME.fullmatch(stem):
            raise ValueError(f"it replaces {name!r}, which is not the name of a part")
    return set(names)


class _Owners:
    """The part that holds each attempt's rows, to find rows that would count twice."""

    def __init__(self) -> None:
        self._parts: dict[str, Path] = {}

    def add(
        self, path: Path, part: pq.ParquetFile, recorded: Mapping[str, RowsDigest] | None
    ) -> None:
        """Raise RunError if the rows of a part are in another one too, or not named after it."""
        table = (part.metadata.metadata or {}).get(_TABLE, path.parent.name.encode()).decode()
        if table != path.parent.name:
            remedy = f"Copy it again, or move it away {_remedy(path)}"
            raise RunError(f"{path}: contains rows of the table {table}", remedy)
        is_whole = is_merged(path) or path.stem == WHOLE_TABLE
        names = set(recorded or ())
        if is_whole:
            names |= {name.removesuffix(".parquet") for name in _replaced(part.metadata)}
        else:
            names |= _names_in_statistics(part)
        for name in sorted(names):
            twin = self._parts.setdefault(name, path)
            if not is_whole and name != path.stem:
                twin = path.with_name(f"{name}.parquet")
            if twin != path:
                raise _foreign_rows(path, name, twin)


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


def _recorded_digests(part: pq.ParquetFile) -> dict[str, RowsDigest] | None:
    """Return the digests in the footer; None for a part of an older or another program."""
    text = (part.metadata.metadata or {}).get(_DIGESTS)
    if text is None:
        return None
    return parse_digests(text)


def _total(digests: Mapping[str, RowsDigest]) -> int:
    return sum(one.rows for one in digests.values())


def _read_digests(path: Path) -> dict[str, RowsDigest]:
    with _damage_as_run_error(path), path.open("rb") as file:
        _verify_checksum(path)
        return digests_by_attempt(pq.read_table(file, page_checksum_verification=True), path.stem)


def _read_part(
    path: Path, schema: pa.Schema, columns: list[str] | None, owners: _Owners
) -> pa.Table:
    with _open_part(path, schema) as part:
        names = part.schema_arrow.names
        if columns is not None:
            columns = [name for name in columns if name in names]
        recorded = _recorded_digests(part)
        is_as_written = _verify_checksum(path)
        table = _read_rows(path, part, columns, None if is_as_written else recorded)
        fields = []
        for field in table.schema:
            # A column of a newer program stays as it is.
            fields.append(schema.field(field.name) if field.name in schema.names else field)
        table = table.cast(pa.schema(fields))
        # Only this program writes the checksum of a file, and its rows are valid.
        if not is_as_written:
            _require_valid_rows(table)
        owners.add(path, part, recorded)
        return table


def _read_rows(
    path: Path,
    part: pq.ParquetFile,
    columns: list[str] | None,
    recorded: Mapping[str, RowsDigest] | None,
) -> pa.Table:
    """Return the rows of a part. Raise RunError if they are not those that were written.

    recorded: digests to compare with; None if the whole file was compared with its checksum.
    Few of the columns of large tables are read without that comparison: each command that uses
    them has read all columns before.
    """
    is_checked = recorded is not None and (columns is None or path.parent.name == ATTEMPTS)
    # Parts are too small to gain from threads, and every thread would hold on to memory.
    table = part.read(columns=None if is_checked else columns, use_threads=False)
    table.validate(full=True)  # text that is not UTF-8 would raise an error far from here
    if is_checked and digests_by_attempt(table, path.stem) != recorded:
        # `Run.incomplete_attempts` reports missing rows.
        has_all = table.num_rows == _total(recorded or {})
        if has_all or path.parent.name not in MEASURED_TABLES:
            raise damaged(path)
    if columns is None:
        return table
    return table.select(columns)


def _verify_checksum(path: Path) -> bool:
    """Compare a file with the checksum in it. Return False if an older program wrote it without one.

    Raise RunError if the content has another one.
    """
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        version = (path, status.st_mtime_ns, status.st_size)
        if version in _CHECKED:
            return _CHECKED[version]
        content = file.read()
    before, mark, after = content.rpartition(_CHECKSUM_MARK)
    if mark:
        checksum = zlib.crc32(after[_CHECKSUM_BYTES:], zlib.crc32(before))
        if checksum.to_bytes(_CHECKSUM_BYTES, "little") != after[:_CHECKSUM_BYTES]:
            raise damaged(path)
    _CHECKED[version] = bool(mark)
    return bool(mark)


@contextmanager
def _open_part(path: Path, schema: pa.Schema) -> Iterator[pq.ParquetFile]:
    # Python opens the file: pyarrow would encode the path by the locale, take "a:b/x" for an
    # address, and "~" for a home.
    with _damage_as_run_error(path), path.open("rb") as file:
        _verify_checksum(path)
        categories = [one.name for one in schema if pa.types.is_dictionary(one.type)]
        if categories:
            names = pq.read_metadata(file).schema.names
            categories = [name for name in categories if name in names]
        with pq.ParquetFile(
            file, read_dictionary=categories, page_checksum_verification=True
        ) as part:
            _require_columns(part.metadata.schema.names, schema)
            yield part


def _require_columns(names: list[str], schema: pa.Schema) -> None:
    missing = sorted(REQUIRED_COLUMNS.intersection(schema.names).difference(names))
    if missing:
        raise pa.ArrowInvalid(f"it is no part of a run: it has no column {', '.join(missing)}")
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise pa.ArrowInvalid(f"it is no part of a run: it has two columns {', '.join(twice)}")


def _require_valid_rows(table: pa.Table) -> None:
    names = REQUIRED_COLUMNS.intersection(table.column_names)
    empty = sorted(name for name in names if table[name].null_count)
    if empty:
        raise pa.ArrowInvalid(f"it is no part of a run: it has rows without {', '.join(empty)}")
    for name in sorted(JSON_COLUMNS.intersection(table.column_names)):
        texts = table[name].drop_null().to_pylist()
        for text in texts:
            value = json.loads(text)
            if not isinstance(value, dict):
                raise pa.ArrowInvalid(f"it is no part of a run: its {name} are no JSON objects")
            if r"\ud" in text.lower():  # half of a surrogate pair could not be printed
                json.dumps(value, ensure_ascii=False).encode()


_JSON_ERRORS = (ValueError, TypeError, AttributeError, RecursionError)


@contextmanager
def _damage_as_run_error(part: Path) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except (pa.ArrowException, OSError, *_JSON_ERRORS) as error:
        if getattr(error, "errno", None) in LIMIT_REMEDIES:
            raise
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
    if part.parent.name == "predictions":
        return "to predict the memory of its cells again"
    return "and measure its cells again with --retry ok"
