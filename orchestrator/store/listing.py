"""stored.json lists the batches of a run, each file with its SHA-256.

A batch counts from the moment at which the list with its files replaces the one before. No name in
the list is used as a path before it was found to be TABLE/NNNN.parquet.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from orchestrator.common.errors import RunError
from orchestrator.common.files import flush_folder, replace_file
from orchestrator.common.hashing import sha256
from orchestrator.store.layout import ATTEMPTS, LISTING_FILE, SCHEMA_VERSION
from orchestrator.store.tables import SCHEMAS, damage_as_run_error, read_parquet
from orchestrator.store.untrusted_files import digested_json, read_json

RESTORE = "Copy the run again, or repair it: `sweep run` with the same config"
# Parts of older versions are named by a time of 19 digits, among other things.
_FILE = re.compile(r"[a-z]+/[0-9]{4,9}\.parquet", re.ASCII)


class Listing(BaseModel):
    """The files of the batches with their SHA-256, and the SHA-256 of cells.parquet.

    last: the highest number of a batch that was ever listed; none is used again.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    files: dict[str, str] = {}
    last: int = 0
    cells: str = ""

    @property
    def next_number(self) -> int:
        """The number of the batch that comes next, whose attempts are in a log until then."""
        return max(self.last, *map(number_of, self.files), 0) + 1

    @property
    def log(self) -> str:
        """The name of the log."""
        return f"{self.next_number:04}.log"

    def of_table(self, table: str) -> list[str]:
        """Return the names of a table's files, the oldest first."""
        names = [name for name in self.files if name.startswith(f"{table}/")]
        return sorted(names, key=number_of)

    def text(self) -> str:
        """Return the content of the file."""
        return digested_json({"schema_version": SCHEMA_VERSION, **self.model_dump()})

    def write(self, folder: Path) -> None:
        """Replace the list of a run."""
        replace_file(folder / LISTING_FILE, self.text())
        flush_folder(folder)


def number_of(name: str) -> int:
    """Return the number in the name of a batch's file."""
    return int(name[name.rfind("/") + 1 : name.rfind(".")])


def is_batch(name: str) -> bool:
    """Return True for the name of a batch's file, as TABLE/NNNN.parquet."""
    return _FILE.fullmatch(name) is not None


def batches_in(folder: Path, *tables: str) -> list[str]:
    """Return the names of the batches' files in a folder, also those that are not listed.

    tables: all, if none is named.
    """
    files = [path for table in tables or SCHEMAS for path in (folder / table).glob("*.parquet")]
    names = [f"{path.parent.name}/{path.name}" for path in sorted(files)]
    return [name for name in names if is_batch(name)]


def part_files(folder: Path) -> list[Path]:
    """Return the parts of a table, as versions before stored.json wrote them (see `old_parts`)."""
    # macOS writes attributes of `x.parquet` into a file `._x.parquet` when it copies to others.
    files = sorted(folder.glob("[!.]*.parquet"))
    return [path for path in files if not is_batch(f"{folder.name}/{path.name}")]


def parse_listing(content: bytes | None, run: str) -> Listing:
    """Return the list of a run; an empty one before its first batch.

    content: of stored.json, None without one. run: its name in messages. Raise RunError if the list
    is damaged or lists anything but batches, RunMismatch if a newer program wrote it.
    """
    if content is None:
        return Listing()
    name = f"{run}/{LISTING_FILE}"
    _, listing = read_json(content, Listing, name, RESTORE)
    for one in listing.files:
        if not is_batch(one):
            raise RunError(f"{name}: {one!r} is not the name of a batch", "Do not use this run")
    return listing


def require_all_listed(folder: Path, listing: Listing, run: str) -> None:
    """Raise RunError if a list is older than the batches in the folder of a run.

    A driver that is killed before it lists a batch leaves the attempts of that batch in the log.
    """
    next_number = listing.next_number
    for one in batches_in(folder, ATTEMPTS):
        is_unlisted = number_of(one) >= next_number
        if is_unlisted and not (folder / f"{number_of(one):04}.log").exists():
            raise RunError(f"{run}/{LISTING_FILE}: is missing, or older than {one}", RESTORE)


def restored_listing(folder: Path) -> Listing:
    """Return the list of all batches in a folder, for a run whose list was lost.

    The attempts in a log are not in a batch, or in one that was not finished. Files that cannot be
    read are left out.
    """
    files = {}
    for name in batches_in(folder):
        if not (folder / f"{number_of(name):04}.log").exists():
            content = (folder / name).read_bytes()
            with suppress(RunError), damage_as_run_error(name, RESTORE):
                read_parquet(content, SCHEMAS[name.partition("/")[0]], None)
                files[name] = sha256(content)
    return Listing(files=files)
