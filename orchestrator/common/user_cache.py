"""The cache of this program in the user's home, `~/.cache/transformer-sweep`."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return the path of a folder in the cache. It need not exist."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "transformer-sweep" / name
