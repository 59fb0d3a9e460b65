"""The pictures that are learned, and how a grid of them is written."""

import struct
import zlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

SIZE, PATCH = 16, 4


def picture(chance: torch.Generator) -> Tensor:
    """A disc, a square or a cross somewhere: [SIZE * SIZE] in patch order, -1 to 1."""
    u = torch.rand(4, generator=chance)
    radius = 4.5 + 2 * float(u[0])
    x, y = (torch.arange(SIZE) - radius - float(u[i]) * (SIZE - 1 - 2 * radius) for i in (1, 2))
    across, down = x.abs()[None, :], y.abs()[:, None]
    far = [(across**2 + down**2).sqrt(), torch.maximum(across, down), torch.minimum(across, down) * 3]
    image = (radius - torch.maximum(far[int(3 * u[3])], torch.maximum(across, down))).clamp(-1, 1)
    return image.view(SIZE // PATCH, PATCH, SIZE // PATCH, PATCH).transpose(1, 2).flatten()


def write_png(path: Path, images: Tensor) -> None:
    """A square grid of grey images, -1 to 1, enlarged 4 times."""
    side = round(len(images) ** 0.5)
    grid = F.pad(images, (0, 1, 0, 1), value=-1).view(side, side, SIZE + 1, SIZE + 1).transpose(1, 2)
    grey = ((grid.reshape(side * (SIZE + 1), -1).cpu() + 1) * 127.5).clamp(0, 255).byte()
    grey = grey.repeat_interleave(4, 0).repeat_interleave(4, 1)
    rows = b"".join(b"\0" + bytes(row.tolist()) for row in grey)  # 0: no filter
    parts = [
        (b"IHDR", struct.pack(">2I5B", *grey.T.shape, 8, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    ]
    chunks = (struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in parts)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
