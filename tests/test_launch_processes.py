"""`outlast launch` with real processes: template, forks, deaths, restarts, and that nothing outlives it.

The ranks run a stand-in that needs no torch: it commits a step every few milliseconds.
"""

import contextlib
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outlast.config import Config
from outlast.errors import ConfigError
from outlast.events import read_events
from outlast.launch.spawner import Spawner
from outlast.launch.supervisor import join_command
from outlast.saves import save_path

STAND_IN = """
import os, signal, socket, subprocess, sys, time
from pathlib import Path
from outlast.events import EventLog, last_commit

def run_rank(config, life):
    group, run = config.fault_tolerance.replica_id, Path(config.job.run_dir)
    assert os.environ["OUTLAST_TOKEN"]
    print(f"threads {config.training.threads}, of {config.fault_tolerance.group_size}")
    order = run / f"order-{group}"
    if order.exists():
        return int(order.read_text())
    stopping = []
    signal.signal(signal.SIGTERM, lambda *_: stopping.append(1))
    rank, size, late = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), time.time() + 30
    if rank:
        print("seat", size, os.environ["LOCAL_RANK"], os.environ["MASTER_ADDR"])
        socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 5)
        while last_commit(run) < config.training.steps and not stopping and time.time() < late:
            time.sleep(0.01)
        return 143 if stopping else 0
    if size > 1:
        socket.socket(fileno=int(os.environ["OUTLAST_STORE_FD"])).accept()
    events = EventLog(run, f"g{group}.{life}", group=group, life=life, rank=0)
    step = last_commit(run)
    events.emit("start", steps=config.training.steps, step=0, pid=os.getpid())
    if step:
        events.emit("heal", step=step, seconds=0.0)
    while step < config.training.steps and not stopping:
        time.sleep(0.01)
        step += 1
        events.emit("commit", step=step, loss=1.0, tokens=10)
    sys.stdout.write(f"last step {step}")
    return 143 if stopping else 0

def echo(config, life):
    child = subprocess.Popen(["sleep", "60"])
    print("life", life, os.environ["OUTLAST_TOKEN"], os.getppid(), child.pid, flush=True)
    print("to stderr", file=sys.stderr)
    if config.training.seed == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    if config.training.seed == 8:
        raise ValueError("a mishap")
    if config.training.seed == 9:
        time.sleep(60)
    return config.training.seed
"""

