"""Compiles for a GPU that is not there: Inductor's generated code, run on tensors without data.

Inductor decides which results are stored, reused and saved for the backward pass when it generates
the Python code that launches the kernels. That code is run here with kernels that compute nothing,
so that each allocation and release happens as on a GPU. Triton is not needed.

Inductor's decisions depend on the device of the tensors. The graph is therefore traced on the CPU
(torch 2.13 loses gradients on `meta`: composite operations have no autograd kernel there), and then
its tensors are declared to be on a GPU.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._dynamo import device_interface
from torch._inductor import codecache, compile_fx
from torch._inductor import config as inductor_config
from torch._inductor.fx_passes import joint_graph
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map

from tasks.prediction.generated_kernels import GeneratedKernels
from tasks.prediction.operations.reductions import MULTIPROCESSORS, THREADS_PER_MULTIPROCESSOR
from tasks.prediction.operations.shapes import Arguments, Keywords, Operation
from tasks.spec.axes import select

_WITHOUT_CACHES = {
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "compile_threads": 1,
}
_CPU, _GPU = torch.device("cpu"), torch.device("cuda", 0)
Traced = Callable[[], AbstractContextManager[object]]


class _Properties:
    """Properties of an H100 or H200 that Inductor reads."""

    name = "NVIDIA H100"
    major, minor = 9, 0
    multi_processor_count = MULTIPROCESSORS
    max_threads_per_multi_processor = THREADS_PER_MULTIPROCESSOR
    max_threads_per_block = 1024
    regs_per_multiprocessor = 65536
    shared_memory_per_block_optin = 232448
    warp_size = 32
    gcnArchName = ""  # noqa: N815  # torch's name


def compile_without_gpu(gm: fx.GraphModule, inputs: Sequence[object], traced: Traced) -> object:
    """Compile a graph of Dynamo whose tensors are on `meta`: a backend of `torch.compile`.

    traced: context in which the graph's functions are called while they are traced.
    """
    mode = torch._guards.detect_fake_mode(inputs)
    _move_graph(gm, _CPU)
    return _compile(_opaque(gm, traced), inputs, mode)


def compile_function(
    function: Callable[..., Tensor], x: Tensor, owned: Sequence[Tensor], traced: Traced
) -> Callable[..., tuple[Tensor]]:
    """Compile a function of tensors on `meta`. The compiled one returns a tuple of its result.

    owned: parameters and buffers that the function takes after x. traced: context in which the
        function is called while it is traced.
    """
    graph = fx.Graph()
    nodes: list[Any] = [graph.placeholder(f"input{number}") for number in range(1 + len(owned))]
    graph.output((graph.call_module("traced", tuple(nodes)),))
    gm: Any = fx.GraphModule({"traced": _Opaque(function, traced)}, graph)
    # What Dynamo notes: no tensor but x may get another address, so that its memory is not reused.
    gm.meta["dynamo_compile_id"] = None
    gm._param_name_to_source = {}
    for node in nodes:
        node._dynamo_source = None
        node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
    del nodes[0].meta["tensor_dict"]
    return _compile(gm, [x, *owned], FakeTensorMode())


def _compile(
    gm: object, inputs: Sequence[object], mode: FakeTensorMode | None
) -> Callable[..., Any]:
    on_cpu = [_claimed(value, _CPU, mode) for value in inputs]
    with patch.object(compile_fx, "_recursive_joint_graph_passes", _joint_passes):
        compiled: Callable[..., Any] = _compile_joint(gm, on_cpu, inner_compile=_inner_compile)
        return compiled


class _Opaque(nn.Module):
    """A module that calls a graph within a context. The graph's parameters stay its inputs."""

    def __init__(self, call: Callable[..., object], traced: Traced) -> None:
        super().__init__()
        self._call = (call,)  # in a tuple, so that it is no submodule
        self._traced = traced

    def forward(self, *args: object) -> object:
        with self._traced():
            return self._call[0](*args)


