"""Variables with which Python does not start are refused before a cell runs."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.common.errors import ConfigError
from orchestrator.config.selection import Selection
from orchestrator.execution.interpreter_check import startup_problem
from orchestrator.planning import request as planning_request
from orchestrator.planning.request import resolve


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("PYTHONHOME", "/nowhere", "failed to get the Python codec"),
        ("LD_TRACE_LOADED_OBJECTS", "1", "its exit code is 0"),
    ],
)
def test_a_variable_with_which_python_does_not_start_is_named(
    name: str, value: str, reason: str
) -> None:
    found = startup_problem({"PYTHONUNBUFFERED": "1", name: value})
    assert found
    assert found[0] == name
    assert reason in found[1]


def test_other_variables_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*args: Any, **options: Any) -> None:
        raise AssertionError(args)

    monkeypatch.setattr(subprocess, "run", start)
    assert startup_problem({"OMP_NUM_THREADS": "1", "MY_PYTHON": "x"}) is None


@pytest.mark.parametrize("name", ["PYTHONHOME", None])
def test_a_config_with_a_variable_that_stops_python_from_starting_is_refused(
    name: str | None,
    write_config: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planning_request, "startup_problem", lambda env: (name, "no codec"))
    path = write_config(
        "name: c\nenv: {PYTHONHOME: /nowhere}\ngrids: [{task: accumulation, fixed: {device: cpu}}]"
    )
    place = f"env.{name}" if name else "env"
    with pytest.raises(ConfigError, match=f"{place}: Python does not start with it: no codec"):
        resolve(path, Selection())
