"""The share of this machine's GEMM rate that the plain trainer's step reaches.

    python bench/gemm.py --dtype float32
    python bench/gemm.py --dtype bfloat16 --compile

The rate is measured in the same process and threads, on the matrix products of the model itself: each weight's
forward, and its two backward products, as often as a step has them. A step's operations are 6 for each weight of a
matrix product and token, and attention's as `flops_per_token` counts them, to all positions; `share_causal` leaves out
the half that is masked. Both are measured in turns, and the medians of all turns compared, so that a busy machine
disturbs both alike. Prints one JSON line.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from step import OthersMeter, Work, make_corpus, settings

from outlast.config import load_config
from outlast.events import NoEvents
from outlast.models import Llama, flops_per_token
from outlast.trainer import Trainer

WARMUP = 3


def products(model: Llama, tokens: int) -> Counter[tuple[int, int, int]]:
    """(m, k, n) of the products of a forward and backward, and how often each comes: tokens by in by out."""
    found: Counter[tuple[int, int, int]] = Counter()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            found[tokens, module.in_features, module.out_features] += 1
    return found


def gemm_s(shapes: Counter[tuple[int, int, int]], dtype: torch.dtype) -> float:
    """Seconds of all products of one step, each kind timed on its own."""
    total = 0.0
    for (m, k, n), count in shapes.items():
        x, w, g = (torch.randn(*size, dtype=dtype) for size in ((m, k), (n, k), (m, n)))
        started = 0.0
        for _ in range(2):  # the first is for the caches
            started = time.perf_counter()
            torch.mm(x, w.t())
            torch.mm(g, w)
            torch.mm(g.t(), x)
        total += count * (time.perf_counter() - started)
    return total


def step_s(trainer: Trainer) -> float:
    """Seconds of one step, with all that belongs to it."""
    started = time.perf_counter()
    trainer.train_step()
    return time.perf_counter() - started


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dtype = torch.bfloat16 if given.dtype == "bfloat16" else torch.float32
    work = Work(batch=given.batch, steps=WARMUP + given.rounds + 1, dtype=given.dtype)
    with tempfile.TemporaryDirectory(prefix="outlast_gemm_") as out:
        folder = Path(out)
        make_corpus(folder, work.vocab)
        args = [*settings(work, folder / "corpus"), f"--job.run_dir={folder / 'run'}"]
        (folder / "run").mkdir()
        config = load_config(None, [*args, "--compile.enable"] if given.compile else args)
        trainer = Trainer(config, NoEvents(group=0, life="gemm", rank=0))
        assert isinstance(trainer.model, Llama)
        for _ in range(WARMUP):
            step_s(trainer)
        tokens = work.batch * work.seq
        shapes = products(trainer.model, tokens)
        gemm_flops = sum(6 * m * k * n * count for (m, k, n), count in shapes.items())
        flops = flops_per_token(trainer.model.args, work.seq) * tokens
        meter = OthersMeter()
        pairs = [(gemm_s(shapes, dtype), step_s(trainer)) for _ in range(given.rounds)]
        others = meter.share()
    gemm, step = (statistics.median(p[i] for p in pairs) for i in (0, 1))
    causal = flops - 6 * work.layers * work.dim * work.seq * tokens
    least = [min(p[i] for p in pairs) for i in (0, 1)]
    print(
        json.dumps(
            {
                "share": round(flops / step / (gemm_flops / gemm), 3),
                "share_causal": round(causal / step / (gemm_flops / gemm), 3),
                "share_of_minima": round(flops / least[1] / (gemm_flops / least[0]), 3),
                "gemm_gflops": round(gemm_flops / gemm / 1e9, 1),
                "step_gflops": round(flops / step / 1e9, 1),
                "step_s": round(step, 4),
                "dtype": given.dtype,
                "compile": given.compile,
                "batch": given.batch,
                "threads": 1,
                "others": others,
            }
        )
    )


if __name__ == "__main__":
    main()
