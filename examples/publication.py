"""Measure the studies of results/published/h200 on the GPUs of this machine, and publish them in one folder.

    python examples/publication.py --out results/mine --minutes 480
    python examples/publication.py --out results/mine --publish results/published/mine
    python examples/publication.py --out results/mine --only kernels,numerics -- --address auto

Each study is a `sweep run` into its own folder, with the options in `examples/publication.yaml` and those after `--`. After an
interruption, the same command measures what is missing; exit code 75: the minutes are over. `--publish` copies all studies that
exist into a folder for others.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import click
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from orchestrator.cli.commands.run import run as sweep_run
from orchestrator.common.errors import (
    COMPLETED,
    EXIT_INTERRUPTED,
    EXIT_TIME_LIMIT,
    EXIT_USER,
    ConfigError,
    SweepError,
)
from orchestrator.common.provenance import git_commit
from orchestrator.common.run_location import is_address
from orchestrator.config.selection import parse_selection
from orchestrator.planning.request import resolve
from orchestrator.store.run import Run

_STUDIES = Path(__file__).with_suffix(".yaml")


def main() -> None:
    options = _options()
    studies = _read(options.studies)
    if strangers := set(options.only) - set(studies):
        _refuse(
            f"{options.studies} names no study {', '.join(sorted(strangers))}: there are {', '.join(studies)}"
        )
    for name in options.only or studies:
        _require_cells(name, [*studies[name], *options.more])
    if options.publish:
        from orchestrator.publication.publish import (
            check_place,  # here: it draws, which a machine that only measures need not be able to
        )

        with _refusing():
            check_place(options.publish, {name: Run(options.out / name) for name in studies})
    if (git_commit() or "+").endswith("+"):
        print(
            "publication.py: what is measured now is of no commit: others cannot repeat it",
            file=sys.stderr,
        )
    ends = time.monotonic() + options.minutes * 60
    for name in options.only or studies:
        measure([*studies[name], *options.more], options.out / name, ends)
    if options.publish:
        there = [str(options.out / name) for name in studies if Run(options.out / name).exists]
        sys.exit(sweep("publish", *there, "--out", str(options.publish)))


def measure(words: Sequence[str], out: Path, ends: float) -> None:
    """Run a study until `ends`, a time of time.monotonic(). Exit if the sweep does not complete."""
    left_s = ends - time.monotonic()
    if left_s <= 0:
        sys.exit(EXIT_TIME_LIMIT)
    print(f"== {out.name}", flush=True)
    code = sweep(
        "run",
        *words,
        "--out",
        str(out),
        *([] if left_s == math.inf else ["--time-limit", f"{left_s:.0f}s"]),
    )
    if code not in COMPLETED:
        sys.exit(code if code > 0 else EXIT_INTERRUPTED)


def sweep(*words: str) -> int:
    """Run `sweep` as a user does, pass signals on to it, and return its exit code."""
    stopped: list[int] = []
    process = subprocess.Popen([sys.executable, "-m", "orchestrator", *words])

    def stop(number: int, _: object) -> None:
        stopped.append(number)
        process.terminate()  # a terminal has told it too, and it listens once

    before = {
        number: signal.signal(number, stop)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    code = process.wait()
    for number, handler in before.items():
        signal.signal(number, handler)
    return EXIT_INTERRUPTED if stopped else code


def _read(path: Path) -> dict[str, list[str]]:
    """Return the arguments of `sweep run` for each study. Exit if the file is not valid."""
    try:
        said = YAML(typ="safe").load(path)
    except (OSError, YAMLError) as error:
        _refuse(f"{path}: cannot be read: {str(error).splitlines()[0]}")
    if not isinstance(said, dict) or not said:
        _refuse(f"{path}: names no studies: write `NAME: CONFIG --set …`, one a line")
    return {str(name): _words(path, str(name), text) for name, text in said.items()}


def _words(path: Path, name: str, text: object) -> list[str]:
    if not re.fullmatch(r"[\w.-]*\w", name):
        _refuse(f"{path}: {name}: is no name for a folder: letters, digits, - and _ make one")
    try:
        words = shlex.split(str(text or ""))
    except ValueError as error:
        _refuse(f"{path}: {name}: {error}")
    if not words or not Path(words[0]).is_file():
        _refuse(
            f"{path}: {name}: begins with no config that is there: {words[0] if words else 'there is nothing'}"
        )
    return words


def _require_cells(name: str, words: list[str]) -> None:
    """Exit if a study could not begin, before hours of measuring the studies before it."""
    with _refusing(f"{name}: "):
        asked = sweep_run.make_context(name, words).params
        if asked["out"]:
            raise ConfigError(
                f"--out {asked['out']}: each study has a folder of its own",
                "Leave it out of what follows --",
            )
        if asked["time_limit"]:
            raise ConfigError(
                f"--time-limit {asked['time_limit']:g}s: is of one study",
                "Say --minutes for all of them",
            )
        selection = parse_selection(
            asked["sets"], asked["wheres"], asked["sample"], asked["instruments"]
        )
        resolve(asked["config"], selection)


@contextmanager
def _refusing(where: str = "") -> Iterator[None]:
    """Turn errors that the user can fix into one line and an exit code."""
    try:
        yield
    except click.exceptions.Exit as asked:  # of --help
        sys.exit(asked.exit_code)
    except click.ClickException as error:
        _refuse(where + error.format_message())
    except SweepError as error:
        _refuse(f"{where}{error}")


def _minutes(word: str) -> float:
    with suppress(ValueError):
        if 0 <= (minutes := float(word)) < math.inf:
            return minutes
    raise argparse.ArgumentTypeError(f"{word}: must be a number of them")


def _folder(word: str) -> Path:
    if is_address(word):
        raise argparse.ArgumentTypeError(f"{word}: must be a folder of this machine")
    return Path(word)


def _refuse(why: str) -> NoReturn:
    print(f"publication.py: {why}", file=sys.stderr)
    sys.exit(EXIT_USER)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=_folder, required=True, help="a folder for a folder a study")
    parser.add_argument(
        "--only", type=lambda names: names.split(","), default=[], metavar="STUDY,STUDY"
    )
    parser.add_argument(
        "--minutes",
        type=_minutes,
        default=math.inf,
        help="start no cell that would not end within them",
    )
    parser.add_argument("--publish", type=_folder, metavar="FOLDER")
    parser.add_argument(
        "--studies", type=Path, default=_STUDIES, help=f"  [examples/{_STUDIES.name}]"
    )
    parser.add_argument("more", nargs="*", metavar="-- OPTION")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # between two studies
        sys.exit(EXIT_INTERRUPTED)
