"""The tables of kernels, as data."""

from __future__ import annotations

import pandas as pd

from orchestrator.report.tables.cell_filters import both, having
from orchestrator.report.tables.formatters import median_interval, ms, number, of_steps, ratio
from orchestrator.report.tables.kernel_layouts import (
    ATTENTION_MATMULS,
    GEMM,
    OUTSIDE_OPERATORS,
    PHASES,
    ByClass,
    ByModule,
    Difference,
    Fused,
    TopKernels,
    WithKernels,
    ms_of_parts,
)
from orchestrator.report.tables.layouts import CellRows
from orchestrator.report.tables.table import Table

_TOP = 8
_DIFFERENT = 20

_WITH_KERNELS = having("attributed_to_phase")


def gemm_shares(kernels: pd.DataFrame) -> pd.DataFrame:
    """By cell: which share of kernel time matrix products take, of each phase and of all
    (`gemm_share`).
    """
    inside = kernels[kernels["name"] != OUTSIDE_OPERATORS]
    gemm = inside["ms"].where(inside["kernel_class"] == GEMM, 0.0)
    columns = {
        "gemm_share": gemm.groupby(inside["cell"]).sum() / inside.groupby("cell")["ms"].sum()
    }
    for phase in filter(None, PHASES):
        of_phase = inside["phase"] == phase
        total_ms = inside[of_phase].groupby("cell")["ms"].sum()
        columns[f"{phase}_gemm_share"] = gemm[of_phase].groupby(inside["cell"]).sum() / total_ms
    return pd.DataFrame(columns).rename_axis("cell").reset_index()


def softmax_and_matmul(kernels: pd.DataFrame) -> pd.DataFrame:
    """By cell: ms of the softmax and of the two matrix products of attention, of the forward and of
    the backward pass.
    """
    products = kernels[kernels["kernel_class"] == GEMM]
    columns = {}
    for phase in ("forward", "backward"):
        for name, among, parts in (
            ("softmax", kernels, ("softmax",)),
            ("matmul", products, ATTENTION_MATMULS),
        ):
            columns[f"{phase}_{name}_ms"] = ms_of_parts(
                among[among["phase"] == phase], parts, "cell"
            )
    return pd.DataFrame(columns).rename_axis("cell").reset_index()


def _not_gemm(kernels: pd.DataFrame) -> pd.DataFrame:
    return kernels[kernels["kernel_class"] != GEMM]


def _of_several_ways(cells: pd.DataFrame) -> pd.DataFrame:
    """Those that could be compiled, if some are and some are not."""
    known = having("compile")(cells)
    return known if len(known) and known["compile"].nunique() > 1 else known.iloc[:0]


