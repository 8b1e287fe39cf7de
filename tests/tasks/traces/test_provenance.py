"""Compiled code in a trace: which parts went into a kernel, by the stacks that Inductor keeps, and when nothing is said."""

from __future__ import annotations

import json

import pytest

from tasks.traces.attribution import ModuleEvidence, Work, attribute
from tasks.traces.chrome import from_json
from tasks.traces.provenance import Graph, part_of_stack, read_graph
from tests.support.traces import AUTOGRAD, KinetoTrace

FUNCTIONS = {"softmax": "softmax", "_scores": "scores"}


def stack(*frames: tuple[str, str, str]) -> str:
    """function, line of code, and what of it is marked, from the outside."""
    lines = []
    for function, code, called in frames:
        marks = " " * code.index(called) + "^" * len(called)
        lines.append(
            f'  File "/somewhere/model.py", line 21, in {function}\n    {code}\n    {marks}\n'
        )
    return "".join(lines)


def unmarked(trace: str) -> str:
    """As torch 2.11 writes it."""
    return "".join(line for line in trace.splitlines(keepends=True) if line.strip(" ^\n"))


NORM = stack(
    ("forward", "x = x + self.attn(self.ln1(x))", "self.ln1(x)"),
    (
        "forward",
        "scale = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + self.eps)",
        "wide.pow(2).mean(dim=-1, keepdim=True)",
    ),
)
QUERY = stack(
    ("forward", "x = x + self.attn(self.ln1(x))", "self.attn(self.ln1(x))"),
    (
        "forward",
        "query = self.rope(rearrange(self.q_proj(x), split, heads=self.num_heads))",
        "self.q_proj(x)",
    ),
    ("forward", "return functional.linear(x, self.weight)", "functional.linear(x, self.weight)"),
)
ROPE = stack(
    (
        "forward",
        "query = self.rope(rearrange(self.q_proj(x), split))",
        "self.rope(rearrange(self.q_proj(x), split))",
    ),
    ("forward", "even, odd = rearrange(x)", "rearrange(x)"),
)
SOFTMAX = stack(
    ("forward", "x = x + self.attn(self.ln1(x))", "self.attn(self.ln1(x))"),
    (
        "naive",
        "return _weigh(softmax(_scores(query, key, causal)), value)",
        "softmax(_scores(query, key, causal))",
    ),
    ("named", "return function(*args, **kwargs)", "function(*args, **kwargs)"),
    ("softmax", "shifted = scores - scores.max(dim=-1).values", "scores.max(dim=-1)"),
)
RESIDUAL = stack(("forward", "x = x + self.attn(self.ln1(x))", "x + self.attn(self.ln1(x))"))
QUERY_ALONE = stack(
    ("forward", "x = x + self.attn(normed)", "self.attn(normed)"),
    ("forward", "query = self.q_proj(x)", "self.q_proj(x)"),
    ("forward", "return functional.linear(x, self.weight)", "functional.linear(x, self.weight)"),
)
SUM = stack(
    ("forward", "x = self.layers(x)", "self.layers(x)"),
    ("forward", "return x + self.ffn(normed)  # type: ignore", "x + self.ffn(normed)"),
)
OWN = stack(
    ("forward", "x = self.mixer(x)", "self.mixer(x)"),
    ("forward", "return self.c_proj(x)", "self.c_proj(x)"),
    ("f", "a", "a"),
)


@pytest.mark.parametrize(
    ("trace", "part"),
    [
        (NORM, "norm"),
        (QUERY, "q projection"),
        (ROPE, "rope"),
        (SOFTMAX, "softmax"),
        (RESIDUAL, ""),
        (OWN, "c_proj"),
        (unmarked(NORM), ""),  # of a line that calls several modules none is picked
        (unmarked(QUERY_ALONE), "q projection"),
        (unmarked(SUM), "residual"),
        ('  File "/x.py", line 1, in forward\n    self.ffn(x)\n', "ffn"),
        ("", ""),
    ],
)
def test_a_stack_trace_gives_the_part_of_the_model(trace: str, part: str) -> None:
    assert part_of_stack(trace, FUNCTIONS) == part


