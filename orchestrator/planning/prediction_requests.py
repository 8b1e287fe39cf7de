"""Predict the memory of cells in child processes, and store the predictions in a cache.

This process imports no torch: it sends requests to children of a fork server, one for each CPU
core. Cells that need the same memory share one request.
"""

from __future__ import annotations

import atexit
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from queue import LifoQueue

from orchestrator.common.errors import ConfigError
from orchestrator.common.hashing import sha256
from orchestrator.common.output import ProgressLine
from orchestrator.common.provenance import SOURCE_ROOT, package_version
from orchestrator.common.text import cell_count
from orchestrator.common.units import GIB
from orchestrator.common.user_cache import read_cached, write_cached
from orchestrator.execution.fork_client import ForkServer, ForkServers
from orchestrator.execution.program import search_path
from orchestrator.hardware.gpu_catalog import GpuModel, nccl_bytes
from orchestrator.hardware.host import cores_here
from orchestrator.planning.predicting_process import PredictingProcess, predictor_variables
from tasks.prediction.allocator import attention_capability, cublas_workspace_bytes
from tasks.prediction.records import (
    INCOMPLETE,
    Prediction,
    PredictionRequest,
    Verdict,
    generates_code,
    memory_identity,
    predictable,
    unknown,
    unsupported_reason,
)
from tasks.process.fork_server import PREDICT
from tasks.spec.axes import leave_out
from tasks.spec.cell import Cell
from tasks.spec.source_digest import HUB, digest_of, python_files, source_digest
from tasks.spec.tables import Sample

Predict = Callable[[Sequence[Cell]], dict[str, Prediction]]  # predictions by cell id

# For all predictions of this process, since importing torch again takes seconds. The servers that
# measure end with each sweep, but a search predicts between its sweeps.
PREDICTOR_SERVERS = ForkServers()
atexit.register(PREDICTOR_SERVERS.close)


@dataclass(frozen=True)
class PredictedCell:
    """The predicted memory of a cell, and the memory that it may use on its GPU."""

    cell: Cell
    prediction: Prediction
    limit_bytes: int | None

    @property
    def verdict(self) -> Verdict | None:
        """The verdict; None without a limit, and if the prediction has no verdict on it."""
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


def begin_predicting() -> None:
    """Have a server import what predictors need, without waiting for it."""
    with suppress(OSError):  # it only saves time
        _predictor_server().begin_import(PREDICT)


def _predictor_server() -> ForkServer:
    return PREDICTOR_SERVERS.server("", predictor_variables())


def predict_memory(
    cells: Sequence[Cell], gpu: GpuModel | None, import_paths: tuple[str, ...]
) -> dict[str, Prediction]:
    """Return a prediction for each cell, by its id. One without a peak has the reason for it."""
    with predicting(gpu, import_paths) as predict:
        return predict(cells)


def require_prediction(cells: Sequence[Cell], predictions: Mapping[str, Prediction]) -> None:
    """Raise ConfigError with the most common reason if all cells that can be predicted lack one."""
    asked = [predictions[cell.id] for cell in predictable(cells)]
    if asked and not any(one.how for one in asked):
        ((reason, _),) = Counter(one.reason for one in asked).most_common(1)
        raise ConfigError(f"none of {cell_count(len(asked))} could be predicted: {reason}")


@contextmanager
def predicting(gpu: GpuModel | None, import_paths: tuple[str, ...]) -> Iterator[Predict]:
    """Yield `predict_memory` for repeated calls, with child processes that stay in between.

    The standard error shows how many predictions are made if they take long.
    """
    # Last in, first out: a child that runs is used before another one is started.
    idle: LifoQueue[PredictingProcess] = LifoQueue(cores_here())
    with ExitStack() as stack:
        for _ in range(idle.maxsize):
            idle.put(stack.enter_context(closing(PredictingProcess(_predictor_server()))))
        progress = stack.enter_context(ProgressLine("predicting memory"))
        yield lambda cells: _predict(cells, _Predictor(gpu, import_paths, idle, progress))


