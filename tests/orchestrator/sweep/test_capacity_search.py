"""The largest size that fits is found in few steps and confirmed by measuring."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from orchestrator.cli.text.capacity import describe_limits, limits_table
from orchestrator.common.errors import ConfigError
from orchestrator.common.output import Notify
from orchestrator.execution.events import AttemptStarted
from orchestrator.hardware.gpu_catalog import UNTESTED_ON_AMD, GpuModel
from orchestrator.hardware.host import GpuInfo, HostInfo
from orchestrator.planning.attempt_queue import QueueState
from orchestrator.planning.invocation import ExecutionOptions, last_command
from orchestrator.planning.predicting_process import PredictingProcess
from orchestrator.planning.request import SweepRequest
from orchestrator.report.formats.files import typed_columns
from orchestrator.report.formats.terminal import Screen
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.store.cell_state import read_states
from orchestrator.sweep import capacity_search as limits
from orchestrator.sweep import pipeline, search_loop
from orchestrator.sweep.capacity_limits import Bounds, Found, Limit, Search
from orchestrator.sweep.capacity_search import find_limits, predict_limits
from orchestrator.sweep.outcome_log import SweepResult
from orchestrator.sweep.pipeline import Runtime, run_sweep
from tasks.prediction.records import AS_EAGER, MAY_TAKE_MORE, Prediction, Verdict, unknown
from tasks.prediction.records import PredictionRequest as Asked
from tasks.spec.attempt import Attempt
from tasks.spec.outcome import Outcome
from tasks.spec.registry import make_cell
from tasks.spec.status import Status
from tasks.spec.tables import Sample
from tests.support.fake_sweep import SilentConsole, request_for, status_lines

GIB = 1024**3
CARD = GpuModel("Test", 10 * GIB, 9.0)
CONTEXT = Bounds("context_length", 128, 4096)

CONFIG = """
name: test
grids:
  - task: train_step
    fixed: {device: cuda}
    axes: {size: [tiny, mini], context_length: [64, 512, 1024]}
  - task: matmul
