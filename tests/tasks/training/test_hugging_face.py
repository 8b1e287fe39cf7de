"""Models by name: hf:NAME. What needs transformers is left out where it is not installed."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tasks.harness.device import Skip
from tasks.harness.workload import Workload
from tasks.prediction.predictor import NoData, Predictor
from tasks.prediction.records import PredictionRequest
from tasks.spec.registry import make_cell
from tasks.train_step import build, build_on, work
from tasks.training.hugging_face import NoModelError, _refusal, read_config
from tasks.training.parameters import TrainStepParams
from tasks.training.presets import PRESETS

TINY: dict[str, Any] = {
    "device": "cpu", "model": "hf:llama", "context_length": 16, "batch_size": 2, "vocab_size": 100, "optimizer": "fused",
    "model_args": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 128, "tie_word_embeddings": True,
    },
}  # fmt: skip


def params_of(**values: Any) -> TrainStepParams:
    return TrainStepParams.model_validate(values)


def test_a_named_model_has_its_vocabulary_and_fused_attention() -> None:
    params = params_of(model="hf:gpt2")
    assert (params.attention, params.vocab_size) == ("sdpa", 50_257)
    assert params_of(model="hf:gpt2", vocab_size=9, attention="naive").vocab_size == 9
    assert params_of(model="a:B").attention == "naive"
    explicit = {"model": "hf:gpt2", "attention": "sdpa", "vocab_size": 50_257}
    assert make_cell("train_step", explicit).id == make_cell("train_step", {"model": "hf:gpt2"}).id


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attention": "torch_softmax"}, "exists for the built-in model only. For hf: models, use"),
        ({"context_length": 2048}, "context_length: 2048 is too long, gpt2 has 1024 positions"),
        ({"num_kv_heads": 2}, "are of the built-in model"),
        ({"size": "tiny"}, "name the model in exactly one way"),
    ],
)
def test_values_that_a_named_model_cannot_have_are_refused(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        params_of(model="hf:gpt2", **values)
    with pytest.raises(ValidationError, match=r"package\.module:Factory"):
        params_of(model="hf:")


def test_without_transformers_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"Run pip install transformers$"):
        build_on(NoData(), params_of(model="hf:gpt2", device="cpu"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("You are trying to access a gated repo.", "x/y: the config is gated. Accept the licence"),
        ("… contains custom code … `trust_remote_code=True`", "needs trust_remote_code, which is"),
        (
            "We couldn't connect to 'https://huggingface.co'",
            "no preset, and no config in the cache",
        ),
    ],
)
def test_a_config_that_cannot_be_read_is_explained_in_one_line(text: str, expected: str) -> None:
    assert expected in _refusal("x/y", text, near=[])


@pytest.mark.slow
def test_a_name_that_is_nearly_known_is_suggested() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(NoModelError, match=r"Did you mean hf:gpt2\? Otherwise use a folder"):
        read_config(params_of(model="hf:gtp2"))


def test_the_work_of_a_named_model_follows_from_its_parameters() -> None:
    shape = {"context_length": 10, "batch_size": 2}
    count = PRESETS["gpt2"].parameters
    assert work(params_of(model="hf:gpt2", **shape)) == 6 * count * 20
    assert work(params_of(model="hf:gpt2", **shape, **{"pass": "forward"})) == 2 * count * 20


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    pytest.importorskip("transformers")
    workload = build_on(NoData(), params_of(model=f"hf:{name}", device="cpu", context_length=8))
    assert workload.facts["parameters"] == PRESETS[name].parameters
    assert workload.facts["attention_used"] in ("sdpa", "eager")


def built(**values: Any) -> Workload:
    pytest.importorskip("transformers")
    return build(params_of(**TINY | values))


@pytest.mark.slow
def test_a_config_class_trains_and_checkpoints_leave_its_gradients() -> None:
    found = []
    for how in ("none", "blocks", "groups:2", "selective"):
        workload = built(checkpointing=how, **{"pass": "forward_backward"})
        workload.step(lambda name: nullcontext())
        assert workload.model is not None
        found.append([one.grad for one in workload.model.parameters()])
    for gradients in found[1:]:
        for one, other in zip(found[0], gradients, strict=True):
            assert one is not None
            assert other is not None
            torch.testing.assert_close(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("values", [{"loss": "model"}, {"loss": "chunked"}, {"lora": 4}], ids=str)
def test_options_work_with_models_of_transformers(values: dict[str, Any]) -> None:
    workload = built(**values)
    workload.step(lambda name: nullcontext())
    assert workload.optimizer_steps is not None
    assert workload.optimizer_steps() == 1


@pytest.mark.slow
def test_a_model_that_caps_its_logits_has_no_loss_in_chunks() -> None:
    with pytest.raises(Skip, match="caps its logits"):
        built(model="hf:gemma2", model_args={**TINY["model_args"], "head_dim": 8}, loss="chunked")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "vit"])
def test_a_model_that_predicts_no_next_token_is_refused(name: str) -> None:
    message = f"hf:{name}: {name} is no model that predicts the next token. Use one with a class"
    values = {"model": f"hf:{name}", "model_args": {}}
    with pytest.raises(NoModelError, match=message):
        built(**values)
    cell = make_cell("train_step", TINY | values | {"device": "cuda"})
    assert Predictor().predict(PredictionRequest(cell)).reason.startswith(message)


@pytest.mark.slow
def test_memory_and_flops_of_a_hugging_face_model_are_predicted() -> None:
    pytest.importorskip("transformers")
    cell = make_cell("train_step", TINY | {"device": "cuda", "checkpointing": "blocks"})
    prediction = Predictor().predict(PredictionRequest(cell))
    assert prediction.how == "modelled", prediction.reason
    assert {one.phase for one in prediction.samples if one.metric == "flops"} == {
        "forward",
        "backward",
    }


NARROW: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 3, "vocab_size": 128},
    "qwen2": {**TINY["model_args"], "num_hidden_layers": 3},
    "llama": {**TINY["model_args"], "num_hidden_layers": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NARROW)
def test_compiled_blocks_of_hugging_face_models_are_predicted_from_code(name: str) -> None:
    pytest.importorskip("transformers")
    values = {"device": "cuda", "compile": "blocks", "precision": "bf16"}
    model = {"model": f"hf:{name}", "model_args": NARROW[name]}
    prediction = Predictor().predict(
        PredictionRequest(make_cell("train_step", TINY | values | model))
    )
    assert prediction.how == "compiled", prediction.reason


@pytest.mark.slow
def test_learned_positions_end_where_the_config_says() -> None:
    model_args = NARROW["gpt2"] | {"n_positions": 8}
    with pytest.raises(NoModelError, match="context_length: 16 is too long, hf:gpt2 has 8 positio"):
        built(model="hf:gpt2", model_args=model_args)
    assert built(model_args=TINY["model_args"] | {"max_position_embeddings": 8})  # rotated ones


@pytest.mark.slow
def test_a_config_in_a_folder_is_found_where_modules_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net").mkdir()
    config = {"model_type": "llama", **TINY["model_args"]}
    (tmp_path / "net" / "config.json").write_text(json.dumps(config))
    monkeypatch.syspath_prepend(str(tmp_path))
    workload = built(model="hf:net", model_args={})
    assert workload.facts["parameters"] == built().facts["parameters"]
    assert workload.facts["model_source"]
    assert built().facts["model_source"] is None


TEXT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
PROJECTED = {"vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64}
# Configs of a language model with a part for images, and how the language model is named.
NESTED: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": TEXT, "vision_config": VISION, "mm_tokens_per_image": 4},
    "llama4": {
        "text_config": {**TEXT, "intermediate_size_mlp": 128, "num_local_experts": 2},
        "vision_config": {**VISION, **PROJECTED},
    },
    "fuyu": {"text_config": {**TEXT, "model_type": "persimmon"}},
    "got_ocr2": {"text_config": {**TEXT, "model_type": "qwen2"}, "vision_config": {
        "hidden_size": 32, "output_channels": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 64, "patch_size": 16, "mlp_dim": 64, "window_size": 2,
        "global_attn_indexes": [0],
    }},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", NESTED)
def test_the_language_model_within_a_config_is_trained(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    workload = built(model=f"hf:{name}", model_args=NESTED[name])
    workload.step(lambda phase: nullcontext())
    config = transformers.AutoConfig.for_model(name, **NESTED[name])
    plain = transformers.AutoModelForCausalLM.from_config(config)
    assert workload.facts["parameters"] == sum(one.numel() for one in plain.parameters())
    params = params_of(**TINY | {"model": f"hf:{name}", "model_args": NESTED[name]})
    assert not read_config(params).get_text_config().use_cache
    with pytest.raises(NoModelError, match=f"vocab_size 301 is larger than the 300 of hf:{name}"):
        built(model=f"hf:{name}", model_args=NESTED[name], vocab_size=301)


@pytest.mark.slow
def test_values_of_the_language_model_within_a_config_are_written_below_its_name() -> None:
    with pytest.raises(NoModelError, match="num_hidden_layers belongs to the language model"):
        built(model="hf:gemma3", model_args=NESTED["gemma3"] | {"num_hidden_layers": 1})


# Of the default configs of all causal language models in transformers 5.24 those that are refused,
# because transformers itself does not build them. Other versions may refuse fewer.
REFUSED = {
    "cohere_compass_text": "KeyError: 'full_attention'",
    "dbrx": "has no attribute 'rope_theta'",
    "dots1": "empty() takes 1 positional argument",
    "gemma3n": "requires the timm library",
    "gemma4_assistant": "hidden_size_per_layer_input must be 0",
    "hunyuan_v1_dense": "'NoneType' and 'float'",
    "hunyuan_v1_moe": "'NoneType' and 'float'",
    "lfm2_moe": "'NoneType' object is not subscriptable",
    "ministral": "'NoneType' and 'float'",
    "musicgen": "has no attribute 'dropout'",
    "musicgen_melody": "has no attribute 'dropout'",
    "nemotron": "'int' and 'NoneType'",
    "qwen4_exp": "'NoneType' and 'NoneType'",
    "qwen4_exp_text": "'NoneType' and 'NoneType'",
    "reformer": "make sure that `is_decoder=True`",
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers
def test_causal_models_of_transformers_are_built_or_refused_with_a_reason() -> None:
    names = pytest.importorskip("transformers.models.auto.modeling_auto")
    refused = {}
    for name in names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        values = {"model": f"hf:{name}", "device": "cpu", "context_length": 16, "vocab_size": 100}
        try:
            build_on(NoData(), params_of(**values))
        except NoModelError as error:
            refused[name] = str(error)
    unexpected = {name: why for name, why in refused.items() if name not in REFUSED}
    assert unexpected == {}
    for name, why in refused.items():
        assert why.startswith(f"hf:{name}: transformers does not build this config: ")
        assert REFUSED[name] in why
