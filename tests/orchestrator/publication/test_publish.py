"""What was measured, published: the same tables wherever it is copied, nothing of the machine, no piece missing unnoticed."""

from __future__ import annotations

import errno
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from ruamel.yaml import YAML

import orchestrator as sweep
from orchestrator.cli.commands.publish import publish_runs
from orchestrator.cli.main import main
from orchestrator.common.errors import RunUnwritable
from orchestrator.publication.publish import _aside
from orchestrator.report.tables.registry import TABLES
from orchestrator.store.layout import PUBLICATION_FILE
from orchestrator.store.open import open_for_writing, open_runs
from orchestrator.store.run import Run
from orchestrator.store.run_collection import Publication
from orchestrator.store.run_writer import RunWriter
from orchestrator.store.tables import SCHEMAS
from orchestrator.sweep.outcome_log import store_cells
from tasks.spec.attempt import Attempt, Settings
from tasks.spec.cell import Cell
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status
from tasks.spec.tables import AllocationRow, LiveRow, RankRow, Sample
from tests.conftest import ROOT
from tests.support.fake_sweep import request_for

# One worker makes what these tests share.
pytestmark = pytest.mark.xdist_group("publication")

Rendered = Callable[[Path], Mapping[str, bytes]]

SECRETS = (
    "secret-host",
    "5ec3e7-9905-4d",
    "/home/ann",
    "10.0.0.5",
    "s3cr3t",
    "2000004711",  # long, so that it is no part of another number by chance
    "correcthorse",
)
TRACEBACK = 'File "/home/ann/repo/tasks/train_step.py", line 3, on secret-host, with s3cr3t'
SAID = "not measured on secret-host, with s3cr3t and correcthorse"


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first test leaves what each of the others copies."""
    return tmp_path_factory.mktemp("once")


@pytest.fixture
def runs(once: Path, tmp_path: Path, make_outcome: Callable[..., Outcome]) -> list[Path]:
    """Two runs that share cells; one cell out of memory, one failed; everything a part can hold, and secrets in it."""
    if not (once / "full").exists():
        _measure([once / "full", once / "capped"], make_outcome)
    return [shutil.copytree(once / name, tmp_path / name) for name in ("full", "capped")]


@pytest.fixture
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which take seconds to draw."""
    monkeypatch.setattr("orchestrator.report.build.drawn_figures", lambda results: [])


@pytest.fixture
def published(once: Path, runs: list[Path], tmp_path: Path, no_charts: None) -> Path:
    if not (once / "gpu").exists():
        done = command("publish", *runs, "--out", once / "gpu")
        assert done.exit_code == 0, done.output
    return shutil.copytree(once / "gpu", tmp_path / "published" / "gpu")


def _measure(folders: list[Path], make_outcome: Callable[..., Outcome]) -> None:
    for folder in folders:
        with open_for_writing(Run(folder)) as writer:
            writer.write_manifest(_manifest(folder.name))
            for context in (16, 32):
                writer.append(_with_all(make_outcome(context_length=context)), "abc")
            writer.append(
                _with_secrets(make_outcome(Status.OOM, context_length=64, memory_limit_gib=2.0)),
                "abc",
            )
            writer.append(_with_secrets(make_outcome(Status.FAILED, context_length=128)), "abc")
            store_cells(writer)


def _manifest(name: str) -> dict[str, object]:
    config = {
        "name": name,
        "env": {"TOKEN": "s3cr3t"},
        "grids": [{"task": "train_step", "fixed": {"size": "tiny"}}],
    }
    command = ["run", "/home/ann/c.yaml", "--address", "10.0.0.5:6379"]
    return {
        "name": name,
        "config": config,
        "invocations": [{"time": "2026-11-20", "command": command, "commit": "abc"}],
    }


def _with_all(outcome: Outcome) -> Outcome:
    held = AllocationRow(
        "peak",
        "forward",
        "activations",
        "ffn",
        "scope",
        "forward",
        "/home/ann/m.py:3 f",
        512,
        2,
        1024,
    )
    lives = tuple(
        LiveRow(place, float(place), "forward", "activations", 1024) for place in range(3)
    )
    rank = RankRow(1, "5ec3e7-9905-4d", "0-3", "ok", 10.0, 2, 1024, 2048, 1980.0, 300.0, None)
    return replace(_with_secrets(outcome), allocations=(held,), live=lives, ranks=(rank,))


