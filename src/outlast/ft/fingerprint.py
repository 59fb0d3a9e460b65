"""What must be equal among the groups of a run, and a probe of how a machine computes."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import xxhash

from outlast.config import Model
from outlast.models import build, token_loss


def fingerprint(trajectory: Mapping[str, Any], token: str, ranks: int, probe: str) -> dict[str, str]:
    """Field by field, so that a refusal can name what differs.

    Args:
        trajectory: everything that decides which weights come out.
        token: of the job; only its hash is told.
        ranks: of a group.
        probe: from `numerics_probe`.
    """
    return {
        **{k: str(v) for k, v in trajectory.items()},
        "job": hashlib.sha256(b"job " + token.encode()).hexdigest()[:16],
        "ranks a group": str(ranks),
        "numerics probe": probe,
    }


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
