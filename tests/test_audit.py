"""What `outlast audit` finds, and what it doesn't mind. `FakeRun` writes events as trainers and `launch` do."""

import io
import json
import math
import random
from pathlib import Path

import pytest
from fake_run import Event, FakeRun, killed_run, pick, plain_run
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from outlast.audit import Difference, Incident, audit, audit_command, compare, incident_table
from outlast.curves import loss_curve

# --- Sound runs ------------------------------------------------------------------------------------


def test_a_killed_run_keeps_every_promise_and_its_cost_is_counted() -> None:
    a = audit(killed_run())
    assert a.broken == ()
    assert (a.steps, a.committed_steps, a.finished, a.groups, a.lives) == (8, 8, True, 3, 4)
    assert a.units_exactly_once and a.samples_exactly_once and a.digests_equal
    assert (a.final_digest, a.final_loss) == ("bits8", 5.0 / 8)
    assert a.redone_units == 1  # the one that g2 had computed
    assert a.goodput == 0.857  # 48 units of 1 s; alive: g0 and g1 20 s, g2 7 s and 9 s
    assert a.twice_committed == ()
    assert a.incidents == (
        Incident("kill", group=2, step=4, at_s=7.0, detect_s=2.5, reform_s=0.5, heal_s=1.0, gap_s=5.0, redone_units=1),
    )


def test_a_plain_run_that_resumes_commits_again_the_same_bits() -> None:
    run = FakeRun(plain=True)
    run.start(0)
    run.run(to=5)
    run.compute(run.quorum(), at_most=2)  # and is killed, with a save of step 3
    run.start(0, step=3)
    run.step = 3
    a = audit(run.run(to=8).end())
    assert a.broken == ()
    assert a.finished and a.twice_committed == (4, 5)
    assert a.redone_units == 2 * 6 + 2  # steps 4 and 5, and what it had of step 6
    assert [(i.kind, i.group, i.step, i.redone_units) for i in a.incidents] == [("crash", 0, 6, 2 + 12)]


def test_an_abandoned_commit_is_legal_with_equal_bits() -> None:
    run = FakeRun()
    run.start(0, 1, 2)
    run.run(to=1)
    by = run.quorum()
    run.compute(by)
    run.commit(by, only=(2,))
    run.kill(2)
    run.retry()
    a = audit(run.run(to=8).end())
    assert a.broken == () and a.twice_committed == (2,)
    assert a.incidents[0].redone_units == a.redone_units == 2


@pytest.mark.parametrize(("accumulation", "kept"), [("float", True), ("exact", False)])
def test_other_bits_after_an_abandoned_commit_are_legal_in_float_only(accumulation: str, kept: bool) -> None:
    run = FakeRun(accumulation=accumulation)
    run.start(0, 1, 2)
    run.run(to=1)
    by = run.quorum()
    run.compute(by)
    run.commit(by, only=(2,))
    run.emit("digest", 2, step=2, sha256="bits2")
    run.kill(2)
    run.retry()
    run.salt = 1e-9
    a = audit(run.run(to=8).end())
    assert (a.broken == ()) is kept
    assert not a.digests_equal
    if kept:
        assert a.notes == (
            "step 2: loss is 2.5 in g2:life3's commit and 2.500000001 in g0:life1's; float accumulation allows it",
        )
    else:
        assert a.broken[0].startswith("step 2: loss is 2.5 in g2:life3's commit and 2.500000001")


def test_all_groups_die_and_resume_from_a_save() -> None:
    run = FakeRun()
    run.start(0, 1, 2)
    run.run(to=5)
    for g in (0, 1, 2):
        run.kill(g)
    run.start(0, 1, 2, step=4)
    run.step = 4
    a = audit(run.run(to=8).end())
    assert a.broken == () and a.finished and a.twice_committed == (5,)
    assert [(i.detect_s, i.heal_s, i.gap_s, i.redone_units) for i in a.incidents] == [(None, None, None, 2)] * 3


