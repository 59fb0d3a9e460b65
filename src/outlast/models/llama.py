"""The Llama 3 architecture.

Sizes and structure: "The Llama 3 Herd of Models" (arXiv 2407.21783). Pre-norm blocks of grouped-query attention with
rotary positions (theta 500000) and a SwiGLU feed-forward; RMSNorm; no biases. Parameter names are those of Meta's and
torchtitan's checkpoints. Rotary pairs are interleaved (elements 2i and 2i+1), as in Meta's weights; a Hugging Face
layout (pairs i and i + head_dim/2) differs by a permutation of the rows of wq and wk.
"""

import hashlib
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaArgs:
    """Sizes of a model."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int = 128256
    tied: bool = False
    rope_theta: float = 500000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.n_heads


FLAVORS: dict[str, LlamaArgs] = {
    "demo": LlamaArgs(dim=128, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=448, vocab_size=320),
    "debug": LlamaArgs(dim=256, n_layers=6, n_heads=16, n_kv_heads=16, ffn_dim=768, vocab_size=2048),
    "100M": LlamaArgs(dim=768, n_layers=12, n_heads=12, n_kv_heads=4, ffn_dim=2048, vocab_size=32000),
    "1B": LlamaArgs(dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim=8192, tied=True),
    "8B": LlamaArgs(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14336),
    "70B": LlamaArgs(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim=28672),
    "405B": LlamaArgs(dim=16384, n_layers=126, n_heads=128, n_kv_heads=8, ffn_dim=53248),
}
"""Named sizes; 1B is Llama 3.2's, 8B, 70B and 405B are Llama 3.1's. The vocabulary follows the corpus."""


def rope_tables(seq_len: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, fp32 [seq_len, head_dim / 2]."""
    inverse = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float64), inverse)
    return angles.cos().float().to(device), angles.sin().float().to(device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[2i], x[2i+1]) by its position's angle.

    Args:
        x: [B, T, heads, head_dim].
        cos: [T, head_dim / 2].
        sin: [T, head_dim / 2].
    """
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    turned = pairs * torch.complex(cos, sin)[:, None, :]
    return torch.view_as_real(turned).flatten(-2).type_as(x)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = args.n_heads, args.n_kv_heads, args.head_dim
        self.wq = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * args.head_dim, args.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, dim] -> [B, T, dim]."""
        q = rotate(self.wq(x).unflatten(-1, (self.n_heads, self.head_dim)), cos, sin).transpose(1, 2)
        k = rotate(self.wk(x).unflatten(-1, (self.n_kv_heads, self.head_dim)), cos, sin).transpose(1, 2)
        v = self.wv(x).unflatten(-1, (self.n_kv_heads, self.head_dim)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.n_kv_heads != self.n_heads)
        return self.wo(out.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x)."""

    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.ffn_dim, bias=False)
        self.w2 = nn.Linear(args.ffn_dim, args.dim, bias=False)
        self.w3 = nn.Linear(args.dim, args.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, dim] -> [B, T, dim]."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        self.attention = Attention(args)
        self.feed_forward = FeedForward(args)
        self.attention_norm = nn.RMSNorm(args.dim, args.norm_eps)
        self.ffn_norm = nn.RMSNorm(args.dim, args.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, dim] -> [B, T, dim]."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """A Llama 3 language model.

    Args:
        args: sizes.
        seq_len: longest sequence; sizes the rotary tables.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, args: LlamaArgs, seq_len: int) -> None:
        super().__init__()
        self.args, self.seq_len = args, seq_len
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList(Block(args) for _ in range(args.n_layers))
        self.norm = nn.RMSNorm(args.dim, args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        if args.tied:
            self.output.weight = self.tok_embeddings.weight
        empty = torch.empty(seq_len, args.head_dim // 2)
        self.register_buffer("cos", empty, persistent=False)
        self.register_buffer("sin", empty.clone(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Next-token logits.

        Args:
            tokens: int64 [B, T], T at most `seq_len`.

        Returns:
            [B, T, vocab_size].
        """
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.output(self.norm(x))

    @torch.no_grad()
    def init_weights(self, seed: int, device: torch.device) -> None:
        """Materialise on a device with the seed's initial weights, fp32."""
        self.to_empty(device=device)
        if self.args.tied:
            self.output.weight = self.tok_embeddings.weight
        for name, p in self.named_parameters():
            p.copy_(initial(name, p.shape, seed, self.args))
        cos, sin = rope_tables(self.seq_len, self.args.head_dim, self.args.rope_theta, device)
        self.cos.copy_(cos)
        self.sin.copy_(sin)


def initial(name: str, shape: torch.Size, seed: int, args: LlamaArgs) -> Tensor:
    """The initial value of one whole parameter: a pure function of (seed, name, shape).

    Norms are 1. The rest is normal with standard deviation 0.02, cut off at three of them; what writes into the
    residual stream (wo, w2) is smaller by sqrt(2 * layers), as in GPT-2 (Radford et al. 2019, section 2.3); the
    output head starts at dim**-0.5 at most.

    Returns:
        fp32, on the CPU, whatever device trains: the same numbers everywhere.
    """
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    std = 0.02
    if name.endswith(("wo.weight", "w2.weight")):
        std /= math.sqrt(2 * args.n_layers)
    elif name == "output.weight":
        std = min(std, args.dim**-0.5)
    key = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "big") >> 1)
    value = torch.empty(shape)
    return nn.init.trunc_normal_(value, std=std, a=-3 * std, b=3 * std, generator=generator)


def num_parameters(model: nn.Module) -> int:
    """Trained numbers; tied ones count once."""
    return sum(p.numel() for p in model.parameters())


def flops_per_token(args: LlamaArgs, seq_len: int) -> int:
    """Floating-point operations of forward and backward per token: 6 per weight of a product, and attention.

    The attention term, 6 * layers * dim * seq_len, is causal: half of the full square (PaLM, arXiv 2204.02311, B).
    """
    kv = 2 * args.dim * args.n_kv_heads * args.head_dim
    block = 2 * args.dim * args.n_heads * args.head_dim + kv + 3 * args.dim * args.ffn_dim
    weights = args.n_layers * block + args.dim * args.vocab_size
    return 6 * weights + 6 * args.n_layers * args.dim * seq_len
