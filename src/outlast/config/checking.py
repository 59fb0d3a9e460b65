"""Looking at a config as a whole, before anything starts."""

import dataclasses
import math

from outlast.config.sections import Config, leaf_values
from outlast.errors import ConfigError, UserError


def check_config(c: Config, ranks: int = 1) -> None:
    """Refuse a config that can't be run, before anything starts. The corpus and addresses are looked at
    by those that open them.

    Args:
        c: the whole config.
        ranks: processes of this group.

    Raises:
        ConfigError: with the first rule that is broken.
    """
    t, f = c.training, c.fault_tolerance
    for name, value in leaf_values(c):
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{name} = {value}: expected a finite number")
        limit = _LIMITS.get(name, 2**31 if isinstance(value, int) else math.inf)
        if isinstance(value, int | float) and value >= limit:
            raise ConfigError(f"{name} = {value}: expected less than {limit}")
        if isinstance(value, str) and any(0xD800 <= ord(c) <= 0xDFFF for c in value):
            raise ConfigError(f"{name} = {value!r}: expected UTF-8 text")
    for name, value in [
        ("training.steps", t.steps),
        ("training.seq_len", t.seq_len),
        ("training.local_batch_size", t.local_batch_size),
        ("training.global_batch_size", t.global_batch_size),
        ("training.max_skipped_steps", t.max_skipped_steps),
        ("optimizer.lr", c.optimizer.lr),
        ("optimizer.eps", c.optimizer.eps),
        ("checkpoint.interval", c.checkpoint.interval),
        ("fault_tolerance.group_size", f.group_size),
        ("fault_tolerance.min_replica_size", f.min_replica_size),
        ("metrics.log_freq", c.metrics.log_freq),
    ]:
        if not value > 0:
            raise ConfigError(f"{name} = {value}: expected more than 0")
    for name, value in [
        ("training.max_norm", t.max_norm),
        ("training.threads", t.threads),
        ("training.unit_pause_ms", t.unit_pause_ms),
        ("training.seed", t.seed),
        ("optimizer.weight_decay", c.optimizer.weight_decay),
        ("lr_scheduler.warmup_steps", c.lr_scheduler.warmup_steps),
        ("checkpoint.keep_latest_k", c.checkpoint.keep_latest_k),
        ("fault_tolerance.replica_id", f.replica_id),
        ("metrics.digest_every", c.metrics.digest_every),
        ("metrics.evaluate_every", c.metrics.evaluate_every),
    ]:
        if not value >= 0:
            raise ConfigError(f"{name} = {value}: expected 0 or more")
    for name, value in [("optimizer.beta1", c.optimizer.beta1), ("optimizer.beta2", c.optimizer.beta2)]:
        if not 0 <= value < 1:
            raise ConfigError(f"{name} = {value}: expected at least 0 and less than 1")
    if not 0 <= c.lr_scheduler.min_lr_factor <= 1:
        raise ConfigError(f"lr_scheduler.min_lr_factor = {c.lr_scheduler.min_lr_factor}: expected 0 to 1")
    degree = c.parallelism.data_parallel_shard_degree
    if degree not in (-1, ranks):
        raise ConfigError(
            f"parallelism.data_parallel_shard_degree = {degree}, and the group has {ranks} rank{'s' * (ranks > 1)}: "
            f"expected {ranks}, or -1 for as many as there are"
        )
    unit = t.local_batch_size * ranks
    if t.global_batch_size % unit:
        what = f"training.local_batch_size = {t.local_batch_size}" + (f" x {ranks} ranks" if ranks > 1 else "")
        raise ConfigError(
            f"training.global_batch_size = {t.global_batch_size} is not a multiple of the work unit, "
            f"{what} sequences; nearest: {max(1, round(t.global_batch_size / unit)) * unit}"
        )
    if c.units(ranks) > MAX_UNITS:
        raise ConfigError(
            f"{c.units(ranks)} work units a step (training.global_batch_size / local_batch_size); at most {MAX_UNITS}: "
            "raise training.local_batch_size"
        )
    if f.enable:
        _check_fault_tolerance(c, ranks)
    for section in dataclasses.fields(c):
        check_section(c, section.name)


def check_section(c: Config, name: str) -> None:
    """Let a section of a user's own look at its values: its `check()`, if it has one, raises for bad ones.

    Raises:
        ConfigError: it did.
    """
    check = getattr(getattr(c, name), "check", None)
    if not callable(check):
        return
    try:
        check()
    except UserError as e:
        raise ConfigError(str(e)) from None
    except Exception as e:
        kind = "" if isinstance(e, ValueError) else f"{type(e).__name__}: "
        raise ConfigError(f"[{name}]: {kind}{e}") from None


_LIMITS = {"training.threads": 4096, "training.unit_pause_ms": 86_400_000, "training.seed": 2**63}

MAX_UNITS = 10_000
"""Work units a step: what the lighthouse's 4 MiB messages and the sums' headroom are sized for."""


def _check_fault_tolerance(c: Config, ranks: int) -> None:
    f = c.fault_tolerance
    if c.units(ranks) < f.group_size:
        raise ConfigError(
            f"{c.units(ranks)} work units a step for fault_tolerance.group_size = {f.group_size} groups: some would "
            "have nothing to do; lower training.local_batch_size or raise training.global_batch_size"
        )
    if f.min_replica_size > f.group_size:
        raise ConfigError(
            f"fault_tolerance.min_replica_size = {f.min_replica_size} is more than group_size = {f.group_size}: "
            "nothing would ever be committed"
        )
    if f.heartbeat_timeout_ms < 100:
        raise ConfigError(f"fault_tolerance.heartbeat_timeout_ms = {f.heartbeat_timeout_ms}: expected at least 100")
    for name in ("process_group_timeout_ms", "join_timeout_ms"):
        value = getattr(f, name)
        if value is not None and value < 2 * f.heartbeat_timeout_ms:
            raise ConfigError(
                f"fault_tolerance.{name} = {value} contradicts heartbeat_timeout_ms = {f.heartbeat_timeout_ms}: "
                f"expected at least twice that, {2 * f.heartbeat_timeout_ms}, or leave it out"
            )
