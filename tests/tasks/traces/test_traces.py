"""Traces of a GPU, written by hand: who launched what, where it belongs, and what is said of what nobody can tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.spec.tables import KernelRow
from tasks.traces.attribution import ModuleEvidence, Work, attribute
from tasks.traces.chrome import from_json, read_chrome
from tasks.traces.kernel_classes import CLASSES, classify
from tasks.traces.nsys import read_nsys
from tasks.traces.parts import label_of
from tasks.traces.summary import to_rows, to_samples
from tasks.traces.timeline import BACKWARD_NODE
from tests.support.traces import AUTOGRAD, KinetoTrace, NsysExport, training_step

ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, MulFunctor<float>>"


def works_of(trace: KinetoTrace) -> dict[str, list[Work]]:
    works: dict[str, list[Work]] = {}
    for work in attribute(from_json(trace.text)):
        works.setdefault(work.name, []).append(work)
    return works


def numbers_of(trace: KinetoTrace) -> dict[tuple[str, str], float | None]:
    timeline = from_json(trace.text)
    return {
        (s.metric, s.phase): s.value for s in to_samples(attribute(timeline), 1, timeline.on_device)
    }


def test_backward_kernels_of_another_thread_belong_to_the_modules_of_the_forward_pass() -> None:
    works = works_of(training_step())
    forward, backward = works[ELEMENTWISE]
    assert (forward.phase, forward.part, forward.how) == ("forward", "norm", ModuleEvidence.SCOPE)
    assert (backward.phase, backward.part, backward.how) == (
        "backward",
        "norm",
        ModuleEvidence.SEQUENCE,
    )
    (product,) = works["nvjet_tst_64x64_NTN"]
    assert (product.phase, product.operator, product.kind) == ("backward", "aten::mm", "GEMM")


def test_a_number_that_several_operators_share_is_of_the_last_begun() -> None:
    """Views and dispatching operators carry the number of the next one that autograd records."""
    assert works_of(training_step())["nvjet_tst_64x64_NTN"][0].part == "q projection"


def test_the_optimizer_is_its_phase_and_a_gradient_kept_is_of_no_module() -> None:
    works = works_of(training_step())
    (foreach,) = works["void at::native::(anonymous namespace)::multi_tensor_apply_kernel<>"]
    assert (foreach.phase, foreach.part, foreach.how, foreach.kind) == (
        "optimizer",
        "optimizer",
        ModuleEvidence.PHASE,
        "optimizer",
    )
    (kept,) = works["Memcpy DtoD (Device -> Device)"]
    assert (kept.phase, kept.part, kept.how, kept.operator) == (
        "backward",
        "",
        ModuleEvidence.LAUNCH,
        "aten::copy_",
    )


def test_an_unknown_kernel_without_a_launch_is_attributed_to_nothing() -> None:
    trace = training_step()
    trace.kernel(
        "some_vendors_mystery", None, 71, 91
    )  # while the device is in the middle of the forward pass
    (mystery,) = works_of(trace)["some_vendors_mystery"]
    assert mystery[:5] == ("", -1, "", "other", ModuleEvidence.NONE)
    row = next(
        row
        for row in to_rows(attribute(from_json(trace.text)), 1)
        if row.name == "some_vendors_mystery"
    )
    assert (row.phase, row.module, row.kernel_class, row.attributed_by, row.total_ns) == (
        "",
        "",
        "other",
        "none",
        20_000,
    )
    whole = 6 * 10 + 20
    for what, known in (("phase", 60), ("module", 50), ("class", 60)):
        assert numbers_of(trace)[f"attributed_to_{what}", ""] == pytest.approx(known / whole)


def test_an_unknown_kernel_with_a_launch_has_its_phase_and_the_operators_class() -> None:
    trace = training_step()
    trace.kernel("mystery_of_mm", 25, 71, 81)
    trace.kernel("mystery_of_nothing", 105, 81, 91)
    works = works_of(trace)
    assert works["mystery_of_mm"][0][:5] == (
        "forward",
        0,
        "q projection",
        "GEMM",
        ModuleEvidence.SCOPE,
    )
    assert works["mystery_of_nothing"][0][:5] == ("", -1, "", "other", ModuleEvidence.LAUNCH)


def test_a_phase_goes_by_the_launch_not_by_when_the_kernel_runs() -> None:
    trace = training_step()
    trace.kernel("late", 95, 350, 360)
    assert works_of(trace)["late"][0].phase == "forward"


def test_rows_hold_what_was_measured() -> None:
    trace = KinetoTrace()
    trace.phase("forward", 0, 100)
    for index, length in enumerate((1.5, 2, 4)):
        trace.kernel("k", 10 + index, 20 + 10 * index, 20 + 10 * index + length)
    (row,) = to_rows(attribute(from_json(trace.text)), steps=1)
    assert row == KernelRow(
        "forward",
        "",
        "other",
        "launch",
        "",
        "k",
        1,
        3,
        7500,
        2500.0,
        2000,
        1500,
        4000,
        pytest.approx(1322.8757),
    )


def test_kernels_that_overlap_on_two_streams_count_once_as_busy() -> None:
    trace = KinetoTrace()
    trace.phase("forward", 0, 100)
    trace.kernel("a", 10, 20, 60)
    trace.kernel("b", 11, 40, 80, stream=8)
    trace.kernel("c", 12, 50, 55, stream=9)  # within both
    trace.kernel("d", 90, 100, 120)  # launched when the device had been idle for 10 µs
    trace.kernel("e", 95, 125, 130)  # launched while it was busy, and late all the same
    numbers = numbers_of(trace)
    assert numbers["busy", ""] == pytest.approx((60 + 20 + 5) / 110)
    assert numbers["busy", "forward"] == pytest.approx(85 / 110)
    assert numbers["kernel_time", "forward"] == pytest.approx((40 + 40 + 5 + 20 + 5) / 1000)
    assert numbers["idle", ""] == pytest.approx(0.025)
    assert numbers["idle_for_host", ""] == pytest.approx(0.020)


def test_busy_by_phase_leaves_out_what_is_between_its_occurrences() -> None:
    trace = KinetoTrace()
    for began in (0, 1000):
        trace.phase("forward", began, began + 100)
        trace.kernel("a", began + 10, began + 20, began + 40)
        trace.kernel("a", began + 11, began + 60, began + 80)
    assert numbers_of(trace)["busy", "forward"] == pytest.approx(40 / 60)


def test_a_part_of_a_backward_function_is_named_by_its_own_range() -> None:
    """A Function whose backward pass is Python names its parts itself, on autograd's thread."""
    trace = training_step()
    trace.operator("_WeightsOnlyBackward", 250, 290, AUTOGRAD, 8, backward=True)
    trace.module("softmax", 255, 285, AUTOGRAD)
    trace.kernel("softmax_backward", 260, 270, 280, AUTOGRAD)
    found = works_of(trace)["softmax_backward"][0]
    assert (found.part, found.how) == ("softmax", ModuleEvidence.SCOPE)


