"""The lighthouse of a launch: its address, its process, and whether it listens.

Imports no torch and no torchft.
"""

import contextlib
import importlib.util
import ipaddress
import os
import random
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from outlast.config import FaultTolerance, host_and_port
from outlast.errors import ConfigError, UserError
from outlast.times import Times

READY_S = 15.0
"""Longest wait for a started lighthouse to accept connections."""
QUORUM_TICK_MS = 20


@dataclass(frozen=True)
class Address:
    """Where a lighthouse is.

    Attributes:
        url: `http://host:port`, for the groups.
        host: to bind to or connect to.
        port: TCP port.
        ours: on loopback, so that launch runs it; any other is someone else's.
    """

    url: str
    host: str
    port: int
    ours: bool


def choose_address(given: str) -> Address:
    """The configured lighthouse, or a free port on loopback.

    Args:
        given: `fault_tolerance.lighthouse`; empty: choose.

    Raises:
        ConfigError: not an address, or its port is in use.
    """
    if not given:
        port = _free_port()
        return Address(f"http://127.0.0.1:{port}", "127.0.0.1", port, True)
    host, port = host_and_port(given)
    if host == "localhost":
        host = "127.0.0.1"
    try:
        ours = ipaddress.ip_address(host).is_loopback
    except ValueError:
        ours = False
    if ours and not _is_free(host, port):
        raise ConfigError(
            f"fault_tolerance.lighthouse = {given}: port {port} is in use; stop what listens there, or leave the "
            "setting out and a free port is chosen"
        )
    return Address(given, host, port, ours)


def _free_port() -> int:
    """A free port below those that the kernel gives to outgoing connections.

    While the lighthouse is down its groups keep trying to connect: were its port one of those, the kernel could
    give it to such a try, which would meet itself and keep the port from the lighthouse for ever.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(100):
        port = random.SystemRandom().randrange(min(20000, first - 1), first)
        if _is_free("127.0.0.1", port):
            return port
    raise UserError(f"no free port between 20000 and {first} for the lighthouse; set fault_tolerance.lighthouse")


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError:
            return False
    return True


def check_torchft() -> None:
    """Fault tolerance needs torchft.

    Raises:
        ConfigError: it isn't installed.
    """
    if importlib.util.find_spec("torchft") is None:
        raise ConfigError(
            "outlast launch needs torchft, which isn't installed: its wheels exist for Linux x86-64 only; there, "
            "pip install 'torchft>=0.2'; elsewhere `outlast train` runs without it"
        )


class Lighthouse:
    """The process of a lighthouse; start it again after it died.

    Args:
        address: one of ours.
        settings: its timeouts.
        log: file for what it prints.
    """

    def __init__(self, address: Address, settings: FaultTolerance, log: Path) -> None:
        self.address = address
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None
        self.pidfd = -1
        """Readable once the process ended."""
        self.started_at = 0.0
        host = f"[{address.host}]" if ":" in address.host else address.host
        join_ms = round(1000 * Times.of(settings).join)
        numbers = (settings.min_replica_size, join_ms, QUORUM_TICK_MS, settings.heartbeat_timeout_ms)
        self._args = [f"{host}:{address.port}", *map(str, numbers)]

    @property
    def pid(self) -> int | None:
        """Of the living process, or None."""
        return self.process.pid if self.process else None

    def start(self) -> int:
        """Start it, without waiting until it listens. Returns its process id."""
        assert self.process is None
        module = [sys.executable, "-P", "-m", "outlast.launch.lighthouse_process", str(os.getpid())]
        # At its usual level it writes some kilobytes a step.
        env = {"RUST_LOG": "warn"} | os.environ
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*module, *self._args],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
            )
        self.pidfd = os.pidfd_open(self.process.pid)
        self.started_at = time.monotonic()
        return self.process.pid

    def wait_ready(self) -> None:
        """Wait until it accepts connections.

        Raises:
            UserError: it ended, or it doesn't within `READY_S`.
        """
        assert self.process is not None
        deadline = time.monotonic() + READY_S
        while self.process.poll() is None:
            with contextlib.suppress(OSError):
                socket.create_connection((self.address.host, self.address.port), 1.0).close()
                return
            if time.monotonic() > deadline:
                raise UserError(
                    f"the lighthouse doesn't listen on {self.address.url} after {READY_S:g} s; see {self.log}"
                )
            time.sleep(0.01)
        raise UserError(
            f"the lighthouse ended at once ({self.process.returncode}): {_last_line(self.log)}; see {self.log}"
        )

    def ended(self) -> int:
        """Take note that it ended. Returns its exit code; negative: the signal."""
        assert self.process is not None
        code = self.process.wait()
        self.process = None
        os.close(self.pidfd)
        self.pidfd = -1
        return code

    def close(self) -> None:
        """End it."""
        if self.process is not None:
            self.process.kill()  # it keeps nothing
            self.ended()


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
    return lines[-1] if lines else "it said nothing"
