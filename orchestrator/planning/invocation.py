"""The commands that a run's folder has seen: an entry each in its manifest, `finished` once the command came to its end.

A command is what it asks for, not its words: `--time-limit 20m` instead of `9m` does not make it another one.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from orchestrator.common import provenance
from orchestrator.common.provenance import PROGRAM_SOURCE
from orchestrator.config.selection import Selection
from orchestrator.planning.options import RunOptions
from orchestrator.planning.prior_results import measurement_settings
from orchestrator.planning.request import SweepRequest
from orchestrator.store.layout import CONFIG_FILE, REDACTED
from orchestrator.store.run import Run
from tasks.process.source_digest import source_digest

INVOCATION = "invocation"  # the fact of a row that says which of them it is of, by its time
FINISHED = "finished"

_MEASURES_BY = (PROGRAM_SOURCE, "asked", "sources")
_ASKS_FOR_MORE = ("--retry", "--only")  # or for less than what is missing
_OF_THAT_DAY = ("--time-limit",)
_SEARCHES = (["max-context"], ["max-batch"])


def new_invocation(
    request: SweepRequest, choice: RunOptions, commit: str | None, skips: bool = False
) -> dict[str, Any]:
    """skips: whether what is predicted not to fit is left out."""
    models = {
        model for cell in request.expansion.cells if (model := getattr(cell.params, "model", None))
    }
    return {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "command": sys.argv[1:] if _is_ours(sys.argv[0]) else [],
        "asks_for": _asks_for(request, choice, {"skips": skips}),
        "commit": commit,
        PROGRAM_SOURCE: provenance.program_source(),
        "asked": measurement_settings(request.config.model_dump(mode="json")),
        "sources": {
            model: source_digest(model, [*sys.path, *request.import_paths])
            for model in sorted(models)
        },
        FINISHED: False,
    }


def _is_ours(command: str) -> bool:
    """Not a notebook, or a program that has us for a library."""
    return Path(command).stem == "sweep" or Path(command).parts[-2:] == (
        "orchestrator",
        "__main__.py",
    )


def _asks_for(
    request: SweepRequest, choice: RunOptions, more: Mapping[str, bool]
) -> dict[str, Any]:
    """As it is read from a file again."""
    selection = asdict(request.selection)
    where = {axis: sorted(values, key=json.dumps) for axis, values in selection["where"].items()}
    asked = {
        "config": request.config.name,
        "selection": {
            **selection,
            "where": where,
            "instruments": sorted(set(request.config.instruments)),
        },
        "choice": choice.to_json(),
        **more,
    }
    return dict(json.loads(json.dumps(asked)))


def is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return _agree(one, other, ("asks_for",))


def measures_alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return _agree(one, other, _MEASURES_BY)


def _agree(one: Mapping[str, Any], other: Mapping[str, Any], names: Sequence[str]) -> bool:
    """In what older programs did not write down, nothing agrees."""
    return all(name in one and name in other and one[name] == other[name] for name in names)


def last_command(run: Run) -> str:
    """The command line that a run folder was last written by, as it can be typed again; one that sought limits is another.

    Without what asks for more than what is missing, such as --retry, unless that has not come to its end.
    """
    return shlex.join(["sweep", *_last_words(run), *_where(run)])


def command_in_copy(run: Run, copy: Path) -> str:
    """The same for a copy of a published run, with time for all that is left."""
    words = _last_words(run, _OF_THAT_DAY)
    if any(REDACTED in word for word in words):  # a path of the machine that measured it
        words = _typed(run, str(copy / CONFIG_FILE))
    return shlex.join(["sweep", *words, "--out", str(copy)])


def last_choice(run: Run) -> RunOptions:
    """That of the last command."""
    last = _last_sweep(run)
    if "asks_for" not in last:
        return _choice_of_words(last.get("command", ()))
    choice = RunOptions.from_json(last["asks_for"]["choice"])
    return (
        choice
        if _is_unfinished(last)
        else replace(choice, retry=frozenset(), only=frozenset(), fresh=False)
    )


def as_again(request: SweepRequest, commit: str | None) -> tuple[RunOptions, dict[str, Any]]:
    """The last command, if it were given again: what it chooses, and how it would stand in the manifest."""
    last, choice = _last_sweep(request.run), last_choice(request.run)
    skips = bool(last.get("asks_for", {}).get("skips", False))
    return choice, new_invocation(request, choice, commit, skips)


def _choice_of_words(words: Sequence[str]) -> RunOptions:
    """Of a command of an older program, which kept nothing else."""
    return RunOptions(
        infer_oom="--infer-oom" in words,
        verify=_number(words, "--verify-inferred", 0),
        repeat=_number(words, "--repeat", 1),
    )


def _number(words: Sequence[str], option: str, else_: int) -> int:
    said = re.findall(rf"(?<!\S){option}[= ](\d+)(?!\S)", " ".join(words))
    return int(said[-1]) if said else else_  # the last one counts, as on the command line


def _last_sweep(run: Run) -> Mapping[str, Any]:
    swept = [
        one for one in run.read_manifest()["invocations"] if one["command"][:1] not in _SEARCHES
    ]
    return swept[-1] if swept else {}


def _is_unfinished(invocation: Mapping[str, Any]) -> bool:
    return invocation.get(FINISHED) is False


def _last_words(run: Run, left_out: tuple[str, ...] = ()) -> list[str]:
    """Without --out, and the options that are to be left out."""
    manifest, last = run.read_manifest(), _last_sweep(run)
    more, flags = ((), ()) if _is_unfinished(last) else (_ASKS_FOR_MORE, ("--fresh",))
    options = ("--out", *left_out, *more)
    words = iter(last.get("command") or _typed(run, manifest["config_path"]))
    kept: list[str] = []
    for word in words:
        if word in options:
            next(words, None)
        elif word not in flags and not word.startswith(tuple(f"{option}=" for option in options)):
            kept.append(word)
    return kept


def _typed(run: Run, config: str) -> list[str]:
    """What was asked for at last, as words."""
    selection = Selection.from_json(run.read_manifest()["selection"])
    return ["run", config, *_as_typed(selection), *_choice_as_typed(last_choice(run))]


def _as_typed(selection: Selection) -> Iterator[str]:
    for option, between, axes in (("--set", ",", selection.set), ("--where", "|", selection.where)):
        for axis, values in axes.items():
            texts = (value if isinstance(value, str) else json.dumps(value) for value in values)
            yield from (option, f"{axis}={between.join(texts)}")
    if selection.sample is not None:
        yield from ("--sample", f"{selection.sample:.10%}")
    yield from (word for name in selection.instruments for word in ("--instrument", name))


def _choice_as_typed(choice: RunOptions) -> Iterator[str]:
    options = {"--infer-oom": choice.infer_oom, "--fresh": choice.fresh}
    yield from (option for option, is_asked in options.items() if is_asked)
    numbers = {"--verify-inferred": (choice.verify, 0), "--repeat": (choice.repeat, 1)}
    yield from (
        word
        for option, (number, else_) in numbers.items()
        if number != else_
        for word in (option, str(number))
    )
    for option, statuses in (("--retry", choice.retry), ("--only", choice.only)):
        yield from (word for status in sorted(statuses) for word in (option, status))


def _where(run: Run) -> list[str]:
    """The option that leads there: it may have been moved since, or be a copy."""
    manifest = run.read_manifest()
    itself = manifest["config"].get("results") or Path("results") / manifest["name"]
    return [] if Path(str(run)).absolute() == Path(itself).absolute() else ["--out", str(run)]
