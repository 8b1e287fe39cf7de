"""Entry point of `sweep`, and of `python -m orchestrator` if the script is not on the PATH."""

from __future__ import annotations

import gc
import locale
import os
import sys

from orchestrator.common.errors import EXIT_INTERRUPTED, EXIT_USER
from orchestrator.common.limits import limit_error, require_threads

_ALLOCATIONS_PER_COLLECTION = 50_000
# NumPy's OpenBLAS starts one for each core, and sends SIGINT to its own process if it cannot.
_THREADS = 4


def main() -> None:
    try:
        _open_standard_descriptors()
        _require_usable_modes()
        require_threads(_THREADS)
        # Commands build hundreds of thousands of objects that live until they end. By default the
        # garbage collector looks at all of them again and again: a tenth of a plan's time.
        gc.set_threshold(_ALLOCATIONS_PER_COLLECTION)
        from orchestrator.cli.main import main as sweep
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:  # of an import; those of a command are explained where it runs
        at_limit = limit_error(error)
        if at_limit is None:
            raise
        print(f"sweep: {at_limit}", file=sys.stderr)
        sys.exit(EXIT_USER)
    sweep(prog_name="sweep")


def _open_standard_descriptors() -> None:
    """Open each of the descriptors 0 to 2 that is closed on /dev/null.

    Otherwise the next file or socket gets its number, and a process that we start writes into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


def _require_usable_modes() -> None:
    """Start this process again if Python runs in a mode that a command does not work in."""
    # Some schedulers run jobs with LC_ALL=C. Python then cannot write the name of a folder such as
    # "größe" to a file, and libraries such as pyarrow cannot open it.
    encoding = locale.getpreferredencoding(False).lower().replace("-", "")
    if encoding != "utf8" and not sys.flags.utf8_mode and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"  # also for the processes that this one starts
        os.execv(sys.executable, sys.orig_argv)
    # Without docstrings there is no help of commands.
    if sys.flags.optimize >= 2 and os.environ.get("PYTHONOPTIMIZE") != "1":
        os.environ["PYTHONOPTIMIZE"] = "1"
        os.execv(sys.executable, [word for word in sys.orig_argv if word != "-OO"])
    # Python would wait for input when the program has ended.
    if os.environ.pop("PYTHONINSPECT", "") and sys.flags.inspect:
        os.execv(sys.executable, sys.orig_argv)


if __name__ == "__main__":
    main()
