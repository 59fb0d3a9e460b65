"""From a config to a model, and the loss it is trained on."""

import dataclasses
import difflib

import torch
import torch.nn.functional as F
from torch import Tensor

from outlast import config
from outlast.errors import ConfigError
from outlast.models.llama import FLAVORS, Llama, LlamaArgs, flops_per_token, num_parameters

__all__ = ["IGNORE", "Llama", "LlamaArgs", "build", "flops_per_token", "model_args", "num_parameters", "token_loss"]

IGNORE = -100
"""A target that doesn't count."""
_VOCAB_MULTIPLE = 64


def model_args(model: config.Model, vocab_size: int, seq_len: int) -> LlamaArgs:
    """Sizes of the model that a config asks for: its flavour's, but for those that it gives.

    Args:
        model: section `[model]`.
        vocab_size: of the corpus; the embedding gets this many rows, rounded up to a multiple of 64, unless
            `model.vocab_size` says otherwise.
        seq_len: longest sequence.

    Raises:
        ConfigError: unknown flavour, or sizes that can't go together.
    """
    if model.flavor not in FLAVORS:
        near = difflib.get_close_matches(model.flavor, FLAVORS, 1, 0.4)
        hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(FLAVORS)}"
        raise ConfigError(f"model.flavor = {model.flavor!r} is unknown; {hint}")
    names = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size")
    given = {name: getattr(model, name) for name in names if getattr(model, name)}
    flavor = FLAVORS[model.flavor]
    if "n_heads" in given and "n_kv_heads" not in given and flavor.n_kv_heads == flavor.n_heads:
        given["n_kv_heads"] = given["n_heads"]
    given.setdefault("vocab_size", -(-vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE)
    if model.tie_embeddings != "flavor":
        given["tie_embeddings"] = model.tie_embeddings == "yes"
    args = dataclasses.replace(flavor, seq_len=seq_len, **given)
    _check(args, names, vocab_size)
    return args


def _check(args: LlamaArgs, names: tuple[str, ...], vocab_size: int) -> None:
    for name in names:
        if getattr(args, name) < 0:
            raise ConfigError(f"model.{name} = {getattr(args, name)}: expected more than 0, or 0 for the flavour's")
    if args.dim % args.n_heads:
        raise ConfigError(f"model.dim = {args.dim} isn't a multiple of model.n_heads = {args.n_heads}")
    if args.n_heads % args.n_kv_heads:
        raise ConfigError(f"model.n_heads = {args.n_heads} isn't a multiple of model.n_kv_heads = {args.n_kv_heads}")
    if args.head_dim % 2:
        raise ConfigError(
            f"model.dim / model.n_heads = {args.dim} / {args.n_heads} = {args.head_dim} is odd; rotary positions turn "
            "pairs, so it must be even"
        )
    if args.vocab_size < vocab_size:
        raise ConfigError(
            f"model.vocab_size = {args.vocab_size} is less than the corpus' {vocab_size}; give at least that, or 0"
        )


def build(model: config.Model, vocab_size: int, seq_len: int) -> Llama:
    """The model that a config asks for, on the meta device; `init_weights` gives it a device and numbers.

    Args: see `model_args`.

    Raises:
        ConfigError: see `model_args`.
    """
    args = model_args(model, vocab_size, seq_len)
    with torch.device("meta"):
        return Llama(args)


def token_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """Cross-entropy, summed: sums of parts can be added, means can't.

    Args:
        logits: [B, T, V], any float dtype; the sum is made in float32.
        targets: int64 [B, T]; those that are `IGNORE` don't count.

    Returns:
        The sum in nats (fp32 scalar), and how many targets counted.
    """
    flat = targets.flatten()
    loss = F.cross_entropy(logits.flatten(0, 1).float(), flat, ignore_index=IGNORE, reduction="sum")
    return loss, int((flat != IGNORE).sum())
