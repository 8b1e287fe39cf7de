"""The working copy of a run that is elsewhere: a folder of this host, in which a store is what it always is.

At the start of whatever reads or writes it, it has what the place has: parts that it lacks are fetched, parts that are there no
more are removed. What it has and never carried there stays, for the next driver to carry. Where the place has a row of the same
attempt, another host has measured it meanwhile: that one counts, and all that is here of it is set aside. Parts are merged when
they are there, so that a merged one that never was carried has nothing of its own, and is undone.
"""

from __future__ import annotations

import fcntl
import filecmp
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from orchestrator.common.errors import RunUnreachable
from orchestrator.common.files import writing
from orchestrator.store.parquet_parts import is_merged, replaced_parts
from orchestrator.store.remote.folder import Entry, RemoteFolder, reaching
from orchestrator.store.remote.ledger import Ledger
from orchestrator.store.tables import tables
from tasks.spec.attempt import ATTEMPT_FILE, LOG_FILE

MANIFEST, CELLS = "run.json", "cells.parquet"
ATTEMPTS = "attempts"
ARTIFACTS = "artifacts"
ASIDE = "aside"
_AT_ONCE = 16
_TRIES = 5
_LOCK, _FETCHING = ".lock", ".fetching"
_OF_A_RUN = (MANIFEST, CELLS, ".carried", ARTIFACTS, "report", *tables())
_NOT_CARRIED = "cache"  # what a compiler left


