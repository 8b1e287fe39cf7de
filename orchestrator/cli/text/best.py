"""The output of `sweep best`: a table of the candidates of each group, and sentences about it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from orchestrator.common.text import counted, shell_path, value_text
from orchestrator.config.cell_labels import CellLabels
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
from orchestrator.store.cell_state import PENDING
from orchestrator.sweep.best_groups import Entrant, Goal, SearchGroup, sure_share
from orchestrator.sweep.best_search import BestFound, BestSearch, may_run
from tasks.spec.axes import Choice, axes_of
from tasks.spec.messages import assignments
from tasks.spec.status import OUT_OF_MEMORY

_UNSURE = {
    "borderline": "within 3 % of the limit",
    "perhaps": "may not fit",
    "unlikely": "hardly fits",
}

_LESS_MEMORY = 0.99  # share of a peak


def describe_best(
    request: SweepRequest, found: BestFound, goal: Goal, screen: Screen, is_plan: bool
) -> Iterator[str]:
    """Yield a table for each group and the sentences about it, in lines."""
    search = BestSearch(found.groups, goal)
    label = CellLabels([group.entrants[group.default].cell for group in found.groups])
    for number, group in enumerate(found.groups):
        if len(found.groups) > 1:
            yield f"{label(group.entrants[group.default].cell)}:"
        table = _candidates(group, search.expected_s(number), goal)
        yield dense_table_text(table, screen, "search fewer axes")
        best = group.winner
        if best is None:
            yield _no_answer(request, group, goal, is_plan)
            continue
        yield from _sentences(group, best, found.ends[number])
        folder = shell_path(str(request.run))
        yield f"its parameters and measurements: sweep show {folder} {best.cell.id}"
    if any(one.prediction for group in found.groups for one in group.entrants) and found.gpu:
        yield f"memory predicted for: {found.gpu.name}"


def config_text(request: SweepRequest, found: BestFound) -> str:
    """Return a config in YAML with a grid for the best configuration of each group."""
    config = request.config
    lines = [
        "# Found by `sweep best`. Only the speed was measured, not the loss.",
        f"name: {json.dumps(config.name + '-best')}",
    ]
    # JSON is YAML.
    settings = config.model_dump(mode="json", include={"instruments", "limits", "env"})
    lines += [*(f"{name}: {json.dumps(value)}" for name, value in settings.items()), "grids:"]
    winners = {group.winner.cell.id: group.winner for group in found.groups if group.winner}
    for best in winners.values():
        if best.speed is None:
            continue
        low, middle, high = (
            f"{1e3 * seconds:.2f}"
            for seconds in (best.speed.low_s, best.speed.step_s, best.speed.high_s)
        )
        evidence = f"cell {best.cell.id}, {middle} ms [{low}, {high}]"
        lines += [f"  # {evidence}", f"  - task: {best.cell.task}", "    fixed:"]
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
        words += filter(None, [_why_not_measured(one, goal)])
        step, against = MISSING, MISSING
        if one.speed:
            step = milliseconds(1e3 * one.speed.step_s)
            step = step._replace(spread=HOST_MARK) if _has_mark(one) else step
            if default.speed:
                against = quantity(default.pace_s / one.pace_s, ".2f")
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


def _why_not_measured(one: Entrant, goal: Goal) -> str:
    if one.speed:
        return ""
    if one.status != PENDING:
        return f"ended as {one.status}"
    if one.verdict == "oom":
        return "does not fit"
    if one.verdict in _UNSURE:
        remedy = "" if goal.try_perhaps else ": --try-perhaps measures it"
        return _UNSURE[one.verdict] + remedy
    return "was not measured" if one.was_tried else ""


def _no_answer(request: SweepRequest, group: SearchGroup, goal: Goal, is_plan: bool) -> str:
    """Return why a group has no winner."""
    if count := sum(may_run(one, goal) for one in group.entrants):
        line = f"{count} of {counted(len(group.entrants), 'candidate')} may be measured"
        return line if is_plan else f"no answer yet: {line}"
    if any(one.status not in (PENDING, *OUT_OF_MEMORY) for one in group.entrants):
        folder = shell_path(str(request.run))
        return f"no answer: no candidate has a measured step. See sweep status {folder}"
    return _nothing_fits(group, goal)


def _sentences(group: SearchGroup, best: Entrant, end: str) -> Iterator[str]:
    default = group.entrants[group.default]
    yield _verdict(group, best, default)
    others = [one for one in group.alike(best) if one is not best]
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
    if changed := _other_numbers(best, default):
        yield (
            f"{', '.join(changed)}: trains with other numbers than the default. Only the speed was "
            "measured, not the loss"
        )
    if end:
        yield f"ended because {end}"
    yield f"measured {len(group.measured)} of {counted(len(group.entrants), 'candidate')}"


def _has_mark(one: Entrant) -> bool:
    """Return True for a cell on a GPU whose speed the CPU limits."""
    return one.is_cpu_bound and one.cell.params.device == "cuda"


def _verdict(group: SearchGroup, best: Entrant, default: Entrant) -> str:
    if best is default:
        fastest = group.measured[0]
        if fastest is default:
            return f"best: the default, {_words(default)}; no measured candidate is faster"
        taken, limit = fastest.pace_s / default.pace_s, sure_share(fastest, default)
        reason = f"only less than {100 * limit:.0f} % is"
        if taken <= limit:
            reason = "their intervals overlap. --set timing=adaptive measures more steps"
        return (
            f"best: the default, {_words(default)}. {_words(fastest)} took {100 * taken:.0f} % of "
            f"its time, which is not surely faster: {reason}"
        )
    line = f"best: {_words(best)}"
    if default.speed is None:
        return f"{line}; the default has no measured step to compare with"
    # From the ends of both intervals.
    low = default.pace_interval_s[0] / best.pace_interval_s[1]
    high = default.pace_interval_s[1] / best.pace_interval_s[0]
    return (
        f"{line}: {ratio(default.pace_s / best.pace_s)} [{ratio(low)}, {ratio(high)}] as fast as "
        f"the default, {_words(default)}"
    )


def _contributions(group: SearchGroup, best: Entrant) -> Iterator[str]:
    """Yield what each option of the best adds, where a candidate differs in it alone."""
    for name, value in best.options.items():
        without = [
            one
            for one in group.measured
            if one.options[name] != value
            and all(
                one.options[other] == best.options[other] for other in best.options if other != name
            )
        ]
        if without:
            other = without[0]
            yield (
                f"{name}={value_text(value)} instead of {value_text(other.options[name])}: "
                f"{ratio(other.pace_s / best.pace_s)} as fast"
            )


def _pareto(group: SearchGroup, best: Entrant) -> Iterator[str]:
    """Yield the slower candidates that no other one beats in both speed and memory."""
    texts, least = [], best.speed.peak_bytes if best.speed else None
    if least is None:
        return
    for one in group.measured[group.measured.index(best) :]:
        peak = one.speed.peak_bytes if one.speed else None
        if peak and peak < _LESS_MEMORY * least:
            texts.append(f"{_words(one)} ({to_gib(peak)} GiB)")
            least = peak
    yield f"less memory, and slower: {'; '.join(texts) or 'no measured candidate'}"


def _nothing_fits(group: SearchGroup, goal: Goal) -> str:
    """Return what comes nearest if no candidate surely fits."""
    predicted = []
    for one in group.entrants:
        peak = one.prediction.peak_bytes("peak_reserved_bytes") if one.prediction else None
        if peak:
            predicted.append((peak, _words(one)))
    line = "no candidate surely fits"
    if predicted:
        peak, words = min(predicted)
        line += f"; {words} comes nearest, with {to_gib(peak)} GiB reserved"
    if not goal.try_perhaps and any(one.verdict in _UNSURE for one in group.entrants):
        line += ". Add --try-perhaps to measure what may fit"
    smaller = [name for name in ("batch_size", "checkpointing") if name not in goal.over]
    if smaller:
        line += f". Another {' or '.join(smaller)} may need less: add it to --over"
    return line


def _other_numbers(best: Entrant, default: Entrant) -> list[str]:
    """Return the options of the best that train with other numbers than the default."""
    axes = axes_of(type(best.cell.params))
    changed = []
    for name, value in best.options.items():
        before, axis = default.options[name], axes[name]
        is_alike = {str(value), str(before)} <= set(axis.alike)
        if value != before and axis.choice is Choice.OTHER_NUMBERS and not is_alike:
            changed.append(f"{name}={value_text(value)}")
    return changed


def _words(one: Entrant) -> str:
    return " ".join(assignments(one.options))
