"""Real processes, real signals: whatever is killed, paused, added or refused, the run completes with the same bits.

Each run is compared bit for bit, step by step, with one undisturbed plain process (`Launch.same_bits`). The cases
are those of the field (C2, C3, …); `test_faults_long.py` has the long loops.
"""

import contextlib
import dataclasses
import hashlib
import hmac
import http.client
import os
import pickle
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from runs import (
    TARGETS,
    UNITS,
    Launch,
    Process,
    alive,
    end_all,
    eventually,
    groups_of,
    name_of,
    reference,
    settings,
    tiny_disk,
    wasted,
)

from outlast.events import from_ranges

if TYPE_CHECKING:
    from torch import Tensor

    from outlast.transfer import Fetched, SnapshotServer


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """No process of a test outlives it."""
    yield
    end_all()


# Lighthouse, donor, pause (C2, C3) -----------------------------------------------------------------


def test_lighthouse_deaths_a_killed_donor_and_a_paused_group(tmp_path: Path) -> None:
    chaos = (
        "kill lighthouse at step 2; kill lighthouse at step 3; stop lighthouse for 2s at step 4; "
        "kill lighthouse at step 7; kill g0 at step 9; stop g1 for 3s at step 40"
    )
    timing: dict[str, Any] = {"training__unit_pause_ms": 50, "fault_tolerance__process_group_timeout_ms": 1000}
    longer: dict[str, Any] = {"training__steps": 60}
    run = Launch(tmp_path / "run", 3, chaos, **timing, **longer)
    verdict = run.same_bits(**longer)
    events = run.events()
    faults = [(e["action"], e["target"], e["t"]) for e in events if e["kind"] == "chaos"]
    assert [f[:2] for f in faults] == [
        *[("kill", "lighthouse")] * 2,
        *[("stop", "lighthouse"), ("continue", "lighthouse"), ("kill", "lighthouse")],
        *[("kill", "g0"), ("stop", "g1"), ("continue", "g1")],
    ]
    killed, stopped, continued = (t for _, _, t in faults[5:])
    commits = [e for e in events if e["kind"] == "commit"]

    # C2: the same three processes went on through four outages.
    first = {name_of(e) for e in commits if e["t"] < faults[0][2]}
    assert {name_of(e) for e in commits if faults[4][2] < e["t"] < killed} == first and len(first) == 3
    assert not [e for e in events if e["kind"] == "died" and e["t"] < killed]

    # C3: the one that came back has the others' rate, weights and optimizer state for the next 20 steps.
    back = next(e for e in events if e["kind"] == "heal" and e["t"] > killed and e["group"] == 0)
    assert back["donor"] in first and name_of(back) not in first
    expected = reference(**longer)
    rates = {s.step: s.lr for s in expected.history}
    for step in range(back["step"] + 1, back["step"] + 21):
        ours = [e for e in commits if e["step"] == step and e["t"] > killed]
        digests = [e for e in events if e["kind"] == "digest" and e["step"] == step and e["t"] > killed]
        assert {e["group"] for e in ours} == {e["group"] for e in digests} == {0, 1, 2}
        assert {e["lr"] for e in ours} == {rates[step]}
        assert {e["sha256"] for e in digests} == {expected.digests[step]}
    assert len({rates[s] for s in range(back["step"] + 1, back["step"] + 21)}) == 20, "the rate moves at each step"

    # The others went on without the paused one, which committed nothing it had missed and then healed.
    missed = {e["step"] for e in commits if stopped < e["t"] < continued}
    missed -= {e["step"] for e in commits if e["group"] == 1 and e["t"] <= stopped}
    assert missed and {e["group"] for e in commits if e["step"] in missed and e["t"] < continued} == {0, 2}
    assert not [e for e in commits if e["group"] == 1 and e["step"] in missed - {min(missed)}]
    healed = next(e for e in events if e["kind"] == "heal" and e["t"] > continued and e["group"] == 1)
    assert healed["step"] >= max(missed) and name_of(healed) in first, "by the same process"
    assert {i.kind for i in verdict.incidents} >= {"lighthouse", "kill", "stop"}


# Groups come and go (C5, C16) ----------------------------------------------------------------------


