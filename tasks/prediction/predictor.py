"""Predicts a cell: tracks its steps without data, replays the trace in a model of the allocator."""

from __future__ import annotations

import gc
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from tasks import attention, train_step
from tasks.attention import AttentionParams
from tasks.harness.device import CpuDevice, Skip
from tasks.harness.error_kinds import is_unsupported
from tasks.harness.saved_tensors import SavedWatcher, of_all_layers
from tasks.harness.workload import Watcher, Workload, run_step
from tasks.prediction.allocator import CachingAllocator, OutOfMemory
from tasks.prediction.closed_form import attention_squares, closed_form, of_parameters
from tasks.prediction.compiled_functions import functions_compiled
from tasks.prediction.composition import compose, temporary_by_part
from tasks.prediction.operations.emulation import GpuFunctions, gpu_emulated
from tasks.prediction.operations.flops import FlopCount
from tasks.prediction.records import (
    CLOSED_FORM,
    COMPILED,
    MARGIN,
    Prediction,
    PredictionRequest,
    Verdict,
    compiled_part,
    generates_code,
    plainly_fits,
    unknown,
    unsupported_reason,
)
from tasks.prediction.replay import (
    Replay,
    Step,
    Trace,
    held_by_nccl,
    highest,
    left_behind_bytes,
    replay,
)
from tasks.prediction.resizing import trace_by_layers
from tasks.prediction.tracking import StorageTracker
from tasks.process.phase_file import Progress
from tasks.spec.axes import Affects, Values, axes_without
from tasks.spec.messages import shorten, typed_error_text
from tasks.spec.metrics import metric_named
from tasks.spec.parameters import default_values
from tasks.spec.source_digest import is_of_user
from tasks.spec.tables import Sample
from tasks.training.hugging_face import NoModelError
from tasks.training.model_sources import build_model
from tasks.training.parameters import TrainStepParams

if TYPE_CHECKING:
    from tasks.prediction.compiled_calls import FunctionCompiler

STEADY_STEPS = 5  # after these the model reserves what an H200 does after 25, within 3.5 %

Predictable = TrainStepParams | AttentionParams

# Micro-batches that are traced. The second one adds to gradients. The third one repeats it, but
# other blocks are free by then, so that it may reserve more: 6.8 % for Qwen2.5-0.5B with Adafactor
# on an H200, where a fourth one reserved nothing.
_TRACED_MICRO_BATCHES = 3
_PASSED_STEPS = 10  # that an optimizer counts before the steady step, without making them
_LONGEST_REASON = 120  # characters of what torch's compiler raised
_FUSED = ("sdpa", "efficient", "flash", "cudnn", "flex")


def _is_modelled(params: Predictable) -> bool:
    """Return True if the cell runs kernels whose inner memory is not followed."""
    return _has_other_optimizer(params) or params.attention in _FUSED


def _has_other_optimizer(params: Predictable) -> bool:
    optimizer = params.optimizer if isinstance(params, TrainStepParams) else ""
    return ":" in optimizer and not optimizer.startswith("torch.optim:")


class NoData(CpuDevice):
    """The device of tensors without data. Its memory is neither watched nor limited."""

    kind = "meta"
    torch_device = torch.device("meta")


