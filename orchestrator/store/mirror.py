"""A run in a bucket, read from a working copy in the user's cache.

The copy is an ordinary results folder. Before it is used, it takes over what the bucket lists: files
of batches never change, so that only those that it lacks are downloaded. What was measured here and
is not in the bucket stays; the next driver on this host uploads it. If the bucket has another
attempt of the same number by then, the one from here gets the next number.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from orchestrator.common.errors import RunError, RunUnreachable, RunUnwritable, SweepError
from orchestrator.common.files import Content, cache_folder, replace_file, try_lock, writing
from orchestrator.common.run_location import RunLocation, is_address, require_lasting
from orchestrator.store.batch_writer import BatchWriter
from orchestrator.store.bucket_merge import attempts_of, is_ahead, unlisted_rows
from orchestrator.store.layout import (
    ARTIFACTS,
    ATTEMPTS,
    CACHE,
    CELLS_FILE,
    LISTING_FILE,
    LOCK_FILE,
    REPORT,
)
from orchestrator.store.listing import RESTORE, Listing, is_batch, read_listing, restored_listing
from orchestrator.store.manifest import MANIFEST_FILE
from orchestrator.store.parquet_file import is_as_written
from orchestrator.store.publication import require_listed
from orchestrator.store.remote_folder import RemoteFolder, reaching
from orchestrator.store.run import Run
from orchestrator.store.stored_tables import Stored
from orchestrator.store.tables import tables
from orchestrator.store.untrusted_files import require_plain
from tasks.spec.attempt import ATTEMPT_FILE, JOURNAL_FILE, LOG_FILE, RERUN_FILE

_REFRESH_TRIES = 5
_DOWNLOADS = 16  # at a time; a bucket takes tens of milliseconds to answer each request
_REFRESH_LOCK = ".refresh-lock"
_BUCKET = ".bucket"  # what the bucket lists, until it is taken over
_ASIDE = "aside"
_KEY = ["cell", "attempt"]


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
        """Take over what the bucket has. Rows that are only in the copy stay.

        Readers leave the copy alone while a driver on this host writes to it: it is ahead of the
        bucket then. Raise RunUnreachable or RunUnwritable.
        """
        with writing(self.folder), self._refresh_lock():
            if as_driver or not self._has_driver():
                with reaching(self.remote):
                    self._refresh()

    def fetch_artifacts(self, cell: str) -> None:
        """Download what people read of attempts: of one cell, or of all if it is empty."""
        rows = {f"{cell}/{number}" for cell, number in self._run().rows(ATTEMPTS, _KEY)}
        with reaching(self.remote), writing(self.folder):
            names = []
            for name in self.remote.sizes(f"{ARTIFACTS}/{cell}".rstrip("/"), recursive=True):
                _, *attempt, last = name.split("/")
                is_read = last in (ATTEMPT_FILE, LOG_FILE, RERUN_FILE)
                is_here = (self.folder / name).exists()
                if is_read and "/".join(attempt[:2]) in rows and not is_here:
                    names.append(name)
            self._download(names, self.folder)

    def upload(self, name: str) -> None:
        self.remote.put(name, self.folder / name)

    def missing_files(self) -> list[str]:
        """Return artifacts and parts of older versions that the bucket lacks."""
        missing = []
        for table in tables():
            files = (self.folder / table).glob("[!.]*.parquet")
            parts = {name for file in files if not is_batch(name := f"{table}/{file.name}")}
            missing += sorted(parts - self.remote.sizes(table).keys())
        rows = list(self._run().rows(ATTEMPTS, _KEY))
        if any((self.folder / ARTIFACTS).glob("*")):
            there = self.remote.sizes(ARTIFACTS, recursive=True)
            for cell, number in rows:
                missing += [name for name in self.artifacts(cell, number) if name not in there]
        return missing

    def artifacts(self, cell: str, number: int) -> list[str]:
        """Return the files of an attempt in the copy."""
        return self.files_in(self._run().attempt_folder(cell, number))

    def files_in(self, folder: Path) -> list[str]:
        """Return the files below a folder of the copy.

        Leave out hidden files, which are being written, and what compilers have cached.
        """
        found = []
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(self.folder.absolute())
            if path.is_file() and not path.name.startswith(".") and CACHE not in name.parts:
                found.append(name.as_posix())
        return found

    def stored(self) -> Stored:
        """Return what is stored in the copy."""
        return self._run().stored()

    def fetch_listing(self) -> Listing | None:
        """Return the list in the bucket, None if there is none."""
        content = self.remote.read(LISTING_FILE)
        if content is None:
            return None
        file = self.folder / _BUCKET / LISTING_FILE
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)
        return read_listing(file.parent, str(self.remote))

    def _refresh(self) -> None:
        manifest = self.remote.read(MANIFEST_FILE)
        if self._is_of_another_run(manifest):
            self._set_aside()
        for folder in (ARTIFACTS, *tables()):
            (self.folder / folder).mkdir(exist_ok=True)
        for _ in range(_REFRESH_TRIES):
            # A driver on another host may close a batch meanwhile.
            with suppress(FileNotFoundError):
                self._take_over()
                break
        else:
            raise RunUnreachable(f"{self.remote}: changes faster than it can be read", "Try again")
        if manifest is not None:
            replace_file(self.folder / MANIFEST_FILE, manifest)

    def _take_over(self) -> None:
        bucket = self._fetch_list()
        here = self._stored_here()
        if is_ahead(here, bucket):
            shutil.rmtree(bucket.folder)
            return
        listed = self.remote.read(LISTING_FILE)
        self._fetch_batches(bucket)
        if self.remote.read(LISTING_FILE) != listed:
            raise FileNotFoundError(LISTING_FILE)  # replaced meanwhile, and with it its files
        highest = self._highest_attempts(here, bucket)
        more = unlisted_rows(here, bucket, highest)
        left_behind = self._left_behind(here, bucket, highest)
        # What was measured here comes first, because it is nowhere else. A listed file that is not
        # moved into place before a kill is downloaded again.
        BatchWriter(self.folder, str(self.remote)).take_over(here, bucket, more.tables)
        for name in (*bucket.listing.files, CELLS_FILE):
            if (bucket.folder / name).exists():
                (self.folder / name).parent.mkdir(exist_ok=True)
                (bucket.folder / name).replace(self.folder / name)
        for (cell, number), new in {**left_behind, **more.renumbered}.items():
            with suppress(FileNotFoundError):
                folder = self.folder / ARTIFACTS / cell
                (folder / str(number)).rename(folder / str(new))
        shutil.rmtree(bucket.folder)

    def _fetch_list(self) -> Stored:
        """Return what the bucket lists, with its log, in a folder of its own."""
        folder = self.folder / _BUCKET
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        content = self.remote.read(LISTING_FILE)
        self._fetch_old_parts(is_listed=content is not None)
        if content is None:
            return Stored(folder, str(self.remote), Listing())
        (folder / LISTING_FILE).write_bytes(content)
        listing = read_listing(folder, str(self.remote))
        log = self.remote.read(listing.log) or b""
        if self.remote.read(LISTING_FILE) != content:
            raise FileNotFoundError(LISTING_FILE)  # the log may be in a batch by now
        return Stored(folder, str(self.remote), listing, log)

    def _fetch_old_parts(self, is_listed: bool) -> None:
        """Download the parts of older versions, which have no list."""
        missing = []
        for table in tables():
            for name, size in self.remote.sizes(table).items():
                file = self.folder / name
                if is_batch(name):
                    if table == ATTEMPTS and not is_listed:
                        raise RunError(f"{self.remote}: its {LISTING_FILE} is gone", RESTORE)
                    continue
                is_part = name.endswith(".parquet") and not file.name.startswith(".")
                if is_part and not (file.exists() and file.stat().st_size == size):
                    missing.append(name)
        self._download(missing, self.folder)

    def _fetch_batches(self, bucket: Stored) -> None:
        """Have all listed files in the folder of what the bucket lists."""
        wanted = {**bucket.listing.files, CELLS_FILE: bucket.listing.cells}
        missing = []
        for name, digest in wanted.items():
            if is_as_written(self.folder / name, digest):
                target = bucket.folder / name
                target.parent.mkdir(exist_ok=True)
                os.link(self.folder / name, target)
            elif digest:
                missing.append(name)
        self._download(missing, bucket.folder)

    def _stored_here(self) -> Stored:
        try:
            return self._run().stored()
        except RunError:  # a torn copy: its batches are compared with those of the bucket
            restored_listing(self.folder).write(self.folder)
            return self._run().stored()

    def _highest_attempts(self, here: Stored, bucket: Stored) -> Counter[str]:
        """Return each cell's highest attempt number in the copy and in the bucket."""
        keys = [*self._run().attempt_folders(), *attempts_of(here), *attempts_of(bucket)]
        with suppress(RunError):  # a torn copy
            keys += self._run().rows(ATTEMPTS, _KEY)
        highest = Counter[str]()
        for cell, number in keys:
            highest[cell] = max(number, highest[cell])
        return highest

    def _left_behind(
        self, here: Stored, bucket: Stored, highest: Mapping[str, int]
    ) -> dict[tuple[str, int], int]:
        """Return new numbers for folders of attempts that were killed here.

        Their numbers have other attempts in the bucket by now.
        """
        arrived = attempts_of(bucket).keys() - attempts_of(here).keys()
        found = {}
        for cell, number in sorted(arrived):
            journal = self.folder / ARTIFACTS / cell / str(number) / JOURNAL_FILE
            if not journal.parent.exists():
                continue
            name = f"{ARTIFACTS}/{cell}/{number}"
            sizes = self.remote.sizes(name)
            is_same = journal.exists() and journal.stat().st_size == sizes.get(
                f"{name}/{JOURNAL_FILE}"
            )
            if not is_same:
                found[cell, number] = highest[cell] + 1
        return found

    def _download(self, names: Iterable[str], folder: Path) -> None:
        def download(name: str) -> None:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}.{os.getpid()}")
            with suppress(FileNotFoundError):  # readers report what is listed and missing
                self.remote.fetch(name, partial)
                partial.rename(path)

        with ThreadPoolExecutor(_DOWNLOADS) as pool:
            list(pool.map(download, names))

    def _run(self) -> Run:
        return Run(self.folder)

    def _is_of_another_run(self, manifest: bytes | None) -> bool:
        # The run may have been removed from the bucket, to start again.
        file = self.folder / MANIFEST_FILE
        return file.exists() and _created(manifest) != _created(file.read_bytes())

    def _set_aside(self) -> None:
        target = self.folder / _ASIDE / datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S-%f")
        target.mkdir(parents=True)
        for path in self.folder.iterdir():
            if path.name not in (_ASIDE, LOCK_FILE, _REFRESH_LOCK):
                path.rename(target / path.name)
        warn(f"{self.remote}: has another run than this host; what was here is in {target}")

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


def _created(manifest: bytes | None) -> object:
    # The time at which a run was created distinguishes it from other runs.
    try:
        return json.loads(manifest or b"null").get("created")
    except (ValueError, AttributeError):
        return None
