"""The Arrow schemas of the tables that a run consists of."""

from __future__ import annotations

import pyarrow as pa

JSON_COLUMNS = frozenset({"params", "evidence", "facts"})  # the columns of JSON objects
REQUIRED_COLUMNS = frozenset(
    {"cell", "attempt", "predicted_at", "task", "status", *JSON_COLUMNS}
)  # what every row has had since schema 1
ATTEMPTS = pa.schema(
    [
        ("cell", pa.string()),
        ("attempt", pa.int32()),
        ("task", pa.string()),
        ("task_version", pa.int32()),
        ("params", pa.string()),  # JSON
        ("status", pa.string()),
        ("stage", pa.string()),
        ("phase", pa.string()),
        ("evidence", pa.string()),  # JSON
        ("facts", pa.string()),  # JSON
        ("started_at", pa.timestamp("us", tz="UTC")),
        ("wall_s", pa.float64()),
        ("timeout_s", pa.float64()),
        ("replaces", pa.int32()),
        ("commit", pa.string()),
    ]
)
SAMPLES = pa.schema(
    [
        ("cell", pa.string()),
        ("attempt", pa.int32()),
        ("instrument", pa.string()),
        ("mode", pa.string()),
        ("phase", pa.string()),
        ("metric", pa.string()),
        ("unit", pa.string()),
        ("step", pa.int32()),
        ("value", pa.float64()),
        ("note", pa.string()),
    ]
)
KERNELS = pa.schema(
    [
        ("cell", pa.string()),
        ("attempt", pa.int32()),
        ("phase", pa.string()),
        ("module", pa.string()),
        ("kernel_class", pa.string()),
        ("attributed_by", pa.string()),
        ("operator", pa.string()),
        ("name", pa.string()),
        ("steps", pa.int32()),
        ("count", pa.int64()),
        ("total_ns", pa.int64()),
        ("mean_ns", pa.float64()),
        ("median_ns", pa.float64()),
        ("min_ns", pa.int64()),
        ("max_ns", pa.int64()),
        ("sd_ns", pa.float64()),
    ]
)
ALLOCATIONS = pa.schema(
    [
        ("cell", pa.string()),
        ("attempt", pa.int32()),
        ("moment", pa.string()),
        ("phase", pa.string()),
        ("role", pa.string()),
        ("part", pa.string()),
        ("attributed_by", pa.string()),
        ("allocated_in", pa.string()),
        ("call_chain", pa.string()),
        ("size_bytes", pa.int64()),
        ("count", pa.int64()),
        ("total_bytes", pa.int64()),
    ]
)
LIVE = pa.schema(
    [
        ("cell", pa.string()),
        ("attempt", pa.int32()),
        ("event", pa.int64()),
        ("at_ms", pa.float64()),
        ("phase", pa.string()),
        ("role", pa.string()),
        ("live_bytes", pa.int64()),
    ]
)
PREDICTIONS = pa.schema(
    [
        ("cell", pa.string()),
        ("predicted_at", pa.timestamp("us", tz="UTC")),
        ("mode", pa.string()),
        ("phase", pa.string()),
        ("metric", pa.string()),
        ("unit", pa.string()),
        ("step", pa.int32()),
        ("value", pa.float64()),
        ("note", pa.string()),
    ]
)
SCHEMAS = {
    "attempts": ATTEMPTS,
    "samples": SAMPLES,
    "kernels": KERNELS,
    "allocations": ALLOCATIONS,
    "live": LIVE,
    "predictions": PREDICTIONS,
}


def tables() -> tuple[str, ...]:
    """The names of what a run is made of."""
    return tuple(SCHEMAS)


def empty_table(schema: pa.Schema, columns: list[str] | None) -> pa.Table:
    return pa.Table.from_batches([], schema).select(
        columns or schema.names
    )  # pyarrow's own would import pandas


def with_categories(schema: pa.Schema) -> pa.Schema:
    categories = pa.dictionary(pa.int32(), pa.string())
    return pa.schema(
        [
            field.with_type(categories) if pa.types.is_string(field.type) else field
            for field in schema
        ]
    )


SCHEMA_VERSION = 1  # 1: attempts and samples; kernels, allocations and live since, which an older program passes over
MEASURED_TABLES = (
    "samples",
    "kernels",
    "allocations",
    "live",
)  # by the names that they have in an outcome
