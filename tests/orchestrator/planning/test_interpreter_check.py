"""Variables with which Python does not start are refused before a cell runs."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from orchestrator.common.errors import ConfigError
from orchestrator.config.yaml_source import Source
from orchestrator.planning.interpreter_check import require_interpreter

SOURCE = Source("c.yaml", None)


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
    with pytest.raises(ConfigError, match=reason) as raised:
        require_interpreter({"PYTHONUNBUFFERED": "1", name: value}, SOURCE)
    assert f"env.{name}: " in str(raised.value)


def test_other_variables_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*args: Any, **options: Any) -> None:
        raise AssertionError(args)

    monkeypatch.setattr(subprocess, "run", start)
    require_interpreter({"OMP_NUM_THREADS": "1", "MY_PYTHON": "x"}, SOURCE)