class Predictor:
    """Predicts cells one by one."""

    def __init__(self) -> None:
        # The last training step, because the trace of `forward_backward` is contained in its trace.
        self._last: tuple[TrainStepParams, tuple[int, float], Trace] | None = None

    def predict(self, request: PredictionRequest) -> Prediction:
        """Return a prediction, or an unknown one with the reason. Never raise."""
        params, reason = request.cell.params, unsupported_reason(request.cell)
        if not isinstance(params, TrainStepParams | AttentionParams) or reason:
            return unknown(reason)
        try:
            trace, how, reason = self._trace(request)
            peaks = replay(trace, CachingAllocator(), STEADY_STEPS)
        except Skip as skip:
            return unknown(str(skip))
        except (ImportError, NoModelError) as error:  # the message has the remedy
            return unknown(str(error))
        except BaseException as error:  # a user's model may raise anything, SystemExit included
            reason = _why_not_tracked(params, error)
            if isinstance(params, AttentionParams) or is_unsupported(error):
                return unknown(reason)
            return _at_least(params, reason, request.caps_bytes)
        verdicts = {cap: judge(trace, peaks, cap) for cap in request.caps_bytes}
        if trace.sent:
            surely, trace = peaks, held_by_nccl(trace)
            peaks = replay(trace, CachingAllocator(), STEADY_STEPS)
            for cap, verdict in verdicts.items():
                verdicts[cap] = _if_uncertain(verdict, judge(trace, peaks, cap))
            reason = "; ".join(filter(None, (reason, _why_uncertain(surely, peaks))))
        elif params.ranks > 1:
            peaks |= _second_step(trace)
        by_role = _composition(trace, peaks)
        counted = [sample for sample in trace.flops if ("steady", sample.phase) in peaks]
        samples = (*_samples(peaks, how), *by_role, *trace.saved, *counted, *_closed_form(params))
        temporary = temporary_by_part(trace, highest(peaks, "steady")[1])
        module_bytes = {**trace.module_bytes, **temporary}
        prediction = Prediction(how, reason, samples, verdicts, module_bytes)
        prediction = prediction.without(trace.unfollowed).with_caveats(_caveats(trace))
        if not trace.eager_functions:
            return prediction
        return prediction.with_eager_functions(trace.eager_functions)

    def _trace(self, request: PredictionRequest) -> tuple[Trace, str, str]:
        """Return the trace of a cell, how it was made, and why its code was not compiled."""
        params = request.cell.params
        assert isinstance(params, TrainStepParams | AttentionParams)
        eager, why_not_compiled = _as_eager(params), ""
        if isinstance(params, TrainStepParams) and generates_code(request.cell):
            try:
                part = compiled_part(request.cell)
                compiled = eager.model_copy(update={"compile": part})
                return self._track_once(compiled, request), COMPILED, ""
            except Exception as error:  # whatever torch's compiler cannot do without a GPU
                why_not_compiled = _why_not_compiled(error)
        how = "modelled" if _is_modelled(params) else "tracked"
        return self._track_once(eager, request), how, why_not_compiled

    def _track_once(self, params: Predictable, request: PredictionRequest) -> Trace:
        gpu = request.workspace_bytes, request.capability
        if isinstance(params, AttentionParams):
            return track(params, *gpu)
        if params.pass_ == "forward_backward" and self._last is not None:
            whole = params.model_copy(update={"pass_": "train_step"})
            if self._last[:2] == (whole, gpu):
                return self._last[2].without("optimizer")
        trace_whole = partial(track, workspace_bytes=gpu[0], capability=gpu[1])
        # Layers of compiled code are traced whole: only the first one runs what tunes its kernels.
        by_layers = None if params.compile != "eager" else trace_by_layers(params, trace_whole)
        trace = by_layers or trace_whole(params)
        self._last = (params, gpu, trace)
        return trace


def _caveats(trace: Trace) -> set[str]:
    """Return why later steps may take more than the traced ones."""
    more = left_behind_bytes(trace)
    if more <= 0:
        return trace.caveats
    grows = f"each step leaves {more / 2**20:,.1f} MiB more than the one before, and only two count"
    return {*trace.caveats, grows}


def _why_not_compiled(error: BaseException) -> str:
    while inner := getattr(error, "inner_exception", None):  # of torch's compiler
        error = inner
    return shorten(" ".join(typed_error_text(error).split()), _LONGEST_REASON)


def _why_not_tracked(params: Predictable, error: BaseException) -> str:
    if isinstance(params, TrainStepParams) and params.optimizer.startswith("bitsandbytes."):
        # Early versions do not declare the shapes of their kernels' results.
        return (
            "the kernels of bitsandbytes exist for CUDA only, so only parameters and gradients are "
            "predicted"
        )
    text = " ".join(typed_error_text(error).split())
    return f"it does not run without data: {text}"


def _as_eager(params: Predictable) -> Predictable:
    """Return the cell with the default of each axis that does not affect memory."""
    defaults = default_values(type(params))
    changed = {name: defaults[name] for name in axes_without(type(params), Affects.MEMORY)}
    if params.attention == "flex":  # it allocates the same tensors as the efficient kernel
        changed["attention"] = "efficient"
    return params.model_copy(update=changed)


class _Forward(ExitStack):
    """A watcher that enters a mode during the forward pass, and leaves it if that fails."""

    def __init__(self, mode: GpuFunctions) -> None:
        super().__init__()
        self._mode = mode

    def enter(self, phase: str) -> None:
        if phase == "forward":
            self.enter_context(self._mode)

    def leave(self, phase: str) -> None:
        if phase == "forward":
            self.close()


