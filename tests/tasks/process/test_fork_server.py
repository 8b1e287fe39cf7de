"""What a fork server imports for its children, without a process."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from tasks.process.fork_server import MEASURE, import_for


@pytest.mark.parametrize(("device", "loads"), [("cuda", 1), ("cpu", 0)])
def test_children_on_a_gpu_inherit_cudnn(
    monkeypatch: pytest.MonkeyPatch, device: str, loads: int
) -> None:
    version = Mock()
    monkeypatch.setattr(torch.backends.cudnn, "version", version)
    import_for(MEASURE, device)
    assert version.call_count == loads
