"""Find earlier attempts that no longer count, because the model has changed since."""

from __future__ import annotations

import json

from orchestrator.planning.invocation import INVOCATION, read_invocations
from orchestrator.planning.request import SweepRequest
from orchestrator.store.layout import ATTEMPTS
from tasks.spec.status import Status


def obsolete_attempts(request: SweepRequest) -> frozenset[tuple[str, int]]:
    """Return the attempts without success at a model whose source was another, by cell and number.

    The source of a model that could not be built is that of the command which tried it.
    """
    models = {
        cell.id: model
        for cell in request.expansion.cells
        if (model := getattr(cell.params, "model", None))
    }
    if not models or not request.run.exists:
        return frozenset()
    obsolete = set()
    now = request.model_sources()
    before = {one.time: one.sources or {} for one in read_invocations(request.run)}
    columns = ["cell", "attempt", "status", "facts"]
    for cell, number, status, text in request.run.rows(ATTEMPTS, columns):
        if cell not in models or status == Status.OK:
            continue
        facts, model = json.loads(text), models[cell]
        of_command = before.get(facts.get(INVOCATION), {}).get(model)
        source = facts.get("model_source") or of_command
        if source and now[model] not in (None, source):
            obsolete.add((cell, number))
    return frozenset(obsolete)