def track(params: Predictable, workspace_bytes: int = 0, capability: float = 9.0) -> Trace:
    """Return the trace of a cell's build and steps on one rank, with a GPU's allocations.

    Raise what the workload raises. workspace_bytes, capability: of the GPU, see PredictionRequest.
    """
    tracker = StorageTracker(workspace_bytes)
    is_compiled = isinstance(params, TrainStepParams) and params.compile != "eager"
    compiling, function_compiler = _load_compiler(params), _load_function_compiler(params)
    # What is compiled already, such as a function of an imported package, runs eagerly.
    eager = torch.compiler.set_stance("force_eager")
    with ExitStack() as stack:
        stack.enter_context(eager)
        stack.enter_context(_answering_for_a_gpu(tracker.trace))
        emulation = stack.enter_context(gpu_emulated(tracker.labelling, capability=capability))
        compiler = function_compiler(emulation) if function_compiler else None
        functions = stack.enter_context(functions_compiled(compiler))
        if params.ranks > 1:
            stack.enter_context(_ranks(params, tracker))
        stack.enter_context(tracker)
        with emulation, compiling(emulation):
            workload = _build(params)
            # Cycles of references are released before a process measures.
            gc.collect(1)
            untraced = _untraced_tokens(params)
        tracker.label([untraced], "inputs")
        sizes: Counter[str] = Counter()
        model, optimizers = workload.model, workload.optimizers
        tracker.label(workload.resident, "inputs")
        if model is not None:
            tracker.label(model.parameters(), "parameters")
            for name, parameter in model.named_parameters():
                sizes[f"parameter {of_all_layers(name)}"] += parameter.nbytes
        tracker.follow(workload, outside="loss" if optimizers else "attention")
        saved = SavedWatcher(workload, "prediction")
        steps: tuple[Step, ...] = ("first", "steady")
        if _replaces_buckets(params):
            steps = ("first", "second", "steady")
        attributes: list[Values] = []  # after each step
        stack.enter_context(_noticing_draws(tracker.trace, params.seed, is_compiled))
        for step in steps:
            if step == "steady":
                _pass_steps(optimizers)
            tracker.begin(step)
            with _Forward(emulation) as forward:
                watchers: list[Watcher] = [tracker, forward, functions]
                # What compiled code saves is not visible to autograd's hooks.
                if step == "steady" and not is_compiled:
                    watchers.append(saved)
                run_step(workload, Progress(), *watchers)
            tracker.label(_state_of(optimizers), "optimizer state")
            attributes.append(_plain_attributes(model))
    tracker.trace.eager_functions |= functions.eager
    tracker.trace.unfollowed |= emulation.unfollowed
    tracker.trace.caveats |= _changed_attributes(attributes)
    if not is_compiled:
        tracker.trace.saved += saved.samples
        sizes.update(saved.module_bytes)
    tracker.trace.module_bytes |= sizes
    if isinstance(params, TrainStepParams):
        tracker.trace.flops += _flops(params, tracker.flops)
    return tracker.trace


@contextmanager
def _answering_for_a_gpu(trace: Trace) -> Iterator[None]:
    """Answer the user's code that asks for a GPU. Torch itself must not call CUDA."""

    def is_cuda(tensor: Tensor) -> bool:
        return tensor.is_meta and _is_asked_by_user()

    def is_available() -> bool:
        if _is_asked_by_user():
            trace.caveats.add("its code asks torch.cuda for a GPU, which does not exist here")
        return False

    with (
        patch("torch.Tensor.is_cuda", property(is_cuda)),
        patch("torch.cuda.is_available", is_available),
    ):
        yield


def _is_asked_by_user() -> bool:
    """Return True if a function of the user calls the caller of this one.

    Scripts ask for the device when they are imported, too, and seldom use it in a model.
    """
    code = sys._getframe(2).f_code
    return is_of_user(code.co_filename) and code.co_name != "<module>"


@contextmanager
def _noticing_draws(trace: Trace, seed: int, is_compiled: bool) -> Iterator[None]:
    """Add a caveat to the trace if a generator of random numbers is used on the CPU."""
    random.seed(seed)
    torch.manual_seed(seed)

    def states() -> Sequence[object]:
        found = [random.getstate(), str(np.random.get_state())]
        # Compiled code draws the seeds of its dropout.
        return found if is_compiled else [*found, torch.get_rng_state().tolist()]

    before = states()
    yield
    if states() != before:
        trace.caveats.add("it draws random numbers, and with others it may do something else")


