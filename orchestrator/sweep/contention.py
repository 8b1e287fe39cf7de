"""Did cells that were measured beside others suffer from it? A sample of them is measured again, alone, and held against that.

    rows of the run ─who ran beside others→ sample ─run_sweep, one at a time→ results/NAME/alone ─compare→ what they differ in

What is measured alone is a run of its own within the first one's folder: nothing that reads the first finds its rows, and
whatever reads a run reads it, `sweep compare` included. It is kept and resumed like any other.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from orchestrator.common.text import so_many
from orchestrator.config.grid import Expansion
from orchestrator.config.selection import choose_sample
from orchestrator.planning.invocation import new_invocation
from orchestrator.planning.options import Choice
from orchestrator.planning.request import Request
from orchestrator.planning.resumption import note_finished
from orchestrator.scheduling.one_at_a_time import OneByOne, Placed
from orchestrator.scheduling.ray_scheduler import ReusableScheduler
from orchestrator.store.run import Run
from orchestrator.sweep.pipeline import run_sweep
from orchestrator.sweep.result import Summary
from orchestrator.sweep.runtime import Means
from tasks.spec.cell import Cell
from tasks.spec.status import Status

FOLDER = "alone"
_SHARE = 0.05
_FEWEST = 3


def run_and_check(request: Request, choice: Choice, means: Means) -> Summary:
    """`run_sweep`, and then a sample of its cells again, alone; says what that came to. The summary is of both."""
    began = time.monotonic()
    with lasting(means) as once:
        summary = run_sweep(request, choice, replace(once, more_follows=True))
        if summary.stopped or summary.late or summary.broken:
            return summary
        placed = cells_beside_others(request)
        sample = choose_sample(
            [cell for cell in request.expansion.cells if cell.id in placed], _SHARE, _FEWEST
        )
        if not sample:
            means.say(
                "contention: no timed cell ran beside another, so that there is nothing to check"
            )
            _note_finished(request, choice, means, summary)
            return summary
        means.say(
            f"contention: measuring {len(sample)} of the {len(placed)} cells that ran beside others again, alone"
        )
        left = (
            None if means.time_limit_s is None else means.time_limit_s - (time.monotonic() - began)
        )
        alone = request_alone(request, sample)
        alone_by_one = replace(
            once, open_scheduler=lambda example: OneByOne(once.open_scheduler(example), placed)
        )
        how = replace(
            alone_by_one, time_limit_s=left, mixed=True
        )  # an earlier sample may be of another environment
        checked = run_sweep(
            alone, Choice(repeat=choice.repeat, retry=choice.retry, fresh=choice.fresh), how
        )
    for line in describe_contention(alone.run, request.run, placed, sample):
        means.say(line)
    whole = _of_both(summary, checked)
    _note_finished(request, choice, means, whole)
    return whole


def _of_both(before: Summary, alone: Summary) -> Summary:
    """What was measured is what the first did, and how the second ended is how both did."""
    return replace(
        before,
        before=Counter() if alone.cells else before.before,
        stopped=alone.stopped,
        broken=alone.broken,
        late=alone.late,
        late_s=alone.late_s,
        left=alone.left,
    )


def _note_finished(request: Request, choice: Choice, means: Means, summary: Summary) -> None:
    if summary.is_at_its_end:
        with request.run.opened_for_writing() as writer:
            note_finished(
                writer,
                new_invocation(request, choice, None, checks=True, skips=means.skip_predicted_oom),
            )


@contextmanager
def lasting(means: Means) -> Iterator[Means]:
    """With one scheduler for several runs."""
    scheduler = ReusableScheduler(means.open_scheduler)
    try:
        yield replace(means, open_scheduler=scheduler.opened)
    finally:
        scheduler.end()


def cells_beside_others(request: Request) -> dict[str, Placed]:
    """By its id, each cell that was timed, and where: all of its successes that count beside others on that host."""
    import pandas as pd

    from orchestrator.analysis.cells import that_count
    from orchestrator.analysis.concurrency import SOME, neighbours

    attempts = request.run.read(
        "attempts", ["cell", "attempt", "status", "facts", "started_at", "wall_s", "replaces"]
    )
    if attempts.empty:
        return {}
    facts = pd.DataFrame(
        [_facts(text) for text in attempts["facts"]],
        columns=["host", "gpu", "uuid"],
        index=attempts.index,
    )
    attempts = attempts.join(facts)
    attempts["beside"] = neighbours(attempts) >= SOME
    well = that_count(attempts).sort_values(["cell", "attempt"])
    beside = well.groupby("cell").filter(lambda own: bool(own["beside"].all()))
    timed = set(_timed(request.run)) & {cell.id for cell in request.expansion.cells}
    latest = beside[beside["cell"].isin(timed)].groupby("cell").tail(1)
    return {
        row["cell"]: Placed(row["host"], row["gpu"], row["uuid"])
        for row in latest.to_dict("records")
    }


def _facts(text: str) -> tuple[str, str, str]:
    facts = json.loads(text)
    gpu = facts.get("visible_devices") or "" if facts.get("gpu_uuid") else ""
    return facts.get("host") or "", gpu, facts.get("gpu_uuid") or ""


def _timed(run: Run) -> Iterable[str]:
    from orchestrator.analysis.timing_columns import step_attempts

    steps = step_attempts(run.read("samples", categories=True))
    return [str(cell) for cell in steps["cell"].unique()]


def request_alone(request: Request, sample: Iterable[Cell]) -> Request:
    """The same of these cells, in a folder within, with what the run has compiled already."""
    cache = {"TORCHINDUCTOR_CACHE_DIR": str((request.run.folder / "cache" / "inductor").absolute())}
    config = request.config.model_copy(update={"env": {**cache, **request.config.env}})
    return replace(
        request, config=config, expansion=Expansion(tuple(sample)), run=request.run.within(FOLDER)
    )


def describe_contention(
    alone: Run, beside: Run, placed: Mapping[str, Placed], sample: Iterable[Cell]
) -> Iterator[str]:
    """What being alone changed, in one line and cell by cell: of those that ended well again, on a GPU of the same kind."""
    from orchestrator.analysis.comparison import Verdict, compare
    from orchestrator.report.formats.markdown import describe_comparison

    now, before = _gpus(alone), _gpus(beside)
    chosen = {cell.id for cell in sample}
    cells = frozenset(
        cell for cell in now.keys() & placed.keys() & chosen if now[cell].kind == before[cell].kind
    )
    begun = {cell for (cell,) in alone.rows("attempts", ["cell"])}
    if missing := len((chosen & begun) - cells):
        yield f"contention: {so_many(missing)} did not end well alone, or on another kind of GPU: sweep report {alone}"
    if not cells:
        return
    report = replace(compare(alone, beside, only=cells, by_host=False), only_before=0, only_after=0)
    ratios = sorted(one.ratio for one in report.comparisons)
    counts = (
        (verdict, sum(one.verdict is verdict for one in report.comparisons)) for verdict in Verdict
    )
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts if count)
    yield (
        f"contention: {so_many(len(ratios))} again alone: beside others a step took {ratios[0]:.3f} to {ratios[-1]:.3f} × as "
        f"long ({report.geometric_mean:.3f} in the mean): {said}"
    )
    if elsewhere := sum(now[cell].uuid != placed[cell].uuid for cell in cells):
        yield f"{so_many(elsewhere)} alone on another GPU than before, which may be the faster or the slower one"
    yield f"A: alone, {alone}; B: beside others, {beside}"
    yield from describe_comparison(report)


@dataclass(frozen=True)
class _Gpu:
    kind: str
    uuid: str


def _gpus(run: Run) -> dict[str, _Gpu]:
    """By cell, where it was measured at last."""
    rows = sorted(
        row
        for row in run.rows("attempts", ["cell", "attempt", "status", "facts"])
        if row[2] == Status.OK
    )
    latest = {cell: json.loads(facts) for cell, _, _, facts in rows}
    return {
        cell: _Gpu(facts.get("gpu") or "", facts.get("gpu_uuid") or "")
        for cell, facts in latest.items()
    }
