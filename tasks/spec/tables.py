"""Row types of the stored tables: each field of a dataclass declares its column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from tasks.spec.fields import Dtype, Field, fields_of
from tasks.spec.status import Status

PHASES: Mapping[str, str] = {
    "forward": "the forward pass, with the loss if there is one",
    "backward": "the backward pass",
    "communication": "of several ranks, between backward pass and update: the rest of the exchange",
    "optimizer": "the optimizer's update",
    "collective": "a collective of all ranks, or several of them; see `call`",
    "gather": "parallel: zero1, after the update: the exchange of parameters",
}
STATUSES: Mapping[str, str] = {
    Status.OK: "measured",
    Status.OOM: "out of the device's memory, or over the cap on it",
    Status.OOM_INFERRED: "not measured: a cell that needs at most as much memory ran out of it",
    Status.HOST_OOM: "out of the host's memory, or over the limit on it",
    Status.TIMEOUT: "did not end in time",
    Status.CRASHED: "ended by a signal, or without a final line in its journal",
    Status.FAILED: "an exception",
    Status.SKIPPED: "cannot be measured on this hardware: `reason` in the evidence",
    Status.LOST: "its GPU, its node or its supervisor disappeared; not the cell's fault",
}
STAGES: Mapping[str, str] = {
    "start": "until the process can begin its task",
    "rendezvous": "ranks find each other, and a first collective runs",
    "build": "opens the device and builds model and inputs; a static result is found here",
    "out-of-memory watched": "starts to record allocations, in case memory runs out",
    "kernels prepared": "sets up the compiler's record of kernels, before anything is compiled",
    "memory of the build": "memory held after the build",
    "telemetry before": "the GPU's counters before the first step",
    "compile": "the steps that compile",
    "warm-up": "steps before the measured ones, with their memory",
    "memory of warm-up": "hands over the memory of the warm-up",
    "pace before": "the CPU's dispatch rate before the timing",
    "cores before": "the waiting time of threads before the timing",
    "energy before": "the GPU's count of energy before the timing",
    "timing synced": "the steps that wait at the end of each phase",
    "timing pipelined": "the steps that do not wait",
    "compilation counted": "what torch has compiled until now",
    "ranks compared": "the results of several ranks are checked",
    "energy after": "the mean power of the GPU during the timing",
    "cores after": "the waiting time of threads after the timing",
    "pace after": "the CPU's dispatch rate after the timing",
    "telemetry after": "the GPU's counters after the timing",
    "memory": "a step with its memory, if there was no warm-up",
    "memory snapshot": "a step whose allocations are recorded",
    "kernels": "a step under the profiler",
    "nvtx": "steps with ranges for Nsight Systems",
    "nsys": "the same under Nsight Systems",
    "kernel time": "a few steps under the profiler, one phase at a time",
    "overlap": "steps of all ranks under the profiler, and steps without communication",
    "attention backend": "a step under the profiler, for the names of attention kernels",
}
INSTRUMENTS: Mapping[str, str] = {
    "timing": "durations of steps",
    "memory": "peaks and held memory by phase, and what is saved for the backward pass",
    "telemetry": "the GPU's counters, and the load of the host",
    "kernels": "totals over the kernels of a profiled step; each kernel is in `kernels`",
    "memory_snapshot": "totals over a recorded step; see `allocations` and `live`",
    "kernel_time": "duration of the kernels of a few steps, one phase at a time",
    "overlap": "how much of the communication of several ranks nothing hides",
    "backend": "the attention kernels that ran; they are in the facts",
    "nvtx": "steps with ranges for Nsight Systems",
    "nsys": "the same under Nsight Systems; its kernels are in `kernels`",
    "finding": "a task that computes its result once, without steps",
}
MODES: Mapping[str, str] = {
    "synced": "timing: measured steps that wait at the end of each phase, by the CPU's clock",
    "pipelined": "timing: measured steps without waiting until the last, by GPU events",
    "compile": "timing: the step that compiles and those that record CUDA graphs; synced",
    "warmup": "timing: steps before the measured ones; synced",
    "check": "adaptive timing: one or two pipelined warm-up steps, compared with synced ones",
    "built": "after the build, before any step",
    "first": "the first step, which has no optimizer state yet",
    "second": "of several ranks: the second step, in which DDP makes its buckets again",
    "steady": "the last warm-up step, or a separate one if there is no warm-up",
    "before": "telemetry: before the steps that compile; `host_pace`: before the timing",
    "after": "telemetry: after the timing",
    "timing": "telemetry: while steps were timed",
    "": "an instrument without modes",
}
ROLES: Mapping[str, str] = {
    "parameters": "the weights",
    "buffers": "the model's buffers, which no gradient changes",
    "inputs": "tokens and targets; in `attention` query, key, value and the result's gradient",
    "gradients": "of the parameters, and of inputs that have one",
    "optimizer state": "AdamW's moments",
    "autocast weight copies": "weights in the narrower dtype, until the forward pass ends",
    "communication buffers": "gradients on their way to other ranks, and gathered parameters",
    "activations": "made by the forward pass and alive at its end",
    "temporary": "made within a phase, and none of the others",
    "workspace": "of cuBLAS, for each thread that multiplies",
    "slack": "difference between the allocator's blocks and the requested sizes",
    "unlabelled": "allocated before the recorded step, by an unknown owner",
}
MODULES: Mapping[str, str] = {
    "embedding": "token embedding",
    "norm": "RMSNorm, of each block and the last one",
    "q projection": "and `k projection`, `v projection`, `o projection`: around attention",
    "rope": "rotary position embedding",
    "attention": "work of attention outside of the modules below",
    "scores": "query times key, scaled and masked",
    "softmax": "softmax of attention",
    "attention output": "attention weights times value",
    "fused attention": "one of torch's fused attention kernels",
    "ffn": "the feed-forward module",
    "residual": "work of a block outside of its modules: the additions",
    "head": "the linear map to the logits",
    "loss": "cross-entropy",
    "optimizer": "everything in the optimizer phase",
    "gradient sums": "autograd's sums of gradients of a tensor with several users",
    "model": "work of the model outside of its modules",
    "{words}": "a module of your own model by its path, with `*` for numbers; "
    "modules of a fused kernel are joined by `+`",
}
KERNEL_CLASSES: Mapping[str, str] = {
    "GEMM": "matrix product",
    "attention": "fused attention",
    "softmax": "softmax, also one made by the compiler",
    "norm": "normalisation",
    "elementwise": "element by element",
    "reduction": "sums, maxima and the like, and the loss",
    "copy": "copies and changes of dtype",
    "indexing": "index, gather, scatter and embeddings, and their gradients",
    "embedding": "the name of `indexing` in rows of older versions",
    "optimizer": "torch's kernels for many tensors at a time",
    "communication": "between GPUs",
    "other": "none of these",
}
KERNEL_EVIDENCE: Mapping[str, str] = {
    "scope": "a range around the launch, on its thread",
    "sequence": "the forward operator that the backward operator belongs to",
    "engine": "autograd itself, which sums the gradients of a tensor",
    "provenance": "the compiler's record of what went into the kernel",
    "phase": "the optimizer phase, which belongs to the optimizer only",
    "launch": "the launch only: it belongs to no module",
    "none": "nothing: the trace has no launch of it",
}
ROLE_EVIDENCE: Mapping[str, str] = {
    "book": "an owner held it at a moment when its role was known",
    "rule": "size, position and lifetime, for weights that autocast copies",
    "part": "the module and phase that made it",
    "phase": "the phase that made it",
    "none": "nothing",
}
# The phases of a training step, in their order.
STEP_PHASES = ("forward", "backward", "optimizer")
# The moment of rows that are about no moment but about all of the step.
WHOLE_STEP = "whole step"
MOMENTS: Mapping[str, str] = {
    "peak": "the peak of the recorded steady step",
    WHOLE_STEP: "at any time in the recorded step: the largest allocation of each role and part",
    "out of memory": "the moment at which memory ran out and ended the attempt",
    "end of the record": "an imported snapshot without a record, when it was taken",
}
SAMPLE_PHASES: Mapping[str, str] = {
    **PHASES,
    "step": "the whole step; with `cold_l2`, and in kernel_time, the sum of its phases",
    "outside": "kernels: outside of all phases",
}
PREDICTION_MODES: Mapping[str, str] = {
    "built": MODES["built"],
    "first": MODES["first"],
    "second": "the second step, of several ranks; with DDP, the most that it may need",
    "steady": "a later step, like all after it",
    "": "the verdict",
}
_REPLACES = "older runs: attempt up to which successes are replaced if this one succeeds; else 0"
_CONTENTS = "by table, number of the rows of this attempt; with a digest or null in older runs"
# The class of kernels whose work is unknown, such as CUDA graphs that were traced as a whole.
UNKNOWN_CLASS = "other"
# The name of a row of time of a CPU trace that no operator accounts for: allocation, page faults,
# Python, other threads. It is no kernel, so that no share counts it.
OUTSIDE_OPERATORS = "outside operators"
_KERNEL_CLASS = "kind of work; `run.kernels` applies the current rules to the stored names"


@dataclass(frozen=True)
class AttemptRow:
    """An attempt at a cell, also one that failed: how it ended, and where and with what it ran."""

    task: Annotated[str, Field("name of the task", required=True)]
    task_version: Annotated[int, Field("version of the task", Dtype.INT32)]
    params: Annotated[str, Field("the cell's parameters (see Parameters)", Dtype.JSON, "", True)]
    status: Annotated[str, Field("how it ended", required=True, values=STATUSES)]
    stage: Annotated[str, Field("stage in which it failed; empty if unknown", values=STAGES)]
    phase: Annotated[str, Field("phase in which it failed; empty outside of steps", values=PHASES)]
    evidence: Annotated[str, Field("what is known about a failure", Dtype.JSON, "", True)]
    facts: Annotated[str, Field("where and with what it ran, read back", Dtype.JSON, "", True)]
    started_at: Annotated[float, Field("when it began", Dtype.TIMESTAMP, "UTC")]
    wall_s: Annotated[float, Field("duration, with everything around its steps", unit="s")]
    timeout_s: Annotated[float, Field("limit on its duration", unit="s")]
    replaces: Annotated[int, Field(_REPLACES, Dtype.INT32)]
    commit: Annotated[str, Field("git commit of this program; `+` if files were changed")]
    contents: Annotated[str | None, Field(_CONTENTS, Dtype.JSON)] = None


@dataclass(frozen=True)
class Sample:
    """One measured number. A null value has the reason in `note`."""

    instrument: Annotated[str, Field("what measured it", values=INSTRUMENTS)]
    metric: Annotated[str, Field("name of the number")]
    unit: Annotated[str, Field("unit of the value; empty for a flag or a fraction of time")]
    value: Annotated[float | None, Field("the number; null if not available", unit="`unit`")]
    mode: Annotated[str, Field("which steps, or which moment", values=MODES)] = ""
    phase: Annotated[str, Field("phase; empty outside of phases", values=SAMPLE_PHASES)] = ""
    step: Annotated[int | None, Field("number of the step in its mode, from 0", Dtype.INT32)] = None
    note: Annotated[str, Field("why `value` is null, or a label; usually empty")] = ""


@dataclass(frozen=True)
class KernelRow:
    """A kernel by its name, in one phase and module, over `steps` profiled steps.

    On the CPU an operator, with its own time only.
    """

    phase: Annotated[str, Field("phase of its launch; empty outside of phases", values=PHASES)]
    module: Annotated[str, Field("module that it works for; empty if unknown", values=MODULES)]
    kernel_class: Annotated[str, Field(_KERNEL_CLASS, values=KERNEL_CLASSES)]
    attributed_by: Annotated[str, Field("evidence for the module", values=KERNEL_EVIDENCE)]
    operator: Annotated[str, Field("torch operator that launched it; empty if unknown")]
    name: Annotated[str, Field("kernel; on the CPU the operator, or `outside operators`")]
    steps: Annotated[int | None, Field("number of profiled steps, if known", Dtype.INT32)]
    count: Annotated[int, Field("number of launches in those steps")]
    total_ns: Annotated[int, Field("total time of all launches", unit="ns")]
    mean_ns: Annotated[float, Field("mean time of a launch", unit="ns")]
    median_ns: Annotated[float, Field("median time of a launch", unit="ns")]
    min_ns: Annotated[int, Field("shortest launch", unit="ns")]
    max_ns: Annotated[int, Field("longest launch", unit="ns")]
    sd_ns: Annotated[float | None, Field("standard deviation; null for one launch", unit="ns")]


@dataclass(frozen=True)
class AllocationRow:
    """Allocations alive at one moment that agree in role, part, size and place in the code.

    The role `slack` is the difference between the allocator's blocks and the requested sizes; its
    count is 0. Rows of the moment `whole step` are single allocations, whose count and total size
    are 0, so that they add nothing to a sum.
    """

    moment: Annotated[str, Field("moment at which they are alive", values=MOMENTS)]
    phase: Annotated[str, Field("phase of that moment", values=PHASES)]
    role: Annotated[str, Field("what the memory is used for", values=ROLES)]
    part: Annotated[str, Field("module of the model, as in `kernels`; may be empty")]
    attributed_by: Annotated[str, Field("evidence for the role", values=ROLE_EVIDENCE)]
    allocated_in: Annotated[str, Field("phase that made them; empty if older or outside")]
    call_chain: Annotated[
        str, Field("`file:line function`, then its callers after ` < `; `backward of` those")
    ]
    size_bytes: Annotated[int, Field("requested size of each", unit="bytes")]
    count: Annotated[int, Field("number of allocations; 0 for `slack` and `whole step`")]
    total_bytes: Annotated[int, Field("total size", unit="bytes")]


@dataclass(frozen=True)
class LiveRow:
    """Bytes of one role that are alive at one moment of the recorded step."""

    event: Annotated[int, Field("number of the allocator's event after which this holds")]
    at_ms: Annotated[float, Field("time since the step's first event, on the CPU", unit="ms")]
    phase: Annotated[str, Field("phase of that moment; empty between phases", values=PHASES)]
    role: Annotated[str, Field("role as in `allocations`, without `slack`")]
    live_bytes: Annotated[int, Field("requested bytes that are alive", unit="bytes")]


@dataclass(frozen=True)
class RankRow:
    """One rank of a cell with several. A null value was not measured."""

    rank: Annotated[int, Field("number of the rank, from 0", Dtype.INT32)]
    gpu_uuid: Annotated[str | None, Field("id of its GPU; a digest of it in published results")]
    pinned_cores: Annotated[str | None, Field("cores that it is restricted to; null: all")]
    status: Annotated[str, Field("how it ended; empty: with the group", values=STATUSES)]
    step_ms: Annotated[float | None, Field("median of its timed steps", unit="ms")]
    slowest: Annotated[int, Field("timed steps in which it was the slowest", Dtype.INT32)]
    peak_allocated_bytes: Annotated[int | None, Field("its peak of allocated memory", unit="bytes")]
    peak_reserved_bytes: Annotated[int | None, Field("its peak of reserved memory", unit="bytes")]
    sm_clock: Annotated[float | None, Field("clock of its GPU after the timing", unit="MHz")]
    power: Annotated[float | None, Field("mean power of its GPU while it was timed", unit="W")]
    wait_ms: Annotated[
        float | None, Field("of a profiled step, waiting for later ranks", unit="ms")
    ]


@dataclass(frozen=True)
class PredictionRow:
    """One number of a cell's predicted memory. It belongs to no attempt."""

    mode: Annotated[str, Field("step, as in `samples`", values=PREDICTION_MODES)]
    phase: Annotated[str, Field("phase of the step; empty outside of phases", values=PHASES)]
    metric: Annotated[str, Field("name of the number")]
    unit: Annotated[str, Field("unit of the value")]
    step: Annotated[int | None, Field("rank of a `saved_operation_bytes`, from 1", Dtype.INT32)]
    value: Annotated[float | None, Field("the number; null for a verdict", unit="`unit`")]
    note: Annotated[str, Field("how it was predicted, a role, the verdict, or why it is null")]