def test_a_stopped_group_that_drops_what_the_others_redid() -> None:
    run = FakeRun()
    run.start(0, 1, 2)
    run.run(to=2)  # at 104 s
    by = run.quorum()
    run.compute(by, at_most=1)
    run.emit("chaos", action="stop", target="g1", pid=2)  # at 105 s
    asleep = run.life.pop(1), run.held.pop(1)
    run.t += 3
    run.retry()
    run.run(to=4)  # step 3 at 110 s
    run.emit("chaos", action="continue", target="g1", pid=2)
    run.life[1], _ = asleep
    run.held[1] = set()
    run.t += 0.5
    run.emit("heal", 1, step=4, from_step=2, donor="g0:life1", bytes=9, seconds=0.25)
    a = audit(run.run(to=8).end())
    assert a.broken == ()
    assert a.incidents == (
        Incident("stop", group=1, step=3, at_s=5.0, detect_s=3.0, reform_s=0.0, heal_s=0.25, gap_s=6.0, redone_units=1),
    )


def test_lighthouse_join_crash_and_a_failed_attempt() -> None:
    run = FakeRun(units=6, steps=8)
    run.start(0, 1)
    run.run(to=1)  # at 103 s
    run.emit("chaos", action="kill", target="lighthouse", pid=7)
    run.emit("lighthouse", action="died", pid=7, address="x")
    run.t += 1
    run.retry("no answer from the lighthouse")
    run.t += 1
    run.emit("lighthouse", action="start", pid=8, address="x")
    run.t += 0.5
    run.run(to=2)  # at 108.5 s
    run.emit("join", groups=[2])
    run.join(2, seconds=2.0)
    run.run(to=3)  # at 112.5 s
    by = run.quorum()
    run.compute(by)
    run.retry("a timeout")
    run.t += 0.25
    run.run(to=4)
    run.kill(0, chaos=False)
    a = audit(run.run(to=8).end())
    assert a.broken == ()
    assert [(i.kind, i.group, i.step) for i in a.incidents] == [
        ("lighthouse", None, 2),
        ("join", 2, 3),
        ("failed attempt", 0, 4),
        ("crash", 0, 5),
    ]
    lighthouse, join, failed, _ = a.incidents
    assert (lighthouse.detect_s, lighthouse.reform_s, lighthouse.gap_s, lighthouse.redone_units) == (1.0, 1.5, 5.5, 0)
    assert (join.heal_s, join.gap_s, join.detect_s, join.redone_units) == (2.0, 4.0, None, None)
    assert (failed.reform_s, failed.gap_s, failed.redone_units) == (0.25, 2.25, 0)


def test_a_loss_that_is_not_a_number_equals_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = FakeRun()
    run.start(0, 1)
    run.salt = math.nan
    assert audit_command([write(tmp_path / "a", run.run(to=8).end()), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["final_loss"] is None


def test_a_group_refused_at_the_door_breaks_no_promise() -> None:
    run = FakeRun()
    run.start(0, 1)
    run.trajectory["optimizer.lr"] = 0.1
    run.start(2)
    run.emit("refused", 2, reason="optimizer.lr is 0.1 here and 0.0008 there")
    del run.life[2], run.held[2]
    assert audit(run.run(to=8).end()).broken == ()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 9))
def test_any_disturbed_run_keeps_its_promises(seed: int, groups: int, units: int) -> None:
    events = disturbed_run(random.Random(seed), groups, units)
    a = audit(events)
    assert a.broken == () and a.finished
    assert compare(a, audit(disturbed_run(random.Random(seed + 1), 2, units))).same
    kills = sum(e["kind"] == "chaos" for e in events)
    assert [i.kind for i in a.incidents].count("kill") == kills
    assert a.redone_units >= sum(i.redone_units or 0 for i in a.incidents if i.kind == "kill") >= 0
    assert a.goodput is not None and 0 < a.goodput <= 1


