"""The Llama 3 family of decoder-only transformers (Dubey et al. 2024, https://arxiv.org/abs/2407.21783).

RMSNorm before each half of a block, rotary positions, grouped-query attention, SwiGLU, no biases. Names of
modules and parameters, and the pairing of rotary dimensions, are those of Meta's published weights.
"""

import dataclasses
import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outlast.parallel import place


@dataclasses.dataclass(frozen=True)
class LlamaArgs:
    """Sizes of one model."""

    dim: int
    """Width of the residual stream."""
    n_layers: int
    """Blocks."""
    n_heads: int
    """Query heads, each `dim / n_heads` wide."""
    n_kv_heads: int
    """Key and value heads; each serves `n_heads / n_kv_heads` query heads."""
    ffn_dim: int
    """Hidden size of the SwiGLU feed-forward."""
    vocab_size: int = 128256
    """Rows of the embedding, and logits a position."""
    seq_len: int = 8192
    """Longest sequence: rows of the rotary table. No weight depends on it."""
    tie_embeddings: bool = False
    """The output head is the embedding."""
    rope_theta: float = 500000.0
    """Base of the rotary wavelengths."""
    rope_factor: float = 1.0
    """How far Llama 3.1 and later stretch the wavelengths that are long against 8192 positions; 1: not at all."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.dim // self.n_heads


FLAVORS: dict[str, LlamaArgs] = {
    "demo": LlamaArgs(dim=128, n_layers=4, n_heads=4, n_kv_heads=4, ffn_dim=384, vocab_size=320),
    "debug": LlamaArgs(dim=256, n_layers=6, n_heads=16, n_kv_heads=16, ffn_dim=768, vocab_size=2048),
    "100M": LlamaArgs(768, n_layers=12, n_heads=12, n_kv_heads=4, ffn_dim=2048, vocab_size=32768, tie_embeddings=True),
    "1B": LlamaArgs(
        dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim=8192, tie_embeddings=True, rope_factor=32.0
    ),
    "8B": LlamaArgs(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14336),
    "70B": LlamaArgs(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim=28672),
    "405B": LlamaArgs(dim=16384, n_layers=126, n_heads=128, n_kv_heads=8, ffn_dim=53248, rope_factor=8.0),
}
"""Named sizes. 8B and 70B are Llama 3, 405B Llama 3.1, 1B Llama 3.2; the smaller ones are this project's."""


# --- Rotary positions ------------------------------------------------------------------------------


def rope_table(args: LlamaArgs) -> Tensor:
    """Cosine and sine of each position's rotations (Su et al. 2021, https://arxiv.org/abs/2104.09864).

    Pair i of a head turns by `theta ** (-2i / head_dim)` radians a position. With a factor, wavelengths longer
    than 8192 positions are stretched by it, those shorter than a quarter of that are left alone, and those
    between are blended (Llama 3.1).

    Returns:
        fp32 [seq_len, head_dim / 2, 2], computed in fp64 so that far positions keep their digits.
    """
    rate = args.rope_theta ** -(torch.arange(0, args.head_dim, 2, dtype=torch.float64) / args.head_dim)
    turns = 8192 * rate / (2 * math.pi)  # over the 8192 positions that Llama 3 was trained on
    kept = ((turns - 1) / (4 - 1)).clamp(0, 1)
    rate = kept * rate + (1 - kept) * rate / args.rope_factor
    angle = torch.outer(torch.arange(args.seq_len, dtype=torch.float64), rate)
    return torch.stack((angle.cos(), angle.sin()), -1).float()


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turn each pair of neighbouring elements by its position's angle.

    Pairs are (0, 1), (2, 3), … as in Meta's weights. Hugging Face pairs i with i + head_dim / 2: a head's rows of
    its `q_proj` and `k_proj` are these in the order 0, 2, 4, …, 1, 3, 5, … A complex product is the quickest form
    on CPU: one pass over memory that lies as the projection left it.

    Args:
        x: [B, T, heads, head_dim].
        table: the first T rows of `rope_table`.

    Returns:
        The same shape and dtype.
    """
    if torch.compiler.is_compiling():  # it has no complex numbers
        a, b = _wide(x).unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = table.unsqueeze(1).unbind(-1)
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)
    pairs = torch.view_as_complex(_wide(x).unflatten(-1, (-1, 2)))
    turned = pairs * torch.view_as_complex(table).unsqueeze(1)
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


# --- Modules ---------------------------------------------------------------------------------------
# They are made without numbers: filling a tensor on the meta device imports 800 modules, a second's work.


class Linear(nn.Linear):
    """Matrix product without bias; `initial` gives the numbers."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Leave it to `initial`."""


class Embedding(nn.Embedding):
    """Rows by index; `initial` gives the numbers."""

    def reset_parameters(self) -> None:
        """Leave it to `initial`."""


