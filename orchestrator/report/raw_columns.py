"""What stands in the tables of which `cells` is made: attempts, samples, kernels, allocations, live, predictions (see parts)."""

from __future__ import annotations

from orchestrator.report.described import Column, TableDoc, Values

_CELL = Column("cell", "", "the cell's id, a digest of its task and parameters")
_ATTEMPT = Column(
    "attempt", "", "number of the attempt, from 1; with `cell` the key of a row of `attempts`"
)
_METRIC = Column("metric", "", "what the number is")
_UNIT = Column("unit", "", "of the value; empty for a flag or a fraction of time")
_VALUE = Column("value", "as `unit` says", "the number; null where it could not be had")

_FORWARD = Column("forward", "", "the forward pass, with the loss where there is one")
_BACKWARD = Column("backward", "", "the backward pass")
_OPTIMIZER = Column("optimizer", "", "the optimizer's update")
_PHASES = (_FORWARD, _BACKWARD, _OPTIMIZER)

_GROWN_ROLES = (
    Column("gradients", "", "of the parameters, and of inputs that have one"),
    Column("optimizer state", "", "AdamW's moments"),
    Column(
        "autocast weight copies",
        "",
        "the weights in the narrower dtype, which autocast keeps until the forward pass ends",
    ),
)
_ROLES = (
    Column("parameters", "", "the weights"),
    Column("buffers", "", "of the model, which no gradient changes"),
    Column(
        "inputs",
        "",
        "tokens and targets; of attention alone query, key, value and the gradient of the result",
    ),
    *_GROWN_ROLES,
    Column("activations", "", "made by the forward pass and kept to its end"),
    Column("temporary", "", "made by a phase, and none of the others"),
    Column("workspace", "", "of cuBLAS, for each thread that multiplies"),
    Column(
        "slack", "", "by how much the allocator's blocks are larger than what was asked of them"
    ),
    Column("unlabelled", "", "there before the step on record, and held by nobody who is known"),
)
_PARTS = Values(
    "module",
    (
        Column("embedding", "", "of the tokens"),
        Column("norm", "", "RMSNorm, of each block and the last one"),
        Column("q projection", "", "and `k projection`, `v projection`, `o projection`: linear maps around attention"),
        Column("rope", "", "rotary positions"),
        Column("attention", "", "what is of attention and of none of its parts"),
        Column("scores", "", "of attention: query times key, scaled and masked"),
        Column("softmax", "", "of attention"),
        Column("attention output", "", "weights times value"),
        Column("fused attention", "", "one of torch's kernels for all of it"),
        Column("ffn", "", "the feed-forward part"),
        Column("residual", "", "what a block does outside of its parts: the additions"),
        Column("head", "", "the linear map to the logits"),
        Column("loss", "", "cross-entropy"),
        Column("optimizer", "", "all of its phase"),
        Column("gradient sums", "", "autograd's, of a tensor that several parts have used: of none of them"),
        Column("model", "", "what is of the model and of none of its modules"),
        Column("{words}", "", "of a model of your own, a module by its path, numbers as `*`; fused parts are joined by `+`"),
    ),
)  # fmt: skip

_SAVED = (
    Column(
        "saved_bytes",
        "bytes",
        "that the forward pass keeps for the backward pass, beyond what is there anyway",
    ),
    Column("saved_square_bytes", "bytes", "of that, tensors of all pairs of positions"),
    Column("saved_squares", "tensors", "how many those are"),
    Column("saved_block_bytes", "bytes", "of that, by one block"),
    Column(
        "saved_operation_bytes",
        "bytes",
        "by one operation of a block: `step` is its rank from 1, `note` its name",
    ),
    Column("residual_stream_bytes", "bytes", "that a block hands on to the next"),
)
_PEAK = Column(
    "peak_{kind}_bytes",
    "bytes",
    "the highest within the phase; allocated: in blocks of the allocator, requested: as tensors asked for it, reserved: by the "
    "allocator from the GPU, rss: of the process, on the CPU",
)
_HELD = Column(
    "held_{kind}_bytes", "bytes", "at the end of the phase; rss: of the process, on the CPU"
)
_BUILT = Column("built", "", "what the build left, before any step")
_FIRST = Column("first", "", "the first step, which has no optimizer state yet")
_STEADY = Column("steady", "", "a later step, as all after it")

