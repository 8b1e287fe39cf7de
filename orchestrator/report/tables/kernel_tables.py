"""Tables of kernels, and of how much of time and memory is attributed to something."""

from __future__ import annotations

from orchestrator.report.tables import formatters as show
from orchestrator.report.tables.cell_filters import having
from orchestrator.report.tables.kernel_layouts import (
    Difference,
    TopKernels,
    by_class,
    by_module,
)
from orchestrator.report.tables.layouts import CellRows
from orchestrator.report.tables.table import Table

_TOP = 8
_DIFFERENT = 20

_WITH_KERNELS = having("attributed_to_phase")

KERNEL_TABLES: tuple[Table, ...] = (
    Table(
        "kernels",
        "Top kernels by phase",
        "The kernels that take longest, and the longest that is no matrix product (GEMM), of each"
        " phase, of forward and backward together and of the step. Share of the phase's kernel"
        " time; total and instances of one step; then of one instance. A median"
        " with ≈ is calculated from the medians of several modules. On the CPU, operators by their"
        " own time.",
        TopKernels(_TOP),
        _WITH_KERNELS,
        is_default=True,
    ),
    Table(
        "kernel-classes",
        "Kernel time by class of work",
        "Milliseconds of kernels in a step, and the share of each class; GEMM: matrix products. A"
        " share with ≥ is a lower bound: some kernels (other) have no known class. Then the"
        " milliseconds and the number of kernels of each class, which shows what compiling fused; the"
        " softmax and the two matrix products of attention (scores, and weights times"
        " values): milliseconds, and their ratio in time and in FLOPs of the forward pass. A part"
        " that is fused with another one has no time. `pass` forward is inference.",
        by_class,
        _WITH_KERNELS,
        is_default=True,
    ),
    Table(
        "kernel-modules",
        "Kernel time by module",
        "Milliseconds of kernels in a step, by phase, and the share of the step. Backward kernels"
        " belong to the module whose forward operator they differentiate.",
        by_module,
        _WITH_KERNELS,
    ),
    Table(
        "kernel-diff",
        "Kernels that differ between two cells",
        "The kernels whose milliseconds in a step differ most. Choose two cells with --cells;"
        " otherwise they are two that differ in a single axis.",
        Difference(_DIFFERENT),
        _WITH_KERNELS,
    ),
    Table(
        "coverage",
        "Coverage of the kernel trace and of the memory snapshot",
        "Kernels: shares of kernel time that have a phase, a module, a class. Busy: share of the"
        " time from the first kernel to the last, with the profiler, which slows the CPU; when"
        " timed: kernel time over the median of a step without it. Idle: milliseconds of a step"
        " between kernels, and those in which the CPU was late to launch. Cost: a profiled step"
        " over a timed one. Processing: reading the trace, as a share of the whole attempt."
        " Memory: peaks of the recorded step in GiB, as the allocator counts them; replayed: the"
        " peak of requested bytes that its record adds up to. Unlabelled: share of the peak with"
        " unknown use. Wrapped: the record was too short for the step.",
        CellRows(
            (
                ("phase known", show.number("attributed_to_phase", ".2%")),
                ("module known", show.number("attributed_to_module", ".2%")),
                ("class known", show.number("attributed_to_class", ".2%")),
                ("busy", show.number("busy", ".1%")),
                (
                    "replayed / requested",
                    show.ratio(
                        "snapshot_replayed_peak_bytes", "snapshot_peak_requested_bytes", ".4f"
                    ),
                ),
                ("unlabelled", show.number("snapshot_unlabelled_share", ".2%")),
                ("busy when timed", show.number("busy_timed", ".1%")),
                ("idle ms", show.ms("idle_ms")),
                ("idle for the CPU ms", show.ms("idle_for_host_ms")),
                ("drain ms", show.ms("drain_ms")),
                ("profiled step ms", show.ms("profiled_step_ms")),
                ("cost", show.number("profile_cost", ".2f")),
                ("processing", show.number("processing_share", ".1%")),
                ("allocated", show.gib("snapshot_peak_allocated_bytes")),
                ("requested", show.gib("snapshot_peak_requested_bytes")),
                ("replayed", show.gib("snapshot_replayed_peak_bytes")),
                ("reserved", show.gib("snapshot_peak_reserved_bytes")),
                ("events", show.number("snapshot_events", ".0f")),
                ("wrapped", show.yes_or_no("snapshot_wrapped")),
            )
        ),
        having("attributed_to_phase", "snapshot_peak_allocated_bytes"),
    ),
)
