"""The driver as a Ray job, on a cluster whose job server requires a token.

The command is the one of docs/how-to/several-gpus-and-slurm.md.
"""

from __future__ import annotations

import importlib
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from tests.conftest import ROOT
from tests.killing import left_after, own_temporary_folder

pytestmark = pytest.mark.ray

GUIDE = (ROOT / "docs" / "how-to" / "several-gpus-and-slurm.md").read_text()
CONFIG = """
name: full
defaults: {device: cpu, size: tiny, context_length: 8, batch_size: 1, warmup_steps: 0, measured_steps: 2, vocab_size: 100}
grids:
  - task: train_step
    axes: {seed: [0, 1]}
"""
HEAD = """
import sys
from ray.cluster_utils import Cluster
own = {"dashboard_host": "127.0.0.1", "dashboard_port": 0, "dashboard_agent_listen_port": None}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": True, "no_monitor": True, **own})
print("\\njobs at", cluster.head_node.webui_url, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture(scope="module", autouse=True)
def _job_server() -> None:
    try:
        importlib.import_module("ray.dashboard.optional_deps")
    except ImportError as error:
        pytest.skip(f"needs ray[default]: {error}")


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Return the variables of a shell whose `python` and `ray` are those of this environment."""
    token = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with own_temporary_folder(tmp_path) as own:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        yield {**os.environ, **token, "TMPDIR": own["TMPDIR"], "PATH": path, "PYTHONPATH": ""}


@pytest.fixture
def jobs(environment: dict[str, str], tmp_path: Path) -> Iterator[str]:
    """Start a cluster and return the address of its job server."""
    with (tmp_path / "head.log").open("wb") as log, subprocess.Popen(
        [sys.executable, "-c", HEAD], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
    ) as head:  # fmt: skip
        try:
            assert head.stdout is not None
            yield next(line for line in head.stdout if line.startswith("jobs at ")).split()[-1]
            head.communicate(timeout=30)
        finally:
            head.kill()


def test_the_documented_command_measures_all_cells(
    jobs: str, environment: dict[str, str], tmp_path: Path
) -> None:
    checkout, shared = tmp_path / "checkout", tmp_path / "shared"
    for package in ("model", "tasks", "orchestrator"):
        shutil.copytree(
            ROOT / package, checkout / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    (checkout / "configs").mkdir()
    (checkout / "configs" / "full.yaml").write_text(CONFIG)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"http://{jobs}/api/jobs/", timeout=30)
    (command,) = re.findall(r"^(ray job submit .+)$", GUIDE, re.MULTILINE)
    words = shlex.split(command.replace("HEAD:8265", jobs).replace("/shared", str(shared)))
    done = subprocess.run(
        words, cwd=checkout, env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "measured 2 cells: 2 ok" in done.stdout
    cells = pd.read_parquet(shared / "full" / "cells.parquet")
    assert cells["status"].tolist() == ["ok", "ok"]
    assert not left_after(tmp_path, 20, word="--fork-server")
