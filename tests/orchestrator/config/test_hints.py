from __future__ import annotations

import time

import pytest

from orchestrator.common.errors import ConfigError
from orchestrator.config.grid import expand
from orchestrator.config.schema import parse_config
from orchestrator.config.selection import Selection, parse_selection

HEAD = "name: x\ngrids:\n"
OWN_MODEL = "Provide your own model: model: package.module:Class"


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as refused:
        expand(*parse_config(text, "C.yaml"), Selection())
    message = str(refused.value)
    assert message.isprintable()
    return message


def fixed(values: str) -> str:
    return f"{HEAD}  - {{task: train_step, fixed: {{{values}}}}}"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ("device: gpu", "fixed.device: 'gpu' is not allowed. Did you mean 'cuda'?"),
        ("num_key_value_heads: 2", "Did you mean 'num_kv_heads'?"),
        ("n_kv_heads: 2", "Did you mean 'num_kv_heads'?"),
        ("num_heads: 2", "name the model in exactly one way"),
        ("num_kv_heads: 3", "num_kv_heads 3 does not divide num_heads 2"),
        ("tie_word_embeddings: true", "Did you mean 'tie_embeddings'?"),
        (
            "optimizer: adamw",
            "fixed.optimizer: 'adamw' is not allowed. Did you mean 'fused'? fused, foreach and "
            "loop are torch's AdamW",
        ),
        (
            "optimizer: adamw8bit",
            "'adamw8bit' is not supported. Name the class of a package: bitsandbytes.optim:AdamW",
        ),
        ("optimizer: lion", "Allowed: course, foreach, fused, loop, sgd, adafactor, muon"),
        (
            "optimizer: fused, optimizer_step: in_backward, gradient_accumulation: 4",
            "gradient_accumulation: 4 cannot be combined with optimizer_step: in_backward, which "
            "would step in every backward pass. Remove one of them",
        ),
        (
            "optimizer_step: in_backward",
            "optimizer: course cannot be combined with optimizer_step: in_backward. Choose fused",
        ),
        (
            "optimizer: sgd, optimizer_step: in_backward, precision: fp16",
            "precision: fp16 cannot be combined with optimizer_step: in_backward",
        ),
        ("optimizer_args: {lr: 0.1}", "optimizer_args: the course's AdamW has none"),
        ("precision: fp8", "'fp8' is not supported. Write bf16 or fp16"),
        ("dropout: 0.1", f"train_step does not support dropout. {OWN_MODEL}"),
        ("gradient_accumulation_steps: 2", "Did you mean 'gradient_accumulation'?"),
        ("activation_checkpointing: true", "Did you mean 'checkpointing'?"),
        ("gradient_checkpointing: true", "Did you mean 'checkpointing'?"),
        (
            "checkpointing: 'every:2'",
            "fixed.checkpointing: 'every:2' is not allowed. Did you mean 'groups:2'?",
        ),
        ("checkpointing: 'groups:0'", "Allowed: none, blocks, groups:2, selective, selective:2"),
        (
            "gradient_accumulation: 4, pass: forward_grad",
            "gradient_accumulation: 4 needs a backward pass. Use it with pass train_step or",
        ),
    ],
)
def test_a_setting_of_other_programs_gets_one_sentence(values: str, expected: str) -> None:
    assert expected in refusal(fixed(f"size: tiny, {values}"))


@pytest.mark.parametrize(
    ("grid", "expected"),
    [
        ("zip: [{size: tiny}]", "size: is not a list. Write [tiny], or put it under fixed."),
        (
            "zip: {size: [tiny]}",
            "grids[0].zip: is not a list of groups. Write zip: [{size: [tiny, mini], batch_size",
        ),
        (
            "axes: {seed: !mine [1]}",
            "C.yaml:3: grids[0].axes.seed: a !mine is neither text, number",
        ),
        ("axes: {seed: [2026-01-01]}", "axes.seed[0]: a timestamp is neither text, number, list"),
        ("exclude: null", "grids[0].exclude: has no value. Write a list, or leave it out"),
        ("axes: {size: tinny}", "grids[0].axes.size: 'tinny' is not allowed. Did you mean 'tiny'?"),
        ("fixed: {size: [tiny]}", "fixed.size: is a list. Put it under axes: each value is then"),
        ("size: tiny", "grids[0].size: is an axis. Put it under fixed, or as a list under axes"),
    ],
)
def test_a_grid_of_another_form_is_answered_with_the_right_form(grid: str, expected: str) -> None:
    assert expected in refusal(f"{HEAD}  - {{task: train_step, {grid}}}")


