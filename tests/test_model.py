"""The Llama 3 family: published sizes, the mathematics against a slow hand-written reference, and its text."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_config, tiny_trainer, trained
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from outlast.config import Model
from outlast.data.corpus import prepare
from outlast.errors import ConfigError, UserError
from outlast.models import IGNORE, Llama, LlamaArgs, build, flops_per_token, model_args, num_parameters, token_loss
from outlast.models.llama import initial, rope_table, rotate
from outlast.models.probe import numerics_probe
from outlast.sample import generate, sample_command

SMALL = LlamaArgs(dim=24, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=20, vocab_size=50, seq_len=12)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Models this small are slower with more."""
    torch.set_num_threads(1)


def small(seed: int = 0, **changes: Any) -> Llama:
    """A model of `SMALL`'s sizes, whose weights are large enough to matter."""
    model = Llama(LlamaArgs(**{**vars(SMALL), **changes}))
    model.init_weights(seed)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
            p.mul_(8 if p.dim() > 1 else 1).add_(noise * (0.1 if p.dim() == 1 else 0.0))
    return model


def tokens(batch: int = 2, length: int = 12) -> Tensor:
    """Some ids."""
    return torch.randint(0, SMALL.vocab_size, (batch, length), generator=torch.Generator().manual_seed(7))


# --- Sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flavor", "count"),
    [("1B", 1_235_814_400), ("8B", 8_030_261_248), ("70B", 70_553_706_496), ("405B", 405_853_388_800)],
)
def test_named_sizes_have_the_published_number_of_parameters(flavor: str, count: int):
    model = build(Model(flavor=flavor), 128256, 8192)
    assert num_parameters(model) == count
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_small_sizes_are_as_large_as_they_say():
    """The demo's and the benchmarks' stated sizes."""
    assert num_parameters(build(Model(flavor="demo"), 257, 256)) >= 900_000
    assert num_parameters(build(Model(flavor="debug"), 2048, 256)) == 6_163_712
    assert num_parameters(build(Model(flavor="100M"), 32768, 256)) == pytest.approx(100e6, rel=0.02)


def test_flops_are_six_a_weight_and_the_attention():
    args = model_args(Model(flavor="8B"), 128256, 8192)
    model = build(Model(flavor="8B"), 128256, 8192)
    products = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "tok_embeddings" not in n)
    assert flops_per_token(args, 8192) == 6 * products + 12 * 32 * 4096 * 8192


def test_the_vocabulary_follows_the_corpus():
    assert model_args(Model(flavor="8B"), 257, 16).vocab_size == 320
    assert model_args(Model(flavor="8B"), 320, 16).vocab_size == 320
    assert model_args(Model(flavor="8B", vocab_size=1000), 257, 16).vocab_size == 1000


def test_given_sizes_win_over_the_flavours():
    args = model_args(Model(flavor="8B", dim=64, n_layers=3, n_kv_heads=16, ffn_dim=99), 64, 128)
    assert (args.dim, args.n_layers, args.n_heads, args.n_kv_heads, args.ffn_dim) == (64, 3, 32, 16, 99)
    assert args.seq_len == 128
    for model, tied in [
        (Model(flavor="1B"), True),
        (Model(flavor="1B", tie_embeddings="no"), False),
        (Model(flavor="8B", tie_embeddings="yes"), True),
    ]:
        assert model_args(model, 64, 16).tie_embeddings is tied


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"flavor": "8b"}, "did you mean 8B"),
        ({"flavor": "xyz"}, "demo, debug"),
        ({"dim": 100, "n_heads": 8}, "model.dim = 100"),
        ({"n_heads": 16, "n_kv_heads": 3}, "model.n_heads = 16"),
        ({"dim": 48, "n_heads": 16, "n_kv_heads": 16}, "even"),
        ({"n_layers": -1}, "model.n_layers = -1"),
        ({"dim": -256}, "model.dim = -256"),
        ({"n_heads": -16}, "model.n_heads = -16"),
        ({"ffn_dim": -1}, "model.ffn_dim = -1"),
        ({"vocab_size": 256}, "model.vocab_size = 256"),
    ],
)
def test_sizes_that_cannot_go_together_are_refused(sizes: dict[str, Any], says: str):
    with pytest.raises(ConfigError) as e:
        build(Model(**sizes), 257, 16)
    assert says in str(e.value) and "\n" not in str(e.value)


# --- Initial weights -------------------------------------------------------------------------------


def test_initial_weights_are_a_function_of_the_seed_alone():
    torch.manual_seed(1)
    one = small(3).state_dict()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    two = small(3).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[k], two[k]) for k in one)
    other = small(4).state_dict()
    assert not any(torch.equal(one[k], other[k]) for k in one if one[k].dim() == 2)


def test_each_weight_is_drawn_for_itself():
    """A rank that holds only some of them makes the same ones, in any order."""
    model = build(Model(flavor="demo"), 257, 16)
    model.init_weights(5)
    for name, p in reversed(list(model.named_parameters())):
        assert torch.equal(p, initial(name, p.shape, 5, model.args)), name
        assert p.dtype == torch.float32 and p.requires_grad


def test_initial_weights_have_the_stated_spread():
    args = LlamaArgs(dim=256, n_layers=8, n_heads=4, n_kv_heads=4, ffn_dim=512)
    for name, std in [
        ("layers.0.attention.wq.weight", 0.02),
        ("layers.0.feed_forward.w1.weight", 0.02),
        ("layers.0.attention.wo.weight", 0.02 / 4),
        ("layers.7.feed_forward.w2.weight", 0.02 / 4),
    ]:
        w = initial(name, (256, 512), 0, args)
        assert w.std().item() == pytest.approx(std, rel=0.03)
        assert w.abs().max() <= 3 * std
        assert abs(w.mean().item()) < std / 50
    assert (initial("norm.weight", (9,), 0, args) == 1).all()


def test_a_fresh_model_knows_nothing():
    model = build(Model(flavor="demo"), 257, 16)
    model.init_weights(0)
    loss, count = token_loss(model(tokens()), tokens())
    assert loss.item() / count == pytest.approx(math.log(320), abs=0.2)


# --- Rotary positions ------------------------------------------------------------------------------


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 20), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_a_rotated_product_depends_on_the_distance_only(m: int, n: int, shift: int, seed: int):
    table = rope_table(LlamaArgs(dim=16, n_layers=1, n_heads=1, n_kv_heads=1, ffn_dim=1, seq_len=64)).double()
    g = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 16, generator=g, dtype=torch.float64)

    def product(at: int, other: int) -> float:
        return float(rotate(q.view(1, 1, 1, -1), table[at : at + 1]).flatten() @ turned(k, other))

    def turned(x: Tensor, at: int) -> Tensor:
        return rotate(x.view(1, 1, 1, -1), table[at : at + 1]).flatten()

    assert product(m, n) == pytest.approx(product(m + shift, n + shift), abs=1e-4)
    assert turned(q, m).norm() == pytest.approx(q.norm().item(), rel=1e-6)
    assert torch.equal(turned(q, 0), q)


def published_angles(theta: float, head_dim: int, factor: float) -> list[float]:
    """Radians a position, as in Meta's `apply_scaling` (low and high frequency factors 1 and 4)."""
    out = []
    for i in range(head_dim // 2):
        rate = theta ** (-2 * i / head_dim)
        wavelength = 2 * math.pi / rate
        if wavelength > 8192:
            rate /= factor
        elif wavelength > 8192 / 4:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            rate = (1 - smooth) * rate / factor + smooth * rate
        out.append(rate)
    return out


@pytest.mark.parametrize(("flavor", "factor"), [("8B", 1.0), ("405B", 8.0), ("1B", 32.0)])
def test_wavelengths_are_the_published_ones(flavor: str, factor: float):
    args = model_args(Model(flavor=flavor), 128256, 3)
    table = rope_table(args)
    rates = torch.tensor(published_angles(500000.0, args.head_dim, factor), dtype=torch.float64)
    for position in range(3):
        assert torch.allclose(table[position, :, 0].double(), (position * rates).cos(), atol=1e-7)
        assert torch.allclose(table[position, :, 1].double(), (position * rates).sin(), atol=1e-7)


# --- The model -------------------------------------------------------------------------------------


def slow_reference(model: Llama, ids: list[int]) -> Tensor:
    """Logits of one sequence [T, V], in float64, position by position and head by head, from the papers."""
    a, w = model.args, {k: v.double() for k, v in model.state_dict().items()}
    rates = published_angles(a.rope_theta, a.head_dim, a.rope_factor)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (sum(v * v for v in x) / len(x) + a.norm_eps) ** 0.5 * weight

    def turn(x: Tensor, position: int) -> Tensor:
        out = x.clone()
        for i, rate in enumerate(rates):
            c, s = math.cos(position * rate), math.sin(position * rate)
            out[2 * i] = c * x[2 * i] - s * x[2 * i + 1]
            out[2 * i + 1] = s * x[2 * i] + c * x[2 * i + 1]
        return out

    stream = [w["tok_embeddings.weight"][i] for i in ids]
    for layer in range(a.n_layers):
        p = f"layers.{layer}."
        normed = [norm(x, w[p + "attention_norm.weight"]) for x in stream]
        q, k, v = ([(w[f"{p}attention.w{n}.weight"] @ x).split(a.head_dim) for x in normed] for n in "qkv")
        for t in range(len(ids)):
            heads = []
            for h in range(a.n_heads):
                g = h * a.n_kv_heads // a.n_heads
                query = turn(q[t][h], t)
                scores = torch.stack([query @ turn(k[s][g], s) for s in range(t + 1)]) / a.head_dim**0.5
                weights = scores.exp() / scores.exp().sum()
                heads.append(sum((weights[s] * v[s][g] for s in range(t + 1)), torch.zeros(a.head_dim)))
            stream[t] = stream[t] + w[p + "attention.wo.weight"] @ torch.cat(heads)
            x = norm(stream[t], w[p + "ffn_norm.weight"])
            gate = w[p + "feed_forward.w1.weight"] @ x
            hidden = gate / (1 + (-gate).exp()) * (w[p + "feed_forward.w3.weight"] @ x)
            stream[t] = stream[t] + w[p + "feed_forward.w2.weight"] @ hidden
    return torch.stack([w["output.weight"] @ norm(x, w["norm.weight"]) for x in stream])


@pytest.mark.parametrize(
    "changes", [{}, {"n_kv_heads": 4}, {"n_kv_heads": 1, "tie_embeddings": True}, {"rope_factor": 8.0}]
)
@torch.no_grad()
def test_the_model_is_the_papers(changes: dict[str, Any]):
    model, ids = small(**changes).double(), tokens()
    a = model.args
    rates = torch.tensor(published_angles(a.rope_theta, a.head_dim, a.rope_factor), dtype=torch.float64)
    angles = torch.arange(a.seq_len)[:, None] * rates
    exact = torch.stack((angles.cos(), angles.sin()), -1)
    assert torch.allclose(model.rope, exact, rtol=0, atol=1e-7)
    model.rope = exact  # the table's own rounding is out of the comparison
    found = model(ids)
    for row, sequence in zip(found, ids.tolist(), strict=True):
        expected = slow_reference(model, sequence)
        assert expected.std() > 0.3  # large enough to be told from nothing
        assert torch.allclose(row, expected, rtol=1e-9, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("at", [1, 5, 11])
def test_no_position_sees_what_comes_after_it(at: int):
    model, ids = small(), tokens()
    other = ids.clone()
    other[:, at] = (other[:, at] + 1) % SMALL.vocab_size
    one, two = model(ids), model(other)
    assert torch.equal(one[:, :at], two[:, :at])
    assert (one[:, at:] != two[:, at:]).any(-1).all()


@torch.no_grad()
def test_a_sequences_logits_do_not_depend_on_its_batch():
    model, ids = small(), tokens(batch=3)
    assert torch.allclose(model(ids)[1:2], model(ids[1:2]), rtol=1e-5, atol=1e-6)
    assert torch.allclose(model(ids[:, :7]), model(ids)[:, :7], rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_grouped_heads_are_full_attention_with_each_key_and_value_repeated():
    grouped, full = small(n_kv_heads=2), small(n_kv_heads=4)
    state = grouped.state_dict()
    for name, w in state.items():
        if name.endswith(("wk.weight", "wv.weight")):
            state[name] = w.unflatten(0, (2, SMALL.head_dim)).repeat_interleave(2, 0).flatten(0, 1)
    full.load_state_dict(state)
    assert torch.allclose(grouped(tokens()), full(tokens()), rtol=1e-5, atol=1e-6)


def test_tied_embeddings_are_one_parameter():
    model = small(tie_embeddings=True)
    assert model.output.weight is model.tok_embeddings.weight
    names = [name for name, _ in model.named_parameters()]
    assert "tok_embeddings.weight" in names and "output.weight" not in names
    assert num_parameters(small()) - num_parameters(model) == SMALL.vocab_size * SMALL.dim
    unused = SMALL.vocab_size - 1
    ids = tokens().clamp(max=unused - 1)
    token_loss(model(ids), ids)[0].backward()
    grad = model.tok_embeddings.weight.grad
    assert grad is not None and grad[unused].any()  # as an output only


# --- Loss ------------------------------------------------------------------------------------------


def test_ignored_targets_count_for_nothing():
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 5, 9, generator=g, requires_grad=True)
    targets = torch.randint(0, 9, (2, 5), generator=g)
    targets[0, 1:4] = targets[1, 4] = IGNORE
    loss, count = token_loss(logits, targets)
    kept = [(b, t) for b in range(2) for t in range(5) if targets[b, t] != IGNORE]
    assert count == len(kept) == 6
    numbers = logits.detach().double()
    by_hand = sum(math.log(numbers[b, t].exp().sum()) - float(numbers[b, t, targets[b, t]]) for b, t in kept)
    assert loss.item() == pytest.approx(by_hand, rel=1e-6)
    loss.backward()
    assert logits.grad is not None
    assert not logits.grad[0, 1:4].any() and not logits.grad[1, 4].any() and logits.grad[0, 0].any()


def test_a_unit_without_targets_has_no_loss():
    logits = torch.randn(1, 3, 5, requires_grad=True)
    loss, count = token_loss(logits, torch.full((1, 3), IGNORE))
    loss.backward()
    assert (loss.item(), count) == (0.0, 0)
    assert logits.grad is not None and not logits.grad.any()


def test_sums_of_parts_are_the_sum():
    g = torch.Generator().manual_seed(2)
    logits, targets = torch.randn(4, 6, 9, generator=g), torch.randint(0, 9, (4, 6), generator=g)
    whole, count = token_loss(logits, targets)
    parts = [token_loss(logits[i : i + 1], targets[i : i + 1]) for i in range(4)]
    assert count == sum(n for _, n in parts) == 24
    assert whole.item() == pytest.approx(sum(x.item() for x, _ in parts), rel=1e-6)


def test_half_precision_logits_are_summed_in_full():
    logits = torch.randn(8, 64, 100, generator=torch.Generator().manual_seed(3)).bfloat16()
    targets = torch.arange(8 * 64).view(8, 64) % 100
    loss, _ = token_loss(logits, targets)
    assert loss.dtype == torch.float32
    true = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), reduction="sum")
    assert loss.item() == pytest.approx(true.item(), rel=1e-5)


# --- Bits ------------------------------------------------------------------------------------------


def test_gradients_have_the_same_bits_in_any_process_with_any_number_of_threads():
    """What exact sums stand on: one unit has one gradient, whoever computes it."""
    code = "import torch; from outlast.models.probe import numerics_probe as p; torch.set_num_threads(1); "
    code += "print(p(torch.device('cpu'), False), p(torch.device('cpu'), True))"
    env = {**os.environ, "PYTHONHASHSEED": "3"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found = [numerics_probe(torch.device("cpu"), bf16) for bf16 in (False, True)]
            assert found == done.stdout.split()
            assert found[0] != found[1]
    finally:
        torch.set_num_threads(before)


# --- Text ------------------------------------------------------------------------------------------


class Scores(nn.Module):
    """Gives every position the same logits."""

    def __init__(self, logits: Sequence[float]) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))

    def forward(self, ids: Tensor) -> Tensor:
        return self.logits.expand(*ids.shape, -1)


@torch.no_grad()
def test_the_likeliest_text_is_the_argmax_of_each_window():
    model, ids = small(), [3, 1, 4]
    expected = list(ids)
    for _ in range(20):  # past the window of 12
        expected.append(int(model(torch.tensor([expected[-12:]]))[0, -1].argmax()))
    wanted = expected[3:]
    assert generate(model, ids, 20, seq_len=12, vocab_size=50, temperature=0) == wanted
    assert generate(model, ids, 20, seq_len=12, vocab_size=50, temperature=1.0, top_k=1) == wanted
    assert generate(model, ids, 20, seq_len=12, vocab_size=50, temperature=5e-324, top_k=0) == wanted
    assert len(set(wanted)) > 1


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1e6])
@pytest.mark.parametrize("top_k", [0, 3, 100])
def test_padding_of_the_embedding_is_never_chosen(temperature: float, top_k: int):
    model = Scores([0.0, 1.0, 2.0, 0.5, 50.0, 60.0])
    drawn = generate(model, [0], 100, seq_len=8, vocab_size=4, temperature=temperature, top_k=top_k)
    assert len(drawn) == 100 and set(drawn) <= {0, 1, 2, 3}


