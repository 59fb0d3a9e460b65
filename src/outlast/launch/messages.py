"""Small JSON messages between processes of one machine, with file descriptors beside them.

Over SOCK_SEQPACKET the kernel keeps each message whole and its descriptors with it, so there is no framing
to get wrong. No pickle. Imports no torch.
"""

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

MAX_BYTES = 1 << 16


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(sock: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one message; the receiver gets copies of the descriptors.

    Raises:
        OSError: the other end is gone.
    """
    data = json.dumps(message).encode()
    assert len(data) <= MAX_BYTES, f"a message of {len(data)} bytes"
    socket.send_fds(sock, [data], list(fds))


def receive(sock: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The next message and the descriptors that came with it; None once the other end is gone.

    Raises:
        BlockingIOError: nothing there (of a non-blocking socket).
        ValueError: not one of our messages.
    """
    try:
        data, fds, _, _ = socket.recv_fds(sock, MAX_BYTES, 4, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        return None, []
    if not data:
        return None, []
    message = json.loads(data)
    if not isinstance(message, dict):
        raise ValueError("a message must be a JSON object")
    return message, fds


def listen(path: Path) -> socket.socket:
    """A listening socket that only this user can connect to.

    Raises:
        OSError: this file system has no sockets.
    """
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mask = os.umask(0o177)
    try:
        with _short(path) as address:
            sock.bind(address)
        sock.listen(8)
    except OSError:
        sock.close()
        raise
    finally:
        os.umask(mask)
    sock.setblocking(False)
    return sock


def connect(path: Path, timeout_s: float) -> socket.socket:
    """Connect to a listening socket.

    Raises:
        OSError: nobody listens there.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(timeout_s)
    try:
        with _short(path) as address:
            sock.connect(address)
    except OSError:
        sock.close()
        raise
    return sock


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """The same place by a short name: an address holds 108 bytes, run folders can be deeper."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
