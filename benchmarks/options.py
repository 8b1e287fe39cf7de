"""Options that the benchmarks share: a config, a selection of its cells, and the number of rounds.

Functions import what they need: the time of these imports is a part of what some benchmarks
measure.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from orchestrator.config.grid import Expansion


def cell_options(
    description: str | None, rounds: int, rounds_help: str | None = None
) -> argparse.ArgumentParser:
    """Return a parser of CONFIG, --set, --where and --rounds. A benchmark adds its own options."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=layout)
    parser.add_argument("config", type=Path)
    for option, metavar in (("--set", "AXIS=A,B"), ("--where", "AXIS=A,AXIS=B|C")):
        name = f"{option[2:]}s"
        parser.add_argument(option, action="append", default=[], dest=name, metavar=metavar)
    parser.add_argument("--rounds", type=at_least(1), default=rounds, help=rounds_help)
    return parser


def selection_words(options: argparse.Namespace) -> list[str]:
    """Return the config and the selection as words of a `sweep` command."""
    sets = [f"--set={value}" for value in options.sets]
    return [str(options.config), *sets, *(f"--where={value}" for value in options.wheres)]


def at_least(smallest: int) -> Callable[[str], int]:
    """Return the type of an option that is an integer from `smallest` upwards."""

    def convert(word: str) -> int:
        if not word.isdecimal() or int(word) < smallest:
            raise argparse.ArgumentTypeError(f"{word}: must be {smallest} or more")
        return int(word)

    return convert


# Both types below write at the start: a benchmark may measure for hours before it needs the path.


def file_to_write(word: str) -> Path:
    """Return the path of a file that can be written."""
    path = Path(word)
    try:
        path.open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{word}: cannot be written: {error.strerror}") from None
    return path


def folder_to_keep(word: str) -> Path:
    """Return the path of a folder, which is created if it is missing."""
    path = Path(word)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{word}: cannot be made: {error.strerror}") from None
    return path


def selected_cells(options: argparse.Namespace) -> Expansion:
    """Return the cells. Exit as `sweep` does if the config is wrong or this machine has no GPU."""
    from orchestrator.common.errors import SweepError
    from orchestrator.config.selection import parse_selection
    from orchestrator.hardware.nvml import gpu_names
    from orchestrator.planning.request import resolve

    try:
        expansion = resolve(options.config, parse_selection(options.sets, options.wheres)).expansion
    except SweepError as error:
        refuse(str(error))
    if any(cell.params.device == "cuda" for cell in expansion.cells) and not gpu_names():
        refuse(
            f"{options.config}: device cuda is not available on this machine."
            " Add --set device=cpu to measure on the CPU"
        )
    return expansion


def refuse(reason: str) -> NoReturn:
    """Print a reason and exit as `sweep` does for an error that the user can correct."""
    from orchestrator.common.errors import EXIT_USER

    print(reason, file=sys.stderr)
    sys.exit(EXIT_USER)


def run_until_interrupted(main: Callable[[], None]) -> None:
    """Run a benchmark. Ctrl-C ends it without a traceback."""
    from orchestrator.common.errors import EXIT_INTERRUPTED

    try:
        main()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
