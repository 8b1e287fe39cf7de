"""Where this program keeps, for its user, what it may make again or carry on: `~/.cache/transformer-sweep`."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """The part of it that is called so; there or not."""
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "transformer-sweep"
        / name
    )
