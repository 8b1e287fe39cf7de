"""Addresses that keep nothing, that are mistyped, or whose server does not answer."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result
from pyarrow.fs import FileSystem

from orchestrator.common.errors import EXIT_USER, ConfigError, RunUnreachable
from orchestrator.common.run_location import require_lasting
from orchestrator.store import remote_folder
from orchestrator.store.remote_folder import RemoteFolder

CONFIG = "name: c\ngrids: [{task: matmul, fixed: {device: cpu, matrix_size: 8}}]\n"
PREPARING = "preparing: importing torch\n"
LOST = "is lost when this process ends. Name a folder, or s3://bucket/folder"


@pytest.fixture
def silent_server() -> Iterator[str]:
    """Return HOST:PORT of a server that accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("address", "line"),
    [
        ("memory://x/y", f"memory://x/y: {LOST}"),
        ("memory://x", f"memory://x: {LOST}"),
        ("simplecache::memory://x", f"simplecache::memory://x: {LOST}"),
        (
            "s3:/bucket/x",
            "--out s3:/bucket/x: looks like an address with a missing slash. "
            "Write s3://bucket/x, or ./s3:/bucket/x for a folder",
        ),
        (
            "memory:x",
            "--out memory:x: looks like an address with a missing slash. "
            "Write memory://x, or ./memory:x for a folder",
        ),
        (
            "gs:bucket",
            "--out gs:bucket: looks like an address with a missing slash. "
            "Write gs://bucket, or ./gs:bucket for a folder",
        ),
        (
            "abc:/d",
            "--out abc:/d: looks like an address with a missing slash. "
            "Write abc://d, or ./abc:/d for a folder",
        ),
        (
            "http://127.0.0.1:9/x",
            "http://127.0.0.1:9/x: is no folder of a bucket. "
            "Name a folder, or write s3://bucket/folder (s3, gs, gcs, abfs, abfss)",
        ),
    ],
)
def test_an_unusable_output_address_is_refused_before_anything_is_measured(
    address: str,
    line: str,
    sweep_here: Callable[..., Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    monkeypatch.setattr("orchestrator.store.mirror.RemoteRun.refresh", lambda *_, **__: None)
    result = sweep_here("run", "c.yaml", "--out", address, "--scheduler", "serial")
    assert result.exit_code == EXIT_USER
    assert result.output.removeprefix(PREPARING) == f"sweep: {line}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


def test_the_results_of_a_config_are_checked_as_well(
    sweep_here: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text(f"results: memory://x\n{CONFIG}")
    result = sweep_here("run", "c.yaml", "--scheduler", "serial")
    assert result.exit_code == EXIT_USER
    assert result.output == f"{PREPARING}sweep: memory://x: {LOST}\n"


@pytest.mark.parametrize(
    "text", ["./s3:/bucket/x", "results/demo", "a:b", "run:c2ef9ca7c7f0", "s3://b/x", "/a:/b", ""]
)
def test_other_names_are_accepted(text: str) -> None:
    require_lasting(text)


def test_a_folder_that_exists_is_no_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:" / "x").mkdir(parents=True)
    require_lasting("s3:/x")
    with pytest.raises(ConfigError):
        require_lasting("s3:/y")


def test_a_server_that_does_not_answer_is_given_up(
    silent_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_folder, "_ANSWER_S", 1.0)
    began = time.monotonic()
    with pytest.raises(RunUnreachable, match=r"no answer in 1 s\. Check the network"):
        RemoteFolder(f"gs://anonymous@b/x?endpoint_override={silent_server}&scheme=http")
    assert time.monotonic() - began < 20


def test_the_container_of_an_azure_address_is_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        remote_folder, "_connect", lambda address, parts: FileSystem.from_uri(address)
    )
    addresses = [f"abfss://c@{account}.dfs.core.windows.net/x/y" for account in ("one", "two")]
    one, two = map(RemoteFolder, addresses)
    assert one.path == Path("abfss-one.dfs.core.windows.net/c/x/y")
    assert one.path != two.path
    with pytest.raises(ConfigError, match="credentials are no part of an address"):
        RemoteFolder("abfss://c:secret@one.dfs.core.windows.net/x")