"""


@pytest.mark.parametrize("hints", [(), (640,), (640, 768), (128, 3968), (9999,)])
@pytest.mark.parametrize("largest", [0, 1, 5, 6, 31, 32, 40])
def test_a_search_finds_the_largest(largest: int, hints: tuple[int, ...]) -> None:
    """Values are multiples of 128, at most 32 of them."""
    search, tried = Search(CONTEXT, hints), []
    while (value := search.next) is not None:
        tried.append(value)
        search.learn(value, value <= largest * 128)
    assert search.fits == min(largest, 32) * 128
    assert search.fails == (None if largest >= 32 else search.fits + 128)
    assert len(tried) == len(set(tried)) <= 14
    assert all(value % 128 == 0 and value <= 4096 for value in tried)


def test_a_search_tries_only_good_hints() -> None:
    search, tried = Search(CONTEXT, (640, 768)), []
    while (value := search.next) is not None:
        tried.append(value)
        search.learn(value, value <= 640)
    assert tried == [640, 768]


def a_prediction(value: int, surely: int, perhaps: int, how: str = "tracked") -> Prediction:
    verdict: Verdict = "fits" if value <= surely else "borderline" if value <= perhaps else "oom"
    samples = tuple(
        Sample("prediction", f"peak_{kind}_bytes", "bytes", value * GIB / 100, "steady", "backward")
        for kind in ("allocated", "reserved", "requested")
    )
    made = Prediction("tracked", "", samples, {CARD.usable_bytes: verdict})
    if how == "tracked":
        return made
    model = {"size": "tiny"} if how == AS_EAGER else {"model": "hf:gpt2"}
    return made.of_cell(make_cell("train_step", {"compile": "model", **model}))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _no_cells_file(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write no cells.parquet in each round, which takes longer than all else, but for one test."""
    if request.function is not test_the_last_command_of_a_folder_may_be_a_search:
        monkeypatch.setattr(pipeline, "store_cells", lambda writer: {})


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Return a function that sets, by size, the lengths that fit surely and perhaps."""

    def set_to(**bounds: tuple[int, int]) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache {bounds}"))

        def answer(child: object, asked: Asked) -> Prediction:
            values = asked.cell.params.values()
            found = bounds.get(values["size"])
            return (
                a_prediction(values["context_length"], *found)
                if found
                else unknown("it does not run without data")
            )

        monkeypatch.setattr(PredictingProcess, "ask", answer)

    return set_to


class Gpu(Scheduler):
    """A scheduler whose cells run out of memory if they are longer than `largest`."""

    attempts: list[int] = []  # noqa: RUF012  of the last test, in their order
    largest: Mapping[str, int]
    status = Status.OOM

    def hosts(self) -> Sequence[HostInfo]:
        gpus = (GpuInfo("Test", 11 * GIB),)
        return [HostInfo(gpus=gpus, fingerprints={"cuda": [{"gpu": "Test"}]})]

    def slots(self, device: str, gpu_kind: str | None = None) -> int:
        return 1

    def import_ahead(self, attempt: Attempt) -> None: ...

    def run(self, queue: Any, on_start: Callable[[AttemptStarted], None]) -> Iterator[Outcome]:
        for attempt in queue:
            values = attempt.cell.params.values()
            self.attempts.append(values["context_length"])
            fits = values["context_length"] <= self.largest[values["size"]]
            yield self._outcome(attempt, Status.OK if fits else self.status)

    def _outcome(self, attempt: Attempt, status: Status) -> Outcome:
        samples = (Sample("memory", "peak_allocated_bytes", "bytes", 9 * GIB, "steady", "forward"),)
        return Outcome(
            attempt, status, "", "", {}, {}, samples if status is Status.OK else (), 1.7e9, 1.0
        )

    def close(self) -> None:
        pass


@pytest.fixture
def request_where(write_config: Callable[..., Path], tmp_path: Path) -> Callable[..., SweepRequest]:
    return lambda *wheres: request_for(write_config(CONFIG), [], list(wheres), tmp_path / "run")


def runtime_with(status: Status = Status.OOM, **largest: int) -> Runtime:
    def opened(execution: ExecutionOptions, example: Attempt, notify: Notify) -> closing[Gpu]:
        gpu = Gpu()
        gpu.largest, gpu.status, Gpu.attempts = largest, status, []
        return closing(gpu)

    return Runtime(SilentConsole(), opened)


def rows_of(request: SweepRequest, found: Found, bounds: Bounds = CONTEXT) -> list[dict[str, Any]]:
    """Return the values of each row of the table, by names of columns."""
    columns = typed_columns(limits_table(request, found, bounds))
    rows = []
    for values in zip(*columns.values(), strict=True):
        row = dict(zip(columns, values, strict=True))
        rows.append({name: value for name, value in row.items() if value is not None})
    return rows


def note_of(request: SweepRequest, found: Found) -> str:
    return str(rows_of(request, found)[0]["note"])


def test_cells_that_differ_in_length_alone_are_one_row(predicted: Any, request_where: Any) -> None:
    predicted(tiny=(700, 1000), mini=(3000, 3000))
    request = request_where()
    found = find_limits(request, CONTEXT, CARD, None)
    tiny, mini = rows_of(request, found)
    assert (tiny["size"], mini["size"]) == ("tiny", "mini")
    assert (tiny["context_length_fits_up_to"], tiny["oom_from"]) == (640, 1024)
    assert (tiny["peak_gib"], tiny["reserved_gib"], tiny["limit_gib"]) == (6.4, 6.4, 10)
    assert tiny["reserved_at_oom_gib"] == 10.24
    assert (mini["context_length_fits_up_to"], mini["oom_from"]) == (2944, 3072)
    text = "\n".join(describe_limits(request, found, CONTEXT, Screen()))
    assert re.search(
        r"^ mini +2944 +29\.44 +3072 +10\.00 \(29\.44 with room\) +10\.00 ", text, re.M
    )
    assert not request.run.exists


@pytest.mark.parametrize(
    ("perhaps", "largest", "is_reported"),
    [(1000, None, True), (700, None, False), (1000, 800, False)],
)
def test_lengths_between_the_limits_are_reported_as_undecided(
    predicted: Any, request_where: Any, perhaps: int, largest: int | None, is_reported: bool
) -> None:
    predicted(tiny=(700, perhaps))
    request = request_where("size=tiny")
    found = find_limits(request, CONTEXT, CARD, runtime_with(tiny=largest) if largest else None)
    footer = (
        "between `fits up to` and `OOM from`: predicted within 3 % of the limit, undecided; "
        "to measure it on the GPU itself: sweep best --largest context_length"
    )
    assert (footer in list(describe_limits(request, found, CONTEXT, Screen()))) is is_reported


def test_a_prediction_for_amd_is_untested(predicted: Any, request_where: Any) -> None:
    predicted(tiny=(700, 1000))
    request = request_where("size=tiny")
    amd = replace(CARD, device="AMD Instinct MI300X")
    lines = list(
        describe_limits(request, find_limits(request, CONTEXT, amd, None), CONTEXT, Screen())
    )
    assert UNTESTED_ON_AMD in lines


def test_notes_of_predicted_rows(predicted: Any, request_where: Any) -> None:
    predicted(tiny=(100, 100))
    request = request_where()
    found = find_limits(request, CONTEXT, CARD, None)
    assert [group.is_unknown for group in found.groups] == [False, True]  # the second: exit code 1
    text = "\n".join(describe_limits(request, found, CONTEXT, Screen()))
    assert "nothing fits: 128 takes 1.28 GiB" in text
    assert "128 cannot be predicted: it does not run without data" in text
    predicted(tiny=(9999, 9999), mini=(9999, 9999))
    text = "\n".join(
        describe_limits(
            request,
            find_limits(request, replace(CONTEXT, up_to=1000), CARD, None),
            CONTEXT,
            Screen(),
        )
    )
    assert text.endswith("1. not tried above 896: increase --up-to\nall cells: batch_size=4")


@pytest.mark.parametrize("granularity", [64, 256, 1024])
def test_a_model_that_refuses_longer_contexts_has_a_limit(
    granularity: int, monkeypatch: pytest.MonkeyPatch, request_where: Any
) -> None:
    def answer(child: object, asked: Asked) -> Prediction:
        length = asked.cell.params.values()["context_length"]
        refused = unknown("it does not run without data: ValueError: at most 1024 positions")
        return a_prediction(length, 9999, 9999) if length <= 1024 else refused

    monkeypatch.setattr(PredictingProcess, "ask", answer)
    request = request_where("size=tiny")
    bounds = replace(CONTEXT, granularity=granularity, up_to=8192)
    found = find_limits(request, bounds, CARD, None)
    (row,) = rows_of(request, found, bounds)
    assert row["context_length_fits_up_to"] == 1024
    assert "oom_from" not in row
    assert row["note"] == (
        f"{1024 + granularity} cannot be predicted: it does not run without data: ValueError:"
        " at most 1024 positions"
    )
    assert not found.groups[0].is_unknown


@pytest.mark.parametrize("granularity", [64, 256, 1024])
def test_a_context_that_the_parameters_refuse_is_a_limit(
    granularity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preset of transformers has as many positions as its config."""

    def answer(child: object, asked: Asked) -> Prediction:
        return a_prediction(asked.cell.params.values()["context_length"], 9999, 9999)

    monkeypatch.setattr(PredictingProcess, "ask", answer)
    bounds = replace(CONTEXT, granularity=granularity, up_to=8192)
    values = {"model": "hf:gpt2", "batch_size": 1}
    group = Limit("train_step", values, bounds, Search(bounds), Search(bounds))
    predict_limits([group], CARD, ())
    assert group.surely.fits == 1024
    refused = 1024 + granularity
    assert group.unpredicted == (
        f"{refused} cannot be predicted: context_length: {refused} is too long, gpt2 has 1024"
        " positions"
    )
    group.begin_measuring()
    while (value := group.next_to_measure) is not None:
        group.learn_status(value, Status.OK)
    assert group.measured is not None
    assert group.measured.fits == 1024


