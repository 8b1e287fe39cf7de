"""The attempt of a killed driver is found again by its file, which may have been damaged since."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

import tasks.__main__ as program
from tasks.spec.attempt import Attempt, read_attempt

MakeAttempt = Callable[..., Attempt]


def test_a_flipped_bit_has_no_effect_or_is_refused(make_attempt: MakeAttempt) -> None:
    attempt, chance, refused = make_attempt(settings={"timeout_s": 33.5}), Random(1), 0
    written = attempt.to_json().encode()
    for _ in range(200):
        content = bytearray(written)
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        try:
            assert read_attempt(content.decode()) == attempt
        except ValueError:
            refused += 1
    assert refused > 100


def test_a_changed_setting_is_refused(make_attempt: MakeAttempt) -> None:
    stored = json.loads(make_attempt().to_json())
    stored["settings"]["timeout_s"] += 1
    with pytest.raises(ValueError, match="differs from what was written"):
        read_attempt(json.dumps(stored))


def test_attempts_of_older_versions_have_no_checksum(make_attempt: MakeAttempt) -> None:
    attempt = make_attempt()
    stored = json.loads(attempt.to_json())
    del stored["checksum"]
    assert read_attempt(json.dumps(stored)) == attempt


def test_an_attempt_is_measured_in_the_folder_of_its_file(
    make_attempt: MakeAttempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = tmp_path / "moved" / "attempt.json"
    moved.parent.mkdir()
    moved.write_text(make_attempt().to_json())
    measured: list[Attempt] = []
    monkeypatch.setattr(program, "_measure", lambda here, *_: measured.append(here.attempt))
    monkeypatch.setattr(program, "prefer_for_oom_kill", lambda: None)
    monkeypatch.setattr(program.os, "_exit", lambda code: None)
    program.measure(str(moved), str(tmp_path / "journal"), 0, "spawn")
    assert [attempt.path for attempt in measured] == [moved.parent]
