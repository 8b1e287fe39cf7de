"""`sweep best` from its options to what it prints."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from click.testing import Result

from orchestrator.config.grid import expand
from orchestrator.config.schema import load_config
from orchestrator.config.selection import Selection
from orchestrator.planning.invocation import command_with
from orchestrator.store.run import Run
from tests.conftest import ROOT

Sweep = Callable[..., Result]
FULL = str(ROOT / "configs" / "full.yaml")
HELD = ("--hold", "tokens_per_update=512")
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
TWO_TASKS = """
name: two
instruments: [timing]
defaults: {device: cpu, context_length: 16, batch_size: 1, warmup_steps: 1, measured_steps: 6}
grids:
  - task: train_step
    axes: {attention: [naive, sdpa]}
    fixed: {size: tiny, vocab_size: 200}
  - task: attention
    axes: {attention: [naive, sdpa]}
    fixed: {d_head: 16}
"""


@pytest.fixture
def too_large(tmp_path: Path) -> str:
    """A config of a model that needs more than the 0.4 GiB that are free of a GPU of 1 GiB."""
    shape = "d_model: 64, num_layers: 8, num_heads: 4, d_ff: 256"
    text = TINY.replace("device: cpu, size: tiny", f"device: cuda, {shape}")
    text = text.replace("context_length: 16, batch_size: 1", "context_length: 512, batch_size: 16")
    (tmp_path / "too-large.yaml").write_text(text)
    return str(tmp_path / "too-large.yaml")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "sweep: no axis to search is given. Add --over compile,attention"),
        (["--over", "size"], "--over size: another size is another model"),
        (["--over", "compile", "--up-to", "9"], "--up-to: needs --largest"),
        (
            ["--largest", "batch_size", "--until", "2%"],
            "--until: cannot be combined with --largest",
        ),
        (["--over", "compile", "--confirm", "1"], "'--confirm': 1 is not in the range 2<=x<=100"),
        (["--over", "compile", "--hold", "tokens=9"], "--hold tokens=9: is not a number of tokens"),
        (
            ["--over", "batch_size=2,4", "--hold", "tokens_per_update=128"],
            "--hold tokens_per_update=128: no candidate divides it. Name a multiple",
        ),
        (
            ["--over", "compile", "--set", "gradient_accumulation=1", *HELD],
            "--hold: chooses gradient_accumulation itself",
        ),
        (["--over", "d_head"], "--over d_head: train_step has no such axis"),
        (["--over", ","], "no axis to search is given. Add --over compile,attention"),
        (["--over", "batch_size"], "--over batch_size: has one value"),
        (["--over", "batch_size=4"], "--over batch_size: has one value"),
        (["--over", "compile", "--gpu", "H100"], "--gpu: a search measures on the GPU of this"),
        (
            ["--over", "compile", "--plan", "--write", "none/x.yaml"],
            "--write none/x.yaml: its folder",
        ),
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
    sweep_here: Sweep, too_large: str, tmp_path: Path
) -> None:
    words = ["--over", "optimizer", "--where", "attention=sdpa", "--plan", "--gpu", "1GiB"]
    result = sweep_here("best", too_large, *words, "--out", str(tmp_path / "run"))
    assert result.exit_code == 0, result.output
    assert "does not fit" in result.stdout
    assert "no candidate surely fits" in result.stdout
    assert "comes nearest" in result.stdout
    assert not (tmp_path / "run").exists()


def test_an_axis_without_values_has_all_and_begins_with_that_of_the_config(
    sweep_here: Sweep, tmp_path: Path
) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY.replace("fixed: {", "fixed: {checkpointing: blocks, "))
    words = ["best", str(tmp_path / "tiny.yaml"), "--over", "checkpointing", "--plan"]
    result = sweep_here(*words, "--where", "attention=sdpa,optimizer=fused")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["blocks", "1"] in rows
    assert "1. default" in result.stdout
    assert ["selective:2", "–"] in rows
    assert "5 of 5 candidates may be measured" in result.stdout


def test_combinations_that_the_task_refuses_are_no_candidates(
    sweep_here: Sweep, tmp_path: Path
) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    words = ["best", str(tmp_path / "tiny.yaml"), "--plan", "--where", "attention=sdpa"]
    over = ["--over", "optimizer", "--over", "optimizer_step=after,in_backward"]
    result = sweep_here(*words, *over)
    assert result.exit_code == 0, result.output
    assert "left out 1 impossible combination, such as: " in result.output
    assert "grids[0]: optimizer: course cannot be combined with optimizer_step" in result.output
    assert "3 of 3 candidates may be measured" in result.stdout
    # Where nothing is possible, the reason is the error.
    over[-1] = "optimizer_step=in_backward"
    result = sweep_here(*words, *over, "--set", "optimizer=course,muon")
    assert result.exit_code == 2
    assert "optimizer: course cannot be combined with optimizer_step" in result.stderr


def test_a_search_needs_times(sweep_here: Sweep, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY.replace("timing, ", ""))
    result = sweep_here("best", str(tmp_path / "tiny.yaml"), "--over", "attention")
    assert result.exit_code == 2
    assert "does not time the steps. Add timing to instruments" in result.stderr


def test_a_plan_needs_a_gpu(sweep_here: Sweep) -> None:
    """The tests see no GPU."""
    result = sweep_here("best", FULL, "--where", SMALL, "--over", "compile", "--plan")
    assert result.exit_code == 2
    assert "for which GPU? This machine has none. Add --gpu 'RTX 5090'" in result.stderr


@pytest.mark.process
def test_groups_of_two_tasks_and_what_a_sweep_has_measured(
    sweep_here: Sweep, tmp_path: Path
) -> None:
    config, out = tmp_path / "two.yaml", ["--scheduler", "serial", "--out", str(tmp_path / "run")]
    config.write_text(TWO_TASKS)
    result = sweep_here("best", str(config), "--over", "attention", "--time-limit", "0s", *out)
    assert result.exit_code == 75, result.output
    assert result.stdout.count("no answer yet: 2 of 2 candidates may be measured") == 2
    assert sweep_here("run", str(config), *out).exit_code == 0
    result = sweep_here("best", str(config), "--over", "attention", *out)
    assert result.exit_code == 0, result.output
    assert "[1/1]" not in result.stdout
    assert "train_step:\n" in result.stdout
    assert "attention:\n" in result.stdout
    assert "None" not in result.stdout
    # The task `attention` has no tokens.
    assert result.stdout.count("tokens/s") == 1
    assert result.stdout.count("measured 2 of 2 candidates") == 2


@pytest.mark.process
def test_the_folder_of_a_search_knows_what_was_left_out(sweep_here: Sweep, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    run = str(tmp_path / "run")
    words = ["best", str(tmp_path / "tiny.yaml"), "--where", "attention=sdpa", "--out", run]
    words += ["--over", "optimizer", "--over", "optimizer_step=after,in_backward"]
    result = sweep_here(*words, "--scheduler", "serial", "--until", "0%")
    assert result.exit_code == 0, result.output
    assert "measured 3 of 3 candidates" in result.stdout
    result = sweep_here("status", run)
    assert "nothing is left to measure of 3 cells" in result.stdout


@pytest.mark.process
def test_candidates_that_all_fail_are_no_success(sweep_here: Sweep, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def model(vocab_size):\n    raise RuntimeError\n")
    text = TINY.replace("size: tiny", "model: 'broken:model'")
    config, best = tmp_path / "tiny.yaml", tmp_path / "best.yaml"
    config.write_text("limits: {attempts: 1}" + text.replace("attention: [naive, sdpa], ", ""))
    words = ["best", str(config), "--over", "optimizer", "--scheduler", "serial"]
    result = sweep_here(*words, "--out", str(tmp_path / "run"), "--write", str(best))
    assert result.exit_code == 1, result.output
    assert "ended as failed" in result.stdout
    assert "no candidate has a measured step. What failed:\n  sweep status" in result.stdout
    assert not best.exists()
    assert f"did not write {best}: there is no answer" in result.output
    # The command that tries again is a sweep: a search has no --retry.
    printed = sweep_here("status", str(tmp_path / "run")).stdout
    command = shlex.split(printed.partition("To try again: ")[2])
    assert command[:3] == ["sweep", "run", str(config)]
    result = sweep_here(*command[1:], "--scheduler", "serial")
    assert "measured 2 cells: 2 failed" in result.stdout, result.output


def test_a_config_is_written_only_where_it_finds_its_model(
    sweep_here: Sweep, tmp_path: Path
) -> None:
    config = tmp_path / "inner" / "tiny.yaml"
    config.parent.mkdir()
    config.write_text(TINY.replace("size: tiny", "model: 'gpt_inside:model'"))
    (tmp_path / "inner" / "gpt_inside.py").write_text("def model(vocab_size):\n    pass\n")
    words = ["best", str(config), "--over", "attention", "--plan", "--write"]
    result = sweep_here(*words, str(tmp_path / "best.yaml"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"sweep: --write {tmp_path}/best.yaml: model 'gpt_inside:model': there is no module"
        f" 'gpt_inside'. Write it to {config.parent}\n"
    )
    assert sweep_here(*words, str(config.parent / "best.yaml")).exit_code == 0
    # Another file of this name would be another model.
    (tmp_path / "outer").mkdir()
    (tmp_path / "outer" / "gpt_inside.py").write_text("def model(vocab_size):\n    return 1\n")
    result = sweep_here(*words, str(tmp_path / "outer" / "best.yaml"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        f"sweep: --write {tmp_path}/outer/best.yaml: the model 'gpt_inside:model' is another one"
        f" from there. Write it to {config.parent}"
    ]


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
    config, source = load_config(best)
    (cell,) = expand(config, source, Selection()).cells
    assert f"\n  sweep show {tmp_path}/run {cell.id}\n" in first.stdout
    printed = " ".join(first.stdout.split())  # a long line is wrapped
    grid = config.grids[0].fixed
    assert f"attention={grid['attention']} optimizer={grid['optimizer']}" in printed
    again = sweep_here(*words)
    measured = re.search(r"measured (\d) of 4 candidates", first.stdout)
    assert measured
    left = 4 - int(measured[1])
    status = sweep_here("status", str(tmp_path / "run")).stdout
    answer = (
        f"not measured by the search: {left} of 4 cells. To continue it, or to see its answer: "
    )
    answer += f"sweep best {tmp_path}"
    assert (answer in status) == bool(left)
    assert ("nothing is left to measure of 4 cells" in status) == (not left)
    disturbed = command_with(Run(tmp_path / "run"), ["--retry", "cpu-contended"])
    assert " --only ok --retry cpu-contended " in disturbed
    repeated = shlex.split(command_with(Run(tmp_path / "run"), ["--repeat", "2"]))
    assert sweep_here(*repeated[1:], "--scheduler", "serial").exit_code == 0
    assert len(pd.read_parquet(tmp_path / "run" / "attempts")) == 2 * int(measured[1])
    assert "[1/1]" in first.stdout
    assert "[1/1]" not in again.stdout  # every decision follows from the rows
    assert [line for line in again.stdout.splitlines() if line.startswith("best: ")] == [
        line for line in first.stdout.splitlines() if line.startswith("best: ")
    ]


def test_the_tokens_of_an_update_are_held(sweep_here: Sweep, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    words = ["best", str(tmp_path / "tiny.yaml"), "--plan", "--where", "attention=sdpa"]
    words += ["--over", "batch_size=1,2,3,4,8", "--hold", "tokens_per_update=64"]
    result = sweep_here(*words, "--set", "optimizer=fused")
    assert result.exit_code == 0, result.output
    assert (
        "left out 2 combinations, because 64 tokens are no multiple of theirs: "
        "batch_size=3 context_length=16; batch_size=8 context_length=16"
    ) in result.output
    rows = [line.split()[:2] for line in result.stdout.splitlines()]
    held = sorted(row for row in rows if len(row) == 2 and row[0].isdigit())
    assert held == [["1", "4"], ["2", "2"], ["4", "1"]]
    # A sweep can select the same cells.
    result = sweep_here(
        *("plan", str(tmp_path / "tiny.yaml"), "--set", "batch_size=1,2,4"),
        *("--set", "gradient_accumulation=1,2,4", "--where", "tokens_per_update=64"),
        *("--where", "attention=sdpa,optimizer=fused"),
    )
    assert "3 cells" in result.stdout, result.output


def test_impossible_combinations_are_counted_also_with_held_tokens(
    sweep_here: Sweep, tmp_path: Path
) -> None:
    """An optimizer step in the backward pass excludes several micro-batches in a step."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    words = ["best", str(tmp_path / "tiny.yaml"), "--plan", "--where", "attention=sdpa"]
    words += ["--set", "optimizer=fused", "--hold", "tokens_per_update=64"]
    words += ["--over", "batch_size=1,2,4", "--over", "optimizer_step=after,in_backward"]
    result = sweep_here(*words)
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("left out")]
    assert line.startswith("left out 2 impossible combinations, such as: ")
    assert "gradient_accumulation: 4 cannot be combined with optimizer_step: in_backward" in line
    assert "4 of 4 candidates may be measured" in result.stdout


