"""By which a text or a file is known again: its SHA-256, in hexadecimal digits. Who wants a shorter one cuts it."""

from __future__ import annotations

import hashlib
from pathlib import Path


def text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(file: Path) -> str:
    """A piece at a time: a trace may be larger than the memory."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
