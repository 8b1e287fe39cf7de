"""Publish runs as one folder from which `sweep report FOLDER` makes the same tables on any
machine.

    publication.json   the runs, the reference device, what was left out, the digest of each file
    NAME/              a readable run for each one published: run.json, parts, config.yaml
    cells.parquet      one wide row for each cell, of all runs
    report/            the page, each table as Markdown, the charts as SVG

Artifacts, logs and caches are left out; the evidence of each attempt is included. The content
does not depend on the time or the place of the export.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd
from ruamel.yaml import YAML

from orchestrator.analysis.results import (
    Results,
    cells_facts,
    cells_key,
    incomplete_cells,
    load_results,
)
from orchestrator.common.errors import RunError, RunUnwritable
from orchestrator.common.files import NAME_ANOTHER, Content, writing
from orchestrator.common.hashing import file_digest
from orchestrator.common.run_location import RunLocation
from orchestrator.common.text import cell_count
from orchestrator.publication.redaction import Redaction
from orchestrator.store.layout import ATTEMPTS, CONFIG_FILE, PUBLICATION_FILE, SCHEMA_VERSION
from orchestrator.store.open import runs_by_name
from orchestrator.store.run import Run, describe_incomplete
from orchestrator.store.run_collection import Publication, RunCollection, is_publication
from orchestrator.store.run_writer import RunWriter
from orchestrator.store.tables import SCHEMAS, write_cells_file

MB = 1_000_000
_NOT_COPIED = "artifacts, logs and caches; of a cell that failed its evidence is here"
# Returns path and content of each file of a publication's report.
MakeReport = Callable[[Publication, Results], Iterable[tuple[str, Content]]]
_KEY = ["cell", "attempt"]
_NAMED = 4  # of the largest things, where they are too large together


@dataclass(frozen=True)
class Published:
    """A finished publication. sizes: bytes of each entry, largest first. left_out: sentences."""

    cells: int
    sizes: Mapping[str, int]
    left_out: tuple[str, ...]

    @property
    def size(self) -> int:
        return sum(self.sizes.values())


def publish(
    folders: Sequence[RunLocation],
    out: Path,
    most_bytes: int,
    reference: str | None,
    make_report: MakeReport,
) -> Published:
    """Copy runs into one folder of limited size, and replace an earlier publication there.

    reference: the device whose published numbers the report compares them with. Raise RunError
    if a folder holds no run, if `out` holds anything but a publication, or if the result is too
    large; raise RunUnwritable if a file cannot be written.
    """
    named = runs_by_name(folders)
    runs = {name.replace("/", "-"): run for name, run in named.items()}
    if len(runs) < len(named):
        raise RunError(
            f"{', '.join(named)}: two of them would have one name",
            "Rename a folder: what is `/` here is `-` there",
        )
    check_place(out, runs)
    for run in runs.values():
        if error := describe_incomplete(run, incomplete_cells(run)):
            raise error
    # Read once, and before all other tables: a sweep may be writing. What is read later has all
    # other rows of these attempts, and all names are redacted.
    attempts = {name: run.read(ATTEMPTS) for name, run in runs.items()}
    redaction = Redaction(pd.concat([one[["facts", "started_at"]] for one in attempts.values()]))
    with _aside(out) as folder:
        for name, run in runs.items():
            _copy(run, attempts[name], folder / name, redaction)
        copies = RunCollection({name: Run(folder / name) for name in runs}, folder)
        copied = load_results(copies)
        write_cells_file(folder, copied.cells, cells_key(copies, False), cells_facts(copied))
        left_out = (*redaction.left_out(), _NOT_COPIED)
        if missing := copies.unfinished_count():
            left_out += (f"{cell_count(missing)} asked for and not measured yet",)
        _write_contents(folder, {"runs": list(runs), "against": reference, "left_out": left_out})
        publication = Publication(folder)  # as whoever has the folder reads it
        results = load_results(publication)
        publication.write_report(make_report(publication, results))
        sizes = _sizes(folder)
        if sum(sizes.values()) > most_bytes:
            raise RunError(
                f"{out}: {_too_large(sizes, most_bytes)}",
                "Publish fewer runs, or allow more with --limit-mb",
            )
    return Published(len(results.cells), sizes, left_out)


def check_place(out: Path, runs: Mapping[str, Run]) -> None:
    """Raise RunError if the runs, measured or not, cannot be published there."""
    if out.exists() and not is_publication(out) and (not out.is_dir() or any(out.iterdir())):
        raise RunError(
            f"{out}: holds something else than what was published", "Name a new folder with --out"
        )
    # Not Path.resolve, which raises RuntimeError for a link to itself.
    place = Path(os.path.realpath(out))
    within = [
        run.folder for run in runs.values() if place in Path(os.path.realpath(run.folder)).parents
    ]
    if within:
        raise RunError(
            f"{within[0]}: lies in the folder that is to be replaced",
            "Name the runs that were measured, all of them",
        )
    published: list[str] = []
    with suppress(RunError):  # torn: nobody can read it
        published = Publication(out).contents.runs if is_publication(out) else []
    if strangers := sorted(set(published) - set(runs)):
        raise RunError(
            f"{out}: has runs that are not named: {', '.join(strangers)}",
            "Name them too, or a new folder with --out",
        )
    nearest = next(folder for folder in out.absolute().parents if folder.exists())
    try:
        TemporaryDirectory(dir=nearest).cleanup()
    except OSError as error:
        raise RunUnwritable(
            f"{out}: cannot be written: {error.strerror}", "Name a writable folder with --out"
        ) from error


@contextmanager
def _aside(out: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `out` unless an error occurs."""
    new, old = (out.with_name(f".{out.name}.{which}") for which in ("new", "old"))
    try:
        with writing(out, if_missing=NAME_ANOTHER):
            _settle(out, new, old)  # after a kill
            new.mkdir(parents=True)
        yield new
        with writing(out):
            if out.exists():
                out.rename(old)
            new.rename(out)
    finally:
        with suppress(OSError):  # the next time will do
            _settle(out, new, old)


