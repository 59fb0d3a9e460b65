"""The sections of a run's config: what can be set, its default, and what it means.

Imports no torch: `outlast --help` and `launch` stay quick.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

TRAJECTORY: dict[str, Any] = {"trajectory": True}
"""Field metadata: the value decides which weights come out, so all groups and resumes must agree on it."""


def trajectory(default: Any) -> Any:
    """A field that is part of the trajectory (see `TRAJECTORY`)."""
    return field(default=default, metadata=TRAJECTORY)


DEFAULT_TRAINER = "outlast.trainer:Trainer"


@dataclass(frozen=True)
class Job:
    """Where the run lives."""

    run_dir: str = ""
    """Folder of the run: events, logs, saved weights, curves. Empty: a new one, runs/NAME-TIME. An
    existing one is resumed."""
    trainer: str = trajectory(DEFAULT_TRAINER)
    """Class that trains, as module:Class, looked for in the working directory first; `--trainer` for short. What to
    write in one is in docs/extending.md."""
    callbacks: tuple[str, ...] = ()
    """Classes that are told of steps and evaluations, as module:Class; with commas between them as a flag."""


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
    """Type of the matrix products and of the weights that ranks gather; sums over ranks and groups,
    weights and optimizer stay float32."""
    max_norm: float = trajectory(1.0)
    """Clip the gradient to this global L2 norm. 0: never."""
    seed: int = trajectory(0)
    """Of the initial weights and the order of the data."""
    max_skipped_steps: int = trajectory(10)
    """End the run after this many updates in a row were skipped because a gradient wasn't finite."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model is. "auto": a GPU if torch sees one."""
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
class Parallelism:
    """How a replica group shares one copy of the model among its ranks."""

    data_parallel_shard_degree: int = -1
    """Ranks that share one copy of the model (FSDP2). -1: as many as the group has."""
    reshard_after_forward: bool = True
    """Let go of a block's gathered weights between its forward and its backward: less memory, one more
    all-gather a block. The same bits either way."""


@dataclass(frozen=True)
class ActivationCheckpoint:
    """What the backward computes again instead of keeping it."""

    mode: Literal["none", "selective", "full"] = trajectory("none")
    """"selective": all but the matrix products and attention; "full": whole blocks. Without compile the
    bits are the same."""


@dataclass(frozen=True)
class Compile:
    """torch.compile."""

    enable: bool = trajectory(False)
    """Compile each block. Quicker, after a start of seconds to minutes; other bits than without."""


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
    process_group: Literal["gloo", "nccl"] = "gloo"
    """What carries sums between groups. "nccl" needs the model on GPUs."""
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
    """Address that this group's ports bind to and are reached at. For several machines: one that the
    others can reach."""
    interface: str = ""
    """Network interface (eth0) whose address to use as host, so that all machines can share one config."""


@dataclass(frozen=True)
class Metrics:
    """What is reported."""

    log_freq: int = 10
    """Steps between log lines."""
    digest_every: int = 10
    """Steps between SHA-256 digests over weights and optimizer state. 0: at the end only."""
    evaluate_every: int = 0
    """Steps between evaluations, for a trainer that has any (`Trainer.evaluate`). 0: at the end only."""
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
    parallelism: Parallelism = field(default_factory=Parallelism)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
    metrics: Metrics = field(default_factory=Metrics)

    def units(self, ranks: int = 1) -> int:
        """Work units a step, M."""
        return self.training.global_batch_size // (self.training.local_batch_size * ranks)


C = TypeVar("C", bound=Config)

_OURS = {
    f"{s.name}.{f.name}" for s in dataclasses.fields(Config) for f in dataclasses.fields(getattr(Config(), s.name))
}


def leaf_values(c: Config) -> Iterator[tuple[str, Any]]:
    """`section.key` and value of every setting."""
    for section in dataclasses.fields(c):
        part = getattr(c, section.name)
        for f in dataclasses.fields(part) if dataclasses.is_dataclass(part) else ():
            yield f"{section.name}.{f.name}", getattr(part, f.name)


def trajectory_fields(c: Config) -> dict[str, Any]:
    """`section.key` -> value of every field that decides which weights come out.

    Of a user's own sections that is every field whose metadata doesn't say `trajectory: False`: nobody knows better.
    """
    out: dict[str, Any] = {}
    for section in dataclasses.fields(c):
        part = getattr(c, section.name)
        for f in dataclasses.fields(part) if dataclasses.is_dataclass(part) else ():
            name = f"{section.name}.{f.name}"
            if f.metadata.get("trajectory", name not in _OURS):
                out[name] = getattr(part, f.name)
    return out