def test_a_key_of_a_mapping_can_be_an_axis() -> None:
    text = f"""{HEAD}
  - task: train_step
    axes: {{model_args.layers: [2, 4], model_args.kind: [a, b]}}
    fixed: {{model: "a:B", model_args: {{width: 8}}}}
    exclude: [{{model_args.layers: 2, model_args.kind: [b]}}]
"""
    selection = parse_selection([], ["model_args.kind=a"])
    cells = expand(*parse_config(text, "C.yaml"), selection).cells
    assert [cell.params.values()["model_args"] for cell in cells] == [
        {"width": 8, "layers": 2, "kind": "a"},
        {"width": 8, "layers": 4, "kind": "a"},
    ]
    set_layers = parse_selection(["model_args.layers=6"], [])
    cells = expand(*parse_config(text, "C.yaml"), set_layers).cells
    assert {cell.params.values()["model_args"]["layers"] for cell in cells} == {6}


LONG = "0x" + "f" * 4000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"{HEAD}  - {{task: train_step, axes: {{context_length: [{LONG}]}}}}",
            "C.yaml:3: grids[0].axes.context_length[0]: integers must fit in 63 bits",
        ),
        (fixed(f"seed: {'9' * 5000}"), "fixed.seed: integers must fit in 63 bits"),
        (fixed(f"seed: 0o{'7' * 6000}"), "integers must fit in 63 bits"),
        (fixed(f"model: 'a:B', model_args: {{n: [-{'1' * 21}]}}"), "integers must fit in 63 bits"),
        (f"{HEAD}limits: {{attempts: {LONG}}}", "limits.attempts: integers must fit"),
        (fixed(f"? {LONG}\n: 1"), "integers must fit in 63 bits"),
        (fixed("size: tiny") + "\nlimits: {attempts: 1000001}", "less than or equal to 1000000"),
        ("? " * 16 + "a\n", "C.yaml:1: a key is a mapping. Write NAME: value"),
        ("? " * 5000 + "a\n", "more than 100 deep"),
        ("- " * 5000 + "a\n", "more than 100 deep"),
        ("[1, 2]: 3", "C.yaml:1: a key is a seq"),
        (fixed("model: 'a:B', model_args: {null: 1}"), "a key is a null"),
        (fixed("model: 'a:B', model_args: {a: [-.inf]}"), "model_args.a[0]: -inf is not finite"),
        (
            fixed("model: 'a:B', model_args: {a: [\"\\ud800\"]}"),
            "model_args.a[0]: a text has half of a surrogate pair. Write the letter itself",
        ),
        (fixed("model: 'a:B', model_args: {\"\\udfff\": 1}"), "half of a surrogate pair"),
        ('name: "\\ud83d\\ude00"\n', "C.yaml:1: name: a text has half of a surrogate pair"),
        (f"name: {'x' * 201}\n", "at most 200 characters"),
        (fixed(f"size: {'x' * 500}"), f"size: '{'x' * 58}… is not allowed"),
        (fixed(f"{'x' * 500}: 1"), f"no axis '{'x' * 58}…. Allowed"),
    ],
)
def test_a_small_config_that_would_take_long_is_refused_at_its_place(
    text: str, expected: str
) -> None:
    began_s = time.process_time()
    assert expected in refusal(text)
    assert time.process_time() - began_s < 1


def test_a_mapping_of_too_many_keys_is_refused_before_it_is_read_to_its_end() -> None:
    text = "env: {" + ", ".join(f"K{number}: v" for number in range(10_001)) + "}"
    assert "C.yaml:1: a mapping has more than 10,000 values" in refusal(text)


@pytest.mark.parametrize("option", ["--set", "--where"])
def test_values_of_the_command_line_have_the_same_limits(option: str) -> None:
    texts = [f"seed={LONG}"]
    with pytest.raises(ConfigError, match=r"^--\w+ seed: .*integers must fit in 63 bits"):
        parse_selection(texts, []) if option == "--set" else parse_selection([], texts)
