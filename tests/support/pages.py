"""Reads what a page of a report holds."""

from __future__ import annotations

import base64
import json
import re
import zlib


def cells_of_page(page: str) -> list[str]:
    """Return the names of the cells, RUN:CELL, in a page's packed data."""
    packed = re.search('id="data">([^<]+)<', page)
    assert packed
    data = json.loads(zlib.decompress(base64.b64decode(packed.group(1))))
    keys: list[str] = data["columns"]["key"]["v"]
    return keys
