"""What the columns of `cells` are, and their units: `run.columns` of what is loaded, and docs/columns.md, with the raw tables.

    python -m orchestrator.report.columns > docs/columns.md

A name in braces stands for several: {phase} for any phase of a step, {statistic} for the statistics of a duration.
"""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.report.column_guide import guide
from orchestrator.report.described import Column, lines_of
from orchestrator.report.raw_columns import RAW_TABLES

PARAMETER = "a parameter of the cell"  # of a task that is not among ours

_STATISTICS = "ci_low to ci_high: the interval of the median, by order statistics, with the confidence `coverage`; n: how many"


_OF_CELLS = """One row a cell. A run has the columns that its instruments and tasks fill: see `run.columns`. A name
in braces stands for several: `{phase}` for any phase of a step, `{statistic}` for the statistics of a duration."""
_THROTTLING = (
    "why the clocks are not higher, a sum of NVML's bits: 1 idle, 2 set by somebody, 4 the power limit, 8 slowed by hardware, "
    "32 heat, 64 heat by hardware, 128 the power supply; 0: nothing"
)
_OF_PARAMETERS = """What tells one cell from another; the README says which task has which, and their defaults. Null is a
parameter that the cell's task has not, one that is of the other `timing`, or one in whose place another names the model."""

COLUMNS: tuple[Column, ...] = (
    Column("cell", "", "the cell's id, a digest of its task and parameters; after `RUN:` where runs lie side by side"),
    Column("task", "", "what was measured"),
    Column("run", "", "which of several runs"),
    Column("status", "", "how the cell ended, such as ok or oom"),
    Column("stage", "", "of the attempt, in which it ended where it did not end well; empty where it did"),
    Column("phase", "", "of the step, in which it ended where it did not end well; empty outside of steps"),
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
    Column("compile_cache_seen", "", "cold, warm or mixed: whether the compiler found nothing in its cache, all, or some"),
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
    Column("drain_ms", "ms", "how far the device was behind the CPU after the last pipelined step"),
    Column("host_lead_ms", "ms", "how far the CPU was ahead of the device at the end of a phase, the largest median of all"),
    Column("{phase}_lead_ms", "ms", "how far the CPU was ahead of the device at the end of a phase, or of the step: the median"),
    Column(
        "waiting_share",
        "",
        "of a step's phases, how much are such as end with a lead of less than a tenth of them, and than 15 ms: a fraction",
    ),
    Column("waits_for_host", "", "whether that is more than a tenth: the step is CPU-bound (†)"),
    Column("waited_for_core", "", "of the timing, how long a thread at most waited for a core that others had: a fraction"),
    Column("host_pace_{when}", "1/ms", "small operations that the host hands to torch, before the timing or after: its speed"),
    Column("disturbed", "", "whether that is more than 0.1, of a cell that depends on the CPU: something else had the cores"),
    Column("wide", "", "whether the interval of the median of `step_ms` is wider than a twentieth of it"),
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
    Column("predicted_verdict", "", "fits, borderline, perhaps, unlikely or oom: on the run's GPU, or under the cell's limit"),
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
    Column("throttle_reasons_{when}", "", _THROTTLING),
    Column("energy_j", "J", "that the GPU took from before the compiling step to after the timing, warm-up included"),
    Column("power_capped_ns", "ns", "of the same time, that the power limit held the clocks down"),
    Column("thermal_capped_ns", "ns", "of the same time, that heat held the clocks down"),
    Column("{phase}_kernel_time_ms", "ms", "of all kernels of a phase, in a profiled step"),
    Column(
        "{phase}_kernel_time_ms_{statistic}",
        "ms",
        "of all kernels of a phase, or of a whole step, watched alone: the GPU's own work, whatever the host does; median, "
        "ci_low, ci_high, coverage. Where a step was profiled instead there is the median alone",
    ),
    Column("{phase}_busy", "", "fraction of a phase in which a kernel ran, in a profiled step"),
    Column("busy", "", "fraction of the profiled step, from its first kernel to its last, in which a kernel ran"),
    Column("idle_ms", "ms", "of the profiled step in which none ran"),
    Column("idle_for_host_ms", "ms", "of that, before kernels that the CPU had not launched yet"),
    Column("attributed_to_{part}", "", "fraction of the kernels' time of which the phase, class or module is known"),
    Column("profiled_step_ms", "ms", "the step that was profiled"),
    Column("busy_timed", "", "kernel time of a step over the median of a timed one, which no profiler slows"),
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
    Column("wide_{part}", "", "of a norm that computes in fp32: largest error over the root mean square; fraction not finite"),
    Column("narrow_{part}", "", "of a norm that computes in the narrow dtype: likewise"),
    Column("library_{part}", "", "of torch's own norm: likewise"),
)  # fmt: skip


