"""Moving a whole training state from the memory of one process to another's.

The donor copies its state at a step boundary and serves the copy over HTTP: a manifest, and chunks named by
number. Reader and donor prove to each other that they know the job's token without sending it. Nothing is
unpickled; every chunk's hash is checked; the state arrives whole or not at all.
"""

import hashlib
import hmac
import http.client
import json
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
import xxhash
from torch import Tensor

from outlast.checkpoint import tensor_bytes
from outlast.parallel import local

CHUNK = 8 << 20
_MAX_MANIFEST = 64 << 20


class TransferError(Exception):
    """The state couldn't be taken from this donor; nothing of it is in place."""


class NotThereError(TransferError):
    """The donor doesn't have this snapshot, or not yet."""


@dataclass(frozen=True)
class Snapshot:
    """A copy of the training state at one commit."""

    step: int
    lineage: str
    manifest: bytes
    body: memoryview


def take_snapshot(state: Mapping[str, Tensor], step: int, lineage: str, facts: Mapping[str, Any]) -> Snapshot:
    """Copy this rank's part of a state at a step boundary, on the training thread.

    Args:
        state: name -> tensor.
        step: updates committed.
        lineage: of the last commit.
        facts: small JSON values that go with it.
    """
    layout = _layout(state)
    body = bytearray(sum(t["bytes"] for t in layout))
    at = 0
    for t in state.values():
        part = tensor_bytes(t)
        body[at : at + len(part)] = part
        at += len(part)
    view = memoryview(body)
    manifest = {
        "step": step,
        "lineage": lineage,
        "facts": dict(facts),
        "tensors": layout,
        "hashes": [xxhash.xxh3_128_hexdigest(view[i : i + CHUNK]) for i in range(0, len(view), CHUNK)],
    }
    return Snapshot(step, lineage, json.dumps(manifest).encode(), view)