@pytest.mark.parametrize(
    ("node", "part", "how"),
    [
        ("", "gradient sums", ModuleEvidence.ENGINE),
        ("AddBackward0", "norm", ModuleEvidence.SEQUENCE),
    ],
)
def test_the_sum_of_a_tensors_gradients_is_of_none_that_used_it(
    node: str, part: str, how: ModuleEvidence
) -> None:
    """Autograd adds them up while it evaluates a node, and not in the node itself."""
    trace = training_step()
    trace.operator(
        "autograd::engine::evaluate_function: AddBackward0", 250, 290, AUTOGRAD, 8, backward=True
    )
    if node:
        trace.operator(node, 252, 288, AUTOGRAD, 8, backward=True)
    trace.operator("aten::add_", 255, 285, AUTOGRAD)
    trace.kernel("added", 260, 270, 280, AUTOGRAD)
    found = works_of(trace)["added"][0]
    assert (found.part, found.how) == (part, how)


def test_a_file_is_read_as_its_events_are(tmp_path: Path) -> None:
    trace = training_step()
    assert attribute(read_chrome(trace.write(tmp_path / "t.json"))) == attribute(
        from_json(trace.text)
    )
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ValueError, match="Expected `object`"):
        read_chrome(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("layers.3.attn.q_proj", "q projection"),
        ("layers.11.ffn.w2", "ffn"),
        ("layers.0.ln2", "norm"),
        ("layers.0", "residual"),
        ("layers.7.attn", "attention"),
        ("token_embeddings", "embedding"),
        ("softmax", "softmax"),
        ("transformer.h.12.mlp.c_fc", "transformer.h.*.mlp.c_fc"),
        ("", "model"),
        ("Optimizer.step#AdamW.step", "optimizer"),
    ],
)
def test_the_path_of_a_module_becomes_a_label_of_its_part(path: str, label: str) -> None:
    assert label_of(path) == label


