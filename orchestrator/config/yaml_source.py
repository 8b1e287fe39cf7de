"""Load the YAML of a config safely, and name the file, line and key of each error in it.

YAML 1.2: `no` and `off` are words, `1e-3` is a number. Keys given twice are errors.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.constructor import RoundTripConstructor
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

from orchestrator.common.errors import ConfigError, suggestion

MAX_BYTES = 4_000_000
MAX_DEPTH = 100  # of nested brackets: the parser recurses into each of them
# Values of a document with its aliases written out. A few lines of nested aliases can stand for
# more values than memory can hold.
MAX_NODES = 200_000
KeyPath = tuple[str | int, ...]
Values = dict[str, Any]
Locate = Callable[[KeyPath], KeyPath]
_NESTING = {"[": 1, "{": 1, "]": -1, "}": -1}


@dataclass(frozen=True)
class Source:
    """The text that a config was loaded from, to find the line of an error."""

    name: str
    document: Any

    def where(self, place: KeyPath) -> str:
        """Return the file, line and key of a place, such as `full.yaml:12: grids[0].axes`."""
        line = _line(self.document, place)
        steps = [text if text.isprintable() else repr(text) for text in map(str, place)]
        path = re.sub(r"\.(\d+)", r"[\1]", ".".join(steps))
        return ": ".join(filter(None, [f"{self.name}:{line}" if line else self.name, path]))


def config_error(
    error: ValidationError,
    source: Source,
    locate: Locate = tuple,
    allowed: Callable[[KeyPath], Iterable[str]] | None = None,
) -> ConfigError:
    """Return the first error of a validation as one line with its place and its remedy.

    locate: returns the place in the file of a place in what was validated. allowed: returns the
    words that are allowed where an unknown one was found.
    """
    # A misspelt name is reported twice, as unknown and as missing: the first report helps more.
    first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    place, value = locate(first["loc"]), first["input"]
    where = source.where(place)
    match first["type"]:
        case "extra_forbidden":
            words = allowed(place) if allowed else ()
            return ConfigError(f"{where}: unknown name", suggestion(place[-1], words))
        case "literal_error":
            choices = re.findall(r"'([^']*)'|(\d+)", str(first["ctx"]["expected"]))
            words = map("".join, choices)
            return ConfigError(f"{where}: {value!r} is not allowed", suggestion(value, words))
        case "missing":
            return ConfigError(f"{where}: is missing")
    message = first["msg"].removeprefix("Value error, ")
    shown = "" if isinstance(value, dict) else f" (it is {value!r})"
    return ConfigError(f"{where}: {message}{shown}")


def load_yaml(text: str, name: str) -> Any:
    """Return the document of a text. `name` stands for it in errors. Raises ConfigError."""
    # Brackets in quotes and comments count too: a real config stays far below the limit.
    depths = itertools.accumulate(map(_NESTING.__getitem__, re.findall(r"[\[\]{}]", text)))
    if max(depths, default=0) > MAX_DEPTH:
        raise ConfigError(
            f"{name}: brackets within brackets, more than {MAX_DEPTH} deep", "Close them"
        )
    parser = YAML(typ="rt", pure=True)
    parser.Constructor = _BoundedConstructor
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # YAML allows an anchor that is given twice
            return parser.load(text)
    except _TooLarge as error:
        raise ConfigError(
            f"{name}: aliases unfold to more than {MAX_NODES} values",
            "Write the grid with fewer aliases",
        ) from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where, remedy = name, ""
        if mark:
            where = f"{name}:{mark.line + 1}"
            if any("\t" in line for line in text.splitlines()[mark.line : mark.line + 1]):
                remedy = "Indent with spaces: YAML allows no tabs"
        problem = " ".join(str(error.problem).split())
        raise ConfigError(f"{where}: not valid YAML: {problem}", remedy) from error
    # The parser raises many kinds of errors: TypeError for a mapping as a key, for example.
    except Exception as error:
        problem = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{name}: not valid YAML: {problem}") from error


class _TooLarge(Exception):
    pass


class _BoundedConstructor(RoundTripConstructor):
    def construct_document(self, node: Node) -> Any:
        # Counted before anything is built: the parser's own errors would write out all aliases.
        if _expanded_size(node, {}) > MAX_NODES:
            raise _TooLarge
        return super().construct_document(node)


def _expanded_size(node: Node, sizes: dict[int, int]) -> int:
    """Return the number of values in a document with its aliases written out."""
    if id(node) not in sizes:
        sizes[id(node)] = MAX_NODES + 1  # for a node that contains itself
        sizes[id(node)] = 1 + sum(_expanded_size(child, sizes) for child in _children(node))
    return sizes[id(node)]


def _children(node: Node) -> Iterable[Node]:
    if isinstance(node, MappingNode):
        return itertools.chain.from_iterable(node.value)
    return node.value if isinstance(node, SequenceNode) else ()


def plain(node: Any) -> Any:
    """Return a YAML document with Python's own types.

    Raises TypeError for a value that JSON cannot express, such as one with a tag.
    """
    if isinstance(node, dict):
        return {plain(key): plain(value) for key, value in node.items()}
    if isinstance(node, list):
        return [plain(value) for value in node]
    for kind in (bool, int, float, str):
        if isinstance(node, kind):
            return kind(node)
    if node is None:
        return None
    raise TypeError(f"{str(node)!r} is neither text nor number, true, false, null, list or mapping")


def _line(document: Any, place: KeyPath) -> int | None:
    """Return the line of the deepest part of a place that the document has."""
    node, line = document, None
    for step in place:
        try:
            if isinstance(node, CommentedMap):
                line = node.lc.key(step)[0] + 1
            elif isinstance(node, CommentedSeq):
                line = node.lc.item(step)[0] + 1
            node = node[step]
        except (KeyError, IndexError, TypeError):
            break
    return line
