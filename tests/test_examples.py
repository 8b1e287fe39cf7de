"""What a stranger opens first runs: the notebook, studies one after the other, the lines on other programs of a guide."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from ruamel.yaml import YAML

from orchestrator.analysis.results import load_results
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from orchestrator.store.run_collection import Publication
from orchestrator.sweep.outcome_log import store_cells
from tasks.spec.attempt import JOURNAL_FILE
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status
from tests.conftest import ROOT

GUIDE = (ROOT / "docs" / "how-to" / "results-in-python.md").read_text()
H200 = ROOT / "results" / "published" / "h200"
PUBLISHED: dict[str, str] = YAML(typ="safe").load(ROOT / "examples" / "publication.yaml")


@pytest.fixture
def here(
    tmp_path: Path, make_outcome: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder with small runs in its `results`, as if the sweeps demo and full had run."""
    for name in ("demo", "full"):
        with open_for_writing(Run(tmp_path / "results" / name)) as writer:
            writer.write_manifest({"name": name})
            for context in (64, 256):
                for precision, ms in (("fp32", 20.0), ("bf16", 10.0)):
                    times = (ms + context, ms + context + 1, ms + context + 2)
                    writer.append(
                        make_outcome(step_ms=times, context_length=context, precision=precision),
                        None,
                    )
            writer.append(make_outcome(Status.OOM, context_length=512), None)
            store_cells(writer)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.docs
