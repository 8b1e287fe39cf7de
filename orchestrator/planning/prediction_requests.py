"""Predict the memory of cells in child processes, and store the predictions in a cache.

This process imports no torch: it sends requests to `python -m tasks.prediction`, one child for each
CPU core. Cells that need the same memory share one request.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from queue import LifoQueue
from typing import IO

from orchestrator.common.hashing import text_digest
from orchestrator.common.units import GIB
from orchestrator.common.user_cache import cache_folder
from orchestrator.execution.measuring_process import PROGRAM, import_path, lifeline
from orchestrator.hardware.cpu_affinity import cores_here
from orchestrator.hardware.gpu_catalog import GpuModel
from tasks.prediction.allocator import cublas_workspace_bytes
from tasks.prediction.records import (
    VERSION,
    Prediction,
    PredictionRequest,
    Verdict,
    memory_identity,
    predictable,
    unknown,
    unsupported_reason,
)
from tasks.spec.axes import leave_out
from tasks.spec.cell import Cell
from tasks.spec.messages import error_text
from tasks.spec.source_digest import HUB, source_digest
from tasks.spec.tables import Sample

_COMMAND = (*PROGRAM[:-1], "tasks.prediction")
# A prediction takes seconds, but a user's model may never return.
_TIMEOUT_S = 120.0
_LAST_OUTPUT_BYTES = 4096

Predict = Callable[[Sequence[Cell]], dict[str, Prediction]]  # predictions by cell id


@dataclass(frozen=True)
class PredictedCell:
    """The predicted memory of a cell, and the memory that it may use on its GPU."""

    cell: Cell
    prediction: Prediction
    limit_bytes: int | None

    @property
    def verdict(self) -> Verdict | None:
        """The verdict on the limit; None if nothing can be predicted."""
        if self.limit_bytes is None:
            return None
        return self.prediction.verdicts.get(self.limit_bytes)

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The samples that are stored, with the verdict."""
        return self.prediction.samples_with(self.verdict)

    @property
    def oom_reason(self) -> str:
        """The reason why the cell runs out of memory."""
        return self.prediction.why_oom(self.limit_bytes)


def predict_memory(
    cells: Sequence[Cell], gpu: GpuModel | None, import_paths: tuple[str, ...]
) -> dict[str, Prediction]:
    """Return a prediction for each cell, by its id. One without a peak has the reason for it."""
    with predicting(gpu, import_paths) as predict:
        return predict(cells)


@contextmanager
def predicting(gpu: GpuModel | None, import_paths: tuple[str, ...]) -> Iterator[Predict]:
    """Yield `predict_memory` for repeated calls, with child processes that stay in between."""
    # Last in, first out: a child that has imported torch is used before another one is started.
    idle: LifoQueue[_Child] = LifoQueue()
    with lifeline() as descriptor, ExitStack() as stack:
        for _ in range(cores_here()):
            idle.put(stack.enter_context(closing(_Child(descriptor))))
        yield lambda cells: _predict(cells, gpu, import_paths, idle)


def _predict(
    cells: Sequence[Cell],
    gpu: GpuModel | None,
    import_paths: tuple[str, ...],
    idle: LifoQueue[_Child],
) -> dict[str, Prediction]:
    requests = _requests(predictable(cells), gpu, import_paths)
    found: dict[str, Prediction] = {}
    for key, request in requests.items():
        if cached := _read_cached(key, request):
            found[key] = cached
    missing = leave_out(requests, found)
    for key, prediction in _ask_all(missing, idle):
        found[key] = prediction
        _write_cached(key, missing[key], prediction)
    predictions = {}
    for cell in cells:
        reason = unsupported_reason(cell)
        if reason:
            predictions[cell.id] = unknown(reason)
        else:
            predictions[cell.id] = found[_key(cell, gpu, import_paths)].of_cell(cell)
    return predictions


def cap_bytes(cell: Cell, gpu: GpuModel | None) -> int | None:
    """Return the memory that a cell's allocator may reserve: its own limit, or the GPU's memory."""
    limit_gib = cell.params.memory_limit_gib
    caps = []
    if gpu:
        caps.append(gpu.usable_bytes)
    if limit_gib is not None:
        caps.append(int(limit_gib * GIB))
    return min(caps, default=None)


