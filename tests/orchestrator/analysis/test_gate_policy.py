"""The policy of the gate: its defaults, its schema, and what it refuses."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from pydantic import ValidationError

from orchestrator.analysis.gate_policy import Policy, PolicyFile

WHOLE: dict[str, Any] = {
    "gate": {
        "false_alarm": "1%",
        "rounds": {"first": 2, "more": 3},
        "step": {"gpu_bound": "2%", "cpu_bound": "report"},
        "kernels": {"same_machine": "2%", "other_machine": "3%"},
        "memory": "1%",
        "compile": {"graph_breaks": 0, "recompiles": 0},
        "status": {"oom": "fail", "failed": "fail", "missing": "report"},
        "at_least": "90%",
        "cells": [],
    }
}


def test_a_policy_that_writes_out_the_defaults_is_the_default() -> None:
    assert PolicyFile.model_validate(WHOLE).gate == Policy()
    assert PolicyFile.model_validate({}).gate == Policy()


@pytest.mark.parametrize(
    ("gate", "valid"),
    [
        (WHOLE["gate"], True),
        ({"step": {"cpu_bound": "10%"}}, True),
        ({"cells": [{"when": {"size": "small"}, "kernels": "5 %", "accept": "known"}]}, True),
        ({"memory": 1}, False),
        ({"memory": 0.01}, False),
        ({"memory": "1"}, False),
        ({"memory": "-1%"}, False),
        ({"memry": "1%"}, False),
        ({"step": {"cpu_bound": "never"}}, False),
        ({"status": {"oom": "ignore"}}, False),
        ({"compile": {"graph_breaks": -1}}, False),
        ({"cells": [{"when": {}}]}, False),
        ({"cells": [{"memory": "1%"}]}, False),
    ],
)
def test_the_schema_and_the_program_agree(gate: dict[str, Any], valid: bool) -> None:
    validator = jsonschema.Draft202012Validator(PolicyFile.model_json_schema())
    assert validator.is_valid({"gate": gate}) is valid
    if valid:
        PolicyFile.model_validate({"gate": gate})
    else:
        with pytest.raises(ValidationError):
            PolicyFile.model_validate({"gate": gate})


@pytest.mark.parametrize("share", ["0%", "101%"])
def test_shares_have_a_range(share: str) -> None:
    with pytest.raises(ValidationError):
        PolicyFile.model_validate({"gate": {"false_alarm": share}})


def test_the_last_limits_that_match_count() -> None:
    cells = [
        {"when": {"size": "small"}, "kernels": "5%", "accept": "first"},
        {"when": {"size": "small", "precision": "bf16"}, "kernels": "6%", "step": "7%"},
        {"when": {"precision": "fp16"}, "memory": "8%", "accept": "second"},
    ]
    policy = PolicyFile.model_validate({"gate": {"cells": cells}}).gate
    small = policy.of_cell({"size": "small", "precision": "bf16"})
    assert (small.kernels.same_machine, small.kernels.other_machine) == (0.06, 0.06)
    assert (small.step.gpu_bound, small.memory) == (0.07, 0.01)
    assert policy.of_cell({"size": "large", "precision": "fp32"}) == policy
    assert policy.acceptance({"size": "small", "precision": "fp16"}) == "second"
    assert policy.acceptance({"size": "small", "precision": "bf16"}) == "first"
    assert policy.acceptance({"size": "large"}) == ""
