"""Data of one's own: each sample a pure function of its number, so that any group can make any of them."""

import torch
from torch import Tensor, nn

from outlast.models import build
from outlast.trainer import Trainer

DIGITS = 10


class CountingTrainer(Trainer):
    """Numbers counted up in steps of 1 to 5; `outlast train --trainer examples.extending.dataset:CountingTrainer`."""

    def open_data(self) -> None:
        """There is nothing to open."""

    def data_facts(self) -> dict[str, str]:
        return {"counting": "1"}  # change it when `batch` gives something else: older saves are then refused

    def batch(self, samples: range) -> Tensor:
        return torch.stack([self.sample(number) for number in samples])

    def sample(self, number: int) -> Tensor:
        """One sequence [seq_len + 1]. Whatever is random in it is drawn from its own number, and here."""
        chance = torch.Generator().manual_seed(self.config.training.seed * 1_000_003 + number)
        first, step = torch.randint(1, 6, (2,), generator=chance)
        return (first + step * torch.arange(self.config.training.seq_len + 1)) % DIGITS

    def build_model(self) -> nn.Module:
        return build(self.config.model, DIGITS, self.config.training.seq_len)
