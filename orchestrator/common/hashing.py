"""SHA-256 digests of texts and files, as hexadecimal digits."""

from __future__ import annotations

import hashlib
from pathlib import Path


def sha256(content: str | bytes) -> str:
    encoded = content.encode() if isinstance(content, str) else content
    return hashlib.sha256(encoded).hexdigest()


def file_digest(file: Path) -> str:
    """Return the digest of a file, read piece by piece: a trace may be larger than memory."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
