"""Frames in the user's cache: Parquet files whose key says what they were made from.

A file that cannot be written, or read back as it was written, costs nothing but the time to make
the frame again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator.common.files import cache_folder, replace_file
from orchestrator.common.hashing import bytes_digest
from orchestrator.store.parquet_parts import to_parquet

if TYPE_CHECKING:
    import pandas as pd

MOST_FILES = 20  # about 1 MB each for a thousand cells
_FACTS = b"facts"
_DIGEST_LETTERS = 64


def read_frame(key: str) -> tuple[pd.DataFrame, dict[str, Any]] | None:
    """Return the frame of a key with the facts that were stored with it; None if there is none."""
    try:
        stored = _path(key).read_bytes()
        digest, content = stored[:_DIGEST_LETTERS].decode(), stored[_DIGEST_LETTERS:]
        # Damaged bytes may crash pyarrow.
        if digest != bytes_digest(content):
            return None
        # Not `read_table`, which imports pyarrow.dataset.
        table = pq.ParquetFile(pa.BufferReader(content)).read(use_threads=False)
        return table.to_pandas(), json.loads(table.schema.metadata[_FACTS])
    except (OSError, ValueError, KeyError, pa.ArrowException):
        return None


def write_frame(key: str, frame: pd.DataFrame, facts: Mapping[str, object]) -> None:
    """Store a frame, and delete the oldest files."""
    with suppress(OSError, ValueError, TypeError, pa.ArrowException):
        table = pa.Table.from_pandas(frame)
        metadata = {**table.schema.metadata, _FACTS: json.dumps(facts).encode()}
        content = to_parquet(table.replace_schema_metadata(metadata))
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, bytes_digest(content).encode() + content)
        by_age = sorted(path.parent.iterdir(), key=lambda file: file.stat().st_mtime_ns)
        for file in by_age[:-MOST_FILES]:
            file.unlink()


def _path(key: str) -> Path:
    return cache_folder("cells") / key
