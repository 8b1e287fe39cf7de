"""Open results to read or to write: a folder, a bucket, a publication, or several of them as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from orchestrator.common.errors import RunError
from orchestrator.common.hashing import text_digest
from orchestrator.store.publication import Publication, is_publication
from orchestrator.store.remote.address import RunLocation, is_address
from orchestrator.store.remote.folder import RemoteFolder
from orchestrator.store.remote.remote_run import RemoteRun, open_remote_for_writing
from orchestrator.store.run import Run
from orchestrator.store.run_collection import RunCollection
from orchestrator.store.run_writer import RunWriter, open_folder_for_writing

_LONGEST_NAME = 60  # letters, of up to 4 bytes; file systems take 255 bytes


def open_runs(folders: Sequence[RunLocation]) -> Run:
    """One, or several as one. Raises RunError for a folder that holds no run, and for one that is named twice."""
    if len(folders) == 1 and is_publication(folders[0]):
        return Publication(Path(folders[0]))
    runs = list(runs_by_name(folders).values())
    return runs[0] if len(runs) == 1 else collect_runs(runs)


def collect_runs(runs: Sequence[Run]) -> RunCollection:
    """Raises RunError for the same twice."""
    named = dict(zip(_names([run.folder for run in runs]), runs, strict=True))
    first, *others = named
    return RunCollection(
        named, named[first].folder / _short("-".join(["with", *others]).replace("/", "-"))
    )


def _short(name: str) -> str:
    """A name that every file system takes, of as many runs as there may be."""
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}-{text_digest(name)[:8]}"


def runs_by_name(folders: Sequence[RunLocation]) -> dict[str, Run]:
    """Each by a name of its own, the runs of a publication one by one. Raises RunError as `open_runs` does."""
    within = [
        Publication(Path(folder)).folders if is_publication(folder) else [folder]
        for folder in folders
    ]
    runs = [open_run(folder).require() for found in within for folder in found]
    return dict(zip(_names([run.folder for run in runs]), runs, strict=True))


def published_reference(run: Run) -> str | None:
    """Of a publication, whose numbers its report has beside its own; None of any other run."""
    return run.against if isinstance(run, Publication) else None


def _names(folders: Sequence[Path]) -> list[str]:
    """The last part of each path, or as many as it takes. Raises RunError for the same folder twice."""
    paths = [folder.resolve() for folder in folders]
    twice = [path for path, count in Counter(paths).items() if count > 1]
    if twice:
        raise RunError(f"{twice[0]}: is named twice", "Name different runs")
    most = max(len(path.parts) for path in paths)
    for length in range(1, most + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def open_for_writing(run: Run) -> AbstractContextManager[RunWriter]:
    """Return a context manager that gives the run to this process alone and yields its writer."""
    return (
        open_remote_for_writing(run) if isinstance(run, RemoteRun) else open_folder_for_writing(run)
    )


def open_run(where: RunLocation) -> Run:
    """The run of a folder, or of an address, with what is there. Raises RunError for a file, RunUnreachable, ConfigError for no
    address.
    """
    if not is_address(where):
        if Path(where).is_file():
            raise RunError(f"{where}: is a file", "Name a folder")
        return Run(Path(where))
    run = RemoteRun(RemoteFolder(str(where)))
    run.refresh()
    return run
