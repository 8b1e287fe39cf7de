"""Find the parts of the model that a compiled kernel computes, from Inductor's Python stacks.

A fused kernel belongs to all of its parts. The trace names the region of a compiled graph, but
not the graph. A region matches a graph if it calls the same matrix products in the same order,
and only kernels of that graph. If no graph matches, or several different ones, the parts stay
unknown.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tasks.traces.parts import known_label
from tasks.traces.timeline import Thread, WorkKind

JOINED_BY = "+"
_REGION = "## Call CompiledFxGraph"
_PRODUCT = re.compile(r"^(?:extern_kernels\.|aten::)(\w*mm)$")
_FRAME = re.compile(
    r'  File ".*", line \d+, in (?P<function>\S+)\n    (?P<code>.*)(?:\n    (?P<marks>[ ~^]*\^[ ~^]*))?'
)
_CALLED = re.compile(r"self\.(\w+)\(")
_ONLY_CALLED = re.compile(r"(?:return |\w+ = )?self\.(\w+)\([\w, ]*\)(?:  #.*)?")


@dataclass(frozen=True)
class Graph:
    """A compiled graph: parts by kernel, and kind and parts of each product in call order."""

    kernels: Mapping[str, str]
    products: Sequence[tuple[str, str]]


def read_graph(text: str, functions: Mapping[str, str]) -> Graph:
    """Read Inductor's JSON: stacks by `kernel:number`, numbered in call order.

    functions: labels of the parts that are functions.
    """
    # A kernel that several layers call has one entry for each call.
    stacks: dict[str, list[str]] = defaultdict(list)
    products: list[tuple[str, str]] = []
    by_key: Mapping[str, Sequence[str]] = json.loads(text)
    for key in sorted(by_key, key=lambda key: int(key.rpartition(":")[2])):
        name = key.rpartition(":")[0]
        product = _PRODUCT.match(name)
        if product:
            products.append((product[1], _joined(by_key[key], functions)))
        else:
            stacks[name] += by_key[key]
    return Graph(
        {name: _joined(of_kernel, functions) for name, of_kernel in stacks.items()}, products
    )


def _joined(stacks: Iterable[str], functions: Mapping[str, str]) -> str:
    return JOINED_BY.join(
        dict.fromkeys(part for stack in stacks if (part := part_of_stack(stack, functions)))
    )


def part_of_stack(stack: str, functions: Mapping[str, str]) -> str:
    """Return the innermost part in a stack: a function, or a module by the name of its attribute.

    If no name is known, return the name of the innermost module.
    """
    unknown = ""
    for depth, frame in enumerate(reversed(list(_FRAME.finditer(stack)))):
        if frame["function"] in functions:
            return functions[frame["function"]]
        called = _called(frame["code"], frame["marks"], innermost=depth == 0)
        if label := known_label(called):
            return label
        unknown = unknown or called
    return unknown


def _called(code: str, marks: str | None, innermost: bool) -> str:
    """Return the attribute of `self` that a line of code called, or an empty text.

    Stacks of torch 2.13 contain Python's markers (`^`) under the call; those of 2.11 do not.
    Without markers a line must contain only one call of an attribute. The innermost line may
    compute something else, so it must consist of the call.
    """
    if marks:
        found = _CALLED.match(code[marks.index("^") :])
        return found[1] if found else ""
    if innermost:
        only = _ONLY_CALLED.fullmatch(code)
        return only[1] if only else ""
    calls: list[str] = _CALLED.findall(code)
    return calls[0] if len(calls) == 1 else ""


class Regions:
    """The regions of compiled graphs in a thread, each with its graph."""

    def __init__(
        self, thread: Thread, kernels_at: Mapping[int, Sequence[str]], graphs: Sequence[Graph]
    ) -> None:
        """kernels_at: names of the launched kernels by the index of the launching span."""
        self._region = list(_regions(thread))
        self._product: dict[int, int] = {}  # which of its region's products an operator is
        products: dict[int, list[str]] = {}
        for index, span in enumerate(thread.spans):
            found = _PRODUCT.match(span.name) if span.kind is WorkKind.OPERATOR else None
            if found and self._region[index] >= 0:
                in_region = products.setdefault(self._region[index], [])
                self._product[index] = len(in_region)
                in_region.append(found[1])
        launched: dict[int, set[str]] = {}
        for index, names in kernels_at.items():
            if (
                index >= 0
                and self._region[index] >= 0
                and thread.operator[index] not in self._product
            ):
                launched.setdefault(self._region[index], set()).update(names)
        self._graph = {
            region: _only_fit(graphs, products.get(region, []), launched.get(region, set()))
            for region in {region for region in self._region if region >= 0}
        }
        self._operator = thread.operator

    def parts(self, index: int, kernel: str) -> str:
        """Return the parts of a kernel launched in the span at `index`, or an empty text."""
        region = self._region[index]
        graph = self._graph.get(region)
        if graph is None:
            return ""
        product = self._product.get(self._operator[index])
        return graph.kernels.get(kernel, "") if product is None else graph.products[product][1]


def _regions(thread: Thread) -> Iterator[int]:
    """Yield for each span the index of its innermost compiled region, or -1."""
    regions: list[int] = []
    for index, span in enumerate(thread.spans):
        around = thread.around[index]
        regions.append(
            index if span.name.startswith(_REGION) else regions[around] if around >= 0 else -1
        )
    return iter(regions)


def _only_fit(graphs: Sequence[Graph], products: list[str], kernels: set[str]) -> Graph | None:
    triton = {name for name in kernels if name.startswith("triton_")}
    fits = [
        graph
        for graph in graphs
        if [kind for kind, _ in graph.products] == products and triton <= graph.kernels.keys()
    ]
    return fits[0] if fits and all(graph == fits[0] for graph in fits) else None