_ATTEMPTS = TableDoc(
    "attempts",
    "One row an attempt at a cell, also of those that failed: how it ended, and all that is known of where and by what.",
    (
        _CELL,
        _ATTEMPT,
        Column("task", "", "what was measured"),
        Column("task_version", "", "of the task: raised when its numbers would come out differently"),
        Column("params", "", "the cell's parameters, a JSON object (see Parameters)"),
        Column("status", "", "how it ended"),
        Column("stage", "", "in which it ended; empty where it ended well, or where nobody knows"),
        Column("phase", "", "of the step, in which it ended; empty where it ended well, or outside of steps"),
        Column("evidence", "", "what is known of an end that was not well, a JSON object"),
        Column("facts", "", "where and with what it was measured, and what was read back, a JSON object"),
        Column("started_at", "UTC", "when it began"),
        Column("wall_s", "s", "how long it took, with all that surrounds its steps"),
        Column("timeout_s", "s", "how long it was allowed to take"),
        Column("replaces", "", "number of the attempt up to which successes count no more if this is one (`--retry`); 0: none"),
        Column("commit", "", "of this program; `+` where the checkout had changes"),
    ),
    (
        Values(
            "status",
            (
                Column("ok", "", "measured"),
                Column("oom", "", "the device's memory ran out, or the cap on it"),
                Column("oom_inferred", "", "not measured: a cell that asks for no more ran out of memory"),
                Column("host_oom", "", "the host's memory ran out, or the limit on it"),
                Column("timeout", "", "not done in time"),
                Column("crashed", "", "a signal, or an exit without a word"),
                Column("failed", "", "an exception"),
                Column("skipped", "", "cannot be measured here: `reason` in the evidence"),
                Column("lost", "", "its GPU, its node or its supervisor went away: the cell is not to blame"),
            ),
        ),
        Values(
            "stage",
            (
                Column("start", "", "until its process could begin the task"),
                Column("build", "", "reaches the device, and makes model and inputs; what is found once ends here"),
                Column("out-of-memory watched", "", "before anything else, so that an out-of-memory is witnessed"),
                Column("kernels prepared", "", "before anything is compiled"),
                Column("memory of the build", "", "what it left"),
                Column("telemetry before", "", "the GPU's counters"),
                Column("compile", "", "the steps that compile"),
                Column("warm-up", "", "steps before those that are measured, looked into for memory"),
                Column("memory of warm-up", "", "hands over what was seen in those"),
                Column("pace before", "", "how fast the host is"),
                Column("cores before", "", "what its threads have waited"),
                Column("timing synced", "", "the steps that are waited for"),
                Column("timing pipelined", "", "the steps that run on"),
                Column("compilation counted", "", "what torch compiled by then"),
                Column("cores after", "", "what its threads have waited"),
                Column("pace after", "", "how fast the host is"),
                Column("telemetry after", "", "the GPU's counters"),
                Column("memory", "", "a step that is looked into, where no warm-up was"),
                Column("memory snapshot", "", "a step on the allocator's record"),
                Column("kernels", "", "a step under the profiler"),
                Column("nvtx", "", "steps with ranges for Nsight Systems"),
                Column("nsys", "", "the same under Nsight Systems"),
                Column("kernel time", "", "a few steps under the profiler, phase by phase"),
                Column("attention backend", "", "a step under the profiler, for the names of its kernels"),
            ),
        ),
        Values("phase", _PHASES),
        Values(
            "evidence",
            (
                Column("message", "", "of the error"),
                Column("reason", "", "why it was skipped"),
                Column("exception", "", "its class"),
                Column("traceback", "", "of the exception"),
                Column("asked_bytes", "bytes", "that memory ran out for"),
                Column("allocated_bytes", "bytes", "by tensors, when memory ran out"),
                Column("reserved_bytes", "bytes", "by the allocator, when memory ran out"),
                Column("free_bytes", "bytes", "on the device, when memory ran out"),
                Column("total_bytes", "bytes", "that the device has"),
                Column("limit_bytes", "bytes", "the cell's `memory_limit_gib`"),
                Column("rss_bytes", "bytes", "resident set of the process, when memory ran out"),
                Column("memory_evidence", "", "why the device could not be asked for these"),
                Column("snapshot", "", "file of the allocator's record, beside the log"),
                Column("witness", "", "of an inferred out-of-memory: the cell that it is inferred from"),
                Column("signal", "", "that ended the process"),
                Column("exit_code", "", "of the process"),
                Column("oom_kills", "", "of the kernel, for want of memory, while it ran"),
                Column("timeout_s", "s", "that it was not done in"),
                Column("kernel_log", "", "what the kernel said meanwhile of memory and of GPUs"),
                Column("log_tail", "", "the end of its log"),
                Column("nvml", "", "of a GPU that went away: what NVML said"),
                Column("gpu_uuid", "", "of a GPU that went away: its id"),
                Column("host_fault", "", "why nothing is measured on that host"),
                Column("cell_ended_as", "", "of one that was lost: the status that it would have"),
                Column("cell_said", "", "of one that was lost: the message of its own"),
            ),
        ),
        Values(
            "facts",
            (
                Column("start_method", "", "of its process: fork, from a prepared parent, or spawn, afresh"),
                Column("pinned_cores", "", "that its process keeps to, such as 0-3,8; null: all"),
                Column("cores", "", "how many its process may use"),
                Column("nice", "", "niceness of the process"),
                Column("omp_num_threads", "", "the environment's OMP_NUM_THREADS"),
                Column("visible_devices", "", "the environment's CUDA_VISIBLE_DEVICES"),
                Column("pid", "", "of the process; not in what is published"),
                Column("driver_note", "", "why the driver's version is not known"),
                Column("cudnn", "", "version of cuDNN"),
                Column("cudnn_allow_tf32", "", "torch's flag, read back"),
                Column("nvidia_tf32_override", "", "the environment's NVIDIA_TF32_OVERRIDE"),
                Column("gpu_memory_bytes", "bytes", "that the GPU has"),
                Column("gpu_uuids", "", "of a cell with several GPUs: the ids of all"),
                Column("compute_capability", "", "of the GPU"),
                Column("fingerprint", "", "what must be the same for cells of a run to stand together"),
                Column("grad_mode", "", "grad or no_grad"),
                Column("parameters_expected", "", "how many the model should have, by its dimensions"),
                Column("model_source", "", "a digest of the code of a model of your own"),
                Column("flops", "FLOP", "of each phase of a step, by the closed form"),
                Column("compile_threads", "", "of torch's compiler"),
                Column("stage_s", "s", "by stage, how long it took; `process`: to come and to go"),
                Column("instruments", "", "that were asked for"),
                Column("env", "", "the config's variables of the environment"),
                Column("log_left_out_bytes", "bytes", "of its output, in the middle"),
                Column("{part}", "", "all others are columns of `cells`, under the same name"),
            ),
        ),
    ),
)  # fmt: skip