def _layout(state: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    parts = {n: local(t) for n, t in state.items()}
    return [{"name": n, "dtype": str(t.dtype), "shape": list(t.shape), "bytes": t.nbytes} for n, t in parts.items()]


def _proof(token: str, *parts: bytes) -> str:
    return hmac.new(token.encode(), b"\n".join(parts), hashlib.sha256).hexdigest()


class SnapshotServer:
    """Serves the latest snapshot to those who know the token.

    Args:
        host: address to listen on.
        token: the job's.
        timeout_s: a client that is silent for this long is dropped.
    """

    def __init__(self, host: str, token: str, timeout_s: float) -> None:
        outer = self
        self.token = token
        self.snapshot: Snapshot | None = None
        self._busy = threading.BoundedSemaphore(_MAX_CLIENTS)
        self._downloads = 0
        self._idle = threading.Condition()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = timeout_s

            def log_message(self, format: str, *args: Any) -> None:
                """Silent: whoever knocks here must not fill our log."""

            def do_GET(self) -> None:
                outer.answer(self)

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Silent: a reader that went away, or died, is no error of ours."""

        self._server = Server((host, 0), Handler)
        self.port = self._server.server_address[1]
        self.address = f"{host}:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="snapshots", daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer `/STEP/LINEAGE/manifest` or `/STEP/LINEAGE/NUMBER`."""
        nonce = request.headers.get("X-Nonce", "")
        proof = request.headers.get("X-Proof", "")
        path = request.path
        if not hmac.compare_digest(proof.encode(), _proof(self.token, nonce.encode(), path.encode()).encode()):
            request.close_connection = True
            request.send_error(403, "the job's token is needed")
            return
        if not self._busy.acquire(blocking=False):
            request.send_error(503, "busy")
            return
        try:
            with self._idle:
                self._downloads += 1
            self._send(request, nonce, path)
        finally:
            self._busy.release()
            with self._idle:
                self._downloads -= 1
                self._idle.notify_all()

    def _send(self, request: BaseHTTPRequestHandler, nonce: str, path: str) -> None:
        snapshot = self.snapshot  # may be replaced meanwhile; this one stays whole
        what = path.split("/")[1:]
        if snapshot is None or len(what) != 3 or what[:2] != [str(snapshot.step), snapshot.lineage]:
            request.send_error(404, "no such snapshot now")
            return
        body: bytes | memoryview
        if what[2] == "manifest":
            body = snapshot.manifest
        elif what[2].isascii() and what[2].isdigit() and int(what[2]) * CHUNK < len(snapshot.body):
            body = snapshot.body[int(what[2]) * CHUNK :][:CHUNK]
        else:
            request.send_error(404, "no such chunk")
            return
        request.send_response(200)
        request.send_header("Content-Length", str(len(body)))
        if what[2] == "manifest":  # chunks are vouched for by the hashes in it
            request.send_header("X-Proof", _proof(self.token, nonce.encode(), snapshot.manifest))
        request.end_headers()
        try:
            request.wfile.write(body)
        except OSError:
            request.close_connection = True  # the reader went away

    def close(self, grace_s: float) -> None:
        """Stop, after downloads in progress or the grace."""
        with self._idle:
            self._idle.wait_for(lambda: self._downloads == 0, grace_s)
        self._server.shutdown()
        self._server.server_close()


_MAX_CLIENTS = 32


@dataclass(frozen=True)
class Fetched:
    """A whole verified state, not yet in place."""

    step: int
    lineage: str
    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    num_bytes: int


def fetch(
    address: str, token: str, step: int, lineage: str, state: Mapping[str, Tensor], io_s: float, deadline_s: float
) -> Fetched:
    """Take a snapshot from a donor and verify it, whole.

    Args:
        address: host:port of the donor.
        token: the job's.
        step: updates committed that are wanted.
        lineage: that is wanted.
        state: the reader's own part; the donor's must have the same names, dtypes and shapes.
        io_s: longest silence of the donor.
        deadline_s: longest time in all.

    Raises:
        TransferError: it isn't there, isn't whole, or isn't the donor's that knows the token.
    """
    end = time.monotonic() + deadline_s
    host, _, port = address.rpartition(":")
    try:
        connection = http.client.HTTPConnection(host, int(port), timeout=io_s)
        try:
            return _fetch(connection, token, f"/{step}/{lineage}", state, end, io_s)
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as e:
        raise TransferError(f"{type(e).__name__}: {e}") from None


def _fetch(
    connection: http.client.HTTPConnection,
    token: str,
    base: str,
    state: Mapping[str, Tensor],
    end: float,
    wait_s: float,
) -> Fetched:
    raw = _manifest(connection, token, base, min(end, time.monotonic() + wait_s))
    manifest = json.loads(raw)
    if f"/{manifest['step']}/{manifest['lineage']}" != base:
        raise TransferError("its manifest is of another commit")
    layout, hashes = manifest["tensors"], manifest["hashes"]
    if layout != _layout(state):
        raise TransferError("its tensors aren't this model's")
    size = sum(t["bytes"] for t in layout)
    if len(hashes) != -(-size // CHUNK):
        raise TransferError("its manifest has another number of chunks than its size")
    body = bytearray(size)
    view = memoryview(body)
    for i, expected in enumerate(hashes):
        if time.monotonic() > end:
            raise TransferError("it took too long")
        part = view[i * CHUNK :][:CHUNK]
        chunk = _get(connection, token, f"{base}/{i}", len(part))
        if len(chunk) != len(part) or xxhash.xxh3_128_hexdigest(chunk) != expected:
            raise TransferError(f"chunk {i} isn't what its manifest says")
        part[:] = chunk
    tensors: dict[str, Tensor] = {}
    at = 0
    for t, mine in zip(layout, map(local, state.values()), strict=True):
        tensors[t["name"]] = torch.frombuffer(body, dtype=mine.dtype, count=mine.numel(), offset=at).view(mine.shape)
        at += t["bytes"]
    return Fetched(manifest["step"], manifest["lineage"], manifest["facts"], tensors, size)


def _manifest(connection: http.client.HTTPConnection, token: str, base: str, until: float) -> bytes:
    """The donor learns of the reader from the same quorum, and may still be copying."""
    while True:
        try:
            return _get(connection, token, f"{base}/manifest", _MAX_MANIFEST, signed=True)
        except NotThereError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)


def _get(connection: http.client.HTTPConnection, token: str, path: str, limit: int, signed: bool = False) -> bytes:
    nonce = secrets.token_hex(16)
    proof = _proof(token, nonce.encode(), path.encode())
    connection.request("GET", path, headers={"X-Nonce": nonce, "X-Proof": proof})
    response = connection.getresponse()
    body = response.read(limit + 1)
    if response.status == 404:
        raise NotThereError("it has no such snapshot now")
    if response.status != 200:
        raise TransferError(f"it answered {response.status} {response.reason}")
    if len(body) > limit:
        raise TransferError("it sent more than it should")
    if signed and not hmac.compare_digest(
        response.headers.get("X-Proof", "").encode(), _proof(token, nonce.encode(), body).encode()
    ):
        raise TransferError("it doesn't know the job's token")
    return body
