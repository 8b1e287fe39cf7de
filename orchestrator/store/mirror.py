"""A run in a bucket, read from a working copy in the user's cache.

The copy is an ordinary results folder. Before it is used, it takes over what the bucket lists: files
of batches never change, so that only those that it lacks are downloaded. What was measured here and
is not in the bucket stays; the next driver on this host uploads it. If the bucket has another
attempt of the same number by then, the one from here gets the next number.
"""

from __future__ import annotations

import fcntl
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from orchestrator.common.errors import RunError, RunUnreachable, RunUnwritable, SweepError
from orchestrator.common.files import Content, cache_folder, replace_file, try_lock, writing
from orchestrator.common.run_location import RunLocation, is_address, require_lasting
from orchestrator.store.copy_refresh import BUCKET, CopyRefresh, download, fetch_listing
from orchestrator.store.layout import ARTIFACTS, ATTEMPTS, CACHE, LOCK_FILE, REPORT
from orchestrator.store.listing import Listing, is_batch
from orchestrator.store.manifest import MANIFEST_FILE
from orchestrator.store.publication import require_listed
from orchestrator.store.remote_folder import RemoteFolder, reaching
from orchestrator.store.run import Run
from orchestrator.store.stored_tables import Stored
from orchestrator.store.tables import tables
from orchestrator.store.untrusted_files import require_plain
from tasks.spec.attempt import ATTEMPT_FILE, LOG_FILE, RERUN_FILE

_REFRESH_TRIES = 5
_REFRESH_LOCK = ".refresh-lock"
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
            download(self.remote, names, self.folder)

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
        return fetch_listing(self.remote, self.folder / BUCKET)

    def _refresh(self) -> None:
        manifest = self.remote.read(MANIFEST_FILE)
        if self._is_of_another_run(manifest):
            self._set_aside()
        for folder in (ARTIFACTS, *tables()):
            (self.folder / folder).mkdir(exist_ok=True)
        for _ in range(_REFRESH_TRIES):
            # A driver on another host may close a batch now.
            with suppress(FileNotFoundError):
                CopyRefresh(self.remote, self.folder).take_over()
                break
        else:
            raise RunUnreachable(f"{self.remote}: changes faster than it can be read", "Try again")
        if manifest is not None:
            replace_file(self.folder / MANIFEST_FILE, manifest)

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
