from __future__ import annotations

import pytest

from orchestrator.common.errors import SweepError
from orchestrator.common.suggestions import suggestion
from tasks.spec.registry import all_axes

PRECISIONS = ["fp32", "tf32", "bf16", "fp16", "bf16_pure"]
DEVICES = ["cuda", "cpu", "mps"]


@pytest.mark.parametrize(
    ("word", "allowed", "meant"),
    [
        ("gpu", DEVICES, "cuda"),
        ("CUDA:0", DEVICES, "cuda"),
        ("bfloat16", PRECISIONS, "bf16"),
        ("BF-16", PRECISIONS, "bf16"),
        ("fp23", PRECISIONS, "fp32"),
        ("seq_len", ["context_length", "batch_size"], "context_length"),
        ("context_len", ["context_length", "batch_size"], "context_length"),
        ("max_seq_length", ["context_length", "batch_size"], "context_length"),
        ("ctx", ["context_length", "checkpointing"], "context_length"),
        ("batch", ["context_length", "batch_size"], "batch_size"),
        ("bs", ["context_length", "batch_size"], "batch_size"),
        ("dtype", ["device", "precision"], "precision"),
        ("ckpt", ["context_length", "checkpointing"], "checkpointing"),
        ("n_layer", ["num_layers", "num_heads"], "num_layers"),
        ("train_stpe", ["train_step", "matmul"], "train_step"),
    ],
)
def test_the_suggested_word_means_what_was_written(
    word: str, allowed: list[str], meant: str
) -> None:
    assert suggestion(word, allowed) == f"Did you mean {meant!r}?"


@pytest.mark.parametrize(
    ("word", "allowed"),
    [
        ("gpu", ["cpu"]),
        ("num_kv_heads", ["num_heads", "num_layers"]),
        ("fp8", PRECISIONS),
        ("tf16", PRECISIONS),
        ("h200", ["h100", "a100"]),
        ("L4", ["L40S"]),
        ("backward", ["forward", "forward_backward"]),
        ("forw", ["forward", "forward_backward"]),  # either may be meant
        ("", ["cpu"]),
    ],
)
def test_a_word_of_another_meaning_is_never_suggested(word: str, allowed: list[str]) -> None:
    assert suggestion(word, allowed) == f"Allowed: {', '.join(allowed)}"


SETTINGS = {
    "checkpointing": "gradient_checkpointing activation_checkpointing recompute",
    "gradient_accumulation": "grad_accum gradient_accumulation_steps",
    "num_kv_heads": "n_kv_heads num_key_value_heads",
    "context_length": "seq_len block_size max_seq_length",
    "batch_size": "micro_batch_size",
    "d_model": "hidden_size n_embd",
    "d_ff": "intermediate_size",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "precision": "dtype mixed_precision",
    "attention": "attn_implementation",
}


@pytest.mark.parametrize("axis", SETTINGS)
def test_settings_of_other_programs_are_known_among_all_axes(axis: str) -> None:
    for word in SETTINGS[axis].split():
        assert suggestion(word, all_axes()) == f"Did you mean {axis!r}?"


def test_only_a_list_longer_than_that_of_axes_is_cut() -> None:
    assert suggestion("?", all_axes()).endswith(list(all_axes())[-1])
    assert suggestion("?", range(100)).endswith("78, 79 and 20 more")
    assert suggestion("?", []) == ""


@pytest.mark.parametrize("letter", ["\n", "\r", "\x1b", "\u2028", "\x85", "\ud800"])
def test_an_error_is_one_line_of_printable_letters(letter: str) -> None:
    error = SweepError(f"a{letter}b: is missing", f"Run sweep run 'c{letter}d'")
    assert str(error).isprintable()
    assert error.message.startswith("a\\")


def test_a_message_of_another_program_and_its_remedy_have_one_full_stop_between_them() -> None:
    assert str(SweepError("a: is torn.", "Copy it again")) == "a: is torn. Copy it again"
    assert str(SweepError("a: is torn.")) == "a: is torn."