def test_the_notebook_runs(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("IPYTHONDIR", str(here / "ipython"))
    monkeypatch.setenv("MPLCONFIGDIR", str(here / "matplotlib"))
    notebook = nbformat.read(ROOT / "examples" / "results.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    done = nbclient.NotebookClient(
        notebook, timeout=100, resources={"metadata": {"path": str(here)}}
    ).execute()
    printed = [
        str(output.get("data", output.get("text")))
        for cell in done.cells
        for output in cell.get("outputs", [])
    ]
    assert "LoadedRun('results/demo', 5 cells)" in printed[0]
    assert any("image/png" in text for text in printed)
    assert any("gemm_backward" in text for text in printed)
    assert any("out of memory: asked for" in text for text in printed)


def test_duckdb_and_polars_read_the_same_numbers(here: Path) -> None:
    """The lines of the guide."""
    pytest.importorskip("duckdb")
    pytest.importorskip("polars")
    (lines,) = [
        block for block in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if "duckdb" in block
    ]
    names: dict[str, object] = {}
    exec(lines, names)
    cells = load_results(Run(here / "results" / "full")).cells
    ok = cells[cells["status"] == "ok"]
    assert (
        dict(names["medians"].fetchall())
        == ok.groupby("precision")["step_ms_median"].median().to_dict()
    )  # type: ignore[attr-defined]
    steps = names["steps"]
    assert dict(steps.iter_rows()) == ok.set_index("cell")["step_ms_mean"].to_dict()  # type: ignore[attr-defined]


STUDIES = """
one: tiny.yaml --set context_length=8
two: tiny.yaml
"""
TINY = """
name: tiny
grids:
  - task: train_step
    fixed: {device: cpu, size: tiny, vocab_size: 50, batch_size: 1, warmup_steps: 1, measured_steps: 2, pass: forward}
    axes: {context_length: [8, 16]}
"""


def asked_for(*words: str) -> list[str]:
    return [
        str(ROOT / "examples" / "publication.py"),
        "--out",
        "all",
        "--studies",
        "studies.yaml",
        *words,
    ]


@pytest.fixture
def studies(tmp_path: Path) -> None:
    (tmp_path / "studies.yaml").write_text(STUDIES)
    (tmp_path / "tiny.yaml").write_text(TINY)


@pytest.fixture
def publication(studies: None, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """In a process of its own."""
    return lambda *words: subprocess.run(
        [sys.executable, *asked_for(*words, "--", "--scheduler", "serial")],
        cwd=tmp_path, capture_output=True, text=True, timeout=250, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.fixture
def refused(
    studies: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, str]]:
    """In this process, where nothing is measured: the exit code, and what was said but for what is said of the commit."""
    main = runpy.run_path(str(ROOT / "examples" / "publication.py"))["main"]
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", asked_for(*words))
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert out == ""
        assert isinstance(ended.value.code, int)
        return ended.value.code, "".join(
            line for line in err.splitlines(True) if "is of no commit" not in line
        )

    return call


@pytest.mark.docs
def test_studies_one_after_the_other_and_then_published(
    publication: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Ended, called again and published: no cell is measured twice."""
    assert publication("--only", "one").returncode == 0
    done = publication("--publish", "published", "--minutes", "60")
    assert done.returncode == 0, done.stderr
    assert done.stdout.index("== one") < done.stdout.index("== two")
    cells = load_results(Publication(tmp_path / "published")).cells
    assert cells.groupby("run").size().to_dict() == {"one": 1, "two": 2}
    assert (cells["status"] == "ok").all()
    assert (cells["attempts"] == 1).all()


def test_out_of_time_a_study_that_is_not_there_and_one_that_cannot_run(
    refused: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    assert refused("--minutes", "0", "--publish", "published") == (75, "")
    assert refused("--only", "one,three") == (
        2,
        "publication.py: studies.yaml names no study three: there are one, two\n",
    )
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    for words, why in (
        (["--", "--set", "context_length=long"], "one: --set context_length: "),
        (["--", "--nonsense"], "one: No such option"),
        (["--", "--out", "mine"], "one: --out mine: each study has a folder of its own"),
        (["--", "--time-limit", "9m"], "one: --time-limit 540s: is of one study"),
        (["--publish", "mine"], "mine: holds something else"),
        (
            ["--publish", "studies.yaml/published"],
            "studies.yaml/published: cannot be written: Not a directory",
        ),
    ):
        code, said = refused(*words)
        assert code == 2
        assert re.fullmatch(rf"publication.py: {why}.+\n", said)
    (tmp_path / "tiny.yaml").unlink()
    code, said = refused("--publish", "published")
    assert (code, "tiny.yaml" in said) == (2, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "studies.yaml"]


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "[a]",
        "word",
        "one: 3",
        "one:",
        "one: 'a",
        'one: "\'"',
        "../one: tiny.yaml",
        "a/b: tiny.yaml",
        "one: x\none: y",
    ],
)
def test_a_missing_or_invalid_list_of_studies_is_refused_in_one_line(
    text: str | None, refused: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    (tmp_path / "studies.yaml").unlink()
    if text is not None:
        (tmp_path / "studies.yaml").write_text(text)
    code, said = refused()
    assert code == 2
    assert re.fullmatch(r"publication.py: .+\n", said)
    assert not (tmp_path / "all").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["--minutes", "-1"],
        ["--minutes", "nan"],
        ["--minutes", "long"],
        ["--publish", "s3://bucket/mine"],
    ],
)
def test_invalid_values_of_publication_options_are_refused(
    words: list[str], refused: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    code, said = refused(*words)
    assert code == 2
    assert f"error: argument {words[0]}: {words[1]}: must be " in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["studies.yaml", "tiny.yaml"]


def wait_for_a_cell(folder: Path) -> None:
    """Return once a cell of a run in this folder is measured."""
    deadline = time.monotonic() + 100
    while not any(folder.rglob(JOURNAL_FILE)):
        assert time.monotonic() < deadline, "no cell has started"
        time.sleep(0.05)


@pytest.mark.process
@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name
)
def test_a_publication_that_is_told_to_end_ends_its_sweep(
    number: signal.Signals, studies: None, tmp_path: Path
) -> None:
    """Told alone, as by `kill`: a terminal would tell its sweep too."""
    (tmp_path / "tiny.yaml").write_text(
        TINY.replace("measured_steps: 2", "measured_steps: 1000000")
    )
    command = [sys.executable, *asked_for("--only", "one", "--", "--scheduler", "serial")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=environment
    ) as publication:
        assert publication.stdout
        try:
            wait_for_a_cell(tmp_path / "all")
            publication.send_signal(number)
            printed = publication.stdout.read()  # until the sweep, which also has it open, ends
        finally:
            publication.kill()
    assert publication.returncode == 130
    assert "stopped by SIGTERM with 1 cell left" in printed


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_study_of_the_publication_names_cells(
    name: str, sweep_here: Callable[..., Result]
) -> None:
    config, *options = shlex.split(PUBLISHED[name])
    planned = sweep_here("plan", ROOT / config, *options, "--out", "out", "--gpu", "H200")
    assert planned.exit_code == 0, planned.output
    assert "pending" in planned.stdout


@pytest.mark.skipif(not H200.is_dir(), reason="a checkout without the published results")
def test_the_published_runs_are_those_studies() -> None:
    assert {manifest.parent.name for manifest in H200.glob("*/run.json")} == {*PUBLISHED}


STAND_INS = {
    "srun": 'while [[ $1 == --* ]]; do [[ $1 == --nodelist=* ]] && on=${1#*=}; shift; done; STAND_IN_NODE=$on exec "$@"',
    "scontrol": 'if [ "$1" = show ]; then printf "one\\ntwo\\n"; else echo "scontrol $*" >> calls; fi',
    "squeue": "date --date='+30 minutes' +%Y-%m-%dT%H:%M:%S",
    "hostname": "echo 10.0.0.1 10.0.0.2",
    "ray": """if [ "$1" = status ]; then grep '^ray start' calls | sed 's/.*/ 1 node_x/'; exit; fi
              echo "ray $* on $STAND_IN_NODE" >> calls; exec /bin/sleep 60""",
    "sleep": "exec /bin/sleep 0.1",  # a second, each time that it looks for Ray
    "sweep": 'echo "sweep $* with token ${#RAY_AUTH_TOKEN} $RAY_AUTH_MODE" >> calls; exit "$(cat code)"',
}


@pytest.mark.parametrize(
    ("code", "ends", "limited"), [(75, 0, True), (0, 0, True), (1, 1, False), (2, 2, True)]
)
def test_the_slurm_script_starts_ray_everywhere_and_comes_again_until_all_is_done(
    code: int, ends: int, limited: bool, tmp_path: Path
) -> None:
    """SLURM, Ray and the sweep are stood in for: it is the script that is tested. limited: whether the job is."""
    (tmp_path / "bin").mkdir()
    for name, does in {**STAND_INS, **({} if limited else {"squeue": "echo NONE"})}.items():
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{does}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "code").write_text(str(code))
    began = time.monotonic()
    done = subprocess.run(
        ["bash", ROOT / "examples" / "slurm.sh", "configs/full.yaml", "--where", "size=xl"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "[one-two]", "SLURM_JOB_ID": "7"},
    )  # fmt: skip
    assert done.returncode == ends, done.stderr
    assert time.monotonic() - began < 30  # and not as long as Ray would stay
    head, worker, sweep, *after = (tmp_path / "calls").read_text().splitlines()
    assert head.startswith("ray start --head --node-ip-address=10.0.0.1 --port=6379")
    assert head.endswith("on one")
    assert worker == "ray start --address=10.0.0.1:6379 --block on two"
    words = re.fullmatch(
        r"sweep run configs/full.yaml --address 10.0.0.1:6379( --time-limit (\d+)s)? --where size=xl with token 64 token",
        sweep,
    )
    assert words
    assert bool(words[1]) == limited
    assert not limited or 1800 - 120 - 40 < int(words[2]) <= 1800 - 120
    assert after == (["scontrol requeue 7"] if code == 75 else [])


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="needs shellcheck")
def test_the_slurm_script_is_clean() -> None:
    subprocess.run(["shellcheck", ROOT / "examples" / "slurm.sh"], check=True)
