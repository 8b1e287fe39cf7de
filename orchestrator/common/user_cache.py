"""Files in the user's cache: each has a checksum, and is made again if it is damaged or missing.

A cache that cannot be written costs time and nothing else.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from orchestrator.common.hashing import sha256

_LETTERS = len(sha256(b""))


def cache_folder(name: str) -> Path:
    """Return the path of a folder in the cache. It need not exist, and may be impossible."""
    root = os.environ.get("XDG_CACHE_HOME") or _default_root()
    return Path(root) / "transformer-sweep" / name


def read_cached(name: str, key: str) -> bytes | None:
    """Return what was stored in a folder of the cache with a key; None if it is not there."""
    with suppress(OSError):
        stored = (cache_folder(name) / key).read_bytes()
        digest, content = stored[:_LETTERS], stored[_LETTERS:]
        if digest == sha256(content).encode():
            return content
    return None


def write_cached(name: str, key: str, content: bytes, most: int | None = None) -> None:
    """Store a content in a folder of the cache with a key.

    most: files that the folder then has at most; the oldest others are deleted.
    """
    with suppress(OSError):
        folder = cache_folder(name)
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{key}.{os.getpid()}"
        partial.write_bytes(sha256(content).encode() + content)  # a torn file has no such checksum
        partial.rename(folder / key)
        if most is not None:
            by_age = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime_ns)
            for file in by_age[:-most]:
                file.unlink()


def _default_root() -> Path:
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        # A container's user may have neither HOME nor a line in /etc/passwd. Nothing can be written
        # below this path, which is a case that every user of the cache knows.
        return Path(os.devnull)
