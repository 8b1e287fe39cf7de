"""Short texts that several packages print: durations, sizes, cell counts, reasons of failures."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from orchestrator.common.units import GIB, MIB
from tasks.spec.messages import escape_unprintable, shorten

_LONGEST_REASON = 160  # characters
# The last part of `package.module:Class`, of `hf:owner/model`, and of a key such as `model_args.layers`.
CLASS_NAME = re.compile(r"[^\s:]+:(?:[^\s:]*/)?([A-Za-z_][^\s:/]*)")
KEY_NAME = re.compile(r"\w+\.(.+)")


def shell_command(words: Iterable[str]) -> str:
    """Return a command to type, on one line whatever the names in it contain."""
    return " ".join(map(shell_word, words))


def shell_word(word: str) -> str:
    """Return a word of a command: quoted if necessary, and as `$'…'` if it is unprintable."""
    if word.isprintable():
        return shlex.quote(word)
    escaped = word.replace("\\", r"\\").replace("'", r"\'")
    return f"$'{escape_unprintable(escaped)}'"


def shell_path(path: object) -> str:
    """Return a path as a word of a command, which may begin with `-` as an option does."""
    return shell_word(path_argument(path))


def path_argument(path: object) -> str:
    """Return a path as an argument that no command takes for an option."""
    text = str(path)
    return f"./{text}" if text.startswith("-") else text


def without_separator(arguments: Sequence[str]) -> list[str]:
    """Return arguments without a `--`, to which options can be added."""
    if "--" not in arguments:
        return list(arguments)
    end = arguments.index("--")
    return [*arguments[:end], *map(path_argument, arguments[end + 1 :])]


def without_options(arguments: Sequence[str], options: Mapping[str, bool]) -> list[str]:
    """Return the arguments without these options.

    options: True for one that takes a value, as in `--out DIR` and `--out=DIR`.
    """
    left: list[str] = []
    is_value = False  # of an option that is left out
    for argument in arguments:
        if not (is_value or argument.partition("=")[0] in options):
            left.append(argument)
        is_value = options.get(argument, False) and not is_value
    return left


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, such as "1 cell" or "1,333 cells"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


cell_count = partial(counted, noun="cell")  # "1 cell" or "1,333 cells"


def cells_and_verb(count: int, singular: str, plural: str) -> str:
    """Return "1 cell needs" or "3 cells need"."""
    return f"{cell_count(count)} {singular if count == 1 else plural}"


def format_counts(counts: Iterable[tuple[str, int]]) -> str:
    """Return counts by status, such as "3 ok, 1 oom"."""
    return ", ".join(f"{count} {status}" for status, count in counts)


def value_text(value: object) -> str:
    """Return a value as it is typed after `axis=`."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def first_of(words: Sequence[str], most: int = 3) -> str:
    """Return the first words and the number of the others, such as "a, b, c and 3 more"."""
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def format_seconds(seconds: float) -> str:
    """Return a duration such as "12 s", "3 min 05 s" or "2 h 10 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def short_names(names: Iterable[str], pattern: re.Pattern[str]) -> dict[str, str]:
    """Return a short name for each name: the pattern's group, or the name if it does not match.

    A name stays whole if another one has the same short name.
    """
    short = {}
    for name in names:
        found = pattern.fullmatch(name)
        short[name] = found[1] if found else name
    counts = Counter(short.values())
    return {name: one if counts[one] == 1 else name for name, one in short.items()}


def end_location(stage: str, phase: str) -> str:
    """Return where an attempt ended, such as "measure/backward"."""
    return "/".join(filter(None, [stage, phase]))


def failure_reason(evidence: Mapping[str, object]) -> str:
    """Return in one line why an attempt failed, from the evidence in its row.

    An allocation that failed is described by its size. torch's own message for it is a paragraph
    whose first line names neither the limit nor the free memory. Of several ranks it names the one
    at fault.
    """
    numbers = {name: value for name, value in evidence.items() if isinstance(value, int)}
    if "asked_bytes" in numbers:
        reason = _failed_allocation(numbers)
    else:
        named = evidence.get("reason") or typed_message(evidence)
        reason = escape_unprintable(str(named).strip().split("\n")[0])
    rank = f"rank {numbers.get('rank')}"
    if "rank" in numbers and rank not in reason:
        reason = f"{rank}: {reason}"
    return shorten(reason, _LONGEST_REASON)


def typed_message(evidence: Mapping[str, object]) -> str:
    """Return the message of an exception after its type, such as "ValueError: it is too large".

    A message that has the type already stays as it is, and one of torch's out-of-memory errors too:
    the status of its attempt says the same.
    """
    exception, message = str(evidence.get("exception") or ""), str(evidence.get("message") or "")
    if not message:
        return exception
    kind = exception.rpartition(".")[2]
    if not kind or kind == "OutOfMemoryError" or message.startswith(kind):
        return message
    return f"{kind}: {message}"


def parameter_texts(params: str) -> dict[str, str]:
    """Return the parameters of a row, without those that are null or empty. params: JSON."""
    values = json.loads(params).items()
    return {name: str(value) for name, value in values if value not in (None, {})}


def evidence_text(name: str, value: object) -> str:
    """Return a piece of evidence as text. Bytes have commas between their thousands."""
    if isinstance(value, int) and name.endswith("_bytes"):
        return f"{value:,}"
    return str(value).strip()


def _failed_allocation(sizes: Mapping[str, int]) -> str:
    limit, free, total = map(sizes.get, ("limit_bytes", "free_bytes", "total_bytes"))
    reason = f"out of memory: asked for {_size(sizes['asked_bytes'])}"
    # A limit above the GPU's memory was not what stopped the allocation.
    if limit and limit <= (total or limit):
        return f"{reason}, limit {_size(limit)}"
    if free is not None and total:
        return f"{reason}, {_size(free)} of {_size(total)} free"
    return reason


def _size(nbytes: float) -> str:
    if nbytes < MIB:
        return f"{nbytes:,} bytes"
    if nbytes < GIB:
        return f"{nbytes / MIB:.4g} MiB"
    return f"{nbytes / GIB:.4g} GiB"


def letters_of(word: str) -> str:
    """Return a word in lower case without blanks, hyphens and other separators."""
    return re.sub(r"[\W_]+", "", word.casefold())