class Copy:
    """Of a place, in a folder. Names are those of files within either."""

    def __init__(self, place: RemoteFolder, folder: Path) -> None:
        self.place = place
        self.folder = folder
        self.ledger = Ledger(folder)
        self.begun = False  # whether the place has a run, when last refreshed
        self.set_aside: list[str] = []
        self._rows: set[str] = set()  # that the place has, each as CELL-NUMBER

    def refresh(self, working: bool = False) -> None:
        """working: for the driver that has this copy; others leave it to the driver that is at work in it, if there is one.

        Raises RunUnreachable or RunUnwritable.
        """
        with writing(self.folder), self._alone():
            if working or not self._has_driver():
                with reaching(self.place):
                    self._refresh()

    def fetch_artifacts(self, cell: str = "") -> None:
        """What people read of an attempt: its log, and how to measure it again. Of one cell, or of all."""
        with reaching(self.place):
            there = self.place.entries(f"{ARTIFACTS}/{cell}".rstrip("/"), recursive=True)
            wanted = [name for name in there if name.endswith((f"/{ATTEMPT_FILE}", f"/{LOG_FILE}"))]
            with writing(self.folder):
                self._each(
                    self._fetch, [name for name in wanted if not (self.folder / name).exists()]
                )

    def leftovers(self) -> list[list[str]]:
        """What earlier drivers did not carry, in the order in which it may go: what attempts measured before their rows."""
        self._settle_artifacts()
        first = [
            *self._artifacts_here(),
            *(name for name in self.parts() if not name.startswith(f"{ATTEMPTS}/")),
        ]
        stages = [
            first,
            [name for name in self.parts() if name.startswith(f"{ATTEMPTS}/")],
            [CELLS],
        ]
        return [
            [name for name in stage if (self.folder / name).exists() and not self.ledger.has(name)]
            for stage in stages
        ]

    def artifacts(self, folder: Path) -> list[str]:
        """Of one attempt, whatever it left."""
        found = [
            path.relative_to(self.folder) for path in sorted(folder.rglob("*")) if path.is_file()
        ]
        return [
            path.as_posix()
            for path in found
            if not path.name.startswith(".") and _NOT_CARRIED not in path.parts
        ]

    def carry(self, name: str) -> None:
        """There, unless it is there as it is here. What is here no more was merged into another. Raises OSError."""
        mark = self.ledger.mark(name)
        if mark is not None and not self.ledger.has(name):
            try:
                self.place.put(name, self.folder / name)
            except FileNotFoundError:
                if (self.folder / name).exists():
                    raise
            else:
                self.ledger.add(name, mark)

    def parts(self) -> list[str]:
        return [
            f"{table}/{path.name}"
            for table in tables()
            for path in sorted((self.folder / table).glob("*.parquet"))
        ]

    def _refresh(self) -> None:
        manifest = self.place.read(MANIFEST)
        self.begun = manifest is not None
        if self._is_of_another_run(manifest):
            self._begin_anew()
        for _ in range(_TRIES):
            there = self._parts_there()
            for name in self.parts():
                if name not in there and (self.ledger.has(name) or is_merged(Path(name))):
                    (self.folder / name).unlink()
            try:
                self._each(
                    self._fetch, [name for name in there if not (self.folder / name).exists()]
                )
                self._each(
                    self._settle, [name for name in there if self._differs(name, there[name])]
                )
                break
            except FileNotFoundError:  # merged into another meanwhile
                continue
        else:
            raise RunUnreachable(f"{self.place}: changes faster than it can be read", "Try again")
        found = {
            Path(name).name for name in there if name.startswith(f"{ATTEMPTS}/")
        } | replaced_parts(self.folder / ATTEMPTS)
        self._rows = {name.removesuffix(".parquet") for name in found}
        others = [
            name
            for name in self.parts()
            if Path(name).stem in self._rows and not self.ledger.has(name)
        ]
        self._set_aside(others)
        if manifest is not None:
            self._replace(MANIFEST, manifest)

    def _parts_there(self) -> dict[str, Entry]:
        """Rows of attempts are listed first: what they measured was there before."""
        names = (ATTEMPTS, *(table for table in tables() if table != ATTEMPTS))
        found = {
            name: entry for table in names for name, entry in self.place.entries(table).items()
        }
        return {
            name: entry
            for name, entry in found.items()
            if name.endswith(".parquet") and "/." not in name
        }

    def _differs(self, name: str, entry: Entry) -> bool:
        mark = self.ledger.mark(name)
        return not self.ledger.has(name) or (mark is not None and mark[0] != entry.size)

    def _is_of_another_run(self, manifest: bytes | None) -> bool:
        """What was carried from here, or came from there, is there no more: it was removed, to begin anew."""
        if not self.ledger.has(MANIFEST) or not (self.folder / MANIFEST).exists():
            return False
        return manifest is None or _created(manifest) != _created(
            (self.folder / MANIFEST).read_bytes()
        )

    def _begin_anew(self) -> None:
        self._set_aside(name for name in _OF_A_RUN if (self.folder / name).exists())
        for name in (ARTIFACTS, *tables()):
            (self.folder / name).mkdir(exist_ok=True)
        self.ledger = Ledger(self.folder)

    def _settle(self, name: str) -> None:
        """Of what is in both and was never carried from here: a driver was killed just then, or another host has measured it."""
        aside = self._aside_of(name)
        self.place.fetch(name, aside)
        if not filecmp.cmp(aside, self.folder / name, shallow=False):
            self._set_aside([name])
        aside.rename(self.folder / name)
        self.ledger.add(name)

    def _settle_artifacts(self) -> None:
        """Of attempts whose rows the place has: what it has not as well is of an attempt of that number that was here."""
        for folder in sorted((self.folder / ARTIFACTS).glob("*/*")):
            new = [name for name in self.artifacts(folder) if not self.ledger.has(name)]
            if new and f"{folder.parent.name}-{folder.name}" in self._rows:
                if all(self.place.read(name) == (self.folder / name).read_bytes() for name in new):
                    for name in new:
                        self.ledger.add(name)
                else:
                    self._set_aside([folder.relative_to(self.folder).as_posix()])

    def _artifacts_here(self) -> list[str]:
        return [
            name
            for folder in sorted((self.folder / ARTIFACTS).glob("*/*"))
            for name in self.artifacts(folder)
        ]

    def _fetch(self, name: str) -> None:
        aside = self._aside_of(name)
        self.place.fetch(name, aside)
        aside.rename(self.folder / name)
        self.ledger.add(name)

    def _replace(self, name: str, content: bytes) -> None:
        aside = self._aside_of(name)
        aside.write_bytes(content)
        aside.rename(self.folder / name)
        self.ledger.add(name)

    def _aside_of(self, name: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.with_name(f".{path.name}.{os.getpid()}")

    def _set_aside(self, names: Iterable[str]) -> None:
        """Nothing that was measured here is removed."""
        folder = self.folder / ASIDE / datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S")
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).rename(folder / name)
            self.set_aside.append(str(folder / name))

    def _each(self, do: Any, names: list[str]) -> None:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(do, names))

    def _has_driver(self) -> bool:
        with (self.folder / _LOCK).open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return True
        return False

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Among those that refresh it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / _FETCHING).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _created(manifest: bytes) -> object:
    try:
        return json.loads(manifest).get("created")
    except (ValueError, AttributeError):
        return None
