"""Shared fixtures: small cells, a run folder, the command line as a user calls it; and the limit of the default tier."""

from __future__ import annotations

import gc
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from click.testing import CliRunner, Result

from tasks.spec.attempt import Attempt, Settings
from tasks.spec.cell import Cell
from tasks.spec.outcome import Outcome
from tasks.spec.registry import make_cell
from tasks.spec.status import Status
from tasks.spec.tables import KernelRow, Sample
from tests.support.ranks import Ranks

if TYPE_CHECKING:
    from tests.support.s3 import Bucket

ROOT = Path(__file__).resolve().parent.parent

gc.disable()  # until all tests are collected: imports make objects that stay
# Before it compiles for the CPU with an empty cache, torch tries each set of vector instructions.
# That takes longer than compiling the small cells of the tests.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
# Two processes of tests with threads for each core would wait for each other half of the time.
# Torch reads it when it is imported, which therefore nothing above may do.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# pytest-xdist sets it to the width of the terminal, which must not decide what a command prints.
os.environ.pop("COLUMNS", None)

# The markers of the slow tiers; a test without one belongs to the default tier.
TIERS = {
    "slow",
    "process",
    "ray",
    "compile",
    "render",
    "fuzz",
    "docs",
    "browser",
    "gpu",
    "seam",
}
DEFAULT_TIER_CPU_S = 2.0
_BEGIN = time.monotonic()
_GROUP = re.compile(r"(\]|::\w+)@[^\[\]]+\]?$")  # that pytest-xdist appends to the name of a test

FAST = {
    "device": "cpu", "size": "tiny", "vocab_size": 200, "context_length": 16, "batch_size": 1, "warmup_steps": 1,
    "measured_steps": 2,
}  # fmt: skip


def with_samples(outcome: Outcome, *samples: Sample) -> Outcome:
    return replace(outcome, samples=(*outcome.samples, *samples))


def watched(values: Sequence[float]) -> list[Sample]:
    """What the kernels of so many steps took, in ms."""
    return [
        Sample("kernel_time", "kernel_time", "ms", ms, "", "step", step)
        for step, ms in enumerate(values)
    ]


def after_preparing(ended: Result) -> str:
    """Return the standard output of a command without the first line of `sweep run`."""
    return re.sub(r"\Apreparing: .*\n", "", ended.stdout)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--mutants", type=int, default=100, metavar="N", help="how many mutated configs to try"
    )
    parser.addoption(
        "--budget-s", type=float, default=math.inf, metavar="S", help="begin no test after this"
    )
    parser.addoption(
        "--shuffle", default="", metavar="SEED", help="run the files in a random order"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Give all processes of this test run one cache of compiled code; workers inherit it."""
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="inductor-")
        config.add_cleanup(folder.cleanup)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder.name


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Whole sweeps are in the outer folders. They come first, so that no worker is left with one.
    items.sort(key=lambda item: len(item.path.parts))
    if seed := config.getoption("--shuffle"):
        files = sorted({item.path for item in items})
        random.Random(seed).shuffle(files)
        items.sort(key=lambda item: files.index(item.path))
    if not _has_cuda():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    # pytest-xdist 3.8 appends the group to `_nodeid`, which pytest 9.2 no longer reads: tests of a
    # group would be for any worker, and each worker would make what they share.
    for item in session.items:
        grouped = vars(item).get("_nodeid")
        if grouped and hasattr(item, "_id"):
            item._id = type(item._id).parse(grouped)
    # As the program does: the garbage collector would look at torch, pandas and 4,000 tests again
    # and again, a tenth of the time. Even once takes more than a second, and finds little.
    gc.freeze()
    gc.set_threshold(50_000)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # A run without groups, such as one of the last failures, knows the test by its own name.
    if "PYTEST_XDIST_WORKER" not in os.environ:
        report.nodeid = _GROUP.sub(r"\1", report.nodeid)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() - _BEGIN > item.config.getoption("--budget-s"):
        pytest.skip("no time is left for it in this run")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Fail a test of the default tier that takes too long.

    CPU seconds of this process and its children count, because they hardly change on a busy
    machine, and only where LIMIT_TESTS is set, because a slow laptop changes them.
    """
    before = os.times()
    yield
    seconds = sum(os.times()[:4]) - sum(before[:4])
    if (
        os.environ.get("LIMIT_TESTS")
        and not TIERS & set(item.keywords)
        and seconds > DEFAULT_TIER_CPU_S
    ):
        pytest.fail(f"took {seconds:.1f} CPU seconds: speed it up or mark its tier")


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True, scope="session")
def _frozen_imports() -> Iterator[None]:
    """Have a pause of the garbage collection leave frozen objects frozen, as in a forked child.

    Otherwise the first pause would unfreeze all imports, and each later collection take a second.
    """
    from tasks.process import gc_pause

    gc_pause._imports_are_frozen = True
    yield
    gc.unfreeze()  # compiled libraries complain of objects that outlive them


