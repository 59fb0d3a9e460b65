"""Launch's side of the template: start it, ask it for ranks, hear of their ends.

Imports no torch.
"""

import dataclasses
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from outlast.config import Config
from outlast.launch import messages

ENTRY = "outlast.rank:run_rank"
PRELOAD = (
    "outlast.rank",
    "outlast.ft.trainer",
    # Imported by torch at a trainer's first step, with sympy and 900 modules in all: 1.1 s of each restart.
    "torch._dynamo",
    "torch.utils.tensorboard",
)


class Spawner:
    """The template's process; start it again after it died.

    Args:
        token: the job's token, handed to the ranks in their environment.
        preload: modules to import before the first fork.
        entry: `module:function` that is a rank's body, `(Config, life) -> exit code`.
    """

    def __init__(self, token: str, preload: Sequence[str] = PRELOAD, entry: str = ENTRY) -> None:
        self.preload = tuple(preload)
        self.entry = entry
        self._token = token
        self.process: subprocess.Popen[bytes] | None = None
        self.sock: socket.socket | None = None
        """Readable when the template says something or is gone."""
        self.ready = False
        """Everything is imported: ranks can be forked."""

    def start(self) -> int:
        """Start a template. Returns the read end of the pipe that it prints to, the caller's to close."""
        assert self.process is None
        ours, theirs = messages.pair()
        read_end, write_end = os.pipe()
        with theirs:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "outlast.launch.template"),
                    *(str(theirs.fileno()), str(os.getpid()), ",".join(self.preload)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"OUTLAST_TOKEN": self._token},
                start_new_session=True,  # Ctrl-C at the terminal reaches launch alone, which ends all in order
            )
        os.close(write_end)
        self.sock = ours
        self.ready = False
        return read_end

    def fork(
        self, group: int, rank: int, life: str, config: Config, env: Mapping[str, str], output: int, *store: int
    ) -> None:
        """Ask for a rank.

        Args:
            group: its number.
            rank: its own number in the group.
            life: the group's incarnation.
            config: what it runs.
            env: added to its environment.
            output: descriptor that it prints to; the caller closes its own copy.
            store: listening socket of the group's store, if this rank is to keep it; likewise.

        Raises:
            OSError: the template is gone.
        """
        assert self.sock is not None and self.ready
        message = {"do": "fork", "group": group, "rank": rank, "life": life, "config": dataclasses.asdict(config)}
        messages.send(self.sock, message | {"entry": self.entry, "env": dict(env)}, [output, *store])

    def receive(self) -> tuple[dict[str, Any] | None, list[int]]:
        """The next message and its descriptors; None: the template is gone, call `ended`."""
        assert self.sock is not None
        message, fds = messages.receive(self.sock)
        if message and message["is"] == "ready":
            self.ready = True
        return message, fds

    def ended(self, timeout_s: float | None = None) -> int:
        """Take note that the template is gone. Returns its exit code; negative: the signal."""
        assert self.process is not None and self.sock is not None
        self.sock.close()
        self.sock, self.ready = None, False
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            self.process = None

    def close(self) -> None:
        """End the template, and with it what it forked."""
        if self.process is not None:
            if not self.ready:
                self.process.kill()  # it is importing and doesn't listen
            self.ended(timeout_s=5.0)  # it hears the socket close, ends its ranks and goes
