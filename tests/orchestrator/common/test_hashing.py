"""The digests by which files, names and samples are known again, told by what they were before there was one place for them."""

from __future__ import annotations

from pathlib import Path

from orchestrator.common.hashing import file_digest, sha256
from orchestrator.config.selection import choose_sample
from orchestrator.publication.redaction import called
from tasks.spec.registry import make_cell

KNOWN = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # of "abc", as FIPS 180-2 has it


def test_a_file_is_known_by_what_a_text_would_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("abc")
    assert file_digest(tmp_path / "file") == sha256("abc") == KNOWN


def test_published_gpu_names_and_drawn_samples_do_not_change() -> None:
    """These names are in what was published, and a sample is drawn again by the next command."""
    assert called("GPU-abc") == f"GPU {KNOWN[:8]}"
    cells = [make_cell("train_step", {"size": "tiny", "seed": seed}) for seed in range(20)]
    assert [cell.params.seed for cell in choose_sample(cells, 0.2)] == [3, 7, 9, 15]
