"""`outlast demo`: train on three groups, kill two, and check against one undisturbed run.

The checks read the events of both runs; the exit code is 0 only if every one of them holds.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from outlast.audit import Audit, audit, compare, incident_table
from outlast.config import new_run_dir
from outlast.curves import loss_curve
from outlast.errors import EXIT_FAILED, EXIT_OK, ConfigError
from outlast.events import read_events

CONFIG = Path(__file__).with_name("demo.toml")
GROUPS = 3
CHAOS = "kill g1 at step 40; kill g0 at step 90"
VICTIMS = (1, 0)
LOSS_GOAL = 2.4
"""Nats a byte, mean of the last ten steps."""
STEPS_BACK = 10
"""Steps with units of its own that each victim must commit after it came back."""
PROMPT = "def read_config(path):\n"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"outlast demo: {message}")


@dataclass(frozen=True)
class Check:
    """One claim of the demo, and what was found."""

    claim: str
    holds: bool
    found: str


def demo_command(args: Sequence[str]) -> int:
    """`outlast demo [--run-dir DIR]`."""
    p = _Parser(prog="outlast demo", description="Train on three groups, kill two, check that the bits are the same.")
    p.add_argument("--run-dir", help="folder for the two runs (default: runs/demo-TIME)")
    where = Path(p.parse_args(args).run_dir or new_run_dir(CONFIG))
    if where.exists() and any(where.iterdir()):
        raise ConfigError(f"outlast demo: --run-dir {where} isn't empty; give a new folder")
    console = Console(highlight=False, soft_wrap=True)
    started = time.monotonic()
    threads = max(1, len(os.sched_getaffinity(0)) // GROUPS)
    common = ["--config", str(CONFIG), f"--training.threads={threads}"]

    console.print(f"[bold]1. Three replica groups; two are killed without warning[/bold]  ({CHAOS})")
    launched = _run(["launch", *common, "--groups", str(GROUPS), "--run-dir", str(where / "groups"), "--chaos", CHAOS])
    console.print("\n[bold]2. The same config in one plain process, undisturbed[/bold]")
    plain = _run(["train", *common, "--job.run_dir", str(where / "plain")])
    console.print("\n[bold]3. What the events of both say[/bold]")
    events = read_events(where / "groups")
    groups, alone = audit(events), audit(read_events(where / "plain"))
    checks = [
        Check("the job on three groups finished", launched == 0 and groups.finished, f"exit code {launched}"),
        Check("the plain run finished", plain == 0 and alone.finished, f"exit code {plain}"),
        *_checks(groups, alone, events),
    ]
    _show(console, groups, checks, where)
    good = all(c.holds for c in checks)
    seconds = time.monotonic() - started
    if good:
        console.print(f"\n[bold green]Same bits.[/bold green] {len(checks)} claims checked in {seconds:.0f} s.")
    else:
        console.print(f"\n[bold red]Not as promised[/bold red]: {next(c.claim for c in checks if not c.holds)}")
    console.print(f"Look closer: outlast audit {where}/groups {where}/plain")
    return EXIT_OK if good else EXIT_FAILED


def _run(args: list[str]) -> int:
    """One command of ours, in a process of its own; Ctrl-C reaches it, and it is waited for."""
    child = subprocess.Popen([sys.executable, "-m", "outlast.cli", *args])
    try:
        return child.wait()
    except BaseException:
        child.terminate()
        child.wait()
        raise


def _checks(groups: Audit, alone: Audit, events: list[dict[str, Any]]) -> list[Check]:
    both = compare(groups, alone)
    parameters = max((e["parameters"] for e in events if e["kind"] == "start"), default=0)
    last = [s.loss for s in groups.history[-10:]]
    loss = sum(last) / len(last) if last else float("nan")
    killed = [i.group for i in groups.incidents if i.kind == "kill" and i.group is not None]
    broken = [*groups.broken, *alone.broken]
    return [
        Check(
            f"every promise kept in {groups.committed_steps} steps: each unit, each sample exactly once, equal digests",
            not broken,
            broken[0] if broken else f"{groups.redone_units} units computed again",
        ),
        Check(
            "one trajectory: same samples, losses and digests",
            both.same,
            "to the last bit" if both.same else str(both.difference),
        ),
        Check("same final digest", groups.final_digest == alone.final_digest, f"{(groups.final_digest or '')[:16]}…"),
        Check("two groups were killed", sorted(killed) == sorted(VICTIMS), f"groups {killed}"),
        *(
            Check(f"g{g} came back and did its share", (n := _steps_back(events, g)) >= STEPS_BACK, f"in {n} steps")
            for g in VICTIMS
        ),
        Check(
            "0.9M parameters or more, 150 steps or more", parameters >= 9e5 and groups.steps >= 150, f"{parameters:,}"
        ),
        Check(f"loss at most {LOSS_GOAL} nats a byte", loss <= LOSS_GOAL, f"{loss:.3f}, mean of the last 10 steps"),
    ]


def _steps_back(events: list[dict[str, Any]], group: int) -> int:
    """Steps that a group's later lives committed with units of their own."""
    lives = [e["life"] for e in events if e["kind"] == "start" and e["group"] == group]
    names = {f"g{group}:{life}" for life in lives[1:]}
    return sum(
        e["kind"] == "commit" and any(e["by"].get(name) for name in names & {f"g{e['group']}:{e['life']}"})
        for e in events
    )


def _show(console: Console, groups: Audit, checks: list[Check], where: Path) -> None:
    for c in checks:
        console.print(f"  [{'green' if c.holds else 'red'}]{'yes' if c.holds else 'NO '}[/]  {c.claim}: {c.found}")
    if groups.incidents:
        console.print()
        console.print(incident_table(groups))
    if len(groups.history) > 1:
        steps, losses = [s.step for s in groups.history], [s.loss for s in groups.history]
        marks = [i.step for i in groups.incidents if i.step is not None]
        console.print("Loss, nats a byte (marks: kills)")
        console.print(loss_curve(steps, losses, min(console.width, 90), 14, marks), markup=False)
    if checks[0].holds:
        from outlast.sample import RunModel  # torch: only now

        for label, trained in (("before", False), ("after", True)):
            text = RunModel(where / "groups", trained).complete(PROMPT, 160, seed=1)
            console.print(f"\n[bold]Text {label} training[/bold], after {PROMPT!r}")
            console.print(_printable(text), markup=False)


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else "·" for c in text)
