"""Every key of the JSON objects `facts` and `evidence` of an attempt.

Facts describe where and with what a cell was measured, as read back. Evidence is what is known
about an attempt that did not end with `ok`. The first ones are also columns of `cells`, in this
order.
"""

from __future__ import annotations

from functools import partial

from tasks.spec.fields import Dtype, Fact

_text = partial(Fact, dtype=Dtype.TEXT)
_int = partial(Fact, dtype=Dtype.INT64)
_float = partial(Fact, dtype=Dtype.FLOAT)
_bool = partial(Fact, dtype=Dtype.BOOL)
_json = partial(Fact, dtype=Dtype.JSON)
_bytes = partial(Fact, dtype=Dtype.INT64, unit="bytes")

_CELL_FACTS = (
    # Where and by which program.
    _text("program_source", doc="digest of the measuring code; several commits may share it"),
    _text("invocation", doc="command that measured it: its `time` in run.json", unit="UTC"),
    _text("host", doc="name of the host"),
    _text("gpu", doc="name of the GPU, from its driver"),
    _text("gpu_uuid", doc="id of the GPU; a digest of it in published results"),
    _text("torch", doc="version of torch"),
    _text("cuda", doc="version of CUDA that torch was built with"),
    _text("driver", doc="version of the GPU's driver"),
    _text("python", doc="version of Python"),
    _text("cpu", doc="name of the processor"),
    # What was built, as read back.
    _int("tokens", doc="tokens that a step processes", unit="tokens"),
    _int("parameters", doc="number of parameters of the model, counted after the build"),
    _text("parameter_dtype", doc="dtype of the parameters, read back after the build"),
    _text("autocast_dtype", doc="dtype of autocast, read back after the build"),
    _text("fsdp_param_dtype", doc="parallel: fsdp2: dtype of gathered parameters; null: their own"),
    _text("float32_matmul_precision", doc="torch's setting, read back: `highest` means fp32 only"),
    _bool("matmul_allow_tf32", doc="torch's flag, read back"),
    # What ranks sent.
    _int("collective_calls", doc="calls of a collective in a step"),
    _bytes("collective_bytes", doc="S of nccl-tests times the calls of a step"),
    _bytes(
        "bus_bytes", doc="what a step sends through each GPU's link: S times nccl-tests' factor"
    ),
    _float(
        "step_skew_ms",
        doc="duration of a step on the slowest rank less that on the fastest one, the median",
        unit="ms",
    ),
    _int("slowest_rank", doc="the rank that was slowest in most of the timed steps"),
    _float("slowest_rank_share", doc="in which share of them", unit="ratio"),
    _text("link", doc="how each pair of the cell's GPUs is connected, or why that is unknown"),
    # What torch.compile did.
    _text(
        "compile_cache_seen", doc="the compiler's cache had nothing, all or some: cold, warm, mixed"
    ),
    _text("compile_blocks", doc="compile: blocks: where the model holds them, number and class"),
    _int("compile_graphs", doc="graphs that torch.compile made"),
    _int("compile_graph_breaks", doc="number of graph breaks"),
    _text("compile_break_reasons", doc="reasons for graph breaks, as torch reports them"),
    _int("compile_recompiles", doc="number of recompilations until the last measured step"),
    _text("compile_recompile_reasons", doc="reasons for recompilations, as torch reports them"),
    _int("compile_cache_hits", doc="hits of the compiler's cache of graphs"),
    _int("compile_cache_misses", doc="misses of the compiler's cache of graphs"),
    _int("compile_skipped_cuda_graphs", doc="how often CUDA graphs were requested and not used"),
    _int(
        "optimizer_steps_skipped",
        doc="optimizer steps that changed nothing, because gradients in fp16 overflowed",
    ),
    _text(
        "settings_changed", doc="settings of the process that the cell's code changed, before → now"
    ),
    # Attention.
    _text("attention_asked", doc="attention backend that was requested"),
    _text("attention_used", doc="attention of a model of transformers, as its config names it"),
    _text("attention_seen", doc="attention backend whose kernels ran"),
    _text("attention_kernels", doc="names of those kernels"),
    _text("dtype_parameters", doc="autocast_dtypes: dtype of the parameters"),
    _text("dtype_fc1", doc="autocast_dtypes: dtype of the first linear layer's output"),
    _text("dtype_relu", doc="autocast_dtypes: dtype of the ReLU's output"),
    _text("dtype_norm", doc="autocast_dtypes: dtype of the norm's output"),
    _text("dtype_logits", doc="autocast_dtypes: dtype of the logits"),
    _text("dtype_loss", doc="autocast_dtypes: dtype of the loss"),
    _text("dtype_gradients", doc="autocast_dtypes: dtype of the gradients"),
    _int("softmax_flops", doc="softmax in a forward pass, all layers", unit="FLOP"),
    _int("attention_matmul_flops", doc="products of attention, as `softmax_flops`", unit="FLOP"),
    # Adaptive timing.
    _int("timing_warmup_steps", doc="adaptive timing: synced steps that were warm-up"),
    _text(
        "timing_stopped_by",
        doc="adaptive timing: half-width, out of reach, steps or seconds; beaten: `sweep best` had"
        " measured a faster cell",
    ),
    _text("timing_pipelined", doc="adaptive timing: pipelined steps `as synced`, or `measured`"),
    _float("timing_half_width", doc="adaptive timing: half-width reached, over the median"),
    _bytes(
        "nccl_device_bytes", doc="memory of the GPU that NCCL took, outside of torch's allocator"
    ),
)
_OTHER_FACTS = (
    _json(
        "bucket_bytes", doc="parallel: bucketed, ddp, zero1_torch: sizes of the buckets, in order"
    ),
    _text("start_method", doc="start of the process: `fork` from a fork server, or `spawn`"),
    _text("pinned_cores", doc="cores that the process is restricted to, such as 0-3,8; null: all"),
    _int("cores", doc="number of cores that the process may use"),
    _int("nice", doc="niceness of the process"),
    _text("omp_num_threads", doc="the environment variable OMP_NUM_THREADS"),
    _text("visible_devices", doc="the environment variable CUDA_VISIBLE_DEVICES"),
    _int("pid", doc="id of the process; not published"),
    _int("threads", doc="threads that torch uses on the CPU"),
    _text("driver_note", doc="why the driver's version is unknown"),
    _int("cudnn", doc="version of cuDNN"),
    _bool("cudnn_allow_tf32", doc="torch's flag, read back"),
    _text("nvidia_tf32_override", doc="the environment variable NVIDIA_TF32_OVERRIDE"),
    _bytes("gpu_memory_bytes", doc="memory of the GPU"),
    _int("ranks", doc="number of processes that measured the cell together"),
    _float("rendezvous_s", doc="until the ranks had met and run a first collective", unit="s"),
    _text("nccl", doc="version of NCCL"),
    _json("gpu_uuids", doc="ids of all GPUs of a cell with several"),
    _text("compute_capability", doc="compute capability of the GPU"),
    _json("fingerprint", doc="fields that must be equal for cells of one run to be comparable"),
    _text("grad_mode", doc="`grad` or `no_grad`"),
    _int("parameters_trained", doc="parameters that have gradients"),
    _int("parameters_expected", doc="parameters that follow from the model's dimensions"),
    _text("model_source", doc="digest of the code of your own model"),
    _text("imported_from", doc="path of the imported file, as the command named it"),
    _json("flops", doc="floating-point operations of each phase, by the closed form", unit="FLOP"),
    _text("compile_threads", doc="threads of torch's compiler"),
    _json("stage_s", doc="duration by stage; `process`: start and end of the process", unit="s"),
    _json("instruments", doc="instruments that were requested"),
    _json("env", doc="environment variables of the config"),
    _int("log_left_out_bytes", doc="bytes removed from the middle of its output", unit="bytes"),
)