def _with_secrets(outcome: Outcome) -> Outcome:
    facts = {**outcome.facts, "host": "secret-host", "pid": 2000004711, "env": {"TOKEN": "s3cr3t"}}
    secrets = {"traceback": TRACEBACK, "cell_said": SAID, "log_tail": SAID}
    evidence = {**outcome.evidence, **secrets} if outcome.evidence else outcome.evidence
    return replace(outcome, facts=facts, evidence=evidence)


def command(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], prog_name="sweep")


def files_of(folder: Path) -> Mapping[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def rendered_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rendered]:
    """Copies what was published, but for its report, and gives what is made of that in another folder, zone and locale.

    The copy has the same name, since commands on the page name the run.
    """

    def rendered(published: Path) -> Mapping[str, bytes]:
        copy = tmp_path / "another place" / "ä" / published.name
        shutil.copytree(published, copy, ignore=shutil.ignore_patterns("report"))
        monkeypatch.chdir(copy.parent)
        monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
        monkeypatch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        done = command("report", copy.name)
        assert done.exit_code == 0, done.output
        return files_of(copy / "report")

    yield rendered
    monkeypatch.undo()
    time.tzset()


@pytest.mark.render
def test_a_copy_elsewhere_has_the_same_tables_byte_for_byte(
    published: Path, runs: list[Path], rendered_apart: Rendered
) -> None:
    before = files_of(published / "report")
    assert {"index.html", "answers.md", "timings.md", "failures.md", "composition.md"} <= set(
        before
    )
    assert command("report", published).exit_code == 0
    here = files_of(published / "report")
    assert {name: here[name] for name in before} == before
    assert {path.rpartition(".")[2] for path in here} == {"html", "md", "csv", "tex", "typ"}
    shutil.rmtree(runs[0])
    assert rendered_apart(published) == here


@pytest.mark.render
def test_a_publication_rendered_elsewhere_has_the_same_charts(
    runs: list[Path], tmp_path: Path, rendered_apart: Rendered
) -> None:
    assert command("publish", *runs, "--out", tmp_path / "gpu").exit_code == 0
    before = files_of(tmp_path / "gpu" / "report")
    assert {"figures/step-time.svg", "figures/kernel-classes.svg"} <= set(before)
    there = rendered_apart(tmp_path / "gpu")
    assert {name: there[name] for name in before} == before


def test_published_tables_without_secrets_are_those_of_the_runs(
    published: Path, runs: list[Path]
) -> None:
    assert command("report", *runs, "--reference", "all").exit_code == 0
    own = files_of(runs[0] / "with-capped" / "report")
    for name, content in files_of(published / "report").items():
        if name.endswith(".md") and not any(secret.encode() in own[name] for secret in SECRETS):
            assert content == own[name], name


def test_publishing_again_replaces_a_publication_with_the_same_files(
    published: Path, runs: list[Path]
) -> None:
    before = files_of(published)
    (published / "left.over").touch()
    assert command("publish", *runs, "--out", published).exit_code == 0
    assert files_of(published) == before
    assert not list(published.parent.glob(".*"))


_REDACTED = ("facts", "evidence", "call_chain", "contents", "gpu_uuid")


def test_nothing_is_lost_but_what_is_of_the_machine(published: Path, runs: list[Path]) -> None:
    for folder in runs:
        ours, theirs = Run(folder), Run(published / folder.name)
        assert set(SCHEMAS) - {"predictions"} <= {path.name for path in theirs.folder.iterdir()}
        for table in SCHEMAS:
            plain, copied = ours.read(table), theirs.read(table)
            unchanged = [column for column in plain if column not in _REDACTED]
            assert copied[unchanged].equals(plain[unchanged]), table
            assert copied.dtypes.equals(plain.dtypes), table
    failures = (published / "report" / "failures.md").read_text()
    assert "out of memory: asked for 2 GiB" in failures
    evidence = Publication(published).read("attempts")["evidence"]
    assert evidence.str.contains(r'"File \\"tasks/train_step.py\\", line 3"').any()
    assert evidence.str.contains("not measured on host 1, with", regex=False).any()


def test_a_publication_removes_secrets_of_the_machine_and_counts_them(
    published: Path, runs: list[Path]
) -> None:
    texts = [
        path.read_text()
        for path in published.rglob("*")
        if path.suffix in (".json", ".yaml", ".md", ".html")
    ]
    texts += [str(pq.read_table(path).to_pydict()) for path in published.rglob("*.parquet")]
    assert len(texts) > 20
    for secret in SECRETS:
        assert not any(secret in text for text in texts), secret
        own = [str(pq.read_table(path).to_pydict()) for path in runs[0].rglob("*.parquet")]
        assert any(secret in text for text in [*own, (runs[0] / "run.json").read_text()]), secret
    page = (published / "report" / "index.html").read_text()
    assert "names of hosts: 1, called host 1" in page
    assert re.search(r"value of the environment variable TOKEN: [1-9]", page)