def _opaque(gm: fx.GraphModule, traced: Traced) -> object:
    """Return a graph with the same inputs and outputs that calls the given one as a whole."""
    graph = fx.Graph()
    arguments = []
    for node in gm.graph.find_nodes(op="placeholder"):
        copied = graph.node_copy(node)
        copied._dynamo_source = getattr(node, "_dynamo_source", None)
        arguments.append(copied)
    called = graph.call_module("traced", tuple(arguments))
    (results,) = next(iter(gm.graph.find_nodes(op="output"))).args
    outputs = [graph.call_function(_item, (called, index)) for index in range(len(results))]
    graph.output(tuple(outputs))
    outer: Any = fx.GraphModule({"traced": _Opaque(gm, traced)}, graph)
    outer.meta = dict(gm.meta)
    outer._param_name_to_source = getattr(gm, "_param_name_to_source", {})
    return outer


def _item(values: Sequence[object], index: int) -> object:
    return values[index]


def _joint_passes(gm: fx.GraphModule, *args: object, **options: object) -> object:
    _move_graph(gm, _GPU)
    with _gpu_assumed():
        return _run_joint_passes(gm, *args, **options)


def _inner_compile(gm: fx.GraphModule, inputs: Sequence[object], **options: Any) -> object:
    with _gpu_assumed():
        return _compile_graph(gm, [_moved(value, _GPU) for value in inputs], **options)


# The functions that are replaced below, and those of torch that take more types than declared.
_run_joint_passes: Callable[..., object] = compile_fx._recursive_joint_graph_passes
_compile_joint: Any = compile_fx.compile_fx
_compile_graph: Callable[..., object] = compile_fx.compile_fx_inner
_deduce_on_gpu: Callable[..., object] = joint_graph.UniformValueConstantFolder._deduce_value


def _moved(value: object, device: torch.device) -> object:
    """Return the value; if it is a fake tensor, it claims to be on this device from now on."""
    if isinstance(value, FakeTensor):
        value.fake_device = device
    elif isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            _moved(getattr(value, name), device)
    return value


def _claimed(value: object, device: torch.device, mode: FakeTensorMode | None) -> object:
    if not isinstance(value, Tensor):
        return value
    if is_traceable_wrapper_subclass(value):
        return with_inner(value, lambda inner: _claimed(inner, device, mode))
    size, stride = value.size(), value.stride()
    data = torch.empty_strided(size, stride, dtype=value.dtype, device="meta")
    data.requires_grad_(value.requires_grad)
    return FakeTensor(mode, data, device)


def with_inner(value: Any, change: Callable[[Tensor], object]) -> object:
    """Return a tensor made of others, such as a quantized one, with these changed."""
    names, context = value.__tensor_flatten__()
    inner = {name: change(getattr(value, name)) for name in names}
    return type(value).__tensor_unflatten__(inner, context, value.size(), value.stride())


def _move_graph(gm: fx.GraphModule, device: torch.device) -> None:
    for node in gm.graph.nodes:
        for key in ("val", "example_value"):
            if key in node.meta:
                node.meta[key] = tree_map(lambda value: _moved(value, device), node.meta[key])
        node.args = tree_map(lambda value: _moved_device(value, device), node.args)
        node.kwargs = tree_map(lambda value: _moved_device(value, device), node.kwargs)
    gm.recompile()


def _moved_device(value: object, device: torch.device) -> object:
    return device if isinstance(value, torch.device) else value


class _OnCpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which the few numbers that Inductor folds are computed on the CPU."""

    def __torch_dispatch__(
        self,
        func: Operation,
        types: object,
        args: Arguments = (),
        kwargs: Keywords | None = None,
    ) -> object:
        options = {name: _moved_device(value, _CPU) for name, value in (kwargs or {}).items()}
        return func(*args, **options)


def _copy_without_guard(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy into a tensor. Torch would make the tensor's device current, which needs a GPU."""
    result: Tensor = torch.ops.aten.copy_.default(self, source, non_blocking)
    return result


def _invert_without_guard(self: Tensor) -> Tensor:
    """Invert a mask. The operator would make the tensor's device current, too."""
    return torch.bitwise_not(self)


def _deduce_on_cpu(folder: object, node: fx.Node) -> object:
    with _OnCpu():  # type: ignore[no-untyped-call]
        return _deduce_on_gpu(folder, node)


