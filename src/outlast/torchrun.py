"""torchrun, for the ranks of a group on one machine: `python -m outlast.torchrun` takes its options.

It starts and watches ranks as torchrun does, for it is torchrun. Different are:

- what it says last is why a rank failed, in one line, and it ends with that rank's exit code;
- it listens on loopback only, where torchrun's own stores listen on every interface;
- a signal to it stops the ranks in good order, without a traceback.
"""

import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousError

from outlast.errors import EXIT_FAILED, EXIT_REFUSED, EXIT_STOPPED, UserError
from outlast.seat import STORE
from outlast.sockets import serve_store


def main(args: Sequence[str]) -> int:
    """Run ranks until all have finished or one has failed. Returns the exit code."""
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed"):  # LOGLEVEL=INFO shows all that torchrun does
            logging.getLogger(name).setLevel(os.environ.get("LOGLEVEL", "CRITICAL"))
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    store = serve_store(socket.create_server(("127.0.0.1", 0)))
    os.environ[STORE] = f"127.0.0.1:{store.port}"
    with tempfile.TemporaryDirectory(prefix="outlast-torchrun-") as folder:
        local = ["--rdzv-backend=c10d", f"--rdzv-endpoint={folder}/rendezvous", "--rdzv-conf=store_type=file"]
        try:
            torchrun.run(torchrun.parse_args([*local, "--local-addr=127.0.0.1", f"--log-dir={folder}", *args]))
        except ChildFailedError as e:
            rank, failure = min(e.failures.items(), key=lambda item: _order(item[1]))
            code, why = _cause(rank, failure)
        except SignalException as e:
            code = EXIT_STOPPED if e.sigval in (signal.SIGTERM, signal.SIGINT) else 128 + e.sigval
            why = f"stopped by {signal.Signals(e.sigval).name}"
        except (UserError, RendezvousError, OSError, ValueError) as e:
            code, why = EXIT_FAILED, f"the ranks of this group couldn't be started: {e}"
        else:
            return 0
    print(f"outlast: {why}", file=sys.stderr, flush=True)
    return code


def _order(failure: ProcessFailure) -> tuple[bool, bool, int]:
    """Refusals first, then who was killed, for the others only lost it, then by time."""
    return failure.exitcode != EXIT_REFUSED, failure.exitcode >= 0, failure.timestamp


def _cause(rank: int, failure: ProcessFailure) -> tuple[int, str]:
    """Exit code, and why a rank failed."""
    if failure.exitcode < 0:
        return EXIT_FAILED, f"rank {rank} was killed by {failure.signal_name()}"
    said = failure.message.get("message", "") if isinstance(failure.message, dict) else ""  # pyright: ignore
    return failure.exitcode, str(
        said
    ) or f"rank {rank} ended with exit code {failure.exitcode}; its own words are above"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