def test_cells_that_were_not_measured_yet_are_said(
    runs: list[Path], tmp_path: Path, brief_report: None
) -> None:
    with open_for_writing(Run(runs[0])) as writer:
        writer.write_manifest({**writer.read_manifest(), "asked": 7})
    done = command("publish", *runs, "--out", tmp_path / "published")
    assert "left out: 3 cells asked for and not measured yet\n" in done.output
    assert "3 not measured" in (tmp_path / "published" / "report" / "index.html").read_text()
    for folder in (tmp_path / "published", tmp_path / "published" / "full"):
        assert command("report", folder, "--table", "timings").stderr.splitlines() == [
            "not measured: 3 of 7 of full"
        ]
    assert (
        "3 cells are asked for and not measured yet: `sweep status "
        in command("report", runs[0]).stderr
    )


def test_a_table_alone_is_that_alone(published: Path) -> None:
    done = command("report", published, "--table", "timings")
    titles = {table.title for table in TABLES}
    assert [line for line in done.stdout.splitlines() if line in titles] == ["Step time"]
    assert (
        command("report", published, "--table", "reference").exit_code == 0
    )  # known without --reference


@pytest.mark.render
def test_a_publication_is_read_like_any_other_run(published: Path, runs: list[Path]) -> None:
    together = sweep.load(published)
    assert set(together.cells["run"]) == {"full", "capped"}
    assert len(together.cells) == 8
    assert list(pq.read_table(published / "cells.parquet")["cell"].to_pylist()) == list(
        together.cells["cell"]
    )
    alone = sweep.load(published / "full")
    shown = command("show", published / "full", alone.cells["cell"].iloc[0])
    assert "parameters: " in shown.output
    assert command("compare", published / "full", published / "capped").exit_code == 0
    assert YAML(typ="safe").load((published / "full" / "config.yaml").read_text())["grids"]
    beside = open_runs([published, runs[0]])
    names = set(beside.read("attempts")["cell"].str.rpartition(":")[0])
    assert names == {"gpu/full", "gpu/capped", f"{runs[0].parent.name}/full"}


