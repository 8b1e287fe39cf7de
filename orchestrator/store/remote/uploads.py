"""What is finished goes to its place beside the measuring, in the order in which it was finished.

What a driver could not carry it tries again every few seconds, and at the end; then it is left in the copy, and said.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from orchestrator.common.errors import RunLocked, RunUnreachable, RunUnwritable, SweepError
from orchestrator.store.remote.copy import Copy
from orchestrator.store.remote.folder import reaching

AGAIN_S = 10.0  # after which what failed is tried again
PATIENCE_S = 20.0  # at the end, without anything that went
_AT_ONCE = 8


@dataclass(frozen=True)
class Load:
    """stages: names of what goes together; what is in one goes when all of that before is there. gone: what is then removed."""

    stages: tuple[tuple[str, ...], ...]
    gone: tuple[str, ...] = ()


def insist(copy: Copy, name: str) -> None:
    """Carries it now. Raises RunUnreachable after some patience."""
    began = time.monotonic()
    while True:
        try:
            with reaching(copy.place):
                return copy.carry(name)
        except RunUnreachable:
            if time.monotonic() - began > PATIENCE_S:
                raise
        time.sleep(min(1.0, AGAIN_S))


class Uploads:
    """One thread that carries loads one after another, the files of each several at a time."""

    def __init__(self, copy: Copy, require: Callable[[], None]) -> None:
        """require: raises RunLocked where the place is another driver's meanwhile."""
        self._copy, self._require = copy, require
        self._barred: RunLocked | None = None
        self._queue: SimpleQueue[Load | None] = SimpleQueue()
        self._failed: list[Load] = []
        self._said = ""
        self._ended = threading.Event()
        self._pool = ThreadPoolExecutor(_AT_ONCE, initializer=_step_back)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def put(self, *stages: Iterable[str], gone: Iterable[str] = ()) -> None:
        load = Load(tuple(names for stage in stages if (names := tuple(stage))), tuple(gone))
        if load.stages or load.gone:
            self._queue.put(load)

    def finish(self) -> None:
        """Waits until all is there. Raises RunUnwritable for what is not, or RunLocked where the place is another driver's."""
        self._queue.put(None)
        try:
            while not self._ended.wait(1.0):
                pass
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)
        if self._barred:
            raise self._barred
        if self._failed:
            left = {
                name
                for load in self._failed
                for stage in load.stages
                for name in stage
                if not self._copy.ledger.has(name)
            }
            raise RunUnwritable(
                f"{self._copy.place}: {len(left)} files could not be carried there: {self._said}",
                f"They are kept in {self._copy.folder}, and the next `sweep run` from here carries them",
            )

    def _work(self) -> None:
        _step_back()
        try:
            while (load := self._next()) is not None:
                self._carry_again() if load == Load(()) else self._carry(load)
            tried = time.monotonic()
            while self._failed and not self._barred and time.monotonic() - tried < PATIENCE_S:
                if self._carry_again():
                    tried = time.monotonic()
        finally:
            self._ended.set()

    def _next(self) -> Load | None:
        """An empty one where it is time to try again what failed."""
        try:
            return self._queue.get(timeout=AGAIN_S if self._failed else None)
        except Empty:
            return Load(())

    def _carry_again(self) -> bool:
        """Whether any of it went. The first that does not go keeps the others from trying in vain."""
        failed, self._failed = self._failed, []
        for place, load in enumerate(failed):
            self._carry(load)
            if self._failed:
                self._failed += failed[place + 1 :]
                time.sleep(min(1.0, AGAIN_S))
                return place > 0
        return bool(failed)

    def _carry(self, load: Load) -> None:
        try:
            with reaching(self._copy.place):
                for stage in load.stages:
                    self._require()
                    self._each(self._copy.carry, stage)
                self._each(self._copy.place.remove, load.gone)
        except RunLocked as error:
            self._barred = error
            self._failed.append(load)
        except SweepError as error:
            self._said = error.message.removeprefix(f"{self._copy.place}: cannot be reached: ")
            self._failed.append(load)
        except Exception as error:  # of a file system of somebody else's, or of a disk of ours; or nobody waits any more
            self._said = f"{type(error).__name__}: {error}"
            self._failed.append(load)

    def _each(self, do: Callable[[str], None], names: Iterable[str]) -> None:
        """Where one fails no other is begun, and those under way are waited for: nothing arrives once the claim is given up."""
        begun = [self._pool.submit(do, name) for name in names]
        try:
            for one in begun:
                one.result()
        except Exception:
            for one in [one for one in begun if not one.cancel()]:
                one.exception()
            raise


def _step_back() -> None:
    """This thread, behind whatever measures on this host: Linux has a niceness for each."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
