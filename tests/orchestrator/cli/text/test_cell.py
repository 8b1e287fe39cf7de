"""What `sweep show` prints of one cell."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result

from orchestrator.analysis.results import load_results
from orchestrator.cli.commands.publish import publish_runs
from orchestrator.cli.text.cell import describe_cell
from orchestrator.common.errors import RunError
from orchestrator.common.text import failure_reason
from orchestrator.report.text.numbers import format_ms
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from tasks.spec.attempt import LOG_FILE, RERUN_FILE
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status

GIB, MIB = 1024**3, 1024**2


@pytest.fixture
def run(tmp_path: Path, make_outcome: Callable[..., Outcome]) -> Run:
    """A cell that was timed until its interval was narrow, and one that ran out of memory."""
    run = Run(tmp_path / "run")
    adaptive = {
        "timing_warmup_steps": 3,
        "timing_stopped_by": "half-width",
        "timing_half_width": 0.0087,
    }
    with open_for_writing(run) as writer:
        writer.write_manifest({"name": "run"})
        timed = make_outcome(context_length=16)
        writer.append(replace(timed, facts={**timed.facts, **adaptive}), None)
        writer.append(make_outcome(Status.OOM, context_length=32), None)
    return run


def shown(run: Run, status: str) -> list[str]:
    attempts = run.read("attempts").set_index("status")
    return list(describe_cell(run, attempts.loc[status, "cell"][:8]))


def test_how_the_number_of_steps_came_about(run: Run) -> None:
    lines = shown(run, "ok")
    assert {
        "  timing_warmup_steps: 3",
        "  timing_stopped_by: half-width",
        "  timing_half_width: 0.0087",
    } <= set(lines)
    others = [line for line in lines if not line.startswith("parameters: ")]
    assert not any("gpu" in line for line in others)  # tables have these facts


def test_the_description_of_a_cell_has_its_evidence_and_samples(run: Run) -> None:
    lines = shown(run, "oom")
    assert lines[3] == "  out of memory: asked for 2 GiB"
    assert "  asked_bytes: 2,147,483,648" in lines
    assert not any("timing_" in line for line in lines)
    assert "  timing synced forward duration [ms]: 10, 11, 12" in shown(run, "ok")


def test_the_reason_comes_first_and_the_traceback_on_request(
    tmp_path: Path, make_outcome: Callable[..., Outcome], sweep_here: Callable[..., Result]
) -> None:
    run = Run(tmp_path / "run")
    calls = (
        'Traceback:\n  File "a.py", line 1, in f\n    g()\n  File "b.py", line 2, in g\n    raise'
    )
    evidence = {"message": "it broke", "traceback": calls, "log_tail": ""}
    outcome = replace(make_outcome(Status.FAILED), evidence=evidence)
    with open_for_writing(run) as writer:
        writer.write_manifest({"name": "run"})
        writer.append(outcome, None)
    cell = outcome.attempt.cell.id
    lines = sweep_here("show", run.folder, cell).stdout.splitlines()
    assert lines[3:5] == ["  it broke", '  raised at: File "b.py", line 2, in g']
    assert not any("a.py" in line for line in lines)
    assert lines[-1] == f"message and traceback: sweep show {run} {cell} --traceback"
    whole = sweep_here("show", run.folder, cell, "--traceback").stdout
    assert whole.endswith('  File "b.py", line 2, in g\n      raise\n')


def test_the_lines_of_the_users_model_come_first(
    tmp_path: Path, make_outcome: Callable[..., Outcome]
) -> None:
    """A hang has more frames of the harness than are shown; an exception has a traceback."""
    run = Run(tmp_path / "run")
    own = 'File "/me/gpt.py", line 11'
    harness = 'File "/sweep/tasks/harness/stage.py", line 4'
    stack = [f"  {own} in forward", *[f"  {harness} in step"] * 30]
    stack.append('  File "/sweep/tasks/__main__.py", line 1 in measure')
    torch = 'File "/lib/python3.12/site-packages/torch/nn/functional.py", line 2, in linear'
    traceback = f"Traceback:\n  {own}, in forward\n    x\n  {torch}\n    y"
    hang = make_outcome(Status.TIMEOUT, context_length=32)
    failure = replace(make_outcome(Status.FAILED), evidence={"traceback": traceback})
    with open_for_writing(run) as writer:
        writer.write_manifest({"name": "run"})
        writer.append(hang, None)
        writer.append(failure, None)
        folder = run.attempt_folder(hang.attempt.cell.id, 1)
        folder.mkdir(parents=True)
        (folder / LOG_FILE).write_text("\n".join(["its output", *stack]))
    lines = shown(run, "timeout")
    first = lines.index("in your code, the innermost call first:")
    assert lines[first + 1] == f"  {own} in forward"
    assert lines[first + 3 : first + 6] == [
        "  its output", f"    {own} in forward", "    … 31 frames of torch, Python or this program"
    ]  # fmt: skip
    lines = shown(run, "failed")
    assert lines.index(f"  in your code: {own}, in forward") + 1 == lines.index(
        f"  raised at: {torch}"
    )


def test_the_log_is_that_of_the_rank_at_fault(
    tmp_path: Path, make_outcome: Callable[..., Outcome]
) -> None:
    run = Run(tmp_path / "run")
    failure = make_outcome(Status.FAILED, processes=2, parallel="ddp", batch_size=2)
    failure = replace(failure, evidence={"message": "it closed", "rank": 1})
    with open_for_writing(run) as writer:
        writer.write_manifest({"name": "run"})
        writer.append(failure, None)
        folder = run.attempt_folder(failure.attempt.cell.id, 1)
        folder.mkdir(parents=True)
        (folder / LOG_FILE).write_text("of rank 0")
        (folder / "log_1.txt").write_text("of rank 1")
    lines = shown(run, "failed")
    assert lines[lines.index(f"log: {folder / 'log_1.txt'}") + 1] == "  of rank 1"


def test_without_a_cell_the_ids_are_listed(run: Run, sweep_here: Callable[..., Result]) -> None:
    ids = dict(run.rows("attempts", ["cell", "status"]))
    done = sweep_here("show", run.folder)
    assert done.exit_code == 0
    *cells, last = done.stdout.splitlines()
    assert {tuple(line.split()[:2]) for line in cells} == set(ids.items())
    assert any(line.endswith(" context_length=16") for line in cells)
    assert last == f"all about one of them: sweep show {run} CELL"
    shutil.rmtree(Path(run.folder) / "attempts")
    (run.folder / "stored.json").unlink()
    assert sweep_here("show", run.folder).stdout == (
        f"nothing measured yet: `sweep status {run}` lists what is left\n"
    )


def test_text_of_a_cell_or_a_config_cannot_send_control_codes_to_a_terminal(
    tmp_path: Path, make_outcome: Callable[..., Outcome]
) -> None:
    run, red = Run(tmp_path / "run"), "\x1b[31m red\rand back"
    own = {
        "size": None,
        "model": "package:Model",
        "model_args": {"name": red},
        "context_length": 16,
    }
    outcome = replace(
        make_outcome(Status.FAILED, **own), evidence={"message": f"{red}\nsecond\tline\x07"}
    )
    with open_for_writing(run) as writer:
        writer.write_manifest({"name": "run"})
        writer.append(outcome, None)
        (run.attempt_folder(outcome.attempt.cell.id, 1)).mkdir(parents=True)
        (run.attempt_folder(outcome.attempt.cell.id, 1) / LOG_FILE).write_text(
            f"{red} in its log\n"
        )
        (run.attempt_folder(outcome.attempt.cell.id, 1) / RERUN_FILE).write_text(
            f'env "{red}\nno end\n'
        )
    assert "  \\x1b[31m red\\rand back" in shown(run, "failed")
    lines = list(describe_cell(run, outcome.attempt.cell.id, with_traceback=True))
    assert all(letter.isprintable() or letter == "\n" for line in lines for letter in line)
    (message,) = (line for line in lines if line.startswith("message: "))
    assert message == "message: \\x1b[31m red\\rand back\n  second  line\\x07"
    assert any("in its log" in line for line in lines)
    (command,) = (line for line in lines if line.startswith("by hand: "))
    assert command == 'by hand: env "\\x1b[31m red\\rand back\\nno end'
    assert failure_reason(outcome.evidence) == "\\x1b[31m red\\rand back"
    assert replace(outcome.attempt.cell, task="bell\x07").describe().startswith("bell\\x07 ")


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"asked_bytes": 8 * MIB, "limit_bytes": 256 * MIB}, "out of memory: asked for 8 MiB, limit 256 MiB"),
        ({"asked_bytes": 3 * GIB // 2, "free_bytes": 205 * MIB, "total_bytes": 80 * GIB},
         "out of memory: asked for 1.5 GiB, 205 MiB of 80 GiB free"),
        ({"asked_bytes": GIB, "limit_bytes": 99 * GIB, "free_bytes": 0, "total_bytes": 80 * GIB},
         "out of memory: asked for 1 GiB, 0 bytes of 80 GiB free"),
        ({"asked_bytes": 512 * MIB}, "out of memory: asked for 512 MiB"),
        ({"asked_bytes": 4096}, "out of memory: asked for 4,096 bytes"),
        ({"asked_bytes": None, "limit_bytes": 256 * MIB}, "x" * 159 + "…"),
        ({}, "x" * 159 + "…"),
    ],
)  # fmt: skip
def test_an_oom_reason_has_the_byte_counts_or_else_the_shortened_message(
    more: dict[str, int | None], expected: str
) -> None:
    assert failure_reason({"message": "x" * 200, **more}) == expected
    assert failure_reason({"message": "x" * 160}) == "x" * 160


def test_an_unknown_cell_id_is_refused(run: Run) -> None:
    with pytest.raises(RunError, match="has no cell 'nothing'"):
        list(describe_cell(run, "nothing"))


def test_the_result_of_a_cell_is_printed_before_its_samples(run: Run) -> None:
    lines = shown(run, "ok")
    result = lines.index("result of attempt 1:")
    assert result < lines.index("  timing synced forward duration [ms]: 10, 11, 12")
    (step,) = (line for line in lines if line.startswith("  step, ms: "))
    row = load_results(run).cells.set_index("status").loc["ok"]
    assert step.startswith(
        f"  step, ms: {format_ms(row['step_ms_median'])} [{format_ms(row['step_ms_ci_low'])}, "
    )
    assert not any(line.startswith("result") for line in shown(run, "oom"))


def test_a_cell_of_what_was_published_is_named_as_in_its_tables(
    run: Run,
    tmp_path: Path,
    sweep_here: Callable[..., Result],
    brief_report: None,
) -> None:
    publish_runs([run.folder], tmp_path / "published", 10**7, "all")
    cell = run.read("attempts").query("status != 'ok'")["cell"].iloc[0]
    alone = sweep_here("show", tmp_path / "published" / "run", cell)
    assert f"cell {cell} of task" in alone.stdout
    assert (
        alone.stdout.splitlines()[-2]
        == "logs and artifacts are not published, nor how to measure this cell by hand"
    )
    assert sweep_here("show", tmp_path / "published", f"run:{cell}").stdout == alone.stdout
    missing = sweep_here("show", tmp_path / "published", f"other:{cell}")
    assert missing.exit_code == 2
    assert missing.stderr.startswith("sweep: ")
