"""The output of `sweep best`: a table of the candidates of each group, and sentences about it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from orchestrator.common.text import counted, shell_word, value_text
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
from orchestrator.report.text.numbers import ratio
from orchestrator.sweep.best_search import BestFound, BestSearch, Entrant, Goal, SearchGroup
from tasks.spec.axes import Choice, axes_of
from tasks.spec.messages import assignments

_MAY_NOT_FIT = {"borderline": "within 3 % of the limit", "perhaps": "may not fit"}


def describe_best(
    request: SweepRequest, found: BestFound, goal: Goal, screen: Screen, is_plan: bool
) -> Iterator[str]:
    """Yield a table for each group and the sentences about it, in lines."""
    search = BestSearch(found.groups, goal)
    titles = _titles(found.groups)
    for number, group in enumerate(found.groups):
        if titles[number]:
            yield f"{titles[number]}:"
        table = _candidates(group, search.expected_s(number))
        yield dense_table_text(table, screen, "search fewer axes")
        yield from _sentences(group, found.ends[number], is_plan)
        if not is_plan and (command := _command(request, group)):
            yield f"to run it: {command}"
    if found.gpu is not None:
        yield f"memory predicted for: {found.gpu.name}"


def config_text(request: SweepRequest, found: BestFound) -> str:
    """Return a config in YAML with a grid for the best configuration of each group."""
    lines = [
        "# Found by `sweep best`. Only the speed was measured, not the loss.",
        f"name: {json.dumps(request.config.name + '-best')}",
        f"instruments: {json.dumps(list(request.config.instruments))}",
        "grids:",
    ]
    for group in found.groups:
        best = group.winner
        if best is None or best.speed is None:
            continue
        evidence = f"cell {best.cell.id}, {1e3 * best.speed.step_s:.2f} ms"
        evidence += f" [{1e3 * best.speed.low_s:.2f}, {1e3 * best.speed.high_s:.2f}]"
        lines += [f"  # {evidence}", f"  - task: {best.cell.task}", "    fixed:"]
        # JSON is YAML.
        values = {**best.cell.params.non_default, **best.options}
        lines += [f"      {name}: {json.dumps(value)}" for name, value in values.items()]
    return "\n".join(lines) + "\n"


def _titles(groups: Sequence[SearchGroup]) -> list[str]:
    """Return the values by which each group differs from the others."""
    rows = [group.values for group in groups]
    varying = [
        name
        for name in dict.fromkeys(name for row in rows for name in row)
        if len({repr(row.get(name)) for row in rows}) > 1
    ]
    return [" ".join(assignments({name: row.get(name) for name in varying})) for row in rows]


def _candidates(group: SearchGroup, expected_s: Sequence[float]) -> RenderedTable:
    """Return a table with a row per candidate: the measured ones first, the fastest first."""
    best, default = group.winner, group.entrants[group.default]
    rows = []
    for position, one in enumerate(group.entrants):
        pace = one.pace_s if one.speed else float("inf")
        rows.append((pace, expected_s[position] / one.tokens, one, expected_s[position]))
    rows.sort(key=lambda row: row[:2])
    written = []
    for _, _, one, guess_s in rows:
        options = {name: value_text(value) for name, value in one.options.items()}
        words = [
            word for word, is_it in (("best", one is best), ("default", one is default)) if is_it
        ]
        words += filter(None, [_why_not_measured(one)])
        step, against = MISSING, MISSING
        if one.speed:
            step = milliseconds(1e3 * one.speed.step_s)
            step = step._replace(spread="†") if one.is_cpu_bound else step
            if default.speed:
                against = quantity(default.pace_s / one.pace_s, ".2f")
        peak = one.speed.peak_bytes if one.speed else None
        predicted = one.prediction.peak_bytes("peak_allocated_bytes") if one.prediction else None
        measures = {
            "step": step,
            "tokens/s": quantity(1 / one.pace_s, ",.0f") if one.speed else MISSING,
            "× default": against,
            "peak": to_gib(peak),
            "expected": MISSING if one.speed else milliseconds(1e3 * guess_s),
            "predicted": MISSING if peak else to_gib(predicted),
            NOTES: Entry("; ".join(words)),
        }
        written.append((options, measures))
    return text_table("Candidates", written)


def _why_not_measured(one: Entrant) -> str:
    if one.speed:
        return ""
    if one.status != "pending":
        return f"ended as {one.status}"
    if one.verdict == "oom":
        return "does not fit"
    if one.verdict in _MAY_NOT_FIT:
        return f"{_MAY_NOT_FIT[one.verdict]}: --try-perhaps measures it"
    return "was not measured" if one.was_tried else ""


def _sentences(group: SearchGroup, end: str, is_plan: bool) -> Iterator[str]:
    fitting = [one for one in group.entrants if one.verdict in (None, "fits")]
    if not fitting and not group.measured:
        yield _nothing_fits(group)
        return
    if is_plan and not group.measured:
        yield f"{counted(len(fitting), 'candidate')} of {len(group.entrants)} may be measured"
        return
    best, default = group.winner, group.entrants[group.default]
    if best is None:
        yield "no answer: no candidate has a measured step. See `sweep status`"
        return
    yield _verdict(group, best, default)
    others = [one for one in group.alike(best) if one is not best]
    if best.is_cpu_bound and others:
        names = "; ".join(_words(one) for one in others)
        yield f"within the noise of this CPU, as fast: {names}"
    if all(one.is_cpu_bound for one in group.measured) and best.cell.params.device == "cuda":
        yield (
            "†: the GPU waits for the CPU in every candidate. A larger batch_size may help more: "
            "add --over batch_size=…"
        )
    yield from _contributions(group, best)
    yield _pareto(group)
    if changed := _other_numbers(best, default):
        yield (
            f"{', '.join(changed)}: trains with other numbers than the default. Only the speed was "
            "measured, not the loss"
        )
    if end:
        yield f"ended because {end}"
    spent = len(group.measured)
    yield f"measured {spent} of {len(group.entrants)} candidates"


def _verdict(group: SearchGroup, best: Entrant, default: Entrant) -> str:
    assert best.speed
    if best is default:
        fastest = group.measured[0]
        if fastest is default:
            return f"best: the default, {_words(default)}; no measured candidate is faster"
        return (
            f"best: the default, {_words(default)}. {_words(fastest)} took "
            f"{100 * fastest.pace_s / default.pace_s:.0f} % of its time, which is not surely faster"
        )
    line = f"best: {_words(best)}"
    if default.speed is None:
        return f"{line}; the default has no measured step to compare with"
    # From the ends of both intervals.
    scale = best.tokens / default.tokens
    low = default.speed.low_s / best.speed.high_s * scale
    high = default.speed.high_s / best.speed.low_s * scale
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


def _pareto(group: SearchGroup) -> str:
    """Return the candidates that no other one beats in both speed and memory."""
    front: list[Entrant] = []
    least = float("inf")
    for one in group.measured:
        peak = (one.speed.peak_bytes if one.speed else None) or float("inf")
        if peak < least:
            front.append(one)
            least = peak
    if len(front) < 2:
        return "no measured candidate needs less memory"
    texts = [
        f"{_words(one)} ({to_gib(one.speed.peak_bytes)} GiB)" for one in front[1:] if one.speed
    ]
    return f"less memory, and slower: {'; '.join(texts)}"


def _nothing_fits(group: SearchGroup) -> str:
    """Return what comes nearest if no candidate surely fits."""
    predicted = [
        (one.prediction.peak_bytes("peak_reserved_bytes"), one)
        for one in group.entrants
        if one.prediction and one.prediction.peak_bytes("peak_reserved_bytes")
    ]
    line = "no candidate surely fits"
    if predicted:
        nearest = min(predicted, key=lambda pair: pair[0] or 0)
        line += f"; {_words(nearest[1])} comes nearest, with {to_gib(nearest[0])} GiB reserved"
    if any(one.verdict in _MAY_NOT_FIT for one in group.entrants):
        line += ". Add --try-perhaps to measure what may fit"
    return f"{line}. A smaller batch_size or checkpointing needs less: add it to --over"


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


def _command(request: SweepRequest, group: SearchGroup) -> str:
    best = group.winner
    if best is None:
        return ""
    sets = [f"--set {shell_word(word)}" for word in assignments(best.options)]
    return " ".join(["sweep run", shell_word(str(request.config_path)), *sets])


def _words(one: Entrant) -> str:
    return " ".join(assignments(one.options))
