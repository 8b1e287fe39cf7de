"""A child process that predicts the memory of cells: `python -m tasks.prediction`."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from typing import IO

from orchestrator.execution.measuring_process import PROGRAM, import_path
from tasks.prediction.records import Prediction, PredictionRequest, unknown
from tasks.spec.messages import error_text

_COMMAND = (*PROGRAM[:-1], "tasks.prediction")
# A prediction takes seconds, but a user's model may never return.
_TIMEOUT_S = 120.0
_LAST_OUTPUT_BYTES = 4096


class PredictingProcess:
    """A predicting process. It starts with the first request, and again after it has died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None  # None also if it was forked
        self._forked_from: PredictingProcess | None = None
        self._lifeline = -1  # our end: the process and those that it started die when it is closed
        self._requests: IO[str] | None = None
        self._answers: IO[str] | None = None
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed in `close`

    @property
    def is_new(self) -> bool:
        """True if no process is running, as far as is known."""
        has_ended = self._process is not None and self._process.poll() is not None
        return self._requests is None or has_ended

    def ask(self, request: PredictionRequest) -> Prediction:
        try:
            if answer := self._answer(request):
                return Prediction.from_json(answer)
            reason = f"died: {self._last_line()}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"failed: {error_text(error)}"
        # Otherwise the next request may go to this process: poll() reports a death late, and a
        # user's model may have changed what all models use.
        self._stop()
        return unknown(f"the predictor {reason}")

    def _answer(self, request: PredictionRequest) -> str:
        if self.is_new:
            self.start()
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            self._kill()

        timer = threading.Timer(_TIMEOUT_S, end)
        timer.start()
        try:
            print(request.to_json(), file=self._requests, flush=True)
            answer = next(iter(self._answers or ()), "")
        except BrokenPipeError:
            answer = ""
        finally:
            timer.cancel()
        if is_late.is_set() and not answer:
            raise TimeoutError(
                f"no answer within {_TIMEOUT_S:g} s. It is faster on an idle machine"
            )
        return answer

    def close(self) -> None:
        self._stop()
        self._stderr.close()

    def _kill(self) -> None:
        lifeline, self._lifeline = self._lifeline, -1  # a timer may call this at the same time
        if lifeline >= 0:
            os.close(lifeline)
        if self._process is not None:
            self._process.kill()

    def _stop(self) -> None:
        self._kill()
        # It may not have read its whole request, and a thread may be writing to it.
        for pipe in (self._requests, self._answers):
            with suppress(OSError, ValueError):
                if pipe is not None:
                    pipe.close()
        if self._process is not None:
            self._process.wait()
        self._process = self._requests = self._answers = None

    def start(self, others: Sequence[PredictingProcess] = ()) -> None:
        """Start the process. It forks the processes of the other children."""
        # As many children as cores run at the same time, each with one thread and without a GPU.
        own = {
            "PYTHONPATH": import_path(),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            # Results that sympy remembers. Torch's compiler computes its indices with sympy: with
            # sympy's own 1,000, compiled cells took a tenth more time.
            "SYMPY_CACHE_SIZE": "20000",
        }
        lifeline = self._open_lifeline()
        ends = [other._open_pipes(self) for other in others]
        self._forked_from = None
        try:
            self._process = subprocess.Popen(
                [*_COMMAND, str(lifeline), *(",".join(map(str, each)) for each in ends)],
                env={**os.environ, **own},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                pass_fds=[lifeline, *chain(*ends)],
                start_new_session=True,
            )
            self._requests, self._answers = self._process.stdin, self._process.stdout
        finally:
            os.close(lifeline)
            for requests, answers, _, its_lifeline in ends:
                for end in (requests, answers, its_lifeline):
                    os.close(end)

    def _open_pipes(self, parent: PredictingProcess) -> tuple[int, int, int, int]:
        """Return the ends of new pipes for a forked process: requests, answers, errors, lifeline."""
        requests, to_requests = os.pipe()
        from_answers, answers = os.pipe()
        lifeline = self._open_lifeline()
        self._process, self._forked_from = None, parent
        self._requests = open(to_requests, "w", encoding="utf-8")  # noqa: SIM115
        self._answers = open(from_answers, encoding="utf-8")  # noqa: SIM115
        return requests, answers, self._stderr.fileno(), lifeline

    def _open_lifeline(self) -> int:
        """End an earlier process, and return the other end of a new lifeline."""
        self._stop()
        theirs, self._lifeline = os.pipe()
        return theirs

    def _last_line(self) -> str:
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - _LAST_OUTPUT_BYTES))
        lines = self._stderr.read().decode(errors="replace").splitlines()
        if lines:
            return lines[-1][:160]
        if self._forked_from is not None:  # which may have died before it forked this one
            return self._forked_from._last_line()
        return "it printed nothing"
