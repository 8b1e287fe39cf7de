"""Values of a run that somebody else wrote are text in every format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from orchestrator.store.run_writer import RunWriter
from tasks.spec.outcome import Outcome

CONTROLS = "\x1b]0;title\x07\x1b[2J\x00\x08\x7f\x9b31m\u202e"


@pytest.fixture
def received(tmp_path: Path, make_outcome: Callable[..., Outcome]) -> Run:
    """A run whose precision is a text that commands a terminal."""
    with open_for_writing(Run(tmp_path / "run")) as writer:
        writer.write_manifest({"name": "x"})
        for length in (16, 32):
            writer.append(make_outcome(context_length=length), None)
    rows = Run(tmp_path / "run").read("attempts")
    texts = [json.dumps({**json.loads(text), "precision": CONTROLS}) for text in rows["params"]]
    run = RunWriter(tmp_path / "received")
    samples = Run(tmp_path / "run").read("samples")
    run.write_tables({"samples": samples, "attempts": rows.assign(params=texts, contents=None)})
    run.write_manifest({"name": CONTROLS})
    return run


@pytest.mark.parametrize("form", ["text", "md", "csv", "tex", "typ", "json"])
def test_no_value_commands_a_terminal(
    form: str, received: Run, sweep_here: Callable[..., Result]
) -> None:
    done = sweep_here("report", received.folder, "--table", "timings", "--format", form)
    assert done.exit_code == 0, done.output
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", done.output)