@pytest.fixture
def export(tmp_path: Path) -> NsysExport:
    """The same story as `training_step`, as nsys tells it: phases from start to end, operators with their numbers."""
    written = NsysExport(tmp_path / "report1.sqlite")
    written.range("phase::forward", 0, 100, start_end=True)
    written.range("mod::layers.0.attn.q_proj", 10, 40)
    written.range("aten::mm, seq = 7, op_id = 3", 14, 36)
    written.kernel("nvjet_tst_128x256_64x4_2x1_v_bz_TNN", 20, 50, 60)
    written.range("phase::backward", 110, 300, start_end=True)
    written.range("autograd::engine::evaluate_function: MmBackward0, seq = 7", 120, 190, AUTOGRAD)
    written.range("aten::mm, op_id = 9", 130, 180, AUTOGRAD)
    written.kernel("nvjet_tst_64x64_NTN", 140, 150, 160, AUTOGRAD)
    return written


def test_nsys_agrees_with_kineto(export: NsysExport) -> None:
    forward, backward = attribute(read_nsys(export.path, {})[""].timeline)
    assert forward[:6] == ("forward", 0, "q projection", "GEMM", ModuleEvidence.SCOPE, "aten::mm")
    assert backward[:6] == (
        "backward",
        1,
        "q projection",
        "GEMM",
        ModuleEvidence.SEQUENCE,
        "aten::mm",
    )


def test_nsys_ranges_that_somebody_wrote_by_hand(export: NsysExport) -> None:
    export.range("optimizer_step", 400, 500)
    export.range("final matmul", 410, 440)
    export.range("ncclAllReduce", 412, 438, domain=5)  # a library's own domain is no part
    export.kernel("ncclDevKernel_AllReduce_Sum", 420, 450, 460)
    export.copy(1, 470, 480, 490)
    export.kernel("of_another_process", 421, 460, 470, process=99)
    export.kernel("never_launched", None, 470, 480)
    traces = read_nsys(export.path, {})
    assert list(traces) == ["process 99, GPU 0", "process 4242, GPU 0"]
    (other,) = attribute(traces["process 99, GPU 0"].timeline)
    assert (other.name, other.phase, other.part) == ("of_another_process", "", "")
    works = {work.name: work for work in attribute(traces["process 4242, GPU 0"].timeline)}
    assert works["ncclDevKernel_AllReduce_Sum"][:5] == (
        "optimizer",
        2,
        "final matmul",
        "communication",
        ModuleEvidence.SCOPE,
    )
    assert works["[CUDA memcpy Host-to-Device]"][:5] == (
        "optimizer",
        2,
        "optimizer",
        "copy",
        ModuleEvidence.PHASE,
    )
    assert works["never_launched"][:5] == ("", -1, "", "other", ModuleEvidence.NONE)


def test_a_file_that_is_no_nsys_export_or_has_no_kernels_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.sqlite").write_text(
        "this is no database, not at all, it only is called one" * 20
    )
    with pytest.raises(ValueError, match="not an export of Nsight Systems"):
        read_nsys(tmp_path / "text.sqlite", {})
    empty = NsysExport(tmp_path / "empty.sqlite")
    with pytest.raises(ValueError, match="contains no CUDA kernels"):
        read_nsys(empty.path, {})


