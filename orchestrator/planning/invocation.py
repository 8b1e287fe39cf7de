"""The commands that measure into a results folder: their options, and one entry of run.json for each.

An entry says what a command asked for and how it measured. The marks of `--fresh` and `--retry` are
in it (see orchestrator/store/cell_state.py): a plain `sweep run` measures the cells that a command
marked and did not measure. The same command given again continues as well, as a queue of a cluster
does it: while one of the cells that it marked is left, it marks none of them again. A command with
other words, or one that would measure in another way by now, starts from the first cell.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from orchestrator.common.text import (
    path_argument,
    shell_command,
    value_text,
    without_options,
    without_separator,
)
from orchestrator.store.cell_state import PENDING
from orchestrator.store.layout import CONFIG_FILE, REDACTED
from orchestrator.store.run import INCOMPLETE, Run
from tasks.spec.attempt import StartMethod
from tasks.spec.axes import Values, select, select_fields
from tasks.spec.status import Status

if TYPE_CHECKING:
    from orchestrator.store.run_writer import RunWriter

UNMEASURED = (PENDING, INCOMPLETE)

# Doubts about a success: words of --retry, and the columns of `cells` that show them.
QUALITY_FLAGS: Mapping[str, str] = {
    "cpu-contended": "cpu_contended",
    "interval-wide": "interval_wide",
    "beaten": "timing_beaten",
}

_STORED = ("infer_oom", "repeat", "retry", "only", "fresh")  # keys of run.json

INVOCATION = "invocation"  # the key in a row's facts: the time of the command that measured it

MEASUREMENT_SETTINGS = ("env", "instruments")  # keys of a config that a row's facts have too

_SEARCHES = (("best",), ("max-context",), ("max-batch",))
# Options that measure cells again: their marks are stored.
REPEATS_WORK = {"--retry": True, "--only": True, "--fresh": False}
_WORDS = ("fresh", "retry", "only")  # keys of the options that say which cells are measured again


@dataclass(frozen=True)
class RunOptions:
    """The options that select cells. `retry` and `only` hold statuses, `retry` also quality flags.

    repeat: how often each cell is measured in all; repetitions show the noise of the machine.
    infer_oom: skip cells that need at least as much memory as one that ran out of it.
    continued: ids of the cells that this command has marked already, before it was interrupted.
    """

    retry: frozenset[str] = frozenset()
    only: frozenset[str] = frozenset()
    repeat: int = 1
    fresh: bool = False
    infer_oom: bool = False
    continued: frozenset[str] = frozenset()

    def to_json(self) -> Values:
        """Return the options as run.json stores them."""
        sets = {"retry": sorted(self.retry), "only": sorted(self.only)}
        return select(vars(self), _STORED) | sets

    @classmethod
    def from_json(cls, stored: Values) -> RunOptions:
        """Read stored options, without those that measure cells again: their marks are stored."""
        return cls(**select(stored, ("infer_oom", "repeat")))


@dataclass(frozen=True)
class ExecutionOptions:
    """The options that say where and how cells run.

    address: a running Ray cluster; None: a private Ray on this machine.
    cpu_cells: CPU cells that run at the same time.
    start_method: of the measuring processes; None: fork where possible.
    allow_mixed: results of other hardware or software may share the folder.
    take_over: write to a bucket folder although another driver seems to write to it.
    """

    time_limit_s: float | None = None
    scheduler: Literal["ray", "serial"] = "ray"
    address: str | None = None
    cpu_cells: int = 1
    start_method: StartMethod | None = None
    allow_mixed: bool = False
    take_over: bool = False
    skip_predicted_oom: bool = False


@dataclass(frozen=True)
class Invocation:
    """An entry of `invocations` in run.json; the fields are its keys. None: not recorded.

    choice: the options that select cells. skips: True to skip what is predicted not to fit.
    asked: instruments and environment variables of the cells.
    sources: digest of each user-defined model.
    marks: number of the last attempt of each cell that the command measures again.
    """

    time: str | None = None
    command: tuple[str, ...] = ()
    choice: Values = field(default_factory=dict)
    skips: bool = False
    commit: str | None = None
    program_source: str | None = None
    asked: Values | None = None
    sources: Mapping[str, str | None] | None = None
    marks: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, stored: Values) -> Invocation:
        """Read an entry, without the keys that only another version has."""
        # Older versions stored the two options in an object of their own.
        values = {**select(stored.get("asks_for") or {}, ("choice", "skips")), **stored}
        return cls(**select_fields(cls, values) | {"command": tuple(stored.get("command", ()))})

    def continues(self, other: Invocation) -> bool:
        """True if both ask to measure again with the same words, and would measure equally."""
        if select(self.choice, _WORDS) != select(other.choice, _WORDS):
            return False
        own = (self.program_source, self.asked, self.sources)
        return None not in own and own == (other.program_source, other.asked, other.sources)


def current_command() -> tuple[str, ...]:
    """Return the arguments of this command line, or nothing in a notebook or another program."""
    program = Path(sys.argv[0])
    is_sweep = program.stem == "sweep" or program.parts[-2:] == ("orchestrator", "__main__.py")
    return tuple(without_separator(sys.argv[1:])) if is_sweep else ()


def read_invocations(run: Run) -> list[Invocation]:
    """Return all commands that have measured into a run, oldest first."""
    return list(map(Invocation.from_json, run.read_manifest().get("invocations", [])))


def earlier_marks(run: Run, invocation: Invocation) -> Iterator[Mapping[str, int]]:
    """Yield the marks of each command that this one may continue, the latest first."""
    for one in reversed(read_invocations(run)):
        if one.marks and one.continues(invocation):
            yield one.marks


def write_marks(writer: RunWriter, marks: Mapping[str, int]) -> None:
    """Store the marks of the last command."""
    manifest = writer.read_manifest()
    *earlier, last = manifest["invocations"]
    marked = {**last, "marks": dict(marks)}
    writer.write_manifest({**manifest, "invocations": [*earlier, marked]})


def last_sweep(run: Run) -> Invocation:
    """Return the last command of a run; a search for a limit only if there is no other."""
    invocations = read_invocations(run)
    sweeps = [one for one in invocations if one.command[:1] not in _SEARCHES]
    found = sweeps or invocations
    return found[-1] if found else Invocation()


def is_search(run: Run) -> bool:
    """Return True if no command but searches for a limit or for the fastest cell used this folder."""
    return last_sweep(run).command[:1] in _SEARCHES


def last_command(run: Run) -> str:
    """Return the command line of the last sweep, ready to type.

    Options that measure cells again, such as --retry, are left out: their marks are stored.
    """
    return shell_command(["sweep", *_last_arguments(run), *_out_option(run)])


def command_with(run: Run, options: Sequence[str], only: Sequence[str] = (Status.OK,)) -> str:
    """Return the command line of the last sweep with these options, which replace equal ones.

    The options are those of `sweep run`. After searches alone, which lack them, it is a sweep of the
    cells with one of the statuses in `only`: those that were measured.
    """
    if not read_invocations(run):  # a folder that no command of this program measured into
        return shell_command(["sweep", "run", "CONFIG", *options, "--out", path_argument(run)])
    replaced = {word: True for word in options if word.startswith("-")}
    arguments = _last_arguments(run)
    if is_search(run):
        arguments = _sweep_of_search(run)
        for status in only:
            arguments += ["--only", status]
    arguments = without_options(arguments, replaced)
    return shell_command(["sweep", *arguments, *options, *_out_option(run)])


def command_in_copy(run: Run, copy: Path) -> str:
    """Return the command line that continues in a copy of a published run, without a time limit."""
    config = run.read_manifest()["config_path"]
    arguments = without_options(_last_arguments(run), {"--time-limit": True})
    # The path of the config may be hidden in a publication, which has a copy of the config.
    if REDACTED in config and config in arguments:
        arguments[arguments.index(config)] = str(copy / CONFIG_FILE)
    return shell_command(["sweep", *arguments, "--out", path_argument(copy)])


def _last_arguments(run: Run) -> list[str]:
    last = last_sweep(run)
    arguments = last.command or ("run", path_argument(run.read_manifest()["config_path"]))
    return without_options(arguments, {**REPEATS_WORK, "--out": True})


def _sweep_of_search(run: Run) -> list[str]:
    """Return the arguments of a sweep of the cells among which the last search has chosen."""
    manifest = run.read_manifest()
    selection, arguments = manifest["selection"], ["run", path_argument(manifest["config_path"])]
    for option, separator in (("set", ","), ("where", "|")):
        for name, values in selection[option].items():
            text = separator.join(map(value_text, values))
            arguments += [f"--{option}", f"{name}={text}"]
    return arguments


def _out_option(run: Run) -> list[str]:
    """Return the option that names the folder, which may have been moved or copied."""
    manifest = run.read_manifest()
    default = manifest["config"].get("results") or Path("results") / manifest["name"]
    is_default = Path(str(run)).absolute() == Path(default).absolute()
    return [] if is_default else ["--out", path_argument(run)]
