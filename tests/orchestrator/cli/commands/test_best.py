"""`sweep best` from its options to what it prints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from orchestrator.config.schema import load_config
from tests.conftest import ROOT

Sweep = Callable[..., Result]
FULL = str(ROOT / "configs" / "full.yaml")
SMALL = "size=small,context_length=128,pass=forward"
TINY = """
name: tiny
instruments: [timing, memory]
defaults: {device: cpu, size: tiny, vocab_size: 200, context_length: 16, batch_size: 1}
grids:
  - task: train_step
    axes: {attention: [naive, sdpa], optimizer: [course, fused]}
    fixed: {warmup_steps: 1, measured_steps: 6}
"""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--over", "size"], "--over size: another size is another model"),
        (["--over", "batch_size"], "--over batch_size: CONFIG has one value of it"),
        (["--over", "batch_size=4"], "--over batch_size: has one value"),
        (["--over", "compile", "--gpu", "H100"], "--gpu: a search measures on the GPU of this"),
        (
            ["--over", "compile", "--default", "compile=model", "--plan", "--gpu", "H100"],
            "--default compile=model: is none of the candidates. Add it to --over",
        ),
    ],
)
def test_what_cannot_be_searched_is_one_line(
    sweep_here: Sweep, words: list[str], message: str
) -> None:
    result = sweep_here("best", FULL, "--where", SMALL, *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_plan_names_what_does_not_fit_and_starts_nothing(
    sweep_here: Sweep, tmp_path: Path
) -> None:
    words = ["--over", "precision,compile", "--where", SMALL, "--plan", "--gpu", "1GiB"]
    result = sweep_here("best", FULL, *words, "--out", str(tmp_path / "run"))
    assert result.exit_code == 0, result.output
    assert "does not fit" in result.stdout
    assert "no candidate surely fits" in result.stdout
    assert "comes nearest" in result.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.process
def test_a_search_measures_once_and_writes_a_config_of_its_answer(
    sweep_here: Sweep, tmp_path: Path
) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    best = tmp_path / "best.yaml"
    words = ["best", str(tmp_path / "tiny.yaml"), "--over", "attention,optimizer"]
    words += ["--scheduler", "serial", "--out", str(tmp_path / "run"), "--write", str(best)]
    first = sweep_here(*words)
    assert first.exit_code == 0, first.output
    assert "best: " in first.stdout
    config, _ = load_config(best)
    grid = config.grids[0].fixed
    assert f"attention={grid['attention']} optimizer={grid['optimizer']}" in first.stdout
    again = sweep_here(*words)
    assert "[1/1]" in first.stdout
    assert "[1/1]" not in again.stdout  # every decision follows from the rows
    assert [line for line in again.stdout.splitlines() if line.startswith("best: ")] == [
        line for line in first.stdout.splitlines() if line.startswith("best: ")
    ]
