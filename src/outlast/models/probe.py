"""A probe of how a machine computes."""

import torch
import xxhash

from outlast.config import Model
from outlast.models import build, token_loss


def numerics_probe(device: torch.device, bf16: bool) -> str:
    """Hash of the gradients of a small fixed model on a fixed batch: equal where machines compute equal bits.

    Args:
        device: where training runs.
        bf16: whether matrix products run in bfloat16.
    """
    sizes = Model(flavor="debug", dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=192, vocab_size=512)
    model = build(sizes, 512, 64)
    model.init_weights(1, device)
    batch = (torch.arange(4 * 65, device=device) * 7919 % 512).view(4, 65)
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        logits = model(batch[:, :-1])
    loss, _ = token_loss(logits, batch[:, 1:])
    loss.backward()
    digest = xxhash.xxh3_64()
    for p in model.parameters():
        assert p.grad is not None
        digest.update(p.grad.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
