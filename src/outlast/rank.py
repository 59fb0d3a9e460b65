"""The body of one rank's process: make the trainer, run it, end in good order."""

import ctypes
import dataclasses
import os
import signal
import sys
import uuid
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from outlast import saves
from outlast.classes import load_trainer
from outlast.config import Config, FaultTolerance, host_and_port, lighthouse_address, with_run_dir
from outlast.errors import EXIT_FAILED, EXIT_OK, EXIT_STOPPED, ConfigError, StorageError, UserError, tell
from outlast.events import EventLog, NoEvents
from outlast.ranks import Ranks, first_line, pick_device
from outlast.seat import UNDER_TORCHRUN, Seat
from outlast.sockets import address_of, is_here, is_loopback, keep_to, listen
from outlast.times import Times
from outlast.trainer import Trainer


def new_life() -> str:
    """A name for one life of one process, never used before."""
    return uuid.uuid4().hex[:8]


def trainer_class(config: Config) -> type[Trainer]:
    """The trainer that the config asks for."""
    base = load_trainer(config.job.trainer)
    if not config.fault_tolerance.enable:
        return base
    from outlast.ft.trainer import fault_tolerant

    return fault_tolerant(base)


def run_rank(config: Config, life: str) -> int:
    """Train, and return the exit code.

    Args:
        config: checked, with `job.run_dir` set.
        life: from `new_life`.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's: ranks on this machine
    torch.set_num_threads(config.training.threads or max(1, len(os.sched_getaffinity(0)) // local))
    _keep_memory()
    group = config.fault_tolerance.replica_id if config.fault_tolerance.enable else 0
    events: EventLog | None = None
    trainer: Trainer | None = None
    try:
        seat = Seat.from_env()
        config = on_its_network(config, seat)
        ranks = Ranks(seat, pick_device(config.training.device, seat.local_rank), Times.of(config.fault_tolerance).lost)
        life, run_dir = ranks.first([life, config.job.run_dir])
        config = with_run_dir(config, run_dir)
        who: dict[str, Any] = {"group": group, "life": life, "rank": ranks.rank}
        events = EventLog(config.job.run_dir, f"g{group}.{life}", **who) if ranks.rank == 0 else NoEvents(**who)
        trainer = trainer_class(config)(config, events, ranks)
        _stop_on_signal(trainer)
        if done := ranks.first(saves.done_marker(config.job.run_dir)):
            code, reason = EXIT_OK, _nothing_to_do(trainer, done)
            trainer.say(reason)
        else:
            trainer.train()
            finished = trainer.step == config.training.steps or ranks.first(saves.done_marker(config.job.run_dir))
            code, reason = (EXIT_OK, "finished") if finished else (EXIT_STOPPED, "stopped as asked")
            if UNDER_TORCHRUN in os.environ:  # only one of the groups said more than how it started
                trainer.say(f"{reason}: step {trainer.step}/{config.training.steps}")
        ranks.close()
    except (UserError, OSError, MemoryError) as e:
        code = e.exit_code if isinstance(e, UserError) else EXIT_FAILED
        reason = str(e)
        tell(reason)
    except RuntimeError as e:
        if not _is_loss_of_a_rank(e):
            raise
        code, reason = EXIT_FAILED, f"another rank of this group is gone or stuck: {first_line(e)}"
        tell(reason)
    if events is not None:
        try:
            events.emit("exit", code=code, step=trainer.step if trainer else 0, reason=reason)
        except StorageError as e:
            print(f"outlast: {e}", file=sys.stderr, flush=True)
    return code


def _keep_memory() -> None:
    """Have malloc keep what is freed: a step frees and takes the same sizes, and each page given back is a fault later.

    Of glibc only, as `mallopt(3)` has it; elsewhere nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and mallopt(_M_MMAP_THRESHOLD, 1 << 30):  # refused by old ones, for which the other is worse
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def on_its_network(config: Config, seat: Seat) -> Config:
    """Keep all connections to the configured address; a plain group on one machine to loopback.

    Raises:
        UserError: the address can't be that of a group: not there, or out of reach for the others.
    """
    ft = config.fault_tolerance
    if ft.interface:
        address = address_of(ft.interface)
        if ft.host not in (FaultTolerance.host, address):
            raise ConfigError(
                f"fault_tolerance.host = {ft.host!r}, and fault_tolerance.interface = {ft.interface!r} has {address}: "
                "expected one of the two settings"
            )
        ft = dataclasses.replace(ft, host=address)
    if ft.enable:
        listen(ft.host).close()
        lighthouse = lighthouse_address(ft)
        if is_loopback(ft.host) and is_here(host_and_port(lighthouse)[0]) is False:
            raise ConfigError(
                f"fault_tolerance.host = {ft.host!r} is loopback, and the lighthouse at {lighthouse} is on another "
                "machine: groups there couldn't reach this one; set fault_tolerance.host or fault_tolerance.interface"
            )
    if ft.enable or os.environ.get("LOCAL_WORLD_SIZE", str(seat.size)) == str(seat.size):
        keep_to(ft.host)
    return dataclasses.replace(config, fault_tolerance=ft)


def _is_loss_of_a_rank(error: RuntimeError) -> bool:
    """Whether it came out of a collective: torch has no class of its own for Gloo's errors."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error) or "Gloo" in str(error)


def _nothing_to_do(trainer: Trainer, done: dict[str, Any]) -> str:
    """The run was finished before this process started.

    Raises:
        UserError: another run than the one that is asked for.
    """
    there, here = done.get("trajectory", {}), trainer.trajectory()
    differs = [k for k in here if there.get(k) != here[k]]
    if differs:
        k = differs[0]
        raise UserError(
            f"{trainer.run_dir} holds a finished run with {k} = {there.get(k)!r}, this one has {here[k]!r}; give "
            "another --job.run_dir"
        )
    return f"{trainer.run_dir} is finished (step {done.get('step')}): nothing to do"


def _stop_on_signal(trainer: Trainer) -> None:
    def stop(number: int, frame: FrameType | None) -> None:
        if trainer.stopping and number == signal.SIGINT:
            raise KeyboardInterrupt
        trainer.stopping = True
        os.write(1, b"stopping after this step\n")  # print isn't safe inside a signal handler

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
