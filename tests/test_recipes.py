"""The field's three terminals, as they are in docs/machines.md: a lighthouse and two groups under torchrun."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import Launch, Shell, alive, command_line, end_all, eventually, reference, same_bits, settings

from outlast.events import read_events

ROOT = Path(__file__).resolve().parents[1]
LIGHTHOUSE = "RUST_BACKTRACE=1 torchft_lighthouse --min_replicas 2 --quorum_tick_ms 100 --join_timeout_ms 10000"
GROUP = (
    "TRAIN_FILE=outlast.ft.train CONFIG_FILE=./configs/llama3_ft_debug.toml NGPU={ranks} ./run_train.sh "
    "--parallelism.data_parallel_shard_degree={ranks} --fault_tolerance.enable --fault_tolerance.group_size=2 "
    "--fault_tolerance.replica_id={group}"
)
TINY: dict[str, Any] = {"training__steps": 40}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """No process of a test outlives it."""
    yield
    end_all()


def test_the_documents_show_these_lines() -> None:
    text = (ROOT / "docs" / "machines.md").read_text()
    for line in (LIGHTHOUSE, *(GROUP.format(ranks=r, group=g) for r in (1, 2) for g in (0, 1))):
        assert f"\n{line}\n" in text


@pytest.mark.timeout(240)
@pytest.mark.parametrize("ranks", [1, 2])
def test_three_terminals_one_is_killed_and_comes_back(tmp_path: Path, ranks: int) -> None:
    # The defaults meet on port 29510; the other case has an address of its own.
    more, env = "", dict[str, str]()
    if ranks == 2 or not _free(29510):
        with socket.create_server(("127.0.0.1", 0)) as s:
            port = s.getsockname()[1]
        more, env = f" --bind 127.0.0.1:{port}", {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}
    lighthouse = Shell(tmp_path / "lighthouse.out", LIGHTHOUSE + more, tmp_path)
    run_dir = tmp_path / "runs" / "llama3_ft_debug"

    def group(number: int, name: str, line: str = GROUP, **others: str) -> Shell:
        """A terminal in another folder than the clone."""
        words = line.format(ranks=ranks, group=number).replace("./run_train.sh", str(ROOT / "run_train.sh"))
        slow = settings(**TINY, training__unit_pause_ms=50)
        return Shell(tmp_path / name, f"{words} {' '.join(slow)}", tmp_path, env | others)

    g0, g1 = group(0, "g0.out"), group(1, "g1.out", LOG_RANK="7")

    def commits(number: int) -> list[dict[str, Any]]:
        there = run_dir.exists() and [e for e in read_events(run_dir) if e["kind"] == "commit"]
        return [e for e in there or () if e["group"] == number]

    eventually(lambda: len(commits(1)) >= 10, "both groups train")
    victim = [pid for pid in _children(g1.pid) if "torch.distributed.run" not in " ".join(command_line(pid))][-1]
    os.kill(victim, signal.SIGKILL)
    assert g1.end() == 1, "torchrun gives the group up: it may start it again with MAX_RESTARTS"
    assert "[rank0]:" in g0.output() and "[rank0]:" not in g1.output()
    eventually(lambda: "waiting: the lighthouse at http://" in g0.output(), "the survivor says that it waits")
    assert "waits for more (its --min_replicas)" in g0.output()
    stands = len(commits(0))
    assert stands < 40 and g0.popen.poll() is None, "it waits for its peer"

    # The number may come from the environment.
    line = GROUP.replace(" --fault_tolerance.replica_id={group}", "")
    g1 = group(1, "g1-again.out", line, REPLICA_GROUP_ID="1", RUST_LOG="info")
    assert (g0.end(), g1.end()) == (0, 0), g0.output() + g1.output()
    assert "healed from g0:" in g1.output()
    assert lighthouse.popen.poll() is None
    verdict = same_bits(run_dir, reference(ranks, **TINY))
    assert verdict.lives == 3 and len(commits(0)) == 40
    assert not [pid for pid in _family(g0.pid, g1.pid) if alive(pid)]


@pytest.mark.timeout(120)
def test_left_out_is_one_rank_of_the_plain_trainer(tmp_path: Path) -> None:
    line = f"{ROOT / 'run_train.sh'} {' '.join(settings(training__steps=3))}"
    plain = Shell(tmp_path / "plain.out", line, tmp_path, {"CONFIG_FILE": "configs/llama3_debug.toml"})
    assert plain.end() == 0, plain.output()
    starts = [e for path in (tmp_path / "runs").iterdir() for e in read_events(path) if e["kind"] == "start"]
    assert [(e["ranks"], e["steps"], e["trainer"]) for e in starts] == [(1, 3, "Trainer")]


# Bad input -----------------------------------------------------------------------------------------


def refusal(run: Shell) -> str:
    """Wait for its end, which must be a refusal whose reason is the last line. Returns that line."""
    code = run.end()
    *before, last = run.output().splitlines()
    assert code == 2 and last.startswith("outlast: "), run.output()
    assert "Traceback" not in run.output() and "FAILED" not in run.output()
    assert {line.partition(":")[2] for line in before if "run folder" not in line} <= {last}
    return last


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"NGPU": "0"}, "NGPU=0: expected a number of ranks, 1 or more"),
        ({"NGPU": "two"}, "NGPU=two: expected a number"),
        ({"LOG_RANK": "a"}, "LOG_RANK=a: expected numbers of ranks"),
        ({"MAX_RESTARTS": "x"}, "MAX_RESTARTS=x: expected a number"),
    ],
)
def test_a_wrong_number_is_refused_by_the_script(tmp_path: Path, env: dict[str, str], says: str) -> None:
    assert says in refusal(Shell(tmp_path / "out", str(ROOT / "run_train.sh"), tmp_path, env))


@pytest.mark.timeout(120)
def test_a_rank_that_refuses_has_the_last_word(tmp_path: Path) -> None:
    line = f"{ROOT / 'run_train.sh'} --parallelism.data_parallel_shard_degree=3"
    shown = Shell(tmp_path / "shown", line, tmp_path, {"NGPU": "2", "LOG_RANK": "0,1"})
    hidden = Shell(tmp_path / "hidden", line, tmp_path, {"NGPU": "2", "LOG_RANK": "7"})
    assert "data_parallel_shard_degree = 3, and the group has 2 ranks: expected 2, or -1" in refusal(shown)
    assert refusal(hidden) == hidden.output().strip()


@pytest.mark.timeout(240)
def test_a_group_with_other_ranks_is_refused_and_the_run_goes_on(tmp_path: Path) -> None:
    run = Launch(tmp_path / "run", 2, training__unit_pause_ms=80, **TINY)
    job = run.job()
    args = settings(**TINY, job__run_dir=tmp_path / "wider", fault_tolerance__lighthouse=job["lighthouse"])
    env = {"NGPU": "2", "OUTLAST_TOKEN": job["token"], "TRAIN_FILE": "outlast.ft.train", "REPLICA_GROUP_ID": "2"}
    wider = Shell(tmp_path / "wider.out", f"{ROOT / 'run_train.sh'} {' '.join(args)}", tmp_path, env)
    assert "refused by the run: ranks a group is 2 here and 1 there" in refusal(wider)
    assert run.popen.poll() is None, "it still trains"
    run.same_bits(**TINY)


def _free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def _children(pid: int) -> list[int]:
    return [int(p) for p in subprocess.run(["pgrep", "-P", str(pid)], capture_output=True).stdout.split()]


def _family(*pids: int) -> list[int]:
    return [child for pid in pids for child in _children(pid)]
