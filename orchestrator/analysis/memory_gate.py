"""Comparison of predicted memory in two states of a program, on a machine without a GPU.

The output of `sweep plan --memory --format json` in both states enters. A check names what grew: the
role at the peak, and the modules and operations whose tensors or parameters grew. A cell that A
predicts and B does not is a failure, like one that no longer runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from orchestrator.analysis.axes import axis_text
from orchestrator.analysis.checks import (
    MEMORY,
    Check,
    Comparison,
    lost_check,
    memory_check,
    require_matching,
    settings_label,
)
from orchestrator.analysis.gate_policy import Policy
from orchestrator.analysis.verdicts import Verdict
from orchestrator.common.errors import RunError

_NAMED = 3  # modules and operations that a check names
_PARAMETER, _TEMPORARY = "parameter ", "temporary"  # how the names of module_bytes begin
_ALWAYS_SHOWN = ("task", "model", "size", "context_length")
_MIB = 2**20
Bytes = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class PredictedMemory(TypedDict):
    """The key `memory` of an object of `sweep plan --memory --format json`."""

    verdict: str | None
    limit_bytes: Bytes | None
    peak_allocated_bytes: Bytes | None
    how: str
    reason: str
    torch: NotRequired[str]  # earlier programs did not write these three
    at_peak_bytes: NotRequired[dict[str, float]]
    module_bytes: NotRequired[dict[str, float]]


class PredictionRecord(TypedDict):
    """An object of `sweep plan --memory --format json`."""

    cell: str
    task: str
    params: dict[str, Any]
    memory: PredictedMemory


def compare_predictions(
    before: Sequence[PredictionRecord], after: Sequence[PredictionRecord], policy: Policy
) -> Comparison:
    """Compare the predicted memory of the cells that both have, and name the others.

    Raise RunError if no cell is in both, and ConfigError for limits of cells that match none.
    """
    sides = [{record["cell"]: record for record in side} for side in (before, after)]
    common = [cell for cell in sides[1] if cell in sides[0]]
    if not common:
        problem = "the predictions have no cell in common"
        raise RunError(problem, "Predict the same config in both states of the code")
    values = {
        cell: {"task": record["task"], **record["params"]}
        for side in sides
        for cell, record in side.items()
    }
    require_matching(policy, list(values.values()))
    names = _varying(list(values.values()))
    settings = {
        cell: {name: axis_text(_plain(one.get(name))) for name in names}
        for cell, one in values.items()
    }
    checks: list[Check] = []
    for cell in common:
        memory = sides[0][cell]["memory"], sides[1][cell]["memory"]
        checks += _predicted_checks(cell, settings[cell], memory, policy.of_cell(values[cell]))
    alone = [[cell for cell in sides[side] if cell not in sides[1 - side]] for side in (0, 1)]
    if policy.status.missing == "fail":
        checks += [lost_check(cell, settings[cell], "fail", "is not in B") for cell in alone[0]]
    checks = [replace(one, accepted=policy.acceptance(values[one.cell])) for one in checks]
    only_a, only_b = (tuple(settings_label(settings[cell]) for cell in side) for side in alone)
    return Comparison(tuple(checks), policy, _differing_torch(before, after), (only_a, only_b))


def _differing_torch(
    before: Sequence[PredictionRecord], after: Sequence[PredictionRecord]
) -> dict[str, tuple[str, str]]:
    """Return the versions of torch in both, if they differ."""
    versions = []
    for side in (before, after):
        found = {record["memory"].get("torch", "unknown") for record in side}
        versions.append(", ".join(sorted(found)))
    return {"torch": (versions[0], versions[1])} if versions[0] != versions[1] else {}


def _predicted_checks(
    cell: str,
    settings: Mapping[str, str],
    memory: tuple[PredictedMemory, PredictedMemory],
    policy: Policy,
) -> Iterator[Check]:
    before, after = memory
    a, b = (one["peak_allocated_bytes"] for one in memory)
    undecided = Check(cell, settings, MEMORY, Verdict.UNDECIDED, unit="bytes")
    if a is None:
        yield replace(undecided, reason=f"no peak is predicted in A: {before['reason']}")
        return
    if b is None:
        reason = f"predicted in A, not in B: {after['reason']}"
        yield lost_check(cell, settings, policy.status.failed, reason)
        return
    if reason := _why_not_comparable(before, after):
        yield replace(undecided, reason=reason)
        return
    check = memory_check(cell, settings, (a, b), policy.memory)
    grown = _grown(before, after, 1 if b > a else -1)
    if before["verdict"] != "oom" == after["verdict"]:
        change = f"{before['verdict']} → oom in {_gib(before['limit_bytes'])}"
        reason = "; ".join([change, *grown])
        yield lost_check(cell, settings, policy.status.oom, reason)
    yield check if check.verdict is Verdict.SAME else replace(check, reason="; ".join(grown))


def _why_not_comparable(before: PredictedMemory, after: PredictedMemory) -> str:
    limits = [one["limit_bytes"] for one in (before, after)]
    if limits[0] != limits[1]:
        return f"predicted for two limits: {_gib(limits[0])} and {_gib(limits[1])}"
    if before["how"] != after["how"]:
        return f"predicted in two ways: {before['how']} and {after['how']}"
    return ""


def _gib(limit_bytes: float | None) -> str:
    return f"{limit_bytes / 2**30:.2f} GiB" if limit_bytes else "none"


def _grown(before: PredictedMemory, after: PredictedMemory, sign: int) -> list[str]:
    """Return what grew, or shrank if the sign is -1: a role at the peak, modules and operations."""
    roles = _changes(before.get("at_peak_bytes", {}), after.get("at_peak_bytes", {}), sign)
    modules = _changes(before.get("module_bytes", {}), after.get("module_bytes", {}), sign)
    kind = _kind(roles[0][0]) if roles else ""
    named = [one for one in modules if _kind(one[0]) == kind] or modules
    shown = dict([*roles[:1], *named[:_NAMED]])
    return [f"{name} {size / _MIB:+,.1f} MiB" for name, size in shown.items()]


def _kind(name: str) -> str:
    """Return what a role, or the name of a module or parameter, is about."""
    if name.startswith(_TEMPORARY):
        return _TEMPORARY
    # What gradients and moments need follows from the parameters.
    of_parameters = ("parameters", "gradients", "optimizer state", _PARAMETER)
    return _PARAMETER if name.startswith(of_parameters) else "activations"


def _changes(
    before: Mapping[str, float], after: Mapping[str, float], sign: int
) -> list[tuple[str, float]]:
    """Return the sizes that changed in the direction of the sign, the largest change first."""
    changes = []
    for name in {**before, **after}:
        change = after.get(name, 0) - before.get(name, 0)
        if change * sign > 0 and name != "slack":
            changes.append((name, change))
    return sorted(changes, key=lambda one: -abs(one[1]))


def _varying(values: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the parameters that tell the cells apart."""
    names = dict.fromkeys(name for one in values for name in one)
    shown = []
    for name in names:
        texts = {axis_text(_plain(one.get(name))) for one in values}
        is_named = name in _ALWAYS_SHOWN and any(one.get(name) is not None for one in values)
        if len(texts) > 1 or is_named:
            shown.append(name)
    return shown


def _plain(value: object) -> object:
    return str(value) if isinstance(value, dict | list) else value
