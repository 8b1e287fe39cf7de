"""A measuring process imports our own packages, whatever folder or path it starts with."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.common.provenance import SOURCE_ROOT
from orchestrator.execution.child_environment import child_environment
from orchestrator.execution.program import PROGRAM, import_path, search_path
from tasks.spec.attempt import Attempt


def test_modules_are_looked_up_where_the_measuring_process_finds_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root, here = str(SOURCE_ROOT), str(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [here, root, "/lib"])
    monkeypatch.setenv("PYTHONPATH", f"{root}:/mine")
    assert search_path([here, "/configs"]) == ["/mine", "/lib", here, "/configs"]
    assert search_path([here, "/configs"], "/other") == ["/other", "/lib", here, "/configs"]
    # A sweep that is run in the clone finds the models that are there.
    assert search_path(["/configs", root]) == ["/mine", "/lib", "/configs", root]


@pytest.fixture
def strangers(tmp_path: Path) -> Path:
    """A folder with packages of somebody else that are called like ours."""
    for package in ("model", "tasks"):
        (tmp_path / "others" / package).mkdir(parents=True)
        (tmp_path / "others" / package / "__init__.py").write_text(
            "raise SystemExit(f'{__name__} is of a stranger')"
        )
    return tmp_path / "others"


@pytest.mark.process
@pytest.mark.parametrize(
    "words",
    [
        ("-m", "orchestrator", "plan", str(SOURCE_ROOT / "configs/demo.yaml")),
        ("-c", "import orchestrator.execution.measurement"),
    ],
)
@pytest.mark.parametrize("in_it", [True, False])
def test_packages_of_the_same_name_are_not_taken_for_ours(
    strangers: Path, words: tuple[str, ...], in_it: bool
) -> None:
    """Where a driver begins, or a worker of Ray's, which looks first where its driver was started."""
    folder, paths = (
        (strangers, [SOURCE_ROOT]) if in_it else (strangers.parent, [strangers, SOURCE_ROOT])
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.process
def test_a_config_leads_no_process_to_another_program(
    make_attempt: Callable[..., Attempt], strangers: Path
) -> None:
    attempt = make_attempt(settings={"env": {"PYTHONPATH": str(strangers)}})
    environment = {**os.environ, **child_environment(attempt)}
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(SOURCE_ROOT), str(strangers)]
    done = subprocess.run(
        [*PROGRAM, "--help"], cwd=strangers, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_folder_is_named_once_in_the_path_of_a_command() -> None:
    ours = str(SOURCE_ROOT)
    assert import_path(f"/a{os.pathsep}{ours}{os.pathsep}/a") == f"{ours}{os.pathsep}/a"
    assert import_path("") == ours


@pytest.mark.parametrize("configured", [{}, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}])
def test_cuda_numbers_gpus_as_nvml_does_unless_a_config_says_otherwise(
    make_attempt: Callable[..., Attempt], configured: dict[str, str]
) -> None:
    environment = child_environment(make_attempt(settings={"env": configured}))
    expected = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | configured
    assert {name: environment[name] for name in expected} == expected