@pytest.mark.process
def test_a_config_that_is_written_early_says_so(sweep_here: Sweep, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    config, file = str(tmp_path / "tiny.yaml"), tmp_path / "best.yaml"
    out = ["--scheduler", "serial", "--out", str(tmp_path / "run")]
    one = ["--where", "optimizer=fused,attention=naive"]
    assert sweep_here("run", config, *one, *out).exit_code == 0
    words = ["--over", "attention", "--where", "optimizer=fused", "--until", "0%"]
    result = sweep_here("best", config, *words, *out, "--plan", "--write", str(file))
    assert result.exit_code == 0, result.output
    still_open = "not finished: 1 of 2 candidates may be measured"
    assert f"  # {still_open}\n" in file.read_text()
    assert f"wrote {file}, but the search is {still_open}. To run it:" in result.stdout
    assert sweep_here("best", config, *words, *out, "--write", str(file)).exit_code == 0
    assert "not finished" not in file.read_text()


@pytest.mark.parametrize(
    ("command", "axis", "most"),
    [("max-batch", "batch_size", "128"), ("max-context", "context_length", "8192")],
)
def test_the_largest_value_is_that_of_the_other_command(
    sweep_here: Sweep, too_large: str, command: str, axis: str, most: str
) -> None:
    words = ["--where", "optimizer=fused,attention=sdpa"]
    limits = ["--gpu", "1GiB", "--granularity", "64", "--up-to", most]
    plain = sweep_here(command, too_large, *words, *limits)
    best = sweep_here("best", too_large, "--largest", axis, "--plan", *words, *limits)
    assert plain.exit_code == best.exit_code == 0, best.output
    assert best.stdout == plain.stdout


def test_the_largest_value_needs_a_gpu(sweep_here: Sweep, too_large: str) -> None:
    words = ["--where", "optimizer=fused,attention=sdpa"]
    result = sweep_here("best", too_large, "--largest", "batch_size", *words)
    assert result.exit_code == 2
    assert "device cuda is not available" in result.stderr


def test_what_would_fit_is_named_if_nothing_does(sweep_here: Sweep, too_large: str) -> None:
    words = ["--over", "optimizer", "--where", "attention=sdpa", "--plan", "--gpu", "1GiB"]
    result = sweep_here("best", too_large, *words)
    assert result.exit_code == 0, result.output
    assert "no candidate surely fits; optimizer=" in result.stdout
    assert "the cheapest changes that fit and train the same, as predicted" in result.stdout
    assert "--set checkpointing=blocks" in result.stdout
