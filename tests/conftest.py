"""A corpus and a model so small that a run takes a second, for every test that trains.

Torch is imported only by those that do.
"""

import dataclasses
import functools
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from outlast.config import Config, check_config
from outlast.data.corpus import prepare
from outlast.events import EventLog, read_events

if TYPE_CHECKING:
    from outlast.trainer import Trainer

TINY: dict[str, dict[str, Any]] = {
    "model": {"flavor": "demo", "dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 64},
    "training": {"steps": 6, "seq_len": 16, "local_batch_size": 2, "global_batch_size": 8, "threads": 1},
    "optimizer": {"lr": 3e-3},
    "lr_scheduler": {"warmup_steps": 2},
    "checkpoint": {"interval": 2, "keep_latest_k": 0},
    "metrics": {"log_freq": 1000, "digest_every": 1, "enable_tensorboard": False},
}


@functools.cache
def tiny_corpus() -> Path:
    """A corpus of a few thousand bytes, made once a session."""
    folder = Path(tempfile.mkdtemp(prefix="outlast-test-"))
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "nine", "owls", "sleep"]
    text = " ".join(words[i * i % 7 + i % 5] for i in range(2000))
    (folder / "text.txt").write_text(text)
    prepare([folder / "text.txt"], folder / "corpus")
    return folder / "corpus"


@pytest.fixture(scope="session")
def corpus() -> Iterator[Path]:
    """The tiny corpus' folder."""
    yield tiny_corpus()


def pytest_unconfigure() -> None:
    """Remove the corpus."""
    if tiny_corpus.cache_info().currsize:
        shutil.rmtree(tiny_corpus().parent, ignore_errors=True)


def tiny_config(run_dir: str | Path, **overrides: Mapping[str, Any]) -> Config:
    """A checked config of a tiny run: 4 units of 2 sequences a step, a digest a step, a save every 2 steps.

    Args:
        run_dir: of the run.
        overrides: section -> {key: value}, on top of `TINY`.
    """
    sections: dict[str, dict[str, Any]] = {"job": {"run_dir": str(run_dir)}, "data": {"path": str(tiny_corpus())}}
    for name in TINY.keys() | overrides.keys():
        sections[name] = {**sections.get(name, {}), **TINY.get(name, {}), **overrides.get(name, {})}
    default = Config()
    config = Config(**{name: dataclasses.replace(getattr(default, name), **keys) for name, keys in sections.items()})
    check_config(config)
    return config


def tiny_trainer(config: Config, cls: "type[Trainer] | None" = None) -> "Trainer":
    """A plain trainer, or one of a subclass, that hasn't begun."""
    import torch

    from outlast.trainer import Trainer

    torch.set_num_threads(1)
    return (cls or Trainer)(config, EventLog(config.job.run_dir, "g0.test", group=0, life="test", rank=0))


def trained(config: Config, cls: "type[Trainer] | None" = None) -> "Trainer":
    """A trainer that has run, from wherever its folder stands."""
    trainer = tiny_trainer(config, cls)
    trainer.train()
    return trainer


def events_of(config: Config, kind: str) -> list[dict[str, Any]]:
    """Events of one kind of a run, in order."""
    return [e for e in read_events(config.job.run_dir) if e["kind"] == kind]


def digests_of(config: Config) -> dict[int, str]:
    """Step -> digest of a run; one that was made twice must be equal."""
    out: dict[int, str] = {}
    for e in events_of(config, "digest"):
        assert out.setdefault(e["step"], e["sha256"]) == e["sha256"], e
    return out