@pytest.mark.usefixtures("no_charts")
def test_runs_in_which_nothing_was_timed(
    tmp_path: Path, make_outcome: Callable[..., Outcome], no_charts: None
) -> None:
    """As those that look for what runs out of memory, or those of which all cells failed."""
    for name, status in (("limits", Status.OOM), ("broken", Status.FAILED)):
        with open_for_writing(Run(tmp_path / name)) as writer:
            writer.write_manifest(_manifest(name))
            writer.append(make_outcome(status), "abc")
            store_cells(writer)
    done = command("publish", tmp_path / "limits", tmp_path / "broken", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "published 2 cells" in done.stdout
    assert command("report", tmp_path / "out", "--table", "failures").exit_code == 0


def test_one_run_alone(runs: list[Path], tmp_path: Path, brief_report: None) -> None:
    assert command("publish", runs[0], "--out", tmp_path / "one").exit_code == 0
    assert len(sweep.load(tmp_path / "one").cells) == 4
    assert "run" not in sweep.load(tmp_path / "one").table("timings")  # the same in all rows


def test_a_limit_is_kept_and_says_what_is_largest(published: Path, runs: list[Path]) -> None:
    before = files_of(published)
    done = command("publish", *runs, "--out", published, "--limit-mb", "0.1")
    assert done.exit_code == 2
    assert "0.1 MB are allowed; the largest are " in done.stderr
    assert "are report/index.html 0.1 MB, cells.parquet 0.1 MB, " in done.stderr  # largest first
    # After ten seconds a line shows the progress.
    assert sum(line.startswith("sweep: ") for line in done.stderr.splitlines()) == 1
    assert files_of(published) == before
    assert not list(published.parent.glob(".*"))


def remove_a_part(folder: Path) -> None:
    (folder / "full" / "samples" / "0001.parquet").unlink()


def tear_a_part(folder: Path) -> None:
    part = folder / "full" / "kernels" / "0001.parquet"
    part.write_bytes(part.read_bytes()[:-9])


def remove_a_run(folder: Path) -> None:
    shutil.rmtree(folder / "capped")


def tear_the_list(folder: Path) -> None:
    (folder / PUBLICATION_FILE).write_text("{")


def list_less(folder: Path) -> None:
    (folder / PUBLICATION_FILE).write_text("{}")


def list_nothing(folder: Path) -> None:
    (folder / PUBLICATION_FILE).write_text("null")


def come_from_the_future(folder: Path) -> None:
    (folder / PUBLICATION_FILE).write_text(json.dumps({"schema_version": 99}))


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        (
            remove_a_part,
            "full/samples/0001.parquet: was published, and is missing or a link. Copy",
        ),
        (tear_a_part, "full/kernels/0001.parquet: is torn, or not what was published. Copy"),
        (remove_a_run, ": was published, and is missing or a link. Copy"),
        (tear_the_list, f"{PUBLICATION_FILE}: is not JSON: Expecting"),
        (list_less, f"{PUBLICATION_FILE}: is damaged, or of another program: runs: Field required"),
        (list_nothing, "is damaged, or of another program: it is no JSON object. Copy"),
        (come_from_the_future, "was written with schema 99, newer than 2. Update"),
    ],
)
def test_a_missing_or_torn_piece_is_one_line(
    harm: Callable[[Path], None], expected: str, published: Path
) -> None:
    harm(published)
    done = command("report", published)
    assert done.exit_code == 2
    assert expected in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_publish_replaces_only_publications_and_published_runs_are_read_only(
    published: Path, runs: list[Path], tmp_path: Path
) -> None:
    refused = command("publish", *runs, "--out", runs[1])
    assert refused.exit_code == 2
    assert "capped: holds something else than what was published" in refused.stderr
    refused = command("publish", published / "full", "--out", published)
    assert refused.exit_code == 2
    assert "full: lies in the folder that is to be replaced" in refused.stderr
    refused = command("publish", runs[0], "--out", published)
    assert refused.exit_code == 2
    assert f"has runs that are not named: {runs[1].name}. Name them too" in refused.stderr
    for folder in (published, published / "full"):
        with pytest.raises(RunUnwritable, match="is published"), open_for_writing(Run(folder)):
            pass
    refused = command("status", published)
    assert refused.exit_code == 2
    assert f"Name one of them: {published / 'capped'}, {published / 'full'}" in refused.stderr
    assert command("publish", tmp_path / "nothing", "--out", tmp_path / "out").exit_code == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("at_home", [False, True])
def test_the_status_of_what_is_published_says_that_it_is_closed_and_how_to_go_on(
    tmp_path: Path,
    write_config: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    brief_report: None,
    at_home: bool,
) -> None:
    """In a copy, by a command that runs there, also where that of the day names a folder of somebody's machine."""
    path = write_config(TWO, "c.yaml")
    monkeypatch.chdir(tmp_path)
    config = path.absolute() if at_home else Path("c.yaml")
    words = [
        "run",
        str(config),
        "--set",
        "size=tiny",
        "--time-limit",
        "9s",
        "--out",
        str(tmp_path / "own"),
    ]
    monkeypatch.setattr(sys, "argv", ["sweep", *words])
    request = request_for(config, ["size=tiny"], [], tmp_path / "own")
    with open_for_writing(request.run) as writer:
        writer.write_manifest(request.manifest({}, request.new_invocation()))
        writer.append(ended(request.expansion.cells[0]), None)
    publish_runs([tmp_path / "own"], tmp_path / "published", 10**7, None)
    run = tmp_path / "published" / "own"
    lines = command("status", run).stdout.splitlines()
    copied = "results/own/config.yaml" if at_home else "c.yaml"
    assert lines[2:-1] == [
        "this run is published and closed: 1 of 2 cells were measured",
        f"to continue, copy it: cp -r {run} results/own",
        f"then: sweep run {copied} --set size=tiny --out results/own",
        "which measures 1 cell:",
    ]
    shutil.copytree(run, "results/own")
    planned = command("plan", *shlex.split(lines[4])[3:])
    assert planned.stdout.splitlines()[:2] == ["2 cells: 1 ok, 1 pending", "1 to run"]
    assert f"cp -r {run} results/own-copy" in command("status", run).stdout
    with open_for_writing(Run(Path("results/own"))) as writer:
        writer.append(ended(request.expansion.cells[1]), None)
    publish_runs([Path("results/own")], tmp_path / "whole", 10**7, None)
    whole = command("status", tmp_path / "whole" / "own").stdout.splitlines()
    assert whole == [
        "     2 ok",
        "this run is published and closed: 2 of 2 cells were measured",
    ]


