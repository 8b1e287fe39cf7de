"""Data of the page: JSON, compressed with gzip, in base64. `unpack` in report.js is the inverse."""

from __future__ import annotations

import base64
import gzip

import msgspec


def packed(value: object) -> str:
    """Return a value as text without any character that HTML would have to escape."""
    # msgspec writes a number that is not finite as null: JSON has no word for it.
    # Without a time stamp, the same data gives the same page.
    compressed = gzip.compress(msgspec.json.encode(value), mtime=0)
    return base64.b64encode(compressed).decode("ascii")
