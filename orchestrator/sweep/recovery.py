"""Outcomes of attempts whose driver was killed before it could store them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from orchestrator.common.provenance import PROGRAM_SOURCE
from orchestrator.execution.attempt import recover
from orchestrator.planning.invocation import INVOCATION
from orchestrator.planning.prior_results import measurement_settings
from orchestrator.store.run_writer import RunWriter
from tasks.spec.outcome import Outcome


def measured_by(invocation: Mapping[str, Any], outcome: Outcome) -> Outcome:
    told = {
        **invocation["asked"],
        PROGRAM_SOURCE: invocation.get(PROGRAM_SOURCE),
        INVOCATION: invocation["time"],
    }
    return replace(outcome, facts={**outcome.facts, **told})


def recover_attempts(writer: RunWriter, commit: str | None) -> int:
    """Keeps what was measured for a driver that died before it could write it down."""
    before = writer.read_manifest()
    last: dict[str, Any] = (before.get("invocations") or [{}])[-1]
    invocation = {
        "time": None,
        "asked": measurement_settings(before.get("config", {})),
        **last,
    }  # programs of before kept the sweep's alone
    recorded = writer.rows("attempts", ["cell", "attempt"])
    outcomes = [
        outcome
        for attempt in writer.attempts_without_row(recorded)
        if (outcome := recover(attempt))
    ]
    for outcome in outcomes:
        writer.append(measured_by(invocation, outcome), last.get("commit", commit))
    writer.merge_parts()
    return len(outcomes)
