"""The long loops of the fault tests: many seeds, many kills at any moment, long outages, a full disk.

As in `test_faults.py` every run is compared bit for bit with an undisturbed plain process.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import (
    STEPS,
    Event,
    Launch,
    alive,
    command_line,
    end_all,
    eventually,
    groups_of,
    name_of,
    reference,
    tiny_disk,
    wasted,
)

from outlast.audit import audit
from outlast.events import from_ranges, read_events

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """No process of a test outlives it."""
    yield
    end_all()


# Lighthouse (C2) -----------------------------------------------------------------------------------


def test_lighthouses_die_ten_times_and_more(tmp_path: Path) -> None:
    run = Launch(tmp_path / "run", 3, "kill lighthouse every 930ms", training__unit_pause_ms=60)
    verdict = run.same_bits()
    assert not [e for e in run.events("died") if e["code"]] and verdict.lives == 3, "the same three processes"
    # A new lighthouse may hear a group late, on a busy machine: it misses one step and heals, nothing is computed twice
    assert verdict.redone_units == 0 and len(run.events("heal")) <= 2
    began = run.events("commit")[0]["t"]
    assert sum(e["t"] > began for e in run.events("chaos")) >= 10


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_lighthouse_away_for_long(tmp_path: Path, number: signal.Signals) -> None:
    run = Launch(tmp_path / "run", 3, training__unit_pause_ms=30)
    run.wait_step(10)
    os.kill(run.pid, signal.SIGSTOP)  # so that nobody starts it again
    os.kill(run.lighthouse_pid(), number)
    time.sleep(1.0)
    before = run.step()
    time.sleep(15.0 if number == signal.SIGKILL else 20.0)  # longer than a group waits for one answer
    assert run.step() == before < STEPS
    if number == signal.SIGSTOP:
        os.kill(run.lighthouse_pid(), signal.SIGCONT)
    os.kill(run.pid, signal.SIGCONT)
    verdict = run.same_bits()
    assert verdict.lives == 3 and not [e for e in run.events("died") if e["code"]]
    assert verdict.redone_units == 0


# Many kills ----------------------------------------------------------------------------------------


def test_twenty_seeds_of_chaos_one_digest(tmp_path: Path) -> None:
    digests: set[str | None] = {reference().final_digest}
    for seed in range(20):
        chaos = f"kill every {1300 + seed % 5 * 100}ms; kill at step 25; kill lighthouse at step {10 + seed}"
        saves: dict[str, Any] = {"checkpoint__interval": 1 + seed % 4}
        run = Launch(tmp_path / f"seed{seed}", 3, chaos, seed, training__unit_pause_ms=40, **saves)
        digests.add(run.same_bits().final_digest)
        assert sum(e["action"] == "kill" and e["target"] != "lighthouse" for e in run.events("chaos")) >= 2
        end_all()
    assert len(digests) == 1


BIG: dict[str, Any] = {
    "model__dim": 256,
    "model__n_layers": 4,
    "model__n_heads": 4,
    "model__ffn_dim": 768,
    "training__steps": 40,
}
"""3.3M parameters: exchanges and heals take a good part of the time, so kills land in them."""


@pytest.mark.parametrize("seed", range(3))
def test_kills_in_the_middle_of_exchanges_and_heals(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    reference(**BIG)
    run = Launch(tmp_path / "run", 3, checkpoint__interval=10, **BIG)
    run.wait_step(1)
    kills = 0
    while kills < 12 and run.step() < BIG["training__steps"] - 8:
        group, how = rng.randrange(3), rng.random()
        since = run.events()[-1]["t"]
        pid = run.kill(group)
        kills += 1
        eventually(lambda group=group, pid=pid: run.pid_of(group) != pid, f"g{group} is back")
        if how < 0.3:  # the newcomer, somewhere between its start and the end of its heal
            time.sleep(rng.uniform(0.0, 0.6))
            run.kill(group)
        elif how < 0.7:  # its donor, while it serves or before
            events = eventually(lambda g=group, t=since: snapshot_or_commit(run, g, t), "a donor, or none needed")
            time.sleep(rng.uniform(0.0, 0.15))
            run.kill(events[-1]["group"])
        run.wait_step(run.step() + rng.randrange(1, 3))
        time.sleep(rng.uniform(0.0, 0.4))
    run.same_bits(**BIG)
    assert kills >= 5 and run.events("retry")


LARGE: dict[str, Any] = {
    "model__dim": 512,
    "model__n_layers": 8,
    "model__n_heads": 4,
    "model__ffn_dim": 2400,
    "training__steps": 12,
}
"""A state of 400 MB: 35M parameters with two moments each."""


def test_the_donor_of_a_large_state_dies_when_half_of_it_is_sent(tmp_path: Path) -> None:
    run = Launch(tmp_path / "run", 3, checkpoint__enable="false", training__unit_pause_ms=200, **LARGE)
    run.wait_step(2)
    killed = run.kill(2)
    donor = eventually(lambda: run.events("snapshot"), "a donor")[0]
    pid = run.pid_of(donor["group"])
    eventually(lambda: sent(pid) > 200e6, "half of it is sent")
    os.kill(pid, signal.SIGKILL)
    run.wait_back(2, killed)
    run.same_bits(**LARGE)
    heals = run.events("heal")
    assert donor["bytes"] > 400e6 and {e["group"] for e in heals} == {2, donor["group"]}
    assert all(e["donor"] != name_of(donor) for e in heals), "another donor's, whole"


def sent(pid: int) -> int:
    """Bytes that a process sent by one of its connections, at most."""
    said = subprocess.run(["ss", "-Htinp"], capture_output=True, text=True, check=True).stdout
    lines = [line for line in said.replace("\n\t", " ").splitlines() if f"pid={pid}," in line]
    return max((int(n) for line in lines for n in re.findall(r"bytes_sent:(\d+)", line)), default=0)


def snapshot_or_commit(run: Launch, group: int, t: float) -> list[Event]:
    """Snapshots that were served since then; if the group came back from a save instead: its commits."""
    spawned = [e["t"] for e in run.events("spawn") if e["group"] == group][-1]
    commits = [e for e in run.events("commit") if e["group"] == group and e["t"] > spawned]
    return [e for e in run.events("snapshot") if e["t"] > t] or commits


def test_pauses_at_any_moment(tmp_path: Path) -> None:
    chaos = (
        "stop every 1900ms for 700ms times 9; stop 2 every 4300ms for 900ms times 3; "
        "stop 1 at step 20 for 3s; kill at step 30"
    )
    timing: dict[str, Any] = {"training__unit_pause_ms": 60, "fault_tolerance__process_group_timeout_ms": 1000}
    run = Launch(tmp_path / "run", 3, chaos, chaos_seed=5, **timing)
    run.same_bits()
    assert sum(e["action"] == "stop" for e in run.events("chaos")) >= 5


def test_launch_is_killed_again_and_again(tmp_path: Path) -> None:
    at = 0
    for groups in (2, 3, 1):
        run = Launch(tmp_path / "run", groups, training__unit_pause_ms=20, checkpoint__interval=1)
        run.wait_step(at + 8)
        run.popen.kill()
        run.popen.wait()
        eventually(lambda run=run: not run.left(), "no process of the run is left", 10.0)
        at = run.step()
    Launch(tmp_path / "run", 3).same_bits()


def test_the_template_dies_with_all_its_groups(tmp_path: Path) -> None:
    run = Launch(tmp_path / "run", 3, training__unit_pause_ms=30, checkpoint__interval=4)
    for step in (10, 25):
        run.wait_step(step)
        ranks = [run.pid_of(g) for g in range(3)]
        template = int(Path(f"/proc/{ranks[0]}/stat").read_text().rsplit(")", 1)[1].split()[1])
        assert "outlast.launch.template" in command_line(template)
        os.kill(template, signal.SIGKILL)
        eventually(lambda ranks=ranks: not any(map(alive, ranks)), "its groups end with it")
    run.same_bits()
    assert len([e for e in run.events("checkpoint") if e["action"] == "load"]) >= 6


def test_no_commit_with_fewer_groups_than_asked_for(tmp_path: Path) -> None:
    chaos = "kill g1 at step 10; kill g0 at step 20; stop g1 for 2s at step 30; kill lighthouse every 2s"
    timing: dict[str, Any] = {"training__unit_pause_ms": 30, "fault_tolerance__process_group_timeout_ms": 1000}
    run = Launch(tmp_path / "run", 2, chaos, **timing, fault_tolerance__min_replica_size=2)
    run.same_bits()
    assert {len(groups_of(e)) for e in run.events("commit")} == {2}


def test_float_sums_keep_samples_and_schedule(tmp_path: Path) -> None:
    floats: dict[str, Any] = {"training__accumulation": "float"}
    expected = reference(**floats)
    chaos = "kill every 1700ms times 4; stop g1 for 1s at step 15; kill lighthouse at step 20"
    run = Launch(tmp_path / "run", 3, chaos, training__unit_pause_ms=40, **floats)
    run.end_in_order(0)
    verdict = audit(run.events())
    assert verdict.broken == () and verdict.finished and verdict.samples_exactly_once
    same = ("step", "samples", "data", "tokens", "lr", "skipped")
    for ours, theirs in zip(verdict.history, expected.history, strict=True):
        assert [getattr(ours, name) for name in same] == [getattr(theirs, name) for name in same]
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-4)


def test_ranks_asked_to_stop_lose_no_unit(tmp_path: Path) -> None:
    rng = random.Random(1)
    run = Launch(tmp_path / "run", 3, training__unit_pause_ms=40)
    for _ in range(6):
        run.wait_step(run.step() + 3)
        time.sleep(rng.uniform(0.0, 0.2))
        group = min({e["group"] for e in run.events("spawn")} - {e["group"] for e in run.events("exit")})
        run.kill(group, signal.SIGTERM)
        run.join()
        eventually(lambda g=group: [e for e in run.events("exit") if e["group"] == g], f"g{group} leaves")
    verdict = run.same_bits()
    assert verdict.redone_units == 0
    assert sorted(e["code"] for e in run.events("exit")) == [0] * 3 + [143] * 6


# A full disk ---------------------------------------------------------------------------------------


def test_a_disk_that_fills_up_and_is_freed(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk", "16m") as disk:
        saves: dict[str, Any] = {"checkpoint__interval": 5, "checkpoint__keep_latest_k": 2}
        run = Launch(disk / "run", 3, out=tmp_path, training__unit_pause_ms=40, **saves)
        run.wait_step(12)
        ballast = disk / "ballast"
        try:
            with ballast.open("wb", buffering=0) as f:
                while True:
                    f.write(bytes(4096))
        except OSError:
            pass
        eventually(lambda: "events can't be written to" in run.output(), "someone sees it")
        time.sleep(1.0)
        ballast.unlink()
        verdict = run.same_bits()
        assert verdict.lives > 3
        end_all()


# What a death costs --------------------------------------------------------------------------------


def test_only_the_dead_groups_units_are_computed_again(tmp_path: Path) -> None:
    command = [sys.executable, "bench/gap.py", "--kills=12", f"--folder={tmp_path}"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout)
    print(figures)
    events = read_events(tmp_path / "run")
    verdict = audit(events)
    kills = [i for i in verdict.incidents if i.kind == "kill"]
    assert len(kills) == figures["kills"] >= 10 and {i.group for i in kills} == {0, 1, 2}
    shares = {
        (e["step"], name_of(e)): from_ranges(e["units"]) | from_ranges(e["held"]) for e in events if e["kind"] == "plan"
    }
    pids = {e["pid"] for e in events if e["kind"] == "chaos"}
    killed = {name_of(e): e for e in events if e["kind"] == "start" and e["pid"] in pids}
    for name in {name_of(e) for e in events if e["kind"] == "unit"} - killed.keys():
        assert not wasted(events, name), "a survivor keeps what it has"
    for name in killed:
        lost = wasted(events, name)
        assert len({step for step, _ in lost}) <= 1, "of one step"
        assert all(unit in shares[step, name] for step, unit in lost)
    assert verdict.redone_units == sum(len(wasted(events, name)) for name in killed)
    assert verdict.redone_units == sum(i.redone_units or 0 for i in kills)