DRIVER = """
import sys
from outlast.errors import UserError
from outlast.launch.supervisor import launch_command
try:
    sys.exit(launch_command(sys.argv[1:], preload=["stand_in"], entry="stand_in:run_rank"))
except UserError as e:
    print("outlast:", e)
    sys.exit(e.exit_code)
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the stand-in, on the path of children."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    (tmp_path / "drive.py").write_text(DRIVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def eventually(what: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """The first true value of `what`."""
    deadline = time.monotonic() + timeout_s
    while not (value := what()):
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)
    return value


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie doesn't)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class Launch:
    """A launch in a process of its own."""

    def __init__(self, folder: Path, run_dir: Path, *args: str, steps: int = 100_000) -> None:
        self.run_dir = run_dir
        command = [sys.executable, str(folder / "drive.py"), "--run-dir", str(run_dir), f"--training.steps={steps}"]
        self.process = subprocess.Popen(
            [*command, *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in read_events(self.run_dir) if e["kind"] == kind]

    def ready(self, groups: int) -> None:
        """Wait until so many groups commit."""
        eventually(lambda: len({e["group"] for e in self.events("commit")}) >= groups)

    def pid(self, group: int) -> int:
        return [e["pid"] for e in self.events("spawn") if e["group"] == group][-1]

    def family(self) -> list[int]:
        """All its processes below it: children, and theirs."""
        parents = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        found = {self.process.pid}
        while more := {p for p, parent in parents.items() if parent in found} - found:
            found |= more
        return sorted(found - {self.process.pid})

    def end(self, timeout_s: float = 10.0) -> tuple[int, str]:
        """Wait for it. Returns its exit code and what it printed."""
        out, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out


@pytest.fixture
def launch(stand_in: Path) -> Iterator[Callable[..., Launch]]:
    """Starts launches, and ends what is left of them."""
    started: list[Launch] = []

    def start(*args: str, run_dir: Path | None = None, steps: int = 100_000) -> Launch:
        run = Launch(stand_in, run_dir or stand_in / "run", *args, steps=steps)
        started.append(run)
        return run

    yield start
    for run in started:
        if run.process.poll() is None:
            run.process.kill()
            run.process.communicate()


# The template --------------------------------------------------------------------------------------


class Forks:
    """A template, and what it says."""

    def __init__(self) -> None:
        self.spawner = Spawner("s3cret", preload=["stand_in"], entry="stand_in:echo")
        self.output = self.spawner.start()
        assert self.hear()[0]["is"] == "ready"

    def hear(self) -> tuple[dict[str, Any], list[int]]:
        assert self.spawner.sock and select.select([self.spawner.sock], [], [], 10)[0]
        message, fds = self.spawner.receive()
        assert message
        return message, fds

    def fork(self, seed: int) -> tuple[int, int, int]:
        """Returns process id, pidfd and the pipe."""
        config = Config(training=Config().training.__class__(seed=seed))
        read_end, write_end = os.pipe()
        self.spawner.fork(4, 1, f"life{seed}", config, {"RANK": "1"}, write_end)
        os.close(write_end)
        message, fds = self.hear()
        assert (message["is"], message["group"], message["life"]) == ("forked", 4, f"life{seed}")
        return message["pid"], fds[0], read_end


@pytest.fixture
def forks(stand_in: Path) -> Iterator[Forks]:
    made = Forks()
    yield made
    made.spawner.close()


def test_template_forks_ranks_and_reports_their_ends(forks: Forks) -> None:
    for seed, code in [(0, 0), (3, 3), (7, -signal.SIGKILL), (8, 1)]:
        pid, _, pipe = forks.fork(seed)
        assert forks.hear()[0] == {"is": "exited", "group": 4, "rank": 1, "life": f"life{seed}", "code": code}
        said = os.read(pipe, 1 << 16).decode()
        assert said.startswith(f"life life{seed} s3cret {forks.spawner.process and forks.spawner.process.pid} ")
        assert ("to stderr" in said) and (("ValueError: a mishap" in said) == (seed == 8))
        assert not alive(pid)
        child = int(said.split()[4])
        eventually(lambda child=child: not alive(child))  # what a rank started ends with it


def test_no_rank_outlives_its_template_and_the_token_is_on_no_command_line(forks: Forks) -> None:
    pid, pidfd, pipe = forks.fork(9)
    assert select.select([pipe], [], [], 10)[0]
    assert forks.spawner.process
    for process in (pid, forks.spawner.process.pid):
        assert b"s3cret" not in Path(f"/proc/{process}/cmdline").read_bytes()
    forks.spawner.process.kill()
    assert select.select([pidfd], [], [], 10)[0]
    child = int(os.read(pipe, 1 << 16).split()[4])
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)  # a rank's own children are its own business when it is killed


# Launch --------------------------------------------------------------------------------------------


def test_runs_groups_to_the_end_with_prefixed_output(launch: Callable[..., Launch]) -> None:
    run = launch("--groups", "3", steps=20)
    code, out = run.end()
    assert code == 0, out
    for group in range(3):
        assert f"[g{group}] last step 20\n" in out
        assert "last step 20" in (run.run_dir / "logs" / f"g{group}.log").read_text()
    assert "of 3" in out and "finished: step 20/20" in out
    died = run.events("died")
    assert sorted((e["group"], e["code"], e["restart_in"]) for e in died) == [(g, 0, None) for g in range(3)]
    assert [e["code"] for e in run.events("end")] == [0]
    assert not (run.run_dir / "job.json").exists() and not (run.run_dir / "launch.sock").exists()


def test_a_terminal_shows_one_live_line(stand_in: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, str(stand_in / "drive.py"), "--groups=1", f"--run-dir={stand_in / 'run'}"]
    process = subprocess.Popen([*command, "--training.steps=50"], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):  # how a terminal tells that nobody writes any more
        while data := os.read(ours, 4096):
            said += data
    os.close(ours)
    assert process.wait(10) == 0
    assert re.search(rb"\r\x1b\[2Kstep \d+/50  loss 1.0000 .* groups 1/1", said)
    assert b"[g0] last step 50\r\n" in said


def test_the_run_goes_on_when_nobody_reads_what_it_prints(launch: Callable[..., Launch]) -> None:
    run = launch("--groups", "1", steps=60)
    assert run.process.stdout
    run.process.stdout.close()
    assert run.process.wait(10) == 0
    assert (run.run_dir / "logs" / "g0.log").read_text().endswith("last step 60\n")


def test_a_killed_rank_is_reported_and_started_again(launch: Callable[..., Launch]) -> None:
    run = launch("--groups", "2")
    run.ready(2)
    first = run.pid(1)
    os.kill(first, signal.SIGKILL)
    died = eventually(lambda: run.events("died"))[0]
    assert (died["group"], died["pid"], died["code"], died["restart_in"]) == (1, first, -signal.SIGKILL, 0.0)
    eventually(lambda: run.pid(1) != first)
    eventually(lambda: len({e["life"] for e in run.events("commit") if e["group"] == 1}) == 2)
    assert len(run.events("spawn")) == 3


def test_the_ranks_of_a_group_die_and_come_back_together(launch: Callable[..., Launch]) -> None:
    run = launch(
        "--groups=2", "--ranks-per-group=2", "--training.global_batch_size=24", "--chaos=kill g0.0 at step 300"
    )
    run.ready(2)
    first = {e["group"]: e["pids"] for e in run.events("spawn")}
    os.kill(first[1][1], signal.SIGKILL)
    died = eventually(lambda: run.events("died"))[0]
    assert (died["group"], died["rank"], died["code"], died["pid"]) == (1, 1, -signal.SIGKILL, first[1][0])
    eventually(lambda: not any(map(alive, first[1])))
    assert all(map(alive, first[0])), "only its own group"
    eventually(lambda: len({e["life"] for e in run.events("commit") if e["group"] == 1}) == 2)
    other = eventually(lambda: [e for e in run.events("died") if e["group"] == 0])[0]
    assert other["rank"] == 0 and "by chaos" in other["reason"]
    eventually(lambda: len(run.events("spawn")) == 4)
    assert "seat 2 3 127.0.0.1" in (run.run_dir / "logs" / "g1.1.log").read_text()
    run.process.terminate()
    code, out = run.end()
    assert code == 143 and "seat" not in out, "rank 0 speaks for its group"


def kill_template(run: Launch) -> list[int]:
    """Kill the parent of the ranks. Returns the ranks."""
    eventually(lambda: run.events("commit")[-1]["step"] >= 10)
    ranks = [run.pid(0), run.pid(1)]
    os.kill(int(Path(f"/proc/{ranks[0]}/stat").read_text().rsplit(")", 1)[1].split()[1]), signal.SIGKILL)
    return ranks


def test_a_dead_template_is_replaced_and_its_ranks_too(launch: Callable[..., Launch]) -> None:
    run = launch("--groups", "2")
    run.ready(2)
    save = save_path(run.run_dir, 1)
    save.mkdir(parents=True)
    (save / "manifest.json").write_text('{"format": 1, "step": 1, "files": {}}')
    ranks = kill_template(run)
    eventually(lambda: len(run.events("spawn")) == 4)
    assert not any(map(alive, ranks))
    assert {(e["code"], e["restart_in"]) for e in run.events("died")} == {(-signal.SIGKILL, 0.0)}
    run.process.terminate()
    code, out = run.end()
    assert code == 143 and "back to the save of step 1" in out and "2 restarts" in out


def test_weights_that_nobody_holds_are_refused_by_name(launch: Callable[..., Launch]) -> None:
    run = launch("--groups", "2")
    run.ready(2)
    kill_template(run)
    code, out = run.end()
    assert code == 2
    assert re.search(r"steps 1-\d\d+ were committed and nobody holds the weights any more", out)
    code, out = launch(run_dir=run.run_dir).end()
    assert code == 2 and "nobody holds the weights" in out, "nor is it started over in silence"


def test_nothing_outlives_a_killed_launch_and_the_run_is_resumed(launch: Callable[..., Launch]) -> None:
    run = launch("--groups", "2")
    run.ready(2)
    family = run.family()
    assert len(family) == 4, "lighthouse, template, two ranks"
    run.process.kill()
    run.process.wait()
    eventually(lambda: not any(map(alive, family)))
    (run.run_dir / "done.json").write_text('{"step": 5}')
    code, out = launch(run_dir=run.run_dir).end()
    assert code == 0 and "finished already" in out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_in_order(launch: Callable[..., Launch], number: signal.Signals) -> None:
    run = launch("--groups", "2")
    run.ready(2)
    family = run.family()
    run.process.send_signal(number)
    code, out = run.end()
    assert code == 143, out
    assert not any(map(alive, family))
    assert {(e["code"], e["reason"]) for e in run.events("died")} == {(143, "stopped as asked")}
    assert out.count("last step") == 2, "ranks finish their step"


def test_asked_twice_kills_a_rank_that_does_not_listen(launch: Callable[..., Launch]) -> None:
    run = launch("--groups", "1", "--chaos", "stop g0 for 1h at step 1")
    stop = eventually(lambda: run.events("chaos"))[0]
    assert (stop["action"], stop["target"], stop["pid"]) == ("stop", "g0", run.pid(0))
    run.process.send_signal(signal.SIGTERM)  # which also lets it go on, to leave in order
    assert run.end()[0] == 143


def test_lighthouse_comes_back_on_the_same_port(launch: Callable[..., Launch]) -> None:
    run = launch("--groups", "1", "--chaos", "kill lighthouse at step 5")
    eventually(lambda: len(run.events("lighthouse")) == 3)
    first, died, again = run.events("lighthouse")
    assert [e["action"] for e in (first, died, again)] == ["start", "died", "start"]
    assert died["pid"] == first["pid"] != again["pid"] and first["address"] == again["address"]
    host, _, port = first["address"].removeprefix("http://").partition(":")

    def listens() -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection((host, int(port)), 1).close()
            return True
        return False

    eventually(listens)
    assert again["t"] - died["t"] < 1.0


def test_join_adds_groups_even_in_a_deep_folder(
    launch: Callable[..., Launch], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / ("deep" * 20) / ("deeper" * 20) / "run"
    run = launch("--groups", "1", run_dir=run_dir)
    run.ready(1)
    job = json.loads((run_dir / "job.json").read_text())
    assert (run_dir / "job.json").stat().st_mode & 0o777 == 0o600
    assert (run_dir / "launch.sock").stat().st_mode & 0o777 == 0o600
    assert job["pid"] == run.process.pid and len(job["token"]) == 32
    assert join_command([str(run_dir), "--groups", "2"]) == 0
    assert "added g1, g2" in capsys.readouterr().out
    run.ready(3)
    assert run.events("join")[0]["groups"] == [1, 2]
    assert not any(job["token"] in path.read_text() for path in run_dir.rglob("*.jsonl"))
    with pytest.raises(ConfigError, match="expected 1 to 1000"):
        join_command([str(run_dir), "--groups", "5000"])
    code, out = launch(run_dir=run_dir).end()
    assert code == 2 and f"in use by another launch (process {run.process.pid})" in out
    run.process.terminate()
    assert run.end()[0] == 143
    with pytest.raises(ConfigError, match="no launch runs in"):
        join_command([str(run_dir)])


def test_another_trajectory_is_refused_in_an_old_folder(launch: Callable[..., Launch]) -> None:
    run = launch("--groups", "1", steps=5)
    assert run.end()[0] == 0
    code, out = launch("--optimizer.lr=0.5", run_dir=run.run_dir, steps=5).end()
    assert code == 2 and "optimizer.lr = 0.0008" in out and "0.5" in out


def test_refused_groups_are_not_restarted(launch: Callable[..., Launch], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "order-1").write_text("2")
    run = launch("--groups", "2", steps=50)
    code, out = run.end()
    assert code == 0 and "g1: refused (exit code 2)" in out
    assert [e["group"] for e in run.events("spawn")].count(1) == 1

    both = tmp_path / "both"
    both.mkdir()
    for group in range(2):
        (both / f"order-{group}").write_text("2")
    code, out = launch("--groups", "2", run_dir=both).end()
    assert code == 2 and "all groups were refused" in out


def test_lighthouse_port_in_use_is_one_clear_line(launch: Callable[..., Launch]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out = launch(f"--fault_tolerance.lighthouse=http://127.0.0.1:{port}").end()
    assert code == 2 and f"port {port} is in use" in out and len(out.splitlines()) == 1
