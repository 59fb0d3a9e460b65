"""What goes wrong in a virtual world."""

from typing import TYPE_CHECKING

from outlast.sim.plane import Failed

if TYPE_CHECKING:
    from outlast.sim.edge import Edge
    from outlast.sim.world import World


def strike(world: "World", victim: "Edge | None") -> None:
    """One fault, drawn by its weight, on this life or on whoever is drawn."""
    rng, faults = world.rng, world.scenario.faults
    kind = rng.choices(list(faults), list(faults.values()))[0]
    if not world.alive:
        return
    if victim is None or victim.dead:
        victim = rng.choice(world.alive)
    most = max(0.0, world.scenario.rough_s - world.now)
    seconds = min(most, world.between(0.05, 1.5) if rng.random() < 0.5 else world.between(0.5, 15.0))
    match kind:
        case "crash":
            crash(world, victim)
        case "freeze":
            freeze(world, victim, seconds)
        case "stall":
            freeze(world, victim, seconds, beats_s=min(seconds, world.between(0.0, 4.0)))
        case "cut lighthouse":
            cut(world, victim, None, seconds)
        case "cut peer":
            cut(world, victim, rng.choice(world.alive), seconds)
        case "isolate":
            for other in [None, *world.alive]:
                cut(world, victim, other, seconds)
        case "lighthouse":
            crash_lighthouse(world, min(most, world.between(20.0, 60.0)) if rng.random() < 0.1 else min(seconds, 3.0))
        case "twin":
            freeze(world, victim, seconds)
            world.launch_after(seconds * rng.random(), victim.group)
        case "stop":
            world.say(victim, "is asked to stop")
            victim.stopping = True
        case "blackout":
            for life in list(world.alive):
                crash(world, life)
        case _:
            raise ValueError(f"no fault {kind!r}")


def crash(world: "World", life: "Edge") -> None:
    """A life ends without a word."""
    world.say(life, "CRASHES")
    world.bury(life)
    long = world.rng.random() < 0.15
    world.launch_after(world.between(5.0, 20.0) if long else world.between(0.1, 3.0), life.group)


def freeze(world: "World", life: "Edge", seconds: float, beats_s: float | None = None) -> None:
    """It stands still; with `beats_s` its heartbeat and its server go on, the heartbeat for that long.

    A process that was stopped finds its timers run out and its messages come, in either order.
    """
    world.say(life, f"{'STALLS' if beats_s is not None else 'FREEZES'} for {seconds:.2f} s")
    world.last_beat(life, world.now + (beats_s or 0.0))
    life.frozen_until = max(life.frozen_until, world.now + seconds)
    life.stalled = beats_s is not None
    world.after(seconds, _thaw, world, life)


def _thaw(world: "World", life: "Edge") -> None:
    if life.dead or life.frozen_until > world.now:
        return
    life.beat_from = world.now + world.rng.random() * world.times.beat
    world.say(life, "goes on")
    if life.inbox:
        world.resume(life, world.rng.choice(life.inbox))


def cut(world: "World", one: "Edge", other: "Edge | None", seconds: float) -> None:
    """Two can't reach each other for a time; None is the lighthouse."""
    if one is other:
        return
    world.say(one, f"CUT from {other.name if other else 'the lighthouse'} for {seconds:.2f} s")
    if other is None:
        world.last_beat(one, world.now)
    a, b = one.uid, -1 if other is None else other.uid
    pair = (a, b) if a < b else (b, a)
    world.cuts[pair] = max(world.cuts.get(pair, 0.0), world.now + seconds)


def crash_lighthouse(world: "World", seconds: float) -> None:
    """It ends with all calls, and comes back knowing nothing."""
    light = world.lighthouse
    if not light.up:
        return
    world.say(None, f"LIGHTHOUSE CRASHES for {seconds:.2f} s")
    for w in light.crash():
        w.fail(Failed("connection reset"))
    world.after(seconds, _start_lighthouse, world)


def _start_lighthouse(world: "World") -> None:
    world.say(None, "lighthouse starts")
    world.lighthouse.start()
    for life in world.alive:
        life.beat_from = max(life.beat_from, world.now + world.rng.random() * 2 * world.times.beat)
