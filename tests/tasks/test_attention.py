from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from tasks.attention import PHASES, AttentionParams, build
from tasks.harness.device import Skip
from tasks.harness.stage import Session
from tasks.instruments import stages_of
from tasks.instruments.backend import classify
from tasks.process.phase_file import Progress
from tasks.spec.registry import make_cell
from tasks.spec.tables import Sample

SMALL: dict[str, Any] = {
    "device": "cpu", "d_head": 8, "context_length": 32, "batch_size": 3, "warmup_steps": 1, "measured_steps": 2,
}  # fmt: skip


def session_of(**params: Any) -> Session:
    made = AttentionParams.model_validate({**SMALL, **params})
    return Session(build(made), made, Progress())


def samples_of(session: Session, *instruments: str) -> dict[tuple[str, str, str], list[Sample]]:
    found: dict[tuple[str, str, str], list[Sample]] = {}
    for stage in stages_of(instruments):
        for sample in stage.run(session):
            found.setdefault((sample.mode, sample.phase, sample.metric), []).append(sample)
    return found


@pytest.mark.parametrize("pass_", PHASES)
@pytest.mark.parametrize("causal", [False, True])
def test_each_pass_has_its_phases_and_flops(pass_: Any, causal: bool) -> None:
    workload = session_of(causal=causal, **{"pass": pass_}).workload
    seen: list[str] = []

    def phase(name: str) -> AbstractContextManager[None]:
        seen.append(name)
        return nullcontext()

    workload.step(phase)
    assert tuple(seen) == workload.phases == PHASES[pass_]
    pairs = 32 * 33 // 2 if causal else 32 * 32
    forward = 2 * 2 * 3 * pairs * 8  # two products, a multiply and an add each
    assert workload.flops == {
        "forward": forward,
        **({"backward": 2 * forward} if "backward" in seen else {}),
    }


@pytest.mark.parametrize(
    ("name", "squares"),
    [
        ("naive", 2),
        ("torch_softmax", 1),
        ("weights_only", 1),
        ("recompute", 0),
        ("math", 1),
        ("flash", 0),
    ],
)
def test_saved_squares_of_attention_are_counted_with_their_bytes(name: str, squares: int) -> None:
    found = samples_of(session_of(attention=name, causal=True), "memory")
    assert found["steady", "", "saved_squares"][0].value == squares
    assert found["steady", "", "saved_square_bytes"][0].value == squares * 3 * 32 * 32 * 4
    rest = (found["steady", "", "saved_bytes"][0].value or 0) - squares * 3 * 32 * 32 * 4
    assert 0 <= rest < 3 * 32 * 32 * 4  # what is linear in the length, less the inputs, and masks


@pytest.mark.parametrize(
    ("name", "squares"), [("naive", 2), ("torch_softmax", 1), ("recompute", 0)]
)
def test_a_mask_is_no_square(name: str, squares: int) -> None:
    """Of one sequence it has the shape of one."""
    found = samples_of(session_of(attention=name, causal=True, batch_size=1), "memory")
    assert found["steady", "", "saved_squares"][0].value == squares


def test_where_shapes_coincide_squares_are_not_counted() -> None:
    found = samples_of(session_of(attention="recompute", d_head=32), "memory")
    assert ("steady", "", "saved_bytes") in found
    assert ("steady", "", "saved_squares") not in found


def test_weights_and_inputs_are_not_saved_they_are_there() -> None:
    found = samples_of(session_of(attention="flash", projections=True), "memory")
    sizes = 3 * 32 * 8 * 4
    # query, key, value and the result of the kernel with a number a row; x and the four weights are there anyway
    assert found["steady", "", "saved_bytes"][0].value == 4 * sizes + 3 * 32 * 4


def test_nothing_is_saved_without_a_backward_pass() -> None:
    assert ("steady", "", "saved_bytes") not in samples_of(
        session_of(**{"pass": "forward"}), "memory"
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [("efficient", "No viable backend"), ("cudnn", "No viable"), ("flex", "backward")],
)
def test_an_attention_backend_that_the_cpu_lacks_is_skipped(name: str, expected: str) -> None:
    with pytest.raises(Skip, match=f"attention: {name} .*{expected}"):
        session_of(attention=name)