def test_parameters_may_be_too_large(monkeypatch: pytest.MonkeyPatch, request_where: Any) -> None:
    # A model that needs data to run is predicted by its parameters alone. They are a lower bound.
    terms = (
        Sample("prediction", "closed_form_bytes", "bytes", 12 * GIB, "steady", note="parameters"),
    )
    known = Prediction("closed form", "it looks at its data", terms, {CARD.usable_bytes: "oom"})
    monkeypatch.setattr(PredictingProcess, "ask", lambda child, asked: known)
    request = request_where("size=tiny")
    text = "\n".join(
        describe_limits(request, find_limits(request, CONTEXT, CARD, None), CONTEXT, Screen())
    )
    assert "nothing fits: 128 takes ≥ 12.00 GiB" in text


@pytest.mark.parametrize(("how", "note"), [(AS_EAGER, "more"), (MAY_TAKE_MORE, "less")])
def test_no_compiled_cell_is_reported_not_to_fit(
    how: str, note: str, monkeypatch: pytest.MonkeyPatch, request_where: Any
) -> None:
    def answer(child: object, asked: Asked) -> Prediction:
        return a_prediction(asked.cell.params.values()["context_length"], 700, 1000, how)

    monkeypatch.setattr(PredictingProcess, "ask", answer)
    request = request_where("size=tiny")
    found = find_limits(request, CONTEXT, CARD, None)
    (row,) = rows_of(request, found)
    assert row["note"] == f"compiled: predicted as eager, {note} may fit"
    assert row["context_length_fits_up_to"] == 640
    lines = "\n".join(describe_limits(request, found, CONTEXT, Screen())).splitlines()
    # No line on undecided lengths: compiled cells may fit above the prediction.
    assert lines[-2:] == [f"1. {row['note']}", "all cells: batch_size=4"]


