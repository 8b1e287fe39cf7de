"""Several ranks on several GPUs, by NCCL. They need a host with two."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch

from orchestrator.execution.measurement import execute
from orchestrator.hardware.gpu_catalog import link_peak_gb_s
from orchestrator.hardware.links import describe_links
from orchestrator.hardware.nvml import gpu_uuids
from tasks.spec.attempt import Attempt
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status
from tests.conftest import ROOT
from tests.killing_ranks import used_gpu_bytes

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"),
    pytest.mark.timeout(300),
]
Measure = Callable[..., Outcome]
COLLECTIVE_TIMEOUT_S = 8.0
NAMES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv")
TRAINED = {
    "device": "cuda", "gpus": 2, "size": "mini", "context_length": 64, "batch_size": 4,
    "optimizer": "fused", "warmup_steps": 3, "measured_steps": 6,
}  # fmt: skip


@pytest.fixture
def measure(make_attempt: Callable[..., Attempt]) -> Measure:
    def run(task: str = "train_step", instruments: tuple[str, ...] = (), **params: Any) -> Outcome:
        settings = {
            "import_paths": (str(ROOT / "tests" / "support"),),
            "instruments": ("timing", "memory", "telemetry", *instruments),
            "collective_timeout_s": COLLECTIVE_TIMEOUT_S,
            "timeout_s": 120.0,
        }
        return execute(make_attempt(task=task, settings=settings, **params))

    return run


def test_nvml_reports_links_of_a_known_kind() -> None:
    links = describe_links(list(gpu_uuids().values()))
    assert link_peak_gb_s(links), links


@pytest.mark.parametrize("call", ["sync", "async"])
@pytest.mark.parametrize("name", NAMES)
def test_collectives_have_the_right_results_and_a_bandwidth(
    measure: Measure, name: str, call: str
) -> None:
    outcome = measure("collectives", device="cuda", gpus=2, collective=name, size_mb=10, call=call)
    assert (outcome.status, outcome.evidence) == (Status.OK, {})
    assert outcome.facts["nccl_device_bytes"] > 0
    assert len({row.gpu_uuid for row in outcome.ranks}) == 2


@pytest.mark.parametrize(
    "parallel",
    ["naive", "flat", "overlap", "bucketed", "ddp", "zero1", "zero1_torch", "fsdp2"],
)
def test_strategies_divide_a_step_into_parts_that_add_up(measure: Measure, parallel: str) -> None:
    outcome = measure(instruments=("overlap",), **{**TRAINED, "parallel": parallel})
    assert (outcome.status, outcome.evidence) == (Status.OK, {})
    parts = {one.metric: one.value for one in outcome.samples if one.instrument == "overlap"}
    whole = parts["profiled_step"]
    added = sum(
        parts[name] or 0.0
        for name in ("compute", "exposed_transfer", "exposed_wait", "exposed_copies", "idle")
    )
    assert whole is not None
    assert added == pytest.approx(whole, rel=1e-6)
    assert parts["communication"]
    assert (parts["exposed_off"] is None) == (parallel in ("zero1_torch", "fsdp2"))


FAULTS: dict[str, tuple[Status, dict[str, Any]]] = {
    "fail": (Status.FAILED, {"message": "wrong on purpose"}),
    "cuda_oom": (Status.OOM, {"asked_bytes": int(20.5 * 1024**3)}),
    "sigkill": (Status.CRASHED, {"signal": "SIGKILL"}),
    "segfault": (Status.CRASHED, {"signal": "SIGSEGV"}),
    "leave": (Status.CRASHED, {"exit_code": 7}),
    "sleep": (Status.TIMEOUT, {}),
    "stop_itself": (Status.TIMEOUT, {}),
}


@pytest.mark.parametrize(
    ("gpus", "culprit"),
    [
        (2, 0),
        (2, 1),
        pytest.param(4, 2, marks=pytest.mark.skipif(GPUS < 4, reason="needs four GPUs")),
    ],
)
@pytest.mark.parametrize("how", FAULTS)
def test_a_row_names_the_rank_at_fault_and_its_memory_is_free_afterwards(
    measure: Measure, how: str, gpus: int, culprit: int
) -> None:
    before = used_gpu_bytes()
    args = {"how": how, "step": 5, "rank": culprit}
    own = {"size": None, "model": "misbehaving:Model", "model_args": args, "gpus": gpus}
    outcome = measure(**{**TRAINED, **own, "parallel": "ddp"})
    status, evidence = FAULTS[how]
    found = {name: outcome.evidence.get(name) for name in evidence}
    assert (outcome.status, outcome.evidence.get("rank"), found) == (status, culprit, evidence), (
        outcome.evidence
    )
    if status is Status.TIMEOUT:
        assert f"rank {culprit} did not arrive at" in str(outcome.evidence["message"])
        assert outcome.wall_s < COLLECTIVE_TIMEOUT_S + 15
        assert outcome.evidence["arrived"]
    deadline = time.monotonic() + 5
    while max(now - then for now, then in zip(used_gpu_bytes(), before, strict=True)) > 64 * 2**20:
        assert time.monotonic() < deadline, (before, used_gpu_bytes())
        time.sleep(0.1)
    left = [one for one in psutil.Process().children(recursive=True) if "rank" in one.name()]
    assert left == []
