"""The body of one rank's process: make the trainer, run it, end in good order."""

import os
import signal
import sys
import uuid
from types import FrameType

import torch

from outlast import saves
from outlast.config import Config
from outlast.errors import EXIT_FAILED, EXIT_OK, EXIT_STOPPED, StorageError, UserError
from outlast.events import EventLog
from outlast.trainer import Trainer


def new_life() -> str:
    """A name for one life of one process, never used before."""
    return uuid.uuid4().hex[:8]


def trainer_class(config: Config) -> type[Trainer]:
    """The trainer that the config asks for."""
    if not config.fault_tolerance.enable:
        return Trainer
    from outlast.ft.trainer import fault_tolerant

    return fault_tolerant(Trainer)


def run_rank(config: Config, life: str) -> int:
    """Train, and return the exit code.

    Args:
        config: checked, with `job.run_dir` set.
        life: from `new_life`.
    """
    done = saves.done_marker(config.job.run_dir)
    if done and done.get("step") == config.training.steps:
        print(f"{config.job.run_dir} is finished (step {done['step']}): nothing to do", flush=True)
        return EXIT_OK
    torch.set_num_threads(config.training.threads or len(os.sched_getaffinity(0)))
    group = config.fault_tolerance.replica_id if config.fault_tolerance.enable else 0
    events: EventLog | None = None
    trainer: Trainer | None = None
    try:
        events = EventLog(config.job.run_dir, f"g{group}.{life}", group=group, life=life, rank=0)
        trainer = trainer_class(config)(config, events)
        _stop_on_signal(trainer)
        trainer.train()
        code = EXIT_STOPPED if trainer.step < config.training.steps else EXIT_OK
        reason = "stopped as asked" if code else "finished"
    except (UserError, OSError) as e:
        code = e.exit_code if isinstance(e, UserError) else EXIT_FAILED
        reason = str(e)
        print(f"outlast: {e}", file=sys.stderr, flush=True)
    if events is not None:
        try:
            events.emit("exit", code=code, step=trainer.step if trainer else 0, reason=reason)
        except StorageError as e:
            print(f"outlast: {e}", file=sys.stderr, flush=True)
    return code


def _stop_on_signal(trainer: Trainer) -> None:
    def stop(number: int, frame: FrameType | None) -> None:
        if trainer.stopping and number == signal.SIGINT:
            raise KeyboardInterrupt
        trainer.stopping = True
        os.write(1, b"stopping after this step\n")  # print isn't safe inside a signal handler

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
