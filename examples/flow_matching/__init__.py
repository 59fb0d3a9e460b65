"""Flow matching (Lipman et al. 2023) on small images: a trainer that knows nothing of fault tolerance.

A network learns the velocity that carries noise to an image along a straight line; sampling follows it. The images are
drawn on the spot, each a pure function of its number. From the clone's root:

    outlast launch --config examples/flow_matching/config.toml --groups 3
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.flow_matching.pictures import PATCH, SIZE, picture, write_png
from outlast.config import Config
from outlast.trainer import Trainer

TOKENS, PIXELS = (SIZE // PATCH) ** 2, PATCH * PATCH


@dataclass(frozen=True)
class Flow:
    """The model and its sampler."""

    width: int = 64
    """Of the residual stream."""
    blocks: int = 3
    """Depth."""
    sampling_steps: int = field(default=20, metadata={"trajectory": False})
    """Euler steps from noise to an image."""
    samples: int = field(default=36, metadata={"trajectory": False})
    """Images in the grid at the end; a square number."""

    def check(self) -> None:
        """Refuse what can't be built."""
        for name in ("width", "blocks", "sampling_steps", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: expected more than 0")
        if self.width % 2:
            raise ValueError(f"width = {self.width}: expected an even number")
        if round(self.samples**0.5) ** 2 != self.samples:
            raise ValueError(f"samples = {self.samples}: expected a square number")


@dataclass(frozen=True)
class FlowConfig(Config):
    """A run's config, with `[flow]`."""

    flow: Flow = field(default_factory=Flow)


class Block(nn.Module):
    """Mixes patches, then channels; how much of either, and of what, the time says."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.time = nn.Linear(width, 2 * width)
        self.tokens = nn.Sequential(nn.Linear(TOKENS, 2 * TOKENS), nn.GELU(), nn.Linear(2 * TOKENS, TOKENS))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale, shift = self.time(time)[:, None].chunk(2, dim=-1)
        x = x + self.tokens(F.layer_norm(x, x.shape[-1:]).mT).mT
        return x + self.channels(F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift)


class Velocity(nn.Module):
    """An MLP-Mixer over patches: images [B, SIZE * SIZE] in patch order and times [B] to velocities."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.width = width
        self.enter = nn.Linear(PIXELS, width)
        self.place = nn.Parameter(torch.randn(TOKENS, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.leave = nn.Linear(width, PIXELS)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        waves = t[:, None] * 2.0 ** torch.linspace(0, 6, self.width // 2, device=t.device)
        time = torch.cat([waves.sin(), waves.cos()], dim=-1)
        h = self.enter(x.view(-1, TOKENS, PIXELS)) + self.place
        for block in self.blocks:
            h = block(h, time)
        return self.leave(F.layer_norm(h, h.shape[-1:])).flatten(1)


class FlowTrainer(Trainer):
    """Data, model, loss and what is shown at the end; all else is the plain trainer's."""

    config_class = FlowConfig

    def open_data(self) -> None:
        assert isinstance(self.config, FlowConfig)
        self.flow = self.config.flow

    def data_facts(self) -> dict[str, str]:
        return {"pictures": "1"}

    def batch(self, samples: range) -> Tensor:
        rows = []
        for number in samples:  # image, noise and time of a sample: a function of its number
            chance = torch.Generator().manual_seed(self.config.training.seed * 1_000_003 + number)
            image = picture(chance)
            rows.append(torch.cat([image, torch.randn(len(image) + 1, generator=chance)]))
        return torch.stack(rows)

    def build_model(self) -> nn.Module:
        return Velocity(self.flow.width, self.flow.blocks)

    def loss(self, batch: Tensor) -> tuple[Tensor, int]:
        image, noise, t = batch.split([TOKENS * PIXELS, TOKENS * PIXELS, 1], dim=1)
        t = t.sigmoid()
        with self.autocast():
            velocity = self.model(torch.lerp(noise, image, t), t[:, 0])
        return F.mse_loss(velocity.float(), image - noise, reduction="sum"), image.numel()

    @torch.no_grad()
    def sample(self) -> Tensor:
        """Images [N, SIZE, SIZE] that the model makes of noise."""
        x = torch.randn(self.flow.samples, TOKENS * PIXELS, generator=torch.Generator().manual_seed(0)).to(self.device)
        for i in range(self.flow.sampling_steps):
            time = torch.full((len(x),), i / self.flow.sampling_steps, device=self.device)
            x = x + self.model(x, time) / self.flow.sampling_steps
        return x.view(-1, SIZE // PATCH, SIZE // PATCH, PATCH, PATCH).transpose(2, 3).reshape(-1, SIZE, SIZE)

    def finish(self) -> None:
        if self.step == self.config.training.steps and self.writes():
            images = self.sample()  # on all ranks: each has a part of the model
            if self.ranks.rank == 0:
                write_png(self.run_dir / "samples.png", images)
        super().finish()