def disturbed_run(rng: random.Random, groups: int, units: int) -> list[Event]:
    run = FakeRun(units=units, steps=6)
    run.start(*range(groups))
    while run.step < run.steps:
        by = run.quorum()
        run.compute(by, at_most=rng.randint(1, 9))
        what = rng.choice(["nothing", "nothing", "kill", "join", "fail"])
        if what == "kill" and len(run.life) > 1:
            run.kill(rng.choice(list(run.life)))
        if what in ("kill", "fail"):
            run.t += rng.random()
            run.retry()
        elif what == "nothing":
            run.compute(by) if any(by[g] - run.held[g] for g in by) else None
            run.commit(by)
        dead = set(range(groups)) - run.life.keys()
        if what == "join" and dead:
            run.join(rng.choice(list(dead)), seconds=rng.random())
    return run.end()


# --- Two runs --------------------------------------------------------------------------------------


def test_a_killed_run_and_a_plain_one_are_one_trajectory() -> None:
    c = compare(audit(killed_run()), audit(plain_run()))
    assert c.same and c.difference is None
    assert (c.common_steps, c.common_digests) == (8, 4)


def test_an_unfinished_run_is_compared_as_far_as_it_went() -> None:
    run = FakeRun()
    run.start(0, 1)
    c = compare(audit(killed_run()), audit(run.run(to=5).events))
    assert c.same and (c.common_steps, c.common_digests) == (5, 2)
    assert not compare(audit(killed_run()), audit([])).same


@pytest.mark.parametrize(
    ("kind", "fields", "difference"),
    [
        ("commit", {"loss": 1.0}, Difference(3, "loss", 5.0 / 3, 1.0)),
        ("commit", {"loss": math.nan}, Difference(3, "loss", 5.0 / 3, math.nan)),
        ("commit", {"samples": [0, 24]}, Difference(3, "samples", (48, 72), (0, 24))),
        ("digest", {"sha256": "x"}, Difference(4, "digest", "bits4", "x")),
        ("start", {"trajectory": {}}, Difference(0, "optimizer.lr", 8e-4, None)),
        ("start", {"seq_len": 9}, Difference(0, "seq_len", 8, 9)),
    ],
)
def test_the_first_difference_of_two_runs_is_named(kind: str, fields: Event, difference: Difference) -> None:
    events = plain_run()
    where = {"step": difference.step} if difference.step else {}
    pick(events, kind, **where).update(fields)
    pick(events, "commit", step=7)["loss"] = 0.0
    c = compare(audit(killed_run()), audit(events))
    assert not c.same and repr(c.difference) == repr(difference)


def test_other_tokens_make_another_trajectory() -> None:
    events = plain_run()
    pick(events, "unit", step=2, unit=0)["hash"] = "other"
    difference = compare(audit(plain_run()), audit(events)).difference
    assert difference is not None and (difference.step, difference.field) == (2, "data")


# --- The command -----------------------------------------------------------------------------------


