"""A log that is thinned while it is written keeps its end, in its order, and the disk its space."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tasks.process import log_file as log
from tasks.process.log_file import END_BYTES, free_middle, remove_middle

LINES, WIDTH = 375_000, 64  # 24 MB, of which 8 MB stay


@pytest.fixture
def giving(tmp_path: Path) -> None:
    """Where files give the disk back what is in their middle."""
    path = tmp_path / "probe"
    path.write_bytes(b"a" * 3 * END_BYTES)
    try:
        with path.open("rb+") as file:
            log._punch_hole(file.fileno(), END_BYTES, END_BYTES)
    except (OSError, AttributeError):
        pytest.skip("this file system cannot")


def test_freeing_the_middle_of_a_log_returns_its_disk_space(tmp_path: Path, giving: None) -> None:
    path = tmp_path / "log.txt"
    path.write_bytes(b"a" * 6 * END_BYTES)
    assert free_middle(path) == 0
    assert path.stat().st_size == 6 * END_BYTES
    assert path.stat().st_blocks * 512 <= 2 * END_BYTES + 64 * 1024


def test_lines_written_while_a_log_is_thinned_keep_their_order(
    tmp_path: Path, giving: None
) -> None:
    path = tmp_path / "log.txt"
    path.touch()

    def flood() -> None:
        with path.open("ab") as file:
            for start in range(0, LINES, 12_500):
                file.write(b"".join(b"%063d\n" % number for number in range(start, start + 12_500)))
                file.flush()

    writer = threading.Thread(target=flood)
    writer.start()
    while writer.is_alive():
        assert free_middle(path) == 0
    taken = remove_middle(path)
    lines = path.read_text().splitlines()
    assert lines[0] == f"{0:063d}"
    assert lines[-1] == f"{LINES - 1:063d}"
    numbers = [int(line) for line in lines if line.isdigit()]
    assert numbers == sorted(numbers)
    assert taken == WIDTH * LINES - 2 * END_BYTES
    assert path.stat().st_size < 2 * END_BYTES + 100


def test_a_log_is_truncated_if_the_file_system_cannot_punch_holes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*asked: object) -> None:
        raise OSError(95, os.strerror(95))

    monkeypatch.setattr(log, "_punch_hole", refuse)
    path = tmp_path / "log.txt"
    path.write_bytes(b"a" * 5 * END_BYTES)
    assert free_middle(path) == 3 * END_BYTES
    assert path.stat().st_size < 2 * END_BYTES + 100
    assert free_middle(path) == 0
