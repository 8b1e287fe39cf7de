"""Mutated configs and stores: each is refused in one line, or read as what was written.

    python -m tests.fuzz --times 10000
    python -m tests.fuzz --stores 1000

A mutant is a config of configs/, or a small run, with one to four things done to it. Prints each that ends in anything else or
takes longer than thirty seconds; exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orchestrator.analysis.results import load_results
from orchestrator.common.errors import ConfigError, SweepError
from orchestrator.config.grid import expand, require_matches
from orchestrator.config.schema import parse_config
from orchestrator.config.selection import Selection
from orchestrator.report.tables.registry import lay_out
from orchestrator.store import batch_writer
from orchestrator.store.cell_state import read_states
from orchestrator.store.run import Run
from orchestrator.store.run_writer import RunWriter
from tasks.spec.attempt import Attempt
from tasks.spec.outcome import Outcome
from tasks.spec.tables import KernelRow
from tests.conftest import ROOT
from tests.support.fake_sweep import CONFIG, FakeScheduler, go, outcome_of, request_for

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


def outcome_of_config(text: str) -> str:
    """`refused`, `expanded`, or what went wrong."""
    began = time.monotonic()
    try:
        config, source = parse_config(text, "mutant.yaml")
        expansion = expand(config, source, Selection({}, {}))
        require_matches(config, source)
        result = "expanded" if expansion.cells else "expanded to nothing"
    except ConfigError as error:
        result = (
            "refused"
            if "\n" not in str(error) and len(str(error)) < 1000
            else f"refused in other than a line: {str(error)[:2000]!r}"
        )
    except Exception:
        result = traceback.format_exc()
    taken = time.monotonic() - began
    return result if taken < SLOW_S else f"took {taken:.1f} s: {result}"


def flip(part: Path, chance: random.Random) -> None:
    content = bytearray(part.read_bytes())
    if content:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        part.write_bytes(content)


def delete(part: Path, chance: random.Random) -> None:
    part.unlink()


def truncate(part: Path, chance: random.Random) -> None:
    part.write_bytes(part.read_bytes()[: chance.randrange(part.stat().st_size + 1)])


def copy_next_to(part: Path, chance: random.Random) -> None:
    name = chance.choice(["{}-old", "{}_bak", "copy-of-{}", "{}-2", "{}0", "merged-7", "{} 2"])
    shutil.copy(part, part.with_name(f"{name.format(part.stem)}.parquet"))


def copy_over(part: Path, chance: random.Random) -> None:
    shutil.copy(part, chance.choice(sorted(part.parent.parent.glob("*/*.parquet"))))


def swap(part: Path, chance: random.Random) -> None:
    other = chance.choice(sorted(part.parent.glob("*.parquet")))
    first, second = part.read_bytes(), other.read_bytes()
    part.write_bytes(second)
    other.write_bytes(first)


def drop_rows(part: Path, chance: random.Random) -> None:
    table = pq.read_table(part)
    if chance.random() < 0.5:
        table = table.replace_schema_metadata(None)
    pq.write_table(table.slice(0, chance.randrange(table.num_rows + 1)), part)


def repeat_rows(part: Path, chance: random.Random) -> None:
    table = pq.read_table(part)
    pq.write_table(pa.concat_tables([table, table]), part)


STORE_MUTATIONS = [*[flip] * 4, delete, truncate, copy_next_to, copy_over, swap, drop_rows, repeat_rows]  # fmt: skip


def make_store(folder: Path) -> Run:
    """A run of six cells in three batches."""

    def measure(attempt: Attempt) -> Outcome:
        (sample,) = outcome_of(attempt).samples
        samples = tuple(replace(sample, value=5.0 + step, step=step) for step in range(4))
        facts = {"tokens": 16, "host": attempt.cell.id}
        kernel = KernelRow(
            "forward", "ffn", "GEMM", "scope", "mm", "gemm", 2, 4, 4000, 1e3, 1e3, 900, 1100, None
        )
        return replace(outcome_of(attempt), samples=samples, facts=facts, kernels=(kernel,))

    config = folder / "config.yaml"
    config.write_text(CONFIG.replace("128]", "128, 256, 512]"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_writer, "BATCH", 2)
        patch.setattr(RunWriter, "finish", lambda writer: None)
        go(request_for(config, out=folder / "run"), FakeScheduler(measure), summary=True)
    run = Run(folder / "run")
    return run


def rows_of_cells(run: Run, table: str) -> dict[str, list[str]]:
    rows: dict[str, list[str]] = {}
    for row in run.read(table).to_dict("records"):
        # A damaged name of a column adds a column that is null for all other cells.
        known = {name: value for name, value in row.items() if not pd.isna(value)}
        rows.setdefault(row["cell"], []).append(repr(known))
    return {cell: sorted(texts) for cell, texts in rows.items()}


READ_TABLES = ("attempts", "samples", "kernels")


def outcome_of_store(run: Run, known: dict[str, dict[str, list[str]]], whole: bool) -> str:
    """`refused`, `read`, or what went wrong. whole: also derive the cells and a table."""
    try:
        statuses = {cell: one.status for cell, one in read_states(run).items()}
        read = {table: rows_of_cells(run, table) for table in READ_TABLES}
        if whole:
            lay_out(load_results(run), ["timings"])
    except SweepError as error:
        return "refused" if "\n" not in str(error) else f"refused in other than a line: {error}"
    except Exception:
        return traceback.format_exc()
    for cell, status in statuses.items():
        if status == "ok" and any(read[table].get(cell) != known[table][cell] for table in known):
            return f"cell {cell} is ok, and its rows are not those that were written"
        if status not in ("ok", "incomplete"):
            return f"cell {cell} is {status}"
    return "read"


def fuzz_stores(times: int, seed: int) -> Counter[str]:
    """Return how many mutated stores ended in each way, and print those that went wrong."""
    chance, ended = random.Random(seed), Counter[str]()
    with TemporaryDirectory() as folder:
        good = make_store(Path(folder))
        known = {table: rows_of_cells(good, table) for table in READ_TABLES}
        for number in range(times):
            run = Run(Path(shutil.copytree(good.folder, Path(folder) / str(number))))
            done = []
            for mutate in chance.choices(STORE_MUTATIONS, k=chance.choice([1, 1, 1, 2, 3])):
                parts = [*sorted(run.folder.glob("*/*.parquet")), run.folder / "stored.json"]
                with suppress(pa.ArrowException, OSError):  # an earlier mutation has damaged it
                    part = chance.choice(parts)
                    done.append(f"{mutate.__name__} {part.parent.name}/{part.name}")
                    mutate(part, chance)
            result = outcome_of_store(run, known, whole=number % 20 == 0)
            ended[result if result in ("refused", "read") else "wrong"] += 1
            if result not in ("refused", "read"):
                print(f"store {number}: {', '.join(done)}: {result}", flush=True)
            shutil.rmtree(run.folder)
    return ended


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=10_000)
    parser.add_argument("--stores", type=int, default=0, help="mutated stores, and no configs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="a folder for the mutants that went wrong")
    options = parser.parse_args()
    ended: Counter[str] = Counter()
    began = time.monotonic()
    if options.stores:
        ended = fuzz_stores(options.stores, options.seed)
        print(f"{options.stores} stores in {time.monotonic() - began:.0f} s: {dict(ended)}")
        sys.exit(ended["wrong"] > 0)
    for number, text in enumerate(mutants(options.times, options.seed)):
        result = outcome_of_config(text)
        ended[result if result in ("refused", "expanded") else "wrong"] += 1
        if result not in ("refused", "expanded"):
            print(f"mutant {number}: {result}", flush=True)
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
