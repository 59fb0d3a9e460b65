"""What a running trainer reports: log lines for a person, curves for TensorBoard."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.config import Config

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Metrics:
    """Log lines and curves of one process.

    Args:
        config: of the run.
        run_dir: curves go to `tensorboard/` in it.
    """

    def __init__(self, config: Config, run_dir: Path) -> None:
        self.config = config
        self.run_dir = run_dir
        self._writer: SummaryWriter | None = None
        self._since = time.perf_counter()
        self._tokens = self._steps = 0

    def restart_clock(self) -> None:
        """Leave out of the rates what came before (start, a load)."""
        self._since = time.perf_counter()
        self._tokens = self._steps = 0

    def step(self, step: int, tokens: int, values: Mapping[str, float], speaks: bool) -> None:
        """Take note of a finished step; print a line every `metrics.log_freq` steps and at the last.

        Args:
            step: updates committed.
            tokens: of this step.
            values: loss, lr and whatever else there is to plot.
            speaks: this process prints and plots for the run.
        """
        self._tokens += tokens
        self._steps += 1
        last = self.config.training.steps
        if step % self.config.metrics.log_freq and step not in (1, last):
            return
        seconds = max(time.perf_counter() - self._since, 1e-9)
        rate = self._tokens / seconds
        eta = (last - step) * seconds / self._steps
        if not speaks:
            self.restart_clock()
            return
        print(
            f"step {step}/{last}  loss {values['loss']:.4f}  lr {values['lr']:.2e}  "
            f"grad norm {values['grad_norm']:.3f}  {rate:,.0f} tokens/s  ETA {duration(eta)}",
            flush=True,
        )
        if self.config.metrics.enable_tensorboard:
            self._curves(step, {**values, "tokens_per_second": rate})
        self.restart_clock()

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Print and plot what an evaluation gave; its time isn't the training's."""
        print(f"step {step}: evaluation: " + "  ".join(f"{k} {v:.4g}" for k, v in values.items()), flush=True)
        if self.config.metrics.enable_tensorboard:
            self._curves(step, {f"evaluation/{k}": v for k, v in values.items()})

    def _curves(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.run_dir / "tensorboard"))
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Finish the curves' file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def duration(seconds: float) -> str:
    """`75` -> `"1:15"`."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"