class RMSNorm(nn.Module):
    """Divide by the root mean square, scale (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467).

    Spelled out in fp32 at least: on CPU `F.rms_norm` is as quick, but not where input and weight differ in dtype.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] to the same."""
        wide = _wide(x)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245)."""

    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        self.head_dim = args.head_dim
        self.grouped = args.n_kv_heads != args.n_heads
        self.wq = Linear(args.dim, args.n_heads * args.head_dim)
        self.wk = Linear(args.dim, args.n_kv_heads * args.head_dim)
        self.wv = Linear(args.dim, args.n_kv_heads * args.head_dim)
        self.wo = Linear(args.n_heads * args.head_dim, args.dim)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """[B, T, dim] to the same; `table` as for `rotate`."""
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, table), rotate(k, table)
        # Views: the kernel reads any strides and writes its result in [B, T, heads, head_dim] order.
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=self.grouped
        )
        return self.wo(out.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        self.w1 = Linear(args.dim, args.ffn_dim)
        self.w2 = Linear(args.ffn_dim, args.dim)
        self.w3 = Linear(args.dim, args.ffn_dim)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, dim] to the same."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    """Attention, then feed-forward, each added to the residual stream."""

    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(args.dim, args.norm_eps)
        self.attention = Attention(args)
        self.ffn_norm = RMSNorm(args.dim, args.norm_eps)
        self.feed_forward = FeedForward(args)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """[B, T, dim] to the same; `table` as for `rotate`."""
        x = x + self.attention(self.attention_norm(x), table)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """A Llama 3 language model.

    Build it under `torch.device("meta")`, then `init_weights`: nothing holds a meaningful number before.
    """

    rope: Tensor

    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        self.args = args
        self.tok_embeddings = Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList(TransformerBlock(args) for _ in range(args.n_layers))
        self.norm = RMSNorm(args.dim, args.norm_eps)
        self.output = Linear(args.dim, args.vocab_size)
        self.register_buffer("rope", torch.empty(args.seq_len, args.head_dim // 2, 2), persistent=False)
        self._tie()

    def _tie(self) -> None:
        if self.args.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of each position's next token.

        Args:
            tokens: int64 [B, T], T up to `args.seq_len`.

        Returns:
            [B, T, vocab_size], fp32, or bf16 under autocast.
        """
        assert tokens.shape[1] <= self.args.seq_len, (tokens.shape, self.args.seq_len)
        table = self.rope[: tokens.shape[1]]
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, table)
        return self.output(self.norm(x))

    def init_weights(self, seed: int, device: torch.device | str = "cpu") -> None:
        """Put the model on a device, with the seed's initial weights (see `initial`); of a sharded one, this rank's.

        Makes new parameters: call it before an optimizer takes hold of them. (Not `to_empty` and a copy: on meta
        tensors that imports 500 modules.)
        """
        for name, p in list(self.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            value = initial(name, p.shape, seed, self.args)
            setattr(self.get_submodule(owner), leaf, nn.Parameter(place(value, p, torch.device(device))))
        self._tie()
        self.rope = rope_table(self.args).to(device)


# --- Weights and sizes -----------------------------------------------------------------------------


def initial(name: str, shape: torch.Size | tuple[int, ...], seed: int, args: LlamaArgs) -> Tensor:
    """Initial value of one parameter: a pure function of its name, its shape and the seed.

    Each has a generator of its own, so neither the order of modules, nor the device, nor how the model is sharded
    matters, and the global generator is left alone: a rank that holds a shard takes its part of this.

    Normal, std 0.02, cut off at 3 std; the two projections back into the residual stream of each block are
    scaled by 1 / sqrt(2 n_layers), so that the stream's variance doesn't grow with depth (Radford et al. 2019,
    "Language Models are Unsupervised Multitask Learners", section 2.3; std as in Meta's and torchtitan's Llama 3).
    Norms are 1.

    Args:
        name: fully qualified, such as "layers.3.attention.wq.weight".
        shape: of the whole parameter.
        seed: `training.seed`.
        args: sizes of the model.

    Returns:
        The whole parameter, fp32, on the CPU.
    """
    if len(shape) == 1:
        return torch.ones(shape, device="cpu")
    std = 0.02
    if name.endswith(("attention.wo.weight", "feed_forward.w2.weight")):
        std /= math.sqrt(2 * args.n_layers)
    key = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(key[:4]))  # the CPU generator reads 32 bits
    weight = torch.empty(shape, device="cpu")
    return nn.init.trunc_normal_(weight, std=std, a=-3 * std, b=3 * std, generator=generator)


def num_parameters(model: nn.Module) -> int:
    """Trainable numbers; tied ones count once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def flops_per_token(args: LlamaArgs, seq_len: int) -> int:
    """Floating-point operations of a forward and backward, a token, without recomputation.

    6 for each weight of a matrix product, and 12 for each layer, position and element of the heads' width: the
    convention of PaLM (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, appendix B), which counts attention
    to all `seq_len` positions although half are masked.
    """
    kv_dim = args.n_kv_heads * args.head_dim
    layer = 2 * args.dim * args.dim + 2 * args.dim * kv_dim + 3 * args.dim * args.ffn_dim
    matrices = args.n_layers * layer + args.dim * args.vocab_size
    return 6 * matrices + 12 * args.n_layers * args.dim * seq_len
