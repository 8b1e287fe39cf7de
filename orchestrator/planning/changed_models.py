"""Find earlier attempts that no longer count, because the model has changed since."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from orchestrator.planning.invocation import INVOCATION, read_invocations
from orchestrator.store.layout import ATTEMPTS
from orchestrator.store.run import Run
from tasks.spec.cell import Cell
from tasks.spec.status import Status


def obsolete_attempts(
    run: Run, cells: Iterable[Cell], sources: Mapping[str, str | None]
) -> frozenset[tuple[str, int]]:
    """Return the attempts without success at a model whose source was another, by cell and number.

    The source of a model that could not be built is that of the command which tried it.

    sources: the digest of each user-defined model as it is now.
    """
    models = {cell.id: getattr(cell.params, "model", None) for cell in cells}
    if not sources or not run.exists:
        return frozenset()
    obsolete = set()
    before = {one.time: one.sources or {} for one in read_invocations(run)}
    columns = ["cell", "attempt", "status", "facts"]
    for cell, number, status, text in run.rows(ATTEMPTS, columns):
        model = models.get(cell)
        if model is None or status == Status.OK:
            continue
        facts = json.loads(text)
        of_command = before.get(facts.get(INVOCATION), {}).get(model)
        source = facts.get("model_source") or of_command
        if source and sources.get(model) not in (None, source):
            obsolete.add((cell, number))
    return frozenset(obsolete)