KERNEL_TABLES: tuple[Table, ...] = (
    Table(
        "kernel-time",
        "What of a step is the GPU's alone",
        "Milliseconds of a step, and of all its kernels together and by phase: they do not depend on the CPU, so that another "
        "machine with the same GPU has the same, or nearly. Without an interval where one step was profiled. Busy: what of the "
        "step its kernels take; the rest of it the GPU waits.",
        CellRows(
            (
                ("step", of_steps(median_interval("step_ms"))),
                ("its kernels", median_interval("step_kernel_time_ms")),
                ("of forward", ms("forward_kernel_time_ms_median")),
                ("of backward", ms("backward_kernel_time_ms_median")),
                ("of optimizer", ms("optimizer_kernel_time_ms_median")),
                ("busy", number("busy_timed", ".1%")),
            )
        ),
        having("step_kernel_time_ms_median"),
    ),
    Table(
        "kernels",
        "Top kernels by phase",
        "Share of the phase's kernel time, and of one step the total and the instances; then of one instance. A median with ≈ "
        "is from several modules' medians. On the CPU, operators by their own time.",
        TopKernels(_TOP),
        _WITH_KERNELS,
    ),
    Table(
        "kernel-coverage",
        "How much of the kernel time is attributed, and how busy the device was",
        "Shares of kernel time that have a phase, a module, a class. Busy: of the time from the first kernel to the last, with "
        "the profiler, which slows the CPU; when timed: kernel time over the median of a step without it. Idle "
        "milliseconds a step between kernels, and those in which the CPU was late to launch. Cost: a profiled step over a "
        "timed one. Processing: reading the trace, as a share of the whole attempt.",
        CellRows(
            (
                ("phase", number("attributed_to_phase", ".2%")),
                ("module", number("attributed_to_module", ".2%")),
                ("class", number("attributed_to_class", ".2%")),
                ("busy", number("busy", ".1%")),
                ("busy when timed", number("busy_timed", ".1%")),
                ("idle ms", ms("idle_ms")),
                ("idle for the CPU ms", ms("idle_for_host_ms")),
                ("drain ms", ms("drain_ms")),
                ("profiled step ms", ms("profiled_step_ms")),
                ("cost", number("profile_cost", ".2f")),
                ("processing", number("processing_share", ".1%")),
            )
        ),
        _WITH_KERNELS,
    ),
    Table(
        "gemm-share",
        "Matrix products, in inference and in training",
        "Which share of kernel time they take, of each phase and of the whole step. `pass` forward is inference.",
        WithKernels(
            gemm_shares,
            CellRows(
                (
                    ("of forward", number("forward_gemm_share", ".1%")),
                    ("of backward", number("backward_gemm_share", ".1%")),
                    ("of optimizer", number("optimizer_gemm_share", ".1%")),
                    ("of all", number("gemm_share", ".1%")),
                ),
                always=("precision", "pass"),
            ),
        ),
        _WITH_KERNELS,
    ),
    Table(
        "non-gemm",
        "The top kernel that is no matrix product",
        "Of each phase; columns as in `kernels`.",
        TopKernels(1, _not_gemm),
        _WITH_KERNELS,
    ),
    Table(
        "softmax-matmul",
        "Softmax against matrix products inside attention",
        "Milliseconds a step of the softmax, and of scores and weights times values; their ratio in time, and in FLOPs of the "
        "forward pass by the closed form, five an element for the softmax. What is fused with more is not told apart.",
        WithKernels(
            softmax_and_matmul,
            CellRows(
                (
                    ("softmax ms", ms("forward_softmax_ms")),
                    ("matmul ms", ms("forward_matmul_ms")),
                    ("softmax / matmul", ratio("forward_softmax_ms", "forward_matmul_ms")),
                    ("in FLOPs", ratio("softmax_flops", "attention_matmul_flops", ".3f")),
                    ("backward softmax ms", ms("backward_softmax_ms")),
                    ("backward matmul ms", ms("backward_matmul_ms")),
                    (
                        "backward softmax / matmul",
                        ratio("backward_softmax_ms", "backward_matmul_ms"),
                    ),
                )
            ),
        ),
        both(_WITH_KERNELS, having("softmax_flops")),
    ),
    Table(
        "kernel-classes",
        "What kind of work each phase is",
        "Milliseconds of kernels a step, and the share of each class.",
        ByClass(),
        _WITH_KERNELS,
    ),
    Table(
        "kernel-modules",
        "Where the time goes, by module",
        "Milliseconds of kernels a step, by phase, and the share of the step. Backward kernels belong to the module whose "
        "operator they are the derivative of.",
        ByModule(),
        _WITH_KERNELS,
    ),
    Table(
        "fused",
        "What compiling fused away",
        "Kernels of a step and their milliseconds, by class.",
        Fused(),
        both(_WITH_KERNELS, _of_several_ways),
    ),
    Table(
        "kernel-diff",
        "Kernels that differ between two cells",
        "Those whose milliseconds a step differ most. Choose the cells with --cells; else they are two that one axis tells "
        "apart.",
        Difference(_DIFFERENT),
        _WITH_KERNELS,
    ),
)
