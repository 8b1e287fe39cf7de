"""The commands that have measured into a results folder: one entry of run.json for each.

A command is identified by the cells and options that it asks for, not by its words: `--time-limit
20m` instead of `9m` does not make it another one. An entry is marked as finished when nothing is
left to do for it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.common.text import path_argument, shell_command, without_separator
from orchestrator.planning.options import RunOptions
from orchestrator.store.layout import CONFIG_FILE, REDACTED
from orchestrator.store.run import Run
from tasks.spec.axes import Values, select, select_fields

INVOCATION = "invocation"  # the key in a row's facts: the time of the command that measured it
FINISHED = "finished"  # the key of an entry

_SEARCHES = (("max-context",), ("max-batch",))
_REPEATS_WORK = ("--retry", "--only")


@dataclass(frozen=True)
class Invocation:
    """An entry of `invocations` in run.json; the fields are its keys. None: not recorded.

    asks_for: config name, selection and options; it identifies the command.
    asked: instruments and environment variables of the cells.
    sources: digest of each user-defined model.
    """

    time: str | None = None
    command: tuple[str, ...] = ()
    asks_for: Values | None = None
    commit: str | None = None
    program_source: str | None = None
    asked: Values | None = None
    sources: Mapping[str, str | None] | None = None
    finished: bool | None = None

    @classmethod
    def from_json(cls, stored: Values) -> Invocation:
        """Read an entry, without the keys that only another version has."""
        return cls(**select_fields(cls, stored) | {"command": tuple(stored.get("command", ()))})

    def to_json(self) -> Values:
        """Return the entry as run.json stores it."""
        return {**vars(self), "command": list(self.command)}

    @property
    def is_unfinished(self) -> bool:
        """True if the command was interrupted."""
        return self.finished is False

    @property
    def options(self) -> RunOptions:
        """The options that the command would have if it were given again."""
        options = RunOptions.from_json((self.asks_for or {}).get("choice", {}))
        if self.is_unfinished:
            return options
        return options.without_repeated_work()

    @property
    def skips_predicted_oom(self) -> bool:
        """True if the command skips cells that are predicted to run out of memory."""
        return bool((self.asks_for or {}).get("skips"))

    def is_same_command(self, other: Invocation) -> bool:
        """True if both ask for the same."""
        return self.asks_for is not None and self.asks_for == other.asks_for

    def measures_like(self, other: Invocation) -> bool:
        """True if both measure in the same way: program, instruments, environment and models."""
        own = (self.program_source, self.asked, self.sources)
        theirs = (other.program_source, other.asked, other.sources)
        return None not in own and own == theirs


def measurement_settings(config: Values) -> Values:
    """Return the settings of a stored config that go into the facts of each row."""
    return select(config, ("env", "instruments"))


def current_command() -> tuple[str, ...]:
    """Return the arguments of this command line, or nothing in a notebook or another program."""
    program = Path(sys.argv[0])
    is_sweep = program.stem == "sweep" or program.parts[-2:] == ("orchestrator", "__main__.py")
    return tuple(without_separator(sys.argv[1:])) if is_sweep else ()


def read_invocations(run: Run) -> list[Invocation]:
    """Return all commands that have measured into a run, oldest first."""
    return list(map(Invocation.from_json, run.read_manifest().get("invocations", [])))


def last_sweep(run: Run) -> Invocation:
    """Return the last command of a run; a search for a limit only if there is no other."""
    invocations = read_invocations(run)
    sweeps = [one for one in invocations if one.command[:1] not in _SEARCHES]
    found = sweeps or invocations
    return found[-1] if found else Invocation()


def last_command(run: Run) -> str:
    """Return the command line of the last sweep, ready to type.

    Options that measure cells again, such as --retry, are left out if the command is finished.
    """
    return shell_command(["sweep", *_last_arguments(run), *_out_option(run)])


def command_in_copy(run: Run, copy: Path) -> str:
    """Return the command line that continues in a copy of a published run, without a time limit."""
    config = run.read_manifest()["config_path"]
    arguments = _without_options(_last_arguments(run), ("--time-limit",))
    # The path of the config may be hidden in a publication, which has a copy of the config.
    if REDACTED in config and config in arguments:
        arguments[arguments.index(config)] = str(copy / CONFIG_FILE)
    return shell_command(["sweep", *arguments, "--out", path_argument(copy)])


def _last_arguments(run: Run) -> list[str]:
    last = last_sweep(run)
    arguments = last.command or ("run", path_argument(run.read_manifest()["config_path"]))
    if last.is_unfinished:
        return _without_options(arguments, ("--out",))
    return _without_options(without_repeated_work(arguments), ("--out",))


def without_repeated_work(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without options that measure cells again, such as `--retry`."""
    return _without_options(arguments, _REPEATS_WORK, flags=("--fresh",))


def _without_options(
    arguments: Sequence[str], options: Sequence[str], flags: Collection[str] = ()
) -> list[str]:
    """Return the arguments without these options, as `--out DIR` or `--out=DIR`, and flags."""
    left: list[str] = []
    is_value = False  # of an option that is left out
    for argument in arguments:
        is_option = argument.partition("=")[0] in options
        if not (is_value or is_option or argument in flags):
            left.append(argument)
        is_value = argument in options and not is_value
    return left


def _out_option(run: Run) -> list[str]:
    """Return the option that names the folder, which may have been moved or copied."""
    manifest = run.read_manifest()
    default = manifest["config"].get("results") or Path("results") / manifest["name"]
    is_default = Path(str(run)).absolute() == Path(default).absolute()
    return [] if is_default else ["--out", path_argument(run)]
