"""Predicting in processes of their own: each need once, remembered, kept beside what is measured, and never in the way."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from orchestrator.analysis.results import load_results
from orchestrator.cli.text.memory import describe_memory
from orchestrator.common.errors import ConfigError
from orchestrator.execution import fork_client, program
from orchestrator.execution.events import AttemptStarted
from orchestrator.execution.fork_client import ForkServers
from orchestrator.hardware.gpu_catalog import GpuModel, find_gpu, gpu_from_driver, nccl_bytes
from orchestrator.hardware.host import GpuInfo, HostInfo
from orchestrator.planning import predicting_process, prediction_requests
from orchestrator.planning.invocation import RunOptions
from orchestrator.planning.predicting_process import PredictingProcess, predictor_variables
from orchestrator.planning.prediction_requests import (
    PREDICTOR_SERVERS,
    begin_predicting,
    cap_bytes,
    predict_memory,
    verdict_of,
)
from orchestrator.report.formats.terminal import Screen
from orchestrator.report.tables.registry import lay_out
from orchestrator.scheduling.scheduler import Scheduler
from tasks.prediction.records import Prediction, PredictionRequest, Verdict, unknown
from tasks.spec.attempt import Attempt
from tasks.spec.cell import Cell
from tasks.spec.outcome import Outcome
from tasks.spec.registry import make_cell
from tasks.spec.status import Status
from tasks.spec.tables import Sample
from tests.support.fake_sweep import go, request_for
from tests.support.tables import texts_of

GIB = 1024**3
TINY_GPU = GpuModel("Tiny", 400 * 1024**2, 9.0)


def cell_of(**values: Any) -> Cell:
    return make_cell("train_step", {"size": "tiny", "context_length": 16, **values})


def a_prediction(
    gib: float, verdicts: Mapping[int, Verdict] | None = None, how: str = "tracked"
) -> Prediction:
    samples = tuple(
        Sample(
            "prediction", f"peak_{kind}_bytes", "bytes", gib * GIB * more, mode, "forward", note=how
        )
        for mode in ("first", "steady")
        for kind, more in (("requested", 1.0), ("allocated", 1.0), ("reserved", 1.1))
    )
    parameters = Sample(
        "prediction", "at_peak_bytes", "bytes", GIB, "steady", "forward", note="parameters"
    )
    return Prediction(how, "", (*samples, parameters), verdicts or {})


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[PredictionRequest]:
    """Every request, answered without a process: a training step of 2 GiB that fits nowhere."""
    requests: list[PredictionRequest] = []

    def answer(child: object, request: PredictionRequest) -> Prediction:
        requests.append(request)
        return a_prediction(2.0, dict.fromkeys(request.caps_bytes, "oom"))

    monkeypatch.setattr(PredictingProcess, "ask", answer)
    return requests


@pytest.mark.process
def test_a_process_predicts_and_the_answer_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [cell_of(), cell_of(seed=3), cell_of(**{"pass": "forward"}), make_cell("matmul", {})]
    found = predict_memory(cells, TINY_GPU, ())
    assert found[cells[0].id] == found[cells[1].id]
    assert [found[cell.id].how for cell in cells] == ["tracked", "tracked", "tracked", ""]
    assert verdict_of(cells[0], found[cells[0].id], TINY_GPU) == "fits"
    monkeypatch.setattr(PredictingProcess, "ask", lambda child, request: unknown("asked again"))
    again = predict_memory(cells, TINY_GPU, ())
    assert again == found


def test_each_need_is_asked_for_once(asked: list[PredictionRequest]) -> None:
    graphs = {"compile": "blocks", "compile_mode": "reduce-overhead"}
    cells = [cell_of(seed=seed, memory_limit_gib=limit, **how) for seed in (0, 1) for limit in (1.0, 2.0)
             for how in ({}, graphs)]  # fmt: skip
    found = predict_memory(cells, None, ())
    assert [request.caps_bytes for request in asked] == [(GIB, 2 * GIB)]
    assert {found[cell.id].how for cell in cells} == {"tracked", "as eager"}
    predict_memory(cells, None, ())
    assert len(asked) == 1
    plain = [cell_of(memory_limit_gib=limit) for limit in (1.9, 3.0)]
    found = predict_memory(plain, None, ())
    assert [verdict_of(cell, found[cell.id], None) for cell in plain] == [
        "oom",
        "fits",
    ]  # the sizes are known, and say so
    assert len(asked) == 1
    predict_memory([cell_of(memory_limit_gib=2.25)], None, ())  # there the allocator must be tried
    assert len(asked) == 2


def test_a_step_that_may_take_more_fits_no_limit_by_its_peaks_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caps: list[tuple[int, ...]] = []

    def answer(child: object, request: PredictionRequest) -> Prediction:
        caps.append(request.caps_bytes)
        verdicts: dict[int, Verdict] = dict.fromkeys(request.caps_bytes, "fits")
        return a_prediction(2.0, verdicts).with_caveats(["it grows"])

    monkeypatch.setattr(PredictingProcess, "ask", answer)
    cells = [cell_of(memory_limit_gib=limit) for limit in (9.0, 10.0)]
    for cell in cells:
        found = predict_memory([cell], None, ())[cell.id]
        assert (verdict_of(cell, found, None), found.reason) == ("perhaps", "it grows")
    assert caps == [(9 * GIB,), (10 * GIB,)]


def test_predictions_are_not_remembered_for_other_code_of_this_program(
    asked: list[PredictionRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory gate would otherwise compare a prediction with itself."""
    for digest in ("one", "one", "two"):
        monkeypatch.setattr(prediction_requests, "_code_digest", lambda digest=digest: digest)
        predict_memory([cell_of()], TINY_GPU, ())
    assert len(asked) == 2