@pytest.fixture(autouse=True, scope="session")
def _no_flush_to_disk() -> Iterator[None]:
    """Leave files in the memory of the system: no test cuts the power, and each flush waits 3 ms.

    Tests of what is flushed, and when, replace `os.fsync` themselves.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True, scope="module")
def _freeze_what_earlier_files_left() -> None:
    """Have collections of a file examine its own objects.

    A test that times steps collects first, which took 0.2 s: modules that earlier files imported.
    """
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _vector_math() -> None:
    """Tests of the model compute without a device that is opened first."""
    from tasks.harness.device import settle_vector_math

    settle_vector_math()


@pytest.fixture(autouse=True, scope="session")
def _digest_of_own_models() -> Iterator[None]:
    """Read the folder of the tests once, and without what they import, for the models in it."""
    from tasks import train_step
    from tasks.spec.source_digest import digest_of, python_files

    digest = train_step.source_digest

    @cache
    def digest_of_tests() -> str:
        return digest_of((file.name, file) for file in python_files(ROOT / "tests"))

    def digest_or_remember(model: str, paths: Sequence[str]) -> str | None:
        return digest_of_tests() if model.startswith("tests.") else digest(model, paths)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_step, "source_digest", digest_or_remember)
        yield


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def cell() -> Cell:
    return make_cell("train_step", FAST)


@pytest.fixture
def make_attempt(tmp_path: Path) -> Callable[..., Attempt]:
    """An attempt at a task of tests/support/misbehaving.py, or at a small training cell."""

    def make(
        number: int = 1,
        task: str = "train_step",
        settings: dict[str, Any] | None = None,
        **params: Any,
    ) -> Attempt:
        values = {**FAST, **params} if task == "train_step" else {"device": "cpu", **params}
        made = make_cell(task, values)
        folder = tmp_path / "run" / "artifacts" / made.id / str(number)
        return Attempt(
            made, number, str(folder), Settings(**{"timeout_s": 60.0, **(settings or {})})
        )

    return make


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    """Two ranks on the CPU."""
    with closing(Ranks(2)) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    """Four ranks on the CPU."""
    with closing(Ranks(4)) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def eight() -> Iterator[Ranks]:
    """Eight ranks on the CPU."""
    with closing(Ranks(8)) as ranks:
        yield ranks


@pytest.fixture
def make_outcome(make_attempt: Callable[..., Attempt]) -> Callable[..., Outcome]:
    """A finished attempt, as if measured: for what comes after measuring."""

    def make(
        status: Status = Status.OK,
        step_ms: tuple[float, ...] = (10.0, 11.0, 12.0),
        number: int = 1,
        **params: Any,
    ) -> Outcome:
        samples = tuple(
            Sample("timing", "duration", "ms", value, "synced", phase, step)
            for step, value in enumerate(step_ms)
            for phase in ("forward", "backward", "optimizer", "step")
        )
        facts = {"gpu": "Test GPU", "torch": "2.13.0", "tokens": 16, "flops": {"forward": 10**9}}
        evidence = (
            {}
            if status is Status.OK
            else {"message": f"it was {status}", "asked_bytes": 2 * 1024**3}
        )
        attempt = make_attempt(number, **params)
        stage, phase = ("", "") if status is Status.OK else ("warm-up", "backward")
        kernels = tuple(
            KernelRow(
                phase,
                "ffn",
                "GEMM",
                "scope",
                "aten::mm",
                f"gemm_{phase}",
                2,
                4,
                4000,
                1000.0,
                1000.0,
                900,
                1100,
                81.6,
            )
            for phase in ("forward", "backward")
        )
        measured = (samples, kernels) if status is Status.OK else ((), ())
        return Outcome(
            attempt, status, stage, phase, evidence, facts, measured[0], 1.7e9, 2.5, measured[1]
        )

    return make


@pytest.fixture
def make_once(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Path, Callable[[], object]], None]:
    """Make a folder for the first test of a module, and copy it for the others."""
    original = tmp_path_factory.getbasetemp() / "originals" / request.module.__name__

    def make_or_copy(folder: Path, make: Callable[[], object]) -> None:
        if original.exists():
            shutil.copytree(original, folder)
        else:
            make()
            shutil.copytree(folder, original)

    return make_or_copy


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[..., Path]:
    def write(text: str, name: str = "test.yaml") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write


@pytest.fixture
def bucket(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bucket]:
    """The contents of s3://bucket, which a server of this process has."""
    from tests.support.s3 import Bucket, serve

    made = Bucket()
    # The port may be that of an earlier server, whose runs have working copies in the user's cache.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    with serve(made):
        for name, value in made.environment.items():
            monkeypatch.setenv(name, value)
        yield made


@pytest.fixture
def sweep(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command line in a process of its own, in a folder of its own."""

    def call(
        *words: object, timeout: float = 150, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            sweep_command(*words),
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        )

    return call


@pytest.fixture
def sweep_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command line in this process, in a folder of its own: this machine is probed once, and where nothing else differs the
    cells of all commands come from one prepared parent."""
    from orchestrator.cli.main import main
    from orchestrator.scheduling.serial import SerialScheduler

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(SerialScheduler, "close", lambda scheduler: None)
    for module in ("scheduling.serial", "sweep.doctor"):
        monkeypatch.setattr(f"orchestrator.{module}.probe_here", lambda *_: _known_here())

    def call(*words: object) -> Result:
        arguments = [str(word) for word in words]
        monkeypatch.setattr(sys, "argv", ["sweep", *arguments])  # which a run remembers
        return CliRunner().invoke(main, arguments, prog_name="sweep")

    return call


@cache
def _known_here() -> Any:
    from orchestrator.execution.host_probe import probe_here

    return probe_here()


def sweep_command(*words: object) -> list[str]:
    return [sys.executable, "-m", "orchestrator", *map(str, words)]
