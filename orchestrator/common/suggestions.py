"""Suggestions for words that are not allowed: a synonym, another spelling, or all allowed words.

A suggestion has the meaning of what was written. The nearest spelling often has not: `cpu` is near
to `gpu`, `num_heads` to `num_kv_heads` and `L40S` to `L4`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from functools import partial

from orchestrator.common.text import first_of, letters_of

_LEAST_RATIO = 0.75  # a swap or another letter in a word of four letters
_FEWEST_LETTERS = 4  # with one letter changed, shorter words are often other words
_FEWEST_OF_PREFIX = 3
_MOST_LISTED = 80  # all axes of a task, but not all cells of a run

# Words of other programs, in lower case and without separators, by what this program calls them.
_SYNONYMS = {
    "cuda": "gpu cuda0 nvidia",
    "mps": "metal",
    "fp32": "float32 float single full f32",
    "tf32": "tensorfloat32",
    "fp16": "float16 half f16",
    "bf16": "bfloat16 bfloat",
    "eager": "false none off no uncompiled",
    "model": "true",
    "sdpa": "scaleddotproductattention scaleddotproduct",
    "flash": "flashattention fa",
    "flex": "flexattention",
    "efficient": "memefficient memoryefficient xformers",
    "naive": "eager vanilla manual plain",
    "train_step": "train training step",
    "forward": "inference infer eval fwd",
    "forward_backward": "fwdbwd",
    "matmul": "gemm mm",
    "context_length": "seq seqlen seqlength sequencelength blocksize maxseqlen maxseqlength maxlength "
    "nctx ctx ctxlen",
    "batch_size": "bs microbatchsize mbs batches",
    "num_layers": "nlayer nlayers layers numhiddenlayers depth",
    "num_heads": "nhead nheads heads numattentionheads",
    "num_kv_heads": "nkvheads nkvhead kvheads numkeyvalueheads numquerygroups gqa",
    "vocab_size": "nvocab vocabulary",
    "tie_embeddings": "tiewordembeddings weighttying tieweights",
    "d_model": "hiddensize nembd dim embeddim hiddendim width",
    "d_ff": "intermediatesize ffnhiddensize ffndim dffn mlpdim",
    "checkpointing": "gradientcheckpointing activationcheckpointing activationcheckpoint "
    "gradientcheckpoint ckpt gradckpt actckpt recompute recomputation remat",
    "fused": "adamw adam adamwfused",
    "lora": "lorarank lorar peft",
    "loss": "lossfn criterion",
    "chunked": "chunk fused fusedlinear linearcrossentropy liger",
    "optimizer": "optim opt",
    "groups:2": "every2 groups group",
    "gradient_accumulation": "gradaccum gradaccumsteps gradientaccumulationsteps accumulation "
    "accumulationsteps",
    "precision": "dtype torchdtype amp mixedprecision",
    "warmup_steps": "numwarmup nwarmup",
    "measured_steps": "steps numsteps iters iterations",
    "attention": "attn attnimplementation",
    "compile": "torchcompile",
    "model_args": "modelkwargs kwargs",
    "gpus": "numgpus ngpus ngpu",
    "gpu_kind": "gpu",
}


def suggestion(word: object, allowed: Iterable[object]) -> str:
    """Return the remedy for a word that is not allowed: the word that was meant, or all of them.

    Empty if no word is allowed.
    """
    words = list(map(str, allowed))
    meant = _meant(str(word), words)
    if meant:
        return f"Did you mean {meant!r}?"
    if not words:
        return ""
    return f"Allowed: {first_of(words, _MOST_LISTED)}"


def _meant(word: str, allowed: Sequence[str]) -> str | None:
    letters = letters_of(word)
    if not letters:
        return None
    for known in allowed:
        if letters in (letters_of(known), *_SYNONYMS.get(known, "").split()):
            return known
    longer = list(filter(partial(_is_abbreviation, word), allowed))
    if len(longer) == 1:
        return longer[0]
    similar = filter(partial(_is_misspelling, word), allowed)
    return max(similar, key=lambda known: _ratio(letters, letters_of(known)), default=None)


def _parts(word: str) -> list[str]:
    return re.findall(r"[^\W_]+", word.casefold())


def _is_abbreviation(word: str, known: str) -> bool:
    """Return True if each part of the word begins the same part of the known one."""
    parts, known_parts = _parts(word), _parts(known)
    return len(parts) <= len(known_parts) and all(map(_is_beginning, parts, known_parts))


def _is_beginning(a: str, b: str) -> bool:
    return b == a or (len(a) >= _FEWEST_OF_PREFIX and b.startswith(a))


def _is_misspelling(word: str, known: str) -> bool:
    parts, known_parts = _parts(word), _parts(known)
    # Another part or digit gives another meaning: `num_kv_heads`, `fp8`, `H200`.
    return len(parts) == len(known_parts) and all(map(_is_similar, parts, known_parts))


def _is_similar(a: str, b: str) -> bool:
    if re.search(r"\d", a + b):
        return sorted(a) == sorted(b)
    return a == b or (min(len(a), len(b)) >= _FEWEST_LETTERS and _ratio(a, b) >= _LEAST_RATIO)


def _ratio(a: str, b: str) -> float:
    return SequenceMatcher(None, a, b).ratio()