def write(folder: Path, events: list[Event]) -> str:
    (folder / "events").mkdir(parents=True)
    for e in events:
        source = f"g{e['group']}.{e['life']}" if "life" in e else "launch"
        with (folder / "events" / f"{source}.jsonl").open("a") as f:
            f.write(json.dumps(e) + "\n")
    return str(folder)


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "a", killed_run())
    assert audit_command([run, "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert (out["committed_steps"], out["steps"], out["finished"]) == (8, 8, True)
    assert out["units_exactly_once"] and out["samples_exactly_once"] and out["digests_equal"]
    assert (out["final_digest"], out["final_loss"], out["goodput"]) == ("bits8", 0.625, 0.857)
    assert (out["redone_units"], out["twice_committed"], out["broken"]) == (1, [], [])
    keys = {"kind", "group", "step", "detect_s", "reform_s", "heal_s", "gap_s", "redone_units", "at_s"}
    assert [i.keys() for i in out["incidents"]] == [keys]
    assert not {"history", "digests", "trajectory"} & out.keys()


def test_broken_runs_exit_1_and_say_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = killed_run()
    pick(events, "commit", step=2, group=1)["lr"] = 0.5
    assert audit_command([write(tmp_path / "a", events)]) == 1
    out = capsys.readouterr().out
    assert "broken: step 2: lr is 0.0005 in g0:life1's commit and 0.5 in g1:life2's\n" in out
    assert "kill g2" in out and "\x1b" not in out


def test_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write(tmp_path / "a", killed_run()), write(tmp_path / "b", plain_run())
    assert audit_command([a, b]) == 0
    assert "one trajectory: 8 steps and 4 digests in common" in capsys.readouterr().out
    other = plain_run()
    pick(other, "commit", step=5)["loss"] = float("nan")
    c = write(tmp_path / "c", other)
    assert audit_command([a, c]) == 1
    line = "not one trajectory: step 5, loss is 1.0 in the first and nan in the second\n"
    assert line in capsys.readouterr().out
    assert audit_command([a, c, "--json"]) == 1
    out = json.loads(capsys.readouterr().out)
    assert not out["same"] and len(out["runs"]) == 2
    assert out["difference"] == {"step": 5, "field": "loss", "a": 1.0, "b": None}


def test_what_cannot_be_audited_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    timeless = write(tmp_path / "timeless", [{"v": 1, "t": "x", "kind": "end"}])
    for args in (["nowhere"], [str(tmp_path / "empty")], [timeless], ["--wrong"], []):
        assert audit_command(args) == 2
        assert capsys.readouterr().err
    assert audit_command(["--help"]) == 0


def test_a_torn_line_and_unknown_events_are_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [{**e, "extra": 1} for e in killed_run()]
    events += [{"v": 9, "t": 101.0, "kind": "of the future"}, {"v": 1, "t": 101.0, "kind": ["odd"]}]
    run = write(tmp_path / "a", events)
    with (tmp_path / "a" / "events" / "g2.life3.jsonl").open("a") as f:
        f.write('{"v":1,"t":107.1,"kind":"unit","gro')
    assert audit_command([run]) == 0
    assert "every promise kept" in capsys.readouterr().out


def test_a_run_that_never_started(tmp_path: Path) -> None:
    a = audit([{"v": 1, "t": 1.0, "kind": "launch", "groups": 3}])
    assert (a.steps, a.committed_steps, a.finished, a.goodput, a.final_loss) == (0, 0, False, None, None)


# --- Curves ----------------------------------------------------------------------------------------


def test_the_incident_table_shows_every_incident() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(incident_table(audit(killed_run())))
    assert console.export_text().splitlines()[-1].split() == ["4", "kill", "g2", "2.50", "0.50", "5.00", "1.00", "1"]


def test_loss_curve_falls_from_the_top_left_to_the_bottom_right() -> None:
    lines = loss_curve([1, 2, 3], [3.0, 2.0, 1.0], width=30, height=10, marks=[2, 99]).splitlines()
    assert len(lines) == 10 and max(map(len, lines)) == 30
    assert lines[0].startswith("3 ┤⠑") and lines[3].startswith("2 ┤") and lines[6].startswith("1 ┤")
    assert lines[6].endswith("⠤⣀") and lines[0].endswith("⠀⠀")
    assert lines[7] == "  └" + "─" * 27
    assert lines[8].index("▲") == 3 + 13 and lines[8].count("▲") == 1
    assert lines[9].split() == ["1", "step", "3"]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=40), st.integers(20, 90), st.integers(5, 30))
def test_loss_curve_fits_whatever_the_losses(losses: list[float], width: int, height: int) -> None:
    text = loss_curve(list(range(1, len(losses) + 1)), losses, width, height, marks=[1, 3])
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) == (height if any(map(math.isfinite, losses)) else 1)


def test_loss_curve_needs_room() -> None:
    with pytest.raises(ValueError, match="at least 20 x 5"):
        loss_curve([1], [1.0], 10, 10)
