"""Follows every storage of a workload from its first tensor to its release, on a device without
data.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Self

import torch
import torch._dynamo  # imported here: an import within an operation would keep its tensors alive
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from tasks.harness.workload import Workload
from tasks.prediction.operations.flops import FlopCount
from tasks.prediction.operations.gradient_sums import (
    ADD,
    ADD_IN_PLACE,
    in_backward,
    is_made_in_place,
    references_of_gradient,
)
from tasks.prediction.operations.kernels import (
    MULTIPLIES,
    NOT_ON_META,
    SCRATCH,
    grouped_product,
    has_unknown_workspace,
)
from tasks.prediction.operations.known_values import KnownValues
from tasks.prediction.operations.shapes import (
    Arguments,
    Keywords,
    Operation,
    ShapeMemory,
    tensors_of,
)
from tasks.prediction.replay import Label, Step, TensorLifetime, Trace

BUFFERS = "communication buffers"
PARTS = {
    "Embedding": "embedding",
    "RMSNorm": "norm",
    "LayerNorm": "norm",
    "RotaryEmbedding": "rope",
    "CausalSelfAttention": "attention",
    "SwiGLU": "ffn",
    "Block": "residual",
    "TransformerLM": "logits",
}
# Ends of the names of classes in transformers, such as LlamaRMSNorm.
_SUFFIXES = {
    "RMSNorm": "norm",
    "LayerNorm": "norm",
    "RotaryEmbedding": "rope",
    "Attention": "attention",
    "MLP": "ffn",
    "DecoderLayer": "residual",
    "ForCausalLM": "logits",
}
# A sort needs several times its input as scratch: too little to matter for the ids of experts.
_SMALL_SORT_BYTES = 1 << 20
# Constants that a model puts on the device may be made on the CPU. They are seen when they are copied.
_SMALL_ON_CPU_BYTES = 1 << 20
_ON_CPU = "it makes tensors of more than 1 MiB on the CPU, which are not counted"
_READ_NUMBER = torch.ops.aten._local_scalar_dense.default
_PUT_COPY, _PUT_IN_PLACE = torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default
_GROUPED = getattr(torch.ops.aten, "_grouped_mm", None) and torch.ops.aten._grouped_mm.default
_FAKE, _get_mode = torch._C._TorchDispatchModeKey.FAKE, torch._C._get_dispatch_mode
_RESIZE = torch.UntypedStorage.resize_
_NO_KEYWORDS: Keywords = {}
# Namespaces of operations that make no tensors. Their results are no part of the shape memory.
_WITHOUT_TENSORS = frozenset({"c10d", "profiler"})
_NAMES: dict[int, str] = {}  # of operations, by id because they are slow to hash
_RESIZES: dict[int, bool] = {}  # results of `_may_resize`, by the id of the operation
_MEMORY = ShapeMemory()  # for all cells of a process: those of one model share most shapes


class _Reference(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage, with its index in the trace and its address."""

    __slots__ = ("address", "index")
    address: int
    index: int | None  # None while the storage has no memory: its size is set to zero


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records a trace of all storages on the `meta` device while it is entered.

    It watches steps to know their phases.

    workspace_bytes: workspace that cuBLAS allocates once for each thread that multiplies.
    sharded: class of tensors whose operations run on the parts that the rank stores, or None.
    """

    def __init__(self, workspace_bytes: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self._stream = 0
        self.sharded: type[Tensor] | None = None
        self._workspace_bytes = workspace_bytes
        self._square: tuple[int, ...] | None = None
        self._parts: list[str] = []
        self._outside = ""
        self._role = ""
        self._known: dict[int, _Reference] = {}
        self._threads: set[bool] = set()
        self._hooks: list[RemovableHandle] = []
        self._updates = 0  # steps of optimizers that run now
        self._event: Callable[[int], None] = _ignore
        self._values = KnownValues()
        self.flops = FlopCount()  # of the current step
        references_of_gradient()  # counted now: in a backward pass it would be a part of the trace
        self.begin("built")

    def __torch_dispatch__(
        self,
        func: Operation,
        types: Iterable[type],
        args: Arguments = (),
        kwargs: Keywords | None = None,
    ) -> object:
        keywords = kwargs or _NO_KEYWORDS
        if self.sharded is not None and self.sharded in types:
            return NotImplemented
        if self._is_untracked(func):
            return func(*args, **keywords)
        func = _unwatched(func, args)
        name = _name(func)
        if name in NOT_ON_META:
            return None
        if func is _READ_NUMBER and (number := self._number(args[0])) is not None:
            return number
        result, made = _call(func, args, keywords)
        for tensor in made:
            self._see(tensor)
        self._see_resized(func, args, keywords)
        self._values.follow(func, args, keywords, result)
        self.flops.add(func, args, keywords, result, self._phase)
        if name in MULTIPLIES:
            self._see_product()
        if has_unknown_workspace(name) or (name == "sort" and args[0].nbytes > _SMALL_SORT_BYTES):
            self.trace.unfollowed.add(name)
        elif name in SCRATCH:
            self._pass_by(SCRATCH[name](args))
        return result

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        # An optimizer may work within a backward pass.
        self._hooks = [
            register_optimizer_step_pre_hook(lambda *_: self._count_updates(1)),
            register_optimizer_step_post_hook(lambda *_: self._count_updates(-1)),
        ]
        torch.UntypedStorage.resize_ = lambda *args: self._resize(*args)  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()
        torch.UntypedStorage.resize_ = _RESIZE  # type: ignore[method-assign]
        self._event = _ignore  # the workload itself is released after this

    def _is_untracked(self, func: Operation) -> bool:
        """Return True for an operation that makes no tensors, or those without a place on a GPU."""
        # A sharded tensor computes the shape of the whole one with fake tensors.
        is_fake = self.sharded is not None and _get_mode(_FAKE) is not None
        return is_fake or func.namespace in _WITHOUT_TENSORS

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled, and torch's guard would take a tenth of the time

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled code runs as such, and its allocations are seen

    def begin(self, step: Step) -> None:
        self._spans = self.trace.spans[step]
        self.flops = FlopCount()
        self._open("")

    def enter(self, phase: str) -> None:
        self._open(phase)

    def leave(self, phase: str) -> None:
        self._open("")

    def label(self, tensors: Iterable[Tensor], role: str) -> None:
        """Set the role of storages that were recorded before."""
        for index in self.indices_of(tensors):
            self.trace.labels[index] = self.trace.labels[index]._replace(role=role)

    def label_unlabelled(self, tensors: Iterable[Tensor], role: str) -> None:
        """Set the role of storages that were recorded before and have none."""
        for index in self.indices_of(tensors):
            label = self.trace.labels[index]
            self.trace.labels[index] = label._replace(role=label.role or role)

    @contextmanager
    def labelling(self, role: str) -> Iterator[None]:
        """Set the role of all storages that are recorded within this context."""
        self._role = role
        self._relabel()
        try:
            yield
        finally:
            self._role = ""
            self._relabel()

    @contextmanager
    def on_stream(self, number: int) -> Iterator[None]:
        """Record the storages that are made within this context as made on this stream."""
        before, self._stream = self._stream, number
        self._relabel()
        try:
            yield
        finally:
            self._stream = before
            self._relabel()

    def indices_of(self, tensors: Iterable[Tensor]) -> Iterator[int]:
        """Yield the indices of the storages of tensors that have been recorded."""
        for tensor in _plain_tensors(tensors):
            reference = self._known.get(tensor.untyped_storage()._cdata)
            if reference is not None and reference.index is not None:
                yield reference.index

    def follow(self, workload: Workload, outside: str) -> None:
        """Attribute allocations to parts of the model, and recognise gradients.

        Tensors over all pairs of positions are recognised by their shape.

        outside: the part of allocations outside of all modules.
        """
        self._square, self._outside = workload.square, outside
        modules = list(workload.model.modules()) if workload.model is not None else []
        within: set[nn.Module] = set()  # a hook within compiled code would be compiled with it
        for module in modules:
            if module._compiled_call_impl is not None:
                within.update(module.modules())
                module._compiled_call_impl = self._inside("compiled", module._compiled_call_impl)
        for module in modules:
            if module not in within:
                module.register_forward_pre_hook(self._entering(_part_of(module)))
                module.register_forward_hook(self._leaving, always_call=True)
        # By identity, since `attention` lists its inputs twice: they are leaves, too.
        trained = {id(tensor): tensor for tensor in workload.resident if tensor.requires_grad}
        for tensor in trained.values():
            tensor.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]

    def _open(self, phase: str) -> None:
        span = TensorLifetime(phase)
        self._spans.append(span)
        self._event = span.events.append
        self._phase = phase
        self._values.follows_floats = phase in ("", "forward")
        self._relabel()

    def _relabel(self) -> None:
        part = self._parts[-1] if self._parts else self._outside
        self._label = Label(self._phase, part, self._role, self._stream)
        self._square_label = self._label._replace(part="attention squares")

    def _see(self, tensor: Tensor) -> None:
        if not tensor.is_meta:
            if tensor.nbytes > _SMALL_ON_CPU_BYTES:
                self.trace.caveats.add(_ON_CPU)
            return
        if type(tensor) is not Tensor and is_traceable_wrapper_subclass(tensor):
            return  # its own storage is nominal, and the tensors in it are seen
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._known:
            reference = _Reference(storage, self._freed)
            reference.address = address
            reference.index = self._allocate(storage.nbytes(), self._label_of(tensor))
            self._known[address] = reference

    def _freed(self, reference: _Reference) -> None:
        del self._known[reference.address]
        if reference.index is not None:
            self._event(~reference.index)

    def _resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Resize a storage, for which torch allocates new memory and then frees the old."""
        reference = self._known.get(storage._cdata)
        if reference is not None and nbytes != storage.nbytes():
            before = reference.index
            # FSDP2 does so with the parameters that it gathers.
            label = self._label._replace(role=BUFFERS)
            reference.index = self._allocate(nbytes, label) if nbytes else None
            if before is not None:
                self._event(~before)
        _RESIZE(storage, nbytes)

    def _count_updates(self, more: int) -> None:
        self._updates += more

    def _see_resized(self, func: Operation, args: Arguments, kwargs: Keywords) -> None:
        """Record new memory for storages that torch has resized within an operation."""
        if not _may_resize(func):
            return
        for tensor in tensors_of((args[:1], kwargs)):
            storage = tensor.untyped_storage()
            reference = self._known.get(storage._cdata)
            if reference is None or reference.index is None:
                continue
            before, nbytes = reference.index, storage.nbytes()
            if nbytes != self.trace.sizes_bytes[before]:
                reference.index = self._allocate(nbytes, self._label_of(tensor))
                self._event(~before)

    def _allocate(self, nbytes: int, label: Label) -> int:
        index = len(self.trace.sizes_bytes)
        self.trace.sizes_bytes.append(nbytes)
        self.trace.labels.append(label)
        self._event(index)
        return index

    def _pass_by(self, sizes_bytes: Iterable[int]) -> None:
        """Record a kernel's scratch: allocated together, and released when the kernel is queued."""
        label = Label(self._phase, "", "workspace")
        for index in [self._allocate(nbytes, label) for nbytes in sizes_bytes]:
            self._event(~index)

    def _see_product(self) -> None:
        # On a GPU the backward pass runs on a separate thread.
        thread = in_backward()
        if self._workspace_bytes and thread not in self._threads:
            self._threads.add(thread)
            self._allocate(self._workspace_bytes, Label(self._phase, "", "workspace"))

    def _number(self, tensor: Tensor) -> int | float | bool | None:
        """Return the number that `tensor.item()` reads without data, or None if it is unknown."""
        known = self._values.read(tensor)
        # In an optimizer it is a norm that scales the step: no size depends on it.
        is_update = self._phase == "optimizer" or self._updates > 0
        is_scale = is_update and tensor.is_meta and tensor.is_floating_point()
        return 1.0 if known is None and is_scale else known

    def _label_of(self, tensor: Tensor) -> Label:
        # Comparing slices of the shapes would take longer.
        shape, square = tensor.shape, self._square
        is_square = (
            square is not None
            and len(shape) > 1
            and shape[-1] == square[-1]
            and shape[-2] == square[-2]
            and tensor.is_floating_point()
        )
        return self._square_label if is_square else self._label

    def _entering(self, part: str) -> Callable[..., None]:
        def entering(*_: object) -> None:
            self._parts.append(part or (self._parts[-1] if self._parts else ""))
            self._relabel()

        return entering

    def _inside(self, part: str, call: Callable[..., object]) -> Callable[..., object]:
        """Return the call, with its allocations attributed to a part of the model."""
        entering = self._entering(part)

        def inside(*args: object, **kwargs: object) -> object:
            entering()
            try:
                return call(*args, **kwargs)
            finally:
                self._leaving()

        return inside

    def _leaving(self, *_: object) -> None:
        self._parts.pop()
        self._relabel()

    def _accumulated(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.label([parameter.grad], "gradients")


def _unwatched(func: Operation, args: Arguments) -> Operation:
    """Return the operation that autograd would call if nothing watched it: it works in place."""
    # index_backward in FunctionsManual.cpp, unless a checkpoint runs a forward pass there
    if func is _PUT_COPY and in_backward() and not torch.is_grad_enabled():
        return _PUT_IN_PLACE
    is_sum = func is ADD and in_backward() and is_made_in_place(args)
    return ADD_IN_PLACE if is_sum else func


def _name(func: Operation) -> str:
    """Return the name of an operation without that of its overload."""
    name = _NAMES.get(id(func))
    if name is None:
        name = _NAMES[id(func)] = func.overloadpacket.__name__
    return name


def _part_of(module: nn.Module) -> str:
    """Return the part that a module stands for; empty for maps and containers within a part."""
    name = type(module).__name__
    if name in PARTS:
        return PARTS[name]
    for suffix, part in _SUFFIXES.items():
        if name.endswith(suffix):
            return part
    is_map = isinstance(module, nn.Linear) or name == "Linear"  # torch's, or the course's
    return "" if is_map or list(module.children()) else name


def _plain_tensors(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors, and those within wrappers such as quantised optimizer states."""
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            inner = (getattr(tensor, name) for name in names)
            yield from _plain_tensors(one for one in inner if isinstance(one, Tensor))
        else:
            yield tensor


def _call(func: Operation, args: Arguments, kwargs: Keywords) -> tuple[object, Iterable[Tensor]]:
    """Return the result of an operation, and the tensors in it that may have a new storage."""
    if func is _GROUPED and args[0].dtype != torch.bfloat16:
        offsets = args[2] if len(args) > 2 else kwargs.get("offs")
        product = grouped_product(args[0], args[1], offsets)
        return product, (product,)
    return _MEMORY.call(func, args, kwargs)


def _may_resize(func: Operation) -> bool:
    """Return True for an operation that writes into a tensor of another size."""
    if id(func) not in _RESIZES:
        has_result = any(argument.is_out for argument in func._schema.arguments)
        _RESIZES[id(func)] = has_result or _name(func).startswith("resize_")
    return _RESIZES[id(func)]


def _ignore(event: int) -> None:
    pass
