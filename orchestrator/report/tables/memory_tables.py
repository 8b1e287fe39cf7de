"""The tables of memory by phase, predicted and measured, as data."""

from __future__ import annotations

from orchestrator.report.tables.cell_filters import both, having, of_task
from orchestrator.report.tables.formatters import (
    SAVED_RANKS,
    Value,
    gib,
    gib_predicted,
    memory_need,
    mib_measured,
    over,
    predicted,
    saved_mib_predicted,
    saving_operation,
    share_of_block,
)
from orchestrator.report.tables.layouts import CellRows, Matrix, PhaseRows
from orchestrator.report.tables.table import Table


def _peaks_by_phase(kind: str) -> tuple[tuple[str, Value], ...]:
    titles = {"forward": "forward", "backward": "backward", "optimizer": "optimizer step"}
    phases = tuple((title, gib(f"{phase}_peak_{kind}_bytes")) for phase, title in titles.items())
    return (("first step", gib(f"first_peak_{kind}_bytes")), *phases)


MEMORY_TABLES: tuple[Table, ...] = (
    Table(
        "memory",
        "Peak memory",
        "GiB as the allocator counts it. The first step has no optimizer state yet; steady state is what training needs.",
        CellRows(
            (
                *_peaks_by_phase("allocated"),
                ("peak allocated", gib("peak_allocated_bytes")),
                ("predicted", gib_predicted("predicted_peak_allocated_bytes")),
                ("peak reserved", gib("peak_reserved_bytes")),
            )
        ),
        lambda cells: cells if "peak_allocated_bytes" in cells else cells.iloc[:0],
    ),
    Table(
        "prediction",
        "Predicted memory against measured",
        "Peaks in GiB, as the allocator counts them: predicted without a GPU, then measured. `tracked`: every storage was "
        "followed; `modelled`: but for fused kernels; `as eager`: what is compiled may do with less.",
        PhaseRows(
            (
                ("first_forward", "first forward"),
                ("first_backward", "first backward"),
                ("first_optimizer", "first optimizer"),
                ("forward", "forward"),
                ("backward", "backward"),
                ("optimizer", "optimizer"),
            ),
            (
                (
                    "predicted GiB",
                    lambda phase: gib_predicted(f"predicted_{phase}_peak_allocated_bytes"),
                ),
                ("measured GiB", lambda phase: gib(f"{phase}_peak_allocated_bytes")),
                (
                    "ratio",
                    lambda phase: over(
                        f"predicted_{phase}_peak_allocated_bytes", f"{phase}_peak_allocated_bytes"
                    ),
                ),
                (
                    "predicted reserved",
                    lambda phase: gib_predicted(f"predicted_{phase}_peak_reserved_bytes"),
                ),
                ("measured reserved", lambda phase: gib(f"{phase}_peak_reserved_bytes")),
                (
                    "reserved ratio",
                    lambda phase: over(
                        f"predicted_{phase}_peak_reserved_bytes", f"{phase}_peak_reserved_bytes"
                    ),
                ),
                ("how", lambda phase: predicted("predicted_how", str)),
            ),
            ("predicted_{}_peak_allocated_bytes",),
        ),
        having("predicted_peak_allocated_bytes"),
    ),
    Table(
        "predicted-roles",
        "What the predicted peak is made of",
        "GiB at the moment of the steady peak; `slack` is by how much the allocator's blocks are larger than what was asked.",
        CellRows(
            tuple(
                (role.replace("_", " "), gib_predicted(f"predicted_of_{role}_bytes"))
                for role in (
                    "parameters",
                    "gradients",
                    "optimizer_state",
                    "attention_squares",
                    "activations",
                    "autocast_weight_copies",
                    "temporary",
                    "workspace",
                    "slack",
                )
            )
        ),
        having("predicted_of_parameters_bytes"),
    ),
    Table(
        "closed-form",
        "Memory by formula",
        "GiB at the steady peak by the closed form, by term, beside what was predicted and measured. With N parameters and A "
        "bytes of activations: the largest of 12 N + A + 2·4·BSV, 16 N + A/L and 16 N + T, in fp32 with naive attention. For a "
        "model that does not run without data, what its parameters take at the least.",
        CellRows(
            (
                *(
                    (role.replace("_", " "), gib_predicted(f"closed_form_of_{role}_bytes"))
                    for role in (
                        "parameters",
                        "gradients",
                        "optimizer_state",
                        "attention_squares",
                        "activations",
                        "temporary",
                    )
                ),
                ("at least", gib_predicted("at_least_bytes")),
                ("closed form", gib_predicted("closed_form_bytes")),
                ("predicted", gib_predicted("predicted_peak_allocated_bytes")),
                ("measured", gib("peak_allocated_bytes")),
                ("closed form / measured", over("closed_form_bytes", "peak_allocated_bytes")),
            )
        ),
        having("closed_form_bytes", "at_least_bytes"),
    ),
    Table(
        "saved-tensors",
        "What a block saves for the backward pass",
        "MiB of one block, each storage once; the five operations that save most, by the part of the block and the node of the "
        "graph; beside them what the block hands to the next. Compiled code is predicted as eager, and not looked into.",
        PhaseRows(
            (
                ("saved_block", "one block"),
                *((f"saved_{rank}", f"{rank}.") for rank in SAVED_RANKS),
                ("residual_stream", "residual stream"),
            ),
            (
                ("saved by", saving_operation),
                ("predicted MiB", saved_mib_predicted),
                ("measured MiB", lambda stem: mib_measured(f"{stem}_bytes")),
                ("of the block", share_of_block),
            ),
            ("{}_bytes", "predicted_{}_bytes"),
            "what",
        ),
        both(of_task("train_step"), having("saved_block_bytes", "predicted_saved_block_bytes")),
    ),
    Table(
        "memory-cpu",
        "Peak memory on the CPU",
        "GiB of the process's resident set, interpreter and libraries included: an upper bound of what the tensors take.",
        CellRows(
            (
                *_peaks_by_phase("rss"),
                ("peak resident", gib("peak_rss_bytes")),
            )
        ),
        having("peak_rss_bytes"),
    ),
    Table(
        "oom-map",
        "Where it runs out of memory",
        "Peak memory reserved and the smallest GPU that has it, its CUDA context included, and that precision; or OOM, with the "
        "allocation refused. What was predicted to be reserved, and whether it would fit, stands beside it.",
        Matrix(memory_need),
        of_task("train_step"),
    ),
)
