"""The lighthouse's process: torchft's own, without the rest of torchft.

The `torchft_lighthouse` command imports all of torchft, and torch with it, to reach one native function:
*measured* 1.1 s and 234 MB until it listens. Loaded by itself the extension takes 0.04 s and 15 MB, and how
long a lighthouse takes to come back is how long no quorum can form.

    python -m outlast.launch.lighthouse_process PARENT_PID HOST:PORT MIN_REPLICAS JOIN_TIMEOUT_MS QUORUM_TICK_MS \
        HEARTBEAT_TIMEOUT_MS
"""

import importlib.util
import signal
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from outlast.parent import die_with_parent


def _native() -> Any:
    """torchft's native module."""
    package = importlib.util.find_spec("torchft")
    for folder in (package.submodule_search_locations or ()) if package else ():
        for suffix in EXTENSION_SUFFIXES:
            file = Path(folder) / f"_torchft{suffix}"
            spec = importlib.util.spec_from_file_location("torchft._torchft", file) if file.exists() else None
            if spec and spec.loader:
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                return module
    from torchft import _torchft  # laid out otherwise: the long way

    return _torchft


def main(args: list[str]) -> None:
    """Serve until killed."""
    die_with_parent(int(args[0]))
    bind, *numbers = args[1:]
    min_replicas, join_timeout_ms, quorum_tick_ms, heartbeat_timeout_ms = map(int, numbers)
    # Its threads are native: nothing here ever holds the interpreter's lock.
    server = _native().LighthouseServer(bind, min_replicas, join_timeout_ms, quorum_tick_ms, heartbeat_timeout_ms)
    while server:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