@pytest.mark.parametrize(
    ("largest", "measured", "remark"),
    [
        (640, [640, 1024, 768], "confirmed"),
        (800, [640, 1024, 768, 896], "confirmed"),
        (300, [640, 256, 384], "less fits than was predicted"),
        (1200, [640, 1024, 1536, 1280, 1152], "more fits than was predicted"),
        (0, [640, 256, 128], "less fits than was predicted"),
    ],
)
def test_the_limit_and_its_neighbours_are_measured(
    predicted: Any, request_where: Any, largest: int, measured: list[int], remark: str
) -> None:
    predicted(tiny=(700, 1000))
    request = request_where("size=tiny")
    runtime = runtime_with(tiny=largest)
    found = find_limits(request, CONTEXT, CARD, runtime)
    assert Gpu.attempts == measured
    (row,) = rows_of(request, found)
    fits = largest // 128 * 128
    assert (row.get("measured_up_to", 0), row["oom_at"], row["note"]) == (fits, fits + 128, remark)
    assert row.get("measured_gib") == (9 if fits else None)
    assert sorted(read_states(request.run)) == sorted(
        found.groups[0].at(value).id for value in measured
    )


def test_measured_values_are_not_measured_again(predicted: Any, request_where: Any) -> None:
    predicted(tiny=(700, 1000), mini=(700, 1000))
    request = request_where()
    find_limits(request, CONTEXT, CARD, runtime_with(tiny=640, mini=700))
    assert Gpu.attempts == [640, 640, 1024, 1024, 768, 768]
    opened: list[int] = []
    runtime = replace(
        runtime_with(), open_scheduler=lambda execution, example: opened.append(1) or closing(Gpu())
    )
    found = find_limits(request, CONTEXT, CARD, runtime)
    assert not opened
    assert [row["note"] for row in rows_of(request, found)] == ["confirmed"] * 2


def test_unpredicted_cells_are_measured(predicted: Any, request_where: Any) -> None:
    predicted()
    request = request_where("size=mini")
    found = find_limits(request, CONTEXT, CARD, runtime_with(mini=1000))
    assert Gpu.attempts[:3] == [128, 384, 896]
    (row,) = rows_of(request, found)
    assert (row["measured_up_to"], row["measured_gib"], row["oom_at"]) == (896, 9, 1024)
    assert row["note"].startswith("measured only: 128 cannot be predicted")
    nothing = find_limits(request_where("size=tiny"), CONTEXT, CARD, runtime_with(tiny=0))
    assert Gpu.attempts == [128]
    assert note_of(request, nothing).startswith("nothing fits; measured only")


def test_a_timeout_ends_the_search(predicted: Any, request_where: Any) -> None:
    predicted(tiny=(700, 1000))
    request = request_where("size=tiny")
    found = find_limits(request, CONTEXT, CARD, runtime_with(Status.TIMEOUT, tiny=640))
    assert found.groups[0].failure == "1024 ended as timeout"