@dataclass(frozen=True)
class _Predictor:
    """The GPU to predict for, and the child processes that are not busy."""

    gpu: GpuModel | None
    import_paths: tuple[str, ...]
    idle: LifoQueue[PredictingProcess]
    progress: ProgressLine


def _predict(cells: Sequence[Cell], predictor: _Predictor) -> dict[str, Prediction]:
    gpu, import_paths, progress = predictor.gpu, predictor.import_paths, predictor.progress
    # Once: a key holds the digest of a file that may change while others are predicted.
    keys = {cell.id: _key(cell, gpu, import_paths) for cell in predictable(cells)}
    requests = _requests(predictable(cells), keys, gpu, import_paths)
    found: dict[str, Prediction] = {}
    for key, request in requests.items():
        if cached := _read_cached(key, request):
            found[key] = cached
    missing = leave_out(requests, found)
    progress.total += len(missing)
    for key, prediction in _ask_all(missing, predictor.idle):
        progress.done += 1
        found[key] = prediction
        _write_cached(key, missing[key], prediction)
    predictions = {}
    for cell in cells:
        reason = unsupported_reason(cell)
        if reason:
            predictions[cell.id] = unknown(reason)
        else:
            predictions[cell.id] = found[keys[cell.id]].of_cell(cell)
    return predictions


def cap_bytes(cell: Cell, gpu: GpuModel | None) -> int | None:
    """Return the memory that a cell's allocator may reserve, or None if there is no limit.

    It is the smaller one of the cell's own limit and of the GPU's memory. If there are several
    GPUs, NCCL needs a part of it.
    """
    limit_gib = cell.params.memory_limit_gib
    caps = []
    if gpu:
        caps.append(gpu.usable_bytes - nccl_bytes() * (cell.params.ranks > 1))
    if limit_gib is not None:
        caps.append(int(limit_gib * GIB))
    return min(caps, default=None)


def reason_of(cell: Cell, prediction: Prediction, gpu: GpuModel | None) -> str:
    """Return why a cell is not predicted, or not exactly; empty if it is."""
    reasons = [prediction.reason]
    if prediction.least_bytes() is not None:
        reasons = [f"activations unknown: {prediction.reason}"]
    if cell.params.ranks > 1 and prediction.how and gpu:
        reasons.append(
            f"{nccl_bytes() / GIB:.1f} GiB of each GPU are reserved for NCCL, which is what it takes on "
            "two and four H100s; others are not measured"
        )
    return "; ".join(filter(None, reasons))


def verdict_of(cell: Cell, prediction: Prediction, gpu: GpuModel | None) -> Verdict | None:
    """Return the verdict on a cell on this GPU, or None if nothing can be predicted."""
    return PredictedCell(cell, prediction, cap_bytes(cell, gpu)).verdict


def _requests(
    cells: Iterable[Cell],
    keys: Mapping[str, str],
    gpu: GpuModel | None,
    import_paths: tuple[str, ...],
) -> dict[str, PredictionRequest]:
    """Return one request for all cells that need the same memory. keys: by cell id."""
    alike: dict[str, list[Cell]] = {}
    for cell in cells:
        alike.setdefault(keys[cell.id], []).append(cell)
    requests = {}
    for key, same in alike.items():
        caps = {cap for cell in same if (cap := cap_bytes(cell, gpu)) is not None}
        requests[key] = PredictionRequest(
            same[0], tuple(sorted(caps)), _workspace_bytes(gpu), import_paths, _capability(gpu)
        )
    return requests


def _workspace_bytes(gpu: GpuModel | None) -> int:
    return cublas_workspace_bytes(gpu.compute_capability if gpu else None)


def _capability(gpu: GpuModel | None) -> float:
    return attention_capability(gpu.compute_capability if gpu else None)


