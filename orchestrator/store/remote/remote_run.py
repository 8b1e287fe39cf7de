"""A run elsewhere, as any other: what reads it has the copy refreshed, what writes it has what is finished carried there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from orchestrator.common.errors import RunUnwritable, SweepError
from orchestrator.common.files import Content
from orchestrator.common.user_cache import cache_folder
from orchestrator.store.remote.claim import Claim, claimed
from orchestrator.store.remote.copy import ATTEMPTS, CELLS, MANIFEST, Copy
from orchestrator.store.remote.folder import RemoteFolder, reaching
from orchestrator.store.remote.uploads import Uploads, insist
from orchestrator.store.run import Run
from orchestrator.store.run_writer import RunWriter, open_folder_for_writing
from tasks.spec.outcome import Outcome
from tasks.spec.tables import Sample

if TYPE_CHECKING:
    import pandas as pd


class RemoteRun(Run):
    """folder: of the working copy."""

    def __init__(self, place: RemoteFolder) -> None:
        super().__init__(cache_folder("copies") / place.path)
        self.place = place

    def __str__(self) -> str:
        return self.place.address

    def refresh(self) -> None:
        copy = Copy(self.place, self.folder)
        copy.refresh()
        _say_what_was_set_aside(copy)

    def fetch_artifacts(self, cell: str = "") -> None:
        Copy(self.place, self.folder).fetch_artifacts(cell)

    def write_report(self, files: Iterable[tuple[str, Content]]) -> None:
        super().write_report(files)
        copy = Copy(self.place, self.folder)
        try:
            with reaching(self.place):
                for path in sorted((self.folder / "report").rglob("*")):
                    if path.is_file() and not path.name.startswith("."):
                        copy.carry(path.relative_to(self.folder).as_posix())
        except SweepError as error:
            raise RunUnwritable(
                f"the report is in {self.folder / 'report'}, and not there: {error.message}",
                error.remedy,
            ) from error


class CarryingWriter(RunWriter):
    """A store's writer: what it has written goes to the place, each attempt's row after all that the attempt left."""

    def __init__(
        self, folder: Path, lock: IO[str] | None, copy: Copy, uploads: Uploads, claim: Claim
    ) -> None:
        super().__init__(folder, lock)
        self._copy, self._uploads, self._claim = copy, uploads, claim
        self._parts = set(copy.parts())

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """A new run's is there before anything is measured: it tells this run from another that was begun anew."""
        self._claim.require_now()
        super().write_manifest(manifest)
        if self._copy.begun:
            self._uploads.put([MANIFEST])
        else:
            insist(self._copy, MANIFEST)

    def append(self, outcome: Outcome, commit: str | None) -> None:
        super().append(outcome, commit)
        self._carry_parts(self._copy.artifacts(outcome.attempt.path))
        self._claim.require()

    def append_predictions(self, samples: Mapping[str, Iterable[Sample]]) -> None:
        super().append_predictions(samples)
        self._carry_parts()

    def merge_parts(self) -> None:
        super().merge_parts()
        self._carry_parts()

    def may_merge(self, part: Path) -> bool:
        """What is there already: see copy."""
        return self._copy.ledger.has(part.relative_to(self.folder).as_posix())

    def write_cells(self, cells: pd.DataFrame) -> None:
        super().write_cells(cells)
        self._uploads.put([CELLS])

    def _carry_parts(self, artifacts: Iterable[str] = ()) -> None:
        """Those that are new, and away with those that were merged into them."""
        before, self._parts = self._parts, set(self._copy.parts())
        new = sorted(self._parts - before)
        rows = [name for name in new if name.startswith(f"{ATTEMPTS}/")]
        self._uploads.put(
            [*artifacts, *(name for name in new if name not in rows)],
            rows,
            gone=sorted(before - self._parts),
        )


@contextmanager
def open_remote_for_writing(run: RemoteRun) -> Iterator[RunWriter]:
    """Raises, beside what a folder does, RunLocked for a driver of another host and RunUnreachable; at the end RunUnwritable
    for what could not be carried."""
    with open_folder_for_writing(run) as local, claimed(run.place) as claim:
        copy = Copy(run.place, run.folder)
        copy.refresh(working=True)
        if not copy.begun:
            insist(copy, MANIFEST)
        with reaching(run.place):
            left = copy.leftovers()
        _say_what_was_set_aside(copy)
        uploads = Uploads(copy, claim.require_now)
        uploads.put(*left)
        try:
            yield CarryingWriter(run.folder, local.lock, copy, uploads, claim)
        except BaseException as wrong:
            _finish_quietly(uploads, wrong)
            raise
        uploads.finish()


def _finish_quietly(uploads: Uploads, wrong: BaseException) -> None:
    """Something went wrong, and is what is said, last; what is not there the next run carries."""
    try:
        uploads.finish()
    except SweepError as error:
        if str(error) != str(wrong):
            click.echo(f"sweep: {error}", err=True)


def _say_what_was_set_aside(copy: Copy) -> None:
    if copy.set_aside:
        first, *others = copy.set_aside
        more = f" and {len(others)} more" if others else ""
        click.echo(f"{copy.place} has others: {first}{more}: kept there, and not counted", err=True)