_SAMPLES = TableDoc(
    "samples",
    "One row a number as it was measured, of every attempt, also of one that failed later. What a cell is timed by "
    "is `duration` of `timing` with the phase `step`, in the mode `pipelined` or, where it has none, `synced`.",
    (
        _CELL,
        _ATTEMPT,
        Column("instrument", "", "what measured it"),
        Column("mode", "", "which steps, or which moment, it is of"),
        Column("phase", "", "of the step; empty for what is of none"),
        _METRIC,
        _UNIT,
        Column("step", "", "which of the steps of its mode, from 0; null for what is of none"),
        _VALUE,
        Column("note", "", "why `value` is null, or what it is of; else empty"),
    ),
    (
        Values(
            "instrument",
            (
                Column("timing", "", "how long steps take"),
                Column("memory", "", "peaks and what is held, phase by phase, and what is saved for the backward pass"),
                Column("telemetry", "", "the GPU's counters, and what else the host had to do"),
                Column("kernels", "", "what the kernels of a profiled step come to; each is in `kernels`"),
                Column("memory_snapshot", "", "what the allocator's record of a step comes to; see `allocations`, `live`"),
                Column("kernel_time", "", "how long the kernels of a few steps take, each phase watched alone"),
                Column("backend", "", "which kernels of attention ran, in the facts"),
                Column("nvtx", "", "steps with ranges for Nsight Systems"),
                Column("nsys", "", "the same under Nsight Systems, whose kernels are in `kernels`"),
                Column("finding", "", "of a task that finds something once, without steps"),
            ),
        ),
        Values(
            "mode",
            (
                Column("synced", "", "timing: measured steps, waited for at the end of each phase, by the host's clock"),
                Column("pipelined", "", "timing: measured steps that run on and are waited for once, by the GPU's events"),
                Column("compile", "", "timing: the step that compiles, and those that record CUDA graphs; synced"),
                Column("warmup", "", "timing: steps before those that count; synced"),
                Column("check", "", "of adaptive timing: one or two steps of warm-up that run on, to hold against synced ones"),
                _BUILT,
                _FIRST,
                Column("steady", "", "the last step of the warm-up, or one of its own where there is none"),
                Column("before", "", "telemetry: before the steps that compile; `host_pace`: before the timing"),
                Column("after", "", "telemetry: after the timing"),
                Column("timing", "", "telemetry: while steps were timed"),
                Column("", "", "of instruments that have no such"),
            ),
        ),
        Values(
            "phase",
            (
                *_PHASES,
                Column(
                    "step",
                    "",
                    "timing: the whole step, with what lies between its phases; with `cold_l2`, and of kernel_time, their sum",
                ),
                Column("outside", "", "kernels: what is of no phase"),
            ),
        ),
        Values(
            "metric",
            (
                Column("duration", "ms", "of the phase, or of the whole step"),
                Column(
                    "additions",
                    "",
                    "of older versions, and ignored: the duration in units of a one-element addition",
                ),
                Column("host", "ms", "pipelined and check: how long the host took to hand it to the GPU"),
                Column("lead", "ms", "pipelined and check: how far the host was ahead of the GPU at the end of the phase"),
                Column("drain", "ms", "pipelined and check: how long the GPU went on after the host was done with the last step"),
            ),
            ("timing",),
        ),
        Values(
            "metric",
            (
                _PEAK,
                _HELD,
                Column("allocated_after_bytes", "bytes", "on mps, which keeps no peak: at the end of the phase"),
                Column("reserved_after_bytes", "bytes", "on mps, by its driver, at the end of the phase"),
                *_SAVED,
            ),
            ("memory",),
        ),
        Values(
            "metric",
            (
                Column("sm_clock", "MHz", "of the GPU"),
                Column("sm_clock_max", "MHz", "that the GPU allows"),
                Column("memory_clock", "MHz", "of the GPU's memory"),
                Column("temperature", "°C", "of the GPU"),
                Column("power", "W", "that the GPU draws"),
                Column("power_limit", "W", "that the GPU may draw"),
                Column("energy", "J", "a counter: after less before is what it took"),
                Column("throttle_reasons", "bit mask", "why clocks are held down at that moment, NVML's bits (see `cells`)"),
                Column("power_capped", "ns", "a counter: how long the power limit held the clocks down"),
                Column("thermal_capped", "ns", "a counter: how long heat held the clocks down"),
                Column("waited_for_core", "", "how long a thread at most waited for a core that others had: a fraction"),
                Column("host_pace", "1/ms", "small operations that the host hands to torch: its speed"),
            ),
            ("telemetry",),
        ),
        Values(
            "metric",
            (
                Column("kernel_time", "ms", "of all kernels of the phase"),
                Column("busy", "ratio", "of the time from first to last kernel, that in which one ran: of a phase, or of all"),
                Column("idle", "ms", "in which none ran"),
                Column("idle_for_host", "ms", "of that, before kernels that the host had not launched yet"),
                Column("attributed_to_phase", "ratio", "of the kernels' time, that of which the phase is known"),
                Column("attributed_to_module", "ratio", "of which the module is known"),
                Column("attributed_to_class", "ratio", "of which the class is known"),
                Column("profiled_step", "ms", "how long the step took that was profiled"),
                Column("processing", "ms", "to make the rows of the trace"),
                Column("trace_bytes", "bytes", "of the trace beside the log"),
            ),
            ("kernels",),
        ),
        Values("metric", (Column("kernel_time", "ms", "of all kernels of a phase, or step, watched alone"),), ("kernel_time",)),
        Values(
            "metric",
            (
                Column("peak_{kind}_bytes", "bytes", "of the step on record, by the allocator's statistics"),
                Column("replayed_peak_bytes", "bytes", "that the record comes to when it is replayed"),
                Column("unlabelled_bytes", "bytes", "of the peak, whose role is not known"),
                Column("events", "events", "on the record"),
                Column("wrapped", "", "whether the record was too short: 1"),
                Column("file_bytes", "bytes", "of the record beside the log"),
                Column("processing", "ms", "to make the rows of the record"),
            ),
            ("memory_snapshot",),
        ),
        Values(
            "metric",
            (
                Column("sum", "1", "accumulation: what it came to"),
                Column("error", "1", "accumulation: that, less what is exact"),
                Column("loss", "nat", "autocast_dtypes: of the small model"),
                Column("{way}_error", "1", "norm_sensitivity: largest error over the root mean square (ways: see `cells`)"),
                Column("{way}_nonfinite", "1", "norm_sensitivity: the share of elements that are not finite, likewise"),
            ),
            ("finding",),
        ),
        Values("metric", (Column("events", "events", "that the profiler saw"),), ("backend",)),
        Values(
            "metric",
            (Column("annotated_steps", "steps", "that have ranges"),),
            ("nvtx", "nsys"),
        ),
    ),
)  # fmt: skip