FORWARD = {
    "extern_kernels.mm:2": [QUERY],
    "triton_red_fused_mean_pow_rsqrt_0:1": [NORM, NORM, RESIDUAL],
    "triton_per_fused_div_exp_max_sub_1:10": [ROPE, SOFTMAX],
    "extern_kernels.bmm:9": [SOFTMAX],
    "triton_red_fused_mean_pow_rsqrt_0:11": [
        ROPE
    ],  # the same code for another layer: it is of the parts of both
}


def test_graphs_are_read_in_the_order_of_their_calls() -> None:
    graph = read_graph(json.dumps(FORWARD), FUNCTIONS)
    assert graph.kernels == {
        "triton_red_fused_mean_pow_rsqrt_0": "norm+rope",
        "triton_per_fused_div_exp_max_sub_1": "rope+softmax",
    }
    assert graph.products == [("mm", "q projection"), ("bmm", "softmax")]


@pytest.fixture
def trace() -> KinetoTrace:
    """A compiled forward and backward pass, whose kernels have the same names."""
    written = KinetoTrace()
    written.phase("forward", 0, 100)
    written.operator("CompiledFunction", 5, 95, sequence=4)
    written.operator("## Call CompiledFxGraph fabc ##", 10, 90)
    written.kernel("triton_red_fused_0", 12, 20, 30, driver=True)
    written.operator("aten::mm", 20, 30)
    written.kernel("nvjet_tst_forward", 25, 30, 40)
    written.phase("backward", 110, 200)
    written.operator("CompiledFunctionBackward", 115, 195, AUTOGRAD, sequence=4, backward=True)
    written.operator("## Call CompiledFxGraph fdef ##", 120, 190, AUTOGRAD)
    for start, name in ((130, "aten::bmm"), (140, "aten::mm")):
        written.operator(name, start, start + 8, AUTOGRAD)
        written.kernel(f"nvjet_tst_{name[-3:]}", start + 2, start + 10, start + 20, AUTOGRAD)
    written.kernel("triton_red_fused_0", 160, 170, 180, AUTOGRAD, driver=True)
    return written


GRAPHS = (
    Graph({"triton_red_fused_0": "norm+residual"}, [("mm", "q projection")]),
    Graph({"triton_red_fused_0": "softmax"}, [("bmm", "scores"), ("mm", "ffn")]),
)


def works_of(trace: KinetoTrace, *graphs: Graph) -> dict[tuple[str, str], Work]:
    return {
        (work.phase, work.name): work for work in attribute(from_json(trace.text), graphs=graphs)
    }


def test_a_region_is_of_the_graph_that_calls_the_same(trace: KinetoTrace) -> None:
    works = works_of(trace, *GRAPHS, GRAPHS[0])  # one graph may have been kept twice
    assert works["forward", "triton_red_fused_0"].part == "norm+residual"
    assert works["forward", "triton_red_fused_0"].how == ModuleEvidence.PROVENANCE
    assert works["backward", "triton_red_fused_0"].part == "softmax"
    assert works["forward", "nvjet_tst_forward"].part == "q projection"
    assert (works["backward", "nvjet_tst_bmm"].part, works["backward", "nvjet_tst_:mm"].part) == (
        "scores",
        "ffn",
    )
    assert all(work.kind == "GEMM" for work in works.values() if work.name.startswith("nvjet"))


@pytest.mark.parametrize(
    "graphs",
    [
        (),
        (GRAPHS[0], Graph({"triton_red_fused_0": "rope"}, [("mm", "o projection")])),
        (Graph({"triton_red_fused_0": "norm"}, [("bmm", "q projection")]),),
        (Graph({"triton_poi_another": "norm"}, [("mm", "q projection")]),),
    ],
    ids=["none kept", "two fit", "other products", "a kernel it has not"],
)
def test_kernels_get_no_part_if_no_graph_or_several_graphs_fit(
    trace: KinetoTrace, graphs: tuple[Graph, ...]
) -> None:
    works = works_of(trace, *graphs)
    for name in ("triton_red_fused_0", "nvjet_tst_forward"):
        assert (works["forward", name].part, works["forward", name].how) == (
            "",
            ModuleEvidence.LAUNCH,
        )
