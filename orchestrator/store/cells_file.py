"""cells.parquet, a row per cell, with the key of what it was derived from in its metadata.

The file costs time alone: one that is missing, damaged, or of another key is derived again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator.common.files import replace_file
from orchestrator.common.hashing import bytes_digest
from orchestrator.store.layout import CELLS_FILE
from orchestrator.store.tables import to_parquet

if TYPE_CHECKING:
    import pandas as pd

_KEY, _FACTS = b"sweep_key", b"sweep_facts"


def write_cells_file(
    folder: Path, cells: pd.DataFrame, key: str, facts: Mapping[str, object]
) -> str:
    """Write cells.parquet and return its SHA-256. facts: stored with the cells, as JSON."""
    table = pa.Table.from_pandas(cells, preserve_index=False)
    own = {_KEY: key, _FACTS: json.dumps(facts)}
    content = to_parquet(table.replace_schema_metadata({**table.schema.metadata, **own}))
    replace_file(folder / CELLS_FILE, content)
    return bytes_digest(content)


def read_cells_file(
    folder: Path, digest: str, key: str
) -> tuple[pd.DataFrame, dict[str, Any]] | None:
    """Return the cells and facts that were written with a key; None if there are none.

    digest: the SHA-256 that the file must have.
    """
    try:
        content = (folder / CELLS_FILE).read_bytes()
        # Damaged bytes may crash pyarrow.
        if bytes_digest(content) != digest:
            return None
        file = pq.ParquetFile(pa.BufferReader(content))  # `read_table` imports pyarrow.dataset
        if file.schema_arrow.metadata.get(_KEY) != key.encode():
            return None
        table = file.read(use_threads=False)
        return table.to_pandas(), json.loads(table.schema.metadata[_FACTS])
    except (OSError, ValueError, KeyError, pa.ArrowException):
        return None
