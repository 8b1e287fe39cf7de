"""Who may import whom: model ← tasks ← orchestrator, and what a laptop without torch must be able to do."""

from __future__ import annotations

import ast
import graphlib
import importlib.util
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import pytest

from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from tests.support.imports import FOR_MEASURING, run_without_importing

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(
    path for folder in ("model", "tasks", "orchestrator") for path in (ROOT / folder).rglob("*.py")
)


def module_name(path: Path) -> str:
    """Return the dotted name of a file, whose path is relative to the root."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path.relative_to(ROOT)) for path in FILES}


# Which packages of ours a package may import besides itself, inside functions and for annotations
# too. Everything in orchestrator/ may also import what ALWAYS names. The longest prefix counts.
ALLOWED: dict[str, set[str]] = {
    "model": set(),
    "tasks/spec": {"model"},
    "tasks/process": {"tasks/spec"},
    "tasks/traces": {"tasks/spec"},
    "tasks/snapshots": {"tasks/spec", "tasks/traces"},
    "tasks/harness": {"model", "tasks/spec", "tasks/process"},
    "tasks/training": {"model", "tasks/spec", "tasks/harness"},
    "tasks/instruments": {
        "tasks/spec", "tasks/process", "tasks/harness", "tasks/traces", "tasks/snapshots"
    },
    "tasks": {"model", "tasks/spec", "tasks/process", "tasks/harness", "tasks/training"},
    "tasks/prediction/operations": set(),
    "tasks/prediction": {
        "model", "tasks", "tasks/spec", "tasks/process", "tasks/harness", "tasks/training",
        "tasks/prediction/operations",
    },
    "tasks/__main__": {
        "model", "tasks", "tasks/spec", "tasks/process", "tasks/harness", "tasks/training",
        "tasks/instruments", "tasks/traces", "tasks/snapshots", "tasks/prediction",
    },
    "orchestrator/common": set(),
    "orchestrator/config": {"tasks/instruments"},
    "orchestrator/hardware": set(),
    "orchestrator/store": set(),
    "orchestrator/execution": {"orchestrator/hardware", "tasks/process", "tasks/traces"},
    "orchestrator/scheduling": {"orchestrator/hardware", "orchestrator/execution", "tasks/process"},
    "orchestrator/analysis": {"orchestrator/hardware", "orchestrator/store", "tasks/traces"},
    "orchestrator/planning": {
        "orchestrator/config", "orchestrator/hardware", "orchestrator/store",
        "orchestrator/execution", "orchestrator/analysis", "tasks/prediction", "tasks/process",
    },
    "orchestrator/report": {
        "orchestrator/hardware", "orchestrator/store", "orchestrator/analysis", "model"
    },
    "orchestrator/publication": {"orchestrator/store", "orchestrator/analysis"},
    "orchestrator/sweep": {
        "orchestrator/config", "orchestrator/hardware", "orchestrator/store",
        "orchestrator/execution", "orchestrator/scheduling", "orchestrator/planning",
        "orchestrator/analysis", "tasks/prediction", "tasks/traces", "tasks/snapshots",
    },
    "orchestrator/api": {"orchestrator/store", "orchestrator/analysis", "orchestrator/report"},
    "orchestrator/cli": {
        "orchestrator/analysis", "orchestrator/config", "orchestrator/execution",
        "orchestrator/hardware", "orchestrator/planning", "orchestrator/publication", "orchestrator/report", "orchestrator/scheduling", "orchestrator/store", "orchestrator/sweep", "tasks", "tasks/prediction", "tasks/training",
    },
    "orchestrator": {"orchestrator/api", "orchestrator/cli"},
}  # fmt: skip
ALWAYS = {"orchestrator": {"orchestrator/common", "tasks/spec"}}

# Third-party packages: the only files, as glob patterns, that may import them.
ONLY_IN = {
    "torch": ["model/*", "tasks/*"],
    "einops": ["model/*"],
    "ray": ["orchestrator/scheduling/ray_*.py"],
    "pyarrow": ["orchestrator/store/*.py"],
    "pandas": ["orchestrator/*"],
    "pydantic": ["tasks/*", "orchestrator/*"],
    "click": [
        "orchestrator/cli/*",
        "orchestrator/common/output.py",
    ],
    "jinja2": ["orchestrator/report/*"],
    "vl_convert": ["orchestrator/report/*"],
    "transformers": ["tasks/training/hugging_face.py", "tasks/prediction/resizing.py"],
    "peft": [],
}
OPTIONAL = {"transformers", "peft"}  # not installed everywhere
# Files of model/ and tasks/ that start without torch, since orchestrator imports them.
WITHOUT_TORCH = [
    "model/config.py", "model/accounting.py", "tasks/spec/*", "tasks/traces/*", "tasks/snapshots/*",
    "tasks/training/parameters.py", "tasks/training/presets.py",
    *(f"tasks/prediction/{name}.py" for name in ("allocator", "closed_form", "composition", "layers", "records", "replay")),
]  # fmt: skip


def imported_modules(tree: ast.Module) -> set[str]:
    """Return the modules that a file imports. `from package import module` gives package.module."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in MODULES else node.module)
    return found


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {path.relative_to(ROOT): ast.parse(path.read_text()) for path in FILES}


