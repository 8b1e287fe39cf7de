"""Comparison of predicted memory: what is worse, what grew, and what cannot be decided."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from orchestrator.analysis.gate_policy import Policy, PolicyFile
from orchestrator.analysis.memory_gate import compare_predictions
from orchestrator.analysis.verdicts import Verdict
from orchestrator.common.errors import ConfigError, RunError

MIB = 2**20


def record(size: str = "small", **memory: Any) -> dict[str, Any]:
    """Return an object of `sweep plan --memory --format json`."""
    return {
        "cell": f"id-{size}",
        "task": "train_step",
        "params": {"size": size, "context_length": 128, "model": None, "model_args": {}},
        "memory": {
            "verdict": "fits",
            "peak_allocated_bytes": 1000.0 * MIB,
            "limit_bytes": 80 * 1024 * MIB,
            "how": "tracked",
            "reason": "",
            "at_peak_bytes": {
                "parameters": 200 * MIB,
                "optimizer state": 400 * MIB,
                "activations: ffn": 390 * MIB,
                "temporary": 10 * MIB,
            },
            "module_bytes": {
                "layers.*.ffn: MulBackward0": 190 * MIB,
                "layers.*.ffn: MmBackward0": 200 * MIB,
                "parameter layers.*.ffn.w1.weight": 100 * MIB,
                "temporary: ffn": 10 * MIB,
            },
            **memory,
        },
    }


def changed(*, peak: float, roles: dict[str, float], modules: dict[str, float]) -> dict[str, Any]:
    """Return the record with MiB added to its peak, its roles and its modules."""
    made = record()
    memory = made["memory"]
    memory["peak_allocated_bytes"] += peak * MIB
    for key, more in (("at_peak_bytes", roles), ("module_bytes", modules)):
        for name, size in more.items():
            memory[key][name] = memory[key].get(name, 0) + size * MIB
    return made


@pytest.mark.parametrize(
    ("peak", "roles", "modules", "verdict", "reason"),
    [
        (0, {}, {}, Verdict.SAME, ""),
        (9, {"activations: ffn": 9}, {"layers.*.ffn: MulBackward0": 9}, Verdict.SAME, ""),
        (
            96,
            {"activations: ffn": 96},
            {"layers.*.ffn: SiluBackward0": 96, "parameter layers.*.ffn.w1.weight": 1},
            Verdict.WORSE,
            "activations: ffn +96.0 MiB; layers.*.ffn: SiluBackward0 +96.0 MiB",
        ),
        (
            150,
            {"parameters": 50, "optimizer state": 100},
            {"parameter layers.*.ffn.w4.weight": 50, "layers.*.ffn: MmBackward0": 1},
            Verdict.WORSE,
            "optimizer state +100.0 MiB; parameter layers.*.ffn.w4.weight +50.0 MiB",
        ),
        (
            20,
            {"temporary": 20},
            {"temporary: loss": 20},
            Verdict.WORSE,
            "temporary +20.0 MiB; temporary: loss +20.0 MiB",
        ),
        (
            -200,  # a faster optimizer with less memory
            {"optimizer state": -200},
            {},
            Verdict.BETTER,
            "optimizer state -200.0 MiB",
        ),
    ],
)
def test_a_change_of_memory_names_what_grew_or_shrank(
    peak: float, roles: dict[str, float], modules: dict[str, float], verdict: Verdict, reason: str
) -> None:
    after = changed(peak=peak, roles=roles, modules=modules)
    comparison = compare_predictions([record()], [after], Policy())
    (check,) = comparison.checks
    assert (check.verdict, check.reason) == (verdict, reason)
    assert comparison.exit_code == (1 if verdict is Verdict.WORSE else 0)


def test_a_cell_that_no_longer_fits_is_worse_however_little_it_grew() -> None:
    after = changed(peak=1, roles={"temporary": 1}, modules={})
    after["memory"]["verdict"] = "oom"
    comparison = compare_predictions([record()], [after], Policy())
    assert comparison.exit_code == 1
    (failure,) = comparison.failures
    assert failure.reason == "fits → oom in 80.00 GiB; temporary +1.0 MiB"
    policy = PolicyFile.model_validate({"gate": {"status": {"oom": "report"}}}).gate
    assert compare_predictions([record()], [after], policy).outcome == "PASS"
    both = deepcopy(after)
    assert compare_predictions([both], [after], Policy()).exit_code == 0


@pytest.mark.parametrize(
    ("memory", "reason"),
    [
        ({"how": "as eager"}, "predicted in two ways: tracked and as eager"),
        (
            {"limit_bytes": 24 * 1024 * MIB},
            "predicted for two limits: 80.00 GiB and 24.00 GiB",
        ),
        ({"limit_bytes": None, "verdict": None}, "predicted for two limits: 80.00 GiB and none"),
    ],
)
def test_a_cell_without_two_equal_predictions_is_undecided(
    memory: dict[str, Any], reason: str
) -> None:
    comparison = compare_predictions([record()], [record(**memory)], Policy())
    (check,) = comparison.checks
    assert (check.verdict, check.reason) == (Verdict.UNDECIDED, reason)
    assert comparison.exit_code == 3


def test_a_cell_that_is_not_predicted_in_a_is_undecided() -> None:
    unknown = record(peak_allocated_bytes=None, reason="no data")
    for after in (record(), unknown):
        comparison = compare_predictions([unknown], [after], Policy())
        assert comparison.checks[0].reason == "no peak is predicted in A: no data"
        assert comparison.exit_code == 3


def test_a_cell_that_only_a_predicts_fails_however_many_others_pass() -> None:
    sizes = [f"size{number}" for number in range(20)]
    before = [record(size) for size in sizes]
    broken = record(sizes[-1], peak_allocated_bytes=None, reason="ValueError: no such length")
    after = [*before[:-1], broken]
    comparison = compare_predictions(before, after, Policy())
    (failure,) = comparison.failures
    assert comparison.exit_code == 1
    assert (failure.label, failure.reason) == (
        "train_step size=size19 context_length=128",
        "predicted in A, not in B: ValueError: no such length",
    )
    policy = PolicyFile.model_validate({"gate": {"status": {"failed": "report"}}}).gate
    assert compare_predictions(before, after, policy).outcome == "PASS"


def test_cells_of_one_side_only_are_named() -> None:
    before, after = [record("small"), record("large")], [record("small"), record("xl")]
    comparison = compare_predictions(before, after, Policy())
    assert comparison.only == (
        ("train_step size=large context_length=128",),
        ("train_step size=xl context_length=128",),
    )
    assert comparison.outcome == "PASS"
    policy = PolicyFile.model_validate({"gate": {"status": {"missing": "fail"}}}).gate
    (failure,) = compare_predictions(before, after, policy).failures
    assert (failure.settings["size"], failure.reason) == ("large", "is not in B")
    gate = {
        "status": {"missing": "fail"},
        "cells": [{"when": {"size": "large"}, "accept": "it is removed on purpose"}],
    }
    policy = PolicyFile.model_validate({"gate": gate}).gate
    assert compare_predictions(before, after, policy).outcome == "PASS"
    with pytest.raises(RunError, match="no cell in common"):
        compare_predictions([record("large")], [record("xl")], Policy())


def test_two_versions_of_torch_are_named() -> None:
    versions = ("2.12.0", "2.13.0")
    before, after = ([record(torch=version)] for version in versions)
    assert compare_predictions(before, after, Policy()).differences == {"torch": versions}
    assert compare_predictions(before, before, Policy()).differences == {}
    older = compare_predictions([record()], after, Policy())
    assert older.differences == {"torch": ("unknown", "2.13.0")}


def test_a_policy_may_allow_and_accept_growth() -> None:
    after = changed(peak=96, roles={"activations: ffn": 96}, modules={})

    def outcome(**limits: Any) -> str:
        cells = [{"when": {"size": "small"}, **limits}]
        policy = PolicyFile.model_validate({"gate": {"cells": cells}}).gate
        return compare_predictions([record()], [after], policy).outcome

    assert outcome(memory="9%") == "FAIL"
    assert outcome(memory="10%") == "PASS"
    assert outcome(accept="a wider layer") == "PASS"
    after["memory"]["peak_allocated_bytes"] = None
    assert (outcome(), outcome(accept="no prediction yet")) == ("FAIL", "PASS")
    policy = PolicyFile.model_validate({"gate": {"cells": [{"when": {"size": "tiny"}}]}}).gate
    with pytest.raises(ConfigError, match="size: tiny"):
        compare_predictions([record()], [after], policy)


def test_cells_that_differ_in_the_arguments_of_a_model_show_them() -> None:
    records = [record(), record("large")]
    for layers, one in enumerate(records, 1):
        one["params"] |= {"size": None, "model": "gpt:GPT", "model_args": {"layers": layers}}
    comparison = compare_predictions(records, records, Policy())
    shown = [check.settings["model_args"] for check in comparison.checks]
    assert shown == ["{'layers': 1}", "{'layers': 2}"]
