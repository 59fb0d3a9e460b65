"""The template: a process that has imported everything a rank needs, and forks ranks on request.

Importing what a rank needs takes seconds; a fork of a process that did so takes milliseconds. The template runs
no torch operation and no thread of its own (a fork copies neither thread pools nor locks held by threads): it
imports, then waits. torch is imported here and nowhere else in `outlast.launch`.

    python -m outlast.launch.template SOCKET_FD PARENT_PID MODULE,MODULE,…

Messages (`outlast.launch.messages`), from launch:

    {"do": "fork", "group", "rank", "life", "config", "entry", "env"}
        + the pipe for the rank's output, and the listening socket of its group's store if it is to keep it

and to it:

    {"is": "ready", "seconds"}                           everything is imported
    {"is": "forked", "group", "rank", "life", "pid"}     + a pidfd of the rank
    {"is": "failed", "group", "rank", "life", "why"}     no process could be made
    {"is": "exited", "group", "rank", "life", "code"}    negative: the signal

Ranks die with the template, the template with launch.
"""

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
import traceback
import typing
from typing import Any

from outlast import classes
from outlast.config import DEFAULT_TRAINER, Config, own
from outlast.errors import EXIT_FAILED, EXIT_REFUSED, UserError
from outlast.launch import messages
from outlast.parent import die_with_parent
from outlast.seat import STORE_FD


def config_from_dict(values: dict[str, Any]) -> Config:
    """The inverse of `dataclasses.asdict`, in the class that the config's trainer has."""
    trainer = values["job"]["trainer"]
    cls = Config if trainer == DEFAULT_TRAINER else classes.config_class(classes.load_trainer(trainer))
    return own.config_from_dict(cls, values)


class Template:
    """Forks ranks and tells of their ends.

    Args:
        sock: to launch.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.ranks: dict[int, tuple[int, dict[str, Any]]] = {}
        """pidfd -> process id, and which rank of which life of which group it is."""

    def serve(self) -> None:
        """Until launch is gone or hangs up; no rank outlives it."""
        try:
            while True:
                poll = select.poll()
                for fd in (self.sock.fileno(), *self.ranks):
                    poll.register(fd, select.POLLIN)
                for fd, _ in poll.poll():
                    if fd in self.ranks:
                        self._reap(fd)
                    elif not self._obey():
                        return
        finally:
            for pidfd in list(self.ranks):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                with contextlib.suppress(OSError):  # launch may not be there any more
                    self._reap(pidfd)

    def _obey(self) -> bool:
        message, fds = messages.receive(self.sock)
        if message is None:
            return False
        assert message["do"] == "fork", message
        who = {key: message[key] for key in ("group", "rank", "life")}
        try:
            pid, pidfd = _fork(message, fds, [self.sock.fileno(), *self.ranks])
        except OSError as e:
            messages.send(self.sock, {"is": "failed", **who, "why": f"no process could be made: {e.strerror}"})
        else:
            self.ranks[pidfd] = (pid, who)
            messages.send(self.sock, {"is": "forked", **who, "pid": pid}, [pidfd])
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _reap(self, pidfd: int) -> None:
        pid, who = self.ranks.pop(pidfd)
        # What the rank started itself, before its number can belong to anyone else.
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        os.close(pidfd)
        messages.send(self.sock, {"is": "exited", **who, "code": os.waitstatus_to_exitcode(status)})


def _fork(message: dict[str, Any], fds: list[int], close: list[int]) -> tuple[int, int]:
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        try:
            return pid, os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)  # nobody could watch it
            os.waitpid(pid, 0)
            raise
    code = EXIT_FAILED
    try:
        die_with_parent(parent)
        os.setsid()  # what it starts can be ended with it
        for fd in close:
            os.close(fd)
        output, *store = fds
        for fd in (1, 2):
            os.dup2(output, fd)
        os.close(output)
        os.environ.update(message["env"])
        if store:
            os.environ[STORE_FD] = str(store[0])
        code = _be_rank(message)
    finally:
        os._exit(code)  # never back into the template's loop


def _be_rank(message: dict[str, Any]) -> int:
    for stream in (sys.stdout, sys.stderr):  # whole lines, also under PYTHONUNBUFFERED
        typing.cast(Any, stream).reconfigure(line_buffering=True, write_through=False)
    code = EXIT_FAILED
    try:
        module, _, name = message["entry"].partition(":")
        entry = getattr(importlib.import_module(module), name)
        code = entry(config_from_dict(message["config"]), message["life"])
    except UserError as e:
        print(f"outlast: {e}", flush=True)
        code = e.exit_code
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else EXIT_FAILED if e.code else 0
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return code


def main(args: list[str]) -> int:
    """Import, say so, serve."""
    sock = socket.socket(fileno=int(args[0]))
    sock.set_inheritable(False)
    die_with_parent(int(args[1]))
    started = time.perf_counter()
    try:
        for module in args[2].split(","):
            importlib.import_module(module)
    except ImportError as e:
        print(f"what a rank needs can't be imported: {e}; install outlast with its dependencies", flush=True)
        return EXIT_REFUSED
    gc.collect()
    gc.freeze()  # a collection in a rank needn't touch, and so copy, what it shares with the template
    with contextlib.suppress(ConnectionError):
        messages.send(sock, {"is": "ready", "seconds": round(time.perf_counter() - started, 3)})
        Template(sock).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
