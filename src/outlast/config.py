"""The configuration of a run: dataclasses, TOML, and `--section.key=value`.

One parser serves all: a TOML file is turned into arguments that stand before the user's own, and
`tyro` reads them into the dataclasses. So a TOML key and a flag have the same name, type and
check, and the user's flag wins. `check_config` then looks at the whole before anything starts.

Imports no torch: `outlast --help` and `launch` stay quick.
"""

import contextlib
import dataclasses
import difflib
import io
import math
import os
import re
import time
import tomllib
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from outlast.errors import ConfigError

TRAJECTORY: dict[str, Any] = {"trajectory": True}
"""Field metadata: the value decides which weights come out, so all groups and resumes must agree on it."""


def trajectory(default: Any) -> Any:
    """A field that is part of the trajectory (see `TRAJECTORY`)."""
    return field(default=default, metadata=TRAJECTORY)


@dataclass(frozen=True)
class Job:
    """Where the run lives."""

    run_dir: str = ""
    """Folder of the run: events, logs, saved weights, curves. Empty: a new one, runs/NAME-TIME. An
    existing one is resumed."""


@dataclass(frozen=True)
class Model:
    """What is trained. Sizes left at 0 come from the flavour."""

    name: Literal["llama3"] = trajectory("llama3")
    """Model family."""
    flavor: str = trajectory("debug")
    """Named size: demo, debug, 100M, 1B, 8B, 70B, 405B."""
    vocab_size: int = trajectory(0)
    """Rows of the embedding. 0: the corpus' vocabulary, rounded up to a multiple of 64."""
    dim: int = trajectory(0)
    """Width of the residual stream."""
    n_layers: int = trajectory(0)
    """Number of blocks."""
    n_heads: int = trajectory(0)
    """Query heads."""
    n_kv_heads: int = trajectory(0)
    """Key and value heads (grouped-query attention)."""
    ffn_dim: int = trajectory(0)
    """Hidden size of the SwiGLU feed-forward."""
    tie_embeddings: Literal["flavor", "yes", "no"] = trajectory("flavor")
    """Share the embedding with the output head."""


@dataclass(frozen=True)
class Data:
    """What is read."""

    path: str = ""
    """A folder made by `outlast prepare`. Empty: the Python standard library's source, prepared on first
    use into a cache."""
    tokenizer: str = ""
    """A Hugging Face tokenizers JSON that the corpus must have been made with. Empty: whatever it says."""


@dataclass(frozen=True)
class Training:
    """The steps."""

    steps: int = trajectory(200)
    """Optimizer updates in the whole run."""
    seq_len: int = trajectory(256)
    """Tokens a sequence."""
    local_batch_size: int = trajectory(4)
    """Sequences that one rank puts through the model at a time (one work unit = this x ranks a group)."""
    global_batch_size: int = trajectory(24)
    """Sequences a step, whoever is alive. Must be a multiple of the work unit."""
    accumulation: Literal["exact", "float"] = trajectory("exact")
    """How gradients of work units are added: "exact" in 64-bit integers, the same bits in any order;
    "float" in fp32, a little faster, the same samples but rounding that depends on who was there."""
    mixed_precision_param: Literal["float32", "bfloat16"] = trajectory("float32")
    """Type of the matrix products (autocast); weights, sums and optimizer stay float32."""
    max_norm: float = trajectory(1.0)
    """Clip the gradient to this global L2 norm. 0: never."""
    seed: int = trajectory(0)
    """Of the initial weights and the order of the data."""
    max_skipped_steps: int = trajectory(10)
    """End the run after this many updates in a row were skipped because a gradient wasn't finite."""
    threads: int = 0
    """CPU threads a rank. 0: the cores, shared among the ranks on this machine."""
    unit_pause_ms: float = 0.0
    """Sleep added to each work unit, in ms: paces a tiny model when timing is measured."""


@dataclass(frozen=True)
class Optimizer:
    """AdamW."""

    name: Literal["AdamW"] = trajectory("AdamW")
    """Optimizer."""
    lr: float = trajectory(8e-4)
    """Peak learning rate."""
    beta1: float = trajectory(0.9)
    """Decay of the first moment."""
    beta2: float = trajectory(0.95)
    """Decay of the second moment."""
    eps: float = trajectory(1e-8)
    """Added to the denominator."""
    weight_decay: float = trajectory(0.1)
    """Decoupled weight decay."""


@dataclass(frozen=True)
class LRScheduler:
    """Learning rate over the steps: linear warm-up, then decay to the last step."""

    warmup_steps: int = trajectory(20)
    """Steps of linear warm-up."""
    decay_type: Literal["linear", "cosine", "constant"] = trajectory("cosine")
    """Shape after the warm-up."""
    min_lr_factor: float = trajectory(0.1)
    """The last step's learning rate, as a share of the peak."""


