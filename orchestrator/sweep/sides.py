"""The two sides of `sweep ab`: a Python, a commit and environment variables, and what runs them.

The text of an option enters, a `Program` leaves: the Python, the folder and the environment in which
`sweep run` measures a side. A commit is checked out as a git worktree, so that edited files of the
user's checkout are neither measured nor touched.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from orchestrator.common.errors import ConfigError, PlatformError
from orchestrator.common.provenance import SOURCE_ROOT

SIDES = ("a", "b")  # folders of their runs
SIDES_FILE = "sides.json"
_FORM = "Write python=PATH, commit=REF or env=NAME=VALUE, or several of them joined by commas"
# A value may have commas, such as that of CUDA_VISIBLE_DEVICES.
_SEPARATOR = re.compile(r",(?=(?:python|commit|env)=)")
_PROBE_S = 120.0  # a Python on a network file system may be slow
# Prints as JSON what a Python would measure with.
_PROBE = """
import importlib.metadata, json, platform
import tasks.process.lifeline
import orchestrator.common.provenance as provenance
print(json.dumps({
    "root": str(provenance.SOURCE_ROOT),
    "torch": importlib.metadata.version("torch"),
    "python": platform.python_version(),
}))
"""


@dataclass(frozen=True)
class Side:
    """A side as the user names it; the empty text stands for what this process uses itself."""

    python: str = ""
    commit: str = ""
    env: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"python={self.python}"] if self.python else []
        parts += [f"commit={self.commit}"] if self.commit else []
        return ",".join([*parts, *(f"env={name}={value}" for name, value in self.env.items())])


@dataclass(frozen=True)
class Program:
    """The interpreter, folder and environment that measure a side.

    python: the interpreter. folder: its working folder. config: of the same commit as the code.
    env: variables besides those of this process. versions: of torch and Python, for the reader.
    """

    side: Side
    python: str
    folder: Path
    config: Path
    env: Mapping[str, str]
    versions: str

    def __str__(self) -> str:
        side = replace(self.side, commit=self.side.commit[:12])
        return ", ".join(filter(None, [str(side), self.versions]))

    @property
    def identity(self) -> Mapping[str, object]:
        """The facts that all rounds of a results folder have in common, as JSON."""
        return {
            "python": self.python,
            "commit": self.side.commit,
            "env": dict(self.side.env),
            "versions": self.versions,
        }


@dataclass(frozen=True)
class Origin:
    """The `sweep ab` that measured two runs, and what differs between its sides.

    command: as it can be typed; its arguments are unknown if an older program measured.
    differences: the environment variables and the Pythons of A and B, where they differ.
    """

    command: tuple[str, ...]
    differences: Mapping[str, tuple[str, str]]


def origin_of(a: Path, b: Path) -> Origin | None:
    """Return the `sweep ab` that measured the runs in these folders; None if it did not."""
    if a.parent != b.parent or {a.name, b.name} != {*SIDES}:
        return None
    try:
        found = json.loads((a.parent / SIDES_FILE).read_text())
        first, second = found[a.name], found[b.name]
        differences = {
            name: (plain(first.get(name)), plain(second.get(name)))
            for name in ("python", "env")
            if first.get(name) != second.get(name)
        }
        arguments = found.get("command", ("ab", "CONFIG"))
        return Origin(("sweep", *map(str, arguments)), differences)
    # The file is missing, or no `sweep ab` wrote it.
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def plain(value: object) -> str:
    """Return the text of a value of `Program.identity`."""
    if isinstance(value, dict):
        value = ", ".join(f"{name}={text}" for name, text in value.items())
    return str(value or "none")


def parse_side(text: str, option: str) -> Side:
    """Parse `python=PATH,commit=REF,env=NAME=VALUE`. Raise ConfigError."""
    found: dict[str, str] = {}
    env: dict[str, str] = {}
    for part in _SEPARATOR.split(text):
        name, _, value = part.partition("=")
        variable, is_assigned, content = value.partition("=")
        if name not in ("python", "commit", "env") or not value:
            raise ConfigError(f"{option} {part}: is not a side", _FORM)
        if name == "env" and not (is_assigned and variable):
            raise ConfigError(f"{option} {part}: is not a variable", "Write env=NAME=VALUE")
        names, key = (env, variable) if name == "env" else (found, name)
        if key in names:
            raise ConfigError(f"{option}: names {key} twice", "Leave one of them out")
        names[key] = content if name == "env" else value
    return Side(**found, env=env)


def prepare_sides(sides: Mapping[str, Side], config: Path, worktrees: Path) -> dict[str, Program]:
    """Return what measures each side, by its name. After an error, no commit stays checked out.

    For the arguments and errors see `prepare`.
    """
    try:
        return {name: prepare(side, config, worktrees, f"--{name}") for name, side in sides.items()}
    except BaseException:
        remove_worktrees(config, worktrees)
        raise


def prepare(side: Side, config: Path, worktrees: Path, option: str) -> Program:
    """Return what measures a side; check out its commit if it names one.

    worktrees: the folder of checked out commits. Raise ConfigError or PlatformError.
    """
    python = _find_python(side.python, option)
    folder, own_config, env = Path.cwd(), config, dict(side.env)
    paths = [SOURCE_ROOT]
    if side.commit:
        root = Path(_git(config, "rev-parse", "--show-toplevel", option=option))
        side = replace(side, commit=_resolve_commit(config, side.commit, option))
        tree = _check_out(config, side.commit, worktrees, option)
        # Only its folder is resolved: if the config is a link, the commit has the link.
        own_folder = config.parent.resolve().relative_to(root.resolve())
        own_config = tree / own_folder / config.name
        if not own_config.is_file():
            problem = f"{option}: commit {side.commit[:12]} has no {own_config.relative_to(tree)}"
            raise ConfigError(problem, "Commit the config first, or copy it into both commits")
        inside = Path.cwd().is_relative_to(root)
        folder = tree / Path.cwd().relative_to(root) if inside else tree
        folder = folder if folder.is_dir() else tree
        # A package that is installed in editable mode would be imported from another checkout.
        paths += [path for path in (tree, tree / "src") if path.is_dir()]
        if (tree / "orchestrator" / "__main__.py").is_file():  # a commit of this program
            paths = [tree]
    elif side.python:
        paths = []
    facts = _probe(python, paths[:1], option)
    if paths:
        # The packages of this program come first: a user's folder may have a `model.py` as well.
        others = env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        names = [facts["root"], *map(str, paths[1:]), *filter(None, others.split(os.pathsep))]
        env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(names))
    versions = f"torch {facts['torch']}, Python {facts['python']}"
    return Program(side, python, folder, own_config, env, versions)


def remove_worktrees(config: Path, worktrees: Path) -> None:
    """Remove the checked out commits. They are made again if they are needed."""
    for tree in sorted(worktrees.glob("*")):
        words = ("worktree", "remove", "--force", str(tree))
        subprocess.run(["git", "-C", str(config.parent), *words], capture_output=True, check=False)
    if worktrees.is_dir() and not any(worktrees.iterdir()):
        worktrees.rmdir()


def _find_python(name: str, option: str) -> str:
    if not name:
        return sys.executable
    # Not resolved: the Python of a virtual environment is a link, and its path decides what it imports.
    found = os.path.abspath(name) if os.sep in name else shutil.which(name)
    if not found or not os.access(found, os.X_OK) or not os.path.isfile(found):
        raise ConfigError(
            f"{option} python={name}: is no program", "Name one such as .venv/bin/python"
        )
    return found


def _probe(python: str, paths: Sequence[Path], option: str) -> Mapping[str, str]:
    """Return the versions of a Python and where it has this program. Raise PlatformError."""
    env = dict(os.environ)
    if paths:
        env["PYTHONPATH"] = str(paths[0])
    try:
        done = subprocess.run(
            [python, "-P", "-c", _PROBE],
            capture_output=True,
            text=True,
            env=env,
            timeout=_PROBE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PlatformError(f"{option}: {python} cannot be started: {error}") from error
    if done.returncode == 0:
        facts: Mapping[str, str] = json.loads(done.stdout.splitlines()[-1])
        return facts
    reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    raise PlatformError(
        f"{option}: {python} cannot import transformer-sweep: {reason}",
        f"Install it from its clone or its wheel: {python} -m pip install PATH",
    )


def _git(config: Path, *words: str, option: str) -> str:
    """Return the output of git in the folder of the config. Raise ConfigError if it fails."""
    command = ["git", "-C", str(config.parent), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise PlatformError(f"{option}: git cannot be started: {error}", "Install git") from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["git failed"])[-1]
        raise ConfigError(
            f"{option}: {reason}", f"commit=REF needs a git repository that contains {config}"
        )
    return done.stdout.strip()


def _resolve_commit(config: Path, ref: str, option: str) -> str:
    try:
        return _git(config, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}", option=option)
    except ConfigError as error:
        raise ConfigError(
            f"{option} commit={ref}: is not known in this repository",
            f"Run git fetch origin {ref}; in GitHub Actions, set fetch-depth: 0 of checkout",
        ) from error


def _check_out(config: Path, commit: str, worktrees: Path, option: str) -> Path:
    """Return the folder of a commit, complete even if an earlier process was killed half-way."""
    tree = worktrees.absolute() / commit[:12]
    if (tree / ".git").exists():
        try:
            _git(tree / "-", "reset", "--hard", "--quiet", commit, option=option)
            return tree
        except ConfigError:
            shutil.rmtree(tree)
    _git(config, "worktree", "prune", option=option)
    words = ("worktree", "add", "--force", "--detach", "--quiet", str(tree), commit)
    _git(config, *words, option=option)
    return tree