_CELL_EVIDENCE = (
    _text("message", doc="message of the error that ended the attempt"),
    _text("reason", doc="why the cell was skipped"),
    _text("signal", doc="signal that ended the process"),
    _int("exit_code", doc="exit code of the process"),
    _text("witness", doc="of an inferred out-of-memory: the cell it is inferred from"),
    _bytes("asked_bytes", doc="requested size when memory ran out"),
    _bytes("allocated_bytes", doc="allocated by tensors when memory ran out"),
    _bytes("reserved_bytes", doc="reserved by the allocator when memory ran out"),
    _bytes("free_bytes", doc="free on the device when memory ran out"),
    _bytes("total_bytes", doc="memory of the device, if memory ran out"),
    _text("snapshot", doc="file of the allocator's record, stored with the log"),
)
_OTHER_EVIDENCE = (
    _text("exception", doc="class of the exception"),
    _text("traceback", doc="traceback of the exception"),
    _bytes("limit_bytes", doc="the cell's `memory_limit_gib`"),
    _bytes("rss_bytes", doc="resident set of the process when memory ran out"),
    _text("memory_evidence", doc="why the device's memory could not be read"),
    _int("oom_kills", doc="OOM kills by the kernel while it ran"),
    _float("timeout_s", doc="limit that it exceeded", unit="s"),
    _json("kernel_log", doc="the kernel's messages about memory and GPUs while it ran"),
    _text("log_tail", doc="the end of its log"),
    _int("rank", doc="of several ranks: the one at fault"),
    _text("collective", doc="collective at which ranks waited, with its number"),
    _json("arrived", doc="the last collective of each rank whose flight record could be read"),
    _text("nvml", doc="of a lost GPU: NVML's message"),
    _text("gpu_uuid", doc="of a lost GPU: its id"),
    _text("host_fault", doc="why nothing can be measured on that host"),
    _text("cell_ended_as", doc="of a lost attempt: the status that it would have had"),
    _text("cell_said", doc="of a lost attempt: its own error message"),
)


FACTS: tuple[Fact, ...] = (*_CELL_FACTS, *_OTHER_FACTS)
EVIDENCE: tuple[Fact, ...] = (*_CELL_EVIDENCE, *_OTHER_EVIDENCE)
FACT_COLUMNS = (*_CELL_FACTS, *_CELL_EVIDENCE)
CELL_FACTS: tuple[str, ...] = tuple(fact.name for fact in _CELL_FACTS)
CELL_EVIDENCE: tuple[str, ...] = tuple(fact.name for fact in _CELL_EVIDENCE)