@dataclass(frozen=True)
class Checkpoint:
    """Saved weights."""

    enable: bool = True
    """Save weights, optimizer and step, and resume from the newest whole save."""
    interval: int = 100
    """Steps between saves; the last step is always saved."""
    keep_latest_k: int = 3
    """Saves kept. 0: all."""


@dataclass(frozen=True)
class FaultTolerance:
    """Several replica groups. The times below follow from heartbeat_timeout_ms unless given."""

    enable: bool = False
    """Train as one of several replica groups."""
    replica_id: int = 0
    """Number of this group."""
    group_size: int = 2
    """Replica groups expected. More may join, fewer may be alive."""
    min_replica_size: int = 1
    """Commit nothing with fewer groups than this."""
    process_group: Literal["gloo"] = "gloo"
    """What carries sums between groups."""
    process_group_timeout_ms: int | None = None
    """Longest a step's exchange may take. Default: 20 heartbeat timeouts."""
    heartbeat_timeout_ms: int = 500
    """A group silent for this long is out. The one setting that the other times follow from; the
    lighthouse must be started with the same value."""
    join_timeout_ms: int | None = None
    """How long the lighthouse waits for a live group that doesn't ask. Default: 20 heartbeat timeouts;
    the lighthouse must be started with the same value."""
    lighthouse: str = ""
    """http://host:port of the lighthouse. Default: TORCHFT_LIGHTHOUSE, else http://localhost:29510."""
    host: str = "127.0.0.1"
    """Address that this group's ports bind to and are reached at."""


@dataclass(frozen=True)
class Metrics:
    """What is reported."""

    log_freq: int = 10
    """Steps between log lines."""
    digest_every: int = 10
    """Steps between SHA-256 digests over weights and optimizer state. 0: at the end only."""
    enable_tensorboard: bool = True
    """Write curves for TensorBoard under the run folder."""


@dataclass(frozen=True)
class Config:
    """A whole run."""

    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    training: Training = field(default_factory=Training)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
    metrics: Metrics = field(default_factory=Metrics)

    def units(self, ranks: int = 1) -> int:
        """Work units a step, M."""
        return self.training.global_batch_size // (self.training.local_batch_size * ranks)


C = TypeVar("C", bound=Config)


# --- Reading ---------------------------------------------------------------------------------------


def load_config(
    file: str | Path | None, args: Sequence[str] = (), cls: type[C] = Config, prog: str = "outlast", check: bool = True
) -> C:
    """Read a TOML file and `--section.key=value` arguments into a checked config.

    Args:
        file: TOML with one table a section, or None for the defaults.
        args: the user's arguments; they win over the file. `--help` prints every field and exits.
        cls: `Config`, or a subclass with sections of one's own.
        prog: command shown in `--help`.
        check: look at the whole; a command that completes the config first does it then.

    Raises:
        ConfigError: naming the key, what was found, what was expected and the nearest right name.
    """
    fields = _flat_fields(cls)
    read = _parse([*_toml_args(file, cls), *_normal_args(args, fields)], cls, prog)
    if check:
        check_config(read)
    return read


def _parse(args: list[str], cls: type[C], prog: str) -> C:
    import tyro

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(cls, args=args, prog=prog, use_underscores=True)
    except SystemExit as end:
        if not end.code:
            raise
        # tyro draws a box; one line is what a log and a person in a hurry can use.
        words = re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─━┃┏┓┗┛]", " ", said.getvalue())
        raise ConfigError("config: " + " ".join(words.split())) from None


def _flat_fields(cls: type) -> dict[str, Any]:
    """`section.key` -> type, for every leaf."""
    hints = typing.get_type_hints(cls)
    out: dict[str, Any] = {}
    for f in dataclasses.fields(cls):
        kind = hints[f.name]
        if dataclasses.is_dataclass(kind):
            inner = typing.get_type_hints(kind)
            out |= {f"{f.name}.{g.name}": inner[g.name] for g in dataclasses.fields(kind)}
        else:
            out[f.name] = kind
    return out


def _nearest(name: str, known: Sequence[str]) -> str:
    same = [k for k in known if k.rpartition(".")[2] == name.rpartition(".")[2]]  # a right key in a wrong section
    near = difflib.get_close_matches(name, same, 1, 0) or difflib.get_close_matches(name, known, 1, 0.5)
    return f"; did you mean {near[0]}?" if near else "; `outlast train --help` lists all"


