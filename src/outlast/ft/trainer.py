"""The fault-tolerant trainer: the plain one, with its seams overridden.

`fault_tolerant(AnyTrainer)` adds it by composition. What to do next is `ft/protocol.py`'s word; here it is done.
All ranks of a group run the protocol, each its own copy on the same inputs, and so come to the same next action: rank
0 asks the lighthouse for all, and how an action went is agreed on before the protocol hears it.
"""

import hashlib
import json
import secrets
import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from outlast import checkpoint, saves, transfer
from outlast.accumulate import NotWholeError, Totals
from outlast.config import host_and_port, job_token, lighthouse_address
from outlast.errors import StorageError, UserError
from outlast.events import last_commit, since, to_ranges
from outlast.ft import protocol
from outlast.ft.group import Lighthouse, Meeting, Pulse
from outlast.ft.plane import Plane, PlaneError
from outlast.models.probe import numerics_probe
from outlast.ranks import first_line
from outlast.sockets import is_loopback, listen, serve_store
from outlast.times import Times
from outlast.trainer import Trainer


class AttemptEnded(Exception):
    """This attempt at the step committed nothing; what was computed is kept."""


class Stopped(Exception):
    """Asked to stop, and there is no step in hand to finish."""


def fault_tolerant(base: type[Trainer]) -> type[Trainer]:
    """A trainer class with fault tolerance added."""
    return FaultTolerance if base is Trainer else type(f"FaultTolerant{base.__name__}", (FaultTolerance, base), {})


