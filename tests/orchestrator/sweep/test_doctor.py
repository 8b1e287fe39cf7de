from __future__ import annotations

import errno
import os
import py_compile
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from orchestrator.common.errors import PlatformError, RunUnwritable
from orchestrator.execution.host_probe import dispatch_rates, profiler_failure
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from orchestrator.sweep import doctor
from orchestrator.sweep.doctor import _disk, _host, _profiler


def test_a_host_with_steady_cores_is_good() -> None:
    finding = _host([440.0 + step % 7 for step in range(200)])
    assert finding.good is True
    assert str(finding) == "ok   host     the CPU starts 446 small operations per ms"


def test_a_host_with_shared_cores_is_noted_with_the_cost() -> None:
    finding = _host([400.0, 400.0, 200.0, 400.0, 200.0] * 40)
    assert finding.good is None
    assert finding.message == (
        "CPU speed is unsteady: in 40% of 3 s it started 200 instead of 400 small operations per ms"
        " (50%), as when its cores are shared"
    )
    assert (
        finding.remedy
        == "CPU-bound steps (†) may take up to 2.0 times as long: docs/explanation/cpu-bound.md"
    )


def test_a_few_slow_readings_are_ignored() -> None:
    assert _host([400.0] * 98 + [150.0] * 2).good is True


@pytest.mark.slow
def test_the_dispatch_rate_is_read_for_the_whole_duration() -> None:
    few, many = dispatch_rates(0.05), dispatch_rates(0.6)
    assert all(pace > 0 for pace in [*few, *many])
    assert len(many) > 2 * len(few) > 0


def test_a_broken_torch_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "orchestrator.execution.host_probe.PROGRAM",
        (sys.executable, "-c", "raise SystemExit('No module named torch')"),
    )
    with pytest.raises(PlatformError, match="torch does not work here: No module named torch"):
        dispatch_rates(0.05)


def test_a_profiler_that_sees_no_kernels_is_noted_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = (
        "init.cpp:146] function cbapi->getCuptiStatus() failed with error "
        "CUPTI_ERROR_NOT_INITIALIZED (15)\\nRuntimeError: none"
    )
    refusing = (sys.executable, "-c", f"import sys; sys.stderr.write('{error}'); sys.exit(1)")
    monkeypatch.setattr("orchestrator.execution.host_probe.PROGRAM", refusing)
    assert profiler_failure() == "CUPTI_ERROR_NOT_INITIALIZED"

    finding = _profiler("CUPTI_ERROR_NOT_INITIALIZED")
    assert finding.good is None
    assert str(finding).startswith("note CUPTI    CUPTI_ERROR_NOT_INITIALIZED")
    assert "dcgmi profiling --pause" in finding.remedy


def test_a_profiler_that_sees_kernels_is_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.execution.host_probe.PROGRAM", (sys.executable, "-c", ""))
    assert profiler_failure() is None
    assert _profiler(None).good is True


@pytest.mark.parametrize(
    ("writes", "has_bytecode", "names"),
    [(False, False, ["bytecode"]), (True, False, []), (False, True, [])],
)
def test_torch_without_bytecode_is_noted(
    writes: bool,
    has_bytecode: bool,
    names: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = tmp_path / "torch" / "__init__.py"
    source.parent.mkdir()
    source.touch()
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", not writes)
    monkeypatch.setattr(
        doctor, "find_spec", lambda name: ModuleSpec(name, None, origin=str(source))
    )
    if has_bytecode:
        py_compile.compile(str(source))
    assert [finding.name for finding in doctor._bytecode()] == names


def test_doctor_warns_as_the_first_process_of_a_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Without an init, `docker run IMAGE sweep run` collects the zombies of its cells.
    def fail() -> None:
        raise PlatformError("no torch")

    for name in ("_ray", "_nsys", "_compiler"):
        monkeypatch.setattr(doctor, name, lambda: doctor.Diagnosis("x", True, ""))
    monkeypatch.setattr(doctor, "probe_here", fail)
    assert not any("--init" in str(found) for found in doctor.examine(tmp_path))
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert any("docker run --init" in str(found) for found in doctor.examine(tmp_path))


def test_a_folder_whose_parent_is_missing_is_noted(tmp_path: Path) -> None:
    assert _disk(tmp_path / "results").good is True
    finding = _disk(tmp_path / "resluts" / "run")
    assert finding.good is None
    assert f"{tmp_path / 'resluts'} does not exist; " in finding.message
    assert finding.message.endswith(f"free at {tmp_path}, where it would be created")
    assert finding.remedy == "Check the name of --out"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", no_locks)
    finding = _disk(tmp_path)
    assert finding.good is False
    assert "this file system has no locks" in str(finding)
    assert list(tmp_path.iterdir()) == []
    run = Run(tmp_path / "results" / "run")
    with (
        pytest.raises(RunUnwritable, match=r"no locks.*Name a folder of another file system"),
        open_for_writing(run),
    ):
        pass
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    assert _disk(tmp_path).good is True
