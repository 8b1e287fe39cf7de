"""Digests of rows: what an attempt measured is compared with what was written.

The digest of several rows is the sum of the hashes of each. It depends neither on the order of
rows and columns nor on how Arrow stores them: a merged part has the digests of its parts. A null
counts like a column that a part lacks. It detects accidents, not intentional changes.
"""

from __future__ import annotations

import hashlib
import json
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Hashes: TypeAlias = npt.NDArray[np.uint64]
# Stored digests must not change with a library: pandas does not promise that its hashes stay.
# Constants of splitmix64 (Steele, Lea and Flood, 2014), which is about as fast as a copy.
_STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


class RowsDigest(NamedTuple):
    """The number of some rows and the digest of their values, in hexadecimal digits."""

    rows: int
    digest: str


def digests_by_attempt(table: pa.Table, name: str) -> dict[str, RowsDigest]:
    """Return the digest of each attempt's rows by CELL-NUMBER.

    name: stands for all rows of a table that has no attempts.
    """
    if not {"cell", "attempt"} <= set(table.column_names):
        total = _hex(_row_hashes(table).sum(dtype=np.uint64))
        return {name: RowsDigest(table.num_rows, total)}
    if not table.num_rows:
        return {}
    cells = _combined(table["cell"].cast(pa.string())).dictionary_encode()
    numbers = table["attempt"].to_numpy().astype(np.int64)
    keys = cells.indices.to_numpy().astype(np.int64) * (numbers.max() + 1) + numbers
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.diff(keys[order], prepend=-1))
    sums = np.add.reduceat(_row_hashes(table)[order], starts)
    counts = np.diff(starts, append=len(keys))
    found = {}
    for first, count, total in zip(order[starts], counts, sums, strict=True):
        attempt = f"{cells[int(first)]}-{numbers[first]}"
        found[attempt] = RowsDigest(int(count), _hex(total))
    return found


def parse_digests(text: str | bytes) -> dict[str, RowsDigest]:
    """Return digests that are stored as a JSON object of [rows, digest]."""
    found = {}
    for name, (rows, digest) in json.loads(text).items():
        found[name] = RowsDigest(int(rows), str(digest))
    return found


def _hex(total: np.uint64) -> str:
    return f"{int(total):016x}"


def _row_hashes(table: pa.Table) -> Hashes:
    total = np.zeros(table.num_rows, np.uint64)
    for name in table.column_names:
        column = _combined(table[name])
        hashes = _mix(_value_hashes(column) + _text_hash(name.encode()))
        if column.null_count:
            hashes[column.is_null().to_numpy(zero_copy_only=False)] = 0
        total += hashes
    return _mix(total)


def _value_hashes(column: pa.Array) -> Hashes:
    """Return a hash of each value; anything for a null."""
    kind = column.type
    if pa.types.is_null(kind):
        return np.zeros(len(column), np.uint64)
    if pa.types.is_string(kind) or pa.types.is_dictionary(kind):
        return _text_hashes(column)
    if pa.types.is_large_string(kind):
        return _text_hashes(column.cast(pa.string()))
    if pa.types.is_timestamp(kind):
        column = column.cast(pa.int64())
    elif not pa.types.is_primitive(kind):
        raise pa.ArrowInvalid(f"it is no part of a run: it has a column of type {kind}")
    if column.null_count:
        column = column.fill_null(False if pa.types.is_boolean(kind) else 0)
    values = column.to_numpy(zero_copy_only=False)
    wide = values.astype(np.float64 if values.dtype.kind == "f" else np.int64)
    bits: Hashes = wide.view(np.uint64)
    return bits


def _text_hashes(column: pa.Array) -> Hashes:
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    texts = column.dictionary.cast(pa.binary()).to_pylist()
    hashes = np.array([*map(_text_hash, texts), 0], np.uint64)  # a null has the last one
    found: Hashes = hashes[column.indices.fill_null(len(texts)).to_numpy()]
    return found


def _text_hash(text: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little"))


def _mix(values: Hashes) -> Hashes:
    for shift, factor in _STEPS:
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    return values


def _combined(column: pa.ChunkedArray) -> pa.Array:
    """Return a column as one array."""
    if column.num_chunks == 1:
        return column.chunk(0)
    combined = column.combine_chunks()
    if isinstance(combined, pa.ChunkedArray):
        return combined.combine_chunks()
    return combined