def verdict_of(cell: Cell, prediction: Prediction, gpu: GpuModel | None) -> Verdict | None:
    """Return the verdict on a cell on this GPU, or None if nothing can be predicted."""
    return PredictedCell(cell, prediction, cap_bytes(cell, gpu)).verdict


def _requests(
    cells: Iterable[Cell], gpu: GpuModel | None, import_paths: tuple[str, ...]
) -> dict[str, PredictionRequest]:
    """Return one request for all cells that need the same memory."""
    alike: dict[str, list[Cell]] = {}
    for cell in cells:
        alike.setdefault(_key(cell, gpu, import_paths), []).append(cell)
    requests = {}
    for key, same in alike.items():
        caps = {cap for cell in same if (cap := cap_bytes(cell, gpu)) is not None}
        requests[key] = PredictionRequest(
            same[0], tuple(sorted(caps)), _workspace_bytes(gpu), import_paths
        )
    return requests


def _workspace_bytes(gpu: GpuModel | None) -> int:
    return cublas_workspace_bytes(gpu.compute_capability if gpu else None)


def _key(cell: Cell, gpu: GpuModel | None, import_paths: tuple[str, ...]) -> str:
    # Another version of torch may allocate differently.
    identity = [memory_identity(cell), _workspace_bytes(gpu), VERSION, _version("torch")]
    model = str(cell.params.values().get("model"))
    if model.startswith(HUB):
        config = None if _is_preset(cell) else source_digest(model, [*sys.path, *import_paths])
        identity += [_version("transformers"), config]
    return text_digest(json.dumps(identity, sort_keys=True))[:32]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _is_preset(cell: Cell) -> bool:
    return bool(getattr(cell.params, "is_preset", False))


def _may_change(request: PredictionRequest) -> bool:
    """True if the model may change without another key: the user's code, or an unknown config."""
    model = request.cell.params.values().get("model")
    if model is None or _is_preset(request.cell):
        return False
    if not model.startswith(HUB):
        return True
    is_class = model.removeprefix(HUB).isidentifier()  # of transformers, such as hf:llama
    return not is_class and source_digest(model, [*sys.path, *request.import_paths]) is None


def _read_cached(key: str, request: PredictionRequest) -> Prediction | None:
    with suppress(OSError, ValueError, KeyError, TypeError):  # absent or damaged
        text = (cache_folder("predictions") / f"{key}.json").read_text()
        digest, _, content = text.partition("\n")
        if digest != text_digest(content):
            return None
        found = Prediction.from_json(content)
        # For a limit that was not asked for before, the peaks are often enough.
        verdicts = {cap: found.plain_verdict(cap) for cap in request.caps_bytes}
        known = {cap: verdict for cap, verdict in verdicts.items() if verdict}
        found = replace(found, verdicts={**known, **found.verdicts})
        if found.verdicts.keys() >= set(request.caps_bytes):
            return found
        return None
    return None


def _write_cached(key: str, request: PredictionRequest, prediction: Prediction) -> None:
    # A failure may be temporary.
    if not prediction.how or _may_change(request):
        return
    with suppress(OSError):  # a cache that cannot be written only costs time
        folder = cache_folder("predictions")
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{key}.{os.getpid()}"
        content = prediction.to_json()
        partial.write_text(f"{text_digest(content)}\n{content}")
        partial.rename(folder / f"{key}.json")


def _ask_all(
    requests: Mapping[str, PredictionRequest], idle: LifoQueue[_Child]
) -> Iterator[tuple[str, Prediction]]:
    # One child predicts all passes of one model and length, beginning with train_step: the other
    # passes are parts of it.
    groups: dict[str, list[tuple[str, PredictionRequest]]] = {}
    for key, request in requests.items():
        identity = memory_identity(request.cell)
        identity.pop("pass", None)
        groups.setdefault(json.dumps(identity), []).append((key, request))
    for group in groups.values():
        group.sort(key=lambda item: str(item[1].cell.params.values().get("pass")), reverse=True)
    if not groups:
        return
    count = min(len(groups), cores_here())
    _start_together(idle, count)
    threads = ThreadPoolExecutor(count)
    try:
        for answers in threads.map(lambda group: _ask_one(idle, group), groups.values()):
            yield from answers
    finally:
        # Threads that still wait for an answer end when their child is stopped.
        threads.shutdown(wait=False, cancel_futures=True)


