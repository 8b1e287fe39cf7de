"""What the benchmarks are asked: which cells of which config, and how often."""

from __future__ import annotations

import argparse
from pathlib import Path


def cell_options(description: str | None, rounds: int, rounds_help: str | None = None) -> argparse.ArgumentParser:
    """A parser of CONFIG, --set, --where and --rounds, to which a benchmark adds its own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="AXIS=A,B")
    parser.add_argument("--where", action="append", default=[], dest="wheres", metavar="AXIS=A,AXIS=B|C")
    parser.add_argument("--rounds", type=int, default=rounds, help=rounds_help)
    return parser
