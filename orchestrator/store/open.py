"""Open results to read or write: a folder, a bucket, a publication, or several of them as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from orchestrator.common.errors import RunError
from orchestrator.common.hashing import text_digest
from orchestrator.common.run_location import RunLocation
from orchestrator.store.mirror import RemoteRun, open_run
from orchestrator.store.publication import Publication, is_publication
from orchestrator.store.run import Run
from orchestrator.store.run_collection import RunCollection
from orchestrator.store.run_writer import RunWriter, open_folder_for_writing

# A character may take 4 bytes, and most file systems allow 255 bytes in a name.
_LONGEST_NAME = 60


def open_runs(locations: Sequence[RunLocation]) -> Run:
    """Return one run, or several read as one.

    Raise RunError for a folder that holds no run, and for one that is given twice.
    """
    if len(locations) == 1 and is_publication(locations[0]):
        return Publication(Path(locations[0]))
    named = runs_by_name(locations)
    first, *others = named
    if not others:
        return named[first]
    # The report of all goes into the first run's folder, under a name that lists the others.
    report = "-".join(["with", *others]).replace("/", "-")
    if len(report) > _LONGEST_NAME:
        report = f"{report[:_LONGEST_NAME]}-{text_digest(report)[:8]}"
    return RunCollection(named, named[first].folder / report)


def runs_by_name(locations: Sequence[RunLocation]) -> dict[str, Run]:
    """Return the runs by unique names, those of a publication one by one.

    Raise RunError as `open_runs` does.
    """
    runs = []
    for location in locations:
        if is_publication(location):
            folders: Sequence[RunLocation] = Publication(Path(location)).folders
        else:
            folders = [location]
        for folder in folders:
            runs.append(open_run(folder).require())
    return _by_name(runs)


def open_for_writing(run: Run, take_over: bool = False) -> AbstractContextManager[RunWriter]:
    """Return a context manager that locks the run for this process and yields its writer.

    take_over: own a bucket's folder even if another driver seems to be writing to it.
    """
    if isinstance(run, RemoteRun):
        from orchestrator.store.mirror_writer import open_remote_for_writing

        return open_remote_for_writing(run, take_over)
    return open_folder_for_writing(run)


def _by_name(runs: Sequence[Run]) -> dict[str, Run]:
    """Return the runs by the last part of their paths, or by as many parts as make names differ.

    Raise RunError if a folder is given twice.
    """
    paths = [run.folder.resolve() for run in runs]
    for path, count in Counter(paths).items():
        if count > 1:
            raise RunError(f"{path}: is named twice", "Name different runs")
    longest = max(len(path.parts) for path in paths)
    for length in range(1, longest):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return dict(zip(names, runs, strict=True))
    return dict(zip(map(str, paths), runs, strict=True))