_KERNELS = TableDoc(
    "kernels",
    "One row a kernel by its name, in one phase and module, over `steps` profiled steps: a step's time is `total_ns / steps`. On "
    "the CPU an operator's own time, without those within it. Of cells that list `kernels` or `nsys` among their instruments.",
    (
        _CELL,
        _ATTEMPT,
        Column("phase", "", "in which it was launched; empty outside of them"),
        Column("module", "", "part of the model that it works for; empty where none is known"),
        Column("kernel_class", "", "what kind of work it does, by its name; `run.kernels` has what is known of names today"),
        Column("attributed_by", "", "what the module is known by"),
        Column("operator", "", "of torch, that launched it; empty where none is known"),
        Column("name", "", "of the kernel; on the CPU of the operator, or `outside operators`"),
        Column("steps", "", "how many were profiled; null where the trace does not tell"),
        Column("count", "", "how often it ran in those"),
        Column("total_ns", "ns", "of all of these"),
        Column("mean_ns", "ns", "of one"),
        Column("median_ns", "ns", "of one"),
        Column("min_ns", "ns", "the shortest"),
        Column("max_ns", "ns", "the longest"),
        Column("sd_ns", "ns", "standard deviation; null of a single one"),
    ),
    (
        Values("phase", _PHASES),
        _PARTS,
        Values(
            "kernel_class",
            (
                Column("GEMM", "", "a matrix product"),
                Column("attention", "", "fused attention"),
                Column("softmax", "", "also one that the compiler made"),
                Column("norm", "", "a normalisation"),
                Column("elementwise", "", "element by element"),
                Column("reduction", "", "sums, maxima and the like, and the loss"),
                Column("copy", "", "also a change of dtype"),
                Column("embedding", "", "look-ups by index, and their gradients"),
                Column("optimizer", "", "torch's kernels for many tensors at once"),
                Column("communication", "", "between GPUs"),
                Column("other", "", "whatever else"),
            ),
        ),
        Values(
            "attributed_by",
            (
                Column("scope", "", "a range around the launch, on its thread"),
                Column("sequence", "", "the operator of the forward pass that the backward one belongs to"),
                Column("engine", "", "autograd itself, which adds up the gradients of a tensor"),
                Column("provenance", "", "what the compiler says went into the kernel"),
                Column("phase", "", "all of the optimizer's phase is the optimizer's"),
                Column("launch", "", "only where it was launched: in no part"),
                Column("none", "", "not even that: the trace has no launch of it"),
            ),
        ),
    ),
)  # fmt: skip

