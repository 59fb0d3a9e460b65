"""The groups of a launch and the template that forks them: started, heard of, started again.

What an end means is decided in `policy`. Imports no torch.
"""

import os
import secrets
import signal
import time
from dataclasses import dataclass
from functools import partial

from outlast.config import Config
from outlast.errors import EXIT_FAILED, EXIT_REFUSED
from outlast.launch import policy
from outlast.launch.groups import Group, Output
from outlast.launch.hub import Hub
from outlast.launch.options import group_config
from outlast.launch.run_folder import RunFolder
from outlast.launch.spawner import Spawner


@dataclass(frozen=True)
class Job:
    """What all groups of a job have in common.

    Attributes:
        config: of the run.
        lighthouse: its URL.
        threads: of a rank.
    """

    config: Config
    lighthouse: str
    threads: int


class Fleet:
    """All groups, numbered from 0.

    Args:
        hub: what it waits on and says.
        folder: of the run.
        job: what the groups are to do.
        spawner: their template, not started.
    """

    def __init__(self, hub: Hub, folder: RunFolder, job: Job, spawner: Spawner) -> None:
        self.groups: list[Group] = []
        self.hopeless: policy.End | None = None
        """Why no group can be started any more."""
        self.ending = False
        """Nothing is started any more."""
        self._hub = hub
        self._folder = folder
        self._job = job
        self._spawner = spawner
        self._template_output = Output("template", folder.log("template"), hub.screen.say)
        self._template_due_s: float | None = 0.0
        self._template_fruitless = 0
        self._exits: list[policy.Outcome] = []

    def add(self, count: int) -> list[int]:
        """Add groups after the highest number. Returns their numbers."""
        first = len(self.groups)
        for number in range(first, first + count):
            config = group_config(
                self._job.config,
                number,
                run_dir=self._folder.path,
                lighthouse=self._job.lighthouse,
                threads=self._job.threads,
            )
            output = Output(f"g{number}", self._folder.log(f"g{number}"), self._hub.screen.say)
            self.groups.append(Group(number, config, output))
        return list(range(first, first + count))

    def turn(self, now_s: float) -> None:
        """Start what is due."""
        if self.ending:
            return
        if self._template_due_s is not None and now_s >= self._template_due_s:
            self._start_template()
        for group in self.groups:
            if group.state == "waiting" and self._spawner.ready and now_s >= group.due_s:
                self._fork(group)

    def take_exits(self) -> list[policy.Outcome]:
        """What became of the groups that ended since the last call."""
        exits, self._exits = self._exits, []
        return exits

    def is_active(self) -> bool:
        """Whether any group has a process, or is about to."""
        return any(g.state in ("forking", "running") for g in self.groups)

    def end(self, *, terminate: bool) -> None:
        """Start nothing more; let what runs finish, or ask it to stop."""
        self.ending = True
        for group in self.groups:
            if group.state == "waiting":
                group.state, group.outcome = "out", "stopped"
            if terminate:
                group.signal(signal.SIGTERM)
                group.terminate = True
            group.signal(signal.SIGCONT)  # chaos may have stopped it

    def kill(self, why: str) -> None:
        """End what runs at once."""
        left = [g.name for g in self.groups if g.state in ("forking", "running")]
        if left:
            self._hub.say(f"killing {', '.join(left)}: {why}")
        for group in self.groups:
            group.signal(signal.SIGKILL)
            if group.state == "forking":  # the template, which ends next, takes it along
                self._let_go(group)

    def close(self) -> None:
        """End every process."""
        for group in self.groups:
            group.signal(signal.SIGKILL)
        self._spawner.close()
        for group in self.groups:
            self._let_go(group)
        self._finish(self._template_output)

    # Groups ----------------------------------------------------------------------------------------

    def _fork(self, group: Group) -> None:
        group.life = secrets.token_hex(4)
        try:
            read_end, write_end = os.pipe()
        except OSError as e:
            group.state = "forking"
            self._exited(group, EXIT_FAILED, f"no pipe could be made: {e.strerror}")
            return
        try:
            self._spawner.fork(group.number, group.life, group.config, write_end)
        except OSError:  # the template is gone, which its socket tells next
            os.close(read_end)
            return
        finally:
            os.close(write_end)
        self._follow(group.output, read_end)
        group.state = "forking"

    def _follow(self, output: Output, fd: int) -> None:
        def read() -> None:
            if not output.read():
                self._hub.unwatch(output.fd)

        output.attach(fd)
        self._hub.watch(fd, read)

    def _finish(self, output: Output) -> None:
        self._hub.unwatch(output.fd)
        output.finish()

    def _let_go(self, group: Group) -> None:
        self._hub.unwatch(group.pidfd)
        self._finish(group.output)
        group.ended()

    def _forked(self, group: Group, pid: int, pidfd: int) -> None:
        if group.state != "forking":  # given up meanwhile
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
            return
        group.runs(pid, pidfd)
        self._hub.emit("spawn", group=group.number, pid=pid)
        if group.terminate:
            group.signal(signal.SIGTERM)

    def _exited(self, group: Group, code: int, why: str = "") -> None:
        """A group's process ended, or couldn't be made."""
        if group.state not in ("forking", "running"):
            return
        self._finish(group.output)
        self._hub.read_events()  # all that it said before it died
        achieved = group.life in self._hub.progress.committed
        verdict = policy.after_exit(code, fruitless=group.fruitless, achieved=achieved, chaos=group.killed)
        reason = f"{verdict.reason}; {why}" if why else verdict.reason
        if self.ending and verdict.outcome == "restart":
            verdict = policy.Verdict("stopped", reason)
        self._hub.emit(
            "died", group=group.number, pid=group.pid, code=code, restart_in=verdict.restart_in_s, reason=reason
        )
        self._let_go(group)
        group.outcome, group.fruitless = verdict.outcome, verdict.fruitless
        if verdict.restart_in_s is not None:
            group.state, group.due_s = "waiting", time.monotonic() + verdict.restart_in_s
            reason += f"; back in {verdict.restart_in_s:g} s" if verdict.restart_in_s else "; back at once"
        self._hub.say(f"{group.name}: {reason}")
        self._hub.read_events()
        self._exits.append(verdict.outcome)

    # Template --------------------------------------------------------------------------------------

    def _start_template(self) -> None:
        self._template_due_s = None
        self._follow(self._template_output, self._spawner.start())
        assert self._spawner.sock
        self._hub.watch(self._spawner.sock.fileno(), self._on_template)

    def _on_template(self) -> None:
        assert self._spawner.sock
        fd, was_ready = self._spawner.sock.fileno(), self._spawner.ready
        message, fds = self._spawner.receive()
        if message is None:
            self._hub.unwatch(fd)
            self._template_ended(self._spawner.ended(1.0), was_ready)
        elif message["is"] != "ready":
            group = self.groups[message["group"]]
            assert group.life == message["life"], (group, message)
            if message["is"] == "forked":
                self._forked(group, message["pid"], fds[0])
            else:
                self._exited(group, message.get("code", EXIT_FAILED), message.get("why", ""))

    def _template_ended(self, code: int, was_ready: bool) -> None:
        self._finish(self._template_output)
        for group in self.groups:
            if group.state == "forking":  # it may or may not have been: if so it died with the template
                self._let_go(group)
                group.state = "out" if self.ending else "waiting"
            elif group.state == "running":  # the kernel kills it; none but the template could tell us its code
                self._hub.watch(group.pidfd, partial(self._exited, group, -signal.SIGKILL, "its template died"))
        verdict = policy.after_exit(code or EXIT_FAILED, fruitless=self._template_fruitless, achieved=was_ready)
        self._template_fruitless = verdict.fruitless
        self._hub.say(f"the template: {verdict.reason}")
        if verdict.restart_in_s is None:
            bad = EXIT_REFUSED if verdict.outcome == "refused" else EXIT_FAILED
            self.hopeless = policy.End(bad, f"no group can be started: see {self._template_output.log}")
        else:
            self._template_due_s = time.monotonic() + verdict.restart_in_s