@pytest.fixture(scope="module")
def imports(trees: dict[Path, ast.Module]) -> dict[Path, set[str]]:
    return {path: imported_modules(tree) for path, tree in trees.items()}


def package_of(module: str) -> str:
    """Return the longest prefix of the module's path that ALLOWED names, or an empty string."""
    path = module.replace(".", "/")
    matches = [prefix for prefix in ALLOWED if path == prefix or path.startswith(f"{prefix}/")]
    return max(matches, key=len, default="")


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def test_a_file_imports_only_what_its_package_may(imports: dict[Path, set[str]]) -> None:
    wrong = {}
    for path, modules in imports.items():
        own = package_of(module_name(path))
        allowed = ALLOWED[own] | ALWAYS.get(own.split("/")[0], set()) | {own, ""}
        wrong[str(path)] = {package_of(module) for module in modules} - allowed
    assert not {path: packages for path, packages in wrong.items() if packages}


def test_third_party_packages_stay_in_their_files(imports: dict[Path, set[str]]) -> None:
    outside = [
        f"{path} imports {package}"
        for path, modules in imports.items()
        for package, patterns in ONLY_IN.items()
        if any(is_within(module, package) for module in modules)
        and not any(fnmatch(str(path), pattern) for pattern in patterns)
    ]
    assert not outside


def test_modules_that_start_without_torch_do_not_import_it(imports: dict[Path, set[str]]) -> None:
    with_torch = [
        str(path)
        for path, modules in imports.items()
        if any(fnmatch(str(path), pattern) for pattern in WITHOUT_TORCH)
        and any(is_within(module, "torch") for module in modules)
    ]
    assert not with_torch


def test_the_tables_of_this_file_name_what_exists(imports: dict[Path, set[str]]) -> None:
    """A name that is misspelled or out of date would leave something unchecked."""
    packages = {*ALLOWED, *ALWAYS}.union(*ALLOWED.values(), *ALWAYS.values())
    missing = {name for name in packages if name.replace("/", ".") not in MODULES}
    assert not missing
    assert packages <= set(ALLOWED)

    unused = [
        pattern
        for pattern in WITHOUT_TORCH
        if not any(fnmatch(str(path), pattern) for path in imports)
    ]
    for package, patterns in ONLY_IN.items():
        for pattern in patterns:
            files = [path for path in imports if fnmatch(str(path), pattern)]
            if not any(is_within(module, package) for path in files for module in imports[path]):
                unused.append(f"{package}: {pattern}")
    assert not unused

    forbidden = [names for group in FORBIDDEN_IMPORTS for names in group.values()]
    third_party = {*ONLY_IN}.union(*forbidden) - OPTIONAL
    assert not [name for name in third_party if importlib.util.find_spec(name) is None]