def test_groups_join_fail_and_all_die(tmp_path: Path) -> None:
    run = Launch(tmp_path / "run", 2, training__unit_pause_ms=20, checkpoint__interval=5)
    run.wait_step(2)
    assert "added g2" in run.join()  # C16: one more than expected
    run.wait_commits(2, 3)
    helped = [
        e for e in run.events("commit") if any(name.startswith("g2:") and units for name, units in e["by"].items())
    ]
    assert helped and all(len(from_ranges(u)) == UNITS // 3 for u in helped[-1]["by"].values())

    # C5: an attempt is made to fail. The others wait for g2 in the exchange, where it dies.
    retry = None
    while retry is None:
        freeze_in_a_step(run, 2)
        since = run.events()[-1]["t"]
        run.kill(2)
        run.wait_commits(2, after=since)
        retry = next((e for e in run.events("retry") if e["group"] != 2 and e["t"] > since), None)
    assert retry["held"], "what a survivor had computed is kept"

    since = run.events()[-1]["t"]  # three lose two, and regain them
    for group, pid in [(group, run.kill(group)) for group in (0, 1)]:
        run.wait_back(group, pid)
    assert {e["group"] for e in run.events("died") if e["t"] > since} == {0, 1}, "the third went on"

    since = run.events()[-1]["t"]  # all at once: back from the save
    for group, pid in [(group, run.kill(group)) for group in (0, 1, 2)]:
        run.wait_back(group, pid)
    loads = [e for e in run.events("checkpoint") if e["action"] == "load" and e["t"] > since]
    assert {e["group"] for e in loads} == {0, 1, 2} and {e["step"] % 5 for e in loads} == {0}

    assert "1 of the groups are spares" in run.join(4)  # more groups than units
    run.wait_commits(6)
    run.same_bits()
    full = [e for e in run.events("commit") if len(groups_of(e)) == 7]
    assert [0, *[1] * UNITS] in [sorted(len(from_ranges(units)) for units in e["by"].values()) for e in full]
    assert "1 more than work units a step: spares" in run.output()


def freeze_in_a_step(run: Launch, group: int) -> None:
    """SIGSTOP a group that still has a unit to compute, and wait until the others have computed theirs."""

    def unfinished() -> bool:
        mine = [e for e in run.events("plan", "unit", "commit") if e["group"] == group]
        return mine[-1]["kind"] == "plan" and mine[-1]["exchange"]

    eventually(unfinished, f"g{group} begins a step")
    run.kill(group, signal.SIGSTOP)
    before = -1
    while before != (before := len(run.events("unit"))):
        time.sleep(0.3)  # the others may still compute


# Without disk (C7, C12), one rank's own end --------------------------------------------------------


def test_without_saves_four_groups_become_three(tmp_path: Path) -> None:
    run = Launch(tmp_path / "run", 4, "kill g3 at step 5", checkpoint__enable="false", training__unit_pause_ms=25)
    run.wait_step(6)
    run.wait_commits(3, after=eventually(lambda: run.events("chaos"), "the kill")[0]["t"])

    pid = run.pid_of(1)  # a rank that can't write its events any more: the group leaves, and is tried again
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    eventually(lambda: run.pid_of(1) != pid, "g1 is started again")
    died = next(e for e in run.events("died") if e["pid"] == pid)
    assert died["code"] == 1 and "[g1] outlast: events can't be written to" in run.output()
    run.wait_commits(1, after=died["t"])

    asked = run.kill(2, signal.SIGTERM)  # C7: four groups become three
    verdict = run.same_bits()
    events = run.events()
    assert not (run.run_dir / "checkpoints").exists(), "C12: nothing came from a disk"
    assert {e["group"] for e in events if e["kind"] == "heal"} >= {1, 3}
    commits = [e for e in events if e["kind"] == "commit"]
    assert {len(groups_of(e)) for e in commits} >= {3, 4}
    assert {(e["tokens"], e["samples"][1] - e["samples"][0], e["units"]) for e in commits} == {(TARGETS, UNITS, UNITS)}
    assert verdict.history[-1].tokens == TARGETS

    left = next(e for e in events if e["kind"] == "exit" and e["group"] == 2)
    assert (left["code"], left["reason"]) == (143, "stopped as asked")
    assert [e["code"] for e in events if e["kind"] == "died" and e["pid"] == asked] == [143]
    assert not wasted(events, name_of(left)), "it finished its step"
    assert not [e for e in events if e["kind"] == "spawn" and e["group"] == 2 and e["t"] > left["t"]]
    assert {e["group"] for e in commits if e["t"] > left["t"]} == {0, 1, 3}
    assert max(e["step"] for e in commits) > left["step"]


# Strangers (C15); asked to stop --------------------------------------------------------------------


def test_strangers_are_refused_and_a_stopped_run_is_resumed(tmp_path: Path) -> None:
    run = Launch(tmp_path / "run", 2, training__unit_pause_ms=80)
    run.wait_step(1)
    seed = run.stranger("seed", run.job()["token"], training__seed=1)
    job = run.stranger("job", "another job's token")
    assert "training.seed is 1 here and 0 there" in seed.refusal()
    assert "OUTLAST_TOKEN, hashed, is " in job.refusal()
    came = eventually(lambda: [e for e in run.events("quorum") if len(e["members"]) > 2], "they were in a quorum")
    run.wait_step(came[-1]["step"] + 1)
    assert not run.events("died", "retry", "heal", "refused"), "nothing happened to the job"

    family = [run.pid_of(0), run.pid_of(1), run.lighthouse_pid()]
    os.kill(run.pid, signal.SIGTERM)
    run.end_in_order(143)
    assert not any(map(alive, family))
    assert [(e["code"], e["reason"]) for e in run.events("exit")] == [(143, "stopped as asked")] * 2
    for life in {name_of(e) for e in run.events("commit")}:
        assert not wasted(run.events(), life), "every unit computed counts"
    stopped_at = run.step()

    again = Launch(run.run_dir, 3)
    again.same_bits()
    loads = [e["step"] for e in again.events("checkpoint") if e["action"] == "load"]
    assert stopped_at in loads, "not a step was lost"
    assert len([e for e in again.events("commit") if e["step"] == stopped_at]) == 2, "nor made again"


# Healing (C14, C4) ---------------------------------------------------------------------------------

TOKEN = "the job's token"
LINEAGE = "0123456789abcdef"


def make_state(seed: int) -> dict[str, "Tensor"]:
    """Three chunks and a bit."""
    import torch

    return {
        "model.w": torch.arange(seed, seed + 6_200_000, dtype=torch.float32).view(-1, 62),
        "optimizer.w.step": torch.tensor(float(seed)),
        "optimizer.w.exp_avg": torch.full((300, 1000), float(seed)),
    }


@contextlib.contextmanager
def donor(token: str = TOKEN) -> "Iterator[SnapshotServer]":
    """Serves the state of seed 1, at step 7."""
    from outlast.transfer import SnapshotServer, take_snapshot

    server = SnapshotServer("127.0.0.1", token, 2.0)
    server.snapshot = take_snapshot(make_state(1), 7, LINEAGE, {"window": {"7": LINEAGE}})
    try:
        yield server
    finally:
        server.close(1.0)


def take(address: str, token: str = TOKEN) -> "Fetched":
    """Heal from an address; on an error the own state must be as it was."""
    from outlast.transfer import fetch

    mine = make_state(2)
    try:
        return fetch(address, token, 7, LINEAGE, mine, 0.5, 20.0)
    finally:
        assert all(mine[name].equal(t) for name, t in make_state(2).items())


def status(port: int, path: str, headers: dict[str, str]) -> int:
    """Of a GET at the heal port."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status != 403 or len(body) < 1000
        return answer.status
    finally:
        connection.close()


def proof(token: str, nonce: str, path: str) -> dict[str, str]:
    """What a reader sends to show that it knows the token."""
    digest = hmac.new(token.encode(), f"{nonce}\n{path}".encode(), hashlib.sha256).hexdigest()
    return {"X-Nonce": nonce, "X-Proof": digest}


def test_the_heal_port_answers_only_who_knows_the_token() -> None:
    with donor() as server:
        for what in ("manifest", "0", "3", "4", "x", ""):
            path = f"/7/{LINEAGE}/{what}"
            knows = proof(TOKEN, "n", path)
            for wrong in (
                {},
                proof("", "n", path),
                proof("another token", "n", path),
                proof(TOKEN, "n", path + "/"),  # a proof of another request
                {**knows, "X-Nonce": "m"},
                {"X-Nonce": "n", "X-Proof": ""},
                {"X-Nonce": "n", "X-Proof": "\xff" * 64},
            ):
                assert status(server.port, path, wrong) == 403
            assert status(server.port, path, knows) == (200 if what in ("manifest", "0", "3") else 404)
        assert status(server.port, "/", {}) == status(server.port, f"/8/{LINEAGE}/manifest", {}) == 403
        got = take(server.address)
        assert got.step == 7 and all(got.tensors[name].equal(t) for name, t in make_state(1).items())


class Bomb:
    """A pickle that leaves a mark if it is ever loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


def test_a_booby_trap_is_neither_run_nor_installed(tmp_path: Path) -> None:
    from outlast.transfer import TransferError

    mark = tmp_path / "mark"
    trap = pickle.dumps(Bomb(mark))
    with donor() as server:
        assert server.snapshot
        genuine = server.snapshot

        class Impostor(BaseHTTPRequestHandler):
            """Speaks the protocol, has seen a genuine manifest and its proof, and doesn't know the token."""

            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None: ...

            def do_GET(self) -> None:
                body = trap if not self.path.endswith("manifest") else manifest
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("X-Proof", proof(TOKEN, "another nonce", genuine.manifest.decode())["X-Proof"])
                self.end_headers()
                self.wfile.write(body)

        impostor = ThreadingHTTPServer(("127.0.0.1", 0), Impostor)
        threading.Thread(target=impostor.serve_forever, args=(0.05,), daemon=True).start()
        try:
            for manifest in (genuine.manifest, trap, b"", b"{}"):  # noqa: B007
                with pytest.raises(TransferError, match="it doesn't know the job's token"):
                    take(f"127.0.0.1:{impostor.server_port}")
        finally:
            impostor.shutdown()
            impostor.server_close()

        # A donor that knows the token, and whose chunk isn't what its manifest says.
        for at in (0, 8 << 20, len(genuine.body) - len(trap)):
            body = bytearray(genuine.body)
            body[at : at + len(trap)] = trap
            server.snapshot = dataclasses.replace(genuine, body=memoryview(body))
            with pytest.raises(TransferError, match=f"chunk {at // (8 << 20)} isn't what its manifest says"):
                take(server.address)
        body = bytearray(genuine.body)
        body[-1] ^= 1  # one bit
        server.snapshot = dataclasses.replace(genuine, body=memoryview(body))
        with pytest.raises(TransferError, match="chunk 3 isn't"):
            take(server.address)
        server.snapshot = dataclasses.replace(genuine, body=genuine.body[:-1])
        with pytest.raises(TransferError, match="chunk 3 isn't"):
            take(server.address)

        # One whose manifest is a trap, or of another model, or of another commit.
        older = genuine.manifest.replace(b'"step": 7', b'"step": 6')
        assert older != genuine.manifest
        for manifest in (trap, b"", b"[]", b"{}", b'{"tensors": [], "hashes": []}', genuine.manifest[:-1], older):
            server.snapshot = dataclasses.replace(genuine, manifest=manifest)
            with pytest.raises(TransferError):
                take(server.address)
        server.snapshot = genuine
        with pytest.raises(TransferError, match="403"):
            take(server.address, "another token")
        assert take(server.address).step == 7, "the next donor's state is taken"
    assert not mark.exists()


def test_a_donor_that_dies_midway_leaves_nothing_behind() -> None:
    from outlast.transfer import TransferError

    with donor() as server, donor() as other:
        assert server.snapshot
        size = len(server.snapshot.body)
        for cut_after in (0, 10, 300, 2000, size // 2, size - 1):
            with relay(server.port, cut_after) as port, pytest.raises(TransferError):
                take(f"127.0.0.1:{port}")
        with relay(server.port, size // 2, hang=True) as port, pytest.raises(TransferError, match="timed out"):
            take(f"127.0.0.1:{port}")
        got = take(other.address)
        assert all(got.tensors[name].equal(t) for name, t in make_state(1).items())


@contextlib.contextmanager
def relay(target: int, cut_after: int, hang: bool = False) -> Iterator[int]:
    """The wire to a donor, that breaks after so many bytes of its answers, or falls silent."""
    listener = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def carry() -> None:
        reader, _ = listener.accept()
        with reader, socket.create_connection(("127.0.0.1", target)) as to:
            threading.Thread(target=pump, args=(reader, to), daemon=True).start()
            left = cut_after
            while left and (data := to.recv(min(left, 1 << 16))):
                reader.sendall(data)
                left -= len(data)
            if hang:
                over.wait(10)
            for end in (reader, to):
                end.shutdown(socket.SHUT_RDWR)  # closing alone waits for the thread that reads from it

    def pump(source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                to.sendall(data)

    thread = threading.Thread(target=carry, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        over.set()
        thread.join(5)
        listener.close()


# Bad input at run time -----------------------------------------------------------------------------


def test_what_cannot_go_on_is_refused_in_one_line(tmp_path: Path) -> None:
    lost = Launch(tmp_path / "lost", 2, "kill all at step 3", checkpoint__enable="false", training__unit_pause_ms=20)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        in_use = Launch(tmp_path / "in-use", 2, fault_tolerance__lighthouse=f"http://127.0.0.1:{port}")
        assert f"port {port} is in use" in in_use.refusal()
    nowhere = {"lighthouse": f"http://127.0.0.1:{port}", "heartbeat_timeout_ms": 100, "join_timeout_ms": 200}
    args = settings(job__run_dir=tmp_path / "nowhere", **{f"fault_tolerance__{k}": v for k, v in nowhere.items()})
    alone = Process(tmp_path / "nowhere.out", "train", *args, "--fault_tolerance.enable", env={"OUTLAST_TOKEN": "t"})
    assert f"no lighthouse at http://127.0.0.1:{port} after 1.2 s" in alone.refusal()
    said = lost.end_in_order(2)
    step = lost.step()
    assert step >= 3 and f"steps 1-{step} were committed and nobody holds the weights any more" in said


def test_a_full_disk_is_seen_at_the_start(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk", "256k") as disk:
        args = [*settings(), f"--job.run_dir={disk}/run"]
        for run in [Process(tmp_path / command, command, *args) for command in ("launch", "train")]:
            assert f"run folder {disk}/run can't be written: No space left on device" in run.refusal()
