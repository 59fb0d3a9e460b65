"""A trainer of one's own: another loss, and figures to watch."""

import torch.nn.functional as F
from torch import Tensor

from outlast.trainer import Trainer


class SmoothTrainer(Trainer):
    """Label smoothing; `outlast train --trainer examples.extending.trainer:SmoothTrainer`."""

    def loss(self, batch: Tensor) -> tuple[Tensor, int]:
        return self.summed_loss(batch, smoothing=0.1)

    def evaluate(self) -> dict[str, float]:
        first = 1_000_000_000  # samples that no step of the run reads
        loss, tokens = self.summed_loss(self.batch(range(first, first + 4)).to(self.device), smoothing=0.0)
        return {"loss": float(loss) / tokens}

    def summed_loss(self, batch: Tensor, smoothing: float) -> tuple[Tensor, int]:
        """The sum over the targets, never the mean: sums of parts can be added, in any order."""
        with self.autocast():
            logits = self.model(batch[:, :-1])
        targets = batch[:, 1:].flatten()
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets, label_smoothing=smoothing, reduction="sum")
        return loss, len(targets)