_ALLOCATIONS = TableDoc(
    "allocations",
    "One row for all allocations on the GPU that live at one moment and are alike in role, part, size and place in the code. "
    "`total_bytes` adds up to what is allocated then. Of cells that list `memory_snapshot` among their instruments.",
    (
        _CELL,
        _ATTEMPT,
        Column("moment", "", "at which they live"),
        Column("phase", "", "that the moment falls into"),
        Column("role", "", "what they are for"),
        Column("part", "", "of the model, called as `module` of `kernels`; empty where it is of none"),
        Column("attributed_by", "", "what the role is known by"),
        Column("allocated_in", "", "phase of the step on record that made them; empty for what is of none, or older"),
        Column("call_chain", "", "`file:line function` that asked, called by whom, ` < ` between; empty where no Python ran"),
        Column("size_bytes", "bytes", "of each, as it was asked for"),
        Column("count", "", "how many; 0 of `slack`"),
        Column("total_bytes", "bytes", "of all of these"),
    ),
    (
        Values(
            "moment",
            (
                Column("peak", "", "of the steady step on record"),
                Column("out of memory", "", "when the allocator gave up, where that ended the attempt"),
            ),
        ),
        Values("phase", _PHASES),
        Values("role", _ROLES),
        Values(
            "attributed_by",
            (
                Column("book", "", "somebody held it at a moment when its role was known"),
                Column("rule", "", "of weights that autocast copies: their size, place and life"),
                Column("part", "", "what was being computed when it was made, and in which phase"),
                Column("phase", "", "that alone"),
                Column("none", "", "it is not known"),
            ),
        ),
    ),
)  # fmt: skip

