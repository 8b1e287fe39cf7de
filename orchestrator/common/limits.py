"""Limits of this process, such as those of `ulimit`, explained in one line each."""

from __future__ import annotations

import errno
import os
import resource
import threading

from orchestrator.common.errors import LIMIT_REMEDIES, SweepError
from tasks.spec.messages import message_of

# What libraries write about a limit instead of raising an OSError with its number.
_TEXTS = {
    **{os.strerror(number): number for number in LIMIT_REMEDIES},
    "can't start new thread": errno.EAGAIN,  # of Python
    "failed to map segment from shared object": errno.ENOMEM,  # of the loader of libraries
    "can't allocate memory": errno.ENOMEM,  # of torch
}
_MANY = 10_000  # threads; no library starts as many


def limit_error(error: BaseException | str) -> SweepError | None:
    """Return what to do about an error, or its text, of a process that is at one of its limits.

    None: it is another error.
    """
    number = getattr(error, "errno", None)
    if isinstance(error, MemoryError):
        number = errno.ENOMEM
    if number not in LIMIT_REMEDIES:
        text = error if isinstance(error, str) else message_of(error)
        number = next((one for known, one in _TEXTS.items() if known in text), None)
    if number is None:
        return None
    return SweepError(
        f"this process reached a limit: {os.strerror(number)}", LIMIT_REMEDIES[number]
    )


def require_threads(count: int) -> None:
    """Raise OSError if this user may not start as many threads more.

    Libraries in C end the process, send it a signal, or wait for ever if they cannot start one.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if most == resource.RLIM_INFINITY or most > _MANY:
        return
    end = threading.Event()
    usual = threading.stack_size(64 * 1024)
    threads = [threading.Thread(target=end.wait, daemon=True) for _ in range(count)]
    started = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from error
    finally:
        threading.stack_size(usual)
        end.set()
        for thread in started:
            thread.join()
