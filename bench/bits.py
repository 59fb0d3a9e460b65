"""Check that training gives the same bits in any process, with any number of threads, on this machine.

    python bench/bits.py

Each flavour and type trains 3 steps of 2 work units in processes of their own: 1 thread, 1 thread at other memory
addresses, 2 threads. Prints one JSON line, and fails if a gradient, a weight or a moment differs in any bit.
"""

import hashlib
import itertools
import json
import subprocess
import sys
from typing import Any

FLAVORS = ("demo", "debug")
DTYPES = ("float32", "bfloat16")
RUNS = {"1 thread": (1, 0), "1 thread, elsewhere": (1, 12_345), "2 threads": (2, 0)}
"""Threads, and bytes taken beforehand."""
STEPS, UNITS, SEQS, SEQ_LEN, VOCAB = 3, 2, 2, 200, 300


def train(flavor: str, dtype: str, threads: int, num_bytes: int) -> str:
    """Hash of all gradients on the way and of the state at the end, with exact sums."""
    import torch

    from outlast.accumulate import make_sums
    from outlast.checkpoint import digest, named_state
    from outlast.config import Model, Optimizer
    from outlast.models import build, token_loss
    from outlast.optim import build_optimizer, clip_, sum_of_squares

    torch.set_num_threads(threads)
    kept = [torch.empty(num_bytes + 64 * i, dtype=torch.uint8) for i in range(100)]
    model = build(Model(flavor=flavor), VOCAB, SEQ_LEN)
    model.init_weights(0)
    params = list(model.parameters())
    optimizer = build_optimizer(params, Optimizer())
    sums = make_sums("exact", params, UNITS, SEQS * SEQ_LEN)
    draw = torch.Generator().manual_seed(0)
    seen = hashlib.sha256()
    for _ in range(STEPS):
        for unit in range(UNITS):
            batch = torch.randint(0, VOCAB, (SEQS, SEQ_LEN + 1), generator=draw)
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
                logits = model(batch[:, :-1])
            loss, tokens = token_loss(logits, batch[:, 1:])
            (loss * sums.scale).backward()
            assert sums.add(unit, loss, tokens)[0]
        totals = sums.settle()
        seen.update(totals.grad.numpy().tobytes())
        clip_(totals.grad, sum_of_squares(totals.grad) ** 0.5, 1.0)
        optimizer.step()
        sums.clear()
    seen.update(digest(named_state(model, optimizer)).encode())
    del kept
    return seen.hexdigest()


def main() -> int:
    """Start a process for each run, and compare."""
    result: dict[str, Any] = {}
    for case in itertools.product(FLAVORS, DTYPES):
        hashes = {}
        for name, (threads, num_bytes) in RUNS.items():
            command = [sys.executable, __file__, *case, str(threads), str(num_bytes)]
            hashes[name] = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
        result[" ".join(case)] = "same" if len(set(hashes.values())) == 1 else hashes
    print(json.dumps(result))
    return int(any(found != "same" for found in result.values()))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(train(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
    else:
        sys.exit(main())
