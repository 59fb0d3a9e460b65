"""`outlast launch`'s decisions: faults as data, what a death means, options, progress. No process, no clock."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.config import Config, load_config
from outlast.errors import ConfigError
from outlast.launch import chaos, policy
from outlast.launch.chaos import Action, AtStep, AtTime, Every, Schedule, Statement, Target, World
from outlast.launch.lighthouse import choose_address
from outlast.launch.live import Lines, Progress
from outlast.launch.options import group_config, read_join_options, read_options, threads_per_rank
from outlast.launch.template import config_from_dict

# Chaos: the grammar --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "statement"),
    [
        ("kill every 10s", Statement("kill", Target(), Every(10.0))),
        ("kill every 5s times 3", Statement("kill", Target(), Every(5.0, 3))),
        ("kill g1 at step 30", Statement("kill", Target("group", 1), AtStep(30))),
        ("kill g0 at 12s", Statement("kill", Target("group", 0), AtTime(12.0))),
        ("kill all at step 40", Statement("kill", Target("all"), AtStep(40))),
        ("kill lighthouse every 5s", Statement("kill", Target("lighthouse"), Every(5.0))),
        ("kill 2 at step 20", Statement("kill", Target("random", 2), AtStep(20))),
        ("stop g2 for 3s at step 25", Statement("stop", Target("group", 2), AtStep(25), 3.0)),
        ("stop every 8s for 2s", Statement("stop", Target(), Every(8.0), 2.0)),
        ("kill g1.0 at step 3", Statement("kill", Target("one rank", 1, 0), AtStep(3))),
        ("kill rank every 5s", Statement("kill", Target("rank"), Every(5.0))),
        ("Kill  G1 at 500ms", Statement("kill", Target("group", 1), AtTime(0.5))),
        ("stop 1 for 2m every 1h", Statement("stop", Target(), Every(3600.0), 120.0)),
    ],
)
def test_each_statement_is_read_and_printed_so_that_it_reads_the_same(text: str, statement: Statement) -> None:
    schedule = chaos.parse(f" {text} ;; ", seed=3)
    assert schedule == Schedule((statement,), 3)
    assert chaos.parse(str(schedule), 3) == schedule


def test_statements_are_separated_by_semicolons() -> None:
    assert len(chaos.parse("kill g1 at step 3; stop every 8s for 2s").statements) == 2
    assert chaos.parse("").statements == ()


@pytest.mark.parametrize(
    ("text", "found", "expected"),
    [
        ("explode g1 at step 3", "'explode'", "kill or stop"),
        ("kill", "no time", "every 10s, at step 30 or at 12s"),
        ("kill g1", "no time", "at step 30"),
        ("kill gx at step 3", "'gx'", "whom"),
        ("kill 0 at step 3", "'0'", "whom"),
        ("kill every", "the end", "a duration after 'every'"),
        ("kill every 10", "'10'", "a duration after 'every'"),
        ("kill every 0s", "'0s'", "a duration"),
        ("kill every -1s", "'-1s'", "a duration"),
        ("kill every 5s times 0", "'0'", "a whole number above 0"),
        ("kill at step x", "'x'", "a whole number above 0"),
        ("kill at step", "the end", "a whole number"),
        ("kill every 5s at step 3", "'at'", "one time only"),
        ("kill at 5s times 3", "'times'", "every 10s"),
        ("kill every 5s for 3s", "'for'", "every 10s"),
        ("stop every 8s", "no length", "for 3s"),
        ("stop every 8s for 2s for 3s", "'for'", "every 10s"),
        ("kill every 5s; kill g1 soon", "'soon'", "at step 30"),
    ],
)
def test_a_malformed_statement_is_refused_with_an_example(text: str, found: str, expected: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        chaos.parse(text)
    message = str(refusal.value)
    assert repr(text.split(";")[-1].strip()) in message
    assert f"found {found}" in message and expected in message and "for example: " in message
    chaos.parse(message.rpartition("for example: ")[2])


WORDS = ["kill", "stop", "g1", "g1.0", "rank", "2", "all", "every", "at", "step", "for", "3s", "5", "times", ";"]


@given(st.text(max_size=40) | st.lists(st.sampled_from(WORDS)).map(" ".join))
def test_any_text_is_a_schedule_or_refused(text: str) -> None:
    try:
        schedule = chaos.parse(text)
    except ConfigError:
        return
    assert chaos.parse(str(schedule)) == schedule


def test_what_can_not_be_done_is_doubted_at_the_start() -> None:
    schedule = chaos.parse(
        "kill g3 at step 5; kill 4 at step 5; kill all at step 50; kill lighthouse at 1s; kill g2 at 1s"
    )
    doubts = chaos.doubts(schedule, (3, 1), steps=50, has_lighthouse=False)
    assert (
        len(doubts) == 4 and "g0 to g2" in doubts[0] and "there are 3" in doubts[1] and "ends with step 50" in doubts[2]
    )
    assert ["0 to 1" in d for d in chaos.doubts(chaos.parse("kill g1.2 at 1s; kill g1.1 at 1s"), (3, 2), 9)] == [True]


# Chaos: what happens -------------------------------------------------------------------------------


class Play:
    """Runs a schedule against a world of groups that come back, `slow` seconds after a kill."""

    def __init__(self, spec: str, *, groups: int = 3, seed: int = 0, slow: float = 0.0) -> None:
        self.schedule = chaos.parse(spec, seed)
        self.state = chaos.begin(self.schedule)
        self.pids = {f"g{n}": 100 + n for n in range(groups)} | {"lighthouse": 99}
        self.back = dict.fromkeys(self.pids, 0.0)
        self.slow = slow
        self.log: list[tuple[float, Action]] = []

    def at(self, time_s: float, step: int = 0) -> list[str]:
        """What is done at this time, as `verb target`."""
        live = {name: pid for name, pid in self.pids.items() if self.back[name] <= time_s}
        self.state, actions = chaos.advance(self.schedule, self.state, World(time_s, step, live, dict(self.pids)))
        for action in actions:
            assert action.pid == self.pids[action.target]
            self.log.append((time_s, action))
            if action.verb == "kill":
                self.pids[action.target] += 1000
                self.back[action.target] = time_s + self.slow
        return [f"{a.verb} {a.target}" for a in actions]

    def run(self, until_s: float, steps_per_s: float = 10.0) -> list[tuple[float, str]]:
        for tick in range(round(until_s * 20) + 1):
            self.at(tick / 20, int(tick / 20 * steps_per_s))
        return [(t, f"{a.verb} {a.target}") for t, a in self.log]


def test_every_fires_on_its_beat_and_as_often_as_asked() -> None:
    assert [t for t, _ in Play("kill every 2s").run(7)] == [2, 4, 6]
    assert [t for t, _ in Play("kill every 2s times 2").run(20)] == [2, 4]


def test_at_fires_once_at_its_time_or_at_the_first_commit_at_or_past_its_step() -> None:
    assert Play("kill g0 at 3s").run(9) == [(3, "kill g0")]
    play = Play("kill g1 at step 30")
    assert play.at(1, step=29) == [] and play.at(2, step=33) == ["kill g1"] and play.at(3, step=34) == []


def test_a_draw_is_among_the_live_and_the_same_for_the_same_seed() -> None:
    runs = [Play("kill every 1s; stop every 3s for 1s", groups=5, seed=seed, slow=1.5).run(30) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert {what for _, what in runs[0] if what.startswith("kill")} == {f"kill g{n}" for n in range(5)}
    several = Play("kill 2 at step 1", groups=3).at(0, step=1)
    assert len(set(several)) == 2


def test_what_has_no_live_target_waits_and_then_keeps_its_distance() -> None:
    play = Play("kill g1 every 2s times 3", slow=5.0)
    assert [t for t, _ in play.run(30)] == [2, 7, 12], "never done early, never left out, never in a burst"
    play = Play("kill 2 at 1s", groups=2)
    play.back["g1"] = 4.0
    assert play.run(3) == []
    assert set(play.at(4)) == {"kill g0", "kill g1"}


def test_all_takes_those_still_starting_along_once_one_is_live() -> None:
    play = Play("kill all at step 1")
    play.back = dict.fromkeys(play.back, 9.0)
    assert play.at(1, step=1) == []
    play.back["g1"] = 0.0
    assert play.at(2, step=1) == ["kill g0", "kill g1", "kill g2"]


def test_two_statements_never_hit_the_same_life_twice() -> None:
    play = Play("kill 2 at step 5; kill 2 at step 5", groups=3, slow=1.0)
    assert len(set(play.at(0, step=5))) == 2
    assert len(set(play.at(1, step=5))) == 2


def test_stop_goes_on_after_its_time_unless_it_was_killed_meanwhile() -> None:
    play = Play("stop g2 for 3s at step 25")
    assert play.at(1, step=25) == ["stop g2"] and play.at(3.9) == [] and play.at(4) == ["continue g2"]
    play = Play("stop g2 for 3s at 1s; kill g2 at 2s")
    assert play.run(9) == [(1, "stop g2"), (2, "kill g2")], "its successor isn't stopped"
    play = Play("stop g0 for 5s at 1s; stop g0 for 1s at 2s")
    assert play.run(9) == [(1, "stop g0"), (6, "continue g0"), (6.05, "stop g0"), (7.05, "continue g0")]


def test_the_lighthouse_is_hit_only_by_name() -> None:
    assert Play("kill all at 1s; kill 3 at 2s", groups=3).run(5)[-1][1] != "kill lighthouse"
    assert {what for _, what in Play("kill lighthouse every 2s").run(7)} == {"kill lighthouse"}


def ranks_at(spec: str, time_s: float, seed: int = 0) -> list[str]:
    """What is done at one time to three groups of two ranks."""
    pids = {f"g{n}{rank}": hash((n, rank)) for n in range(3) for rank in ("", ".0", ".1")}
    schedule = chaos.parse(spec, seed)
    _, actions = chaos.advance(schedule, chaos.begin(schedule), World(time_s, 0, pids, pids))
    return [f"{a.verb} {a.target}" for a in actions]


def test_one_rank_is_hit_by_name_or_drawn_and_its_group_dies_with_it() -> None:
    assert ranks_at("kill g1.1 at 1s; kill g1 at 1s; kill g1.0 at 1s", 1.0) == ["kill g1.1"]
    assert ranks_at("kill g1 at 1s; kill g1.0 at 1s", 1.0) == ["kill g1"]
    assert ranks_at("stop g1 for 1s at 1s; stop g1.0 for 9s at 1s", 1.0) == ["stop g1"], "or it would go on early"
    assert ranks_at("stop g1.1 for 1s at 1s; stop g1.0 for 9s at 1s", 1.0) == ["stop g1.1", "stop g1.0"]
    drawn = {ranks_at("kill rank at 1s", 1.0, seed)[0] for seed in range(60)}
    assert drawn == {f"kill g{n}.{rank}" for n in range(3) for rank in range(2)}
    assert set(ranks_at("kill all at 1s", 1.0)) == {"kill g0", "kill g1", "kill g2"}
    assert {w for seed in range(20) for w in ranks_at("kill 1 at 1s", 1.0, seed)} == {f"kill g{n}" for n in range(3)}


def test_what_was_not_done_is_named_at_the_end() -> None:
    play = Play("kill g7 at step 1; kill every 2s times 9; kill g1 at 1s; kill every 90s")
    play.run(5)
    assert chaos.undone(play.schedule, play.state) == [
        "'kill g7 at step 1' was never done",
        "'kill 1 every 2s times 9' was done 2 of 9 times",
        "'kill 1 every 90s' was never done",
    ]


# Policy --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "outcome"), [(0, "finished"), (2, "refused"), (143, "stopped")])
def test_some_ends_are_final(code: int, outcome: str) -> None:
    verdict = policy.after_exit(code, fruitless=0, achieved=True)
    assert (verdict.outcome, verdict.restart_in_s) == (outcome, None) and verdict.reason


@pytest.mark.parametrize("code", [-9, -15, 1, 134])
def test_a_death_after_a_commit_is_restarted_at_once_and_forgives(code: int) -> None:
    verdict = policy.after_exit(code, fruitless=5, achieved=True)
    assert (verdict.outcome, verdict.restart_in_s, verdict.fruitless) == ("restart", 0.0, 0)


def test_deaths_without_a_commit_back_off_and_then_the_group_is_given_up() -> None:
    verdict = policy.after_exit(-9, fruitless=0, achieved=False)
    waits = [verdict.restart_in_s]
    while verdict.outcome == "restart":
        verdict = policy.after_exit(-9, fruitless=verdict.fruitless, achieved=False)
        waits.append(verdict.restart_in_s)
    assert waits == [0.0, 0.5, 1.0, 2.0, 4.0, None]
    assert verdict.outcome == "given up" and "given up after 6 deaths in a row" in verdict.reason
    assert "SIGKILL" in verdict.reason
    assert policy.backoff_s(50) == policy.MAX_BACKOFF_S


def test_our_own_kills_are_not_held_against_a_group() -> None:
    verdict = policy.after_exit(-9, fruitless=4, achieved=False, chaos=True)
    assert (verdict.outcome, verdict.restart_in_s, verdict.fruitless) == ("restart", 0.0, 4)
    assert "by chaos" in verdict.reason


def test_a_lighthouse_comes_back_at_once_unless_it_can_not_live() -> None:
    assert policy.after_lighthouse(-9, lived_s=99.0, fruitless=5).restart_in_s == 0.0
    assert policy.after_lighthouse(2, lived_s=99.0, fruitless=0).restart_in_s == 0.0
    assert policy.after_lighthouse(1, lived_s=0.1, fruitless=5).outcome == "given up"
    assert policy.after_lighthouse(-9, lived_s=1.0, fruitless=5).restart_in_s == 0.0
    assert policy.after_lighthouse(-9, lived_s=0.1, fruitless=5, chaos=True).restart_in_s == 0.0


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        (["restart", "finished"], None),
        (["finished", "given up"], 0),
        (["refused", "refused"], 2),
        (["refused", "given up"], 1),
        (["stopped", "stopped"], 143),
    ],
)
def test_the_run_ends_when_no_group_is_left(outcomes: list[policy.Outcome], code: int | None) -> None:
    end = policy.end_of_run(outcomes)
    assert (end and end.code) == code
    assert end is None or end.reason


def test_lost_weights_are_refused_and_named() -> None:
    end = policy.weights_left(37, None, None, "runs/x")
    assert end and end.code == 2 and "steps 1-37" in end.reason and "runs/x" in end.reason
    assert policy.weights_left(0, None, None, "runs/x") is None, "nothing was committed"
    assert policy.weights_left(37, 25, None, "runs/x") is None, "a save is there"
    assert policy.weights_left(37, None, {"step": 37}, "runs/x") is None, "the run is done"


# Options -------------------------------------------------------------------------------------------


def test_options_become_the_config_of_each_group(tmp_path: Path) -> None:
    file = tmp_path / "tiny.toml"
    file.write_text("[training]\nsteps = 7\n")
    args = [
        "--config",
        str(file),
        "--groups",
        "3",
        "--chaos",
        "kill every 10s",
        "--chaos-seed",
        "5",
        "--optimizer.lr=0.1",
    ]
    options = read_options(args)
    assert options.groups == 3 and options.config_file == str(file)
    assert options.schedule == chaos.parse("kill every 10s", 5)
    assert type(options.config) is Config
    given = dataclasses.replace(
        options.config, fault_tolerance=Config().fault_tolerance, parallelism=Config().parallelism
    )
    assert given == load_config(file, ["--optimizer.lr=0.1"])
    config = group_config(options.config, 2, run_dir=tmp_path, lighthouse="http://127.0.0.1:1", threads=4)
    f = config.fault_tolerance
    assert (f.enable, f.replica_id, f.group_size, f.lighthouse) == (True, 2, 3, "http://127.0.0.1:1")
    assert (config.job.run_dir, config.training.threads, config.training.steps) == (str(tmp_path), 4, 7)
    assert config_from_dict(dataclasses.asdict(config)) == config, "as the template gets it"


def test_the_number_of_groups_is_said_once(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[fault_tolerance]\ngroup_size = 4\n")
    assert read_options([]).groups == 3
    assert read_options(["--config", str(file)]).groups == 4
    assert read_options(["--config", str(file), "--groups=4"]).groups == 4
    with pytest.raises(ConfigError, match=r"--groups 2 contradicts fault_tolerance\.group_size = 4"):
        read_options(["--config", str(file), "--groups=2"])
    with pytest.raises(ConfigError, match="contradicts"):
        read_options(["--groups=2", "--fault_tolerance.group_size=3"])
    with pytest.raises(ConfigError, match="expected 1 to"):
        read_options(["--groups=0"])


def test_a_run_folder_alone_is_resumed_with_its_own_config(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[training]\nsteps = 9\n[fault_tolerance]\ngroup_size = 4\n")
    options = read_options(["--run-dir", str(tmp_path)])
    assert options.config.training.steps == 9 and options.groups == 4 and options.run_dir == str(tmp_path)
    assert read_options([f"--job.run_dir={tmp_path}", "--groups=2"]).groups == 2, "groups may differ from before"
    with pytest.raises(ConfigError, match="give one of them"):
        read_options(["--run-dir", str(tmp_path), "--job.run_dir=elsewhere"])


def test_bad_options_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="chaos 'kill soon'"):
        read_options(["--chaos", "kill soon"])
    with pytest.raises(ConfigError, match="some would have nothing to do"):
        read_options(["--groups=50"])
    with pytest.raises(ConfigError, match="no such run folder"):
        read_join_options(["nowhere"])


def test_help_shows_its_own_options_and_those_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        read_options(["--help"])
    said = capsys.readouterr().out
    assert not end.value.code
    for option in ("--config", "--groups", "--run-dir", "--chaos", "--chaos-seed", "--training.steps"):
        assert option in said.replace("_", "-"), option


def test_the_ranks_of_a_group_are_said_once(tmp_path: Path) -> None:
    assert read_options([]).ranks == 1
    for args in (["--ranks-per-group=2"], ["--parallelism.data_parallel_shard_degree=2"]):
        options = read_options(args)
        assert (options.ranks, options.config.parallelism.data_parallel_shard_degree) == (2, 2)
    with pytest.raises(ConfigError, match=r"--ranks-per-group 2 contradicts .*degree = 4"):
        read_options(["--ranks-per-group=2", "--parallelism.data_parallel_shard_degree=4"])
    with pytest.raises(ConfigError, match="expected 1 to"):
        read_options(["--ranks-per-group=0"])
    (tmp_path / "config.toml").write_text("[parallelism]\ndata_parallel_shard_degree = 2\n")
    assert read_options(["--run-dir", str(tmp_path)]).ranks == 2
    assert read_options(["--run-dir", str(tmp_path), "--ranks-per-group=1"]).ranks == 1, "may differ from before"


def test_what_a_group_ended_of_is_a_refusal_else_the_first_failure() -> None:
    assert policy.first_failure([(1, -9, "a"), (0, -9, "b")]) == (1, -9, "a")
    assert policy.first_failure([(1, 1, ""), (0, 2, "")]) == (0, 2, ""), "who lost a refused rank knows only that"
    assert policy.first_failure([(0, 143, ""), (1, -9, "")]) == (1, -9, "")
    assert policy.first_failure([(1, 1, ""), (0, -9, "")]) == (0, -9, ""), "who lost a killed rank may end before it"
    assert policy.first_failure([(1, 0, ""), (0, 0, "")]) == (1, 0, "")
    assert [policy.grace_of_the_others_s(code) for code in (-9, 1, 2, 0, 143)] == [0.0, 2.0, 2.0, None, None]


def test_cores_are_shared_among_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert [threads_per_rank(Config(), groups) for groups in (1, 3, 8, 20)] == [8, 2, 1, 1]
    assert threads_per_rank(load_config(None, ["--training.threads=5"]), 3) == 5


def test_the_lighthouse_is_ours_on_loopback_only() -> None:
    chosen = choose_address("")
    assert chosen.ours and chosen.url == f"http://127.0.0.1:{chosen.port}"
    assert choose_address(f"http://localhost:{chosen.port}").ours
    away = choose_address("http://192.0.2.1:29510")
    assert not away.ours and away.port == 29510
    for bad in ("127.0.0.1:29510", "http://127.0.0.1", "http://127.0.0.1:x", "https://a:1"):
        with pytest.raises(ConfigError, match="expected http://host:port"):
            choose_address(bad)


def test_launch_imports_no_torch() -> None:
    code = "import sys, outlast.launch.supervisor; sys.exit(bool({'torch', 'torchft', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# What is shown -------------------------------------------------------------------------------------


def rank_event(kind: str, t: float, group: int = 0, **fields: Any) -> dict[str, Any]:
    return {"v": 1, "t": t, "kind": kind, "group": group, "life": f"life{group}", "rank": 0, **fields}


@pytest.fixture
def progress() -> Progress:
    """Two of three groups have committed a step a second, 100 tokens each, up to step 10."""
    made = Progress()
    made.add({"t": 0.0, "kind": "launch", "groups": 3})
    for group in range(2):
        made.add(rank_event("start", 0.0, group, steps=50, step=0))
    for step in range(1, 11):
        for group in range(2):
            made.add(rank_event("commit", float(step), group, step=step, loss=1.5, tokens=100))
    return made


def test_progress_counts_a_step_once_whoever_tells_of_it(progress: Progress) -> None:
    assert progress.line(10.0) == "step 10/50  loss 1.5000  100 tokens/s  groups 2/3  ETA 0:40"
    assert progress.rates(19.0)[0] == pytest.approx(50.0), "a stall shows in the rate"


def test_progress_follows_lives(progress: Progress) -> None:
    assert progress.committed == {"life0", "life1"} and set(progress.holders) == {0, 1}
    progress.add({"t": 11.0, "kind": "died", "group": 1, "pid": 5, "code": -9, "reason": "killed by SIGKILL"})
    assert set(progress.lives) == set(progress.holders) == {0}
    assert "groups 1/3" in progress.line(11.0) and "last: g1 killed by SIGKILL" in progress.line(11.0)
    progress.add(rank_event("start", 12.0, 1, steps=50, step=0))
    assert set(progress.lives) == {0, 1} and set(progress.holders) == {0}, "a fresh one holds nothing"
    progress.add(rank_event("heal", 13.0, 1, step=10, seconds=0.5))
    assert set(progress.holders) == {0, 1}
    progress.add({"t": 14.0, "kind": "join", "groups": [3, 4]})
    assert "groups 2/5" in progress.line(14.0)


def test_a_resumed_run_counts_from_its_save_but_commits_from_now() -> None:
    progress = Progress()
    progress.add(rank_event("start", 0.0, steps=50, step=20))
    assert progress.step == 20 and progress.committed_step == 0 and set(progress.holders) == {0}
    progress.add(rank_event("commit", 1.0, step=21, loss=1.0, tokens=10))
    assert progress.committed_step == 21


@given(st.lists(st.binary(max_size=30)))
def test_lines_are_the_same_however_they_arrive(pieces: list[bytes]) -> None:
    whole, cut = Lines(), Lines()
    data = b"".join(pieces)
    expected = whole.feed(data) + whole.end()
    assert [line for piece in pieces for line in cut.feed(piece)] + cut.end() == expected
    assert len(expected) == len(data.split(b"\n")) - (not data or data.endswith(b"\n"))


def test_a_line_without_an_end_does_not_grow_without_bound() -> None:
    lines = Lines()
    assert [len(line) for line in lines.feed(b"x" * (Lines.MAX + 1))] == [Lines.MAX + 1]
