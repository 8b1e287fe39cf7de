"""What the benchmarks are asked: which cells of which config, and how often.

What that needs is imported when it is asked: to import is a part of what some of them measure.
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
    """A parser of CONFIG, --set, --where and --rounds, to which a benchmark adds its own."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="AXIS=A,B")
    parser.add_argument(
        "--where", action="append", default=[], dest="wheres", metavar="AXIS=A,AXIS=B|C"
    )
    parser.add_argument("--rounds", type=at_least(1), default=rounds, help=rounds_help)
    return parser


def at_least(least: int) -> Callable[[str], int]:
    """The type of an option that is a whole number."""

    def convert(word: str) -> int:
        if not word.isdecimal() or int(word) < least:
            raise argparse.ArgumentTypeError(f"{word}: must be {least} or more")
        return int(word)

    return convert


def file_to_write(word: str) -> Path:
    """Tried sooner than after hours of measuring."""
    path = Path(word)
    try:
        path.open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{word}: cannot be written: {error.strerror}") from None
    return path


def folder_to_keep(word: str) -> Path:
    """Made sooner than after hours of measuring."""
    path = Path(word)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{word}: cannot be made: {error.strerror}") from None
    return path


def asked(options: argparse.Namespace) -> Expansion:
    """The cells. Ends the benchmark with the line that `sweep` would say, and its exit code, where there can be none."""
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
            f"{options.config}: asks for device cuda, and there is no GPU here. Add --set device=cpu to measure there"
        )
    return expansion


def refuse(why: str) -> NoReturn:
    from orchestrator.common.errors import EXIT_USER

    print(why, file=sys.stderr)
    sys.exit(EXIT_USER)


def ending_in_order(main: Callable[[], None]) -> None:
    """Where somebody presses Ctrl-C, without a traceback."""
    from orchestrator.common.errors import EXIT_INTERRUPTED

    try:
        main()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
