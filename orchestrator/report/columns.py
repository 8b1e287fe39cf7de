"""What the columns of `cells` are, and their units: `run.columns` of what is loaded, and docs/columns.md.

    python -m orchestrator.report.columns > docs/columns.md

A name in braces stands for several: {phase} for any phase of a step, {statistic} for the statistics of a duration.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from string import Formatter

PARAMETER = "a parameter of the cell: see the axes in the README"

_STANDS_FOR = {
    "phase": "[a-z]+",
    "statistic": "n|mean|sd|min|median|ci_low|ci_high|coverage",
    "kind": "allocated|requested|reserved|rss",
    "role": "[a-z_]+",
    "what": "saved|forward|backward",
    "rank": "[0-9]+",
    "when": "before|after",
    "part": "[a-z0-9_]+",
}
_STATISTICS = "ci_low to ci_high: the interval of the median, by order statistics, with the confidence `coverage`; n: how many"


_HEAD = """# Columns

What the columns of `cells` and `cells.parquet` are. A run has what its instruments and tasks fill: see `run.columns`.
The others are the parameters of the cell, under their own names: the axes in the README. A name in braces stands for several:
`{phase}` for any phase of a step, `{statistic}` for the statistics of a duration. Null is what is not known.
"""


@dataclass(frozen=True)
class Column:
    """unit: empty where there is none, or where the meaning says it."""

    name: str
    unit: str
    meaning: str

    def describes(self, column: str) -> bool:
        return self._pattern.fullmatch(column) is not None

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        parts = [(text, f"(?:{_STANDS_FOR[field]})" if field else "") for text, field, *_ in Formatter().parse(self.name)]
        return re.compile("".join(re.escape(text) + several for text, several in parts))


COLUMNS: tuple[Column, ...] = (
    Column("cell", "", "the cell's id, a digest of its task and parameters; after `RUN:` where runs lie side by side"),
    Column("task", "", "what was measured"),
    Column("run", "", "which of several runs"),
    Column("status", "", "how the cell ended, such as ok or oom"),
    Column("stage", "", "of the attempt, in which it ended where it did not end well"),
    Column("phase", "", "of the step, in which it ended where it did not end well"),
    Column("attempt", "", "number of the attempt that the row is of: the latest success, else the latest that says something"),
    Column("attempts", "", "how many attempts there were"),
    Column("repetitions", "", "the successes among them that count: the row is of the last, and `sweep compare` knows them all"),
    Column("started_at", "UTC", "when the attempt began"),
    Column("wall_s", "s", "how long the attempt took, with all that surrounds its steps"),
    Column("neighbours", "", "how many other attempts of the run were on its host meanwhile, in the mean over its time"),
    Column("took_process_s", "s", "of `wall_s`: until the attempt's process was there, and after its last word"),
    Column("took_build_s", "s", "of `wall_s`: to reach the device and build what is measured"),
    Column("took_warm_up_s", "s", "of `wall_s`: compiling and warm-up, and the first steps of adaptive timing"),
    Column("took_timing_s", "s", "of `wall_s`: the steps that were timed"),
    Column("took_instruments_s", "s", "of `wall_s`: all other instruments"),
    Column("commit", "", "of this program; `+` where the checkout had changes"),
    Column("program_source", "", "a digest of the code that measured it, which may be the same in several commits"),
    Column("invocation", "UTC", "which command measured it: the `time` of its entry in run.json"),
    Column("host", "", "name of the host"),
    Column("gpu", "", "name of the GPU, by its driver"),
    Column("gpu_uuid", "", "id of the GPU; a digest of it in what is published"),
    Column("cpu", "", "name of the processor"),
    Column("torch", "", "version of torch"),
    Column("cuda", "", "version of CUDA that torch was built with"),
    Column("driver", "", "version of the GPU's driver"),
    Column("python", "", "version of Python"),
    Column("tokens", "tokens", "that a step processes"),
    Column("parameters", "", "how many the model has, counted after the build"),
    Column("parameter_dtype", "", "read back after the build"),
    Column("autocast_dtype", "", "read back after the build"),
    Column("float32_matmul_precision", "", "torch's setting, read back: highest is fp32 and nothing else"),
    Column("matmul_allow_tf32", "", "torch's flag, read back"),
    Column("compile_cache_seen", "", "cold or warm: what the compiler found in its cache"),
    Column("compile_graphs", "", "that torch.compile made"),
    Column("compile_graph_breaks", "", "how many"),
    Column("compile_break_reasons", "", "as torch says them"),
    Column("compile_recompiles", "", "how many, up to the last measured step"),
    Column("compile_recompile_reasons", "", "as torch says them"),
    Column("compile_cache_hits", "", "of the compiler's cache of graphs"),
    Column("compile_cache_misses", "", "of the compiler's cache of graphs"),
    Column("compile_skipped_cuda_graphs", "", "how often CUDA graphs were asked for and not used"),
    Column("compile_total_ms", "ms", "the step that compiles, with those that record CUDA graphs"),
    Column("compile_steps", "", "how many those are"),
    Column("compile_cost_ms", "ms", "what they took beyond as many steps in steady state"),
    Column("compile_{phase}_ms", "ms", "a phase of the step that compiles, or the whole step"),
    Column("attention_asked", "", "backend that was asked for"),
    Column("attention_seen", "", "backend whose kernels ran"),
    Column("attention_kernels", "", "names of those kernels"),
    Column("dtype_{part}", "", "dtype seen in the model, such as that of the logits"),
    Column("softmax_flops", "FLOP", "of the softmax in a forward pass, all layers"),
    Column("attention_matmul_flops", "FLOP", "of the two products of attention in a forward pass, all layers"),
    Column("timing_warmup_steps", "", "of adaptive timing: synced steps that were warm-up"),
    Column("timing_stopped_by", "", "of adaptive timing: half-width, out of reach, steps or seconds"),
    Column("timing_pipelined", "", "of adaptive timing: as synced, or measured"),
    Column("timing_half_width", "", "of adaptive timing: that of the interval that was reached, over the median"),
    Column("message", "", "of the error that ended the attempt"),
    Column("reason", "", "why it ended, in words"),
    Column("signal", "", "that ended the process"),
    Column("exit_code", "", "of the process"),
    Column("witness", "", "of an inferred out-of-memory: the cell that it is inferred from"),
    Column("snapshot", "", "file of the allocator's record, beside the log"),
    Column("asked_bytes", "bytes", "that memory ran out for"),
    Column("allocated_bytes", "bytes", "by tensors, when memory ran out"),
    Column("reserved_bytes", "bytes", "by the allocator, when memory ran out"),
    Column("free_bytes", "bytes", "on the device, when memory ran out"),
    Column("flops", "FLOP", "of a step, by the closed form"),
    Column("step_ms_{statistic}", "ms", f"the whole step: pipelined where there is that, else synced; {_STATISTICS}"),
    Column("step_synced_ms_{statistic}", "ms", "the whole step, waited for at the end of each phase"),
    Column("{phase}_pipelined_ms_{statistic}", "ms", "a phase of steps that run on, or the whole of them, by device events"),
    Column("{phase}_ms_{statistic}", "ms", "a phase, waited for at its end"),
    Column("drain_ms", "ms", "how far the device was behind the host after the last pipelined step"),
    Column("host_lead_ms", "ms", "how far the host was ahead of the device at the end of a phase, the largest median of all"),
    Column("waits_for_host", "", "whether that is less than a tenth of a step, and than 15 ms: the host is then the bottleneck"),
    Column("host_step_ms", "ms", "what the host takes for a step, as the shortest a layer of those that wait for it tells"),
    Column("host_slack", "", "the step over that: how much slower the host may be before the step waits for it"),
    Column("may_wait_for_host", "", "whether it does not wait, and would where the host were a third as fast: that is below 3"),
    Column("waited_for_core", "", "of the timing, how long a thread at most waited for a core that others had: a fraction"),
    Column("host_pace_{when}", "1/ms", "small operations that the host hands to torch, before the timing or after: its speed"),
    Column("disturbed", "", "whether that is more than 0.1, of a cell that needs its host: something else had the cores"),
    Column("beside", "", "whether `neighbours` is 0.5 or more for one of its repetitions, and the cell needs its host"),
    Column("tokens_per_s", "tokens/s", "over the median of the whole step"),
    Column("achieved_tflops", "TFLOP/s", "`flops` over the median of the whole step"),
    Column("peak_tflops", "TFLOP/s", "of the GPU in that precision, dense, by its maker"),
    Column("mfu", "", "achieved over peak: a fraction"),
    Column("ceiling_tflops", "TFLOP/s", "of a matrix product in that precision, measured by the same run on that GPU"),
    Column("of_ceiling", "", "achieved over that ceiling: a fraction"),
    Column("peak_{kind}_bytes", "bytes", "the highest of all phases in steady state; rss: of the process, on the CPU"),
    Column("first_peak_{kind}_bytes", "bytes", "of the first step, which has no optimizer state yet"),
    Column("built_held_{kind}_bytes", "bytes", "held after the build"),
    Column("first_{phase}_peak_{kind}_bytes", "bytes", "of a phase of the first step"),
    Column("first_{phase}_held_{kind}_bytes", "bytes", "at the end of a phase of the first step"),
    Column("snapshot_peak_{kind}_bytes", "bytes", "of the step on the allocator's record"),
    Column("{phase}_peak_{kind}_bytes", "bytes", "of a phase in steady state"),
    Column("{phase}_held_{kind}_bytes", "bytes", "at the end of a phase in steady state"),
    Column("saved_bytes", "bytes", "that the forward pass keeps for the backward pass, beyond what is there anyway"),
    Column("saved_square_bytes", "bytes", "of that, tensors of all pairs of positions"),
    Column("saved_squares", "", "how many those are"),
    Column("saved_block_bytes", "bytes", "of that, by one block"),
    Column("saved_{rank}_operation", "", "the operation of a block that saves most, by rank"),
    Column("saved_{rank}_bytes", "bytes", "what that one saves"),
    Column("residual_stream_bytes", "bytes", "that a block hands on to the next"),
    Column("square_bytes", "bytes", "of attention alone: a tensor of all pairs of positions"),
    Column("{what}_squares_bytes", "bytes", "of attention alone, beyond what was built: saved, or at most in a pass"),
    Column("predicted_how", "", "tracked, modelled, as eager, or closed form"),
    Column("predicted_reason", "", "why there is no prediction"),
    Column("predicted_verdict", "", "fits, borderline or oom, on the GPU of the run or under the cell's limit"),
    Column("predicted_of_{role}_bytes", "bytes", "of the predicted peak, by role"),
    Column("closed_form_bytes", "bytes", "the peak by the closed form"),
    Column("closed_form_of_{role}_bytes", "bytes", "a term of that"),
    Column("at_least_bytes", "bytes", "the closed form without activations, where they are unknown"),
    Column("formula_{what}_squares", "", "of attention alone: how many squares the formula has"),
    Column("formula_{what}_squares_bytes", "bytes", "what those take"),
    Column("predicted_{part}", "", "as the column of that name without `predicted_`, foreseen"),
    Column("sm_clock_{when}", "MHz", "of the GPU, before the timing or after"),
    Column("sm_clock_max_{when}", "MHz", "that the GPU allows"),
    Column("memory_clock_{when}", "MHz", "of the GPU's memory"),
    Column("power_{when}", "W", "that the GPU draws"),
    Column("power_limit_{when}", "W", "that the GPU may draw"),
    Column("temperature_{when}", "°C", "of the GPU"),
    Column("throttle_reasons_{when}", "", "NVML's bits for why the clocks are held down"),
    Column("energy_j", "J", "that the GPU took from before the compiling step to after the timing, warm-up included"),
    Column("power_capped_ns", "ns", "of the same time, that the power limit held the clocks down"),
    Column("thermal_capped_ns", "ns", "of the same time, that heat held the clocks down"),
    Column("{phase}_kernel_time_ms", "ms", "of all kernels of a phase, in a profiled step"),
    Column("{phase}_busy", "", "fraction of a phase in which a kernel ran, in a profiled step"),
    Column("busy", "", "fraction of the profiled step, from its first kernel to its last, in which a kernel ran"),
    Column("idle_ms", "ms", "of the profiled step in which none ran"),
    Column("idle_for_host_ms", "ms", "of that, before kernels that the host had not launched yet"),
    Column("attributed_to_{part}", "", "fraction of the kernels' time of which the phase, class or module is known"),
    Column("profiled_step_ms", "ms", "the step that was profiled"),
    Column("busy_timed", "", "kernel time of the profiled step over the median of a timed one, which the profiler does not slow"),
    Column("profile_cost", "", "how many times as long it took as a timed one"),
    Column("processing_ms", "ms", "to make the rows of a trace"),
    Column("processing_share", "", "of the whole attempt: a fraction"),
    Column("trace_bytes", "bytes", "of the trace beside the log"),
    Column("snapshot_events", "", "on the allocator's record"),
    Column("snapshot_wrapped", "", "whether the record was too short: 1"),
    Column("snapshot_file_bytes", "bytes", "of the record beside the log"),
    Column("snapshot_replayed_peak_bytes", "bytes", "that the record comes to when it is replayed"),
    Column("snapshot_unlabelled_bytes", "bytes", "of the peak, whose role is not known"),
    Column("snapshot_unlabelled_share", "", "of the peak: a fraction"),
    Column("snapshot_processing_ms", "ms", "to make the rows of a record"),
    Column("sum", "", "that the accumulation came to"),
    Column("error", "", "of that: less what is exact"),
    Column("loss", "", "in nats, of the small model under autocast"),
    Column("wide_{part}", "", "of a norm that computes in fp32: its largest error over the root mean square; rows not finite"),
    Column("narrow_{part}", "", "of a norm that computes in the narrow dtype: likewise"),
    Column("library_{part}", "", "of torch's own norm: likewise"),
)  # fmt: skip


def describe_columns(names: Iterable[str]) -> list[Column]:
    """One each, in their order; what is described nowhere is a parameter."""
    return [_described(name) for name in names]


def _described(name: str) -> Column:
    found = next((column for column in COLUMNS if column.describes(name)), None)
    return Column(name, found.unit, found.meaning) if found else Column(name, "", PARAMETER)


def page() -> str:
    rows = [f"| `{column.name}` | {column.unit} | {column.meaning} |" for column in COLUMNS]
    return "\n".join([_HEAD, "| column | unit | what it is |", "|---|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    print(page(), end="")
