"""A run in a bucket, read from a working copy in the user's cache.

The copy is an ordinary results folder, made equal to the bucket before it is used. The file
`.pending/CELL-NUMBER` marks an attempt that was written here and is not uploaded completely. The
next driver on this host uploads it, whatever killed the last one. If the bucket has a row of the
same attempt by then, another host has measured it: that row counts, and the files here are moved
to `aside/`. Nothing that was measured is ever deleted.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from orchestrator.common.errors import RunError, RunUnreachable, RunUnwritable, SweepError
from orchestrator.common.files import Content, cache_folder, replace_file, try_lock, writing
from orchestrator.common.run_location import RunLocation, is_address, require_lasting
from orchestrator.store.layout import ARTIFACTS, ATTEMPTS, CACHE, CELLS_FILE, LOCK_FILE, REPORT
from orchestrator.store.manifest import MANIFEST_FILE
from orchestrator.store.parquet_parts import is_merged, replaced_parts, unmerged_parts
from orchestrator.store.publication import require_listed
from orchestrator.store.remote_folder import RemoteFolder, reaching
from orchestrator.store.run import Run
from orchestrator.store.tables import tables
from orchestrator.store.untrusted_files import require_plain
from tasks.spec.attempt import ATTEMPT_FILE, LOG_FILE, RERUN_FILE

_REFRESH_TRIES = 5
_DOWNLOADS = 16  # at a time; a bucket takes tens of milliseconds to answer each request
_PENDING, _ASIDE, _REFRESH_LOCK = ".pending", "aside", ".refresh-lock"
_CONTENTS = (MANIFEST_FILE, CELLS_FILE, ARTIFACTS, REPORT, _PENDING, *tables())
# An attempt's row is uploaded last and listed first: a row never precedes its samples.
_ROWS_FIRST = sorted(tables(), key=lambda table: table != ATTEMPTS)
_ROWS_LAST = _ROWS_FIRST[::-1]


class RemoteRun(Run):
    """A run in a bucket, read from its working copy."""

    def __init__(self, remote: RemoteFolder) -> None:
        super().__init__(cache_folder("copies") / remote.path)
        self.mirror = Mirror(remote, self.folder)

    def __str__(self) -> str:
        return self.mirror.remote.address

    def fetch_artifacts(self, cell: str = "") -> None:
        self.mirror.fetch_artifacts(cell)

    def write_report(self, files: Iterable[tuple[str, Content]]) -> None:
        super().write_report(files)
        report = self.folder / REPORT
        try:
            with reaching(self.mirror.remote):
                for name in self.mirror.files_in(report):
                    self.mirror.upload(name)
        except SweepError as error:
            raise RunUnwritable(
                f"the report is in {report}, but was not uploaded: {error.message}", error.remedy
            ) from error


def open_run(location: RunLocation) -> Run:
    """Return the run of a folder or address, downloaded if it is remote.

    Raise RunError for a file and for a folder with links or pipes, ConfigError for an address that
    is wrong, RunUnreachable.
    """
    if isinstance(location, str):
        require_lasting(location)
    if is_address(location):
        remote = RemoteRun(RemoteFolder(str(location)))
        remote.mirror.refresh()
        return remote
    folder = Path(location)
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{location}: is a file", "Name a folder")
    require_listed(folder)
    require_plain(folder)
    return Run(folder)


class Mirror:
    """The working copy of a remote folder. Names are those of files within either."""

    def __init__(self, remote: RemoteFolder, folder: Path) -> None:
        self.remote = remote
        self.folder = folder

    def refresh(self, as_driver: bool = False) -> None:
        """Make the copy equal to the bucket, except for attempts that are still to be uploaded.

        Readers leave the copy alone while a driver on this host writes to it: it is ahead of the
        bucket then. Raise RunUnreachable or RunUnwritable.
        """
        with writing(self.folder), self._refresh_lock():
            if as_driver or not self._has_driver():
                with reaching(self.remote):
                    self._refresh()

    def fetch_artifacts(self, cell: str) -> None:
        """Download what people read of attempts: of one cell, or of all if it is empty."""
        rows = self._rows()
        with reaching(self.remote), writing(self.folder):
            names = []
            for name in self.remote.sizes(f"{ARTIFACTS}/{cell}".rstrip("/"), recursive=True):
                _, *attempt, last = name.split("/")
                is_read = last in (ATTEMPT_FILE, LOG_FILE, RERUN_FILE)
                if is_read and "-".join(attempt[:2]) in rows and not self._has(name):
                    names.append(name)
            self._download(names)

    def upload(self, name: str) -> None:
        """Upload a file, unless it is gone: a part may have been merged into another one."""
        with suppress(FileNotFoundError):
            self.remote.put(name, self.folder / name)

    def parts(self) -> set[str]:
        """Return the names of all Parquet parts of the copy."""
        names: set[str] = set()
        for table in tables():
            names.update(f"{table}/{path.name}" for path in (self.folder / table).glob("*.parquet"))
        return names

    def files_in(self, folder: Path) -> list[str]:
        """Return the files below a folder of the copy.

        Leave out hidden files, which are being written, and what compilers have cached.
        """
        found = []
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(self.folder)
            if path.is_file() and not path.name.startswith(".") and CACHE not in name.parts:
                found.append(name.as_posix())
        return found

    def files_of(self, attempt: str) -> list[str]:
        """Return the files of an attempt, its row last."""
        artifacts = self.files_in(self.folder / _artifacts_of(attempt))
        return [*artifacts, *filter(self._has, _parts_of(attempt))]

    def pending(self) -> list[str]:
        """Return the attempts that are still to be uploaded, as CELL-NUMBER."""
        return sorted(path.name for path in (self.folder / _PENDING).glob("[!.]*"))

    def is_pending(self, attempt: str) -> bool:
        return self._has(f"{_PENDING}/{attempt}")

    def mark_pending(self, attempt: str) -> None:
        """Mark an attempt as not uploaded, before its files are written."""
        (self.folder / _PENDING).mkdir(exist_ok=True)
        replace_file(self.folder / _PENDING / attempt, b"")

    def unmark_pending(self, attempt: str) -> None:
        (self.folder / _PENDING / attempt).unlink(missing_ok=True)

    def _refresh(self) -> None:
        manifest = self.remote.read(MANIFEST_FILE)
        if self._is_of_another_run(manifest):
            self._set_aside(_CONTENTS)
        for folder in (ARTIFACTS, *tables()):
            (self.folder / folder).mkdir(exist_ok=True)
        known = self._rows()
        for _ in range(_REFRESH_TRIES):
            # A driver on another host may merge parts after they were listed.
            with suppress(FileNotFoundError):
                self._refresh_parts()
                break
        else:
            raise RunUnreachable(f"{self.remote}: changes faster than it can be read", "Try again")
        # A driver that was killed here may have left artifacts of an attempt that another host
        # has measured since. They do not belong to the row that has just arrived.
        self._set_aside(map(_artifacts_of, self._rows() - known))
        if manifest is not None:
            replace_file(self.folder / MANIFEST_FILE, manifest)

    def _refresh_parts(self) -> None:
        listed: dict[str, int] = {}
        for table in _ROWS_FIRST:
            for name, size in self.remote.sizes(table).items():
                if name.endswith(".parquet") and not name.startswith(f"{table}/."):
                    listed[name] = size
        # A merged part that never arrived holds nothing new: only uploaded parts are merged.
        for name in filter(is_merged, self.parts() - listed.keys()):
            (self.folder / name).unlink()
        # Merged parts come first, because they name the attempts whose rows they hold.
        self._download_missing(filter(is_merged, listed), listed)
        self._settle_pending(listed)
        self._download_missing(listed, listed)
        for table in tables():
            for name in replaced_parts(self.folder / table):
                if f"{table}/{name}" not in listed:
                    (self.folder / table / name).unlink(missing_ok=True)
        removed = self.parts() - listed.keys()
        self._set_aside(name for name in removed if not self.is_pending(Path(name).stem))

    def _settle_pending(self, listed: Mapping[str, int]) -> None:
        # Another host may have measured a pending attempt since. The row in the bucket counts.
        merged = replaced_parts(self.folder / ATTEMPTS)
        for attempt in self.pending():
            row = _parts_of(attempt)[-1]
            if row not in listed and Path(row).name not in merged:
                continue
            # A row is uploaded last. If the bucket has this very row, the driver was killed before
            # it removed the mark.
            if not self._has(row) or self.remote.read(row) != (self.folder / row).read_bytes():
                self._set_aside([_artifacts_of(attempt), *_parts_of(attempt)])
            self.unmark_pending(attempt)

    def _download_missing(self, names: Iterable[str], listed: Mapping[str, int]) -> None:
        missing = []
        for name in names:
            path = self.folder / name
            if self.is_pending(path.stem):
                continue
            # A part that was torn by a crash has another size.
            if not path.exists() or path.stat().st_size != listed[name]:
                missing.append(name)
        self._download(missing)

    def _download(self, names: Iterable[str]) -> None:
        with ThreadPoolExecutor(_DOWNLOADS) as pool:
            list(pool.map(self._download_one, names))

    def _download_one(self, name: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        self.remote.fetch(name, partial)
        partial.rename(path)

    def _rows(self) -> set[str]:
        """Return the attempts that have a row in the copy, as CELL-NUMBER."""
        return unmerged_parts(self.folder / ATTEMPTS)

    def _is_of_another_run(self, manifest: bytes | None) -> bool:
        # The run may have been removed from the bucket, to start again.
        if not self._has(MANIFEST_FILE):
            return False
        return _created(manifest) != _created((self.folder / MANIFEST_FILE).read_bytes())

    def _set_aside(self, names: Iterable[str]) -> None:
        existing = sorted(filter(self._has, names))
        if not existing:
            return
        target = self.folder / _ASIDE / datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S-%f")
        for name in existing:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).rename(target / name)
        warn(f"{self.remote}: has other results than this host; those from here are in {target}")

    def _has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def _has_driver(self) -> bool:
        with (self.folder / LOCK_FILE).open("a+") as lock:
            return not try_lock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB, self.folder)

    @contextmanager
    def _refresh_lock(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / _REFRESH_LOCK).open("a") as lock:
            try_lock(lock, fcntl.LOCK_EX, self.folder)
            yield


def warn(text: str) -> None:
    with suppress(OSError):  # nobody reads stderr
        print(f"sweep: {text}", file=sys.stderr)


def _parts_of(attempt: str) -> list[str]:
    return [f"{table}/{attempt}.parquet" for table in _ROWS_LAST]


def _artifacts_of(attempt: str) -> str:
    cell, _, number = attempt.rpartition("-")
    return f"{ARTIFACTS}/{cell}/{number}"


def _created(manifest: bytes | None) -> object:
    # The time at which a run was created distinguishes it from other runs.
    try:
        return json.loads(manifest or b"null").get("created")
    except (ValueError, AttributeError):
        return None
