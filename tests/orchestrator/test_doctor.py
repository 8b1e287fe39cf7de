from __future__ import annotations

import sys

import pytest

from orchestrator.doctor import _host
from orchestrator.errors import EnvironmentError
from orchestrator.probe import paces_here


def test_a_host_that_has_its_cores_to_itself_is_good() -> None:
    finding = _host([440.0 + step % 7 for step in range(200)])
    assert finding.good is True
    assert str(finding) == "ok   host     hands torch 446 small operations a ms"


def test_a_host_whose_cores_are_at_work_for_others_is_told_with_what_that_costs() -> None:
    finding = _host([400.0, 400.0, 200.0, 400.0, 200.0] * 40)
    assert finding.good is None
    assert "hands torch 400 small operations a ms, but 200 in 40% of" in finding.said
    assert "up to 2.0 times as long" in finding.remedy


def test_a_moment_is_no_neighbour() -> None:
    assert _host([400.0] * 98 + [150.0] * 2).good is True


def test_it_is_read_again_and_again_as_long_as_it_is_asked_for() -> None:
    few, many = paces_here(0.05), paces_here(0.6)
    assert all(pace > 0 for pace in [*few, *many])
    assert len(many) > 2 * len(few) > 0


def test_where_torch_does_not_work_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.probe.PROGRAM", (sys.executable, "-c", "raise SystemExit('No module named torch')"))
    with pytest.raises(EnvironmentError, match="torch does not work here: No module named torch"):
        paces_here(0.05)
