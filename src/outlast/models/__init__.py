"""Models by name."""

import dataclasses
import difflib

import torch
import torch.nn.functional as F
from torch import Tensor

from outlast.config import Model
from outlast.errors import ConfigError
from outlast.models.llama import FLAVORS, Llama, LlamaArgs


def model_args(model: Model, vocab_size: int) -> LlamaArgs:
    """Sizes of a model: the flavour's, with what the config sets otherwise.

    Args:
        model: the config's section.
        vocab_size: of the corpus.

    Raises:
        ConfigError: an unknown flavour, or sizes that don't fit each other.
    """
    if model.flavor not in FLAVORS:
        near = difflib.get_close_matches(model.flavor, FLAVORS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"model.flavor = {model.flavor!r}: expected one of {', '.join(FLAVORS)}{hint}")
    sizes = {k: v for k in ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim") if (v := getattr(model, k))}
    if model.n_heads and not model.n_kv_heads:
        sizes["n_kv_heads"] = model.n_heads
    if model.tie_embeddings != "flavor":
        sizes["tied"] = model.tie_embeddings == "yes"
    args = dataclasses.replace(FLAVORS[model.flavor], vocab_size=model.vocab_size or -(-vocab_size // 64) * 64, **sizes)
    for name, value in [("dim", args.dim), ("n_layers", args.n_layers), ("n_heads", args.n_heads)]:
        if value < 1:
            raise ConfigError(f"model.{name} = {value}: expected 1 or more")
    if args.dim % args.n_heads or args.head_dim % 2:
        raise ConfigError(f"model.dim = {args.dim} must be an even multiple of model.n_heads = {args.n_heads}")
    if args.n_kv_heads < 1 or args.n_heads % args.n_kv_heads:
        raise ConfigError(f"model.n_heads = {args.n_heads} must be a multiple of n_kv_heads = {args.n_kv_heads}")
    if args.vocab_size < vocab_size:
        raise ConfigError(f"model.vocab_size = {args.vocab_size}: the corpus has {vocab_size} tokens; 0 follows it")
    return args


def build(model: Model, vocab_size: int, seq_len: int) -> Llama:
    """A model on the meta device; `init_weights` materialises it.

    Raises:
        ConfigError: as `model_args`.
    """
    args = model_args(model, vocab_size)
    with torch.device("meta"):
        return Llama(args, seq_len)


def token_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """Cross-entropy, summed over targets.

    Args:
        logits: [B, T, V].
        targets: int64 [B, T]; -100 doesn't count.

    Returns:
        The sum, fp32 scalar in nats, and how many counted.
    """
    total = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100, reduction="sum")
    return total, int((targets != -100).sum())
