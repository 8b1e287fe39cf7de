"""Who may import whom: model ← tasks ← orchestrator, and what a laptop without torch must be able to do."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(path for room in ("model", "tasks", "orchestrator") for path in (ROOT / room).rglob("*.py"))
OURS = {"model", "tasks", "orchestrator"}

# room (a path prefix) → what files in it may not import, wherever the import stands
FORBIDDEN = {
    "model/": {"tasks", "orchestrator", "ray", "pandas", "pyarrow", "pydantic"},
    "model/config.py": {"torch", "einops"},
    "model/accounting.py": {"torch", "einops"},
    "tasks/": {"orchestrator", "ray", "pandas", "pyarrow"},
    "tasks/harness/": {"tasks.instruments", "tasks.prediction", "tasks.snapshots", "tasks.traces", "tasks.train_step"},
    "tasks/traces/": {"tasks.instruments", "tasks.prediction", "tasks.train_step", "model", "torch"},
    "tasks/snapshots/": {"tasks.instruments", "tasks.prediction", "tasks.train_step", "model", "torch"},
    "tasks/instruments/": {"tasks.prediction", "tasks.train_step", "model"},
    "tasks/harness/order_statistics.py": {"torch"},
    "tasks/harness/stopping.py": {"torch"},
    "tasks/train_step.py": {"tasks.prediction"},
    "tasks/attention.py": {"tasks.prediction"},
    "tasks/prediction/allocator.py": {"torch"},
    "tasks/prediction/closed_form.py": {"torch"},
    "tasks/prediction/composition.py": {"torch"},
    "tasks/prediction/records.py": {"torch"},
    "tasks/prediction/trace.py": {"torch"},
    "orchestrator/": {"torch", "einops", "model"},
    "orchestrator/report/": {"tasks", "ray"},
}
# what a room may import all the same: closed forms, which need no torch
PERMITTED = {
    "orchestrator/report/published/": {"model.config", "model.accounting"},
    "orchestrator/report/host.py": {"model.config"},
    "orchestrator/report/statistics.py": {"tasks.harness.order_statistics"},
    "orchestrator/report/frames.py": {"tasks.traces.classes"},
}
ONLY_IN = {
    "ray": "orchestrator/schedulers.py",
    "pyarrow": "orchestrator/store.py orchestrator/parts.py orchestrator/remote/place.py",
}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_rooms(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    forbidden = set().union(*(modules for room, modules in FORBIDDEN.items() if name.startswith(room)))
    forbidden |= {package for package, owner in ONLY_IN.items() if name not in owner.split()}
    permitted = set().union(*(modules for room, modules in PERMITTED.items() if name.startswith(room)))
    found = {module for module in imports(path) for package in forbidden if within(module, package)} - permitted
    assert not found


@pytest.mark.parametrize(
    "command",
    [
        "--help",
        "plan configs/full.yaml",
        "plan configs/demo.yaml --memory",
        "status {run}",
        "report {run}",
        "report {run} --against h100",
        "show {run} {cell}",
        "publish {run} --out {run}/../published",
        "schema",
    ],
)
def test_light_commands_load_neither_torch_nor_ray(command: str, tmp_path: Path) -> None:
    program = (
        "import sys\nfrom orchestrator.cli import main\n"
        "try: main(sys.argv[1:], prog_name='sweep')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "loaded = {'torch', 'ray'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    run = a_run(tmp_path)
    words = command.format(run=run, cell=next((run / "attempts").iterdir()).name[:6]).split()
    done = subprocess.run([sys.executable, "-c", program, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["--help", "report --help", "plan --help"])
def test_help_loads_no_pandas(command: str) -> None:
    program = (
        "import sys\nfrom orchestrator.cli import main\n"
        "try: main(sys.argv[1:], prog_name='sweep')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "loaded = {'pandas', 'pyarrow', 'numpy', 'altair', 'torch', 'ray'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", program, *command.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def a_run(tmp_path: Path) -> Path:
    """A folder as if a sweep had run in it."""
    from orchestrator.invocations import new_invocation
    from orchestrator.plan import Choice
    from orchestrator.report.frames import load_results
    from orchestrator.run import manifest_of, resolve
    from orchestrator.store import Run
    from tasks.harness.records import Attempt, Outcome, Sample, Settings, Status

    config = tmp_path / "c.yaml"
    config.write_text("name: c\ngrids: [{task: train_step, fixed: {device: cpu, size: tiny}}]")
    request = resolve(config, [], [], tmp_path / "run")
    cell = request.expansion.cells[0]
    with Run(tmp_path / "run").opened_for_writing() as writer:
        writer.write_manifest(manifest_of(request, {}, new_invocation(request, Choice(), None)))
        samples = (Sample("timing", "duration", "ms", 1.0, "synced", "step", 0),)
        attempt = Attempt(cell, 1, str(tmp_path), Settings())
        writer.append(Outcome(attempt, Status.OK, "", "", {}, {}, samples, 0.0, 1.0), None)
        writer.write_cells(load_results(writer).cells)
    return tmp_path / "run"


def test_every_module_says_what_it_is() -> None:
    silent = [path for path in FILES if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent
