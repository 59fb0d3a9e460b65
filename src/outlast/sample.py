"""Let a model continue a text."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn

from outlast import checkpoint
from outlast.config import Config, load_config
from outlast.data.corpus import Corpus, open_corpus
from outlast.errors import ConfigError, UserError
from outlast.models import build


@torch.no_grad()
def generate(
    model: nn.Module,
    ids: Sequence[int],
    count: int,
    *,
    seq_len: int,
    vocab_size: int,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
) -> list[int]:
    """Continue a sequence of tokens: a pure function of its arguments, whatever the global generator holds.

    Args:
        model: tokens [1, T] -> logits [1, T, V].
        ids: the prompt, at least one token.
        count: tokens to add.
        seq_len: longest sequence the model takes. The window slides past it, and is computed anew for each token:
            positions count from its start, as in training.
        vocab_size: ids from here on are padding of the embedding, and never drawn.
        temperature: 0 takes the likeliest.
        top_k: draw among so many of the likeliest; 0: all.
        seed: of the draws.

    Returns:
        The added tokens.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    out = list(ids)
    for _ in range(count):
        window = torch.tensor([out[-seq_len:]], device=device)
        logits = model(window)[0, -1, :vocab_size].double().cpu()
        if temperature == 0:
            out.append(int(logits.argmax()))
            continue
        likeliest = logits.topk(min(top_k or vocab_size, vocab_size))
        # Less the maximum first, so that no temperature, however low, makes an infinity of it.
        chances = torch.softmax((likeliest.values - likeliest.values[0]) / temperature, 0)
        out.append(int(likeliest.indices[torch.multinomial(chances, 1, generator=generator)]))
    return out[len(ids) :]


class RunModel:
    """The model of a run, with its corpus' words.

    Args:
        run_dir: folder of the run.
        trained: with the newest whole save's weights; else with the seed's initial ones.

    Raises:
        UserError: there is no run, nothing saved yet, or the corpus now has another tokenizer.
    """

    def __init__(self, run_dir: str | Path, trained: bool = True) -> None:
        run_dir = Path(run_dir)
        if not (run_dir / "config.toml").is_file():
            raise UserError(
                f"{run_dir}: no run here (no config.toml); give the folder that `train` or `launch` printed"
            )
        self.config: Config = load_config(run_dir / "config.toml", check=False)  # of any number of ranks
        self.corpus: Corpus = open_corpus(self.config.data)
        self.model = build(self.config.model, self.corpus.vocab_size, self.config.training.seq_len)
        self.model.init_weights(self.config.training.seed, torch.device("cpu"))
        if trained:
            saved = checkpoint.newest(run_dir)
            if saved is None:
                raise UserError(f"{run_dir}: no whole saved weights yet; they come every checkpoint.interval steps")
            meant = saved.meta.get("trajectory", {}).get("tokenizer", self.corpus.tokenizer_hash)
            if meant != self.corpus.tokenizer_hash:
                raise UserError(
                    f"{saved.path} was trained with tokenizer {meant[:12]}, but corpus {self.corpus.path} has "
                    f"{self.corpus.tokenizer_hash[:12]} now; put the corpus back as it was"
                )
            saved.load_model(self.model)

    def complete(self, prompt: str, tokens: int, temperature: float = 0.8, top_k: int = 40, seed: int = 0) -> str:
        """Continue a text.

        Raises:
            UserError: the prompt holds no token, or isn't UTF-8.
        """
        try:
            ids = self.corpus.encode(prompt)
        except UnicodeEncodeError:
            raise UserError("--prompt: it isn't UTF-8 text") from None
        if not ids:
            raise UserError("--prompt: it is empty; give some text to continue")
        added = generate(
            self.model,
            ids,
            tokens,
            seq_len=self.config.training.seq_len,
            vocab_size=self.corpus.vocab_size,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
        )
        # Not the new ids alone: some tokenizers drop the space that a text's first word starts with.
        return self.corpus.decode([*ids, *added])[len(self.corpus.decode(ids)) :]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"outlast sample: {message}")


def sample_command(args: Sequence[str]) -> int:
    """`outlast sample RUN --prompt TEXT`."""
    p = _Parser(prog="outlast sample", description="Let the newest saved weights of a run continue a text.")
    p.add_argument("run", help="run folder")
    p.add_argument("--prompt", required=True, help="text to continue")
    p.add_argument("--tokens", type=int, default=200, help="tokens to add (200)")
    p.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (0.8)")
    p.add_argument("--top-k", type=int, default=40, help="draw among so many of the likeliest, 0: all (40)")
    p.add_argument("--seed", type=int, default=0, help="of the draws (0)")
    a = p.parse_args(args)
    for name, most in [("tokens", math.inf), ("temperature", 1e6), ("top_k", math.inf), ("seed", 2**63 - 1)]:
        if not 0 <= getattr(a, name) <= most:
            expected = "0 or more" if most == math.inf else f"0 to {most:.0f}"
            raise ConfigError(f"outlast sample: --{name.replace('_', '-')} {getattr(a, name)}: expected {expected}")
    print(a.prompt + RunModel(a.run).complete(a.prompt, a.tokens, a.temperature, a.top_k, a.seed))
    return 0
