"""Real runs for the fault tests: launches, groups started by hand, the undisturbed run they must equal.

Every process ends with the one that started it, however that ends.
"""

import atexit
import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from outlast import saves
from outlast.audit import Audit, audit, compare
from outlast.data.corpus import prepare
from outlast.events import EventTail, from_ranges, read_events
from outlast.parent import die_with_parent

STEPS = 50
UNITS = 6
"""Work units of one sequence a step."""
TARGETS = UNITS * 16
"""Tokens a step that are predicted."""
TIMEOUT_S = 90.0
"""For anything that a run has to come to: the machine may be busy."""

T = TypeVar("T")
Event = dict[str, Any]


@functools.cache
def scratch() -> Path:
    """A folder for this session, removed at its end."""
    folder = Path(tempfile.mkdtemp(prefix="outlast-faults-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def corpus() -> Path:
    """A corpus of a few thousand bytes."""
    (scratch() / "text.txt").write_text(" ".join(f"{i * i % 97} squared {i % 13}" for i in range(500)))
    prepare([scratch() / "text.txt"], scratch() / "corpus")
    return scratch() / "corpus"


def settings(**others: Any) -> list[str]:
    """A tiny model: 39,072 parameters, a unit takes a few milliseconds. A digest after each step.

    Args:
        others: settings on top, `training__steps=20` for `--training.steps=20`.
    """
    given: dict[str, Any] = {
        "data__path": corpus(),
        "model__flavor": "demo",
        "model__dim": 32,
        "model__n_layers": 2,
        "model__n_heads": 2,
        "model__n_kv_heads": 1,
        "model__ffn_dim": 64,
        "training__seq_len": 16,
        "training__steps": STEPS,
        "training__local_batch_size": 1,
        "training__global_batch_size": UNITS,
        "training__threads": 1,
        "lr_scheduler__decay_type": "cosine",
        "lr_scheduler__warmup_steps": 5,
        "metrics__digest_every": 1,
        "metrics__enable_tensorboard": "false",
    }
    return [f"--{name.replace('__', '.')}={value}" for name, value in (given | others).items()]


@functools.cache
def reference(ranks: int = 1, **trajectory: Any) -> Audit:
    """What one undisturbed plain process, or one group of so many ranks, makes of the same trajectory."""
    run_dir = Path(tempfile.mkdtemp(prefix="plain-", dir=scratch()))
    plain = Train(run_dir, ranks, **trajectory)
    code = plain.end()
    assert code == 0, plain.output()
    verdict = audit(read_events(run_dir))
    assert verdict.finished and not verdict.broken
    return verdict


# --- Processes -------------------------------------------------------------------------------------


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie doesn't)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def command_line(pid: int) -> list[str]:
    """Of a process; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def eventually(what: Callable[[], T | None], why: str, timeout_s: float = TIMEOUT_S) -> T:
    """The first true value of `what`; fails with `why` if there is none in time."""
    deadline = time.monotonic() + timeout_s
    while not (value := what()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {why}"
        time.sleep(0.02)
    return value


class Process:
    """`outlast …` in a process of its own; what it prints goes to a file.

    Args:
        out: that file.
        args: of the command.
        env: environment variables on top.
        module: to run with them.
    """

    def __init__(
        self, out: Path, *args: str | Path, env: dict[str, str] | None = None, module: str = "outlast.cli"
    ) -> None:
        self._start(out, [sys.executable, "-m", module, *map(str, args)], env)

    def _start(self, out: Path, words: list[str], env: dict[str, str] | None, cwd: Path | None = None) -> None:
        self.out = out
        me = os.getpid()
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("wb") as f:
            self.popen = subprocess.Popen(
                words,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=f,
                stderr=subprocess.STDOUT,
                env={**_outside(), **(env or {})},
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(me),
            )
        _started.append(self)

    @property
    def pid(self) -> int:
        return self.popen.pid

    def output(self) -> str:
        """All that it printed so far."""
        return self.out.read_text(errors="replace")

    def end(self, timeout_s: float = TIMEOUT_S) -> int:
        """Wait for its end. Returns the exit code."""
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it didn't end within {timeout_s:g} s:\n{self.output()[-4000:]}") from None

    def refusal(self) -> str:
        """Wait for its end, which must be a refusal in one line. Returns the line."""
        code = self.end()
        lines = [line for line in self.output().splitlines() if not line.startswith("run folder ")]
        assert (code, len(lines)) == (2, 1), self.output()
        assert lines[0].startswith("outlast: "), lines
        return lines[0]


_started: list[Process] = []


def _outside() -> dict[str, str]:
    """The environment, less what trainers in this process have put into it."""
    return {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}


def end_all() -> None:
    """Kill what is left of all processes started here: for the end of a test, however it ended."""
    while _started:
        process = _started.pop()
        if process.popen.poll() is None:
            process.popen.kill()
            process.popen.wait()


class Train(Process):
    """`outlast train`; as several ranks under torchrun.

    Args:
        run_dir: of the run.
        ranks: of the group.
        env: environment variables on top.
        others: settings, see `settings`.
    """

    def __init__(self, run_dir: Path, ranks: int = 1, env: dict[str, str] | None = None, **others: Any) -> None:
        args = [*settings(**others), f"--job.run_dir={run_dir}"]
        out = run_dir.with_suffix(".out")
        if ranks == 1:
            super().__init__(out, "train", *args, env=env)
        else:
            torchrun = [f"--nproc-per-node={ranks}", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
            torchrun += ["--local-addr=127.0.0.1", "-m", "outlast.train"]
            super().__init__(out, *torchrun, *args, env=env, module="torch.distributed.run")


class Shell(Process):
    """A line that a user types, in a folder, with outlast's environment active.

    Args:
        out: file for what it prints.
        line: of bash; its last command takes the place of the shell.
        cwd: the folder.
        env: environment variables on top.
    """

    def __init__(self, out: Path, line: str, cwd: Path, env: dict[str, str] | None = None) -> None:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        assignments, command = _ASSIGNMENTS.match(line).groups()  # pyright: ignore
        self._start(out, ["bash", "-c", f"{assignments}exec {command}"], {"PATH": path, **(env or {})}, cwd)


_ASSIGNMENTS = re.compile(r"((?:[A-Z_]+=\S+ )*)(.*)", re.DOTALL)


class Launch(Process):
    """`outlast launch`, followed through the events of its run.

    Args:
        run_dir: of the run; may hold one to resume.
        groups: to start.
        chaos: faults to make.
        chaos_seed: of their draws.
        out: folder for what it prints; left out: beside the run.
        ranks: of each group.
        others: settings, see `settings`.
    """

    def __init__(
        self,
        run_dir: Path,
        groups: int,
        chaos: str = "",
        chaos_seed: int = 0,
        out: Path | None = None,
        ranks: int = 1,
        **others: Any,
    ) -> None:
        self.run_dir = run_dir
        self.ranks = ranks
        self._tail = EventTail(run_dir)
        self._seen: list[Event] = []
        self._family: set[int] = set()
        args: list[str] = [
            f"--run-dir={run_dir}",
            f"--groups={groups}",
            f"--ranks-per-group={ranks}",
            f"--chaos={chaos}",
            f"--chaos-seed={chaos_seed}",
        ]
        names = (f"{run_dir.name}-{number}.out" for number in itertools.count())
        file = next(f for name in names if not (f := (out or run_dir.parent) / name).exists())
        super().__init__(file, "launch", *args, *settings(**others))

    def events(self, *kinds: str) -> list[Event]:
        """Events so far, of some kinds or of all, in order of time."""
        if (self.run_dir / "events").exists():
            self._seen += self._tail.read()
        return sorted((e for e in self._seen if not kinds or e["kind"] in kinds), key=lambda e: e["t"])

    def step(self) -> int:
        """The highest step committed."""
        return max((e["step"] for e in self.events("commit")), default=0)

    def wait_step(self, step: int) -> None:
        """Wait until a step is committed."""
        eventually(lambda: self.step() >= step or self._gone(), f"step {step}, at {self.step()}")
        assert self.step() >= step, self.output()

    def wait_commits(self, group: int, count: int = 1, after: float = 0.0) -> None:
        """Wait until a group has made so many commits later than a time."""

        def made() -> bool:
            return sum(e["group"] == group and e["t"] > after for e in self.events("commit")) >= count

        eventually(lambda: made() or self._gone(), f"{count} commits of g{group}")
        assert made(), self.output()

    def wait_back(self, group: int, killed: int) -> None:
        """Wait until a later life of a group than the process that was killed commits."""
        begun = eventually(lambda: [e["t"] for e in self.events("spawn") if e["pid"] == killed], f"{killed}'s spawn")[0]

        def back() -> bool:
            starts = [e for e in self.events("start") if e["group"] == group and e["t"] > begun]
            lives = {name_of(e) for e in starts if e["pid"] != killed}
            return any(name_of(e) in lives for e in self.events("commit"))

        eventually(lambda: back() or self._gone(), f"g{group} commits again")
        assert back(), self.output()

    def _gone(self) -> bool:
        return self.popen.poll() is not None

    def job(self) -> Event:
        """Token and address of the lighthouse, once they are there."""
        return json.loads(eventually(lambda: _read(self.run_dir / "job.json"), "job.json"))

    def pid_of(self, group: int) -> int:
        """The newest process of a group."""
        return eventually(lambda: [e["pid"] for e in self.events("spawn") if e["group"] == group], f"g{group}")[-1]

    def lighthouse_pid(self) -> int:
        """The newest lighthouse's process."""
        return [e["pid"] for e in self.events("lighthouse") if e["action"] == "start"][-1]

    def kill(self, group: int, number: signal.Signals = signal.SIGKILL) -> int:
        """Signal a group's newest process. Returns its process id."""
        pid = self.pid_of(group)
        os.kill(pid, number)
        return pid

    def join(self, groups: int = 1) -> str:
        """`outlast join`. Returns what it printed."""
        command = Process(
            self.out.with_suffix(f".join-{time.monotonic_ns()}"), "join", self.run_dir, f"--groups={groups}"
        )
        assert command.end() == 0, command.output()
        return command.output()

    def stranger(self, name: str, token: str, **others: Any) -> Process:
        """A group started by hand against this run's lighthouse, with a run folder of its own."""
        run_dir = self.run_dir.with_name(f"{self.run_dir.name}-{name}")
        others = {"job__run_dir": run_dir, "fault_tolerance__lighthouse": self.job()["lighthouse"]} | others
        args = [*settings(**others), "--fault_tolerance.enable"]
        return Process(run_dir.with_suffix(".out"), "train", *args, env={"OUTLAST_TOKEN": token})

    def left(self) -> list[int]:
        """Processes of this launch that still run: by the ids in its events, and by its own id in theirs."""
        pids = {e["pid"] for e in self.events("spawn", "lighthouse", "launch", "start") if e.get("pid")}
        pids |= {pid for e in self.events("spawn") for pid in e.get("pids", ())}
        ours = [pid for pid in pids if alive(pid) and any("outlast" in word for word in command_line(pid))]
        for folder in Path("/proc").glob("[0-9]*"):
            words = command_line(int(folder.name))
            if any(w.startswith("outlast.launch.") for w in words) and str(self.pid) in words:
                ours.append(int(folder.name))
        return sorted({*ours})

    def end_in_order(self, code: int = 0, timeout_s: float = TIMEOUT_S) -> str:
        """Wait for its end, with this code and nothing left behind. Returns what it printed."""
        assert self.end(timeout_s) == code, self.output()[-6000:]
        eventually(lambda: not self.left(), "no process of the run is left", 10.0)
        return self.output()

    def same_bits(self, timeout_s: float = TIMEOUT_S, **trajectory: Any) -> Audit:
        """Wait for its end. It must have finished, kept every promise, and have the undisturbed run's bits."""
        said = self.end_in_order(0, timeout_s)
        assert "Traceback" not in said, said
        return same_bits(self.run_dir, reference(self.ranks, **trajectory))


def same_bits(run_dir: Path, expected: Audit) -> Audit:
    """A run must have finished, kept every promise, and have the undisturbed run's bits."""
    verdict = audit(read_events(run_dir))
    assert verdict.broken == ()
    assert verdict.finished and verdict.units_exactly_once and verdict.samples_exactly_once
    compared = compare(verdict, expected)
    assert compared.same, compared.difference
    assert verdict.final_digest == expected.final_digest
    assert compared.common_steps == compared.common_digests == expected.steps
    done = saves.done_marker(run_dir)
    assert done and done["step"] == expected.steps
    if saves.saves_dir(run_dir).exists():
        assert saves.newest_step(run_dir) == expected.steps, "the last step is saved, whole"
    return verdict


def _read(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        return path.read_text()
    return None


@contextlib.contextmanager
def tiny_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system with room for little."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip(f"a file system can't be mounted here: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


# --- What events say -------------------------------------------------------------------------------


def name_of(event: Event) -> str:
    """Member's name of the life that wrote an event."""
    return f"g{event['group']}:{event['life']}"


def groups_of(commit: Event) -> set[int]:
    """Numbers of the groups that took part in a commit."""
    return {int(name[1:].partition(":")[0]) for name in commit["by"]}


def wasted(events: Sequence[Event], name: str) -> set[tuple[int, int]]:
    """(step, unit) that a life computed and that no commit has from it."""
    computed = {(e["step"], e["unit"]) for e in events if e["kind"] == "unit" and name_of(e) == name}
    counted = {
        (e["step"], unit) for e in events if e["kind"] == "commit" for unit in from_ranges(e["by"].get(name, ""))
    }
    return computed - counted
