"""`outlast launch` and `outlast join`: one loop that keeps a lighthouse and the groups of a run alive.

The loop waits on descriptors and does what it is told: what a death means is decided in `policy`, which fault
comes next in `chaos`. Every process ends with this one, however it ends. Imports no torch.
"""

import contextlib
import os
import secrets
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outlast import saves
from outlast.errors import EXIT_FAILED, EXIT_OK, EXIT_STOPPED, ConfigError, UserError
from outlast.launch import chaos, messages, policy
from outlast.launch.fleet import Fleet, Job
from outlast.launch.groups import Group
from outlast.launch.hub import Hub
from outlast.launch.lighthouse import Address, Lighthouse, check_torchft, choose_address
from outlast.launch.live import Screen
from outlast.launch.options import MAX_GROUPS, Options, read_join_options, read_options, threads_per_rank
from outlast.launch.run_folder import RunFolder, make_run_dir
from outlast.launch.spawner import ENTRY, PRELOAD, Spawner
from outlast.metrics import duration

TICK_S = 0.05
"""Longest wait of the loop."""
STOP_S = 30.0
"""Given to groups that were asked to stop, before they are killed."""
FINISH_S = 60.0
"""Given to the other groups once one has finished."""
KILL_S = 5.0
"""Longest wait for killed groups to be gone."""
JOIN_S = 30.0
"""Longest wait of `outlast join` for an answer."""


@dataclass(frozen=True)
class Ending:
    """The launch is about to end.

    Attributes:
        end: how.
        deadline_s: when what still runs is killed (monotonic).
        terminated: groups were asked to stop; otherwise they are given time to finish.
        killed: they were killed; when the deadline passes again, whoever should report it is stuck.
    """

    end: policy.End
    deadline_s: float
    terminated: bool
    killed: bool = False