def _options(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _fits(value: Any, kind: Any) -> bool:
    for k in _options(kind):
        if typing.get_origin(k) is Literal:
            if value in typing.get_args(k):
                return True
        elif k is float:
            if isinstance(value, int | float) and not isinstance(value, bool):
                return True
        elif typing.get_origin(k) in (tuple, list):
            if isinstance(value, list):
                return True
        elif type(value) is k:
            return True
    return False


def _describe(kind: Any) -> str:
    names = []
    for k in _options(kind):
        if typing.get_origin(k) is Literal:
            names.append("one of " + ", ".join(repr(v) for v in typing.get_args(k)))
        elif k is not type(None):
            names.append(getattr(k, "__name__", str(k)))
    return " or ".join(names)


def _toml_args(file: str | Path | None, cls: type) -> list[str]:
    if file is None:
        return []
    try:
        text = Path(file).read_text()
    except (OSError, UnicodeDecodeError) as e:
        why = getattr(e, "strerror", None) or "it isn't UTF-8 text"
        raise ConfigError(f"config file {file}: {why}; give the path of a TOML file") from None
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"config file {file}: not valid TOML: {e}") from None
    known = _flat_fields(cls)
    sections = {k.split(".")[0] for k in known if "." in k}
    out: list[str] = []
    for key, value in _leaves(tables, sections, file):
        if key not in known:
            raise ConfigError(f"config file {file}: unknown key {key}{_nearest(key, list(known))}")
        if not _fits(value, known[key]):
            raise ConfigError(
                f"config file {file}: {key} = {value!r} has the wrong type or value; expected {_describe(known[key])}"
            )
        out += _normal_args([f"--{key}={_flag_text(value)}"], known)
    return out


def _flag_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _leaves(tables: dict[str, Any], sections: set[str], file: str | Path) -> Iterator[tuple[str, Any]]:
    for name, value in tables.items():
        if isinstance(value, dict):
            if name not in sections:
                raise ConfigError(f"config file {file}: unknown section [{name}]{_nearest(name, sorted(sections))}")
            yield from ((f"{name}.{k}", v) for k, v in value.items())
        elif name in sections:
            raise ConfigError(f"config file {file}: {name} = {value!r} should be a table, [{name}]")
        else:
            yield name, value


def _normal_args(args: Sequence[str], known: dict[str, Any]) -> list[str]:
    """Refuse unknown flags with the nearest name; spell booleans as tyro wants them.

    `--x.enable`, `--x.enable=true`, `--x.enable true` and `--x.no-enable` all work.
    """
    out: list[str] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if arg in ("--help", "-h"):
            out.append(arg)
            continue
        if not arg.startswith("--"):
            if not out or "=" in out[-1]:
                raise ConfigError(f"unexpected argument {arg!r}; settings are given as --section.key=value")
            out.append(arg)
            continue
        name, eq, value = arg[2:].partition("=")
        name = name.replace("-", "_")
        positive = re.sub(r"(^|\.)no_(?=[^.]+$)", r"\1", name)
        if known.get(positive) is bool:
            if not eq and rest and rest[0].lower() in ("true", "false"):
                value = rest.pop(0)
            value = value.lower() or "true"
            if value not in ("true", "false"):
                raise ConfigError(f"--{name}={value}: expected true or false")
            on = (value == "true") == (positive == name)
            section, _, leaf = positive.rpartition(".")
            dotted = f"{section}." if section else ""
            out.append(f"--{dotted}{'' if on else 'no-'}{leaf}")
            continue
        if name not in known:
            raise ConfigError(f"unknown setting --{name}{_nearest(name, list(known)).replace('mean ', 'mean --')}")
        if not eq:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"--{name}: a value is missing; write --{name}=VALUE")
            value = rest.pop(0)
        out.append(f"--{name}={value}")
    return out


# --- Checking --------------------------------------------------------------------------------------


def check_config(c: Config) -> None:
    """Refuse a config that can't be run, before anything starts. The corpus and addresses are looked at
    by those that open them.

    Raises:
        ConfigError: with the first rule that is broken.
    """
    t, f = c.training, c.fault_tolerance
    for name, value in _leaf_values(c):
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
    ]:
        if not value >= 0:
            raise ConfigError(f"{name} = {value}: expected 0 or more")
    for name, value in [("optimizer.beta1", c.optimizer.beta1), ("optimizer.beta2", c.optimizer.beta2)]:
        if not 0 <= value < 1:
            raise ConfigError(f"{name} = {value}: expected at least 0 and less than 1")
    if not 0 <= c.lr_scheduler.min_lr_factor <= 1:
        raise ConfigError(f"lr_scheduler.min_lr_factor = {c.lr_scheduler.min_lr_factor}: expected 0 to 1")
    if t.global_batch_size % t.local_batch_size:
        raise ConfigError(
            f"training.global_batch_size = {t.global_batch_size} is not a multiple of the work unit, "
            f"training.local_batch_size = {t.local_batch_size} sequences; nearest: "
            f"{max(1, round(t.global_batch_size / t.local_batch_size)) * t.local_batch_size}"
        )
    if c.units() > MAX_UNITS:
        raise ConfigError(
            f"{c.units()} work units a step (training.global_batch_size / local_batch_size); at most {MAX_UNITS}: "
            "raise training.local_batch_size"
        )
    if f.enable:
        _check_fault_tolerance(c)


