"""Sockets of this process: where they listen, which are open, and how they are shut down."""

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
import time
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from outlast.errors import ConfigError

_SIOCGIFADDR = 0x8915


def listen(host: str) -> socket.socket:
    """A listening socket on a free port of one address.

    Raises:
        ConfigError: it isn't one address, of this machine.
    """
    if host in ("", "0.0.0.0"):
        raise ConfigError(
            f"fault_tolerance.host = {host!r}: expected one address, at which the others reach this machine"
        )
    try:
        return socket.create_server((host, 0))
    except OSError as e:
        raise ConfigError(f"fault_tolerance.host = {host!r} isn't an address of this machine: {e.strerror}") from None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach this address; no, if it can't be resolved."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except (OSError, ValueError):
        return False


def is_here(host: str) -> bool | None:
    """Whether a name or an address is this machine's; None if it can't be resolved."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as s:
            s.bind(address)
            return True
    return False


def wait_for_listener(address: tuple[str, int], wait_s: float, pause_s: float) -> str:
    """Wait until something accepts connections there. Returns why nothing does after that time, or ""."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            socket.create_connection(address, max(pause_s, min(wait_s, 2.0))).close()
            return ""
        except OSError as e:
            if time.monotonic() > deadline:
                return e.strerror or str(e)
            time.sleep(pause_s)


def serve_store(listener: socket.socket, wait_s: float = 60.0) -> TCPStore:
    """A rendezvous store on a listening socket, which it takes.

    With the plain backend, which alone takes a socket: otherwise a store listens on every interface.
    """
    host, port = listener.getsockname()[:2]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=wait_s),
        master_listen_fd=listener.detach(),
        use_libuv=False,
    )


def interfaces() -> dict[str, str]:
    """Network interface -> its IPv4 address, of those that have one."""
    out: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(s, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                out[name] = socket.inet_ntoa(answer[20:24])
    return out


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface.

    Raises:
        ConfigError: there is no such interface, or it has none.
    """
    there = interfaces()
    if interface not in there:
        have = ", ".join(f"{name} ({address})" for name, address in there.items())
        raise ConfigError(f"fault_tolerance.interface = {interface!r} has no IPv4 address here; there are: {have}")
    return there[interface]


def keep_to(host: str) -> None:
    """Have Gloo and NCCL use the interface that has this address, unless the environment says otherwise."""
    with contextlib.suppress(OSError):  # a name that doesn't resolve is refused when something is to listen there
        host = socket.gethostbyname(host)
    for name, address in interfaces().items():
        if address == host:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            if not address.startswith("127."):  # NCCL has its own ways inside a machine
                os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def open_sockets() -> dict[int, str]:
    """Descriptor -> identity, of every socket of this process."""
    out: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if link.startswith("socket:"):
            out[int(name)] = link
    return out


def has_peer(fd: int, others: set[int]) -> bool:
    """Whether a socket is connected, and neither of its ports is one of `others`."""
    try:
        with socket.socket(fileno=os.dup(fd)) as s:
            return not {s.getpeername()[1], s.getsockname()[1]} & others
    except (OSError, IndexError):
        return False


def shut_down(sockets: dict[int, str]) -> None:
    """End the connections of these, if the descriptors are still theirs; whoever uses them gets an error at once."""
    for fd, link in sockets.items():
        try:
            if os.readlink(f"/proc/self/fd/{fd}") == link:  # else the number has gone to another file
                with socket.socket(fileno=os.dup(fd)) as s:
                    s.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue
