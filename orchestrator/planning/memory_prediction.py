"""Predicts the memory of cells in processes of their own, each distinct need once, and remembers what came of it.

This process imports no torch: it hands requests to `python -m tasks.prediction`, as many at a time as there are cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from queue import LifoQueue
from typing import Any

from orchestrator.common.hashing import text_digest
from orchestrator.common.user_cache import cache_folder
from orchestrator.execution.measuring_process import PROGRAM, import_path, lifeline
from orchestrator.hardware.gpu_catalog import GpuModel
from tasks.prediction.allocator import cublas_workspace_bytes
from tasks.prediction.records import (
    VERSION,
    Prediction,
    PredictionRequest,
    Verdict,
    memory_identity,
    unknown,
    unsupported_reason,
)
from tasks.spec.cell import Cell
from tasks.spec.tables import Sample

_COMMAND = (*PROGRAM[:-1], "tasks.prediction")
_TIMEOUT_S = 120.0  # of one cell, which takes seconds: somebody's model may not come back
_HEARD_BYTES = 4096  # of what a predictor said last
_GIB = 1024**3


@dataclass(frozen=True)
class PredictedCell:
    """The predicted memory of a cell, and the memory that it may use on its GPU."""

    cell: Cell
    prediction: Prediction
    limit_bytes: int | None

    @property
    def verdict(self) -> Verdict | None:
        """Whether the cell fits; None if nothing can be predicted."""
        return None if self.limit_bytes is None else self.prediction.verdicts.get(self.limit_bytes)

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The samples that are stored, with the verdict."""
        return self.prediction.samples_with(self.verdict)

    @property
    def oom_reason(self) -> str:
        """Why the cell runs out of memory."""
        return self.prediction.why_oom(self.limit_bytes)


def predict_memory(
    cells: Sequence[Cell], card: GpuModel | None, import_paths: tuple[str, ...]
) -> dict[str, Prediction]:
    """By cell id. Raises nothing: what could not be predicted says why."""
    with predicting(card, import_paths) as predict:
        return predict(cells)


@contextmanager
def predicting(
    card: GpuModel | None, import_paths: tuple[str, ...]
) -> Iterator[Callable[[Sequence[Cell]], dict[str, Prediction]]]:
    """`predict_memory` to be called again and again, with processes that stay in between."""
    with _children(_cores()) as idle:
        yield lambda cells: _predict(cells, card, import_paths, idle)


def _predict(
    cells: Sequence[Cell],
    card: GpuModel | None,
    import_paths: tuple[str, ...],
    idle: LifoQueue[_Child],
) -> dict[str, Prediction]:
    requests = _requests(
        [cell for cell in cells if not unsupported_reason(cell)], card, import_paths
    )
    known = {
        key: found
        for key, request in requests.items()
        if (found := _recall(key, request)) is not None
    }
    missing = {key: request for key, request in requests.items() if key not in known}
    for key, prediction in _ask_all(missing, idle):
        known[key] = prediction
        _remember(key, missing[key], prediction)
    return {
        cell.id: unknown(unsupported_reason(cell))
        if unsupported_reason(cell)
        else _for(cell, known[_key(cell, card)])
        for cell in cells
    }


def _for(cell: Cell, prediction: Prediction) -> Prediction:
    return (
        prediction
        if cell.params.values().get("compile", "eager") == "eager"
        else prediction.as_eager()
    )


def cap_bytes(cell: Cell, card: GpuModel | None) -> int | None:
    """What the allocator of a cell may reserve, as far as it is known: its own limit, and what the GPU has."""
    limit = cell.params.memory_limit_gib
    caps = [int(limit * _GIB)] if limit is not None else []
    return min([*caps, *([card.usable_bytes] if card else [])], default=None)


def verdict_of(cell: Cell, prediction: Prediction, card: GpuModel | None) -> Verdict | None:
    cap = cap_bytes(cell, card)
    return None if cap is None else prediction.verdicts.get(cap)


def _requests(
    cells: Iterable[Cell], card: GpuModel | None, import_paths: tuple[str, ...]
) -> dict[str, PredictionRequest]:
    """One for all cells that need the same."""
    alike: dict[str, list[Cell]] = {}
    for cell in cells:
        alike.setdefault(_key(cell, card), []).append(cell)
    workspace_bytes = cublas_workspace_bytes(card.compute_capability if card else None)
    return {
        key: PredictionRequest(same[0], _caps(same, card), workspace_bytes, import_paths)
        for key, same in alike.items()
    }


def _caps(cells: Iterable[Cell], card: GpuModel | None) -> tuple[int, ...]:
    return tuple(sorted({cap for cell in cells if (cap := cap_bytes(cell, card)) is not None}))