# How dropout takes its seed in generated code.
_LOOKUP_SEED: Any = torch.ops.prims.inductor_lookup_seed.default


def _seed_without_guard(seeds: Tensor, index: int) -> Tensor:
    """Return a scalar. Torch indexes the seeds, which makes their device current: it needs a GPU."""
    seed: Tensor = torch.ops.aten.select.int(seeds, 0, index)
    return seed.clone()


@contextmanager
def _gpu_assumed() -> Iterator[None]:
    """Answer the questions that Inductor asks about the GPU, and keep the generated code ready."""
    properties = _Properties()
    cuda: Any = device_interface.CudaInterface
    replaced: dict[str, object] = {
        "torch.cuda.get_device_properties": lambda *_: properties,
        "torch.cuda.get_device_capability": lambda *_: (properties.major, properties.minor),
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.device_count": lambda: 1,
        # Where torch was built with CUDA, some of its functions would start CUDA.
        "torch.cuda.is_available": lambda: False,
        "torch.utils._triton.triton_hash_with_backend": lambda: "",
        "torch._inductor.scheduler.has_triton": lambda: True,
    }
    interface: dict[str, Callable[..., object]] = {
        "get_device_properties": lambda *_: properties,
        "get_compute_capability": lambda *_: 10 * properties.major + properties.minor,
        "current_device": lambda: 0,
        "is_bf16_supported": lambda *_, **__: True,
    }
    with ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(patch(name, value))
        for name, value in interface.items():
            stack.enter_context(patch.object(cuda, name, staticmethod(value)))
        worker = select(interface, ("get_device_properties", "current_device"))
        for name, value in worker.items():
            stack.enter_context(patch.object(cuda.Worker, name, staticmethod(value)))
        stack.enter_context(
            patch.object(joint_graph.UniformValueConstantFolder, "_deduce_value", _deduce_on_cpu)
        )
        stack.enter_context(patch.object(_LOOKUP_SEED, "prim_meta_impl", _seed_without_guard))
        load = staticmethod(_load)
        stack.enter_context(patch.object(codecache.PyCodeCache, "load_by_key_path", load))
        stack.enter_context(patch.object(Tensor, "copy_", _copy_without_guard))
        stack.enter_context(patch.object(Tensor, "__invert__", _invert_without_guard))
        # Generated code must not reach the cache of real compilations. With `force_disable_caches`
        # torch would leave a folder behind for each graph.
        folder = stack.enter_context(TemporaryDirectory(prefix="predicted-"))
        stack.enter_context(patch.dict("os.environ", TORCHINDUCTOR_CACHE_DIR=folder))
        stack.enter_context(inductor_config.patch(_WITHOUT_CACHES))
        yield


def _empty_on_meta(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")


# Lines of generated code that need Triton or a GPU, and what replaces them.
_DROPPED = ("import triton", "from torch._inductor.runtime", "from torch._C import _cuda")
_REPLACED = {
    "torch.cuda._DeviceGuard(0)": "torch._ops.contextlib.nullcontext()",
    "torch.cuda.set_device(0)": "pass",
    "device='cuda:0'": "device='meta'",
    "device='cuda'": "device='meta'",
    "async_compile = AsyncCompile()": (
        "async_compile = generated_kernels\nempty_strided_cuda = empty_on_meta"
    ),
}


def _load(
    key: str, path: str, linemap: object = None, attrs: Mapping[str, object] | None = None
) -> types.ModuleType:
    """Return the module of generated code, with allocations on `meta` and without kernels."""
    with open(path, encoding="utf-8") as file:
        lines = [line for line in file.read().split("\n") if not line.startswith(_DROPPED)]
    code = "\n".join(lines)
    for found, replacement in _REPLACED.items():
        code = code.replace(found, replacement)
    module: Any = types.ModuleType(f"generated_{key}")
    given = {
        "generated_kernels": GeneratedKernels(),
        "empty_on_meta": _empty_on_meta,
        "get_raw_stream": lambda index: 0,
    }
    module.__dict__.update({**given, **(attrs or {}), "__file__": path, "key": key})
    exec(compile(code, path, "exec"), module.__dict__)  # Inductor's own code
    return module  # type: ignore[no-any-return]
