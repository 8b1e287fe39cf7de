"""The output of `sweep best`: a table of the candidates of each group, and sentences about it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from orchestrator.analysis.fastest import (
    SURELY_FASTER,
    confirm,
    sure_share,
    times_as_fast,
)
from orchestrator.cli.text.changes import changes_of
from orchestrator.common.text import counted, format_seconds, shell_path, value_text
from orchestrator.config.cell_labels import CellLabels
from orchestrator.hardware.gpu_catalog import GpuModel
from orchestrator.planning.duration_estimate import DurationConditions, DurationEstimator
from orchestrator.planning.request import SweepRequest
from orchestrator.report.formats.terminal import Screen, dense_table_text
from orchestrator.report.tables.formatters import to_gib
from orchestrator.report.tables.layouts import text_table
from orchestrator.report.tables.table import (
    MISSING,
    NOTES,
    Entry,
    RenderedTable,
    milliseconds,
    quantity,
)
from orchestrator.report.text.numbers import HOST_MARK, ratio
from orchestrator.store.cell_state import PENDING, read_states
from orchestrator.sweep.best_groups import HELD_AXES, Entrant, Goal, SearchGroup
from orchestrator.sweep.best_search import BestFound, BestSearch, may_run, why_not_measured
from tasks.spec.axes import Choice, axes_of, leave_out
from tasks.spec.messages import assignments
from tasks.spec.status import OUT_OF_MEMORY

_MOST_ROUNDS = 100  # that --confirm takes


def describe_best(
    request: SweepRequest, found: BestFound, goal: Goal, screen: Screen
) -> Iterator[str]:
    """Yield a table for each group and the sentences about it, in lines."""
    search = BestSearch(found.groups, goal)
    label = CellLabels([group.entrants[group.default].cell for group in found.groups])
    has_explained = False
    for number, group in enumerate(found.groups):
        if len(found.groups) > 1:
            yield f"{label(group.entrants[group.default].cell)}:"
        expected_s = search.expected_s(number)
        yield dense_table_text(_candidates(group, expected_s, goal), screen, "search fewer axes")
        best, step = group.winner, search.next(number)
        folder = shell_path(str(request.run))
        if best:
            yield from _sentences(group, best, found.ends[number], goal)
            yield "its parameters and measurements:"
            yield f"  sweep show {folder} {best.cell.id}"
        if step.entrant is not None:
            yield _not_yet(request, group.entrants[step.entrant], group, goal, found.gpu)
        elif best:
            continue
        elif any(one.status not in (PENDING, *OUT_OF_MEMORY) for one in group.entrants):
            yield "no answer: no candidate has a measured step. What failed:"
            yield f"  sweep status {folder}"
        elif has_explained:  # each takes up to 20 predictions
            yield "no candidate surely fits. For what would fit, choose this model with --where"
        else:
            yield from _nothing_fits(request, group, goal, found.gpu)
            has_explained = True
    if any(one.prediction for group in found.groups for one in group.entrants) and found.gpu:
        yield f"memory predicted for: {found.gpu.name}"


def what_is_open(group: SearchGroup, end: str, goal: Goal) -> str:
    """Return what the command would still measure for an answer; empty if there is nothing.

    end: why the search of the group ended; empty if it did not.
    """
    if not end:
        return f"not finished: {_may_be_measured(group, goal)}"
    if group.rounds is not None and group.rounds < goal.confirm:
        return f"not confirmed: {group.rounds} of {goal.confirm} rounds were measured"
    return ""


def config_text(request: SweepRequest, found: BestFound, goal: Goal) -> str:
    """Return a config in YAML with a grid for the best configuration of each group."""
    config = request.config
    lines = [
        "# Found by `sweep best`. Only the speed was measured, not the loss.",
        f"name: {json.dumps(config.name + '-best')}",
    ]
    # JSON is YAML.
    settings = config.model_dump(mode="json", include={"instruments", "limits", "env"})
    lines += [*(f"{name}: {json.dumps(value)}" for name, value in settings.items()), "grids:"]
    written = set()
    for group, end in zip(found.groups, found.ends, strict=True):
        best = group.winner
        if best is None or best.speed is None or best.cell.id in written:
            continue
        written.add(best.cell.id)
        low, middle, high = (
            f"{1e3 * seconds:.2f}"
            for seconds in (best.speed.low_s, best.speed.step_s, best.speed.high_s)
        )
        evidence = f"cell {best.cell.id}, {middle} ms [{low}, {high}]"
        rounds = _confirmed(group)
        comments = [evidence, what_is_open(group, end, goal) or rounds]
        lines += [f"  # {comment}" for comment in comments if comment]
        lines += [f"  - task: {best.cell.task}", "    fixed:"]
        values = {**best.cell.params.non_default, **best.options}
        lines += [f"      {name}: {json.dumps(value)}" for name, value in values.items()]
    return "\n".join(lines) + "\n"


def _candidates(group: SearchGroup, expected_s: Sequence[float], goal: Goal) -> RenderedTable:
    """Return a table with a row per candidate: the measured ones first, the fastest first."""
    best, default = group.winner, group.entrants[group.default]
    others = [pair for pair in zip(group.entrants, expected_s, strict=True) if not pair[0].speed]
    others.sort(key=lambda pair: pair[1] / pair[0].tokens)
    rows = []
    for one, guess_s in [*((one, 0.0) for one in group.measured), *others]:
        options = {name: value_text(value) for name, value in one.options.items()}
        words = [
            word for word, is_it in (("best", one is best), ("default", one is default)) if is_it
        ]
        if one.speed and one.speed.is_beaten:
            words.append("ended early: each step slower than 110 % of the best")
        words += filter(None, [why_not_measured(group, one, goal)])
        step, against = MISSING, MISSING
        if one.speed:
            step = milliseconds(1e3 * one.speed.step_s)
            step = step._replace(spread=HOST_MARK) if _has_mark(one) else step
            if default.speed:
                against = quantity(times_as_fast(one, default)[0], ".2f")
                if one is not default and confirm(one, default):
                    words.append("× default: of the rounds")
        has_expectation = not one.speed and (one.is_scale_known or group.measured)
        peak = one.speed.peak_bytes if one.speed else None
        predicted = one.prediction.peak_bytes("peak_allocated_bytes") if one.prediction else None
        has_tokens = one.speed and hasattr(one.cell.params, "tokens")
        measures = {
            "step": step,
            NOTES: Entry("; ".join(words)),
            "tokens/s": quantity(1 / one.pace_s, ",.0f") if has_tokens else MISSING,
            "× default": against,
            "peak": to_gib(peak),
            "expected": milliseconds(1e3 * guess_s) if has_expectation else MISSING,
            "predicted": MISSING if peak else to_gib(predicted),
        }
        rows.append((options, measures))
    return text_table("Candidates", rows)


def _not_yet(
    request: SweepRequest, first: Entrant, group: SearchGroup, goal: Goal, gpu: GpuModel | None
) -> str:
    """Return how many candidates may be measured, and how long the next one is expected to take."""
    line = "not finished" if group.measured else "no answer yet"
    line += f": {_may_be_measured(group, goal)}; next: {_words(first)}"
    states = read_states(request.run) if request.run.exists else {}
    conditions = DurationConditions.of(request.settings, gpu.device if gpu else None)
    estimator = DurationEstimator(request.expansion.cells, states, conditions)
    if estimator.can_estimate([first.cell]):
        line += f", about {format_seconds(max(1.0, estimator.seconds(first.cell)))}"
    return line


def _may_be_measured(group: SearchGroup, goal: Goal) -> str:
    count = sum(may_run(one, goal) for one in group.entrants)
    return f"{count} of {counted(len(group.entrants), 'candidate')} may be measured"


def _sentences(group: SearchGroup, best: Entrant, end: str, goal: Goal) -> Iterator[str]:
    default = group.entrants[group.default]
    yield _answer(group, best, default)
    yield from _confirmation(group, best, end, goal)
    contended = sum(one.speed is not None and one.speed.is_contended for one in group.measured)
    if contended:
        yield (
            f"{contended} of {counted(len(group.measured), 'measured candidate')} ran while other "
            "processes used their cores, and their times may be too long: search again in another "
            "folder when the machine is quiet"
        )
    # A best candidate other than the default is surely faster than that.
    others = [one for one in group.alike(best) if one is not best and one is not default]
    if best.is_cpu_bound and others and best is group.measured[0]:
        names = "; ".join(_words(one) for one in others)
        yield f"within the noise of this CPU, as fast: {names}"
    if any(map(_has_mark, group.measured)):
        line = f"{HOST_MARK}: the GPU waits for the CPU"
        if all(map(_has_mark, group.measured)) and "batch_size" not in best.options:
            line += (
                " in every candidate. A larger batch_size may help more: add --over batch_size=…"
            )
        yield line
    if best is not default:
        yield from _contributions(group, best)
    yield from _pareto(group, best)
    if changed := _other_numbers(best, default, goal):
        yield (
            f"{', '.join(changed)}: trains with other numbers than the default. Only the speed was "
            "measured, not the loss"
        )
    if end:
        yield f"ended because {end}"
    yield f"measured {len(group.measured)} of {counted(len(group.entrants), 'candidate')}"


def _has_mark(one: Entrant) -> bool:
    """Return True for a cell on a GPU whose speed the CPU limits."""
    is_known = one.speed is not None and one.speed.is_cpu_bound is True
    return is_known and one.cell.params.device == "cuda"


def _answer(group: SearchGroup, best: Entrant, default: Entrant) -> str:
    """Return the answer: what is best, and how it compares with the default."""
    if best is not default:
        line = f"best: {_words(best)}"
        if default.speed is None:
            return f"{line}; the default has no measured step to compare with"
        gained, low, high = times_as_fast(best, default)
        ends = f" [{ratio(low)}, {ratio(high)}]" if high < math.inf else ""
        return f"{line}: {ratio(gained)}{ends} as fast as the default, {_words(default)}"
    line, challenger = f"best: the default, {_words(default)}", group.challenger
    if challenger is None:
        return f"{line}; no measured candidate is faster"
    if group.confirmation:
        return line
    taken, limit = challenger.pace_s / default.pace_s, sure_share(challenger, default)
    reason = f"only less than {_percent(limit)} is"
    if taken <= limit:
        reason = "their intervals overlap"
    if not all(one.speed and one.speed.has_interval for one in (challenger, default)):
        reason = "fewer than 6 steps have no interval at 95 %"
    line += f". {_words(challenger)} took {_percent(taken)} of its time"
    return f"{line}, which is not surely faster: {reason}"


def _confirmation(group: SearchGroup, best: Entrant, end: str, goal: Goal) -> Iterator[str]:
    """Yield what the rounds show, or how many would decide it.

    If this command has something left to measure, then that comes first, and no rounds are advised.
    """
    default, challenger, found = group.entrants[group.default], group.challenger, group.confirmation
    if challenger is None:
        if goal.confirm and end:
            yield "nothing to confirm: --confirm measures the default and a faster candidate again"
        return
    still_open = what_is_open(group, end, goal)
    line = still_open if still_open and end else _confirmed(group)
    if line:
        yield line
    if still_open:
        return
    if found is None and best is default:
        yield _deciding(challenger, default, 3)
    elif found and found.is_undecided and found.rounds < _MOST_ROUNDS:
        yield _deciding(challenger, default, min(2 * found.rounds, _MOST_ROUNDS))


def _confirmed(group: SearchGroup) -> str:
    """Return what the rounds show; empty without rounds."""
    challenger, found = group.challenger, group.confirmation
    if challenger is None or found is None:
        return ""
    line = (
        f"measured {found.rounds} more times each: {_words(challenger)} takes "
        f"{_percent(found.ratio)} of the time of the default, at most {_percent(found.upper)} with "
        "95 % confidence"
    )
    limit = _percent(SURELY_FASTER)
    if found.is_faster:
        return f"{line}: confirmed, less than {limit}"
    if found.is_undecided:
        return f"{line}: undecided, because only less than {limit} is surely faster"
    return f"{line}: not less than {limit}"


def _deciding(challenger: Entrant, default: Entrant, rounds: int) -> str:
    """Return what would decide between two candidates, and what it costs."""
    speeds = [one.speed for one in (challenger, default) if one.speed]
    left = max(rounds - len(speed.rounds) for speed in speeds)
    seconds = left * sum(speed.wall_s for speed in speeds)
    return (
        f"to decide it: --confirm {rounds} measures both {left} more times, which takes about "
        f"{format_seconds(max(1.0, seconds))}"
    )


def _percent(share: float) -> str:
    return f"{100 * share:,.0f} %" if share >= 10 else f"{100 * share:.3g} %"


def _contributions(group: SearchGroup, best: Entrant) -> Iterator[str]:
    """Yield what each option of the best adds, where a candidate differs in it alone."""
    for name, other in group.without_options(best):
        yield (
            f"{name}={value_text(best.options[name])} instead of {value_text(other.options[name])}: "
            f"{ratio(times_as_fast(best, other)[0])} as fast"
        )


def _pareto(group: SearchGroup, best: Entrant) -> Iterator[str]:
    """Yield the slower candidates that no other one beats in both speed and memory."""
    if best.speed is None or best.speed.peak_bytes is None:
        return
    texts = []
    for one in group.front(best):
        assert one.speed is not None
        texts.append(f"{_words(one)} ({to_gib(one.speed.peak_bytes)} GiB)")
    yield f"less memory, and slower: {'; '.join(texts) or 'no measured candidate'}"


def _nothing_fits(
    request: SweepRequest, group: SearchGroup, goal: Goal, gpu: GpuModel | None
) -> Iterator[str]:
    """Yield what comes nearest if no candidate surely fits, and what would make it fit."""
    peaks = {}
    for number, one in enumerate(group.entrants):
        peak = one.prediction.peak_bytes("peak_reserved_bytes") if one.prediction else None
        if peak:
            peaks[number] = peak
    line = "no candidate surely fits"
    if all(one.status in OUT_OF_MEMORY for one in group.entrants):
        line = "every candidate ran out of memory"
    nearest = group.entrants[min(peaks, key=peaks.__getitem__)] if peaks else None
    if nearest:
        line += (
            f"; {_words(nearest)} comes nearest, with {to_gib(min(peaks.values()))} GiB reserved"
        )
    if not goal.try_perhaps and any(
        may_run(one, replace(goal, try_perhaps=True)) for one in group.entrants
    ):
        line += ". Add --try-perhaps to measure what may fit"
    yield line
    if nearest:
        yield from changes_of(nearest.cell, _words(nearest), gpu, request.import_paths)
    if "batch_size" not in goal.over:
        yield "a smaller batch_size needs less, and trains with other numbers: add it to --over"


def _other_numbers(best: Entrant, default: Entrant, goal: Goal) -> list[str]:
    """Return the options of the best that train with other numbers than the default."""
    axes = axes_of(type(best.cell.params))
    changed = []
    # Micro-batches of the same tokens in all add up to the same gradients.
    held = HELD_AXES if goal.is_held else ()
    for name, value in leave_out(best.options, held).items():
        before, axis = default.options[name], axes[name]
        is_alike = {str(value), str(before)} <= set(axis.alike)
        if value != before and axis.choice is Choice.OTHER_NUMBERS and not is_alike:
            changed.append(f"{name}={value_text(value)}")
    return changed


def _words(one: Entrant) -> str:
    return " ".join(assignments(one.options))