def _key(cell: Cell, gpu: GpuModel | None, import_paths: tuple[str, ...]) -> str:
    # Another version of torch may allocate differently, and so may another model of this program.
    identity = [
        memory_identity(cell),
        _workspace_bytes(gpu),
        _code_digest(),
        package_version("torch"),
    ]
    identity += [_capability(gpu)]
    model = str(cell.params.values().get("model"))
    if model.startswith(HUB):
        config = None if _is_preset(cell) else source_digest(model, search_path(import_paths))
        identity += [package_version("transformers"), config]
    return sha256(json.dumps(identity, sort_keys=True))[:32]


@cache
def _code_digest() -> str:
    """Return a digest of the code that is predicted and that predicts: 120 files, 5 ms."""
    files = [*python_files(SOURCE_ROOT / "model"), *python_files(SOURCE_ROOT / "tasks")]
    return digest_of((str(file.relative_to(SOURCE_ROOT)), file) for file in files)


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
    return not is_class and source_digest(model, search_path(request.import_paths)) is None


def _read_cached(key: str, request: PredictionRequest) -> Prediction | None:
    content = read_cached("predictions", f"{key}.json")
    if content is None:
        return None
    with suppress(ValueError, KeyError, TypeError):  # that another program wrote
        found = Prediction.from_json(content.decode())
        # For a limit that was not asked for before, the peaks are often enough.
        caps = request.caps_bytes if found.how != INCOMPLETE else ()
        verdicts = {cap: found.plain_verdict(cap) for cap in caps}
        known = {cap: verdict for cap, verdict in verdicts.items() if verdict}
        found = replace(found, verdicts={**known, **found.verdicts})
        if found.verdicts.keys() >= set(request.caps_bytes):
            return found
    return None


def _write_cached(key: str, request: PredictionRequest, prediction: Prediction) -> None:
    # Without `how` the prediction has failed, perhaps for a reason that passes.
    if not prediction.how or _may_change(request):
        return
    write_cached("predictions", f"{key}.json", prediction.to_json().encode())


def _ask_all(
    requests: Mapping[str, PredictionRequest], idle: LifoQueue[PredictingProcess]
) -> Iterator[tuple[str, Prediction]]:
    # One child predicts all passes of one model and length.
    groups = _groups(requests, ("pass",))
    if not groups:
        return
    # sympy remembers in a child what it simplified, and other precisions have the same indices.
    if len(groups) > idle.maxsize:
        groups = _groups(requests, ("pass", "precision"))
    # Compiled cells come first: then the children inherit the compiler instead of importing it.
    ordered = sorted(groups, key=lambda group: not generates_code(group[0][1].cell))
    threads = ThreadPoolExecutor(min(len(groups), idle.maxsize))
    try:
        for answers in threads.map(lambda group: _ask_one(idle, group), ordered):
            yield from answers
    finally:
        # Threads that still wait for an answer end when their child is stopped.
        threads.shutdown(wait=False, cancel_futures=True)


def _groups(
    requests: Mapping[str, PredictionRequest], axes: Sequence[str]
) -> list[list[tuple[str, PredictionRequest]]]:
    """Return the requests in groups whose cells differ in no other axes than these.

    Of one precision, `train_step` comes first, because other passes are parts of it: its name is
    the last one by alphabet.
    """
    groups: dict[str, list[tuple[str, PredictionRequest]]] = {}
    for key, request in requests.items():
        identity = leave_out(memory_identity(request.cell), axes)
        groups.setdefault(json.dumps(identity), []).append((key, request))
    for group in groups.values():
        group.sort(key=_precision_and_pass, reverse=True)
    return list(groups.values())


def _precision_and_pass(item: tuple[str, PredictionRequest]) -> tuple[str, str]:
    values = item[1].cell.params.values()
    return str(values.get("precision")), str(values.get("pass"))


def _ask_one(
    idle: LifoQueue[PredictingProcess], group: Sequence[tuple[str, PredictionRequest]]
) -> list[tuple[str, Prediction]]:
    child = idle.get()
    try:
        return [(key, child.ask(request)) for key, request in group]
    finally:
        idle.put(child)
