"""Removes what identifies a machine or its user from published results, or replaces it:

a host's name             `host 1`; cells of one host share it
a GPU's id                `GPU 3f2a91c0`, a digest, the same in every publication
an absolute path          its part below this program, a package or a sweep folder; else its last
a network address         `…`, as are addresses of pages that are not on a list, and of mails
a name with two dots      `…`, unless it belongs to a package on a list: it may be a host
a word like a password    `…`: with a known beginning, or with many letters and digits mixed
a process id              nothing
an environment variable   its value, everywhere, unless it configures torch or CUDA
the output of a cell      nothing
a traceback               its frames, without their code and without the message
a message or a reason     its numbers, the words in words.txt, and what parameters contain; every
                          other word is `…`: it may be a password, a host or a user

Names of code stay: those of kernels, and of functions in call chains and tracebacks. So do the
parameters of cells, because the ids of cells are made from them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from ipaddress import ip_address
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

import pandas as pd

from orchestrator.common.hashing import sha256
from orchestrator.store.layout import REDACTED

# In quotes, a path may contain blanks; options of compilers such as -I precede one directly.
_QUOTED_PATH = re.compile(r"""(?<=['"])(?:~[\w.-]*)?/[^'"\n]+(?=['"])""")
_PATH = re.compile(r"(?:(?<![\w.…~/-])|(?<=\s-[A-Z])|(?<=^-[A-Z]))(?:~[\w.-]*)?(?:/[\w.+@%=~-]+)+")
_FROM_WHERE = (  # what a path is read from, if it has it
    re.compile(r".*/(?:site|dist)-packages/(.+)"),
    re.compile(r".*/lib/python3\.\d+/(.+)"),
    re.compile(r".*/((?:model|tasks|orchestrator|benchmarks|configs|results)/.+)"),
)
_URL = re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>),;]+")
_PUBLIC_URL = re.compile(
    r"https?://(?:[\w-]+\.)*(?:pytorch\.org|github\.com|huggingface\.co|nvidia\.com|python\.org|ray\.io)"
    r"(?:/[^?]*)?"
)
_MAIL = re.compile(r"(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)*")
_IPV6 = re.compile(
    r"(?<![\w:.])(?=[0-9A-Fa-f:.]*\d)[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f.]*(?:%\w+)?"
)
_DOTTED = re.compile(r"(?<![\w./…-])[A-Za-z][\w-]*(?:\.[A-Za-z_][\w-]*){2,}(?![\w(/])")
_PACKAGES = (  # whose names with dots are no hosts
    "torch", "tasks", "model", "orchestrator", "transformers", "triton", "numpy", "pandas", "ray",
    "aten", "prims", "nn", "self", "importlib", "concurrent", "multiprocessing", "os", "models",
    "huggingface_hub", "einops", "nvidia", "cuda", "at", "std",
)  # fmt: skip
# Beginnings of passwords that services give out, and words that mix letters with many digits. A
# commit and the id of a cell have 12 hexadecimal digits.
_PASSWORD = re.compile(
    r"(?<![\w.-])(?![0-9a-f]{7,16}(?![\w-]))(?:(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|AKIA|xox[a-z]-|eyJ)[\w.-]{8,}"
    r"|(?=[\w-]*[A-Za-z]\d{4,}|[\w-]*\d[A-Za-z]+\d[A-Za-z]+\d)(?=[\w-]*[A-Za-z]{3})[A-Za-z0-9-]{12,}"
    r")(?![\w.-])"
)
_ADDRESS = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.]*\.\d)")
_OF_TORCH = ("PYTORCH_", "TORCH", "CUDA_", "CUBLAS_", "NVIDIA_", "NCCL_", "OMP_", "MKL_", "TRITON_")
# In the name of a variable, whosever it is.
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CRED", re.IGNORECASE)
# Characters of a value that is looked for in texts: `1` and `true` are in all of them. A mixture of
# letters and digits may be a short password.
_TELLING, _TELLING_MIXTURE = 6, 4
_SHORT_PATH = 3  # parts, with the root
_GPU = "GPU"
_PROCESS_ID = "pid"
_ENVIRONMENT = "env"  # a key of configs and of the settings of attempts
_CLUSTER = "--address"  # the option of a command
_NOTE = "note"
_TEXTS = {"samples": _NOTE, "predictions": _NOTE, "allocations": "call_chain"}
# Facts and evidence that are not published: what a process printed, and the path of a file.
_UNPUBLISHED = ("log_tail", "kernel_log", "imported_from", _PROCESS_ID)
_TRACEBACK = "traceback"
# Facts and evidence that may quote anything.
_FREE = (
    "message", "reason", "cell_said", "memory_evidence", "nvml", "host_fault", "driver_note",
    "compile_break_reasons", "compile_recompile_reasons", "settings_changed",
)  # fmt: skip
_FRAME = re.compile(r'^ *File "[^"\n]*", line \d+(?:, in [\w.<>]+)?', re.MULTILINE)
# Several words that are joined, such as the name of a host, stay or go together.
_WORD = re.compile(r"\w+(?:(?:::|[-.@+:/])\w+)*")
_SIMPLE_WORD = re.compile(r"[^\W_]+")
_NUMBER = re.compile(r"\d+(?:x\d+)*(?:[KMGT]i?B|[kMG]?Hz|[mun]?s|x|e\d+)?")
_NUMBERED = re.compile(r"[A-Za-z].*-\d+")  # a host of a cluster is a plain word with a number
_PART_OF_NAME = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_WORDS_FILE = Path(__file__).with_name("words.txt")


class Redaction:
    """Replaces names in several runs consistently, so that a host has one name in all of them."""

    def __init__(self, attempts: pd.DataFrame) -> None:
        """Collect the names. attempts: the rows of all attempts of all runs."""
        in_order = attempts.sort_values("started_at", kind="stable")
        facts = list(map(json.loads, in_order["facts"]))
        # By the fact that has the names.
        self._names = {
            "host": {name: f"host {place}" for place, name in enumerate(_seen(facts, "host"), 1)},
            "gpu_uuid": {name: called(name) for name in _seen(facts, "gpu_uuid")},
        }
        self._counts = Counter({"process ids": sum(_PROCESS_ID in one for one in facts)})
        self._called = {**self._names["host"], **self._names["gpu_uuid"]}
        known = _any_of(self._called)
        # A host may be written with its domain.
        self._known = re.compile(
            rf"(?<![\w.-])(?:GPU-)?({known})(?:\.[A-Za-z][\w-]*)*(?![\w-]|\.\w)"
        )
        values = {
            str(value)
            for one in facts
            for name, value in (one.get(_ENVIRONMENT) or {}).items()
            if not _is_of_torch(name)
        }
        self._values = re.compile(_any_of(filter(_is_telling, values)))
        # These are published as they are, so that they are no secret in a message.
        public = set(self._called.values())
        for column in {"cell", "commit", "params"} & set(attempts):
            public |= set(attempts[column].dropna())
        self._public = {word for text in public for word in _SIMPLE_WORD.findall(text)}

    def left_out(self) -> Iterator[str]:
        """Yield a sentence for each kind of information that was left out."""
        for fact, names in self._names.items():
            if names:
                first, *others = names.values()
                called = f"{first} and so on" if others else first
                kind = "names of hosts" if fact == "host" else "ids of GPUs"
                yield f"{kind}: {len(names)}, called {called}"
        for what, count in self._counts.items():
            if count:
                yield f"{what}: {count}"

    def text(self, text: str) -> str:
        """Return a text without secrets: environment values, paths, addresses, hosts and GPUs."""
        text = self._values.sub(REDACTED, text)
        text = _URL.sub(self._url, text)
        for pattern in (_QUOTED_PATH, _PATH):
            text = pattern.sub(self._path, text)
        text = _ADDRESS.sub(self._address, text)
        text = _IPV6.sub(self._ipv6, text)
        text = _MAIL.sub(self._address, text)
        text = self._known.sub(lambda found: self._called[found[1]], text)
        text = _DOTTED.sub(self._dotted, text)
        return _PASSWORD.sub(self._password, text)

    def free_text(self, text: str) -> str:
        """Return a text that may quote anything, with the words that are known to be harmless."""
        return _WORD.sub(self._joined_words, self.text(text))

    def table(self, name: str, rows: pd.DataFrame) -> pd.DataFrame:
        """Return a table of a run in its public form."""
        if name == "attempts":
            facts = rows["facts"].map(lambda text: json.dumps(self._facts(json.loads(text))))
            evidence = rows["evidence"].map(lambda text: json.dumps(self._facts(json.loads(text))))
            return rows.assign(facts=facts, evidence=evidence)
        if name == "ranks":
            return rows.assign(gpu_uuid=rows["gpu_uuid"].map(called, na_action="ignore"))
        column = _TEXTS.get(name)
        if column is None:
            return rows
        texts = rows[column]
        redacted = texts.map({text: self.text(text) for text in texts.dropna().unique()})
        if column == _NOTE:  # the name of a part of a model, or why there is no value
            reasons = texts[rows["value"].isna()].dropna()
            redacted.update(reasons.map({text: self.free_text(text) for text in reasons.unique()}))
        return rows.assign(**{column: redacted})

    def manifest(self, manifest: Mapping[str, object]) -> dict[str, object]:
        """Return the content of run.json in its public form."""
        return {name: self._entry(name, value) for name, value in manifest.items()}

    def _facts(self, facts: Mapping[str, object]) -> dict[str, object]:
        names = self._names
        return {
            name: names[name].get(str(value)) if name in names else self._entry(name, value)
            for name, value in facts.items()
            if name not in _UNPUBLISHED
        }

    def _within(self, value: object) -> object:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {name: self._entry(name, one) for name, one in value.items()}
        return [self._within(one) for one in value] if isinstance(value, list) else value

    def _entry(self, name: str, value: object) -> object:
        if name == _ENVIRONMENT and isinstance(value, dict):
            return {variable: self._variable(variable, one) for variable, one in value.items()}
        if isinstance(value, str) and name == _TRACEBACK:
            return self.text("\n".join(_FRAME.findall(value)))
        if isinstance(value, str) and name in _FREE:
            return self.free_text(value)
        if name == "command" and isinstance(value, list):
            value = [self._without_cluster(before, word) for before, word in pairwise(["", *value])]
        return self._within(value)

    def _variable(self, name: str, value: str) -> str:
        if _is_of_torch(name):
            return self.free_text(value)
        self._counts[f"value of the environment variable {name}"] += 1
        return REDACTED

    def _without_cluster(self, before: object, word: object) -> object:
        """Return a word of a command without the address of a cluster. before: the word before."""
        option, equals, _ = str(word).partition("=")
        is_whole = option == _CLUSTER and bool(equals)
        if not is_whole and before != _CLUSTER:
            return word
        self._counts["addresses of networks"] += 1
        return f"{_CLUSTER}={REDACTED}" if is_whole else REDACTED

    def _path(self, found: re.Match[str]) -> str:
        self._counts["beginnings of absolute paths"] += 1
        for pattern in _FROM_WHERE:
            if whole := pattern.fullmatch(found[0]):
                return str(whole[1])
        # The last part of a short path, such as /home/NAME, is the name of a user or a disk.
        path = PurePosixPath(found[0])
        is_short = len(path.parts) <= _SHORT_PATH and not path.suffix
        return REDACTED if is_short else f"{REDACTED}/{path.name}"

    def _ipv6(self, found: re.Match[str]) -> str:
        try:
            ip_address(found[0])
        except ValueError:  # a time of day
            return found[0]
        return self._address(found)

    def _url(self, found: re.Match[str]) -> str:
        return found[0] if _PUBLIC_URL.fullmatch(found[0]) else self._address(found)

    def _dotted(self, found: re.Match[str]) -> str:
        is_code = found[0].partition(".")[0] in _PACKAGES
        return found[0] if is_code else self._address(found)

    def _password(self, found: re.Match[str]) -> str:
        self._counts["words like passwords"] += 1
        return REDACTED

    def _joined_words(self, found: re.Match[str]) -> str:
        words = _SIMPLE_WORD.findall(found[0])
        is_host = _NUMBERED.match(found[0]) and not set(words) <= self._public
        if not is_host and all(word in self._public or _is_harmless(word) for word in words):
            return found[0]
        self._counts["words of messages"] += 1
        return REDACTED

    def _address(self, found: re.Match[str]) -> str:
        self._counts["addresses of networks"] += 1
        return REDACTED


def called(uuid: str) -> str:
    """Return the public name of a GPU. A name that was already replaced stays as it is."""
    if uuid.startswith(f"{_GPU} "):
        return uuid
    return f"{_GPU} {sha256(uuid.removeprefix('GPU-'))[:8]}"


def _is_telling(value: str) -> bool:
    is_mixture = not value.isalpha() and any(map(str.isalpha, value))
    return len(value) >= (_TELLING_MIXTURE if is_mixture else _TELLING)


def _is_harmless(word: str) -> bool:
    """Return True for a letter, a number, or a listed word or several, such as `DataLoader`."""
    if len(word) == 1 or _NUMBER.fullmatch(word) or word.lower() in _known_words():
        return True
    name = re.sub(r"(?<=Backward)\d$", "", word)  # MmBackward0
    parts = _PART_OF_NAME.findall(name)
    is_name = "".join(parts) == name
    return is_name and all(len(part) == 1 or part.lower() in _known_words() for part in parts)


@cache
def _known_words() -> frozenset[str]:
    return frozenset(_WORDS_FILE.read_text(encoding="utf-8").split())


def _is_of_torch(name: str) -> bool:
    return name.startswith(_OF_TORCH) and not _SECRET.search(name)


def _seen(facts: Iterable[Mapping[str, Any]], fact: str) -> Iterable[str]:
    """Return the distinct values of a fact, which an attempt on several GPUs has as a list too."""
    values = [value for one in facts for value in (one.get(fact), *one.get(f"{fact}s", ()))]
    return dict.fromkeys(map(str, filter(None, values)))


def _any_of(texts: Iterable[str]) -> str:
    """Return a pattern that matches each of the texts, the longest first; nothing without any."""
    longest_first = sorted(texts, key=len, reverse=True)
    return "|".join(map(re.escape, longest_first)) or "(?!)"
