"""Have the working copy of a bucket take over what the bucket lists."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from orchestrator.common.errors import RunError
from orchestrator.store.batch_writer import BatchWriter
from orchestrator.store.bucket_merge import attempts_of, is_ahead, unlisted_rows
from orchestrator.store.layout import ARTIFACTS, ATTEMPTS, CELLS_FILE, LISTING_FILE
from orchestrator.store.listing import RESTORE, Listing, is_batch, read_listing, restored_listing
from orchestrator.store.parquet_file import is_as_written
from orchestrator.store.remote_folder import RemoteFolder
from orchestrator.store.run import Run
from orchestrator.store.stored_tables import Stored
from orchestrator.store.tables import tables
from tasks.spec.attempt import JOURNAL_FILE

_DOWNLOADS = 16  # at a time; a bucket takes tens of milliseconds to answer each request
BUCKET = ".bucket"  # what the bucket lists, until it is taken over
_KEY = ["cell", "attempt"]


class CopyRefresh:
    """The takeover of what a bucket lists into a working copy."""

    def __init__(self, remote: RemoteFolder, folder: Path) -> None:
        self.remote = remote
        self.folder = folder

    def take_over(self) -> None:
        """Take over batches and log. Rows that are only in the copy stay.

        Raise FileNotFoundError if the bucket changes while it is read.
        """
        bucket = self._fetch_list()
        here = self._stored_here()
        if is_ahead(here, bucket):
            shutil.rmtree(bucket.folder)
            return
        listed = self.remote.read(LISTING_FILE)
        self._fetch_batches(bucket)
        if self.remote.read(LISTING_FILE) != listed:
            raise FileNotFoundError(LISTING_FILE)  # replaced since, and with it its files
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
        """Return what the bucket lists, with its log, in a separate folder."""
        folder = self.folder / BUCKET
        shutil.rmtree(folder, ignore_errors=True)
        listing = fetch_listing(self.remote, folder)
        self._fetch_old_parts(is_listed=listing is not None)
        if listing is None:
            return Stored(folder, str(self.remote), Listing())
        log = self.remote.read(listing.log) or b""
        if self.remote.read(LISTING_FILE) != (folder / LISTING_FILE).read_bytes():
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
        download(self.remote, missing, self.folder)

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
        download(self.remote, missing, bucket.folder)

    def _stored_here(self) -> Stored:
        try:
            return Run(self.folder).stored()
        except RunError:  # a torn copy: its batches are compared with those of the bucket
            restored_listing(self.folder).write(self.folder)
            return Run(self.folder).stored()

    def _highest_attempts(self, here: Stored, bucket: Stored) -> Counter[str]:
        """Return each cell's highest attempt number in the copy and in the bucket."""
        keys = [*Run(self.folder).attempt_folders(), *attempts_of(here), *attempts_of(bucket)]
        with suppress(RunError):  # a torn copy
            keys += Run(self.folder).rows(ATTEMPTS, _KEY)
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


def fetch_listing(remote: RemoteFolder, folder: Path) -> Listing | None:
    """Write the list of a bucket to a folder and return it, None if there is none."""
    folder.mkdir(exist_ok=True)
    content = remote.read(LISTING_FILE)
    if content is None:
        return None
    (folder / LISTING_FILE).write_bytes(content)
    return read_listing(folder, str(remote))


def download(remote: RemoteFolder, names: Iterable[str], folder: Path) -> None:
    """Download files into a folder. One that is missing is left out: readers report it."""

    def fetch(name: str) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        with suppress(FileNotFoundError):
            remote.fetch(name, partial)
            partial.rename(path)

    with ThreadPoolExecutor(_DOWNLOADS) as pool:
        list(pool.map(fetch, names))