def _settle(out: Path, new: Path, old: Path) -> None:
    """Restore the previous publication if it is gone, and remove temporary folders."""
    if old.exists() and not out.exists():
        old.rename(out)
    for folder in (new, old):
        shutil.rmtree(folder, ignore_errors=True)


def _copy(run: Run, attempts: pd.DataFrame, folder: Path, redaction: Redaction) -> None:
    """Write a run in its public form, with the rows of these attempts alone."""
    writer = RunWriter(folder)
    known = pd.MultiIndex.from_frame(attempts[_KEY])
    incomplete = run.incomplete_attempts()
    copied, counts = {}, {}
    for table in SCHEMAS:
        if table == ATTEMPTS:
            continue
        rows = run.read(table)
        if set(_KEY) <= set(rows):
            rows = rows[pd.MultiIndex.from_frame(rows[_KEY]).isin(known)]
            counts[table] = rows.groupby(_KEY).size()
        copied[table] = redaction.table(table, rows)
    contents = []
    for key, before in zip(known, attempts["contents"], strict=True):
        found = {table: int(count[key]) for table, count in counts.items() if key in count.index}
        contents.append(before if key in incomplete else json.dumps(found))
    copied[ATTEMPTS] = redaction.table(ATTEMPTS, attempts).assign(contents=contents)
    writer.write_tables(copied)
    manifest = redaction.manifest(run.read_manifest())
    writer.write_manifest(manifest)
    if "config" in manifest:
        yaml = YAML(typ="safe", pure=True)
        yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
        yaml.default_flow_style = False
        yaml.dump(manifest["config"], folder / CONFIG_FILE)


def _write_contents(folder: Path, contents: Mapping[str, object]) -> None:
    """Write publication.json with the digest of every file so far; derived files come later."""
    files = {
        str(path.relative_to(folder).as_posix()): file_digest(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    whole = {"schema_version": SCHEMA_VERSION, **contents, "files": files}
    (folder / PUBLICATION_FILE).write_text(json.dumps(whole, indent=1), encoding="utf-8")


def _sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of each entry of the folder, and of each table of each run."""
    sizes: Counter[str] = Counter()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            sizes["/".join(path.relative_to(folder).parts[:2])] += path.stat().st_size
    return dict(sizes.most_common())


def _too_large(sizes: Mapping[str, int], most_bytes: int) -> str:
    largest = ", ".join(f"{name} {size / MB:.1f} MB" for name, size in list(sizes.items())[:_NAMED])
    total = f"{sum(sizes.values()) / MB:.1f} MB, where {most_bytes / MB:g} MB are allowed"
    return f"{total}; the largest are {largest}"
