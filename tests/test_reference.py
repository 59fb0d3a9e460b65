"""An independent reference: Hugging Face's Llama in a plain PyTorch loop, from the same weights on the same samples."""

import functools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from runs import STEPS, UNITS, Train, corpus, end_all
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from outlast import config
from outlast.data.corpus import open_corpus
from outlast.data.order import Samples, unit_batch
from outlast.events import read_events
from outlast.models import Llama, LlamaArgs, build

SEQ, WARMUP, PEAK, FLOOR, CLIP = 16, 5, 3e-3, 0.1, 1.8
SEED = 7
MODEL: dict[str, Any] = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 64}
SETTINGS: dict[str, Any] = {f"model__{k}": v for k, v in MODEL.items()} | {
    "model__tie_embeddings": "no",
    "training__seed": SEED,
    "training__max_norm": CLIP,
    "optimizer__lr": PEAK,
    "optimizer__beta1": 0.9,
    "optimizer__beta2": 0.95,
    "optimizer__eps": 1e-8,
    "optimizer__weight_decay": 0.1,
    "lr_scheduler__warmup_steps": WARMUP,
    "lr_scheduler__decay_type": "cosine",
    "lr_scheduler__min_lr_factor": FLOOR,
}
NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "layers": "model.layers",
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "norm": "model.norm",
    "output": "lm_head",
}
"""Meta's names of modules to Hugging Face's."""


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """No process of a test outlives it."""
    yield
    end_all()


def theirs(weights: Mapping[str, Tensor], head_dim: int) -> dict[str, Tensor]:
    """Our weights as Hugging Face has them: its rotary pairs are (i, i + head_dim / 2), ours neighbours."""
    out: dict[str, Tensor] = {}
    for name, w in weights.items():
        if name.endswith(("wq.weight", "wk.weight")):
            heads = w.unflatten(0, (-1, head_dim))
            w = torch.cat((heads[:, 0::2], heads[:, 1::2]), 1).flatten(0, 1)
        module = name.removesuffix(".weight")
        if module.startswith("layers."):
            _, number, inner = module.split(".", 2)
            out[f"{NAMES['layers']}.{number}.{NAMES[inner]}.weight"] = w
        else:
            out[f"{NAMES[module]}.weight"] = w
    return out


def as_hugging_face(model: Llama, args: LlamaArgs) -> LlamaForCausalLM:
    """Hugging Face's model with the same weights."""
    like = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.dim,
        intermediate_size=args.ffn_dim,
        num_hidden_layers=args.n_layers,
        num_attention_heads=args.n_heads,
        num_key_value_heads=args.n_kv_heads,
        max_position_embeddings=args.seq_len,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
    )
    out = LlamaForCausalLM(like)
    out.set_attn_implementation("eager")  # spelled out: no kernel in common
    out.load_state_dict(theirs(model.state_dict(), args.head_dim), strict=True)
    return out


@functools.cache
def reference() -> tuple[list[float], list[float]]:
    """The plain loop. Returns each step's mean loss over all tokens, and the gradient's norm before clipping."""
    opened = open_corpus(config.Data(path=str(corpus())))
    ours = build(config.Model(flavor="demo", tie_embeddings="no", **MODEL), opened.vocab_size, SEQ)
    ours.init_weights(SEED)
    model = as_hugging_face(ours, ours.args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    samples = Samples(opened, SEQ, SEED)
    losses: list[float] = []
    norms: list[float] = []
    for step in range(STEPS):
        batch = torch.from_numpy(unit_batch(samples, step * UNITS, UNITS))
        logits = model(input_ids=batch[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        done = (step + 1 - WARMUP) / (STEPS - WARMUP)
        cosine = FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * done))
        optimizer.param_groups[0]["lr"] = PEAK * (cosine if done > 0 else (step + 1) / WARMUP)
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, norms


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_same_losses_as_hugging_faces_llama_in_a_plain_loop(ranks: int, tmp_path: Path) -> None:
    run = Train(tmp_path / "run", ranks, **SETTINGS)
    losses, norms = reference()
    assert run.end() == 0, run.output()
    commits = [e for e in read_events(tmp_path / "run") if e["kind"] == "commit"]
    assert [e["loss"] for e in commits] == pytest.approx(losses, rel=1e-4)
    assert [e["grad_norm"] for e in commits] == pytest.approx(norms, rel=1e-3)
    assert losses[-1] < 0.8 * losses[0], "it learns, or little would be compared"
    assert min(norms) < CLIP < max(norms), "some steps are clipped and some aren't"
