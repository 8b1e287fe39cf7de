"""What the benchmarks are asked: which cells of which config, and how often.

What that needs is imported when it is asked: to import is a part of what some of them measure.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from orchestrator.grid import Expansion


def cell_options(description: str | None, rounds: int, rounds_help: str | None = None) -> argparse.ArgumentParser:
    """A parser of CONFIG, --set, --where and --rounds, to which a benchmark adds its own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="AXIS=A,B")
    parser.add_argument("--where", action="append", default=[], dest="wheres", metavar="AXIS=A,AXIS=B|C")
    parser.add_argument("--rounds", type=at_least_one, default=rounds, help=rounds_help)
    return parser


def at_least_one(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{word}: must be 1 or more")
    return number


def asked(options: argparse.Namespace) -> Expansion:
    """The cells. Ends the benchmark with the line that `sweep` would say, and its exit code, where there can be none."""
    from orchestrator.errors import SweepError
    from orchestrator.run import resolve

    try:
        return resolve(options.config, options.sets, options.wheres, None).expansion
    except SweepError as error:
        refuse(str(error))


def refuse(why: str) -> NoReturn:
    from orchestrator.errors import EXIT_USER

    print(why, file=sys.stderr)
    sys.exit(EXIT_USER)