PARAMETERS: tuple[Column, ...] = (
    Column("device", "", "where the cell is measured: cuda, cpu or mps"),
    Column("gpu_kind", "", "the kind of GPU that it is measured on, such as H100, where there are several; null: any"),
    Column("gpus", "", "how many GPUs the cell has to itself, of a task that uses several"),
    Column("seed", "", "of the weights and of the inputs"),
    Column("memory_limit_gib", "GiB", "cap of the allocator; on the CPU, of what is allocated after start-up; null: none"),
    Column("precision", "", "fp32, tf32, bf16 and fp16 (by autocast, fp16 with a gradient scaler), bf16_pure (all stored in it)"),
    Column("timing", "", "fixed: so many steps; adaptive: as many as it takes until the median is known"),
    Column("warmup_steps", "steps", "before those that are measured; null with adaptive timing"),
    Column("measured_steps", "steps", "synced ones, and on a GPU as many pipelined; null with adaptive timing"),
    Column("half_width", "", "of adaptive timing: it stops at this half of the median's 95 % interval, a fraction of the median"),
    Column("most_steps", "steps", "of adaptive timing: it takes no more"),
    Column("most_seconds", "s", "of adaptive timing: it stops when the steps took so long together"),
    Column("compile", "", "eager; blocks: one block by torch.compile, which serves them all; model: the whole at once"),
    Column("compile_mode", "", "of torch.compile: default, reduce-overhead or max-autotune"),
    Column("compile_cache", "", "shared by the cells of the run; cold: the cell compiles as if for the first time"),
    Column(
        "attention", "", "naive (each step makes a square), torch_softmax, weights_only, recompute; torch's own, sdpa, which "
        "chooses by itself, or held to math, efficient, flash or cudnn; flex",
    ),
    Column("pass", "", "what a step does: forward (inference), forward_grad (with gradients), forward_backward, train_step"),
    Column("context_length", "tokens", "of each sequence"),
    Column("batch_size", "sequences", "in a step"),
    Column("size", "", "the model, by its name in the course: tiny and mini (for trials), small, medium, large, xl, 2.7B, 10B"),
    Column("year", "", "of the course whose sizes these are: xl differs"),
    Column("d_model", "elements", "width of the model; null where `size` or `model` names it, as the three that follow"),
    Column("d_ff", "elements", "inner width of the feed-forward part"),
    Column("num_layers", "", "how many blocks"),
    Column("num_heads", "", "heads of attention in each block"),
    Column("model", "", "one of your own, package.module:Factory"),
    Column("model_args", "", "its keyword arguments, as JSON"),
    Column("vocab_size", "tokens", "that the model knows"),
    Column("optimizer", "", "course: the plain loop of AdamW; foreach and fused: torch's AdamW, made so"),
    Column("d_head", "elements", "of attention alone: width of query, key and value"),
    Column("causal", "", "of attention alone: whether a token sees only itself and those before it"),
    Column("projections", "", "of attention alone: whether linear maps for query, key, value and output are around it"),
    Column("cold_l2", "", "of attention alone: whether the GPU's L2 cache is emptied before each phase, which is not timed"),
    Column("matrix_size", "elements", "of a matrix product: rows and columns of both factors"),
    Column("accumulator", "", "of accumulation: dtype of the sum, fp64, fp32, fp16 or bf16"),
    Column("addend", "", "of accumulation: dtype of what is added each time, fp64, fp32, fp16 or bf16"),
    Column("upcast", "", "of accumulation: whether the addend is cast to the sum's dtype by hand before it is added"),
    Column("value", "", "of accumulation: the number that is added"),
    Column("count", "", "of accumulation: how often it is added; the exact sum is `value` times this"),
    Column("at_once", "", "of accumulation: by torch's sum over one tensor, whose kernel has an accumulator of its own"),
    Column("autocast", "", "of the dtypes under autocast: to which one, fp16 or bf16"),
    Column("norm", "", "layer_norm or rms_norm: of the small model under autocast, or whose error is measured"),
    Column("dtype", "", "of a norm's error: of its rows, fp32, fp16 or bf16"),
    Column("width", "elements", "of a norm's error: of a row"),
    Column("scale", "", "of a norm's error: standard deviation of the elements"),
    Column("mean", "", "of a norm's error: mean of the elements, in those standard deviations"),
    Column("eps", "", "of a norm's error: what is added under the root"),
    Column("file", "", "of what `sweep import-nsys` brought in: the file that it came in"),
    Column("content", "", "a digest of what that file holds: another of its name is another cell"),
)  # fmt: skip


def describe_columns(names: Iterable[str]) -> list[Column]:
    """One each, in their order; what is described nowhere is a parameter of a task that somebody brought along."""
    return [_described(name) for name in names]


def _described(name: str) -> Column:
    found = next((column for column in (*COLUMNS, *PARAMETERS) if column.describes(name)), None)
    return Column(name, found.unit, found.meaning) if found else Column(name, "", PARAMETER)


def page() -> str:
    cells = ("", "## cells", "", _OF_CELLS, "", *lines_of(COLUMNS, "column"))
    parameters = ("", "## Parameters", "", _OF_PARAMETERS, "", *lines_of(PARAMETERS, "parameter"))
    raw = (line for table in RAW_TABLES for line in table.lines())
    return "\n".join([*guide(), *cells, *parameters, *raw]) + "\n"


if __name__ == "__main__":
    print(page(), end="")
