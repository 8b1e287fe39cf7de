"""Configs as nobody should write them: each is refused in one line, or expands to cells that are as valid as any.

    python -m tests.fuzz --times 10000

A mutant is a config of configs/ with one to four things done to it. Prints each that ends in anything else or takes longer
than thirty seconds; exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from orchestrator.common.errors import ConfigError
from orchestrator.config.grid import expand, require_matches
from orchestrator.config.schema import parse_config
from orchestrator.config.selection import Selection
from tests.conftest import ROOT

Mutation = Callable[[list[str], random.Random], None]

SLOW_S = 30.0
NASTY = [
    *(
        "null",
        "~",
        "",
        "NaN",
        ".nan",
        ".inf",
        "-.inf",
        "-1",
        "0",
        "1e400",
        "1e-400",
        "9" * 400,
        "9" * 5000,
        "0x" + "f" * 300,
        "0o17",
    ),
    *(
        "1_000",
        "true",
        "no",
        "off",
        "2026-02-30",
        "2026-11-20",
        "2026-11-20T25:61:61Z",
        "12:30:45",
        "=",
        "<<",
        "*x",
        "&x",
        "&x [*x]",
    ),
    *(
        "!!binary aGk=",
        "!!python/object/apply:os.system ['true']",
        "!foo bar",
        "!!set {a, b}",
        "!!omap [a: 1]",
        "!!float abc",
    ),
    *(
        "!!int 1.5",
        "!!timestamp x",
        "{}",
        "[]",
        "[[]]",
        "{a: {b: {c: 1}}}",
        "{[1, 2]: 3}",
        "{? {a: 1} : 2}",
        "[{}]",
        "'",
        '"',
    ),
    *(
        '"\\ud800"',
        '"\\x00"',
        "|",
        ">-",
        "%",
        "@",
        "`",
        "---",
        "...",
        "%YAML 9.9",
        "? a",
        "- - - a",
        ": :",
        "a: b: c",
        "{{",
        "]]",
        "#",
    ),
    *(
        "[" * 2000,
        "{a: " * 500,
        "[1, " * 50 + "1" + "]" * 50,
        "\x85",
        "\u2028",
        "\ufeff",
        "\x07",
        "é" * 50,
        "𝕏",
        "x" * 100_000,
    ),
    "[" + ", ".join(map(str, range(500))) + "]",
]
BOMB = [
    "a0: &a0 [x, x, x, x, x, x, x, x, x]",
    *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)),
]
LONG_AXIS = "[" + ", ".join(map(str, range(1, 301))) + "]"


def _place(lines: Sequence[str], chance: random.Random) -> int:
    return chance.randrange(len(lines)) if lines else 0


def delete_line(lines: list[str], chance: random.Random) -> None:
    if lines:
        del lines[_place(lines, chance)]


def duplicate_line(lines: list[str], chance: random.Random) -> None:
    if lines:
        place = _place(lines, chance)
        lines.insert(place, lines[place])


def move_line(lines: list[str], chance: random.Random) -> None:
    if lines:
        line = lines.pop(_place(lines, chance))
        lines.insert(chance.randrange(len(lines) + 1), line)


def indent(lines: list[str], chance: random.Random) -> None:
    if lines:
        place = _place(lines, chance)
        lines[place] = chance.choice(["  ", " ", "\t", "    ", "- "]) + lines[place]


def dedent(lines: list[str], chance: random.Random) -> None:
    if lines:
        place = _place(lines, chance)
        lines[place] = lines[place][chance.randint(1, 4) :]


def replace_value(lines: list[str], chance: random.Random) -> None:
    """What stands behind a colon, or one word in it."""
    places = [place for place, line in enumerate(lines) if ":" in line]
    if places:
        place = chance.choice(places)
        key, _, value = lines[place].partition(":")
        words = list(re.finditer(r"[^\s,\[\]{}:#]+", value))
        nasty = chance.choice(NASTY)
        if words and chance.random() < 0.5:
            word = chance.choice(words)
            lines[place] = f"{key}:{value[: word.start()]}{nasty}{value[word.end() :]}"
        else:
            lines[place] = f"{key}: {nasty}"


def replace_key(lines: list[str], chance: random.Random) -> None:
    places = [place for place, line in enumerate(lines) if ":" in line]
    if places:
        place = chance.choice(places)
        key, _, value = lines[place].partition(":")
        blank = key[: len(key) - len(key.lstrip())]
        lines[place] = f"{blank}{chance.choice(NASTY)}:{value}"


def insert_line(lines: list[str], chance: random.Random) -> None:
    blank = " " * chance.randint(0, 8)
    name = chance.choice(
        [
            "name",
            "axes",
            "fixed",
            "include",
            "exclude",
            "override",
            "limits",
            "env",
            "defaults",
            "model_args",
            "x",
        ]
    )
    lines.insert(_place(lines, chance), f"{blank}{name}: {chance.choice(NASTY)}")


def random_bytes(lines: list[str], chance: random.Random) -> None:
    if lines:
        place = _place(lines, chance)
        at = chance.randint(0, len(lines[place]))
        lines[place] = (
            lines[place][:at]
            + "".join(chr(chance.randrange(1, 0x500)) for _ in range(8))
            + lines[place][at:]
        )


def cut_off(lines: list[str], chance: random.Random) -> None:
    del lines[_place(lines, chance) :]


def bomb(lines: list[str], chance: random.Random) -> None:
    lines[0:0] = BOMB


def huge_grid(lines: list[str], chance: random.Random) -> None:
    """A thousand million cells and more."""
    blank = " " * chance.choice([4, 6])
    axes = chance.sample(
        ["seed", "context_length", "batch_size", "measured_steps", "warmup_steps"], 4
    )
    lines += [
        "  - task: train_step",
        "    fixed: {size: tiny}",
        "    axes:",
        *(f"{blank}  {axis}: {LONG_AXIS}" for axis in axes),
    ]


MUTATIONS: list[Mutation] = [
    delete_line, duplicate_line, move_line, indent, dedent, *[replace_value] * 5, replace_key, insert_line, random_bytes,
    cut_off, bomb, huge_grid,
]  # fmt: skip


def mutants(times: int, seed: int) -> list[str]:
    """Texts, the same for the same seed."""
    chance = random.Random(seed)
    texts = [path.read_text() for path in sorted((ROOT / "configs").glob("*.yaml"))]
    return [mutant(chance.choice(texts), chance) for _ in range(times)]


def mutant(text: str, chance: random.Random) -> str:
    lines = text.splitlines()
    for mutate in chance.choices(MUTATIONS, k=chance.randint(1, 4)):
        mutate(lines, chance)
    return "\n".join(lines)


def outcome_of(text: str) -> str:
    """`refused`, `expanded`, or what went wrong."""
    began = time.monotonic()
    try:
        config, source = parse_config(text, "mutant.yaml")
        expansion = expand(config, source, Selection({}, {}))
        require_matches(config, source)
        said = "expanded" if expansion.cells else "expanded to nothing"
    except ConfigError as error:
        said = (
            "refused"
            if "\n" not in str(error) and len(str(error)) < 1000
            else f"refused in other than a line: {str(error)[:2000]!r}"
        )
    except Exception:
        said = traceback.format_exc()
    taken = time.monotonic() - began
    return said if taken < SLOW_S else f"took {taken:.1f} s: {said}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="a folder for the mutants that went wrong")
    options = parser.parse_args()
    ended: Counter[str] = Counter()
    began = time.monotonic()
    for number, text in enumerate(mutants(options.times, options.seed)):
        said = outcome_of(text)
        ended[said if said in ("refused", "expanded") else "wrong"] += 1
        if said not in ("refused", "expanded"):
            print(f"mutant {number}: {said}", flush=True)
            if options.keep:
                options.keep.mkdir(parents=True, exist_ok=True)
                (options.keep / f"{number}.yaml").write_text(text, errors="replace")
    print(
        f"{options.times} mutants in {time.monotonic() - began:.0f} s:",
        ", ".join(f"{n} {what}" for what, n in ended.items()),
    )
    sys.exit(ended["wrong"] > 0)


if __name__ == "__main__":
    main()
