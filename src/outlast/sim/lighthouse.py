"""A pure model of torchft's lighthouse, as `lighthouse.rs` decides. Time is passed in."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from outlast.ft.protocol import Answer, Participant


@dataclass(frozen=True)
class Quorum(Answer):
    """An answer, with a number of its own that only the simulator knows."""

    number: int = 0


@dataclass
class Waiter:
    """A quorum call that the lighthouse holds. Its caller may have gone without a word."""

    request: Participant
    reply: Callable[[Quorum], None]
    fail: Callable[[Any], None]
    until: float


def quorum_members(
    joined: Mapping[str, float],
    healthy: Collection[str],
    previous: Collection[str] | None,
    now: float,
    min_replicas: int,
    join_s: float,
) -> list[str] | None:
    """Who is in the quorum that can be formed now.

    Args:
        joined: who has asked, and when.
        healthy: whose heartbeat is young enough.
        previous: members of the last quorum, None before the first.
        now: seconds.
        min_replicas: fewer are no quorum, except if all of the last one are there.
        join_s: how long the healthy ones that haven't asked are waited for.

    Returns:
        Names in order, or None: not yet.
    """
    here = sorted(name for name in joined if name in healthy)
    if previous is not None and all(name in here for name in previous):
        return here
    if len(here) < min_replicas or len(here) <= len(healthy) // 2:
        return None
    if len(here) < len(healthy) and now - min(joined[name] for name in here) < join_s:
        return None
    return here


class Lighthouse:
    """One process after another at one address; each starts knowing nothing.

    Args:
        min_replicas: fewer are no quorum.
        join_s: see `quorum_members`.
        unique: the groups take the time of a quorum into its key, not only its id.
    """

    def __init__(self, min_replicas: int, join_s: float, unique: bool = True) -> None:
        self.min_replicas, self.join_s, self.unique = min_replicas, join_s, unique
        self.up = True
        self.life = 0
        self.quorums = 0
        """Over all its lives; only the simulator knows."""
        self.start()

    def start(self) -> None:
        """A new process."""
        self.life += 1
        self.up = True
        self.requests: dict[str, Participant] = {}
        self.joined: dict[str, float] = {}
        self.waiters: list[Waiter] = []
        self.previous: list[str] | None = None
        self.quorum_id = 0
        self.heard: dict[str, float] = {}
        """When those that don't beat now were last heard."""

    def crash(self) -> list[Waiter]:
        """The process ends. Returns the calls that end with it."""
        gone, self.waiters = self.waiters, []
        self.up = False
        return gone

    def ask(self, waiter: Waiter, now: float) -> None:
        """A quorum call arrives; it counts as a heartbeat."""
        name = waiter.request.name
        self.heard[name] = max(now, self.heard.get(name, now))
        self.requests[name] = waiter.request
        self.joined[name] = now
        self.waiters.append(waiter)

    def tick(self, now: float, healthy: Collection[str]) -> Quorum | None:
        """Answer all that are in a quorum, if one can be formed; those that aren't in it wait on."""
        members = quorum_members(self.joined, healthy, self.previous, now, self.min_replicas, self.join_s)
        if members is None:
            return None
        if members != self.previous:
            self.quorum_id += 1
        self.quorums += 1
        key = f"{self.quorum_id}.{int(now)}.{int(now % 1 * 1e9)}" if self.unique else f"{self.quorum_id}"
        answer = Quorum(key, [self.requests[name] for name in members], self.quorums)
        self.previous = members
        self.requests, self.joined = {}, {}
        waiters, self.waiters = self.waiters, []
        for w in waiters:
            if w.until <= now:
                continue
            if w.request.name in members:
                w.reply(answer)
            else:  # the request is put in again, over a newer one of that name if there is one
                self.requests[w.request.name] = w.request
                self.joined[w.request.name] = now
                self.waiters.append(w)
        return answer
