"""Load the YAML of a config safely, and name the file, line and key of each error in it.

YAML 1.2: `no` and `off` are words, `1e-3` is a number. Keys given twice are errors.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from orchestrator.common.errors import ConfigError
from orchestrator.config.hints import LONGEST_VALUE, quoted, unknown_name, unknown_value
from tasks.spec.messages import shorten
from tasks.spec.parameters import LARGEST_INT

MAX_BYTES = 400_000
MAX_DEPTH = 100  # of values within values: the parser recurses into each of them
MAX_ITEMS = 10_000  # of one list or mapping
# Values of a document with its aliases written out. A few lines of nested aliases can stand for
# more values than memory can hold.
MAX_NODES = 200_000
KeyPath = tuple[str | int, ...]
Locate = Callable[[KeyPath], KeyPath]
ExplainUnknown = Callable[[str, KeyPath], tuple[str, str]]
_TAG = "tag:yaml.org,2002:"
_NESTING = {"[": 1, "{": 1, "]": -1, "}": -1}
_TOO_DEEP = (f"values within values, more than {MAX_DEPTH} deep", "Close the brackets")
_VALUE_TAGS = frozenset({
    f"{_TAG}{name}" for name in ("str", "int", "float", "bool", "null", "seq", "map", "merge")
})  # fmt: skip
_KEY_TAGS = frozenset({f"{_TAG}{name}" for name in ("str", "int", "float", "merge")})
_UNION_TAG = re.compile(r"literal\[|constrained-")


@dataclass(frozen=True)
class Source:
    """The text that a config was loaded from, to find the line of an error."""

    name: str
    document: object

    def where(self, place: KeyPath) -> str:
        """Return the file, line and key of a place, such as `full.yaml:12: grids[0].axes`."""
        place = _without_index_of_scalar(self.document, place)
        line = _line(self.document, place)
        steps = []
        for step in map(str, place):
            printable = step if step.isprintable() else repr(step)
            steps.append(shorten(printable, LONGEST_VALUE))
        path = re.sub(r"\.(\d+)", r"[\1]", ".".join(steps))
        return ": ".join(filter(None, [f"{self.name}:{line}" if line else self.name, path]))


def explain_unknown_key(allowed: Iterable[str], where: str, place: KeyPath) -> tuple[str, str]:
    """Return the problem and the remedy for the last step of a place, which is not allowed."""
    return unknown_name(where, str(place[-1]), allowed)


_WITHOUT_SUGGESTION = partial(explain_unknown_key, ())


# Problem and remedy, by pydantic's type of error.
_PROBLEMS = {
    "missing": ("is missing", ""),
    "dict_type": ("is not a mapping", "Write NAME: value"),
    "model_type": ("is not a mapping", "Write NAME: value"),
}


def config_error(
    error: ValidationError,
    source: Source,
    locate: Locate = tuple,
    explain_unknown: ExplainUnknown = _WITHOUT_SUGGESTION,
) -> ConfigError:
    """Return the first error of a validation as one line with its place and its remedy.

    locate: returns the place in the file of a place in what was validated.
    explain_unknown: returns the problem and the remedy for an unknown key at a place in the file.
    """
    # A misspelt name is reported twice, as unknown and as missing: the first report helps more.
    first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    place, value = locate(_without_tags(first["loc"])), first["input"]
    where = source.where(place)
    if isinstance(value, list) and place[-2:-1] in (("fixed",), ("defaults",)):
        return ConfigError(f"{where}: is a list", "Put it under axes: each value is then a cell")
    if first["type"] in _PROBLEMS:
        problem, remedy = _PROBLEMS[first["type"]]
        return ConfigError(f"{where}: {problem}", remedy)
    match first["type"]:
        case "extra_forbidden":
            return ConfigError(*explain_unknown(where, place))
        case "literal_error":
            choices = re.findall(r"'([^']*)'|(\d+)", str(first["ctx"]["expected"]))
            words = map("".join, choices)
            return ConfigError(*unknown_value(where, str(first["loc"][0]), value, words))
        case "list_type" if place[-1:] == ("zip",):
            form = "zip: [{size: [tiny, mini], batch_size: [2, 1]}]"
            return ConfigError(f"{where}: is not a list of groups", f"Write {form}")
        case "list_type" if value is None:
            return ConfigError(f"{where}: has no value", "Write a list, or leave it out")
        case "list_type" if not isinstance(value, dict):
            item = shorten(str(value), LONGEST_VALUE)
            fixed = ", or put it under fixed" if "zip" in place else ""
            return ConfigError(f"{where}: is not a list", f"Write [{item}]{fixed}.")
        case "string_pattern_mismatch" if place == ("name",):
            rule = "Use letters, digits and . _ -, and begin with a letter or a digit"
            return ConfigError(f"{where}: {quoted(value)} cannot name a folder", rule)
    message = first["msg"].removeprefix("Value error, ")
    if not isinstance(value, dict):
        message += f" (it is {quoted(value)})"
    return ConfigError(f"{where}: {message}", _remedy_for_text(value))


def _remedy_for_text(value: object) -> str:
    """Return how to write a number or no value, for a text that stands in its place."""
    text = value.strip() if isinstance(value, str) else ""
    if text.lower() == "none":
        return "For no value, write null"
    return "Write it without quotes" if text.isdecimal() else ""


def _without_tags(place: KeyPath) -> KeyPath:
    """Return a place without the steps that pydantic adds for the members of a union."""
    return tuple(step for step in place if not _UNION_TAG.match(str(step)))


def load_yaml(text: str, name: str, has_lines: bool = True) -> object:
    """Return the document of a text. Raises ConfigError.

    name: stands for the text in errors, followed by the line if the text has lines.
    """
    # For nested brackets the scanner takes quadratic time before the composer sees the first one.
    # Brackets in quotes and comments count too: a real config stays far below the limit.
    depths = itertools.accumulate(map(_NESTING.__getitem__, re.findall(r"[\[\]{}]", text)))
    if max(depths, default=0) > MAX_DEPTH:
        raise ConfigError(f"{name}: {_TOO_DEEP[0]}", _TOO_DEEP[1])
    parser = YAML(typ="rt", pure=True)
    parser.Composer = _BoundedComposer
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # YAML allows an anchor that is given twice
            return parser.load(text)
    except _Refused as error:
        line = f"{name}:{error.line}" if has_lines else name
        where = Source(line, None).where(error.place)
        raise ConfigError(f"{where}: {error.problem}", error.remedy) from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where, remedy = name, ""
        if mark and has_lines:
            where = f"{name}:{mark.line + 1}"
            if any("\t" in line for line in text.splitlines()[mark.line : mark.line + 1]):
                remedy = "Indent with spaces: YAML allows no tabs"
        problem = " ".join(str(error.problem).split())
        raise ConfigError(f"{where}: not valid YAML: {problem}", remedy) from error
    # The parser raises many kinds of errors: TypeError for a mapping as a key, for example.
    except Exception as error:
        problem = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{name}: not valid YAML: {problem}") from error


class _Refused(Exception):
    """A part of a document that is valid YAML, and that no config needs."""

    def __init__(self, node: Node, problem: str, remedy: str, place: KeyPath = ()) -> None:
        self.line = node.start_mark.line + 1
        self.problem = problem
        self.remedy = remedy
        self.place = place


class _BoundedComposer(Composer):
    """Composer that stops at too many values, before it has read all of them.

    What nobody could store is refused before anything is built: the parser hashes keys by all that
    they hold, and Python refuses to print long integers.
    """

    _depth = 0

    def compose_node(self, parent: Node, index: Any) -> Any:
        if parent is not None and len(parent.value) >= MAX_ITEMS:
            kind = "mapping" if isinstance(parent, MappingNode) else "list"
            problem = f"a {kind} has more than {MAX_ITEMS:,} values"
            raise _Refused(parent, problem, "Write the grid with fewer of them")
        if self._depth > MAX_DEPTH:
            raise _Refused(parent, *_TOO_DEEP)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if parent is None and _checked_size(node, (), {}) > MAX_NODES:
            problem = f"aliases unfold to more than {MAX_NODES} values"
            raise _Refused(node, problem, "Write the grid with fewer aliases")
        return node


def _checked_size(node: Node, place: KeyPath, sizes: dict[int, int]) -> int:
    """Return the number of values in a document with its aliases written out.

    Raise _Refused for a scalar that cannot be stored or printed, and a key that is no name.
    sizes: those of the nodes that were checked already.
    """
    if id(node) in sizes:
        return sizes[id(node)]
    sizes[id(node)] = MAX_NODES + 1  # for a node that contains itself
    if node.tag not in _VALUE_TAGS:
        problem = f"a {str(node.tag).removeprefix(_TAG)} is neither text, number, list nor mapping"
        raise _Refused(node, problem, "Write it without a tag, or in quotes", place)
    size = 1
    if isinstance(node, ScalarNode):
        _check_scalar(node, place)
    elif isinstance(node, SequenceNode):
        for index, value in enumerate(node.value):
            size += _checked_size(value, (*place, index), sizes)
    elif isinstance(node, MappingNode):
        for key, value in node.value:
            if key.tag not in _KEY_TAGS:
                kind = str(key.tag).removeprefix(_TAG).replace("map", "mapping")
                raise _Refused(key, f"a key is a {kind}", "Write NAME: value")
            size += _checked_size(key, place, sizes)
            size += _checked_size(value, (*place, str(key.value)), sizes)
    sizes[id(node)] = size
    return size


def _check_scalar(node: ScalarNode, place: KeyPath) -> None:
    text = str(node.value)
    problem, remedy = "", ""
    if node.tag == f"{_TAG}float" and text.lower().lstrip("+-") in (".inf", ".nan"):
        problem, remedy = f"{float(text.replace('.', ''))} is not finite", "Write a number"
    elif node.tag == f"{_TAG}int":
        try:
            fits = abs(int(text, 0)) <= LARGEST_INT
        except ValueError:  # leading zeros, or more digits than Python reads
            fits = len(text) <= len(str(LARGEST_INT))
        if not fits:
            problem = "integers must fit in 63 bits"
    # "\ud83d" in double quotes is a letter of JSON only together with its other half, and YAML
    # does not join them. No file can store it as UTF-8.
    elif re.search("[\ud800-\udfff]", text):
        problem, remedy = "a text has half of a surrogate pair", "Write the letter itself"
    if problem:
        raise _Refused(node, problem, remedy, place)


def plain(node: object) -> Any:
    """Return a YAML document with Python's own types.

    Raises TypeError for a value that JSON cannot express, such as one with a tag.
    """
    if isinstance(node, dict):
        return {plain(key): plain(value) for key, value in node.items()}
    if isinstance(node, list):
        return list(map(plain, node))
    for kind in (bool, int, float, str):
        if isinstance(node, kind):
            return kind(node)
    if node is None:
        return None
    raise TypeError(f"{str(node)!r} is neither text nor number, true, false, null, list or mapping")


def _without_index_of_scalar(document: object, place: KeyPath) -> KeyPath:
    """Return a place without the index of a value that the document has instead of a list."""
    node: Any = document
    for number, step in enumerate(place):
        if isinstance(step, int) and not isinstance(node, list | None):
            return place[:number]
        try:
            node = node[step]
        except (KeyError, IndexError, TypeError):
            break
    return place


def _line(document: object, place: KeyPath) -> int | None:
    """Return the line of the deepest part of a place that the document has."""
    node: Any = document
    line = None
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
