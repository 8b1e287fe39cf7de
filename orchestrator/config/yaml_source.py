"""Loads a config's YAML safely, and names the file, line and key of everything that is wrong in it.

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

MAX_NODES = 200_000  # of the document with its aliases written out: more is a bomb, not a sweep
MAX_BYTES = 4_000_000
MAX_DEPTH = 100  # of brackets: what is read goes down into each of them
KeyPath = tuple[str | int, ...]
Values = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """Where a config came from, to say in which line of it something is wrong."""

    name: str
    document: Any

    def where(self, place: KeyPath) -> str:
        line = _line(self.document, place)
        path = re.sub(r"\.(\d+)", r"[\1]", ".".join(_in_a_line(step) for step in place))
        return f"{self.name}{f':{line}' if line else ''}{f': {path}' if path else ''}"


def _in_a_line(step: str | int) -> str:
    """As it was written; what would break or darken the line, as Python writes it."""
    return str(step) if str(step).isprintable() else repr(step)


def config_error(
    error: ValidationError,
    source: Source,
    base: KeyPath | Callable[[KeyPath], KeyPath],
    allowed: Any,
) -> ConfigError:
    """The first complaint of a validation, in one line with its place and its remedy.

    base: where what was validated stands, or what gives a place in the file for one in that. allowed(place) lists the words that
    may stand at a place where an unknown one was found.
    """
    # A misspelt name is reported twice, as unknown and as missing: the first is what helps.
    first = min(error.errors(), key=lambda complaint: complaint["type"] != "extra_forbidden")
    place = base(first["loc"]) if callable(base) else (*base, *first["loc"])
    where = source.where(place)
    match first["type"]:
        case "extra_forbidden":
            return ConfigError(f"{where}: unknown name", suggestion(place[-1], allowed(place)))
        case "literal_error":
            choices = re.findall(r"'([^']*)'|(\d+)", str(first["ctx"]["expected"]))
            words = [quoted or number for quoted, number in choices]
            return ConfigError(
                f"{where}: {first['input']!r} is not allowed", suggestion(first["input"], words)
            )
        case "missing":
            return ConfigError(f"{where}: is missing")
        case _:
            message = first["msg"].removeprefix("Value error, ")
            shown = "" if isinstance(first["input"], dict) else f" (it is {first['input']!r})"
            return ConfigError(f"{where}: {message}{shown}")


def load_yaml(text: str, name: str) -> Any:
    if _depth(text) > MAX_DEPTH:
        raise ConfigError(
            f"{name}: brackets within brackets, more than {MAX_DEPTH} deep", "Close them"
        )
    parser = YAML(typ="rt", pure=True)
    parser.Constructor = _BoundedConstructor
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an anchor that is given twice, which YAML allows
            return parser.load(text)
    except _TooLarge as error:
        raise ConfigError(
            f"{name}: aliases unfold to more than {MAX_NODES} values",
            "Write the grid with fewer aliases",
        ) from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        tab = "\t" in (text.splitlines()[mark.line : mark.line + 1] or [""])[0] if mark else False
        remedy = "Indent with spaces: YAML allows no tabs" if tab else ""
        raise ConfigError(
            f"{where}: not valid YAML: {' '.join(str(error.problem).split())}", remedy
        ) from error
    except Exception as error:  # the parser stumbles in as many ways as there are texts, over a mapping for a key, for one
        said = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{name}: not valid YAML: {said}") from error


class _TooLarge(Exception):
    pass


class _BoundedConstructor(RoundTripConstructor):
    """Looks at what was written before it makes anything of it: to complain of a bomb, it would write it out."""

    def construct_document(self, node: Node) -> Any:
        if _expanded_size(node) > MAX_NODES:
            raise _TooLarge
        return super().construct_document(node)


def _depth(text: str) -> int:
    """How deep brackets stand within brackets, at most: those in quotes and comments are counted as well."""
    steps = (1 if bracket in "[{" else -1 for bracket in re.findall(r"[\[\]{}]", text))
    return max(itertools.accumulate(steps), default=0)


def _expanded_size(node: Node, sizes: dict[int, int] | None = None) -> int:
    """How many values a document has with its aliases written out, counted without writing them out."""
    sizes = {} if sizes is None else sizes
    if id(node) not in sizes:
        sizes[id(node)] = MAX_NODES + 1  # what contains itself is endless
        sizes[id(node)] = 1 + sum(_expanded_size(child, sizes) for child in _children(node))
    return sizes[id(node)]


def _children(node: Node) -> Iterable[Node]:
    if isinstance(node, MappingNode):
        return itertools.chain.from_iterable(node.value)
    return node.value if isinstance(node, SequenceNode) else ()


def plain(node: Any) -> Any:
    """A YAML document as Python's own types. Raises TypeError for what JSON has no word for, such as a tagged value."""
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
    """The line of the deepest part of `place` that the document has."""
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
