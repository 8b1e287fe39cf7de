"""Answers of the fork server itself; tests/orchestrator/execution/test_fork_client.py has its children."""

from __future__ import annotations

import errno
import json
import os
import socket

import pytest

from tasks.process import fork_server
from tasks.process.fork_server import Server


def test_a_probe_that_cannot_be_forked_now_is_made_at_the_next_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise each later cell would get a new process, for a reason that has passed."""
    codes = iter([None, 0])

    def probe(server: Server) -> str:
        if next(codes) is None:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return ""

    monkeypatch.setattr(fork_server, "import_for", lambda purpose: None)
    monkeypatch.setattr(Server, "_probe", probe)
    ours, theirs = socket.socketpair()
    with ours, theirs, ours.makefile() as answers:
        server = Server(theirs, "cpu", lambda attempt, journal, rank: None)
        for expected in (
            {"errno": errno.EAGAIN, "error": os.strerror(errno.EAGAIN)},
            {"broken": ""},
        ):
            server._answer({"import": {"purpose": fork_server.MEASURE}}, theirs)
            assert json.loads(answers.readline()) == expected