def test_predictions_of_named_models_are_remembered_for_the_same_config(
    asked: list[PredictionRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    folders = (str(tmp_path),)
    config = tmp_path / "mine" / "config.json"
    config.parent.mkdir()
    counts = []
    for name, text in (("mine", "{}"), ("gpt2", "{}"), ("llama", "{}"), ("mine", '{"a": 1}')):
        config.write_text(text)
        for _ in range(2):
            predict_memory([cell_of(size=None, model=f"hf:{name}")], TINY_GPU, folders)
            counts.append(len(asked))
    assert counts == [1, 1, 2, 2, 3, 3, 4, 4]
    for model in ("hf:some/where", "hf:some/where", "mine:Gpt", "mine:Gpt"):  # these may change
        predict_memory([cell_of(size=None, model=model)], TINY_GPU, folders)
    assert len(asked) == 8


def test_a_damaged_prediction_in_the_cache_is_predicted_again(
    asked: list[PredictionRequest], tmp_path: Path
) -> None:
    predict_memory([cell_of()], TINY_GPU, ())
    (cached,) = (tmp_path / "cache").rglob("*.json")
    intact = cached.read_text()
    assert intact.count("2147483648") > 0
    cached.write_text(intact.replace("2147483648", "2147483640"))
    predict_memory([cell_of()], TINY_GPU, ())
    assert (len(asked), cached.read_text()) == (2, intact)
    predict_memory([cell_of()], TINY_GPU, ())
    assert len(asked) == 2


def test_a_model_of_ones_own_is_not_remembered(asked: list[PredictionRequest]) -> None:
    own = make_cell("train_step", {"model": "torch.nn:Embedding"})
    for _ in range(2):
        predict_memory([own], None, ())
    assert len(asked) == 2


def test_what_failed_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [unknown("not now"), a_prediction(1.0)]
    monkeypatch.setattr(PredictingProcess, "ask", lambda child, request: answers.pop(0))
    assert [predict_memory([cell_of()], None, ())[cell_of().id].how for _ in range(3)] == [
        "",
        "tracked",
        "tracked",
    ]


@pytest.fixture
def child() -> Iterator[PredictingProcess]:
    """A predicting process with a fork server that no other test has used."""
    with ExitStack() as stack:
        server = stack.enter_context(closing(ForkServers())).server("", predictor_variables())
        yield stack.enter_context(closing(PredictingProcess(server)))


SLEEPING = """
import time
from torch import nn

def build(sleep):
    time.sleep(60 * sleep)
    return nn.Sequential(nn.Embedding(101, 4), nn.Linear(4, 101))
"""


@pytest.mark.process
def test_a_prediction_that_times_out_costs_only_its_own_cell(
    child: PredictingProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sleeping.py").write_text(SLEEPING)

    def ask(sleep: int) -> Prediction:
        own = {"model": "sleeping:build", "model_args": {"sleep": sleep}, "size": None}
        cell = cell_of(vocab_size=101, context_length=8, **own)
        return child.ask(PredictionRequest(cell, import_paths=(str(tmp_path),)))

    assert ask(0).how == "tracked"
    monkeypatch.setattr(predicting_process, "_TIMEOUT_S", 0.15)
    late = "no answer within 0.15 s. It is faster on an idle machine"
    assert {ask(1).reason for _ in range(5)} == {f"the predictor failed: {late}"}
    monkeypatch.undo()
    assert ask(0).how == "tracked"


FORKING = """
import os
from torch import nn

def build(fork):
    if fork:
        os.fork()
        return nn.Sequential(nn.Embedding(101, 4), nn.Linear(4, 101))
    raise SystemExit("this one has no model")
"""


@pytest.mark.process
def test_a_model_that_forks_changes_no_other_prediction(
    child: PredictingProcess, tmp_path: Path
) -> None:
    (tmp_path / "forking.py").write_text(FORKING)
    given = {"model": "forking:build", "vocab_size": 101, "context_length": 8}
    for fork in (True, False, True, False):
        cell = cell_of(size=None, model_args={"fork": fork}, **given)
        answer = child.ask(PredictionRequest(cell, import_paths=(str(tmp_path),)))
        assert ("this one has no model" in answer.reason) is not fork


HOSTILE = """
import os
import signal
from torch import nn

def patches():
    nn.Module.__call__ = None

def kills():
    os.kill(os.getppid(), signal.SIGKILL)
    return nn.Sequential(nn.Embedding(101, 4), nn.Linear(4, 101))
"""


@pytest.mark.process
def test_a_model_that_patches_torch_or_kills_its_parent_changes_no_other_prediction(
    child: PredictingProcess, tmp_path: Path
) -> None:
    (tmp_path / "hostile.py").write_text(HOSTILE)

    def hostile(name: str) -> PredictionRequest:
        cell = cell_of(size=None, model=f"hostile:{name}", vocab_size=101, context_length=8)
        return PredictionRequest(cell, import_paths=(str(tmp_path),))

    first, second = (PredictionRequest(cell_of(context_length=length)) for length in (16, 32))
    with closing(PredictingProcess(child._server)) as other:
        assert "NoneType" in child.ask(hostile("patches")).reason
        server = child._server._process
        assert [child.ask(second).how, other.ask(first).how] == ["tracked", "tracked"]
        assert child._server._process is server  # both are its children
        assert "the predictor died" in child.ask(hostile("kills")).reason
        assert [other.ask(second).how, child.ask(first).how] == ["tracked", "tracked"]


@pytest.fixture
def own_server() -> Iterator[None]:
    """A fork server for predictions that no other test has used."""
    PREDICTOR_SERVERS.close()
    yield
    PREDICTOR_SERVERS.close()


@pytest.mark.process
def test_a_server_imports_ahead_and_forks_all_predictors(own_server: None) -> None:
    begin_predicting()
    (server,) = PREDICTOR_SERVERS._servers.values()
    first = server._process
    assert first is not None
    for length in (16, 32):
        assert predict_memory([cell_of(context_length=length)], None, ())
        assert server._process is first
        assert list(PREDICTOR_SERVERS._servers.values()) == [server]


@pytest.mark.usefixtures("own_server")
def test_a_predictor_that_dies_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    command = (sys.executable, "-c", "import sys; sys.exit('no torch here')")
    monkeypatch.setattr(program, "PROGRAM", command)
    found = predict_memory([cell_of(), cell_of(context_length=32)], None, ())
    reasons = {(one.how, one.reason) for one in found.values()}
    assert reasons == {("", "the predictor died: no torch here")}


@pytest.mark.usefixtures("own_server")
def test_a_fork_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    command = (sys.executable, "-c", "import time; time.sleep(60)")
    monkeypatch.setattr(program, "PROGRAM", command)
    monkeypatch.setattr(fork_client, "PREPARATION_S", 0.5)
    found = predict_memory([cell_of()], None, ())[cell_of().id]
    reason = "the predictor died: it did not become ready: TimeoutError: timed out"
    assert found.reason.startswith(reason)


def test_the_smaller_of_limit_and_gpu_counts() -> None:
    assert cap_bytes(cell_of(), None) is None
    assert cap_bytes(cell_of(memory_limit_gib=0.05), TINY_GPU) == int(0.05 * GIB)
    assert cap_bytes(cell_of(memory_limit_gib=1.0), TINY_GPU) == TINY_GPU.usable_bytes


@pytest.mark.parametrize("name", ["RTX 5090", "rtx 5090", "NVIDIA GeForce RTX 5090"])
def test_gpus_by_name(name: str) -> None:
    card = find_gpu(name)
    assert (card.usable_bytes, card.compute_capability) == ((32607 - 600) * 1024**2, 12.0)


def test_an_unknown_gpu_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"RTX 5091: is not known. Did you mean RTX 5090\?"):
        find_gpu("RTX 5091")
    assert gpu_from_driver("NVIDIA H200", 140 * GIB) == GpuModel(
        "NVIDIA H200", 140 * GIB - 600 * 1024**2, 9.0
    )
    assert gpu_from_driver("Something new", GIB).compute_capability is None


@pytest.mark.parametrize(
    ("device", "capability"),
    [
        ("NVIDIA A100-SXM4-80GB", 8.0), ("NVIDIA A100-PCIE-40GB", 8.0), ("Tesla T4", 7.5), ("NVIDIA H100 80GB HBM3", 9.0),
        ("NVIDIA GeForce RTX 4090", 8.9), ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 12.0),
    ],
)  # fmt: skip
def test_a_gpu_is_known_by_what_its_driver_calls_it(device: str, capability: float) -> None:
    assert gpu_from_driver(device, 16 * GIB).compute_capability == capability


def test_no_card_has_more_memory_than_its_driver_shows() -> None:
    assert (
        find_gpu("T4").usable_bytes <= (15360 - 600) * 1024**2
    )  # 16 GB, less what error correction takes


class Measuring(Scheduler):
    """A scheduler that measures nothing: a cell on an H200 that took 2.5 GiB."""

    def hosts(self) -> Sequence[HostInfo]:
        gpus = (GpuInfo("NVIDIA H200", 140 * GIB),)
        return [HostInfo(gpus=gpus, fingerprints={"cuda": [{"gpu": "H"}]})]

    def slots(self, device: str, gpu_kind: str | None = None) -> int:
        return 1

    def import_ahead(self, attempt: Attempt) -> None: ...

    def run(self, queue: Any, on_start: Callable[[AttemptStarted], None]) -> Any:
        for attempt in queue:
            yield self._outcome(attempt)

    def _outcome(self, attempt: Attempt) -> Outcome:
        samples = (
            Sample("memory", "peak_allocated_bytes", "bytes", 2.5 * GIB, "steady", "forward"),
        )
        return Outcome(attempt, Status.OK, "", "", {}, {}, samples, 1.7e9, 1.0)

    def close(self) -> None:
        pass


CONFIG = """
name: test
grids:
  - task: train_step
    fixed: {size: tiny, pass: forward}
    axes: {context_length: [16, 32]}
  - task: train_step
    fixed: {size: tiny, memory_limit_gib: 1}
  - task: matmul
"""


def a_run(
    write_config: Callable[..., Path], tmp_path: Path, messages: list[str], **execution: Any
) -> Any:
    request = request_for(write_config(CONFIG), [], [], tmp_path / "run")
    return request, go(request, Measuring(), messages=messages, **execution)


def test_a_run_keeps_predictions_beside_measurements(
    asked: list[PredictionRequest], write_config: Callable[..., Path], tmp_path: Path
) -> None:
    messages: list[str] = []
    request, result = a_run(write_config, tmp_path, messages, summary=True)
    assert (result.counts[Status.OK], result.predicted_oom) == (4, 0)
    assert messages == ["predicting the memory of 3 cells", "all cells: precision=fp32"]
    cells = pd.read_parquet(tmp_path / "run" / "cells.parquet").set_index("task")
    training = cells.loc["train_step"]
    assert list(training["predicted_peak_allocated_bytes"]) == [2 * GIB] * 3
    assert list(training["predicted_forward_peak_reserved_bytes"]) == [pytest.approx(2.2 * GIB)] * 3
    assert set(training["predicted_how"]) == {"tracked"}
    assert set(training["predicted_verdict"]) == {"oom"}
    assert pd.isna(cells.loc["matmul", "predicted_peak_allocated_bytes"])
    pages = {page.table.name: page for page in lay_out(load_results(request.run))}
    rows = pd.DataFrame(texts_of(pages["memory"]), columns=pages["memory"].header)
    assert sorted(rows["forward ratio"]) == [*["0.8000"] * 3, "–"]  # matmul has no prediction
    assert "predicted" in rows
    parts = pd.DataFrame(texts_of(pages["memory-parts"]), columns=pages["memory-parts"].header)
    assert parts["parameters"].iloc[0] == "1.00"
    assert any(
        "; predicted 2.2 GiB, oom" in text for row in texts_of(pages["oom-map"]) for text in row
    )


def test_a_cell_that_is_repeated_is_not_predicted_again(
    asked: list[PredictionRequest], write_config: Callable[..., Path], tmp_path: Path
) -> None:
    """Predictions of a model of the user's own are not remembered, and take seconds each."""
    a_run(write_config, tmp_path, [])
    messages: list[str] = []
    for options, expected in (
        (RunOptions(repeat=2), []),
        (RunOptions(fresh=True), ["predicting the memory of 3 cells"]),
        (RunOptions(repeat=4), []),
    ):
        messages.clear()
        request = request_for(write_config(CONFIG), [], [], tmp_path / "run")
        result = go(request, Measuring(), options, messages=messages)
        assert result.counts[Status.OK] >= 4
        assert [line for line in messages if line.startswith("predicting")] == expected
    cells = load_results(request.run).cells
    assert cells["predicted_peak_allocated_bytes"].notna().sum() == 3


def test_cells_are_left_out_only_when_asked(
    asked: list[PredictionRequest], write_config: Callable[..., Path], tmp_path: Path
) -> None:
    messages: list[str] = []
    _, result = a_run(write_config, tmp_path, messages, skip_predicted_oom=True)
    assert (result.counts[Status.OK], result.predicted_oom, result.queue.remaining) == (1, 3, 0)
    assert [line.split(":")[0] for line in messages[1:]] == [*["skipped"] * 3, "all cells"]
    assert any("to reserve 2.2 GiB, and there are 1.0" in line for line in messages)
    _, result = a_run(write_config, tmp_path, messages)
    assert result.counts[Status.OK] == 3


@pytest.mark.usefixtures("own_server")
def test_a_prediction_never_stops_a_run(
    write_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "PROGRAM", ("/nowhere/to/be/found",))
    _, result = a_run(write_config, tmp_path, [], summary=True)
    assert result.counts[Status.OK] == 4
    assert (
        pd.read_parquet(tmp_path / "run" / "cells.parquet")["predicted_reason"].notna().sum() == 3
    )


def test_the_plan_shows_a_table(
    asked: list[PredictionRequest], write_config: Callable[..., Path], tmp_path: Path
) -> None:
    request = request_for(write_config(CONFIG), [], [], tmp_path / "run")
    text = "\n".join(describe_memory(request, find_gpu("H200"), Screen()))
    assert "on H200" in text
    assert "2.00" in text
    assert "the memory of matmul is not predicted" in text
    assert "oom" in text
    assert "on H200: 139.82 GiB without the CUDA context" in text
    assert "\nthe verdict on a cell with a lower memory_limit_gib is for that limit\n" in text
    higher = request_for(write_config(CONFIG), ["memory_limit_gib=200"], [], tmp_path / "run")
    assert "a lower memory_limit_gib" not in "\n".join(
        describe_memory(higher, find_gpu("H200"), Screen())
    )
    on_amd = list(describe_memory(request, find_gpu("MI300X"), Screen()))
    assert "modelled with the allocator and libraries of CUDA, which is untested on AMD" in on_amd


RANKS = """\
name: ranks
grids:
  - {task: train_step, fixed: {size: tiny, parallel: ddp}, axes: {gpus: [1, 2]}}
"""


def test_cells_with_several_gpus_have_less_memory_and_the_peak_of_the_second_step(
    monkeypatch: pytest.MonkeyPatch, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    card = find_gpu("H200")

    def answer(child: object, request: PredictionRequest) -> Prediction:
        found = a_prediction(2.0, dict.fromkeys(request.caps_bytes, "fits"), "tracked")
        if request.cell.params.ranks == 1:
            return found
        second = Sample("prediction", "peak_allocated_bytes", "bytes", 3 * GIB, "second", "forward")
        return replace(found, samples=(*found.samples, second), reason="why it may need less")

    monkeypatch.setattr(PredictingProcess, "ask", answer)
    config = write_config(RANKS)
    request = request_for(config, [], [], tmp_path / "run")
    alone, together = sorted(request.expansion.cells, key=lambda cell: cell.params.ranks)
    limit = cap_bytes(alone, card)
    assert limit is not None
    assert cap_bytes(together, card) == limit - nccl_bytes()
    assert cap_bytes(together, None) is None
    text = "\n".join(describe_memory(request, card, Screen()))
    assert re.search(r"first step +second", text)
    assert re.search(r"^ 2 .* 2\.00  fits .* 3\.00$", text, re.M)
    assert "why it may need less; 0.9 GiB of each GPU are reserved for NCCL" in text.replace(
        "\n", " "
    )
    assert "verdict on a cell with a lower" not in text
    only_one = request_for(config, ["gpus=1"], [], tmp_path / "run")
    assert "NCCL" not in "\n".join(describe_memory(only_one, card, Screen()))


@pytest.mark.parametrize("width", [60, 80, 100])
def test_predictions_fit_the_screen(
    width: int, asked: list[PredictionRequest], write_config: Callable[..., Path], tmp_path: Path
) -> None:
    request = request_for(write_config(CONFIG), [], ["task=train_step"], tmp_path / "run")
    screen = Screen(width)
    lines = "\n".join(map(screen.text, describe_memory(request, find_gpu("H200"), screen)))
    assert max(map(len, lines.splitlines())) <= width
    assert re.search(r"^ .* 2\.00  (fits|oom)\b", lines, re.M)


def test_the_plan_ends_with_what_its_words_mean_and_how_many_cells_fit(
    monkeypatch: pytest.MonkeyPatch, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    verdicts: dict[int, Verdict] = {8: "fits", 16: "borderline", 32: "oom", 64: "oom"}

    def answer(child: object, request: PredictionRequest) -> Prediction:
        length = request.cell.params.values()["context_length"]
        return a_prediction(
            2.0,
            dict.fromkeys(request.caps_bytes, verdicts[length]),
            "modelled" if length == 64 else "tracked",
        )

    monkeypatch.setattr(PredictingProcess, "ask", answer)
    sets = ["context_length=8,16,32,64", "compile=eager,blocks"]
    request = request_for(
        write_config(CONFIG.partition("  - task: matmul")[0]),
        sets,
        ["memory_limit_gib=null"],
        tmp_path / "run",
    )
    assert list(describe_memory(request, TINY_GPU, Screen()))[-2:] == [
        "how: `tracked`: every tensor is followed; `modelled`: every tensor is followed, and those"
        " within fused attention are modelled; `as eager`: compiled, but predicted as eager for"
        " the reason in its note: it usually needs less",
        "2 fit, 2 borderline (within 3 %), 2 unlikely (see its note), 2 do not fit",
    ]
    assert (
        list(describe_memory(request, None, Screen()))[-1]
        == "8 without a verdict: add --gpu H200 or --set memory_limit_gib=32"
    )
    one = replace(request, expansion=replace(request.expansion, cells=request.expansion.cells[:1]))
    assert list(describe_memory(one, TINY_GPU, Screen()))[-1] == "1 fits"


def test_the_reason_for_no_memory_prediction_is_printed_once(
    asked: list[PredictionRequest], write_config: Callable[..., Path], tmp_path: Path
) -> None:
    on_cpu = request_for(
        write_config(CONFIG), ["device=cpu"], ["task=train_step"], tmp_path / "run"
    )
    assert list(describe_memory(on_cpu, None, Screen())) == [
        "", "3 cells on cpu, and memory is predicted for GPUs only: add --set device=cuda --gpu H200"
    ]  # fmt: skip
    assert list(describe_memory(on_cpu, find_gpu("RTX 5090"), Screen()))[-1].endswith(
        "add --set device=cuda"
    )
    messages = list(
        describe_memory(request_for(write_config(CONFIG), [], [], tmp_path / "run"), None, Screen())
    )
    assert messages[-2] == "1 cell not predicted: the memory of matmul is not predicted"
    assert not asked or all(request.cell.params.device == "cuda" for request in asked)


def test_few_cells_are_explained(
    asked: list[PredictionRequest], write_config: Callable[..., Path], tmp_path: Path
) -> None:
    """By the formula and as predicted; where there are many, a table says enough."""
    request = request_for(
        write_config(CONFIG), [], ["task=train_step", "pass=train_step"], tmp_path / "run"
    )
    text = "\n".join(describe_memory(request, None, Screen()))
    assert "memory at the peak" in text
    assert "4·N, N = 1,411,392" in text
    assert "12·N + A + 2·4·BSV = " in text
    assert [
        line.split()[i]
        for line in text.splitlines()
        if line.startswith(" parameters")
        for i in (0, 2)
    ] == ["parameters", "1.000"]
    many = request_for(write_config(CONFIG), ["context_length=8,16,32,64"], [], tmp_path / "run")
    assert "at the peak" not in "\n".join(describe_memory(many, None, Screen()))


def test_memory_known_only_from_the_closed_form_is_labelled_accordingly(
    monkeypatch: pytest.MonkeyPatch, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    samples = (
        Sample("prediction", "closed_form_bytes", "bytes", 3 * GIB, "steady", note="parameters"),
    )
    known = Prediction(
        "closed form", "it looks at its data", (*unknown("it looks at its data").samples, *samples)
    )
    monkeypatch.setattr(PredictingProcess, "ask", lambda child, request: known)
    config = write_config(
        "name: own\ngrids: [{task: train_step, fixed: {model: 'torch.nn:Embedding'}}]"
    )
    text = "\n".join(
        describe_memory(request_for(config, [], [], tmp_path / "run"), find_gpu("H200"), Screen())
    )
    assert "≥ 3.00" in text
    assert "\n1. activations unknown: it looks at its data\n" in text
    assert "1 with only a lower bound, which fits" in text
    assert "add --gpu" not in text
    assert "3.000" in text