def _ask_one(
    idle: LifoQueue[_Child], group: Sequence[tuple[str, PredictionRequest]]
) -> list[tuple[str, Prediction]]:
    child = idle.get()
    try:
        return [(key, child.ask(request)) for key, request in group]
    finally:
        idle.put(child)


def _start_together(idle: LifoQueue[_Child], count: int) -> None:
    """Start several children as one process that imports torch, from which the others are forked.

    Children that were started before are left alone.
    """
    children = [idle.get() for _ in range(count)]
    new = [child for child in children if child.is_new]
    if len(new) > 1:
        # If it cannot be started, each child tries it again with its first request, and says why.
        with suppress(OSError):
            new[0].start(new[1:])
    for child in reversed(children):
        idle.put(child)


class _Child:
    """A predicting process. It starts with the first request, and again after it has died."""

    def __init__(self, lifeline: int) -> None:
        self._lifeline = lifeline
        self._process: subprocess.Popen[str] | None = None  # None also if it was forked
        self._forked_from: _Child | None = None
        self._end_of_forked = -1  # our end of the lifeline of a forked process
        self._requests: IO[str] | None = None
        self._answers: IO[str] | None = None
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed in `close`

    @property
    def is_new(self) -> bool:
        """True if no process is running, as far as is known."""
        has_ended = self._process is not None and self._process.poll() is not None
        return self._requests is None or has_ended

    def ask(self, request: PredictionRequest) -> Prediction:
        try:
            if answer := self._answer(request):
                return Prediction.from_json(answer)
            reason = f"died: {self._last_line()}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"failed: {error_text(error)}"
        # Otherwise the next request may go to this process: poll() reports a death late, and a
        # user's model may have changed what all models use.
        self._stop()
        return unknown(f"the predictor {reason}")

    def _answer(self, request: PredictionRequest) -> str:
        if self.is_new:
            self.start()
        timer = threading.Timer(_TIMEOUT_S, self._kill)
        timer.start()
        try:
            print(request.to_json(), file=self._requests, flush=True)
            return next(iter(self._answers or ()), "")
        except BrokenPipeError:
            return ""
        finally:
            timer.cancel()

    def close(self) -> None:
        self._stop()
        self._stderr.close()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
        elif self._end_of_forked >= 0:
            os.close(self._end_of_forked)
            self._end_of_forked = -1

    def _stop(self) -> None:
        self._kill()
        # It may not have read its whole request, and a thread may be writing to it.
        for pipe in (self._requests, self._answers):
            with suppress(OSError, ValueError):
                if pipe is not None:
                    pipe.close()
        if self._process is not None:
            self._process.wait()
        self._process = self._requests = self._answers = None

    def start(self, others: Sequence[_Child] = ()) -> None:
        """Start the process. It forks the processes of the other children."""
        # As many children as cores run at the same time, each with one thread and without a GPU.
        own = {"PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        ends = [other._open_pipes(self) for other in others]
        self._forked_from = None
        try:
            self._process = subprocess.Popen(
                [*_COMMAND, str(self._lifeline), *(",".join(map(str, each)) for each in ends)],
                env={**os.environ, **own},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                pass_fds=[self._lifeline, *chain(*ends)],
                start_new_session=True,
            )
            self._requests, self._answers = self._process.stdin, self._process.stdout
        finally:
            for requests, answers, _, lifeline in ends:
                for end in (requests, answers, lifeline):
                    os.close(end)

    def _open_pipes(self, parent: _Child) -> tuple[int, int, int, int]:
        """Return the ends of new pipes for a forked process: requests, answers, errors, lifeline."""
        requests, to_requests = os.pipe()
        from_answers, answers = os.pipe()
        lifeline, self._end_of_forked = os.pipe()
        self._process, self._forked_from = None, parent
        self._requests = open(to_requests, "w", encoding="utf-8")  # noqa: SIM115
        self._answers = open(from_answers, encoding="utf-8")  # noqa: SIM115
        return requests, answers, self._stderr.fileno(), lifeline

    def _last_line(self) -> str:
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - _LAST_OUTPUT_BYTES))
        lines = self._stderr.read().decode(errors="replace").splitlines()
        if lines:
            return lines[-1][:160]
        if self._forked_from is not None:  # which may have died before it forked this one
            return self._forked_from._last_line()
        return "it printed nothing"
