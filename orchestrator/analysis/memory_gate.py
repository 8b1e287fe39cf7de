"""Comparison of predicted memory in two states of a program, on a machine without a GPU.

The output of `sweep plan --memory --format json` in both states enters. A check names what grew: the
role at the peak, and the modules and operations whose tensors or parameters grew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from orchestrator.analysis.axes import axis_text
from orchestrator.analysis.checks import (
    MEMORY,
    Check,
    Comparison,
    memory_check,
    require_matching,
)
from orchestrator.analysis.gate_policy import Policy
from orchestrator.analysis.verdicts import Verdict
from orchestrator.common.errors import RunError

_NAMED = 3  # modules and operations that a check names
_PARAMETER, _TEMPORARY = "parameter ", "temporary"  # how the names of module_bytes begin
_ALWAYS_SHOWN = ("task", "model", "size", "context_length")
_MIB = 2**20
Record = Mapping[str, Any]  # an object of `sweep plan --memory --format json`


def compare_predictions(
    before: Sequence[Record], after: Sequence[Record], policy: Policy
) -> Comparison:
    """Compare the predicted memory of the cells that both have.

    Raise RunError if no cell is in both, and ConfigError for limits of cells that match none.
    """
    earlier = {record["cell"]: record for record in before}
    common = [record for record in after if record["cell"] in earlier]
    if not common:
        problem = "the predictions have no cell in common"
        raise RunError(problem, "Predict the same config in both states of the code")
    values = {record["cell"]: {"task": record["task"], **record["params"]} for record in common}
    require_matching(policy, list(values.values()))
    shown = _varying(list(values.values()))
    checks = []
    for record in common:
        cell = record["cell"]
        settings = {name: axis_text(values[cell].get(name)) for name in shown}
        own = policy.of_cell(values[cell])
        check = _predicted_check(cell, settings, (earlier[cell], record), own)
        checks.append(replace(check, accepted=policy.acceptance(values[cell])))
    only = (len(earlier) - len(common), len(after) - len(common))
    return Comparison(tuple(checks), policy, only=only)


def _predicted_check(
    cell: str, settings: Mapping[str, str], records: tuple[Record, Record], policy: Policy
) -> Check:
    before, after = (record.get("memory") or {} for record in records)
    open_check = Check(cell, settings, MEMORY, Verdict.UNDECIDED, unit="bytes")
    for name, memory in (("A", before), ("B", after)):
        if memory.get("peak_allocated_bytes") is None:
            reason = memory.get("reason") or "it was made without --memory"
            return replace(open_check, reason=f"no peak is predicted in {name}: {reason}")
    limits = [memory["limit_bytes"] for memory in (before, after) if memory.get("limit_bytes")]
    if len(set(limits)) > 1:
        sizes = " and ".join(f"{limit / 2**30:.2f} GiB" for limit in limits)
        return replace(open_check, reason=f"predicted for two GPUs, with {sizes}")
    if before["how"] != after["how"]:
        reason = f"predicted in two ways: {before['how']} and {after['how']}"
        return replace(open_check, reason=reason)
    peaks = (float(before["peak_allocated_bytes"]), float(after["peak_allocated_bytes"]))
    check, reasons = memory_check(cell, settings, peaks, policy.memory), []
    if before["verdict"] != "oom" == after["verdict"]:
        check = replace(check, verdict=Verdict.WORSE)
        reasons = [f"{before['verdict']} → oom in {limits[0] / 2**30:.2f} GiB"]
    if check.verdict is Verdict.SAME:
        return check
    reasons += _grown(before, after, 1 if peaks[1] > peaks[0] else -1)
    return replace(check, reason="; ".join(reasons))


def _grown(before: Record, after: Record, sign: int) -> list[str]:
    """Return what grew, or shrank if the sign is -1: a role at the peak, modules and operations."""
    # Programs before this one did not write them.
    roles, modules = (
        _changes(before.get(name, {}), after.get(name, {}), sign)
        for name in ("at_peak_bytes", "module_bytes")
    )
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