CELL = Field(
    "id of the cell: a digest of its task and parameters", Dtype.TEXT, required=True, name="cell"
)
ATTEMPT = Field(
    "number of the attempt at the cell, from 1", Dtype.INT32, required=True, name="attempt"
)
PREDICTED_AT = Field("when it was predicted", Dtype.TIMESTAMP, "UTC", True, name="predicted_at")


@dataclass(frozen=True)
class StoredTable:
    """One of the tables of a run. fields: all its columns, the key first."""

    name: str
    doc: str
    fields: tuple[Field, ...]


_SAMPLE = {field.name: field for field in fields_of(Sample)}
# The order of stored columns never changes, and the fields of Sample are in another one.
_SAMPLE_ORDER = ("instrument", "mode", "phase", "metric", "unit", "step", "value", "note")
STORED_TABLES: tuple[StoredTable, ...] = (
    StoredTable(
        "attempts",
        "One row per attempt at a cell, also of failed ones: how it ended, and what is known "
        "about where and why.",
        (CELL, ATTEMPT, *fields_of(AttemptRow)),
    ),
    StoredTable(
        "samples",
        "One row per measured number, of every attempt, also of one that failed later. The time of "
        "a cell is `duration` of `timing` with the phase `step`, in mode `pipelined` or, without "
        "that, `synced`.",
        (CELL, ATTEMPT, *(_SAMPLE[name] for name in _SAMPLE_ORDER)),
    ),
    StoredTable(
        "kernels",
        "One row per kernel name, phase and module, over `steps` profiled steps: the time per step "
        "is `total_ns / steps`. On the CPU an operator's own time, without the operators within "
        "it. For cells with the instrument `kernels` or `nsys`.",
        (CELL, ATTEMPT, *fields_of(KernelRow)),
    ),
    StoredTable(
        "allocations",
        "One row for all allocations on the GPU that are alive at one moment and agree in role, "
        "part, size and place in the code. `total_bytes` adds up to the allocated memory. For "
        "cells with the instrument `memory_snapshot`.",
        (CELL, ATTEMPT, *fields_of(AllocationRow)),
    ),
    StoredTable(
        "live",
        "Bytes of each role that are alive at about 250 moments of the recorded step. At each "
        "moment the roles add up; between two moments the highest one is stored. For cells with "
        "the instrument `memory_snapshot`.",
        (CELL, ATTEMPT, *fields_of(LiveRow)),
    ),
    StoredTable(
        "ranks",
        "One row per rank of a cell with several. `samples` has the values of the group: of a "
        "duration and of memory the largest of all ranks.",
        (CELL, ATTEMPT, *fields_of(RankRow)),
    ),
    StoredTable(
        "predictions",
        "One row per predicted number of a cell's memory, before anything was measured; it belongs "
        "to no attempt. If a cell was predicted several times, the latest `predicted_at` counts.",
        (CELL, PREDICTED_AT, *fields_of(PredictionRow)),
    ),
)
