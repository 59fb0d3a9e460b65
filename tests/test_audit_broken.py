"""Every kind of broken promise is found in a run's events, and named."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
from fake_run import Event, killed_run, pick, plain_run
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.audit import audit, incident_table
from outlast.events import from_ranges, to_ranges


def remove(events: list[Event], kind: str, **fields: Any) -> None:
    for e in [e for e in events if e["kind"] == kind and fields.items() <= e.items()]:
        events.remove(e)


def change(events: list[Event], kind: str, to: dict[str, Any], **fields: Any) -> None:
    pick(events, kind, **fields).update(to)


def give(events: list[Event], step: int, **by: str) -> None:
    """Change who held what, in every commit of a step."""
    for e in events:
        if e["kind"] == "commit" and e["step"] == step:
            e["by"] = {name.replace("_", ":"): units for name, units in by.items()}


BROKEN: dict[str, tuple[Callable[[list[Event]], Any], str, str]] = {
    "a unit that was never computed": (
        lambda e: remove(e, "unit", step=2, unit=3),
        "g1:life2 committed step 2 with units 2 in its sums, the commit says 2-3",
        "units",
    ),
    "a unit that a dead member never computed": (
        lambda e: (remove(e, "unit", step=2, unit=3), remove(e, "commit", life="life2")),
        "g0:life1 committed step 2 with units 3 by g1:life2, which never computed them",
        "units",
    ),
    "a unit added twice": (
        lambda e: e.insert(e.index(u := pick(e, "unit", step=2, unit=3)), copy.deepcopy(u)),
        "g1:life2 added unit 3 of step 2 to its sums twice",
        "units",
    ),
    "a unit in no sums": (
        lambda e: give(e, 2, g0_life1="0-1", g1_life2="2-3", g2_life3="4"),
        "g0:life1 committed step 2 with units 5 in no member's sums",
        "units",
    ),
    "a unit in two sums": (
        lambda e: give(e, 2, g0_life1="0-1", g1_life2="1-3", g2_life3="4-5"),
        "g0:life1 committed step 2 with units 1 in the sums of more than one member",
        "units",
    ),
    "a member nobody knows": (
        lambda e: give(e, 2, g0_life1="0-1", g1_life2="2-3", g9_life9="4-5"),
        "g0:life1 committed step 2 with units 4-5 by g9:life9, which has no events",
        "units",
    ),
    "two stories of who held what": (
        lambda e: change(e, "commit", {"by": {"g0:life1": "0-5"}}, step=2, group=2),
        "step 2: by is {'g0:life1': '0-1', 'g1:life2': '2-3', 'g2:life3': '4-5'} in g0:life1's commit and "
        "{'g0:life1': '0-5'} in g2:life3's",
        "units",
    ),
    "samples that overlap": (
        lambda e: change(e, "commit", {"samples": [20, 44]}, step=2),
        "g0:life1 committed step 2 with samples [20, 44), an overlap with the step before: expected [24, 48)",
        "samples",
    ),
    "a hole in the samples": (
        lambda e: change(e, "commit", {"samples": [28, 52]}, step=2),
        "g0:life1 committed step 2 with samples [28, 52), a hole after the step before: expected [24, 48)",
        "samples",
    ),
    "a unit on the wrong samples": (
        lambda e: change(e, "unit", {"samples": [0, 4]}, step=2, unit=3),
        "g1:life2 computed unit 3 of step 2 on samples [0, 4): expected [36, 40)",
        "samples",
    ),
    "other tokens for the same unit": (
        lambda e: change(e, "unit", {"hash": "other"}, step=4, group=2),
        "unit 4 of step 4 had other tokens: data88 in g0:life1, other in g2:life3",
        "samples",
    ),
    "another learning rate": (
        lambda e: change(e, "commit", {"lr": 0.5}, step=2, group=1),
        "step 2: lr is 0.0005 in g0:life1's commit and 0.5 in g1:life2's",
        "",
    ),
    "another loss in the last bit": (
        lambda e: change(e, "commit", {"loss": math.nextafter(2.5, 3)}, step=2, group=2),
        "step 2: loss is 2.5 in g0:life1's commit and 2.5000000000000004 in g2:life3's",
        "",
    ),
    "another lineage": (
        lambda e: change(e, "commit", {"lineage": "x"}, step=2, group=1),
        "step 2: lineage is 'lineage2' in g0:life1's commit and 'x' in g1:life2's",
        "",
    ),
    "another digest": (
        lambda e: change(e, "digest", {"sha256": "x"}, step=6, group=1),
        "digest after step 6 is bits6 in g0:life1 and x in g1:life2",
        "digests",
    ),
    "a life that leaves out a step": (
        lambda e: (remove(e, "commit", step=2, group=1), remove(e, "unit", step=2, group=1)),
        "g0:life1 committed step 2 with units 2-3 by g1:life2, which never computed them",
        "units",
    ),
    "a commit out of turn": (
        lambda e: remove(e, "commit", step=2, group=1),
        "g1:life2 computed unit 2 of step 3 with 1 steps committed",
        "steps",
    ),
    "a heal that says another step": (
        lambda e: change(e, "heal", {"step": 3}),
        "g2:life4 computed unit 4 of step 5 with 3 steps committed",
        "steps",
    ),
    "a step nobody committed": (
        lambda e: (remove(e, "commit", step=2), remove(e, "unit", step=2)),
        "step 2 was never committed, but step 3 was",
        "steps",
    ),
    "more steps than the run has": (
        lambda e: [s.update(steps=7) for s in e if s["kind"] == "start"],
        "step 8 was committed; the run has 7",
        "steps",
    ),
    "another config": (
        lambda e: change(e, "start", {"trajectory": {"optimizer.lr": 8e-4}}, group=1),
        "g1:life2 ran with training.accumulation = 'not set', g0:life1 with 'exact'",
        "",
    ),
    "another number of units": (
        lambda e: change(e, "start", {"units": 5}, life="life4"),
        "g2:life4 ran with units = 5, g0:life1 with 6",
        "",
    ),
    "a commit without its loss": (
        lambda e: pick(e, "commit", step=2, group=1).pop("loss"),
        "the commit event of g1:life2 at step 2 has no loss",
        "steps",
    ),
    "a unit that isn't a number": (
        lambda e: change(e, "unit", {"unit": "3"}, step=2, unit=3),
        "the unit event of g1:life2 at step 2 has unit = '3'; expected a whole number, 0 or more",
        "units",
    ),
    "ranges that aren't": (
        lambda e: change(e, "plan", {"held": "0-999999999"}, group=1),
        "the plan event of g1:life2 at step 1 has held = '0-999999999'; expected ranges of units, like \"0-3,7\"",
        "",
    ),
    "a format of the future": (
        lambda e: change(e, "digest", {"v": 2}, step=6),
        "the digest event of g0:life1 at step 6 has format 2; this outlast reads 1",
        "",
    ),
    "no start": (lambda e: remove(e, "start", group=1), "g1:life2 committed without a start event", ""),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_is_found_and_named(name: str) -> None:
    corrupt, text, promise = BROKEN[name]
    events = killed_run()
    corrupt(events)
    a = audit(events)
    assert text in a.broken
    kept = {"units": a.units_exactly_once, "samples": a.samples_exactly_once, "digests": a.digests_equal}
    broken_too = {"steps": {"units", "samples"}, "units": {"units", "samples"}}.get(promise, {promise})
    assert {k for k, v in kept.items() if not v} == broken_too - {""}


def test_the_first_difference_comes_first() -> None:
    events = killed_run()
    change(events, "commit", {"loss": 0.0}, step=7, group=1)
    change(events, "commit", {"tokens": 0}, step=3, group=1)
    change(events, "unit", {"samples": [0, 4]}, step=5, unit=0)
    assert [text[:7] for text in audit(events).broken] == ["step 3:", "g0:life", "step 7:"]


@pytest.mark.parametrize("change_it", [lambda e: e.pop("hash"), lambda e: e.update(unit=4)])
def test_a_plain_run_is_held_to_all_of_its_units(change_it: Callable[[Event], Any]) -> None:
    events = plain_run()
    change_it(pick(events, "unit", step=3, unit=5))
    a = audit(events)
    assert "g0:life1 committed step 3 with units 0-4 in its sums, the commit says 0-5" in a.broken


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_altered_fact_is_found(data: st.DataObject) -> None:
    events = killed_run()
    facts = {
        "commit": ["step", "loss", "lr", "grad_norm", "tokens", "samples", "units", "skipped", "key", "by", "lineage"],
        "unit": ["step", "unit", "samples"],
        "digest": ["sha256"],
    }
    event = data.draw(st.sampled_from([e for e in events if e["kind"] in facts]))
    field = data.draw(st.sampled_from(facts[event["kind"]]))
    old = event[field]
    if field == "by":
        event[field] = {name: to_ranges(from_ranges(units) - {0}) for name, units in old.items()}
    elif field == "samples":
        event[field] = [old[0] + data.draw(st.sampled_from([-4, 4])), old[1]]
    else:
        event[field] = old + 1 if isinstance(old, int | float) else f"{old}x"
    if field == "key":  # an attempt of its own: legal, and reported
        assert audit(events).twice_committed == (event["step"],)
    else:
        assert audit(events).broken


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_event_can_make_it_raise(data: st.DataObject) -> None:
    events = killed_run()
    for _ in range(3):
        event = data.draw(st.sampled_from(events))
        field = data.draw(st.sampled_from(sorted(event.keys() - {"kind"})))
        odd = [None, -1, 10**30, 10**400, math.inf, math.nan, "", "x", [], [1], {}, {"x": 1}, True]
        if data.draw(st.booleans()):
            del event[field]
        else:
            event[field] = data.draw(st.sampled_from(odd))
    incident_table(audit(events))