def test_the_status_of_what_is_published_counts_the_cells_of_all_commands() -> None:
    """The last command of this run asked for one cell."""
    assert command("status", ROOT / "results/published/h200/compile").stdout.splitlines() == [
        "    10 ok",
        "this run is published and closed: 10 of 10 cells were measured",
    ]


TWO = """
name: c
grids:
  - task: train_step
    fixed: {device: cpu}
    axes: {size: [tiny], context_length: [16, 32]}
"""


def ended(cell: Cell) -> Outcome:
    return Outcome(
        Attempt(cell, 1, "", Settings()),
        Status.OK,
        "",
        "",
        {},
        {},
        (Sample("timing", "duration", "ms", 1.0),),
        1.7e9,
        1.0,
    )


def beside(folder: Path) -> set[str]:
    return {path.name for path in folder.parent.iterdir()}


def test_a_failed_publish_restores_the_earlier_publication(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, move = tmp_path / "gpu", Path.rename
    out.mkdir()
    (out / "it").write_text("old")

    def refuse_the_new(own: Path, to: Path) -> Path:
        if own.name == ".gpu.new":
            raise OSError(errno.EIO, "Input/output error")
        return move(own, to)

    def publish(end: Exception | None = None) -> None:
        with _aside(out) as folder:
            (folder / "it").write_text("new")
            if end is not None:
                raise end

    with monkeypatch.context() as broken:
        broken.setattr(Path, "rename", refuse_the_new)
        with pytest.raises(RunUnwritable, match="Input/output error"):
            publish()
    assert ((out / "it").read_text(), beside(out)) == ("old", {"gpu"})

    out.rename(tmp_path / ".gpu.old")  # as one killed between the two leaves it
    with pytest.raises(RuntimeError, match="too large"):
        publish(RuntimeError("too large"))
    assert ((out / "it").read_text(), beside(out)) == ("old", {"gpu"})

    publish()
    assert ((out / "it").read_text(), beside(out)) == ("new", {"gpu"})


def test_runs_that_would_have_one_name_are_refused(
    tmp_path: Path, make_outcome: Callable[..., Outcome]
) -> None:
    folders = [tmp_path / name for name in ("x-y/z", "x/y-z", "w/z")]
    _measure(folders, make_outcome)
    refused = command("publish", *folders, "--out", tmp_path / "out")
    assert refused.exit_code == 2, refused.output
    assert "two of them would have one name. Rename a folder" in refused.stderr


@pytest.mark.parametrize(
    ("path", "tracked"),
    [
        ("results/published/h200/full/samples/all.parquet", True),
        ("results/published/h200/publication.json", True),
        ("results/published/h200/report/timings.md", False),
        ("results/published/h200/full/report/timings.md", False),
        ("results/full/run.json", False),
        ("results/README.md", True),
    ],
)
def test_git_tracks_only_the_intended_files_of_results(path: str, tracked: bool) -> None:
    asked = subprocess.run(
        ["git", "check-ignore", "-q", "--no-index", path], cwd=ROOT, capture_output=True
    )
    if asked.returncode == 128:
        pytest.skip("not a checkout")
    assert (asked.returncode == 1) is tracked


def test_a_publication_beside_a_sweep_has_whole_attempts_alone(
    tmp_path: Path,
    make_outcome: Callable[..., Outcome],
    brief_report: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "run"
    with open_for_writing(Run(folder)) as writer:
        writer.write_manifest({"name": "run", "asked": 99})
        writer.append(make_outcome(context_length=16), None)
    lengths, read = iter(range(100, 200)), Run.read

    def read_while_a_sweep_writes(self: Run, table: str, *more: Any, **how: Any) -> pd.DataFrame:
        found = read(self, table, *more, **how)
        if self.folder == folder:
            outcome = make_outcome(context_length=next(lengths))
            later = replace(outcome, facts={**outcome.facts, "host": f"secret-{table}"})
            RunWriter(folder).append(later, None)
        return found

    monkeypatch.setattr(Run, "read", read_while_a_sweep_writes)
    left_out = publish_runs((folder,), tmp_path / "published", 25_000_000, None).left_out
    monkeypatch.undo()
    published = Run(tmp_path / "published" / "run")
    attempts = list(published.rows("attempts", ["cell", "attempt"]))
    for table in ("samples", "kernels"):
        assert set(published.rows(table, ["cell", "attempt"])) == set(attempts)
    assert f"{99 - len(attempts)} cells asked for and not measured yet" in left_out
    hosts = [json.loads(facts).get("host") for (facts,) in published.rows("attempts", ["facts"])]
    assert not any("secret" in str(host) for host in hosts)