def test_a_time_limit_leaves_the_rest_for_later(
    predicted: Any, request_where: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted(tiny=(700, 1000))
    request = request_where("size=tiny")
    late = SweepResult(queue=QueueState(skipped_for_time=1))
    monkeypatch.setattr(search_loop, "run_sweep", lambda *_: late)
    found = find_limits(request, CONTEXT, CARD, runtime_with(tiny=640))
    assert found.result is not None
    assert found.result.is_cut_short
    assert note_of(request, found) == "not finished: run it again"


def test_a_cell_that_a_check_excludes_ends_the_search(
    predicted: Any, request_where: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted(tiny=(700, 1000))
    monkeypatch.setattr(search_loop, "run_sweep", lambda *_: SweepResult())
    found = find_limits(request_where("size=tiny"), CONTEXT, CARD, runtime_with(tiny=640))
    assert found.groups[0].failure == "640 was not measured"


def test_a_search_does_not_change_the_sweep_of_its_folder(
    predicted: Any, request_where: Any
) -> None:
    # The search tries other lengths than those of the config, which `sweep status` must not count.
    predicted(tiny=(700, 1000))
    request = request_where("size=tiny")
    run_sweep(request, runtime_with(tiny=640))
    before = request.run.read_manifest()
    find_limits(request_where("size=mini"), CONTEXT, CARD, runtime_with(mini=640))
    assert request.run.read_manifest()["selection"] == before["selection"]
    assert status_lines(request.run)[-1] == "nothing is left to measure of 3 cells"


def test_the_last_command_of_a_folder_may_be_a_search(
    predicted: Any, request_where: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted(tiny=(700, 1000))
    words = ["max-context", "c.yaml", "--where", "size=tiny", "--confirm"]
    monkeypatch.setattr(sys, "argv", ["sweep", *words])
    request = request_where("size=tiny")
    find_limits(request, CONTEXT, CARD, runtime_with(tiny=640))
    command = shlex.split(last_command(request.run))
    assert command == ["sweep", *words, "--out", str(request.run)]


def test_errors_have_a_remedy(
    request_where: Any, write_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="matmul: has no axis 'context_length'"):
        find_limits(request_where("task=matmul"), CONTEXT, CARD, None)
    with pytest.raises(ConfigError, match="less than the granularity, 128"):
        find_limits(request_where(), replace(CONTEXT, up_to=100), CARD, None)
    on_cpu = write_config(CONFIG.replace("device: cuda", "device: cpu"), "cpu.yaml")
    with pytest.raises(ConfigError, match="the CPU has no memory limit"):
        find_limits(
            request_for(on_cpu, [], ["task=train_step"]),
            CONTEXT,
            CARD,
            runtime_with(tiny=640),
        )
    divided = write_config(
        CONFIG.replace("device: cuda", "device: cuda, gpus: 2, parallel: ddp"), "two.yaml"
    )
    with pytest.raises(ConfigError, match=r"not divisible by 2 GPUs.*Add --granularity 2"):
        find_limits(
            request_for(divided, [], ["task=train_step"]), Bounds("batch_size", 1, 64), CARD, None
        )
    monkeypatch.setattr(search_loop, "probe_here", HostInfo)
    with pytest.raises(ConfigError, match=r"This machine has none.*--gpu"):
        find_limits(request_where(), CONTEXT, None, None)


def test_limits_are_for_the_smallest_gpu_of_this_machine(
    predicted: Any, request_where: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted()
    gpus = (GpuInfo("Large", 80 * GIB), GpuInfo("Small", 20 * GIB))
    monkeypatch.setattr(search_loop, "probe_here", lambda: HostInfo(gpus=gpus))
    card = find_limits(request_where(), CONTEXT, None, None).gpu
    assert card is not None
    assert card.name == "Small"


def test_confirming_without_the_device_is_refused_before_predicting(
    write_config: Any, sweep_here: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "orchestrator.execution.host_probe.probe_here",
        lambda: HostInfo(fingerprints={"cpu": [{}], "cuda": []}),
    )
    monkeypatch.setattr(limits, "predict_limits", lambda *_: pytest.fail("it was predicted first"))
    done = sweep_here(
        "max-batch",
        write_config(CONFIG),
        "--where",
        "size=tiny",
        "--set",
        "memory_limit_gib=2",
        "--confirm",
    )
    assert done.exit_code == 2
    assert "device cuda is not available (available: cpu). Add --set device=cpu" in done.stderr