def test_transformers_is_imported_by_cells_that_need_it_alone(
    trees: dict[Path, ast.Module],
) -> None:
    for name in ONLY_IN["transformers"]:
        found = []
        for node in trees[Path(name)].body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                found.append(ast.unparse(node))
        assert found
        assert not [text for text in found if "transformers" in text]


def test_no_module_imports_itself_through_others(imports: dict[Path, set[str]]) -> None:
    graph = {module_name(path): modules & MODULES for path, modules in imports.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the cycle


def test_no_folder_imports_itself_through_others(imports: dict[Path, set[str]]) -> None:
    folders = {module_name(path): path.parent for path in imports}
    graph: dict[Path, set[Path]] = {}
    for path, modules in imports.items():
        others = {folders[module] for module in modules & MODULES}
        graph.setdefault(path.parent, set()).update(others - {path.parent})
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the cycle


def test_no_two_classes_share_a_name(trees: dict[Path, ast.Module]) -> None:
    names = Counter(
        node.name
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


FOR_TABLES = FOR_MEASURING | {"pandas", "vl_convert", "jinja2", "rich"}
FOR_HELP = FOR_TABLES | {"pyarrow", "numpy", "pydantic"}
# The modules that a command must not import: most of them take longer than the command itself. The
# commands of a group run in one process. Each may import what the one before it may, and more. A page
# and a publication are made by tests/test_seams.py, with the same check.
FORBIDDEN_IMPORTS: list[dict[str, set[str]]] = [
    {
        "--help": FOR_HELP,
        "report --help": FOR_HELP,
        "plan --help": FOR_HELP,
        "plan configs/full.yaml --out {run}-new": FOR_TABLES | {"pyarrow", "numpy", "psutil"},
        "plan configs/models.yaml": FOR_TABLES,
        "status {run}": FOR_TABLES,
        "show {run} {cell}": FOR_MEASURING | {"vl_convert", "jinja2", "rich"},
        # Its tables are those of the report. A prediction takes much longer than their import.
        "plan configs/demo.yaml --memory": FOR_MEASURING | {"vl_convert", "jinja2"},
        "schema": FOR_MEASURING,
    },
    {
        # rich draws the table, and the axes of tasks are pydantic models.
        "report {run} --table timings": FOR_MEASURING | {"vl_convert", "jinja2", "psutil", "ruamel"}
    },
]


@pytest.mark.parametrize("group", FORBIDDEN_IMPORTS, ids=lambda group: next(iter(group)))
def test_a_command_imports_no_more_than_it_needs(
    group: dict[str, set[str]], tmp_path: Path
) -> None:
    run = a_run(tmp_path)
    cell = next(Run(run).rows("attempts", ["cell"]))[0][:6]
    commands = {line.format(run=run, cell=cell): names for line, names in group.items()}
    run_without_importing(commands, ROOT)


def a_run(tmp_path: Path) -> Path:
    """A folder as if a sweep had run in it."""
    from orchestrator.config.selection import Selection
    from orchestrator.planning.request import resolve
    from orchestrator.store.run import Run
    from orchestrator.sweep.outcome_log import store_cells
    from tasks.spec.attempt import Attempt, Settings
    from tasks.spec.outcome import Outcome
    from tasks.spec.status import Status
    from tasks.spec.tables import Sample

    config = tmp_path / "c.yaml"
    config.write_text("name: c\ngrids: [{task: train_step, fixed: {device: cpu, size: tiny}}]")
    request = resolve(config, Selection(), tmp_path / "run")
    cell = request.expansion.cells[0]
    with open_for_writing(Run(tmp_path / "run")) as writer:
        writer.write_manifest(request.manifest({}, request.new_invocation()))
        samples = (Sample("timing", "duration", "ms", 1.0, "synced", "step", 0),)
        attempt = Attempt(cell, 1, str(tmp_path), Settings())
        writer.append(Outcome(attempt, Status.OK, "", "", {}, {}, samples, 0.0, 1.0), None)
        store_cells(writer)
    return tmp_path / "run"


def test_every_module_says_what_it_is(trees: dict[Path, ast.Module]) -> None:
    assert not [path for path, tree in trees.items() if not ast.get_docstring(tree)]
