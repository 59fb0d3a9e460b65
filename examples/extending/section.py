"""A config section of one's own: `[noise]` in a file, `--noise.share` as a flag."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from outlast.config import Config
from outlast.trainer import Trainer


@dataclass(frozen=True)
class Noise:
    """Tokens that are replaced by others while training."""

    share: float = 0.05
    """Of the tokens that are read."""
    loud: bool = field(default=False, metadata={"trajectory": False})
    """Say it at the start. It changes no weight, so a resumed run may have another value."""

    def check(self) -> None:
        if not 0 <= self.share < 1:
            raise ValueError(f"share = {self.share}: expected at least 0 and less than 1")


@dataclass(frozen=True)
class NoiseConfig(Config):
    """A run's config, with `[noise]`."""

    noise: Noise = field(default_factory=Noise)


class NoiseTrainer(Trainer):
    """`outlast train --trainer examples.extending.section:NoiseTrainer --noise.share=0.1`."""

    config_class = NoiseConfig

    def open_data(self) -> None:
        super().open_data()
        assert isinstance(self.config, NoiseConfig)
        self.noise = self.config.noise
        if self.noise.loud:
            self.say(f"{self.noise.share:.0%} of the tokens are noise")

    def batch(self, samples: range) -> Tensor:
        tokens = super().batch(samples)
        for row, number in zip(tokens, samples, strict=True):
            chance = torch.Generator().manual_seed(number)
            replaced = torch.rand(len(row), generator=chance) < self.noise.share
            row[replaced] = torch.randint(self.corpus.vocab_size, (int(replaced.sum()),), generator=chance)
        return tokens
