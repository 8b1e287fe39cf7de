"""Snapshots written by hand, of which every number can be worked out on paper, and two of an H200."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from typing import Any

import pytest

from tasks.snapshots.attribution import (
    AT_BEGIN,
    AT_END,
    Book,
    Holding,
    Role,
    RoleEvidence,
    attribute,
)
from tasks.snapshots.frames import call_chain
from tasks.snapshots.replay import BEFORE, Record, replay, vanished
from tasks.snapshots.summary import OUT_OF_MEMORY, PEAK, to_curve, to_rows, unlabelled_bytes
from tests.conftest import ROOT

H200 = json.loads(
    gzip.decompress((ROOT / "tests" / "data" / "h200_snapshots.json.gz").read_bytes())
)


class Recorder:
    """Builds a snapshot, an event a µs. Addresses are letters."""

    def __init__(self, **there_before: int) -> None:
        self._live = {address: (size, False) for address, size in there_before.items()}
        self._events: list[dict[str, Any]] = []
        self._annotations: list[dict[str, Any]] = []
        self._clock = 0

    def alloc(
        self, address: str, size: int, part: str = "", *frames: tuple[str, int, str]
    ) -> Recorder:
        named = [
            {"filename": filename, "line": line, "name": name} for filename, line, name in frames
        ]
        self._live[address] = (size, True)
        return self._event("alloc", address, size, part, named)

    def free(self, *addresses: str) -> Recorder:
        for address in addresses:
            size, _ = self._live.pop(address)
            self._event("free_requested", address, size, "somewhere else", [])._event(
                "free_completed", address, size, "", []
            )
        return self

    def begin(self, phase: str) -> Recorder:
        return self._annotate(phase, "START")

    def end(self, phase: str) -> Recorder:
        return self._annotate(phase, "END")

    def record(self, last: int | None = None, rounding: int = 0) -> Record:
        return replay(self.snapshot(last, rounding))

    def snapshot(self, last: int | None = None, rounding: int = 0) -> dict[str, Any]:
        blocks = [
            {
                "address": ord(a),
                "size": size + rounding,
                "requested_size": size,
                "state": "active_allocated",
            }
            for a, (size, _) in self._live.items()
        ]
        free = {"address": 1, "size": 10**6, "requested_size": 0, "state": "inactive"}
        elsewhere = {
            "address": ord("a"),
            "size": 5,
            "requested_size": 5,
            "state": "active_allocated",
        }
        return {
            "segments": [
                {"device": 0, "blocks": [*blocks, free]},
                {"device": 1, "blocks": [elsewhere]},
            ],
            "device_traces": [self._events[-last:] if last else self._events, []],
            "external_annotations": self._annotations,
        }

    def _event(
        self, action: str, address: str, size: int, part: str, frames: list[Any]
    ) -> Recorder:
        entry = {
            "action": action,
            "addr": ord(address),
            "size": size,
            "user_metadata": part,
            "frames": frames,
        }
        self._events.append({**entry, "time_us": self._tick()})
        return self

    def _annotate(self, phase: str, stage: str) -> Recorder:
        for name in (
            f"phase::{phase}",
            "Optimizer.step#AdamW.step",
        ):  # torch's own ranges are on record too
            self._annotations.append(
                {"name": name, "stage": stage, "device": 0, "time_us": self._tick()}
            )
        return self

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def a_step() -> Recorder:
    """a: parameter, b: old gradient, c: hidden; then activations, a gradient, optimizer state."""
    recorder = Recorder(a=1000, b=1000, c=7).free("b").begin("forward")
    recorder.alloc("d", 100, "mod::layers.0.ffn").alloc("e", 30, "mod::layers.0.ffn").free(
        "e"
    ).alloc("f", 5, "").end("forward")
    recorder.begin("backward").alloc("g", 300, "softmax").free("d").alloc(
        "h", 1000, "mod::layers.0.ffn.w1"
    ).free("g", "f")
    recorder.end("backward").begin("optimizer").alloc("i", 400, "").alloc("j", 1000, "").free(
        "i"
    ).end("optimizer")
    return recorder


BOOK: Book = {
    AT_BEGIN: [
        Holding(ord("a"), Role.PARAMETERS, "layers.0.ffn.w1.weight"),
        Holding(ord("b"), Role.GRADIENTS, "layers.0.ffn.w1.weight"),
    ],
    "backward": [
        Holding(ord("h"), Role.GRADIENTS, "layers.0.ffn.w1.weight"),
        Holding(ord("a"), Role.INPUTS),
    ],
    AT_END: [Holding(ord("j"), Role.OPTIMIZER_STATE)],
}


def test_live_bytes_phases_and_the_peak_of_a_step_follow_from_its_record() -> None:
    record = a_step().record()
    assert record.live_bytes() == [
        2007, 1007, 1107, 1137, 1137, 1107, 1112, 1412, 1412, 1312, 2312, 2312, 2012, 2012, 2007, 2407, 3407, 3407, 3007,
    ]  # fmt: skip
    assert [phase.name for phase in record.step] == ["forward", "backward", "optimizer"]
    assert record.peak() == 16
    assert [record.phase_at(moment) for moment in (0, 2, 6)] == ["", "forward", "forward"]
    assert [record.phase_at(moment) for moment in (7, 13, 15, 18)] == [
        "backward",
        "backward",
        "optimizer",
        "optimizer",
    ]
    assert {chr(allocation.address) for allocation in record.live_at(16)} == set("acijh")


def test_each_allocation_has_its_role_part_and_evidence() -> None:
    labelled = attribute(a_step().record(), BOOK)
    found = {
        (chr(one.allocation.address), one.allocation.start == BEFORE): (one.role, one.part, one.how)
        for one in labelled
    }
    assert found == {
        ("a", True): (Role.PARAMETERS, "ffn", RoleEvidence.BOOK),
        ("b", True): (Role.GRADIENTS, "ffn", RoleEvidence.BOOK),
        ("c", True): (Role.UNLABELLED, "", RoleEvidence.NONE),
        ("d", False): (Role.ACTIVATIONS, "ffn", RoleEvidence.PART),
        ("e", False): (Role.TEMPORARY, "ffn", RoleEvidence.PART),
        ("f", False): (Role.ACTIVATIONS, "", RoleEvidence.PHASE),
        ("g", False): (Role.TEMPORARY, "softmax", RoleEvidence.PART),
        ("h", False): (Role.GRADIENTS, "ffn", RoleEvidence.BOOK),
        ("i", False): (Role.TEMPORARY, "optimizer", RoleEvidence.PART),
        ("j", False): (Role.OPTIMIZER_STATE, "", RoleEvidence.BOOK),
    }


def test_an_address_that_is_used_again_is_another_allocation() -> None:
    recorder = (
        Recorder()
        .begin("forward")
        .alloc("a", 10, "ffn")
        .free("a")
        .alloc("a", 20, "ffn")
        .end("forward")
    )
    book: Book = {"forward": [Holding(ord("a"), Role.OPTIMIZER_STATE)]}
    found = {one.allocation.size_bytes: one.role for one in attribute(recorder.record(), book)}
    assert found == {10: Role.TEMPORARY, 20: Role.OPTIMIZER_STATE}


def test_rows_are_alike_in_all_and_add_up_with_the_slack() -> None:
    recorder = Recorder(p=50).begin("forward")
    for address in "abc":
        recorder.alloc(
            address, 100, "mod::layers.3.ffn", ("/home/me/model/layers.py", 7, "forward")
        )
    recorder.alloc("d", 100, "mod::layers.4.ffn", ("/home/me/model/layers.py", 8, "forward")).end(
        "forward"
    )
    record = recorder.record(rounding=3)
    rows = to_rows(attribute(record, {}), record.peak(), PEAK, "forward", 12)
    assert [
        (row.role, row.part, row.call_chain, row.size_bytes, row.count, row.total_bytes)
        for row in rows
    ] == [
        ("activations", "ffn", "model/layers.py:7 forward", 100, 3, 300),
        ("activations", "ffn", "model/layers.py:8 forward", 100, 1, 100),
        ("unlabelled", "", "", 50, 1, 50),
        ("slack", "", "", 12, 0, 12),
    ]
    assert unlabelled_bytes(rows) == 50
    assert record.rounding_bytes == 5 * 3


def test_a_record_that_lost_its_beginning_still_knows_what_lives() -> None:
    whole, short = a_step().record(), a_step().record(last=9)
    assert short.entries == 9
    assert short.live_bytes() == whole.live_bytes()[-9:]
    assert [phase.name for phase in short.step] == ["forward", "backward", "optimizer"]
    roles = {chr(one.allocation.address): one.role for one in attribute(short, BOOK)}
    assert roles["h"] == Role.GRADIENTS  # by the book, for what made it is lost
    assert roles["a"] == Role.PARAMETERS


def test_the_last_of_several_steps_counts() -> None:
    recorder = Recorder()
    for left in "yz":
        recorder.begin("forward").alloc("a", 50, "ffn").free("a").end("forward")
        recorder.begin("backward").end("backward").alloc(left, 1)
    recorder.begin("forward").alloc("b", 10, "ffn").end("forward")
    record = recorder.record()
    assert record.begin == 7
    assert record.live_bytes()[record.peak()] == 12
    assert {row.event for row in to_curve(record, attribute(record, {}))} == {7, 8}


def test_where_memory_ran_out_what_was_made_until_then_is_kept() -> None:
    recorder = (
        Recorder(a=5)
        .begin("forward")
        .alloc("b", 70, "mod::layers.0.ffn")
        .alloc("c", 10, "softmax")
        .free("c")
    )
    record = recorder.record(rounding=2)
    rows = to_rows(
        attribute(record, BOOK), record.entries - 1, OUT_OF_MEMORY, "forward", record.rounding_bytes
    )
    assert {(row.moment, row.role, row.part, row.total_bytes) for row in rows} == {
        ("out of memory", "parameters", "ffn", 5),
        ("out of memory", "activations", "ffn", 70),
        ("out of memory", "slack", "", 4),
    }


def test_without_a_record_roles_come_only_from_registered_tensors() -> None:
    record = replay({"segments": Recorder(a=5, b=6).snapshot()["segments"], "device_traces": [[]]})
    labelled = attribute(record, {AT_END: [Holding(ord("a"), Role.PARAMETERS, "w")]})
    assert (record.entries, record.peak(), record.live_bytes(), to_curve(record, labelled)) == (
        0,
        BEFORE,
        [],
        [],
    )
    assert {row.role: row.total_bytes for row in to_rows(labelled, BEFORE, OUT_OF_MEMORY, "", 0)} == {
        "parameters": 5, "unlabelled": 6, "slack": 0,
    }  # fmt: skip


def test_vanished_lists_blocks_missing_from_the_second_snapshot() -> None:
    before, after = (
        Recorder(**there).snapshot()["segments"] for there in ({"b": 1, "w": 2}, {"b": 1})
    )
    assert vanished(before, after) == [ord("w")]


@pytest.mark.parametrize(
    ("made", "copies"),
    [
        (("weight", "result"), "b"),
        (
            ("input", "weight", "result"),
            "c",
        ),  # all of one size: the input is cast before, the result comes after
        (("weight", "small", "result"), "b"),
        (("small", "result"), ""),
    ],
)
def test_the_copy_of_a_weight_is_the_allocation_of_its_size_before_the_result(
    made: tuple[str, ...], copies: str
) -> None:
    recorder = Recorder(a=200).begin("forward")
    for address, what in zip("bcde", made, strict=False):
        recorder.alloc(address, 7 if what == "small" else 100, "mod::w1")
    recorder.alloc("y", 100, "mod::w2").alloc("z", 100, "mod::other").end("forward")
    book: Book = {
        AT_BEGIN: [
            Holding(ord("a"), Role.PARAMETERS, "w1.weight"),
            Holding(ord("a"), Role.PARAMETERS, "w2.weight"),
        ]
    }
    for autocast in (True, False):
        roles = attribute(recorder.record(), book, autocast)
        found = "".join(
            chr(one.allocation.address) for one in roles if one.role is Role.AUTOCAST_COPIES
        )
        assert found == (copies if autocast else "")


def test_memory_freed_before_the_forward_pass_ends_is_no_copy_of_a_weight() -> None:
    recorder = (
        Recorder(a=200)
        .begin("forward")
        .alloc("b", 100, "w")
        .alloc("c", 50, "w")
        .free("b")
        .alloc("d", 1, "x")
    )
    book: Book = {AT_BEGIN: [Holding(ord("a"), Role.PARAMETERS, "w.weight")]}
    roles = {one.role for one in attribute(recorder.end("forward").record(), book, autocast=True)}
    assert roles == {Role.PARAMETERS, Role.TEMPORARY, Role.ACTIVATIONS}


def test_call_chains_tell_nobodys_folders() -> None:
    frames = [
        {
            "filename": "/usr/lib/python3.12/site-packages/torch/nn/functional.py",
            "line": 1,
            "name": "linear",
        },
        {"filename": "/home/somebody/model/layers.py", "line": 26, "name": "forward"},
        {"filename": "/home/somebody/model/parts.py", "line": 35, "name": "named"},
        {"filename": "<string>", "line": 1, "name": "generated"},
        {"filename": "/home/somebody/tasks/train_step.py", "line": 158, "name": "inference"},
        {"filename": "/home/somebody/tasks/harness/workload.py", "line": 77, "name": "run_step"},
        {"filename": "own.py", "line": 3, "name": "main"},
    ]
    assert (
        call_chain(frames)
        == "model/layers.py:26 forward < tasks/train_step.py:158 inference < own.py:3 main"
    )
    assert call_chain([]) == ""


def test_the_curve_keeps_every_peak_and_is_short() -> None:
    recorder = Recorder(a=10).begin("forward")
    for _ in range(2000):
        recorder.alloc("b", 1, "ffn").free("b")
    recorder.alloc("c", 5000, "ffn").free("c").end("forward").begin("backward").end("backward")
    record = recorder.record()
    curve = to_curve(record, attribute(record, {AT_BEGIN: [Holding(ord("a"), Role.PARAMETERS)]}))
    moments = {row.event for row in curve}
    assert len(moments) <= 250
    assert max(row.live_bytes for row in curve if row.role == "temporary") == 5000
    assert {row.live_bytes for row in curve if row.role == "parameters"} == {10}
    assert curve[-1].at_ms == pytest.approx(
        (record.times_us[curve[-1].event] - record.times_us[0]) / 1e3
    )


def h200(way: str) -> tuple[Record, Book, dict[str, Any]]:
    sample = H200[way]
    book = {
        seen: [Holding(address, Role(role), name) for address, role, name in held]
        for seen, held in sample["book"].items()
    }
    return replay(sample["snapshot"]), book, sample


@pytest.mark.parametrize("way", ["train_step", "forward"])
def test_a_step_of_an_h200_is_replayed_to_the_byte(way: str) -> None:
    record, _, sample = h200(way)
    live = record.live_bytes()
    assert {phase.name: max(live[phase.start : phase.end]) for phase in record.step} == sample[
        "requested_peaks"
    ]
    assert live[record.peak()] == max(sample["requested_peaks"].values())


@pytest.mark.parametrize("way", ["train_step", "forward"])
def test_roles_of_a_recorded_h200_step_have_the_bytes_that_its_shapes_imply(way: str) -> None:
    """2 layers of width 768 and a vocabulary of 10,000, in bf16: 1024 tokens at a time."""
    record, book, sample = h200(way)
    at = record.peak()
    rows = to_rows(attribute(record, book, autocast=True), at, PEAK, record.phase_at(at), 0)
    total, by_role, by_part = 0, Counter[str](), Counter[str]()
    for row in rows:
        by_role[row.role] += row.total_bytes
        by_part[row.part] += row.total_bytes if row.role == "activations" else 0
        total += row.total_bytes
    d, d_ff, vocabulary, layers, tokens = 768, 3072, 10_000, 2, 1024
    weights = layers * (4 * d * d + 3 * d * d_ff) + vocabulary * d  # of products
    parameters = weights + vocabulary * d + (2 * layers + 1) * d
    assert total == sample["requested_peaks"]["forward" if way == "forward" else "backward"]
    assert by_role["parameters"] == 4 * parameters
    assert by_role["autocast weight copies"] == 2 * weights
    assert by_role["inputs"] == 2 * 8 * tokens
    assert by_role["buffers"] == 2 * 4 * 256 * 32
    assert by_role["workspace"] == (1 if way == "forward" else 2) * 32 * 2**20
    assert by_role["unlabelled"] == 0
    if way == "forward":
        assert by_role["activations"] == 0
        assert by_role["temporary"] >= 2 * tokens * vocabulary
    else:
        assert by_role["optimizer state"] == 2 * by_role["parameters"]
        assert by_part["loss"] > (4 + 2) * tokens * vocabulary
        assert by_part["softmax"] > layers * 2 * 2 * 4 * 12 * 256 * 256  # two squares each
        assert by_part[""] == 0


def test_an_allocation_of_the_backward_pass_has_the_chain_of_its_forward_pass() -> None:
    """It has what the forward allocations of its module have in common, from the outside on."""

    outer = [(f"own/{line}.py", line, "f") for line in (2, 1)]
    recorder = Recorder().begin("forward").alloc("a", 1, "mod::ffn", ("own/5.py", 5, "f"), *outer)
    recorder.alloc("b", 2, "mod::ffn", ("own/6.py", 6, "f"), *outer).alloc("c", 3, "mod::norm")
    recorder.end("forward")
    recorder.begin("backward").alloc("d", 4, "mod::ffn").alloc("e", 5, "mod::norm").alloc(
        "f", 6, ""
    )
    record = recorder.end("backward").record()
    chains = {
        row.size_bytes: row.call_chain
        for row in to_rows(attribute(record, {}), record.peak(), PEAK, "backward", 0)
    }
    assert chains == {
        1: "own/5.py:5 f < own/2.py:2 f < own/1.py:1 f",
        2: "own/6.py:6 f < own/2.py:2 f < own/1.py:1 f",
        4: "backward of own/2.py:2 f < own/1.py:1 f",
        **dict.fromkeys((0, 3, 5, 6), ""),
    }


def test_the_top_allocation_of_an_h200_says_where_it_was_asked_for() -> None:
    record, book, _ = h200("train_step")
    rows = to_rows(attribute(record, book, autocast=True), record.peak(), PEAK, "backward", 0)
    activation = next(row for row in rows if row.role == "activations")
    assert (activation.part, activation.size_bytes, activation.count) == ("loss", 40_960_000, 1)
    assert activation.call_chain.startswith(
        "tasks/train_step.py:149 compare < tasks/train_step.py:153 loss_of"
    )
