"""The README and the guides that it leads to keep their word: every command in them runs, every link leads somewhere, every
command there is stands in the README, its table is real."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import click
import pytest
from click.testing import Result

from orchestrator.cli.main import main
from orchestrator.common.errors import SweepError
from orchestrator.config.grid import expand
from orchestrator.config.schema import parse_config
from orchestrator.config.selection import Selection
from orchestrator.planning import memory_prediction as prediction
from orchestrator.report.tables.registry import TABLES
from tests.conftest import ROOT
from tests.orchestrator.execution.test_faults import FAULTS
from tests.support.traces import NsysExport

README = (ROOT / "README.md").read_text()
GUIDES = {
    name: (ROOT / "docs" / name).read_text()
    for name in ("measuring.md", "scale.md", "comparing.md")
}
TEXT = "\n".join([README, *GUIDES.values()])
BLOCKS = re.findall(r"```(?:console|sh)\n(.*?)```", TEXT, re.DOTALL)
LINES = [line.split("   #")[0].strip() for block in BLOCKS for line in block.splitlines()]
COMMANDS = [
    line
    for line in (line.removeprefix("$ ") for line in LINES)
    if line.startswith(("sweep ", "python -c"))
]


OTHERS = (  # of sbatch, of Ray, of examples/ and benchmarks/
    "--nodes", "--gpus-per-node", "--time", "--working-dir", "--minutes", "--publish", "--rounds", "--keep"
)  # fmt: skip


def test_every_command_there_is_stands_in_it() -> None:
    for name in main.commands:
        assert f"sweep {name}" in README


def test_every_option_it_names_exists() -> None:
    known = {
        option
        for command in main.commands.values()
        for parameter in command.params
        for option in parameter.opts
    }
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT))
    assert named <= known | {"--head", "--version", "--help", *OTHERS}


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{name}" for name in GUIDES)])
def test_every_link_leads_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text())
    assert links
    for link in links:
        file, _, heading = link.partition("#")
        target = (ROOT / page).parent / file if file else ROOT / page
        assert target.exists(), link
        assert not heading or heading in headings(target.read_text()), link


def headings(text: str) -> set[str]:
    """As GitHub names them in a link."""
    return {
        re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-")
        for line in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }


@pytest.mark.parametrize("name", [table.name for table in TABLES])
def test_every_table_stands_in_it(name: str) -> None:
    assert f"`{name}`" in README


def test_every_help_text_has_an_example_that_parses() -> None:
    for name, command in main.commands.items():
        example = re.search(r"Example: sweep (.+)", command.help or "")
        assert example, name
        words = example[1].split(" > ")[0].split()
        with click.Context(main) as context:
            _, found, rest = main.resolve_command(context, words)
            assert found is command
            command.make_context(name, rest, parent=context)


def test_its_example_of_a_sweep_is_one() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    cells = expand(*parse_config(text, "README.md"), Selection({}, {})).cells
    assert len(cells) == 5 * 4 * 3 - 3 + 1
    assert {cell.params.values()["measured_steps"] for cell in cells} == {10, 50}


@pytest.mark.docs
@pytest.mark.timeout(280)
def test_every_command_in_it_runs(
    sweep_here: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine without a GPU. What needs one is planned instead, or narrowed to the CPU and to a cell of seconds.

    The first sweep, and what is more than a command of ours, goes through a shell; the others run in this process, without
    Ray. The sweeps beside full.yaml run in small versions in test_configs.py.
    """
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    shutil.copytree(
        ROOT / "results" / "published",
        tmp_path / "results" / "published",
        ignore=shutil.ignore_patterns("report"),
    )
    monkeypatch.setenv(
        "XDG_CACHE_HOME", str(tmp_path / ".cache")
    )  # not HOME: Ray's token of another would stay in this process
    NsysExport(tmp_path / "report1.sqlite").kernel("ampere_sgemm_128x64_tn", 10, 20, 30)
    shells = 0
    with prediction._children(2) as predicting:
        monkeypatch.setattr(
            prediction, "_children", lambda number: nullcontext(predicting)
        )  # by the processes of the first
        for command in dict.fromkeys(COMMANDS):
            cell = next((tmp_path / "results" / "full" / "artifacts").glob("*"), Path("none")).name
            command = made_small(command).replace(" CELL", f" {cell}")
            if (
                command.startswith("sweep")
                and ">" not in command
                and (shells or not command.startswith("sweep run"))
            ):
                without_ray = ["--scheduler", "serial"] if command.startswith("sweep run") else []
                done = sweep_here(*shlex.split(command)[1:], *without_ray)
                assert done.exit_code == 0, (command, done.output, done.exception)
            else:
                run_in_shell(command, tmp_path)
                shells += 1
    assert shells == 3


def made_small(command: str) -> str:
    command = command.replace("s3://bucket", "memory://bucket")
    tiny = "--set device=cpu --set size=tiny --set context_length=16 --set precision=fp32 --set compile=eager --set pass=forward"
    tiny += " --set batch_size=1 --set vocab_size=200 --set measured_steps=5"
    if command.startswith("sweep max-"):
        command = re.sub(r" --(where|set|gpu) (\"[^\"]*\"|\S+)| --confirm", "", command)
        return f"{command} --gpu H200 --granularity 64 --up-to 128 {tiny.replace('device=cpu', 'device=cuda')}"
    if "--address" in command or "memory_limit" in command:
        return command.replace("sweep run", "sweep plan").replace("--address auto", "")
    if "--memory" in command:
        return command + " --where size=small,context_length=128,precision=fp32,pass=forward"
    if command.startswith("sweep run configs/full.yaml"):
        return re.sub(r" --(set|where) ('[^']*'|\S+)", "", command) + f" {tiny}"
    return (
        command.replace("sweep run", "sweep plan")
        if command.startswith("sweep run configs/")
        else command
    )


def run_in_shell(command: str, folder: Path) -> None:
    shell = command.replace("sweep ", f"{sys.executable} -m orchestrator ", 1).replace(
        "python -c", f"{sys.executable} -c", 1
    )
    done = subprocess.run(
        shell, shell=True, cwd=folder, capture_output=True, text=True, timeout=100,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr


def test_every_fault_in_it_has_its_tests() -> None:
    """Each row of the table of faults names tests, and those are there, of the parameters that are named."""
    table = README.split("| what goes wrong |")[1].split("\n\n")[0]
    rows = [line for line in table.splitlines()[2:] if line.startswith("|")]
    assert len(rows) >= 18
    for row in rows:
        named = re.findall(r"`(test_\w+\.py)::(\w+)(?:\[([^]]+)\])?`", row.split("|")[4])
        assert named, row
        for file, test, parameter in named:
            texts = [path.read_text() for path in (ROOT / "tests").rglob(file)]
            assert sum(f"def {test}(" in text for text in texts) == 1, test
            assert not parameter or (file, test, parameter in FAULTS) == (
                "test_faults.py",
                "test_a_fault",
                True,
            ), row
    assert all(f"test_a_fault[{row}]" in table for row in FAULTS)


def test_errors_are_drawn_in_their_docstring() -> None:
    from orchestrator.common import errors

    def tree(kind: type[SweepError]) -> list[str]:
        return [kind.__name__, *(name for child in kind.__subclasses__() for name in tree(child))]

    drawn = re.findall(r"^[│├└─ ]*(\w+Error|Run\w+|\w+Lost)\b", errors.__doc__ or "", re.MULTILINE)
    assert drawn == tree(SweepError)