_LIMITS = {"training.threads": 4096, "training.unit_pause_ms": 86_400_000, "training.seed": 2**63}

MAX_UNITS = 10_000
"""Work units a step: what the lighthouse's 4 MiB messages and the sums' headroom are sized for."""


def _check_fault_tolerance(c: Config) -> None:
    f = c.fault_tolerance
    if c.units() < f.group_size:
        raise ConfigError(
            f"{c.units()} work units a step for fault_tolerance.group_size = {f.group_size} groups: some would have "
            "nothing to do; lower training.local_batch_size or raise training.global_batch_size"
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


def lighthouse_address(f: FaultTolerance) -> str:
    """Where the lighthouse is: the config's, the environment's, or the field's default.

    Raises:
        ConfigError: it isn't http://host:port.
    """
    address = f.lighthouse or os.environ.get("TORCHFT_LIGHTHOUSE") or "http://localhost:29510"
    host_and_port(address)
    return address


def job_token() -> str:
    """The job's secret, `OUTLAST_TOKEN`.

    Raises:
        ConfigError: it isn't set.
    """
    token = os.environ.get("OUTLAST_TOKEN", "")
    if not token:
        raise ConfigError(
            "OUTLAST_TOKEN isn't set: give all groups of the job the same secret, for example "
            "OUTLAST_TOKEN=$(python3 -c 'import secrets; print(secrets.token_hex(16))'); `outlast launch` sets it"
        )
    return token


def host_and_port(address: str) -> tuple[str, int]:
    """`http://host:port` -> its host and port.

    Raises:
        ConfigError: it isn't that.
    """
    try:
        parts = urlsplit(address)
        if parts.scheme == "http" and parts.hostname and parts.port:
            return parts.hostname, parts.port
    except ValueError:
        pass
    raise ConfigError(f"lighthouse address {address!r}: expected http://host:port")


def _leaf_values(c: Config) -> Iterator[tuple[str, Any]]:
    for section in dataclasses.fields(c):
        part = getattr(c, section.name)
        for f in dataclasses.fields(part) if dataclasses.is_dataclass(part) else ():
            yield f"{section.name}.{f.name}", getattr(part, f.name)


def trajectory_fields(c: Config) -> dict[str, Any]:
    """`section.key` -> value of every field that decides which weights come out."""
    out: dict[str, Any] = {}
    for section in dataclasses.fields(c):
        part = getattr(c, section.name)
        for f in dataclasses.fields(part) if dataclasses.is_dataclass(part) else ():
            if f.metadata.get("trajectory"):
                out[f"{section.name}.{f.name}"] = getattr(part, f.name)
    return out


def to_toml(c: Config) -> str:
    """The config as TOML that `load_config` reads back to an equal one."""
    lines: list[str] = []
    for section in dataclasses.fields(c):
        part = getattr(c, section.name)
        if not dataclasses.is_dataclass(part) or isinstance(part, type):
            continue  # a command's own option, not a setting of the run
        lines.append(f"[{section.name}]")
        for key, value in dataclasses.asdict(part).items():
            if value is None:
                continue
            text = _toml_string(value) if isinstance(value, str) else _flag_text(value)
            lines.append(f"{key} = {text}")
        lines.append("")
    return "\n".join(lines)


def _toml_string(text: str) -> str:
    escaped = "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in text)
    return f'"{escaped}"'


# --- The run folder --------------------------------------------------------------------------------


def take_config_file(args: Sequence[str]) -> tuple[str | None, list[str]]:
    """Take `--config FILE` (or `--config=FILE`) out of a command's arguments.

    Raises:
        ConfigError: it has no value.
    """
    file, rest, left = None, [], list(args)
    while left:
        arg = left.pop(0)
        if arg == "--config":
            if not left:
                raise ConfigError("--config: a value is missing; give the path of a TOML file")
            file = left.pop(0)
        elif arg.startswith("--config="):
            file = arg.partition("=")[2]
        else:
            rest.append(arg)
    return file, rest


def new_run_dir(file: str | Path | None) -> str:
    """`runs/NAME-TIME`, of a run that wasn't given a folder."""
    return str(Path("runs") / f"{Path(file).stem if file else 'run'}-{time.strftime('%Y%m%d-%H%M%S')}")


def with_run_dir(config: C, run_dir: str) -> C:
    """The same config with another run folder."""
    return dataclasses.replace(config, job=dataclasses.replace(config.job, run_dir=run_dir))