class Supervisor:
    """Runs the groups of one machine until the run is finished, stopped or can't go on.

    Args:
        options: what was asked.
        folder: of the run, held by this process.
        address: of the lighthouse.
        screen: where to print.
        preload: see `Spawner`.
        entry: see `Spawner`.
    """

    def __init__(
        self,
        options: Options,
        folder: RunFolder,
        address: Address,
        screen: Screen,
        preload: Sequence[str] = PRELOAD,
        entry: str = ENTRY,
    ) -> None:
        self.options = options
        self._stuck = False
        self.folder = folder
        self.address = address
        self._hub = Hub(folder.path, screen)
        self._token = secrets.token_hex(16)
        config = options.config
        job = Job(config, address.url, options.ranks, threads_per_rank(config, options.groups * options.ranks))
        self._fleet = Fleet(self._hub, folder, job, Spawner(self._token, preload, entry))
        self._lighthouse = (
            Lighthouse(address, config.fault_tolerance, folder.log("lighthouse")) if address.ours else None
        )
        self._lighthouse_due_s: float | None = None
        self._lighthouse_fruitless = 0
        self._lighthouse_killed = False
        self._chaos = chaos.begin(options.schedule)
        self._ending: Ending | None = None
        self._asked_to_stop = False
        self._before = 0
        """Highest step committed before this launch."""
        self._started_s = time.monotonic()
        self._control: socket.socket | None = None

    # The loop --------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run to the end. Returns the exit code.

        Raises:
            UserError: it couldn't be started.
        """
        end = policy.End(EXIT_FAILED, "launch failed")
        try:
            self._open()
            while self._ending is None or (self._fleet.is_active() and not self._stuck):
                self._turn()
            end = self._ending.end
            if end.code == EXIT_STOPPED and any(g.outcome == "finished" for g in self._fleet.groups):
                end = policy.End(EXIT_OK, "finished")  # asked to stop when there was nothing left to do
        except UserError as e:
            end = policy.End(e.exit_code, str(e))
            raise
        except BaseException as e:
            end = policy.End(EXIT_FAILED, f"launch failed: {type(e).__name__}: {e}")
            raise
        finally:
            self._close(end)
        return end.code

    def _turn(self) -> None:
        self._hub.wait(TICK_S)
        now = time.monotonic()
        while self._hub.signals:
            self._on_signal(self._hub.signals.pop(0))
        for outcome in self._fleet.take_exits():
            self._after_exit(outcome)
        if self._fleet.hopeless:
            self._begin_end(self._fleet.hopeless, STOP_S, terminate=True)
        if self._lighthouse_due_s is not None and now >= self._lighthouse_due_s:
            self._start_lighthouse()
        self._fleet.turn(now)
        if self._ending is None:
            self._make_chaos(now)
        elif now >= self._ending.deadline_s:
            self._kill("it took too long")
        self._hub.screen.show(self._hub.progress)

    def _open(self) -> None:
        options, schedule = self.options, self.options.schedule
        self._before = max((e["step"] for e in self._hub.tail.read() if e["kind"] == "commit"), default=0)
        self._refuse_if_lost()
        if self._lighthouse:
            self._start_lighthouse()
        self._fleet.turn(time.monotonic())  # the template imports while the lighthouse gets ready
        if self._lighthouse:
            self._lighthouse.wait_ready()
        self._hub.emit(
            "launch",
            groups=options.groups,
            ranks=options.ranks,
            run_dir=str(self.folder.path),
            chaos=str(schedule),
            chaos_seed=schedule.seed,
            lighthouse=self.address.url,
            pid=os.getpid(),
        )
        self._fleet.add(options.groups)
        self.folder.keep_job(token=self._token, lighthouse=self.address.url, pid=os.getpid())
        try:
            self._control = messages.listen(self.folder.socket)
            self._hub.watch(self._control.fileno(), self._answer)
        except OSError as e:
            self._hub.say(f"`outlast join` won't work: {self.folder.socket}: {e.strerror}")
        whose = "" if self._lighthouse else " (not ours)"
        each = f" of {options.ranks} ranks" if options.ranks > 1 else ""
        self._hub.say(
            f"{options.groups} groups{each}, run folder {self.folder.path}, lighthouse {self.address.url}{whose}"
        )
        if schedule.statements:
            self._hub.say(f"chaos (seed {schedule.seed}): {schedule}")
        for doubt in chaos.doubts(
            schedule,
            (options.groups, options.ranks),
            options.config.training.steps,
            has_lighthouse=self._lighthouse is not None,
        ):
            self._hub.say(f"chaos: {doubt}")
        self._started_s = time.monotonic()

    def _close(self, end: policy.End) -> None:
        with contextlib.ExitStack() as last:  # in reverse; each is done whatever the others do
            last.callback(self._hub.close)
            if self._ending:
                last.callback(self._sum_up, end)
            last.callback(self._hub.emit, "end", code=end.code, reason=end.reason)
            if self._control:
                last.callback(self._control.close)
                last.callback(self._hub.unwatch, self._control.fileno())
            if self._lighthouse:
                last.callback(self._lighthouse.close)
                last.callback(self._hub.unwatch, self._lighthouse.pidfd)
            last.callback(self._fleet.close)

    # Ends ------------------------------------------------------------------------------------------

    def _after_exit(self, outcome: policy.Outcome) -> None:
        if outcome == "finished":
            self._begin_end(policy.End(EXIT_OK, "finished"), FINISH_S, terminate=False)
        if self._ending:
            return
        end = policy.end_of_run(g.outcome for g in self._fleet.groups)
        if end:
            self._begin_end(end, STOP_S, terminate=True)
        elif not self._hub.progress.holders:
            try:
                self._refuse_if_lost()
            except UserError as e:
                self._begin_end(policy.End(e.exit_code, str(e)), STOP_S, terminate=True)

    def _refuse_if_lost(self) -> None:
        """No living group holds trained weights: is there anything to go on from?

        Raises:
            ConfigError: steps were committed and are lost.
        """
        committed = max(self._before, self._hub.progress.step)
        if committed == 0:
            return
        path, newest = self.folder.path, saves.newest_step(self.folder.path)
        end = policy.weights_left(committed, newest, saves.done_marker(path), str(path))
        if end:
            raise ConfigError(end.reason)
        if newest is not None:
            self._hub.say(
                f"step {committed} was committed and no group alive has it: back to the save of step {newest}"
            )

    def _on_signal(self, number: int) -> None:
        if self._asked_to_stop:
            self._kill("asked again")
            return
        self._asked_to_stop = True
        name = signal.Signals(number).name
        self._hub.say(f"{name}: groups finish their step and leave, within {STOP_S:g} s; once more: they are killed")
        self._begin_end(policy.End(EXIT_STOPPED, f"stopped as asked ({name})"), STOP_S, terminate=True)

    def _begin_end(self, end: policy.End, grace_s: float, *, terminate: bool) -> None:
        """Start nothing more, and end what runs within `grace_s`. The first reason to end stands."""
        if self._ending and (self._ending.terminated or not terminate):
            return
        self._ending = Ending(self._ending.end if self._ending else end, time.monotonic() + grace_s, terminate)
        self._fleet.end(terminate=terminate)
        self._signal_lighthouse(signal.SIGCONT)  # chaos may have stopped it

    def _kill(self, why: str) -> None:
        assert self._ending
        self._stuck = self._ending.killed and time.monotonic() > self._ending.deadline_s
        self._fleet.kill(why)
        self._ending = Ending(self._ending.end, time.monotonic() + KILL_S, terminated=True, killed=True)

    def _sum_up(self, end: policy.End) -> None:
        for text in chaos.undone(self.options.schedule, self._chaos):
            self._hub.say(f"chaos: {text}")
        self._hub.read_events()
        p, took = self._hub.progress, duration(time.monotonic() - self._started_s)
        restarts = sum(max(0, g.spawns - 1) for g in self._fleet.groups)
        steps = self.options.config.training.steps
        self._hub.say(
            f"{end.reason}: step {max(p.step, self._before)}/{steps} after {took}, {len(self._fleet.groups)} groups, "
            f"{restarts} restarts; check it: outlast audit {self.folder.path}"
        )

    # Chaos -----------------------------------------------------------------------------------------

    def _make_chaos(self, now_s: float) -> None:
        if not self.options.schedule.statements:
            return
        groups, lives = self._fleet.groups, self._hub.progress.lives
        there = [g for g in groups if g.state == "running" and not g.killed]
        running = {name: pid for g in there for name, pid in _names(g)}
        live = {name: pid for g in there if lives.get(g.number) == g.life for name, pid in _names(g)}
        if self._lighthouse and self._lighthouse.pid and not self._lighthouse_killed:
            live[chaos.LIGHTHOUSE] = running[chaos.LIGHTHOUSE] = self._lighthouse.pid
        world = chaos.World(now_s - self._started_s, self._hub.progress.committed_step, live, running)
        self._chaos, actions = chaos.advance(self.options.schedule, self._chaos, world)
        for action in actions:
            self._hub.emit("chaos", action=action.verb, target=action.target, pid=action.pid)
            self._do(action)
            self._hub.say(f"chaos: {action.verb} {action.target} ({action.reason})")

    def _do(self, action: chaos.Action) -> None:
        number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "continue": signal.SIGCONT}[action.verb]
        if action.target == chaos.LIGHTHOUSE:
            self._lighthouse_killed = action.verb == "kill"
            self._signal_lighthouse(number)
            return
        name, _, rank = action.target.partition(".")
        group = next(g for g in self._fleet.groups if g.name == name)
        group.killed = action.verb == "kill"
        (group.members[int(rank)] if rank else group).signal(number)

    # Lighthouse ------------------------------------------------------------------------------------

    def _start_lighthouse(self) -> None:
        assert self._lighthouse
        self._lighthouse_due_s = None
        pid = self._lighthouse.start()
        self._lighthouse_killed = False
        self._hub.watch(self._lighthouse.pidfd, self._on_lighthouse_end)
        self._hub.emit("lighthouse", action="start", pid=pid, address=self.address.url)

    def _signal_lighthouse(self, number: signal.Signals) -> None:
        if self._lighthouse and self._lighthouse.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._lighthouse.pidfd, number)

    def _on_lighthouse_end(self) -> None:
        assert self._lighthouse
        pid, lived_s = self._lighthouse.pid, time.monotonic() - self._lighthouse.started_at
        self._hub.unwatch(self._lighthouse.pidfd)
        code = self._lighthouse.ended()
        self._hub.emit("lighthouse", action="died", pid=pid, address=self.address.url)
        verdict = policy.after_lighthouse(
            code, lived_s=lived_s, fruitless=self._lighthouse_fruitless, chaos=self._lighthouse_killed
        )
        self._lighthouse_fruitless = verdict.fruitless
        self._hub.say(f"the lighthouse: {verdict.reason}")
        if verdict.restart_in_s is not None:
            self._lighthouse_due_s = time.monotonic() + verdict.restart_in_s
        else:
            end = policy.End(EXIT_FAILED, f"the lighthouse can't be kept alive: see {self._lighthouse.log}")
            self._begin_end(end, STOP_S, terminate=True)

    # Joining ---------------------------------------------------------------------------------------

    def _answer(self) -> None:
        assert self._control
        with contextlib.suppress(OSError, ValueError):  # an asker that went away, or isn't one of ours
            asker, _ = self._control.accept()
            with asker:
                asker.settimeout(1.0)
                message, _ = messages.receive(asker)
                messages.send(asker, self._join((message or {}).get("join")))

    def _join(self, count: object) -> dict[str, Any]:
        present = len(self._fleet.groups)
        if self._ending:
            return {"error": f"it is ending: {self._ending.end.reason}"}
        if type(count) is not int or not 1 <= count <= MAX_GROUPS - present:
            return {"error": f"{count!r} groups can't be added to {present}: at most {MAX_GROUPS} in all"}
        numbers = self._fleet.add(count)
        self._hub.emit("join", groups=numbers)
        spare = max(0, present + count - self.options.config.units(self.options.ranks))
        spares = f"; {spare} more than work units a step: spares, idle until another group is lost" if spare else ""
        self._hub.say("joined: " + ", ".join(f"g{n}" for n in numbers) + spares)
        return {"groups": numbers, "spare": spare}


def _names(group: Group) -> list[tuple[str, int]]:
    """What chaos may hit: a group, and each of its ranks; with the process ids."""
    ranks = [(f"{group.name}.{m.rank}", m.pid) for m in group.members if m.state == "running"]
    return [(group.name, group.pid), *ranks]


# Commands ------------------------------------------------------------------------------------------


def launch_command(args: Sequence[str], preload: Sequence[str] = PRELOAD, entry: str = ENTRY) -> int:
    """`outlast launch`. Returns the exit code.

    Args:
        args: of the command line.
        preload: see `Spawner`.
        entry: see `Spawner`.

    Raises:
        UserError: it couldn't be started; says why.
    """
    options = read_options(args)
    check_torchft()
    from outlast.data.corpus import open_corpus  # numpy: not for `--help`

    host = options.config.fault_tolerance.host
    try:
        socket.create_server((host, 0)).close()
    except OSError as e:
        raise ConfigError(f"fault_tolerance.host = {host!r} isn't an address of this machine: {e.strerror}") from None
    if options.reads_corpus:
        open_corpus(options.config.data)  # once, before anything starts; the groups find it ready
    address = choose_address(options.config.fault_tolerance.lighthouse)
    with contextlib.closing(RunFolder(make_run_dir(options.run_dir, options.config_file))) as folder:
        folder.keep_config(options.config)
        done = saves.done_marker(folder.path)
        if done is not None:
            print(f"outlast launch: {folder.path} is finished already (step {done.get('step')}): nothing to do")
            return EXIT_OK
        return Supervisor(options, folder, address, Screen(), preload, entry).run()


def join_command(args: Sequence[str]) -> int:
    """`outlast join`. Returns the exit code.

    Raises:
        UserError: nothing runs there, or it wouldn't; says why.
    """
    asked = read_join_options(args)
    path = asked.run_dir
    try:
        with messages.connect(path / "launch.sock", JOIN_S) as sock:
            messages.send(sock, {"join": asked.groups})
            answer, _ = messages.receive(sock)
    except OSError:
        raise ConfigError(
            f"no launch runs in {path}; `outlast launch --run-dir {path} --groups N` resumes the run"
        ) from None
    if answer is None:
        raise ConfigError(f"the launch in {path} ended before it answered")
    if "error" in answer:
        raise ConfigError(f"the launch in {path} refused: {answer['error']}")
    names = [f"g{n}" for n in answer["groups"]]
    spare = f"; {n} of the groups are spares: there are no work units for them" if (n := answer["spare"]) else ""
    print(f"outlast join: added {', '.join(names)}{spare}; see {path / 'logs' / names[0]}.log")
    return EXIT_OK
