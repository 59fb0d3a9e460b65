"""Callbacks: told what a run did, and unable to change it.

They get frozen plain values, never the trainer or a tensor. Whatever global state they leave changed (a random
generator, the gradient mode, the default dtype) is put back after each call; one that raises is switched off.
"""

import random
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import numpy as np
import torch

from outlast.classes import load_class

T = TypeVar("T")


@dataclass(frozen=True)
class Step:
    """A committed step.

    Attributes:
        step: its number, from 1.
        steps: of the whole run.
        loss: mean over the step's targets; may be NaN on a skipped step.
        lr: learning rate.
        grad_norm: before clipping.
        tokens: targets that counted.
        seconds: since the step before.
    """

    step: int
    steps: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Evaluation:
    """What `Trainer.evaluate` gave.

    Attributes:
        step: after which.
        values: by name.
    """

    step: int
    values: Mapping[str, float]


class Callback:
    """Base of what `job.callbacks` names. Override what is wanted.

    Called on rank 0 of the group that writes the run's saves, once a step, after the step was committed. A group that
    takes over from a lost one has callbacks of its own, and a run that goes back to a save tells its steps again.

    Args:
        run_dir: folder of the run: a place to write.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def on_step(self, step: Step) -> None:
        """A step was committed."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """The model was evaluated."""


def load_callbacks(specs: Sequence[str]) -> list[type[Callback]]:
    """The classes that `job.callbacks` names.

    Raises:
        ConfigError: there is no such class; says why.
    """
    return [load_class("job.callbacks", spec, Callback) for spec in specs]


class Callbacks:
    """All callbacks of one process.

    Args:
        specs: `job.callbacks`.
        run_dir: of the run.

    Raises:
        ConfigError: one of them can't be found.
    """

    def __init__(self, specs: Sequence[str], run_dir: Path) -> None:
        self._classes = load_callbacks(specs)
        self._run_dir = run_dir
        self._live: list[Callback] | None = None

    def __bool__(self) -> bool:
        return bool(self._classes)

    def on_step(self, step: Step) -> None:
        """Tell all of a step."""
        self._tell(lambda callback: callback.on_step(step))

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Tell all of an evaluation."""
        frozen = Evaluation(evaluation.step, MappingProxyType(dict(evaluation.values)))
        self._tell(lambda callback: callback.on_evaluation(frozen))

    def _tell(self, call: Callable[[Callback], None]) -> None:
        if self._live is None:  # made by the process that is to call them, no earlier
            made = [_survive(cls.__name__, lambda cls=cls: cls(self._run_dir)) for cls in self._classes]
            self._live = [callback for callback in made if callback is not None]
        for callback in list(self._live):
            if _survive(type(callback).__name__, lambda callback=callback: call(callback) or True) is None:
                self._live.remove(callback)


def _survive(name: str, call: Callable[[], T]) -> T | None:
    """What a user's call gives; None if it raised: then a line says so."""
    with kept_state():
        try:
            return call()
        except (Exception, SystemExit) as e:
            last = traceback.extract_tb(e.__traceback__)[-1]
            why = " ".join(f"{type(e).__name__}: {e}".split())
            print(f"outlast: callback {name} is switched off: {last.filename}:{last.lineno}: {why}", file=sys.stderr)
            return None


@contextmanager
def kept_state() -> Iterator[None]:
    """Put back, afterwards, the global state that numbers depend on."""
    cuda = torch.cuda.is_initialized()
    chance = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_gpus = torch.cuda.get_rng_state_all() if cuda else []
    dtype, grad, threads = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()
    device = torch.get_default_device()
    precision = torch.get_float32_matmul_precision()
    strict = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    kinds = {kind: torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")}
    try:
        yield
    finally:
        for kind, on in kinds.items():
            torch.set_autocast_enabled(kind, on)
        torch.set_anomaly_enabled(*anomaly)
        torch.use_deterministic_algorithms(strict[0], warn_only=strict[1])
        torch.set_float32_matmul_precision(precision)
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        if cuda:
            torch.cuda.set_rng_state_all(on_gpus)
        torch.set_rng_state(chance[2])
        np.random.set_state(chance[1])
        random.setstate(chance[0])
