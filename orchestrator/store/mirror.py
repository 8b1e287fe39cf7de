"""A run in a bucket, read from a working copy in the user's cache.

The copy is an ordinary results folder. Before it is used, it takes over what the bucket lists (see
`copy_refresh`). What was measured here and is not in the bucket stays; the next driver on this host
uploads it.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from orchestrator.common.errors import RunUnwritable, SweepError
from orchestrator.common.files import Content, cache_folder, replace_file, try_lock, writing
from orchestrator.store.copy_refresh import download, refresh_copy, warn
from orchestrator.store.layout import ARTIFACTS, ATTEMPTS, CACHE, LOCK_FILE, REPORT
from orchestrator.store.listing import Listing
from orchestrator.store.manifest import MANIFEST_FILE
from orchestrator.store.remote_folder import RemoteFolder, reaching
from orchestrator.store.run import Run
from tasks.spec.attempt import ATTEMPT_FILE, LOG_FILE, RERUN_FILE

_REFRESH_LOCK = ".refresh-lock"
_ASIDE = "aside"


class RemoteRun(Run):
    """A run in a bucket, read from its working copy. Names are those of files within either."""

    def __init__(self, remote: RemoteFolder) -> None:
        super().__init__(cache_folder("copies") / remote.path)
        self.remote = remote

    def __str__(self) -> str:
        return self.remote.address

    def refresh(self, as_driver: bool = False) -> Listing | None:
        """Take over what the bucket has, and return its list. Rows that are only in the copy stay.

        Readers leave the copy alone while a driver on this host writes to it: it is ahead of the
        bucket then. Raise RunUnreachable or RunUnwritable.
        """
        with writing(self.folder), self._refresh_lock():
            if self._has_driver() and not as_driver:
                return None
            with reaching(self.remote):
                manifest = self.remote.read(MANIFEST_FILE)
                here = self.folder / MANIFEST_FILE
                # The run may have been removed from the bucket, to start again.
                if here.exists() and _created(manifest) != _created(here.read_bytes()):
                    self._set_aside()
                listing = refresh_copy(self.remote, self)
                if manifest is not None:
                    replace_file(here, manifest)
                return listing

    def fetch_artifacts(self, cell: str = "") -> None:
        rows = {f"{cell}/{number}" for cell, number in self.rows(ATTEMPTS, ["cell", "attempt"])}
        with reaching(self.remote), writing(self.folder):
            names = []
            for name in self.remote.sizes(f"{ARTIFACTS}/{cell}".rstrip("/"), recursive=True):
                _, *attempt, last = name.split("/")
                is_read = last in (ATTEMPT_FILE, LOG_FILE, RERUN_FILE)
                is_here = (self.folder / name).exists()
                if is_read and "/".join(attempt[:2]) in rows and not is_here:
                    names.append(name)
            download(self.remote, names, self.folder)

    def write_report(self, files: Iterable[tuple[str, Content]]) -> None:
        super().write_report(files)
        report = self.folder / REPORT
        try:
            with reaching(self.remote):
                for name in self.files_in(report):
                    self.remote.put(name, self.folder / name)
        except SweepError as error:
            raise RunUnwritable(
                f"the report is in {report}, but was not uploaded: {error.message}", error.remedy
            ) from error

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

    def _set_aside(self) -> None:
        target = self.folder / _ASIDE / datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S-%f")
        target.mkdir(parents=True)
        for path in self.folder.iterdir():
            if path.name not in (_ASIDE, LOCK_FILE, _REFRESH_LOCK):
                path.rename(target / path.name)
        warn(f"{self}: has another run than this host; what was here is in {target}")

    def _has_driver(self) -> bool:
        with (self.folder / LOCK_FILE).open("a+") as lock:
            return not try_lock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB, self.folder)

    @contextmanager
    def _refresh_lock(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / _REFRESH_LOCK).open("a") as lock:
            try_lock(lock, fcntl.LOCK_EX, self.folder)
            yield


def _created(manifest: bytes | None) -> object:
    # The time at which a run was created distinguishes it from other runs.
    try:
        return json.loads(manifest or b"null").get("created")
    except (ValueError, AttributeError):
        return None
