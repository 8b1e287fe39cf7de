"""What a child prints, kept from filling the disk: its beginning and its end, which is where a death is explained."""

from __future__ import annotations

from pathlib import Path

KEPT_BYTES = 4 * 1024**2  # of the beginning, and as many of the end
_LONGEST_BYTES = 4 * KEPT_BYTES  # cutting is not for a few lines too many


def cut(log: Path) -> int:
    """Takes the middle out of a log that has grown too long, and gives how many bytes that were. The child goes on appending."""
    if not log.exists() or log.stat().st_size <= _LONGEST_BYTES:
        return 0
    with log.open("rb+") as file:
        file.seek(-KEPT_BYTES, 2)
        taken = file.tell() - KEPT_BYTES
        end = file.read(KEPT_BYTES)
        file.truncate(KEPT_BYTES)
    with log.open("ab") as file:
        file.write(f"\n[{taken} bytes that were printed here are left out]\n".encode() + end)
    return taken


def tail(log: Path, most_bytes: int) -> str:
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(-min(most_bytes, log.stat().st_size), 2)
        return file.read(most_bytes).decode(errors="replace")
