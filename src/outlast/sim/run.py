"""Runs from seeds: one, or many; a seed that fails replays exactly, with a trace."""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from outlast.sim.life import Life
from outlast.sim.scenario import draw
from outlast.sim.world import Violation, World


@dataclass(frozen=True)
class Result:
    """How a run went.

    Attributes:
        seed: it came from.
        violation: which promise was broken; None if all were kept.
        seconds: virtual.
        after_faults_s: virtual seconds from the end of the last faults to the end of the run; 0 if it ended before.
        commits: of all lives together.
        faults: that struck.
        lives: that were.
        refused: it ended because nobody held its committed steps any more.
        seen: how often rare things happened.
    """

    seed: int
    violation: Violation | None
    seconds: float
    after_faults_s: float
    commits: int
    faults: int
    lives: int
    refused: bool
    seen: Mapping[str, int]


def simulate(
    seed: int,
    exact: bool = True,
    trace: list[str] | None = None,
    world: type[World] = World,
    life: type[Life] = Life,
    **changes: Any,
) -> Result:
    """One run.

    Args:
        seed: of all chance in it.
        exact: exact sums, else float.
        trace: lines of what happens are appended.
        world: the world, for a test that changes it.
        life: the shell, for a test that breaks it.
        changes: fields of the scenario to set.
    """
    rng = random.Random(seed)
    scenario = replace(draw(rng, exact), **changes)
    w = world(scenario, rng, trace, life)
    violation = None
    try:
        w.run()
    except Violation as e:
        violation = e
        w.say(None, f"VIOLATION of {e}")
    late = max(0.0, w.now - scenario.rough_s)
    return Result(seed, violation, w.now, late, w.commits, w.faults, len(w.lives), bool(w.refused), w.seen)


def first_violation(seeds: Iterable[int], **options: Any) -> Result | None:
    """The first run that breaks a promise, None if none does. `options` are those of `simulate`."""
    return next((r for r in (simulate(seed, **options) for seed in seeds) if r.violation), None)
