from __future__ import annotations

from contextlib import nullcontext

import pytest

from tasks.matmul import MatmulParams, build


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")]
)
def test_a_product_in_the_precisions_own_dtype(precision: str, dtype: str) -> None:
    workload = build(
        MatmulParams.model_validate({"device": "cpu", "precision": precision, "matrix_size": 32})
    )
    workload.step(lambda phase: nullcontext())
    assert workload.flops == {"forward": 2 * 32**3}
    assert workload.facts["parameter_dtype"] == dtype
