"""Count the modules and functions of this project that a command of `sweep` calls in the driver.

    python benchmarks/path_length.py run configs/demo.yaml --scheduler serial --out /tmp/one
    python benchmarks/path_length.py --list run configs/demo.yaml --scheduler serial --out /tmp/one

A reader who follows the command goes through them. Functions in threads count; class bodies, lambdas,
comprehensions and other processes do not. `--list` prints the functions in the order of their first call,
with the number of calls.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = tuple(f"{ROOT / package}/" for package in ("orchestrator", "tasks", "model"))
_IS_FUNCTION = 0x2  # CO_NEWLOCALS of a code object; class bodies lack it

calls: Counter[CodeType] = Counter()


def count(frame: FrameType, event: str, _: object) -> None:
    """Count a call of a function of this project. It is a profiling function of `sys`."""
    code = frame.f_code
    is_named = code.co_flags & _IS_FUNCTION and not code.co_name.startswith("<")
    if event == "call" and is_named and code.co_filename.startswith(_PACKAGES):
        calls[code] += 1


def main() -> None:
    """Run the command and print the counts."""
    words = sys.argv[1:]
    is_listed = words[:1] == ["--list"]
    sys.path.insert(0, str(ROOT))
    from orchestrator.__main__ import main as sweep

    sys.argv = ["sweep", *words[is_listed:]]
    threading.setprofile(count)
    sys.setprofile(count)
    try:
        sweep()
    except SystemExit as ended:
        if ended.code:
            sys.exit(f"the command ended with exit code {ended.code}")
    finally:
        sys.setprofile(None)
    names = Counter(
        {
            f"{Path(code.co_filename).relative_to(ROOT)}:{code.co_qualname}": number
            for code, number in calls.items()
        }
    )
    modules = Counter(name.partition(":")[0] for name in names)
    if is_listed:
        for name, number in names.items():
            print(f"{number:>6} {name}")
    folders = Counter(str(Path(module).parent) for module in modules.elements())
    for folder in sorted(folders):
        here = sum(str(Path(module).parent) == folder for module in modules)
        print(f"{folder}: {here} modules, {folders[folder]} functions")
    print(f"in all: {len(modules)} modules, {len(names)} functions")


if __name__ == "__main__":
    main()
