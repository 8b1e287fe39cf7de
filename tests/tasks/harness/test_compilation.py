from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tasks.harness.compilation import compile_facts, load_compiler


@pytest.fixture
def _forgetful_compiler() -> Iterator[None]:
    """One that remembers three compilations: of itself it does 64, which take long."""
    from torch._dynamo.utils import clear_compilation_metrics, set_compilation_metrics_limit

    torch._dynamo.reset()
    clear_compilation_metrics()
    set_compilation_metrics_limit(3)
    yield
    torch._dynamo.reset()
    clear_compilation_metrics()


@pytest.mark.usefixtures("_forgetful_compiler")
def test_every_recompilation_is_counted_however_many() -> None:
    load_compiler()
    double = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    for length in range(2, 9):
        double(torch.ones(length))
    assert compile_facts()["compile_recompiles"] == 6


@pytest.mark.usefixtures("_forgetful_compiler")
def test_reaching_the_recompilation_limit_is_an_error() -> None:
    load_compiler()
    double = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=3):
        for length in (2, 3, 4):
            double(torch.ones(length))
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit, match="recompile_limit"):
            double(torch.ones(5))
