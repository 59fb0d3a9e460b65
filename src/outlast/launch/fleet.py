"""The groups of a launch and the template that forks them: started, heard of, started again.

What an end means is decided in `policy`. Imports no torch.
"""

import contextlib
import os
import secrets
import signal
import socket
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from outlast.config import Config
from outlast.errors import EXIT_FAILED, EXIT_REFUSED
from outlast.launch import policy
from outlast.launch.groups import Group, Member, Output
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
        ranks: of each group.
        threads: of a rank.
    """

    config: Config
    lighthouse: str
    ranks: int
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
            names = [f"g{number}", *(f"g{number}.{rank}" for rank in range(1, self._job.ranks))]
            says = [self._hub.screen.say, *[None] * (len(names) - 1)]  # rank 0 speaks for its group
            outputs = [Output(name, self._folder.log(name), say) for name, say in zip(names, says, strict=True)]
            self.groups.append(Group(number, config, [Member(rank, o) for rank, o in enumerate(outputs)]))
        return list(range(first, first + count))

    def turn(self, now_s: float) -> None:
        """Start what is due, and end what is left of groups that failed."""
        for group in self.groups:
            if group.kill_at_s is not None and now_s >= group.kill_at_s:
                group.kill_at_s, group.swept = None, True
                group.signal(signal.SIGKILL)
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
            if group.state == "forking":  # the template, which ends next, takes them along
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
        group.begin(secrets.token_hex(4))
        with contextlib.ExitStack() as fds:
            try:
                env, store = self._meeting_place(fds)
                pipes = [self._pipe(member.output, fds) for member in group.members]
            except OSError as e:
                for member in group.members:
                    self._exited(group, member, EXIT_FAILED, f"no pipe or socket could be made: {e.strerror}")
                return
            for member, pipe in zip(group.members, pipes, strict=True):
                seat = {"RANK": str(member.rank), "LOCAL_RANK": str(group.number * len(group.members) + member.rank)}
                listener = () if member.rank else store
                with contextlib.suppress(OSError):  # the template is gone, which its socket tells next
                    self._spawner.fork(group.number, member.rank, group.life, group.config, env | seat, pipe, *listener)

    def _meeting_place(self, fds: contextlib.ExitStack) -> tuple[dict[str, str], tuple[int, ...]]:
        """What the ranks of a group are told of where they meet, and the socket that rank 0 is to keep there."""
        env = {"WORLD_SIZE": str(self._job.ranks)}
        if self._job.ranks == 1:
            return env, ()
        listener = fds.enter_context(socket.create_server((self._job.config.fault_tolerance.host, 0)))
        host, port = listener.getsockname()[:2]
        return env | {"MASTER_ADDR": host, "MASTER_PORT": str(port)}, (listener.fileno(),)

    def _pipe(self, output: Output, fds: contextlib.ExitStack) -> int:
        """The write end, closed with `fds`, of a pipe that an output reads."""
        read_end, write_end = os.pipe()
        fds.callback(os.close, write_end)
        self._follow(output, read_end)
        return write_end

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
        for member in group.members:
            self._hub.unwatch(member.pidfd)
            self._finish(member.output)
            member.ended()
        group.state = "out"

    def _forked(self, group: Group, member: Member, pid: int, pidfd: int) -> None:
        if member.state != "forking":  # given up meanwhile
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
            return
        member.runs(pid, pidfd)
        if group.is_up():
            pids = {"pids": [m.pid for m in group.members]} if len(group.members) > 1 else {}
            self._hub.emit("spawn", group=group.number, pid=group.pid, **pids)
        if group.terminate:
            member.signal(signal.SIGTERM)

    def _exited(self, group: Group, member: Member, code: int, why: str = "") -> None:
        """A rank's process ended, or couldn't be made: what is left of its group ends too."""
        if member.state == "out":
            return
        self._hub.unwatch(member.pidfd)
        self._finish(member.output)
        member.ended()
        group.is_up()
        if not (group.swept and code == -signal.SIGKILL):
            group.ends.append((member.rank, code, why))
        if any(m.state != "out" for m in group.members):
            grace_s = policy.grace_of_the_others_s(code)
            if grace_s is not None and group.kill_at_s is None:
                group.kill_at_s = time.monotonic() + grace_s
            return
        self._hub.read_events()  # all that it said before it died
        rank, code, why = policy.first_failure(group.ends)
        achieved = group.life in self._hub.progress.committed
        verdict = policy.after_exit(code, fruitless=group.fruitless, achieved=achieved, chaos=group.killed)
        reason = f"{verdict.reason}; {why}" if why else verdict.reason
        more: dict[str, Any] = {}
        if len(group.members) > 1:
            more = {"rank": rank}
            reason = f"rank {rank}: {reason}" if code else reason
        if self.ending and verdict.outcome == "restart":
            verdict = policy.Verdict("stopped", reason)
        wait_s = verdict.restart_in_s
        self._hub.emit("died", group=group.number, pid=group.pid, code=code, restart_in=wait_s, reason=reason, **more)
        self._let_go(group)
        group.outcome, group.fruitless = verdict.outcome, verdict.fruitless
        if wait_s is not None:
            group.state, group.due_s = "waiting", time.monotonic() + wait_s
            reason += f"; back in {wait_s:g} s" if wait_s else "; back at once"
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
            member = group.members[message["rank"]]
            if message["is"] == "forked":
                self._forked(group, member, message["pid"], fds[0])
            else:
                self._exited(group, member, message.get("code", EXIT_FAILED), message.get("why", ""))

    def _template_ended(self, code: int, was_ready: bool) -> None:
        self._finish(self._template_output)
        for group in self.groups:
            if group.state == "forking":  # it may or may not have been: if so it died with the template
                self._let_go(group)
                group.state = "out" if self.ending else "waiting"
                continue
            for member in group.members:
                if member.state == "running":  # the kernel kills it; none but the template could tell us its code
                    end = partial(self._exited, group, member, -signal.SIGKILL, "its template died")
                    self._hub.watch(member.pidfd, end)
        verdict = policy.after_exit(code or EXIT_FAILED, fruitless=self._template_fruitless, achieved=was_ready)
        self._template_fruitless = verdict.fruitless
        self._hub.say(f"the template: {verdict.reason}")
        if verdict.restart_in_s is None:
            bad = EXIT_REFUSED if verdict.outcome == "refused" else EXIT_FAILED
            self.hopeless = policy.End(bad, f"no group can be started: see {self._template_output.log}")
        else:
            self._template_due_s = time.monotonic() + verdict.restart_in_s