_LIVE = TableDoc(
    "live",
    "How many bytes of each role live at one moment of the step on record, at some 250 moments, of those in between the "
    "highest. At each, the roles add up. Of cells that list `memory_snapshot` among their instruments.",
    (
        _CELL,
        _ATTEMPT,
        Column("event", "", "of the allocator's record, after which that is; one moment has one"),
        Column("at_ms", "ms", "by the host's clock, from the first event of the step"),
        Column("phase", "", "that it falls into; empty between phases"),
        Column("role", "", "as in `allocations`, without `slack`"),
        Column("live_bytes", "bytes", "as they were asked for"),
    ),
    (Values("phase", _PHASES),),
)  # fmt: skip

_PREDICTIONS = TableDoc(
    "predictions",
    "One row a number that was foreseen of a cell's memory, before anything was measured: it has no attempt. Of a cell that was "
    "predicted more than once the latest `predicted_at` counts.",
    (
        _CELL,
        Column("predicted_at", "UTC", "when"),
        Column("mode", "", "which step it is of, as in `samples`"),
        Column("phase", "", "of the step; empty for what is of none"),
        _METRIC,
        _UNIT,
        Column("step", "", "rank of a `saved_operation_bytes`, from 1; else null"),
        Column("value", "as `unit` says", "what is foreseen; null of a verdict, and where there is no prediction"),
        Column("note", "", "how it is predicted, or of what it is; with null why there is none, or the verdict"),
    ),
    (
        Values("mode", (_BUILT, _FIRST, _STEADY, Column("", "", "of the verdict"))),
        Values("phase", _PHASES),
        Values(
            "metric",
            (
                _PEAK,
                Column("held_{kind}_bytes", "bytes", "at the end of the phase"),
                Column("at_peak_bytes", "bytes", "of the peak of the steady step, by role: `note`"),
                Column("closed_form_bytes", "bytes", "of the peak by the closed form, a term: `note`"),
                *_SAVED,
                Column("square_bytes", "bytes", "of attention alone: a tensor of all pairs of positions"),
                Column("formula_{what}_squares", "tensors", "of attention alone: how many of those the formula has"),
                Column("verdict", "", "whether it fits: `note`"),
            ),
        ),
        Values(
            "note",
            (
                Column("tracked", "", "every storage followed"),
                Column("modelled", "", "but for fused kernels, of which a model is"),
                Column("as eager", "", "of what is compiled, which may do with less"),
            ),
            ("peak_{kind}_bytes", "held_{kind}_bytes"),
        ),
        Values(
            "note",
            (
                Column("parameters", "", "the weights"),
                Column("inputs", "", "and the model's buffers"),
                *_GROWN_ROLES,
                Column("activations", "", "of the closed form, where it does not tell the parts"),
                Column("activations: {words}", "", "of that part of the model; `attention squares`: of all pairs of positions"),
                Column("temporary", "", "none of the others"),
                Column("workspace", "", "of cuBLAS, and what kernels need while they run"),
                Column("slack", "", "by how much the allocator's blocks are larger than what was asked of them"),
            ),
            ("at_peak_bytes", "closed_form_bytes"),
        ),
        Values(
            "note",
            (
                Column("fits", "", "under the cell's limit, or on the GPU of the run"),
                Column("borderline", "", "within 3 % of what there is; in older runs also compiled, and beyond"),
                Column("perhaps", "", "compiled, and would not fit as eager, but by no more than was seen to be too much"),
                Column("unlikely", "", "compiled, and would take more than 2.11 times what there is as eager"),
                Column("oom", "", "does not fit"),
            ),
            ("verdict",),
        ),
    ),
)  # fmt: skip

RAW_TABLES: tuple[TableDoc, ...] = (
    _ATTEMPTS,
    _SAMPLES,
    _KERNELS,
    _ALLOCATIONS,
    _LIVE,
    _PREDICTIONS,
)
