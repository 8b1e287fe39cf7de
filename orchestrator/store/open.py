"""Open results to read or write: a folder, a bucket, a publication, or several of them as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.common.errors import RunError, SweepError
from orchestrator.common.hashing import sha256
from orchestrator.common.output import warn
from orchestrator.common.run_location import RunLocation, is_address, require_lasting
from orchestrator.store.layout import PUBLICATION_FILE
from orchestrator.store.run import Run
from orchestrator.store.run_collection import (
    Publication,
    RunCollection,
    is_publication,
    read_contents,
)
from orchestrator.store.untrusted_files import require_plain

if TYPE_CHECKING:
    from orchestrator.store.run_writer import RunWriter

# A character may take 4 bytes, and most file systems allow 255 bytes in a name.
_LONGEST_NAME = 60


def open_run(location: RunLocation) -> Run:
    """Return the run of a folder or address, downloaded if it is remote.

    Raise RunError for a file and for a folder with links or pipes, ConfigError for an address that
    is wrong, RunUnreachable.
    """
    if isinstance(location, str):
        require_lasting(location)
    if is_address(location):
        from orchestrator.store.mirror import RemoteRun
        from orchestrator.store.remote_folder import RemoteFolder

        remote = RemoteRun(RemoteFolder(str(location)))
        remote.refresh()
        return remote
    folder = Path(location)
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{location}: is a file", "Name a folder")
    publication = folder.absolute().parent
    if (publication / PUBLICATION_FILE).exists():
        read_contents(publication, only=f"{folder.absolute().name}/")
    run = Run(folder)
    try:
        require_plain(folder)
    except RunError as error:
        if run.exists:
            raise
        # Nobody is to remove a link from a folder that was named by mistake.
        remedy = "Name the folder of a run, or a new one"
        raise RunError(f"{location}: holds no run, and {error.message}", remedy) from error
    return run


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
        report = f"{report[:_LONGEST_NAME]}-{sha256(report)[:8]}"
    return RunCollection(named, named[first].folder / report)


def runs_by_name(locations: Sequence[RunLocation]) -> dict[str, Run]:
    """Return the runs by unique names, those of a publication one by one.

    A name is the last part of a path, or as many parts as make names differ. Raise RunError as
    `open_runs` does.
    """
    runs: list[Run] = []
    for location in locations:
        if is_publication(location):
            runs += Publication(Path(location)).runs.values()
        else:
            runs.append(open_run(location).require())
    paths = [run.folder.resolve() for run in runs]
    for path, count in Counter(paths).items():
        if count > 1:
            raise RunError(f"{path}: is named twice", "Name different runs")
    for length in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return dict(zip(names, runs, strict=True))
    return dict(zip(map(str, paths), runs, strict=True))


@contextmanager
def open_for_writing(run: Run, take_over: bool = False) -> Iterator[RunWriter]:
    """Lock the run for this process and yield its writer. Raise RunLocked or RunUnwritable.

    After an error of the body, that one is raised, and an error of the writer's end is printed.
    take_over: own a bucket's folder even if another driver seems to be writing to it.
    """
    from orchestrator.store.mirror import RemoteRun
    from orchestrator.store.run_writer import RunWriter, locked

    with ExitStack() as stack:
        lock = stack.enter_context(locked(run))
        if isinstance(run, RemoteRun):
            from orchestrator.store.mirror_writer import MirrorWriter, owned

            require_owner = stack.enter_context(owned(run.remote, lock, take_over))
            writer: RunWriter = MirrorWriter(run, lock, require_owner)
        else:
            writer = RunWriter(run.folder, lock)
        try:
            yield writer
        except BaseException as error:
            try:
                writer.end()
            except SweepError as second:
                if str(second) != str(error):
                    warn(str(second))
            raise
        writer.end()
