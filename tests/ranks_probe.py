"""What one rank of a group sees, for test_parallel: run by torchrun, `ranks_probe.py OUT RUN_DIR LOCAL_BATCH`."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from conftest import tiny_config
from torch import Tensor
from torch.distributed.tensor import DTensor

from outlast.config import Config
from outlast.events import NoEvents
from outlast.ranks import Ranks
from outlast.seat import Seat
from outlast.trainer import Trainer

MODES = ("none", "selective", "full")
DTYPES = ("float32", "bfloat16")


class Backwards(Trainer):
    """Adds a step's units from the last to the first."""

    def begin_step(self) -> range:
        """All units."""
        return range(self.units)[::-1]


def whole(t: Tensor) -> Tensor:
    """Of all ranks."""
    return t.full_tensor() if isinstance(t, DTensor) else t


def trained(config: Config, ranks: Ranks, cls: type[Trainer] = Trainer) -> list[Any]:
    """The digest after two steps, and the sum of the squares of all weights."""
    trainer = cls(config, NoEvents(group=0, life="probe", rank=ranks.rank), ranks)
    for _ in range(2):
        trainer.train_step()
    return [trainer.digest(), sum(float(whole(p).double().square().sum()) for p in trainer.params)]


def main() -> None:
    """Look, and write it down."""
    out, run_dir, batch = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    ranks = Ranks(Seat.from_env())
    plain: dict[str, Any] = {"local_batch_size": batch, "global_batch_size": 12, "accumulation": "exact"}
    seen: dict[str, Any] = {}

    trainer = Trainer(tiny_config(run_dir, training=plain), NoEvents(group=0, life="probe", rank=ranks.rank), ranks)
    seen["sharded"] = [isinstance(p, DTensor) for p in trainer.params]
    weights = hashlib.sha256()
    for p in trainer.params:
        weights.update(whole(p.detach()).numpy().tobytes())
    seen["weights"] = weights.hexdigest()
    share = trainer.unit_size // ranks.size
    loss, _ = trainer.loss(trainer.batch(range(ranks.rank * share, (ranks.rank + 1) * share)))
    loss.backward()
    grads = torch.cat([whole(p.grad).flatten() for p in trainer.params if p.grad is not None])

    seen["trained"] = {}
    for dtype in DTYPES:
        for mode in (*MODES, "backwards"):
            settings = tiny_config(
                run_dir,
                training={**plain, "mixed_precision_param": dtype},
                activation_checkpoint={"mode": "full" if mode == "backwards" else mode},
            )
            cls = Backwards if mode == "backwards" else Trainer
            seen["trained"][f"{dtype} {mode}"] = trained(settings, ranks, cls)
    if ranks.rank == 0:
        torch.save(grads, out.with_suffix(".pt"))
        out.write_text(json.dumps(seen))
    ranks.close()


if __name__ == "__main__":
    main()