class FaultTolerance(Trainer):
    """Seams of the trainer, overridden to train as one of several groups."""

    def begin(self) -> None:
        """Resume as the plain trainer does, then be ready for the others."""
        ft = self.config.fault_tolerance
        self.times = Times.of(ft)
        self.address = lighthouse_address(ft)
        self.lighthouse = Lighthouse(self.address, self.times)
        self.pulse = Pulse(self.address, f"g{ft.replica_id}:{self.events.common['life']}", self.times)
        if self.ranks.rank == 0:
            self.lighthouse.wait_until_there()
        self.name = self.pulse.name
        self.window: dict[int, str] = {0: protocol.ROOT}
        super().begin()
        self.token, minted = job_token(), ""
        if not self.token:  # whoever can read the lighthouse's answers can then read the state
            self.token = minted = self.ranks.first(secrets.token_hex(16))
        self.server = transfer.SnapshotServer(ft.host, self.token, self.times.exchange)
        self.store = serve_store(listen(ft.host))
        self.ports = {self.server.port, self.store.port, host_and_port(self.address)[1]}
        probes = self.ranks.all(numerics_probe(self.device, self.config.training.mixed_precision_param == "bfloat16"))
        rules = protocol.Rules(
            name=self.name,
            units=self.units,
            steps=self.config.training.steps,
            num_groups=ft.group_size,
            min_groups=ft.min_replica_size,
            exact=self.config.training.accumulation == "exact",
            fingerprint={
                **{key: str(value) for key, value in self.trajectory().items()},
                "OUTLAST_TOKEN, hashed,": hashlib.sha256(b"job " + job_token().encode()).hexdigest()[:16],
                "ranks a group": str(self.ranks.size),
                "fault_tolerance.host": "loopback" if is_loopback(ft.host) else "an address of a network",
                "fault_tolerance.group_size": str(ft.group_size),
                "fault_tolerance.min_replica_size": str(ft.min_replica_size),
                "numerics probe": " ".join(sorted(set(probes))),
            },
            floor=self.ranks.first(last_commit(self.run_dir)),
            address=json.dumps({"ranks": self.ranks.all(self.server.address), "token": minted}),
            store=self.ranks.first(f"{ft.host}:{self.store.port}"),
        )
        self.protocol = protocol.Protocol(rules, self.step, self.window)
        self.plane = Plane(self.name, self.times, ft.process_group, self.device)
        self.next_action: protocol.Action | None = None
        self.committing: protocol.Commit | None = None
        self.first, self.said_waiting = False, -1
        self.unit_seconds: deque[float] = deque(maxlen=100)
        self.attempt_at = time.perf_counter()
        with self.pulse.phase(self.times.phase):
            self.pulse.start(beats=self.ranks.rank == 0)

    def resume(self) -> dict[str, Any]:
        """The plain resume, and the lineage that belongs to it."""
        facts = super().resume()
        self.window = {int(s): h for s, h in facts.get("window", {}).items()} or self.window
        return facts

    def save_facts(self) -> dict[str, Any]:
        """What the plain trainer keeps, and the lineage."""
        return super().save_facts() | {"window": {str(s): h for s, h in self.protocol.window.items()}}

    def writes(self) -> bool:
        """The first active group of the last quorum writes for the run."""
        return self.first

    # A step ----------------------------------------------------------------------------------------

    def more(self) -> bool:
        """Also go on with a step that others count on."""
        return super().more() or (bool(self.protocol.held) and self.step < self.protocol.rules.steps)

    def train_step(self) -> None:
        """Attempt the step until it is committed."""
        with suppress(Stopped):
            while True:
                try:
                    return super().train_step()
                except AttemptEnded:
                    if self.step == self.config.training.steps:
                        return None  # healed to the end

    def begin_step(self) -> Sequence[int]:
        """Follow the protocol until it says what to compute."""
        self.attempt_at = time.perf_counter()
        action, self.next_action = self.next_action or self.protocol.begin(), None
        while not isinstance(action, protocol.Compute):
            action = self.perform(action)
            if self.step == self.config.training.steps:  # healed to the end: there is no step to begin
                self.end_attempt(action)
        self.prepare(action)
        return action.units

    def run_unit(self, unit: int) -> None:
        """A unit counts as held when it is in the sums, whole; an exception in it clears them."""
        started = time.perf_counter()
        with self.pulse.phase(self.unit_limit(), stuck=self.times.exchange):
            try:
                super().run_unit(unit)
            except BaseException:
                self.sums.clear()
                self.protocol.unit_broke()
                raise
        self.protocol.unit_added(unit)
        self.unit_seconds.append(time.perf_counter() - started)

    def settle(self) -> Totals:
        """Exchange the sums with the active groups.

        Raises:
            AttemptEnded: it failed, or someone is still healing.
        """
        action = self.protocol.units_done()
        if not isinstance(action, protocol.Exchange):
            self.end_attempt(action)
        error, totals = "", None
        with self.pulse.phase(self.arrival_limit() + 2 * self.times.exchange, stuck=self.times.exchange):
            try:
                if self.plane.size != action.size:
                    raise PlaneError(f"{self.plane.size} of {action.size} groups are connected")
                meeting = Meeting(self.plane, self.pulse, self.times, self.arrival_limit())
                totals = self.sums.settle(meeting, action.seal)
            except (PlaneError, NotWholeError) as e:
                self.plane.cancel()  # before the ranks agree: another group's may be waiting for this one
                error = str(e)
            error = self.ranks.error(error)
        if error or totals is None:
            self.retry(self.protocol.failed(error), error)
        said = self.ranks.all([totals.seal, totals.hash, checkpoint.slice_digest(self.state(), self.step)])
        seal = totals.seal if all(s[0] == totals.seal for s in said) else 0
        committing = self.protocol.exchanged(seal, " ".join(f"{s[1]} {s[2]}" for s in said))
        if not isinstance(committing, protocol.Commit):
            self.retry(committing, "the exchange mixed two attempts")
        self.committing = committing
        return totals

    def commit(self, totals: Totals, **facts: Any) -> None:
        """The plain commit; its event also says who held what."""
        assert self.committing is not None
        by = {name: to_ranges(units) for name, units in self.committing.by.items()}
        with self.pulse.phase(self.times.phase):
            super().commit(totals, key=self.committing.key, by=by, lineage=self.committing.lineage, **facts)

    def after_commit(self, values: dict[str, float], tokens: int) -> None:
        """Tell the protocol first: a save made now carries this commit's lineage."""
        assert self.committing is not None
        self.protocol.committed(self.committing.lineage)
        super().after_commit({**values, "groups": float(len(self.committing.by))}, tokens)

    def run_evaluation(self) -> None:
        """It may take as long as a save, besides the save."""
        with self.pulse.phase(self.times.phase):
            super().run_evaluation()

    def finish(self) -> None:
        """Stay a donor until every live group is at the last step; then as the plain trainer."""
        try:
            if self.step == self.config.training.steps:
                with suppress(Stopped):
                    self.stay_until_all_are_there()
            super().finish()
        finally:
            self.pulse.stop()
            self.plane.cancel()
            self.server.close(self.times.phase)

    def stay_until_all_are_there(self) -> None:
        """Serve whoever is behind, until the first group has made the run's end durable, or this one is the first."""
        action, self.next_action = self.next_action or self.protocol.begin(), None
        self.first = False
        deadline = time.monotonic() + self.times.ask
        while True:
            done, late = self.ranks.first([bool(saves.done_marker(self.run_dir)), time.monotonic() > deadline])
            if done:
                break
            if isinstance(action, protocol.Compute):
                self.prepare(action)
                action = self.protocol.units_done()
                deadline = time.monotonic() + self.times.ask
            elif (isinstance(action, protocol.Finish) and action.first) or late:
                self.first = True  # past the deadline the others have gone, and nobody may have saved
                return
            elif isinstance(action, protocol.Finish):
                time.sleep(self.times.beat)
                action = self.protocol.begin()
            else:
                action = self.perform(action)
        self.first = False

    # Actions ---------------------------------------------------------------------------------------

    def perform(self, action: protocol.Action) -> protocol.Action:
        """Do what the protocol says, and tell it how it went."""
        match action:
            case protocol.Ask():
                return self.ask(action)
            case protocol.Connect():
                return self.meet(action)
            case protocol.Heal():
                return self.heal(action)
            case protocol.Leave(reason, again):
                self.events.emit("refused", reason=reason)
                self.plane.cancel()
                self.pulse.stop()
                raise (StorageError if again else UserError)(reason)
            case _:
                raise AssertionError(action)

    def ask(self, action: protocol.Ask) -> protocol.Action:
        """One quorum call, by rank 0 for all ranks."""
        if action.cancel:
            self.plane.cancel()
        stopping = self.ranks.any(self.stopping)
        done = self.ranks.first(bool(saves.done_marker(self.run_dir)))
        if done and self.step < self.config.training.steps:
            self.stopping = True  # the others have finished without this group
            raise Stopped
        if stopping and not self.protocol.held and action.pause_s:
            raise Stopped
        if action.pause_s >= protocol.LONG_PAUSE:
            self.say_waiting(action.why)
        time.sleep(action.pause_s)
        started = time.perf_counter()
        with self.pulse.phase(self.times.ask + self.times.phase):
            patience = partial(self.pulse.phase, self.times.phase, self.times.exchange)  # of the ranks above 0
            said = self.ranks.wait_first(partial(self.quorum, action), self.times.heartbeat, patience)
        if "answer" not in said:
            self.say_retry(f"no answer from the lighthouse at {self.address}: {said['error']}")
            if stopping and not self.protocol.held:
                raise Stopped
            if said["gone"]:
                raise StorageError(f"no lighthouse at {self.address} for {self.times.lighthouse:g} s")
            return self.protocol.lost(said["error"])
        answer = protocol.Answer(said["key"], [protocol.Participant(**p) for p in said["answer"]])
        members = {p.name: [p.step, str(p.data.get("held", ""))] for p in answer.participants}
        self.events.emit("quorum", step=self.step + 1, key=answer.key, members=members, seconds=since(started))
        decided = self.protocol.answered(answer)
        self.say_plan(answer.key)
        return decided

    def quorum(self, action: protocol.Ask) -> dict[str, Any]:
        """Rank 0's call, as JSON for the others."""
        slow = threading.Timer(4 * self.times.heartbeat, self.say_slow, [self.pulse.beats])
        slow.start()
        try:
            answer = self.lighthouse.quorum(action.request, self.ranks.size)
            return {"key": answer.key, "answer": [vars(p) for p in answer.participants]}
        except (RuntimeError, TimeoutError, OSError) as e:
            # Wait until it has heard this group and its peers again, or it would answer one of them alone.
            heard = self.stopping or self.pulse.wait_beats(3, self.times.lighthouse)
            return {"error": first_line(e), "gone": not heard}
        finally:
            slow.cancel()

    def say_slow(self, beats: int) -> None:
        """The quorum takes long: tell why. `beats`: heard when the call began."""
        hears = "hears this group, and waits for more (its --min_replicas) or for one that fell silent"
        why = hears if self.pulse.beats > beats else "doesn't answer"
        self.say_waiting(f"the lighthouse at {self.address} {why}")

    def say_waiting(self, why: str) -> None:
        """Once a step."""
        if self.step != self.said_waiting:
            self.said_waiting = self.step
            self.say(f"step {self.step + 1}: waiting: {why}")

    def say_plan(self, key: str) -> None:
        """Emit the plan that a quorum led to, if it led to one."""
        if (run := self.protocol.run) is None:
            return
        self.first = run.active[0] == self.name
        held = set() if run.drop else self.protocol.held
        self.events.emit(
            "plan",
            step=self.step + 1,
            key=key,
            active=list(run.active),
            units=to_ranges(run.by[self.name] - held),
            held=to_ranges(held),
            drop=run.drop,
            connect=run.connect and run.exchange,
            exchange=run.exchange,
            reason=run.reason,
        )

    def meet(self, action: protocol.Connect) -> protocol.Action:
        """Connect to the active groups, each rank to the same rank of the others."""
        error = ""
        with self.pulse.phase(self.times.connect + self.times.phase):
            try:
                prefix = f"{action.key}/{self.ranks.rank}"
                self.plane.connect(action.store, prefix, action.rank, action.size, self.ports)
            except PlaneError as e:
                self.plane.cancel()
                error = str(e)
            error = self.ranks.error(error)
        if error:
            self.plane.cancel()
            self.say_retry(error)
            return self.protocol.failed(error)
        return self.protocol.connected()

    def prepare(self, action: protocol.Compute) -> None:
        """What comes before the units: drop the sums, serve those who are behind."""
        if action.drop:
            self.sums.clear()
        if not action.snapshot_for:
            self.server.snapshot = None
            return
        have, lineage = self.server.snapshot, self.protocol.window[self.step]
        if not have or (have.step, have.lineage) != (self.step, lineage):
            started = time.perf_counter()
            self.server.snapshot = transfer.take_snapshot(self.state(), self.step, lineage, self.save_facts())
            size, joiners = len(self.server.snapshot.body), list(action.snapshot_for)
            self.events.emit("snapshot", step=self.step, bytes=size, seconds=since(started), joiners=joiners)

    def heal(self, action: protocol.Heal) -> protocol.Action:
        """Take the whole state of a donor, each rank its part, or nothing."""
        started, t = time.perf_counter(), self.times
        self.plane.cancel()
        state, got, error = self.state(), None, ""
        with self.pulse.phase(t.phase):
            try:
                donor = json.loads(action.address)
                address, token = donor["ranks"][self.ranks.rank], job_token() or donor["token"]
                got = transfer.fetch(address, token, action.step, action.lineage, state, t.exchange, t.phase)
            except (transfer.TransferError, ValueError, LookupError, TypeError) as e:
                error = str(e) or type(e).__name__
            error = self.ranks.error(error)
        if error or got is None:
            self.events.emit("heal_failed", donor=action.donor, cause=error)
            return self.protocol.heal_failed(f"{action.donor}: {error}")
        checkpoint.install(state, got.tensors, action.donor)
        self.sums.clear()
        before, self.step = self.step, got.step
        self.skipped_in_a_row = int(got.facts["skipped_in_a_row"])
        size, took = sum(self.ranks.all(got.num_bytes)), since(started)
        self.events.emit("heal", step=self.step, from_step=before, donor=action.donor, bytes=size, seconds=took)
        self.say(f"healed from {action.donor} to step {self.step}")
        self.metrics.restart_clock()
        return self.protocol.healed(got.step, {int(s): h for s, h in got.facts["window"].items()})

    def retry(self, action: protocol.Action, cause: str) -> NoReturn:
        """Leave the process group at once, and end the attempt."""
        self.plane.cancel()
        self.say_retry(cause)
        self.end_attempt(action)

    def say_retry(self, cause: str) -> None:
        """An attempt failed; what is held stays."""
        held, seconds = to_ranges(self.protocol.held), since(self.attempt_at)
        self.events.emit("retry", step=self.step + 1, cause=cause, held=held, seconds=seconds)

    def end_attempt(self, action: protocol.Action) -> NoReturn:
        """Go on with another action."""
        self.next_action = action
        for p in self.params:  # settling may have set it already
            p.grad = None
        raise AttemptEnded

    # Limits and checks -----------------------------------------------------------------------------

    def unit_limit(self) -> float:
        """Seconds that a unit may take before this group counts as stuck: 3 times what is usual."""
        if len(self.unit_seconds) < 3:
            return self.times.first_unit
        return max(self.times.unit, 3 * max(self.unit_seconds))

    def arrival_limit(self) -> float:
        """Seconds to wait for all to arrive at the exchange: the slowest may have all units of the plan left."""
        if len(self.unit_seconds) < 3:
            return self.times.first_unit
        run = self.protocol.run
        most = max((len(units) for units in run.by.values()), default=1) if run else 1
        return self.times.exchange + 3 * most * statistics.median(self.unit_seconds)