def _plain_attributes(model: nn.Module | None) -> Values:
    """Return the numbers and texts that the modules of a model have as attributes."""
    found: dict[str, object] = {}
    for path, module in model.named_modules() if model is not None else ():
        for name, value in vars(module).items():
            if isinstance(value, int | float | str):
                found[f"{path}.{name}".removeprefix(".")] = value
    return found


def _changed_attributes(after_steps: Sequence[Values]) -> set[str]:
    """Return a caveat if attributes of the model change from step to step, such as a counter."""
    first, last = after_steps[0], after_steps[-1]
    changed = sorted(name for name, value in last.items() if first.get(name, value) != value)
    if not changed:
        return set()
    names = shorten(", ".join(changed), _LONGEST_REASON)
    return {f"it may do something else in later steps, because these attributes change: {names}"}


def _pass_steps(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Have the optimizers count further steps: RAdam takes more memory from the sixth one on."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            step = state.get("step")
            if isinstance(step, Tensor) and not step.is_meta:
                step.add_(_PASSED_STEPS)


def _replaces_buckets(params: Predictable) -> bool:
    """Return True for DDP, which makes other buckets in the second step."""
    return isinstance(params, TrainStepParams) and params.parallel in ("ddp", "zero1_torch")


def _ranks(params: Predictable, tracker: StorageTracker) -> AbstractContextManager[None]:
    """Return the context in which this process is the rank of the cell with the most memory."""
    from tasks.prediction.ranks import fullest_rank, ranks_emulated

    assert isinstance(params, TrainStepParams)
    rank = 0
    if params.parallel == "zero1_torch":
        model = build_model(params, NoData())
        trained = [one.numel() for one in model.parameters() if one.requires_grad]
        rank = fullest_rank(trained, params.ranks)
    return ranks_emulated(params, rank, tracker)


def _load_compiler(
    params: Predictable,
) -> Callable[[GpuFunctions], AbstractContextManager[object]]:
    """Return the context in which a model is built, so that its compiled parts need no GPU."""
    if not isinstance(params, TrainStepParams) or params.compile == "eager":
        return nullcontext
    # Imported only here, because it takes seconds, and before torch's functions are replaced.
    from tasks.prediction.compiled_calls import compiling_models

    # Dynamo sees no emulated autocast, so that `x.to(y.dtype)` may cast to fp32. It makes no
    # difference if the result is cast anyway: attention that is written out begins with a product.
    is_cast_again = params.attention in ("naive", "torch_softmax") and not params.lora
    skips_dynamo = is_cast_again or params.precision not in ("bf16", "fp16")
    # The hooks of FSDP2 gather parameters, which is no part of the compiled code of a block.
    skips_dynamo = skips_dynamo and params.parallel != "fsdp2"
    return partial(compiling_models, skips_dynamo=skips_dynamo)


def _load_function_compiler(params: Predictable) -> type[FunctionCompiler] | None:
    """Return what compiles functions of an optimizer, unless it is one of torch or of our own."""
    if not _has_other_optimizer(params):
        return None
    # Imported only here, because it takes seconds, and before torch's functions are replaced.
    from tasks.prediction.compiled_calls import FunctionCompiler

    return FunctionCompiler


def _flops(params: TrainStepParams, counted: FlopCount) -> Iterator[Sample]:
    """Yield the FLOPs of a steady step with all of its micro-batches, or why they are unknown."""
    if counted.unknown:
        count, names = len(counted.unknown), ", ".join(sorted(counted.unknown))
        what = "1 operation" if count == 1 else f"{count} operations"
        reason = f"FLOPs undercounted: {what} unknown: {names}"
        yield metric_named("prediction", "flops").sample(None, "steady", "forward", note=reason)
        return
    traced = min(params.gradient_accumulation, _TRACED_MICRO_BATCHES)
    kinds = {"flops": counted.once, "recomputed_flops": counted.repeated}
    for name, by_phase in kinds.items():
        for phase, flops in by_phase.items():
            value = flops // traced * params.gradient_accumulation
            yield metric_named("prediction", name).sample(value, "steady", phase)


def _build(params: Predictable) -> Workload:
    if isinstance(params, AttentionParams):
        return attention.build_on(NoData(), params)
    traced = min(params.gradient_accumulation, _TRACED_MICRO_BATCHES)
    less = params.model_copy(update={"gradient_accumulation": traced})
    return train_step.build_on(NoData(), less)


def _untraced_tokens(params: Predictable) -> Tensor:
    """Return inputs and targets of the micro-batches that are not traced."""
    count = 0
    if isinstance(params, TrainStepParams):
        count = max(0, params.gradient_accumulation - _TRACED_MICRO_BATCHES)
    shape = (2, count, params.batch_size, params.context_length)
    return torch.empty(shape, dtype=torch.int64, device="meta")


def _state_of(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def judge(trace: Trace, peaks: Replay, cap_bytes: int) -> Verdict:
    """Return the verdict for a limit on reserved memory, with a margin to both sides."""
    if _survives(trace, peaks, round(cap_bytes * (1 - MARGIN))):
        return "fits"
    return "borderline" if _survives(trace, peaks, round(cap_bytes * (1 + MARGIN))) else "oom"


def _if_uncertain(surely: Verdict, perhaps: Verdict) -> Verdict:
    """Return the verdict on a cell that takes at least one amount of memory, perhaps another."""
    return "perhaps" if perhaps == "oom" and surely != "oom" else perhaps


def _why_uncertain(surely: Replay, perhaps: Replay) -> str:
    """Return why a step may need less than predicted; empty if it does not."""
    steps: tuple[Step, ...] = ("second", "steady")
    if all(highest(surely, step)[1] == highest(perhaps, step)[1] for step in steps):
        return ""
    return (
        "NCCL may hold what DDP has sent until its next collective: in the second step the buckets "
        "that it replaces, in each step the copies of wire: bf16. It is predicted with them, and in "
        "some runs it needs less"
    )


def _second_step(trace: Trace) -> Replay:
    """Return the peaks of a second step that does what all later ones do."""
    found = replay(trace, CachingAllocator(), steady_steps=1)
    return {("second", phase): peaks for (step, phase), peaks in found.items() if step == "steady"}


def _survives(trace: Trace, peaks: Replay, cap_bytes: int) -> bool:
    reserved = max(found.reserved for found in peaks.values())
    requested = max(found.requested for found in peaks.values())
    is_plain = plainly_fits(reserved, requested, cap_bytes)
    if is_plain is not None:
        return is_plain
    # Near a limit the allocator releases free segments first, so that less may suffice than it
    # would reserve without a limit: only a replay under the limit decides.
    try:
        replay(trace, CachingAllocator(cap_bytes), STEADY_STEPS)
    except OutOfMemory:
        return False
    return True


def _samples(peaks: Replay, how: str) -> Iterator[Sample]:
    for (step, phase), found in peaks.items():
        sizes = {
            "peak_allocated_bytes": found.allocated,
            "peak_requested_bytes": found.requested,
            "peak_reserved_bytes": found.reserved,
            "held_allocated_bytes": found.held_allocated,
        }
        for name, nbytes in sizes.items():
            yield metric_named("prediction", name).sample(nbytes, step, phase, note=how)


def _composition(trace: Trace, peaks: Replay) -> Iterator[Sample]:
    phase, peak = highest(peaks, "steady")
    for role, nbytes in compose(trace, peak).items():
        yield Sample("prediction", "at_peak_bytes", "bytes", nbytes, "steady", phase, note=role)


def _closed_form(params: Predictable) -> Iterator[Sample]:
    if isinstance(params, AttentionParams):
        yield from attention_squares(params)
        return
    found = closed_form(params)
    if found is not None and found.moments:
        yield from found.samples()


def _at_least(params: TrainStepParams, reason: str, caps_bytes: Iterable[int]) -> Prediction:
    """Return a lower bound from the parameters of a model that does not run without data."""
    with suppress(Exception), gpu_emulated(lambda role: nullcontext()) as emulation, emulation:
        alone = params.model_copy(update={"gpus": 1, "parallel": "none"})
        model = train_step.build_on(NoData(), alone).model
        if model is None:
            return unknown(reason)
        count = trained = nbytes = 0
        for parameter in model.parameters():
            count += parameter.numel()
            trained += parameter.numel() * parameter.requires_grad
            nbytes += parameter.nbytes
        found = of_parameters(params, count, trained, nbytes)
        if found.nbytes:
            # Only the parameters are certain: one that the loss does not use has no gradient.
            (surely,) = (term.nbytes for term in found.terms if term.name == "parameters")
            verdicts: dict[int, Verdict] = {
                cap: "oom" if surely > cap else "unlikely"
                for cap in caps_bytes
                if found.nbytes > cap
            }
            if "unlikely" in verdicts.values():
                reason += "; with a gradient for each trained parameter it is too large"
            samples = (*unknown(reason).samples, *found.samples())
            return Prediction(CLOSED_FORM, reason, samples, verdicts)
    return unknown(reason)
