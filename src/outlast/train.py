"""`outlast train`, and `python -m outlast.train` for torchrun: one rank of a plain run or of one replica group.

Imports no torch until the config is read, so that help and errors come at once.
"""

import os
import sys
from collections.abc import Sequence

from outlast import saves
from outlast.classes import config_class, load_trainer
from outlast.cli import main
from outlast.config import (
    DEFAULT_TRAINER,
    Config,
    asked_trainer,
    check_config,
    load_config,
    new_run_dir,
    take_config_file,
    with_long_names,
    with_run_dir,
)
from outlast.parent import die_with_parent
from outlast.seat import UNDER_TORCHRUN, Seat

GROUP = "REPLICA_GROUP_ID"
"""The number of this group, where no flag gives it."""


def train_command(args: Sequence[str]) -> int:
    """`outlast train [--config FILE] [--section.key=value …]`. Returns the exit code.

    Raises:
        UserError: it can't be run; says why.
    """
    if UNDER_TORCHRUN in os.environ:
        die_with_parent(os.getppid())  # else a torchrun that is killed leaves its ranks behind
    file, rest = take_config_file(with_long_names(args))
    if number := os.environ.get(GROUP, ""):
        rest = [f"--fault_tolerance.replica_id={number}", *rest]  # a later flag wins
    seat = Seat.from_env()
    trainer = asked_trainer(file, rest)
    cls = Config if trainer == DEFAULT_TRAINER else config_class(load_trainer(trainer))
    config = load_config(file, rest, cls=cls, prog="outlast train", check=False)
    check_config(config, seat.size)
    if config.job.callbacks:
        from outlast.callbacks import load_callbacks

        load_callbacks(config.job.callbacks)  # refused before anything is made
    if not config.job.run_dir:
        config = with_run_dir(config, new_run_dir(file, shared=config.fault_tolerance.enable))  # rank 0's counts
    if seat.rank == 0:
        saves.make_run_dir(config.job.run_dir)
        print(f"run folder {config.job.run_dir}", flush=True)

    from outlast.rank import new_life, run_rank

    return run_rank(config, new_life())


if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