@pytest.mark.parametrize(
    ("asked", "seen"),
    [("flash", "flash"), ("sdpa", "flash"), ("math", "none known"), ("recompute", "none known")],
)
def test_the_backend_that_ran_is_seen(asked: str, seen: str) -> None:
    session = session_of(attention=asked)
    assert samples_of(session, "backend")["", "", "events"][0].value
    assert session.facts["attention_seen"] == seen
    assert session.workload.facts["attention_asked"] == asked


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>", "flash"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<>", "flash"),
        (
            "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float>)",
            "efficient",
        ),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64", "cudnn"),
        ("triton_tem_fused_flex_attention_0", "flex"),
        ("triton_tem_fused_addmm_relu_3", "none known"),
        ("FlashAttentionForwardSm100", "flash"),
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32", "none known"),
        ("void at::native::(anonymous namespace)::softmax_warp_forward<float>", "none known"),
    ],
)
def test_kernels_tell_their_backend(name: str, backend: str) -> None:
    assert classify(["vectorized_elementwise_kernel", name])[0] == backend


def test_without_kernels_no_attention_backend_is_reported() -> None:
    assert classify([]) == (None, [])


def test_projections_are_part_of_the_step() -> None:
    session = session_of(projections=True)
    assert session.workload.flops is None
    samples = samples_of(session, "timing")
    assert len(samples["synced", "backward", "duration"]) == 2


@pytest.mark.parametrize("precision", ["bf16", "bf16_pure"])
@pytest.mark.parametrize("name", ["naive", "weights_only", "flash"])
def test_narrow_precisions_step(precision: str, name: str) -> None:
    workload = session_of(precision=precision, attention=name, causal=True).workload
    workload.step(lambda phase: nullcontext())
    assert workload.facts["autocast_dtype"] == ("bfloat16" if precision == "bf16" else None)
    assert workload.facts["parameter_dtype"] == ("float32" if precision == "bf16" else "bfloat16")


def test_work_before_a_phase_is_not_in_the_time_of_the_phase() -> None:
    """The sum of the phases is the step: what empties a cache is nobody's time."""
    calls: list[None] = []

    def before_phase() -> None:
        calls.append(time.sleep(0.05))

    session = session_of()
    session.workload = replace(session.workload, before_phase=before_phase)
    began = time.perf_counter()
    samples = samples_of(session, "timing")
    passed_ms = (time.perf_counter() - began) * 1e3
    whole, forward, backward = (
        [
            sample.value or 0.0
            for mode in ("warmup", "synced")
            for sample in samples[mode, phase, "duration"]
        ]
        for phase in ("step", "forward", "backward")
    )
    assert whole == pytest.approx([sum(parts) for parts in zip(forward, backward, strict=True)])
    assert len(calls) == 2 * len(whole)
    assert sum(whole) < passed_ms - 50 * len(calls)


def test_parameters_that_cannot_be() -> None:
    with pytest.raises(ValidationError, match="cold_l2 is of a CUDA device"):
        AttentionParams.model_validate({**SMALL, "cold_l2": True})
    with pytest.raises(ValidationError, match="Input should be"):
        AttentionParams.model_validate({**SMALL, "compile": "blocks"})
    with pytest.raises(ValidationError, match="max-autotune"):
        AttentionParams.model_validate({**SMALL, "compile_mode": "max_autotune"})


def test_eager_knows_no_mode_and_no_cache() -> None:
    plain, other = (
        make_cell("attention", SMALL),
        make_cell("attention", {**SMALL, "compile_mode": "max-autotune"}),
    )
    assert plain.id == other.id
    compiled = [
        make_cell("attention", {**SMALL, "compile": "model", "compile_mode": m})
        for m in ("default", "max-autotune")
    ]
    assert compiled[0].id != compiled[1].id


def test_eager_flex_knows_a_cache_and_no_mode() -> None:
    """It is compiled by itself, in torch's own mode: to say another would be the same cell twice."""
    flex = {**SMALL, "attention": "flex"}
    plain, other = (
        make_cell("attention", flex),
        make_cell("attention", {**flex, "compile_mode": "max-autotune"}),
    )
    assert (plain.id, other.params.values()["compile_mode"]) == (other.id, "default")
    assert make_cell("attention", {**flex, "compile_cache": "cold"}).id != plain.id
    whole = {**flex, "compile": "model", "compile_mode": "max-autotune"}
    assert make_cell("attention", whole).params.values()["compile_mode"] == "max-autotune"
    with pytest.raises(ValidationError, match="max-autotune"):
        AttentionParams.model_validate({**flex, "compile_mode": "max_autotune"})
