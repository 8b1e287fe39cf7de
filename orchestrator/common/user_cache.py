"""The cache of this program in the user's home, `~/.cache/transformer-sweep`."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return the path of a folder in the cache. It need not exist, and may be impossible."""
    root = os.environ.get("XDG_CACHE_HOME") or _default_root()
    return Path(root) / "transformer-sweep" / name


def _default_root() -> Path:
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        # A container's user may have neither HOME nor a line in /etc/passwd. Nothing can be written
        # below this path, which is a case that every user of the cache knows.
        return Path(os.devnull)
