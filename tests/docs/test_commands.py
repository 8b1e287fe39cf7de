"""Every command in the README and the pages runs on a machine without a GPU.

A command that needs a GPU is planned instead, or made small enough for the CPU.
"""

from __future__ import annotations

import gzip
import pickle
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result

from tests.conftest import ROOT
from tests.docs.pages import TEXTS, sweep_commands
from tests.orchestrator.sweep.test_sides import git
from tests.support.traces import NsysExport, training_step

pytestmark = [pytest.mark.docs, pytest.mark.timeout(600)]

TINY = (
    "--set device=cpu --set size=tiny --set context_length=16 --set precision=fp32 "
    "--set compile=eager --set pass=forward --set batch_size=1 --set vocab_size=200 "
    "--set measured_steps=5"
)
# Runs whose cells a later command reads, with the options that they need besides.
READ_LATER = {
    "sweep run configs/kernels.yaml": "",
    "sweep run configs/checkpointing.yaml": (
        " --set checkpointing=none,blocks --where attention=naive"
    ),
}
# By the beginning of a command.
SMALLER = {
    "sweep ab ": "--plan",  # test_ab_rounds.py measures
    "sweep run configs/collectives.yaml": "--where device=cpu,processes=2,size_mb=1",
    "sweep run configs/parallel.yaml": (
        f"{TINY.replace('pass=forward', 'processes=2').replace('batch_size=1', 'batch_size=2')} "
        "--set optimizer=foreach --where parallel=naive"
    ),
    "sweep plan configs/parallel.yaml": (
        "--set size=tiny --set context_length=16 --where parallel=naive"
    ),
}
# Their cells were only planned here, or only tiny ones and forward passes were measured.
OF_PUBLISHED_RUNS = (
    "sweep report results/full --where size=small,context_length=512 --table device-memory",
    "sweep report results/oom-map --table oom-map",
    "sweep report results/full --table timings --where pass=forward_backward --format tex",
)
INSTEAD = {
    # The small version of results/tenth has no cell of the published run.
    "sweep compare results/published/h200/full results/tenth": (
        "sweep compare results/before results/tenth"
    ),
    "sweep compare results/monday results/tuesday results/wednesday --history": (
        "sweep compare results/published/h200/full results/published/h200/tenth --history"
    ),
}
MODEL_PAGE = "docs/how-to/your-own-model.md"


def made_small(command: str) -> str:
    """Return the command with cells that take a second on the CPU."""
    for begin, words in SMALLER.items():
        if command.startswith(begin):
            return f"{command} {words}"
    return _made_small(command)


def _made_small(command: str) -> str:
    command = command.partition(" > ")[0]
    if command.startswith("sweep max-"):
        command = re.sub(r" --(where|set|gpu) (\"[^\"]*\"|'[^']*'|\S+)| --confirm", "", command)
        small = TINY.replace("device=cpu", "device=cuda")
        return f"{command} --gpu H200 --granularity 64 --up-to 128 {small}"
    if "--memory" in command and "memory.yaml" in command:
        small = "--where size=small,context_length=128,precision=fp32,pass=forward"
        return re.sub(r"--where \S+", small, command)
    if "--address" in command or "gpu_kind" in command or "memory_limit" in command:
        return command.replace("sweep run", "sweep plan").replace("--address auto", "")
    if command.startswith("sweep run configs/full.yaml"):
        return re.sub(r" --(set|where|sample) ('[^']*'|\S+)", "", command) + f" {TINY}"
    if command in READ_LATER:
        return f"{command} {TINY}{READ_LATER[command]}"
    if command.startswith("sweep run configs/"):
        return command.replace("sweep run", "sweep plan")
    if command in OF_PUBLISHED_RUNS:
        return command.replace("results/", "results/published/h200/")
    if command in INSTEAD:
        return INSTEAD[command]
    if command == "sweep run mine.yaml":
        return f"{command} --set device=cpu --set context_length=16 --set batch_size=1"
    return command


def commands_with_configs() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each command once, in the order of the pages, with the configs that its page shows.

    All pages share one folder: commands use the results of the commands before them. Several pages
    show a config called `mine`, each another one, so the commands about it are yielded again.
    """
    seen = set()
    for page, text in TEXTS.items():
        if page == "docs/explanation/findings-h200.md":  # test_findings.py runs its commands
            continue
        blocks = re.findall(r"```yaml\n(name: (\w+)\n.*?)```", text, re.DOTALL)
        configs = {f"{name}.yaml": block for block, name in blocks}
        for command in sweep_commands(page):
            if command not in seen or "mine" in command:
                seen.add(command)
                yield command, configs


@pytest.mark.usefixtures("bucket")
def test_every_command_runs(
    sweep_here: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    # Sides of `sweep ab` are commits of a repository with the config.
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "configs")
    git(tmp_path, "commit", "-q", "-m", "configs")
    git(tmp_path, "update-ref", "refs/remotes/origin/main", "HEAD")
    shutil.copytree(ROOT / "results" / "published", tmp_path / "results" / "published")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    NsysExport(tmp_path / "report1.sqlite").kernel("ampere_sgemm_128x64_tn", 10, 20, 30)
    (tmp_path / "trace.json.gz").write_bytes(gzip.compress(training_step().text))
    snapshot = {"segments": [{"device": 0, "blocks": []}], "device_traces": [[]]}
    (tmp_path / "memory.pickle").write_bytes(pickle.dumps(snapshot))
    (model,) = re.findall(r"```python\n(.*?)```", TEXTS[MODEL_PAGE], re.DOTALL)
    (tmp_path / "gpt.py").write_text(model)
    results = tmp_path / "results"
    shown: dict[str, str] = {}
    for command, configs in commands_with_configs():
        if configs != shown:
            shutil.rmtree(results / "mine", ignore_errors=True)
            shown = configs
        for name, text in configs.items():
            (tmp_path / name).write_text(text)
        small = made_small(command)
        if named := re.search(r"results/(\w+)[ :]CELL", small):
            (cell, *_) = sorted((results / named[1] / "artifacts").glob("*"))
            small = re.sub("CELL(_[AB])?", cell.name, small)
        words = [*shlex.split(small.replace("../", ""))[1:]]
        if words[0] == "run":
            words += ["--scheduler", "serial"]
        done = sweep_here(*words)
        # Steps on a CPU are not judged, and nothing else is measured here.
        allowed = (0, 3) if "--gate" in words else (0,)
        assert done.exit_code in allowed, (command, done.output, done.exception)
        if target := re.search(r" > \S*?(\w+\.json)$", command):
            (tmp_path / target[1]).write_text(done.stdout)
