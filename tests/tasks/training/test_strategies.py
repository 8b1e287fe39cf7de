"""Several ranks train like one process with the global batch, whatever the strategy."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from tasks.spec.registry import make_cell
from tasks.training.parameters import TrainStepParams
from tests.support.odd_models import ODD
from tests.support.rank_steps import SMALL, Trained, count, differ_after_a_step, train
from tests.support.ranks import RankError, Ranks, often

# One worker starts the server that ranks are forked from, which imports torch.
pytestmark = pytest.mark.xdist_group("ranks")

AVERAGING = ("naive", "flat", "overlap", "bucketed")
STRATEGIES = (*AVERAGING, "ddp", "zero1", "zero1_torch", "fsdp2")
# Ten times what was seen: sums in another order.
LOSS, PARAMETER, GRADIENT = 5e-6, 1e-5, 1e-5
PLAIN: dict[str, Any] = {"tie_embeddings": True}
PARAMETERS = 6000  # of SMALL with PLAIN

CASES: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation": 2},
    "checkpoints": {"checkpointing": "blocks"},
    "selective": {"checkpointing": "selective", "attention": "sdpa"},
    "adapters": {"lora": 2},
    "chunks": {"loss": "chunked"},
    "weak scaling": {"batch": "per_gpu"},
    "tiny buckets": {"bucket_mb": 1e-6},
    "views": {"bucket_mb": 0.01, "bucket_view": True, "reshard": False},
    "unequal buckets": {"bucket_mb": 0.01, "gradient_accumulation": 2},
    "the course's optimizer": {"optimizer": "course"},
    "own model": ODD,
    "own loss": {**ODD, "loss": "tests.support.odd_models:loss_with_an_attribute"},
    "the model's loss": {**ODD, "loss": "model"},
}


_TRAINED: dict[str, Trained] = {}


def alone(group: Ranks, values: dict[str, Any], steps: int = 3) -> Trained:
    """Return one process that has the global batch: each rank of the group is one."""
    values = dict(values)
    if values.pop("batch", "") == "per_gpu":
        values["batch_size"] = SMALL["batch_size"] * group.count
    key = json.dumps([values, steps])
    if key not in _TRAINED:
        _TRAINED[key] = group(train, values, steps)[0]
    return _TRAINED[key]


def cell(parallel: str, ranks: int, values: dict[str, Any]) -> dict[str, Any]:
    return {**values, "parallel": parallel, "processes": ranks}


def require_same(one: Trained, other: Trained, gradient: float = GRADIENT) -> None:
    assert one.losses == pytest.approx(other.losses, abs=LOSS)
    assert one.gradients.keys() == other.gradients.keys()
    for name, expected in one.gradients.items():
        assert gradient_error(expected, other.gradients[name]) <= gradient, name
    assert one.parameters.keys() == other.parameters.keys()
    for name, parameter in one.parameters.items():
        assert np.abs(parameter - other.parameters[name]).max() <= PARAMETER, name


def gradient_error(expected: Any, actual: Any) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("parallel", STRATEGIES)
def test_two_ranks_train_like_one_process_with_the_global_batch(parallel: str, two: Ranks) -> None:
    trained = two(train, cell(parallel, 2, PLAIN))
    expected = alone(two, PLAIN)
    assert expected.facts["parameters"] == PARAMETERS
    for rank in trained:
        require_same(expected, rank)
        assert rank.optimizer_steps == 3
        assert (
            tuple(rank.phases)
            == TrainStepParams.model_validate(SMALL | cell(parallel, 2, PLAIN)).phases
        )
    assert trained[0].checksums == trained[1].checksums


@pytest.mark.parametrize("parallel", often([*AVERAGING, "zero1"], "zero1"))
def test_our_own_strategies_train_like_ddp(parallel: str, two: Ranks) -> None:
    """Compare without the reference, which might share an error with them."""
    ours, theirs = (two(train, cell(one, 2, PLAIN), 2)[0] for one in (parallel, "ddp"))
    require_same(theirs, ours)


def test_ranks_that_do_not_communicate_are_found_out(two: Ranks) -> None:
    """The comparisons can fail: half of the batch gives other gradients."""
    half = two(train, {**PLAIN, "batch_size": 2})[0]
    with pytest.raises(AssertionError):
        require_same(alone(two, PLAIN), half)
    for parallel in ("naive", "zero1"):
        errors = two(differ_after_a_step, cell(parallel, 2, PLAIN))
        assert all("the ranks have different parameters after their steps" in one for one in errors)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", STRATEGIES)
@pytest.mark.parametrize("case", CASES)
def test_training_options_combine_with_every_strategy(case: str, parallel: str, two: Ranks) -> None:
    values = CASES[case]
    for rank in two(train, cell(parallel, 2, values)):
        require_same(alone(two, values), rank)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", STRATEGIES)
@pytest.mark.parametrize("values", [PLAIN, ODD], ids=["built-in", "own"])
def test_four_ranks_train_like_one_process(
    parallel: str, values: dict[str, Any], four: Ranks
) -> None:
    for rank in four(train, cell(parallel, 4, values)):
        require_same(alone(four, values), rank)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", STRATEGIES)
def test_eight_ranks_train_like_one_process(parallel: str, eight: Ranks) -> None:
    values = {**PLAIN, "batch_size": 8}
    trained = eight(train, cell(parallel, 8, values))
    assert len(trained) == 8
    for rank in trained:
        require_same(alone(eight, values), rank)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["naive", "bucketed", "ddp", "zero1", "fsdp2"])
def test_gradients_that_travel_in_bf16_are_rounded_once_or_twice(parallel: str, two: Ranks) -> None:
    """bf16 has 8 bits: each rank rounds its share, and their sum is rounded."""
    rank, expected = two(train, cell(parallel, 2, {"wire": "bf16"}), 1)[0], alone(two, {}, 1)
    errors = [gradient_error(one, rank.gradients[name]) for name, one in expected.gradients.items()]
    assert 1e-4 < max(errors) < 2**-8
    counted = two(count, cell(parallel, 2, {"wire": "bf16"}))[0]
    assert counted.nbytes["all_reduce"] == pytest.approx(2 * 6800, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [*AVERAGING, "ddp"])
def test_scaled_gradients_of_fp16_are_averaged(parallel: str, two: Ranks) -> None:
    ranks = two(train, cell(parallel, 2, {"precision": "fp16"}))
    assert ranks[0].losses == pytest.approx(alone(two, {"precision": "fp16"}).losses, abs=2e-3)
    assert ranks[0].optimizer_steps == 3
    assert ranks[0].checksums == ranks[1].checksums


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["cross_entropy", "chunked"])
def test_fsdp2_has_its_own_mixed_precision(loss: str, two: Ranks) -> None:
    values = {"precision": "bf16", "loss": loss}
    rank, expected = two(train, cell("fsdp2", 2, values))[0], alone(two, values)
    assert rank.facts["fsdp_param_dtype"] == "bfloat16"
    assert (rank.facts["autocast_dtype"], expected.facts["autocast_dtype"]) == (None, "bfloat16")
    assert rank.facts["parameter_dtype"] == "float32"
    assert rank.losses == pytest.approx(expected.losses, rel=0.01)
    # Losses in bf16 have 8 bits, and so would be multiples of 2⁻⁶, or their means.
    assert any((loss * 2**7) % 1 for loss in rank.losses)


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [
        {"optimizer": "foreach"},
        {"optimizer": "loop"},
        {"optimizer": "sgd", "optimizer_args": {"fused": False}},
        {"optimizer": "torch.optim:Adagrad"},
        {"optimizer_step": "in_backward"},
    ],
    ids=str,
)
def test_optimizers_update_shards_of_fsdp2(values: dict[str, Any], two: Ranks) -> None:
    for rank in two(train, cell("fsdp2", 2, values)):
        require_same(alone(two, values), rank)


@pytest.mark.slow
def test_muon_of_fsdp2_gathers_what_it_needs(two: Ranks) -> None:
    """It computes in bf16, so that the order of sums matters."""
    values = {"optimizer": "muon"}
    rank, expected = two(train, cell("fsdp2", 2, values))[0], alone(two, values)
    assert rank.losses == pytest.approx(expected.losses, abs=2e-4)


@pytest.mark.compile
@pytest.mark.timeout(600)
@pytest.mark.parametrize("parallel", ["zero1", "ddp", "fsdp2"])
def test_compiled_blocks_train_like_eager_ones(parallel: str) -> None:
    ranks = Ranks(2, limit_s=300)  # that have compiled nothing before
    for rank in ranks(train, cell(parallel, 2, {"compile": "blocks"})):
        require_same(alone(ranks, {}), rank)
        assert rank.facts["compile_blocks"] == "layers: 2 Block"
        graphs, breaks = rank.facts["compile_graphs"], rank.facts["compile_graph_breaks"]
        assert (graphs, breaks, rank.facts["compile_recompiles"]) == (1, 0, 0)
    ranks.close()


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["naive", "bucketed", "ddp", "zero1", "zero1_torch", "fsdp2"])
def test_models_of_transformers_are_trained(parallel: str, two: Ranks) -> None:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 50}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    widths = dict.fromkeys(("d_model", "d_ff", "num_layers", "num_heads"))
    for options in ({}, {"loss": "chunked", "checkpointing": "blocks"}, {"loss": "model"}):
        values = {
            **widths, "model": "hf:llama", "model_args": {**sizes, **heads}, "attention": "sdpa"
        } | options  # fmt: skip
        for rank in two(train, cell(parallel, 2, values)):
            require_same(alone(two, values), rank)


def ring_bytes(counts: dict[str, int], ranks: int) -> float:
    """Return the bytes that a rank of a ring sends for these collectives."""
    shares = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "broadcast": 1}
    return sum(shares[name] * (ranks - 1) / ranks * size for name, size in counts.items())


# Calls of a step: of all 20 parameters, of all gradients, or of 7 buckets of 4,000 bytes.
CALLS = {
    "naive": {"all_reduce": 20},
    "flat": {"all_reduce": 1},
    "overlap": {"all_reduce": 20},
    "bucketed": {"all_reduce": 1},
    "zero1": {"reduce_scatter": 1, "all_gather": 1},
}


@pytest.mark.parametrize("parallel", often(CALLS, "bucketed", "zero1"))
def test_our_own_calls_send_the_bytes_of_the_formula(parallel: str, two: Ranks) -> None:
    """With n ranks, 2(n-1)/n · 4 bytes for each parameter; zero1 pads it to cache lines."""
    values = {**PLAIN, "gradient_accumulation": 2}  # a step still communicates once
    counted = two(count, cell(parallel, 2, values))[0]
    assert counted.own_calls == CALLS[parallel]
    sent = ring_bytes(counted.own_bytes, 2)
    if parallel == "zero1":  # five norms of 16 elements become 32 each
        sent -= 2 * 1 / 2 * 5 * 16 * 4
    assert sent == 2 * 1 / 2 * 4 * PARAMETERS
    # Torch's record agrees, which calls gloo's reduce-scatter an all-reduce.
    recorded = dict(counted.own_calls)
    if "reduce_scatter" in recorded:
        recorded["all_reduce"] = recorded.pop("reduce_scatter")
    assert counted.calls == recorded
    assert sum(counted.nbytes.values()) == sum(counted.own_bytes.values())


@pytest.mark.slow
def test_torchs_strategies_send_the_bytes_of_the_formula(two: Ranks) -> None:
    def counted(parallel: str, **values: Any) -> Any:
        return two(count, cell(parallel, 2, values))[0]

    ddp, twice = counted("ddp"), counted("ddp", gradient_accumulation=2)
    assert ddp.calls == twice.calls == {"all_reduce": 1}
    assert ddp.nbytes == {"all_reduce": 4 * 6800}
    sharded = counted("zero1_torch")
    assert sharded.nbytes == {"all_reduce": 4 * 6800, "broadcast": 4 * 6800}
    fsdp, blocks = counted("fsdp2"), 4 * 2592 * 2
    assert fsdp.calls == {"all_gather": 2 * 2 + 1, "all_reduce": 3}
    assert fsdp.nbytes == {"all_gather": 4 * 6800 + blocks, "all_reduce": 4 * 6800}
    held = counted("fsdp2", reshard=False)
    assert held.nbytes == {"all_gather": 4 * 6800, "all_reduce": 4 * 6800}
    twice = counted("fsdp2", gradient_accumulation=2)
    assert twice.calls == {"all_gather": 2 * fsdp.calls["all_gather"], "all_reduce": 3}


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [*AVERAGING, "zero1", "ddp"])
def test_a_step_can_leave_out_all_communication(parallel: str, two: Ranks) -> None:
    counted = two(count, cell(parallel, 2, {}), True)[0]
    assert counted.calls == counted.own_calls == {}


@pytest.mark.slow
def test_buckets_are_read_back(two: Ranks) -> None:
    """Buckets end with the parameter that makes them at least as large as asked, as those of DDP."""
    ours, theirs = (
        two(train, cell(one, 2, {"bucket_mb": 0.01}))[0].facts["bucket_bytes"]
        for one in ("bucketed", "ddp")
    )
    assert ours == theirs == [10_496, 11_392, 5_312]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "zero1_torch", "fsdp2"])
def test_what_torch_cannot_train_is_named_in_one_line(parallel: str, two: Ranks) -> None:
    if parallel == "fsdp2":
        flat = {**ODD, "model": "tests.tasks.training.test_training_options:Labelled"}
        flat |= {"vocab_size": 100}
        with pytest.raises(RankError, match="fsdp2 needs blocks in a torch"):
            two(train, cell(parallel, 2, flat))
    if parallel != "ddp":
        wide = {**ODD, "model_args": {"wide": True}}
        with pytest.raises(RankError, match=f"{parallel} needs trained parameters of one dtype"):
            two(train, cell(parallel, 2, wide))
    if parallel != "fsdp2":
        unused = {**ODD, "model_args": {"unused": True}}
        with pytest.raises(RankError, match=f"{parallel} needs a gradient of each parameter"):
            two(train, cell(parallel, 2, unused))


GPUS = {"size": "tiny", "gpus": 2}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {},
        "parallel: none requires one GPU, but gpus is 2. Choose a strategy, such as parallel: ddp",
    ),
    (
        {"parallel": "none"},
        "parallel: none requires one GPU, but gpus is 2. Remove none from the axis; the cell with "
        "gpus: 1 already covers it",
    ),
    (
        {"parallel": "none", "device": "cpu", "processes": 4},
        "parallel: none requires one process, but processes is 4. Remove none from the axis; the cell",
    ),
    (
        {"parallel": "ddp", "batch_size": 3},
        "batch_size 3 is not divisible by 2 GPUs. Use a multiple of 2, or set batch: per_gpu",
    ),
    (
        {"parallel": "ddp", "pass": "forward"},
        "pass: forward does not communicate, so it cannot use several GPUs. Set gpus: 1",
    ),
    *(
        (
            {"parallel": one, "precision": "fp16"},
            f"precision: fp16 scales gradients, which {one} does not support because each rank has "
            "only a part of them. Use bf16",
        )
        for one in ("zero1", "zero1_torch", "fsdp2")
    ),
    (
        {"parallel": "ddp", "compile": "model"},
        "compile: model with gpus: 2 is not supported yet. Use compile: blocks",
    ),
    (
        {"parallel": "ddp", "compile": "blocks", "compile_mode": "max-autotune"},
        "compile_mode: max-autotune with gpus: 2 is not supported yet",
    ),
    (
        {"parallel": "zero1_torch", "wire": "bf16"},
        "wire: bf16 is not available with zero1_torch, which sends the same data as DDP. Use "
        "parallel: ddp",
    ),
    *(
        (
            {"parallel": one, "optimizer": "sgd", "optimizer_step": "in_backward"},
            f"optimizer_step: in_backward cannot be combined with parallel: {one}",
        )
        for one in STRATEGIES[:-1]
    ),
    *(
        (
            {"parallel": "zero1", "optimizer": one},
            f"optimizer: {one} cannot be combined with parallel: zero1, which cuts parameters",
        )
        for one in ("muon", "adafactor", "torch.optim:Adagrad")
    ),
    (
        {"parallel": "zero1_torch", "optimizer": "muon"},
        "optimizer: muon cannot be combined with parallel: zero1_torch",
    ),
    (
        {"parallel": "fsdp2", "optimizer": "adafactor"},
        "optimizer: adafactor cannot be combined with parallel: fsdp2",
    ),
    ({"parallel": "fsdp2", "optimizer": "sgd"}, "Add optimizer_args: {fused: false}"),
    (
        {"parallel": "fsdp2", "checkpointing": "groups:2"},
        "checkpointing: groups:2 cannot be combined with parallel: fsdp2",
    ),
    ({"parallel": "dpd"}, "Input should be 'none', 'naive'"),
    ({"parallel": "ddp", "bucket_mb": 0}, "greater than 0"),
    ({"parallel": "ddp", "bucket_mb": "25"}, "valid number"),
    ({"parallel": "ddp", "wire": "fp8"}, "'fp32' or 'bf16'"),
    # Values that the axis cannot have are refused where it means nothing, too.
    ({"parallel": "naive", "bucket_mb": -1}, "greater than 0"),
    ({"gpus": 1, "wire": "fp8"}, "'fp32' or 'bf16'"),
    ({"gpus": 1, "reshard": "no"}, "valid boolean"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=str)
def test_combinations_that_ranks_cannot_share_are_refused(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        TrainStepParams.model_validate(GPUS | values)
    assert message in str(refused.value)


SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"gpus": 1, "parallel": "naive", "batch": "per_gpu", "wire": "bf16"}, {}),
    ({"parallel": "ddp", "bucket_mb": 5, "nccl_algo": "ring", "reshard": False}, {}),
    ({"device": "cpu", "gpus": 2, "parallel": "ddp"}, {"device": "cpu"}),
    ({"device": "mps", "processes": 2, "parallel": "ddp"}, {"device": "mps"}),
    (
        {"gpus": 2, "parallel": "naive", "bucket_mb": 5, "bucket_view": True, "reshard": False},
        {"gpus": 2, "parallel": "naive"},
    ),
    ({"gpus": 2, "parallel": "ddp", "bucket_mb": 25}, {"gpus": 2, "parallel": "ddp"}),
    (
        {"device": "cpu", "processes": 2, "parallel": "ddp", "nccl_algo": "tree"},
        {"device": "cpu", "processes": 2, "parallel": "ddp"},
    ),
    (
        {"gpus": 2, "parallel": "ddp", "precision": "bf16_pure", "wire": "bf16"},
        {"gpus": 2, "parallel": "ddp", "precision": "bf16_pure"},
    ),
]


@pytest.mark.parametrize(("values", "same"), SAME, ids=str)
def test_axes_without_a_meaning_are_no_part_of_the_id(
    values: dict[str, Any], same: dict[str, Any]
) -> None:
    one, other = (make_cell("train_step", {"size": "tiny"} | it) for it in (values, same))
    assert one.id == other.id
    assert one.params.values() == other.params.values()


def test_axes_with_a_meaning_are_part_of_the_id() -> None:
    base: dict[str, Any] = {"size": "tiny", "gpus": 2, "parallel": "ddp"}
    others: list[dict[str, Any]] = [
        {}, {"gpus": 4}, {"parallel": "flat"}, {"batch": "per_gpu"}, {"bucket_mb": 5},
        {"bucket_view": True}, {"wire": "bf16"}, {"nccl_algo": "ring"},
        {"parallel": "fsdp2"}, {"parallel": "fsdp2", "reshard": False},
    ]  # fmt: skip
    assert len({make_cell("train_step", base | one).id for one in others}) == len(others)


def test_sizes_of_a_step_are_those_of_all_ranks() -> None:
    def sizes(**values: Any) -> tuple[int, int, int]:
        params = TrainStepParams.model_validate(
            {"size": "tiny", "context_length": 8, "batch_size": 4, "gpus": 2, "parallel": "ddp"}
            | values
        )
        return params.global_batch_size, params.rank_batch_size, params.tokens

    assert sizes() == (4, 2, 32)
    assert sizes(batch="per_gpu") == (8, 4, 64)
    assert sizes(gpus=1, batch="per_gpu") == (4, 4, 32)
    assert sizes(gradient_accumulation=3) == (4, 2, 96)


def test_each_algorithm_of_nccl_has_its_variables() -> None:
    """NCCL itself chooses with `auto`."""
    from tasks.harness.group import NCCL_VARIABLES
    from tasks.spec.axes import words_of

    assert {"auto", *NCCL_VARIABLES} == set(words_of(TrainStepParams, "nccl_algo"))
