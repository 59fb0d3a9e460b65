"""What `outlast launch` is asked: its own options and the run's config. Imports no torch."""

import argparse
import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outlast.config import (
    DEFAULT_TRAINER,
    Config,
    asked_trainer,
    check_config,
    last_value,
    load_config,
    take_config_file,
    value_in_file,
    with_long_names,
    with_run_dir,
)
from outlast.config.own import with_options
from outlast.errors import ConfigError
from outlast.launch import chaos
from outlast.launch.asking import Asked, show_help

DEFAULT_GROUPS = 3
MAX_GROUPS = 1000
MAX_RANKS = 1000


@dataclass(frozen=True)
class LaunchConfig(Config):
    """Options of `outlast launch`, beside the sections of the run."""

    config: str = ""
    """TOML file of the run. Left out: the one in --run-dir if a run is there, else the defaults."""
    groups: int | None = None
    """Replica groups to run on this machine. Left out: as many as before when a run is resumed by its
    --run-dir alone, else fault_tolerance.group_size if that is given, else 3."""
    ranks_per_group: int | None = None
    """Processes that share one copy of the model, the same as --parallelism.data_parallel_shard_degree. Left out:
    as many as before when a run is resumed, else 1."""
    run_dir: str = ""
    """Folder of the run, the same as --job.run_dir. One with a run in it is resumed. Left out: a new one,
    runs/NAME-TIME."""
    chaos: str = ""
    """Faults to make, for example "kill every 10s" or "kill g1 at step 30; stop 1 every 8s for 2s";
    docs/launch.md has the grammar."""
    chaos_seed: int = 0
    """Of the random choices of --chaos."""


@dataclass(frozen=True)
class Options:
    """A launch that was asked for, checked.

    Attributes:
        config: of the run, fault-tolerant, with `group_size` set.
        groups: how many to start.
        ranks: of each group.
        run_dir: folder; empty: choose one.
        config_file: it came from, if any.
        schedule: faults to make.
        reads_corpus: its trainer reads the corpus that `data.path` names.
    """

    config: Config
    groups: int
    ranks: int
    run_dir: str
    config_file: str | None
    schedule: chaos.Schedule
    reads_corpus: bool = True


def read_options(args: Sequence[str]) -> Options:
    """Read the arguments of `outlast launch`. `--help` prints them all and exits.

    Raises:
        ConfigError: they can't be run; says why.
    """
    file, args = take_config_file(with_long_names(args))
    size_given = (
        last_value(args, "fault_tolerance.group_size") is not None
        or value_in_file(file, "fault_tolerance", "group_size") is not None
    )
    run_dir = last_value(args, "run_dir") or last_value(args, "job.run_dir") or ""
    resumes = file is None and bool(run_dir) and (Path(run_dir) / "config.toml").exists()
    if resumes:
        file = str(Path(run_dir) / "config.toml")
    spec = asked_trainer(file, args)
    if spec != DEFAULT_TRAINER and {"-h", "--help"} & set(args):
        raise SystemExit(show_help(spec))
    with Asked(spec) as trainer:
        return _complete(args, file, trainer, resumes=resumes, size_given=size_given)


def _complete(args: Sequence[str], file: str | None, trainer: Asked, *, resumes: bool, size_given: bool) -> Options:
    """Read the config into the trainer's class, and fill in what launch sets."""
    cls = with_options(LaunchConfig, trainer.config_class)
    asked = load_config(file, args, cls=cls, prog="outlast launch", check=False)
    if asked.run_dir and asked.job.run_dir and Path(asked.run_dir).absolute() != Path(asked.job.run_dir).absolute():
        raise ConfigError(f"--run-dir {asked.run_dir} contradicts job.run_dir = {asked.job.run_dir}: give one of them")
    size = asked.fault_tolerance.group_size
    groups = asked.groups if asked.groups is not None else size if size_given or resumes else DEFAULT_GROUPS
    if not 1 <= groups <= MAX_GROUPS:
        raise ConfigError(f"--groups {groups}: expected 1 to {MAX_GROUPS}")
    if size_given and groups != size:
        raise ConfigError(
            f"--groups {groups} contradicts fault_tolerance.group_size = {size}: launch sets it, leave it out"
        )
    degree = asked.parallelism.data_parallel_shard_degree
    ranks = asked.ranks_per_group if asked.ranks_per_group is not None else max(degree, 1)
    if not 1 <= ranks <= MAX_RANKS:
        raise ConfigError(f"--ranks-per-group {ranks}: expected 1 to {MAX_RANKS}")
    degree_given = last_value(args, "parallelism.data_parallel_shard_degree") is not None
    if degree not in (-1, ranks) and not (resumes and not degree_given):
        raise ConfigError(
            f"--ranks-per-group {ranks} contradicts parallelism.data_parallel_shard_degree = {degree}: launch sets it, "
            "leave it out"
        )
    sections = {f.name: getattr(asked, f.name) for f in dataclasses.fields(trainer.config_class)}
    sections["fault_tolerance"] = dataclasses.replace(asked.fault_tolerance, enable=True, group_size=groups)
    sections["parallelism"] = dataclasses.replace(asked.parallelism, data_parallel_shard_degree=ranks)
    config = trainer.config_class(**sections)
    check_config(config, ranks)
    trainer.check(config)
    schedule = chaos.parse(asked.chaos, asked.chaos_seed)
    return Options(config, groups, ranks, asked.run_dir or asked.job.run_dir, file, schedule, trainer.reads_corpus)


def group_config(config: Config, number: int, *, run_dir: Path, lighthouse: str, threads: int) -> Config:
    """The config of one group's rank."""
    return dataclasses.replace(
        with_run_dir(config, str(run_dir)),
        training=dataclasses.replace(config.training, threads=threads),
        fault_tolerance=dataclasses.replace(config.fault_tolerance, replica_id=number, lighthouse=lighthouse),
    )


def threads_per_rank(config: Config, ranks: int) -> int:
    """`training.threads`, or a fair share of the cores that this process may use among so many ranks."""
    return config.training.threads or max(1, len(os.sched_getaffinity(0)) // ranks)


@dataclass(frozen=True)
class JoinOptions:
    """What `outlast join` is asked."""

    run_dir: Path
    groups: int


def read_join_options(args: Sequence[str]) -> JoinOptions:
    """Read the arguments of `outlast join`.

    Raises:
        ConfigError: they can't be right; says why.
    """
    parser = argparse.ArgumentParser(
        "outlast join",
        description="Add replica groups to a running `outlast launch`.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
    parser.add_argument("--groups", type=int, default=1, metavar="N", help="how many to add (default: 1)")
    read = parser.parse_args(args)
    if not 1 <= read.groups <= MAX_GROUPS:
        raise ConfigError(f"--groups {read.groups}: expected 1 to {MAX_GROUPS}")
    if not read.run.is_dir():
        raise ConfigError(f"{read.run}: no such run folder; give the one that `outlast launch` printed")
    return JoinOptions(read.run.absolute(), read.groups)
