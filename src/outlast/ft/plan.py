"""Who computes which unit: a pure function of what the quorum's members say they hold."""

from collections.abc import Mapping, Sequence


def accept_held(claims: Mapping[str, frozenset[int]]) -> dict[str, frozenset[int]]:
    """Choose whose sums count.

    A group's sum can't be taken apart, so a set of held units is accepted whole or not at all. Two groups may
    hold the same unit (one was paused and the others computed it again): then the larger set wins, then the
    name. A member whose claim isn't returned must drop it.
    """
    accepted: dict[str, frozenset[int]] = {}
    taken: set[int] = set()
    for name, held in sorted(claims.items(), key=lambda c: (-len(c[1]), c[0])):
        if held and taken.isdisjoint(held):
            accepted[name] = held
            taken |= held
    return accepted


def share(units: int, held: Mapping[str, frozenset[int]], names: Sequence[str]) -> dict[str, frozenset[int]]:
    """Give every unit exactly one owner.

    Units nobody holds go to the least loaded of `names`, in runs of consecutive numbers so that sets stay short
    ranges. A member may end with none (a spare).
    """
    order = sorted(names)
    free = sorted(set(range(units)) - set().union(*held.values()))
    load = {name: len(held.get(name, ())) for name in order}
    more = dict.fromkeys(order, 0)
    for _ in free:
        least = min(order, key=lambda name: load[name] + more[name])  # the first by name among equals
        more[least] += 1
    out: dict[str, frozenset[int]] = {}
    at = 0
    for name in order:
        out[name] = held.get(name, frozenset()) | frozenset(free[at : at + more[name]])
        at += more[name]
    return out
