"""Find the parts of the model that a compiled kernel computes, from Inductor's Python stacks.

A fused kernel belongs to all of its parts. The trace names the region of a compiled graph, but
not the graph. A region matches a graph if it calls the same matrix products in the same order,
and only kernels of that graph. Without a single matching graph the parts stay unknown.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tasks.traces.parts import known_label
from tasks.traces.timeline import Thread

JOINED_BY = "+"
_REGION = "## Call CompiledFxGraph"
_PRODUCT = re.compile(r"^(?:extern_kernels\.|aten::)(\w*mm)$")
_FRAME = re.compile(
    r'  File ".*", line \d+, in (?P<function>\S+)\n    (?P<code>.*)'
    r"(?:\n    (?P<marks>[ ~^]*\^[ ~^]*))?"
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
    kernels = {name: _joined(stacks[name], functions) for name in stacks}
    return Graph(kernels, products)


def _joined(stacks: Iterable[str], functions: Mapping[str, str]) -> str:
    parts = dict.fromkeys(part_of_stack(stack, functions) for stack in stacks)
    return JOINED_BY.join(filter(None, parts))


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
    """Return the attribute of `self` that a line of code called, or an empty text."""
    # Stacks of torch 2.13 contain Python's markers (`^`) under the call; those of 2.11 do not.
    if marks:
        found = _CALLED.match(code[marks.index("^") :])
    # The innermost line may compute something else, so it must consist of the call.
    elif innermost:
        found = _ONLY_CALLED.fullmatch(code)
    else:
        calls: list[str] = _CALLED.findall(code)
        return calls[0] if len(calls) == 1 else ""
    return found[1] if found else ""


class Regions:
    """The regions of compiled graphs in a thread, each with its graph."""

    def __init__(
        self, thread: Thread, kernels_at: Mapping[int, Sequence[str]], graphs: Sequence[Graph]
    ) -> None:
        """kernels_at: names of the launched kernels by the index of the launching span."""
        self._region = _regions(thread)
        self._operator = thread.operator
        self._product: dict[int, int] = {}  # an operator's index among its region's matrix products
        products: dict[int, list[str]] = defaultdict(list)  # the kinds of products in each region
        for index, span in enumerate(thread.spans):
            if span.is_operator and (found := _PRODUCT.match(span.name)):
                in_region = products[self._region[index]]
                self._product[index] = len(in_region)
                in_region.append(found[1])
        launched: dict[int, set[str]] = defaultdict(set)
        for index, names in kernels_at.items():
            # Kernels of products do not count: their names are those of cuBLAS, not the compiler's.
            if index >= 0 and thread.operator[index] not in self._product:
                launched[self._region[index]].update(names)
        self._graph = {}
        for region in set(self._region) - {-1}:
            self._graph[region] = _only_match(graphs, products[region], launched[region])

    def parts(self, index: int, kernel: str) -> str:
        """Return the parts of a kernel launched in the span at `index`, or an empty text."""
        region = self._region[index]
        graph = self._graph.get(region)
        if graph is None:
            return ""
        product = self._product.get(self._operator[index])
        if product is None:
            return graph.kernels.get(kernel, "")
        return graph.products[product][1]


def _regions(thread: Thread) -> list[int]:
    """Return for each span the index of its innermost compiled region, or -1."""
    regions: list[int] = []
    for index, span in enumerate(thread.spans):
        around = thread.around[index]
        if span.name.startswith(_REGION):
            regions.append(index)
        else:
            regions.append(regions[around] if around >= 0 else -1)
    return regions


def _only_match(graphs: Sequence[Graph], products: list[str], kernels: set[str]) -> Graph | None:
    triton = {name for name in kernels if name.startswith("triton_")}
    matches: list[Graph] = []
    for graph in graphs:
        kinds = [kind for kind, _ in graph.products]
        # Equal layers may be compiled into several graphs that are alike in everything.
        if kinds == products and triton <= graph.kernels.keys() and graph not in matches:
            matches.append(graph)
    return matches[0] if len(matches) == 1 else None
