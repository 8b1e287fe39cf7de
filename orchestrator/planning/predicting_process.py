"""A process that predicts the memory of cells, forked from a fork server without a GPU."""

from __future__ import annotations

import os
import signal
import tempfile
from contextlib import suppress

from orchestrator.execution.fork_client import Connection, ForkServer, ForkServerLost
from orchestrator.execution.program import import_path
from tasks.prediction.records import Prediction, PredictionRequest, generates_code, unknown
from tasks.process.fork_server import PREDICT, PREDICT_COMPILED
from tasks.spec.attempt import PREPARATION_S
from tasks.spec.messages import error_text

# A prediction takes seconds, but a user's model may never return.
_TIMEOUT_S = 120.0
_LAST_OUTPUT_BYTES = 4096


def predictor_variables() -> dict[str, str]:
    """Return the variables of a fork server whose children predict."""
    return {
        "PYTHONPATH": import_path(),
        # As many children as cores run at the same time, each with one thread and without a GPU.
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        # Results that sympy remembers. Torch's compiler computes its indices with sympy: with
        # sympy's own 1,000, compiled cells took a tenth more time.
        "SYMPY_CACHE_SIZE": "20000",
    }


class PredictingProcess:
    """A predicting process. It starts with the first request, and again after each with the user's code.

    server: its fork server.
    """

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self._connection: Connection | None = None
        self._pid = 0
        self._output = tempfile.NamedTemporaryFile(prefix="sweep-predictor-")  # noqa: SIM115

    def ask(self, request: PredictionRequest) -> Prediction:
        """Return the prediction, or one without a peak that has the reason for it."""
        try:
            try:
                return Prediction.from_json(self._answer(request))
            except (ForkServerLost, BrokenPipeError):
                # A model may kill its parent process, and with it other models' predictors.
                self._stop()
                return Prediction.from_json(self._answer(request))
        except (ForkServerLost, BrokenPipeError):
            reason = f"died: {self._last_line()}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"failed: {error_text(error)}"
        self._stop()
        return unknown(f"the predictor {reason}")

    def _answer(self, request: PredictionRequest) -> str:
        """Raises TimeoutError, OSError or ForkServerLost."""
        if self._connection is None:
            self._start(PREDICT_COMPILED if generates_code(request.cell) else PREDICT)
        assert self._connection is not None
        self._connection.send(request.to_json())
        try:
            return self._connection.receive_line(_TIMEOUT_S)
        except TimeoutError as error:
            raise TimeoutError(
                f"no answer within {_TIMEOUT_S:g} s. It is faster on an idle machine"
            ) from error
        finally:
            # The user's code may remember tensors, which would be missing in the next trace.
            if request.foreign_code:
                self._stop()

    def _start(self, purpose: str) -> None:
        if reason := self._server.broken(purpose):
            self._output.truncate(0)
            self._output.seek(0)
            self._output.write(self._server.last_output() or reason.encode())
            self._output.flush()
            raise ForkServerLost(reason)
        self._connection = self._server.ask("predict", {})
        self._pid = int(self._connection.receive(PREPARATION_S)["predictor"])
        self._connection.send(self._output.name)

    def _stop(self) -> None:
        if self._pid:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        if self._connection is not None:
            self._connection.close()
        self._connection, self._pid = None, 0

    def _last_line(self) -> str:
        self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - _LAST_OUTPUT_BYTES))
        lines = self._output.read().decode(errors="replace").splitlines()
        return lines[-1][:160] if lines else "it printed nothing"

    def close(self) -> None:
        """End the process."""
        self._stop()
        self._output.close()