def test_draws_follow_the_tempered_odds_of_the_top_k():
    logits, n = [0.0, 1.0, 2.0, 1.0, -1.0], 4000
    drawn = generate(Scores(logits), [0], n, seq_len=1, vocab_size=5, temperature=0.5, top_k=2)
    top = math.exp(2 / 0.5) / (math.exp(2 / 0.5) + math.exp(1 / 0.5))
    assert drawn.count(2) / n == pytest.approx(top, abs=0.03)
    assert len(set(drawn)) == 2  # of two that are equal, one is in
    drawn = generate(Scores(logits), [0], n, seq_len=1, vocab_size=5, temperature=2.0, top_k=0)
    odds = [math.exp(x / 2) for x in logits]
    for i, x in enumerate(odds):
        assert drawn.count(i) / n == pytest.approx(x / sum(odds), abs=0.03)


def test_a_text_is_a_function_of_its_seed():
    model = small()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    texts = [generate(model, [1], 30, seq_len=12, vocab_size=50, temperature=2.0, seed=s) for s in (5, 5, 6)]
    assert torch.equal(torch.get_rng_state(), before)
    assert texts[0] == texts[1] != texts[2]


def test_a_run_continues_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trained(tiny_config(tmp_path))
    capsys.readouterr()
    said = []
    for seed in ("1", "1", "2"):
        assert sample_command([str(tmp_path), "--prompt", "the läst", "--tokens", "30", "--seed", seed]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2]
    assert all(text.startswith("the läst") and len(text) > 20 for text in said)


def test_a_text_that_cannot_be_is_refused_in_one_line(tmp_path: Path, corpus: Path):
    def refused(*args: str | Path) -> str:
        with pytest.raises(UserError) as e:
            sample_command([str(a) for a in args])
        assert e.value.exit_code == 2 and "\n" not in str(e.value)
        return str(e.value)

    assert "no run here" in refused(tmp_path / "nothing", "--prompt", "a")
    tiny_trainer(tiny_config(tmp_path)).write_config()
    assert "no whole saved weights yet" in refused(tmp_path, "--prompt", "a")
    assert "--prompt" in refused(tmp_path)
    trained(tiny_config(tmp_path))
    assert "--prompt: it is empty" in refused(tmp_path, "--prompt", "")
    assert "--prompt: it isn't UTF-8" in refused(tmp_path, "--prompt", "\udcff")
    for option, value in [
        ("--tokens", "-1"),
        ("--tokens", "x"),
        ("--temperature", "nan"),
        ("--temperature", "-0.1"),
        ("--top-k", "-1"),
        ("--seed", "-1"),
        ("--seed", str(2**64)),
    ]:
        assert option in refused(tmp_path, "--prompt", "a", f"{option}={value}")


def test_weights_of_another_tokenizer_are_refused(tmp_path: Path):
    trained(tiny_config(tmp_path / "run"))
    words = tmp_path / "words.json"
    vocabulary = {"[UNK]": 0, **{chr(i): i for i in range(1, 257)}}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    words.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    (tmp_path / "text").write_text("a b c " * 100)
    prepare([tmp_path / "text"], tmp_path / "other", words)
    config = tmp_path / "run" / "config.toml"
    path = next(line for line in config.read_text().splitlines() if line.startswith("path = "))
    config.write_text(config.read_text().replace(path, f'path = "{tmp_path / "other"}"'))
    with pytest.raises(UserError, match="put the corpus back"):
        sample_command([str(tmp_path / "run"), "--prompt", "a"])