def _key(cell: Cell, card: GpuModel | None) -> str:
    workspace_bytes = cublas_workspace_bytes(card.compute_capability if card else None)
    identity = json.dumps(
        [memory_identity(cell), workspace_bytes, VERSION, _torch_version()], sort_keys=True
    )
    return text_digest(identity)[:32]


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def _cache_folder() -> Path:
    return cache_folder("predictions")


def _recall(key: str, request: PredictionRequest) -> Prediction | None:
    """What was predicted before, if it says what is asked now: of another cap often enough by the peaks alone."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = Prediction.from_json((_cache_folder() / f"{key}.json").read_text())
        plain = {
            cap: verdict for cap in request.caps_bytes if (verdict := found.plain_verdict(cap))
        }
        found = replace(found, verdicts={**plain, **found.verdicts})
        return found if set(request.caps_bytes) <= set(found.verdicts) else None
    return None


def _remember(key: str, request: PredictionRequest, prediction: Prediction) -> None:
    """Not what failed, nor what is of somebody's own model: its code may be another tomorrow."""
    if not prediction.how or request.cell.params.values().get("model") is not None:
        return
    with suppress(OSError):  # a cache that cannot be written costs time, nothing else
        _cache_folder().mkdir(parents=True, exist_ok=True)
        aside = _cache_folder() / f".{key}.{os.getpid()}"
        aside.write_text(prediction.to_json())
        aside.rename(_cache_folder() / f"{key}.json")


def _ask_all(
    requests: Mapping[str, PredictionRequest], idle: LifoQueue[_Child]
) -> Iterator[tuple[str, Prediction]]:
    """The passes of one model and length are asked of one process, the whole step first: the others are parts of it."""
    groups: dict[str, list[tuple[str, PredictionRequest]]] = {}
    for key, request in sorted(
        requests.items(),
        key=lambda item: str(item[1].cell.params.values().get("pass")),
        reverse=True,
    ):
        groups.setdefault(_without_pass(request.cell), []).append((key, request))
    if not groups:
        return
    threads = ThreadPoolExecutor(min(len(groups), _cores()))
    try:
        for answers in threads.map(lambda group: _ask_one(idle, group), groups.values()):
            yield from answers
    finally:
        threads.shutdown(
            wait=False, cancel_futures=True
        )  # what is still asked ends with the children


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _ask_one(
    idle: LifoQueue[_Child], group: Sequence[tuple[str, PredictionRequest]]
) -> list[tuple[str, Prediction]]:
    child = idle.get()
    try:
        return [(key, child.ask(request)) for key, request in group]
    finally:
        idle.put(child)


def _without_pass(cell: Cell) -> str:
    return json.dumps(
        {name: value for name, value in memory_identity(cell).items() if name != "pass"}
    )


@contextmanager
def _children(number: int) -> Iterator[LifoQueue[_Child]]:
    idle: LifoQueue[_Child] = (
        LifoQueue()
    )  # the last that answered is asked first: the others need not start
    with lifeline() as end:
        children = [_Child(end) for _ in range(number)]
        for child in children:
            idle.put(child)
        try:
            yield idle
        finally:
            for child in children:
                child.end()


class _Child:
    """A predicting process, started when it is first asked, and again after it died."""

    def __init__(self, lifeline: int) -> None:
        self._lifeline = lifeline
        self._process: subprocess.Popen[str] | None = None
        self._said: Any = tempfile.TemporaryFile()  # noqa: SIM115  closed in `end`

    def ask(self, request: PredictionRequest) -> Prediction:
        """Whatever goes wrong is the reason why there is no prediction."""
        try:
            answer = self._answer(request)
            if answer:
                return Prediction.from_json(answer)
            self._stop()  # else the next one asks what nobody knows to be dead yet
            return unknown(f"the predictor died: {self._last_words()}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            return unknown(f"the predictor failed: {error}")

    def _answer(self, request: PredictionRequest) -> str:
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        timer = threading.Timer(_TIMEOUT_S, self._process.kill)
        timer.start()
        try:
            print(request.to_json(), file=self._process.stdin, flush=True)
            return next(iter(self._process.stdout or ()), "")
        except BrokenPipeError:
            return ""
        finally:
            timer.cancel()

    def end(self) -> None:
        self._stop()
        self._said.close()

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            with suppress(
                OSError, ValueError
            ):  # it had not read all that it was asked, or is asked at this moment
                self._process.communicate()

    def _start(self) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "PYTHONPATH": import_path(),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        return subprocess.Popen(
            [*_COMMAND, str(self._lifeline)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            pass_fds=[self._lifeline],
            start_new_session=True,
        )

    def _last_words(self) -> str:
        self._said.seek(max(0, self._said.seek(0, os.SEEK_END) - _HEARD_BYTES))
        lines: list[str] = self._said.read().decode(errors="replace").splitlines()
        return lines[-1][:160] if lines else "without a word"
