"""Recovery of attempts whose driver was killed before it could store their outcomes."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.common.provenance import git_commit
from orchestrator.execution.measurement import recover
from orchestrator.planning.invocation import Invocation, measurement_settings
from orchestrator.store.run_writer import RunWriter
from orchestrator.sweep.outcome_log import measured_by


def recover_attempts(writer: RunWriter) -> int:
    """Store the outcomes that a killed driver left in the folders of attempts. Return how many.

    This comes before the plan, which then sees their rows.
    """
    invocation = _last_invocation(writer)
    recorded = writer.rows("attempts", ["cell", "attempt"])
    finished = list(filter(None, map(recover, writer.attempts_without_row(recorded))))
    for outcome in finished:
        writer.append(measured_by(invocation, outcome), invocation.commit)
    writer.merge_parts()
    return len(finished)


def _last_invocation(writer: RunWriter) -> Invocation:
    manifest = writer.read_manifest()
    entries = manifest.get("invocations", [])
    last = Invocation.from_json(entries[-1]) if entries else Invocation(None, commit=git_commit())
    if last.asked is None:  # an older version stored the settings with the config alone
        return replace(last, asked=measurement_settings(manifest.get("config", {})))
    return last