NAMES = {
    "GEMM": (
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT",
        "nvjet_hsh_192x192_64x4_1x2_h_bz_coopA_NTN",
        "nvjet_sm100_tss_128x256_64x4_2x1_2cta_v_bz_TNN",
        "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4_alignc4_execute_kernel__5x_cublas",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
        "ampere_sgemm_128x64_tn",
        "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn",
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nt_align1>(T1::Params)",
        "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x256_16x3_nn_align4>(cutlass_80_tensorop_s1688gemm::Params)",
        "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::GemmUniversal<int>>>",
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false, false>",
        "void gemmSN_NN_kernel<float, 128, 2, 4, 8, 3, 4, false>(cublasGemmSmallNParams<float>)",
        "void splitKreduce_kernel<32, 16, int, float, float, float, float, true, false, false>(cublasSplitKParams<float>)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true>",
        "Cijk_Alik_Bljk_SB_MT128x128x16_SN_1LDSB0",
        "triton_tem_fused_mm_t_5",
        "aten::bmm",
        "aten::addmm",
    ),
    "attention": (
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, cutlass::bfloat16_t>>",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64, 128, 128, 8>>",
        "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<64, 128, 128, 8>>",
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float>::Params)",
        "fmha_cutlassB_f32_aligned_64x64_k64_sm80(PyTorchMemEffAttention::AttentionBackwardKernel<float>::Params)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x64_4x1x1_cga1x1x1_kernel0_0",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_30_128x64x64_kernel0_0",
        "void cutlass::device_kernel<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2>>>",
        "triton_tem_fused_flex_attention_0",
        "triton_tem_fused_flex_attention_backward_zeros_1",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    ),
    "softmax": (
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>(float*, float const*, int)",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float, float, SoftMaxForwardEpilogue>",
        "void at::native::(anonymous namespace)::cunn_SoftMaxBackward<4, float, float, float, LogSoftMaxBackwardEpilogue>",
        "triton_per_fused__softmax_div_0",
        "triton_red_fused__log_softmax_3",
        "triton_red_fused_div_exp_max_sub_sum_where_3",
        "aten::_log_softmax",
    ),
    "norm": (
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, false>(int, float)",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float, float, 64, 1, 32>",
        "void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float, float, true>",
        "triton_per_fused__to_copy_mean_mul_pow_rsqrt_2",
        "triton_per_fused__to_copy_add_div_expand_mul_pow_sum_view_12",
        "aten::native_layer_norm",
    ),
    "elementwise": (
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >",
        "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::BinaryFunctor<float>>>",
        "void at::native::unrolled_elementwise_kernel<at::native::exp_kernel_cuda(at::TensorIteratorBase&)>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >",
        "triton_poi_fused_mul_sigmoid_silu_4",
        "aten::masked_fill_",
        "aten::sigmoid_backward",
        "aten::clamp_min",
        "aten::clamp_max_",
        "aten::threshold",
        "aten::threshold_backward",
        "aten::maximum",
        "aten::silu",
        "aten::gelu_backward",
        "aten::leaky_relu_",
        "aten::hardtanh_backward",
        "aten::bitwise_and",
        "aten::ones_like",
    ),
    "reduction": (
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float, float, float>>>",
        "void at_cuda_detail::cub::DeviceScanKernel<at_cuda_detail::cub::DeviceScanPolicy<int>>",
        "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>",
        "triton_red_fused_mul_sum_7",
        "aten::amax",
        "aten::var_mean",
        "aten::logsumexp",
        "aten::cross_entropy_loss",
        "aten::mse_loss",
    ),
    "copy": (
        "Memcpy HtoD (Pageable -> Device)",
        "Memset (Device)",
        "[CUDA memcpy Device-to-Device]",
        "void at::native::elementwise_kernel<128, 2, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}>",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_vectorized<at::native::OpaqueType<4u>, unsigned int, 4, 64>",
        "triton_poi_fused__to_copy_clone_2",
        "triton_poi_fused__unsafe_view_clone_permute_unsqueeze_view_4",
        "void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)>",
        "void at::native::vectorized_elementwise_kernel<8, at::native::float16_copy_kernel_cuda(at::TensorIteratorBase&)>",
        "aten::_to_copy",
    ),
    "indexing": (
        "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, long, long, bool)",
        "void at::native::indexing_backward_kernel_small_stride<float>(long const*, long const*, float const*)",
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned int, 2, 2, -2, true>",
        "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<at::native::index_kernel_impl>>",
        "aten::index",
        "aten::index_put_",
        "aten::_index_put_impl_",
        "aten::index_select",
        "aten::gather",
        "aten::scatter",
        "aten::embedding",
        "aten::embedding_dense_backward",
        "void at::native::_scatter_gather_elementwise_kernel<128, 8, at::native::_cuda_scatter_gather_internal_kernel<true, float>>",
        "aten::scatter_add_",
        "aten::scatter_add",
        "aten::scatter_reduce_",
        "aten::index_copy_",
    ),
    "optimizer": (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4, ADAM_MODE>>",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<2>, BinaryOpScalarFunctor<float>>",
        "aten::_foreach_mul_",
        "aten::_fused_adamw_",
    ),
    "communication": (
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_ReduceScatter_RING_LL_Sum_float",
    ),
    "other": (
        "a_kernel_that_nobody_knows",
        "aten::view",
        "void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3, 3, 1, false, false, true>",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in names]
)
def test_classes_of_real_kernels(kind: str, name: str) -> None:
    assert classify(name) == kind


def test_enough_names_of_every_class() -> None:
    assert sum(map(len, NAMES.values())) >= 50
    assert set(NAMES) == set(CLASSES)
    assert classify("a_kernel_that_nobody_knows", "aten::mm") == "GEMM"


def test_updates_within_the_backward_pass_leave_the_steps_of_an_export_unknown(
    tmp_path: Path,
) -> None:
    for node_ends, steps in ((250, None), (90, 2)):
        export = NsysExport(tmp_path / f"{node_ends}.sqlite")
        for start in (0, 300):
            export.range(f"{BACKWARD_NODE}: AccumulateGrad", start, start + node_ends)
            export.range("Optimizer.step#SGD.step", start + 100, start + 200)
            export.kernel("update", start + 110, start + 120, start + 130)
        (trace,) = read_nsys(export.path, {}).values()
        assert trace.ranges.steps == steps
