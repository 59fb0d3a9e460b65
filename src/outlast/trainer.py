"""The plain trainer. It reads top to bottom: begin a step, run its work units, settle, commit.

A step's global batch is cut into M work units. Each is one forward and backward of all ranks of the group, added
whole to the sums; the settled sums are the step's gradient. A subclass may override the seams `begin`, `more`,
`begin_step`, `run_unit`, `settle`, `commit` and `finish` to share the units out, and `open_data`, `batch`,
`build_model` and `loss` to train something else.
"""

import math
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outlast import __version__, checkpoint, saves
from outlast.accumulate import Totals, make_sums
from outlast.callbacks import Callbacks, Evaluation, Step, kept_state
from outlast.config import Config, to_toml, trajectory_fields
from outlast.data.corpus import open_corpus
from outlast.data.order import Samples, hash_of_samples, seed_of, unit_batch, unit_samples
from outlast.errors import UserError
from outlast.events import EventLog, since
from outlast.metrics import Metrics
from outlast.models import build, token_loss
from outlast.optim import build_optimizer, clip_, learning_rate, sum_of_squares
from outlast.parallel import lay_out, settle_shards
from outlast.ranks import Ranks, pick_device
from outlast.seat import Seat


class Trainer:
    """Trains one copy of a model, on one rank or several.

    Args:
        config: checked, with `job.run_dir` set.
        events: where this process says what it does.
        ranks: of this group; left out: this process alone.

    Raises:
        UserError: the corpus, the model or the run folder don't fit the config.
    """

    config_class: ClassVar[type[Config]] = Config
    """What the config is read into: `Config`, or a subclass with sections of one's own."""

    def __init__(self, config: Config, events: EventLog, ranks: Ranks | None = None) -> None:
        t = config.training
        self.config = config
        self.events = events
        self.ranks = ranks or Ranks(device=pick_device(t.device, Seat().local_rank))
        self.device = self.ranks.device
        self.run_dir = Path(config.job.run_dir)
        self.units = config.units(self.ranks.size)
        self.unit_size = t.local_batch_size * self.ranks.size
        self.open_data()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(t.seed)
            self.model = self.build_model()
        lay_out(self.model, config, self.ranks)
        self.init_weights()
        settle_shards(self.model)
        self.params = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = build_optimizer(self.params, config.optimizer)
        self.sums = make_sums(t.accumulation, self.params, self.units, self.unit_size * t.seq_len, self.ranks)
        self.metrics = Metrics(config, self.run_dir)
        self.callbacks = Callbacks(config.job.callbacks, self.run_dir)
        self.step = 0
        """Updates committed."""
        self.skipped_in_a_row = 0
        self.stopping = False
        """This rank was asked to stop. The step in hand is finished first."""
        self.digests: dict[int, str] = {}
        self._committed_at = time.perf_counter()

    # What is trained -------------------------------------------------------------------------------

    def open_data(self) -> None:
        """Make ready what `batch` reads."""
        t = self.config.training
        self.corpus = open_corpus(self.config.data)
        self.samples = Samples(self.corpus, t.seq_len, t.seed)

    def data_facts(self) -> dict[str, Any]:
        """What else decides what `batch` gives, besides the config."""
        return {
            "corpus": self.corpus.hash,
            "tokenizer": self.corpus.tokenizer_hash,
            "grain": version("grain"),  # it decides the order of the data
        }

    def batch(self, samples: range) -> Tensor:
        """What one forward takes, on the CPU: a pure function of the samples' numbers, random parts included.

        Args:
            samples: numbers in the global order of all samples.

        Returns:
            These samples by the first dimension: token ids, int64 [sequences, seq_len + 1].
        """
        return torch.from_numpy(unit_batch(self.samples, samples.start, len(samples)))

    def build_model(self) -> nn.Module:
        """The model: on the CPU, with the numbers that its constructor draws (torch's generator has the seed).

        Or on the meta device: its `init_weights(seed, device)` gives it numbers, once it is laid out over the ranks.
        """
        c = self.config
        return build(c.model, self.corpus.vocab_size, c.training.seq_len)

    def init_weights(self) -> None:
        """Give the model its device and the seed's initial numbers, the same for any number of ranks."""
        make = getattr(self.model, "init_weights", None)
        if make is not None:
            make(self.config.training.seed, self.device)
        elif any(p.is_meta for p in self.model.parameters()):
            raise UserError(
                f"{type(self.model).__name__} is on the meta device and has no init_weights(seed, device): "
                "give it one, or build it on the CPU"
            )
        else:
            self.model.to(self.device)

    def loss(self, batch: Tensor) -> tuple[Tensor, int]:
        """Summed loss of one unit's sequences.

        Args:
            batch: as `batch` made it, on the device; of this rank's sequences.

        Returns:
            The sum over its targets (fp32 scalar, nats) and how many counted.
        """
        with self.autocast():
            logits = self.model(batch[:, :-1])
        return token_loss(logits, batch[:, 1:])

    def evaluate(self) -> dict[str, float]:
        """Figures of the model as it is, every `metrics.evaluate_every` steps and at the end; none by default.

        Called on all ranks of the group that writes the run's saves, in `eval` mode and without gradients; rank 0's
        values count. It may draw random numbers, and mustn't change the model. The other groups wait for it as they do
        for a save.
        """
        return {}

    def autocast(self) -> AbstractContextManager[Any]:
        """`training.mixed_precision_param` for the matrix products; sharded weights are gathered in that type."""
        bf16 = self.config.training.mixed_precision_param == "bfloat16" and self.ranks.size == 1
        return torch.autocast(self.device.type, torch.bfloat16, enabled=bf16)

    def state(self) -> dict[str, Tensor]:
        """All that training changes, besides the step; sharded tensors are DTensors."""
        return checkpoint.named_state(self.model, self.optimizer)

    # The run ---------------------------------------------------------------------------------------

    def train(self) -> None:
        """Run to the last step, or until asked to stop."""
        self.begin()
        while self.more():
            self.train_step()
        self.finish()

    def train_step(self) -> None:
        """One update."""
        for unit in self.begin_step():
            self.run_unit(unit)
        self.commit(self.settle())

    def begin(self) -> None:
        """Resume from the newest whole save, and say what is about to run."""
        self.write_config()
        if self.config.checkpoint.enable:
            self.resume()
        self.metrics.restart_clock()
        self._committed_at = time.perf_counter()
        self.events.emit(
            "start",
            steps=self.config.training.steps,
            step=self.step,
            units=self.units,
            unit_samples=self.unit_size,
            ranks=self.ranks.size,
            seq_len=self.config.training.seq_len,
            pid=os.getpid(),
            parameters=sum(p.numel() for p in self.params),
            trainer=type(self).__name__,
            trajectory=self.trajectory(),
        )

    def more(self) -> bool:
        """Whether there is another step to make; a rank that was asked to stop asks for all."""
        return self.step < self.config.training.steps and not self.ranks.any(self.stopping)

    def begin_step(self) -> Sequence[int]:
        """The units to compute now: all of them."""
        return range(self.units)

    def run_unit(self, unit: int) -> None:
        """Forward and backward of one unit, each rank its share of the sequences, then added whole to the sums."""
        started = time.perf_counter()
        wanted = unit_samples(self.step + 1, unit, units=self.units, unit_size=self.unit_size)
        share = self.unit_size // self.ranks.size
        mine = wanted[self.ranks.rank * share :][:share]
        torch.manual_seed(seed_of(mine, self.config.training.seed))  # the same chance, whoever computes this unit
        batch = self.batch(mine)
        loss, tokens = self.loss(batch.to(self.device))
        (loss * self.sums.scale).backward()
        if self.config.training.unit_pause_ms:
            time.sleep(self.config.training.unit_pause_ms / 1000)
        _, data = self.sums.add(unit, loss, tokens, hash_of_samples(batch.numpy(), mine.start))
        self.events.emit(
            "unit",
            step=self.step + 1,
            unit=unit,
            samples=[wanted.start, wanted.stop],
            hash=f"{data:012x}",
            seconds=since(started),
        )

    def settle(self) -> Totals:
        """The step's totals, with each parameter's gradient set."""
        return self.sums.settle()

    def commit(self, totals: Totals, **facts: Any) -> None:
        """Say what is committed, then apply the update.

        Args:
            totals: of the whole step.
            facts: more fields for the commit's event.

        Raises:
            UserError: too many updates in a row were skipped.
        """
        step = self.step + 1
        lr = learning_rate(step, self.config)
        norm = float("nan") if totals.bad_units else self.norm(totals.grad)
        skipped = self.why_skip(totals, norm)
        now = time.perf_counter()
        first, size = self.step * self.units * self.unit_size, self.units * self.unit_size
        self.events.emit(
            "commit",
            step=step,
            loss=totals.loss,
            lr=lr,
            grad_norm=None if skipped else norm,
            tokens=totals.tokens,
            data=f"{totals.data:012x}",
            samples=[first, first + size],
            units=self.units,
            skipped=skipped,
            seconds=round(now - self._committed_at, 6),
            **facts,
        )
        seconds, self._committed_at = now - self._committed_at, now
        if skipped:
            self.say(f"step {step}: update skipped: {skipped}")
        else:
            clip_(totals.grad, norm, self.config.training.max_norm)
            self.optimizer.param_groups[0]["lr"] = lr
            self.optimizer.step()
        self.sums.clear()
        self.step = step
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        self.after_commit({"loss": totals.loss, "lr": lr, "grad_norm": norm}, totals.tokens)
        if self.callbacks and self.speaks():
            steps = self.config.training.steps
            self.callbacks.on_step(Step(step, steps, totals.loss, lr, norm, totals.tokens, seconds))

    def say(self, text: str) -> None:
        """A line for people, once for all ranks."""
        if self.ranks.rank == 0:
            print(text, flush=True)

    def why_skip(self, totals: Totals, norm: float) -> str | None:
        """The reason not to apply this update, or None."""
        if totals.bad_units:
            return f"units {list(totals.bad_units)} gave a gradient that isn't finite or is out of range"
        return None if math.isfinite(norm) else f"the gradient's norm is {norm}"

    def norm(self, grad: Tensor) -> float:
        """L2 norm of a gradient that the ranks have in parts, in a fixed order: the same on all of them."""
        return math.fsum(self.ranks.all(sum_of_squares(grad))) ** 0.5

    def digest(self) -> str:
        """SHA-256 over weights and optimizer state of the whole group."""
        return checkpoint.digest_of_ranks(self.ranks.all(checkpoint.digest(self.state())))

    def after_commit(self, values: dict[str, float], tokens: int) -> None:
        """Report, digest and save, each when it is due."""
        c, last = self.config, self.step == self.config.training.steps
        self.metrics.step(self.step, tokens, values, speaks=self.speaks())
        if last or (c.metrics.digest_every and self.step % c.metrics.digest_every == 0):
            self.digests = {self.step: self.digest()}
            self.events.emit("digest", step=self.step, sha256=self.digests[self.step])
        if self.writes() and (last or (c.metrics.evaluate_every and self.step % c.metrics.evaluate_every == 0)):
            self.run_evaluation()
        if c.checkpoint.enable and self.writes() and (last or self.step % c.checkpoint.interval == 0):
            self.save()
        if self.skipped_in_a_row >= c.training.max_skipped_steps:
            raise UserError(
                f"{self.skipped_in_a_row} updates in a row were skipped (training.max_skipped_steps), the last at step "
                f"{self.step}: lower optimizer.lr, or look at the data"
            )

    def run_evaluation(self) -> None:
        """Evaluate, say what came out, and leave no trace in what is trained."""
        if type(self).evaluate is Trainer.evaluate:
            return
        started = time.perf_counter()
        training = [module for module in self.model.modules() if module.training]
        with kept_state(), torch.no_grad():
            self.model.eval()
            try:
                values = {str(name): float(value) for name, value in self.evaluate().items()}
            finally:
                for module in training:
                    module.training = True
        values = self.ranks.first(values)
        told = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self.events.emit("evaluation", step=self.step, values=told, seconds=since(started))
        if self.speaks():
            self.metrics.evaluation(self.step, values)
            if self.callbacks:
                self.callbacks.on_evaluation(Evaluation(self.step, values))
        self.metrics.restart_clock()

    def finish(self) -> None:
        """Leave the run in good order: everything saved, and marked as done if it is."""
        c = self.config
        if c.checkpoint.enable and self.writes() and self.step and self.ranks.wait_first(self.unsaved):
            self.save()
        if self.step == c.training.steps and self.writes():
            digest = self.digests.get(self.step) or self.digest()
            if self.ranks.rank == 0:
                saves.mark_done(self.run_dir, step=self.step, digest=digest, trajectory=self.trajectory())
        self.metrics.close()

    # Saved weights ---------------------------------------------------------------------------------

    def writes(self) -> bool:
        """Whether this group writes the run's saves and curves."""
        return True

    def speaks(self) -> bool:
        """Whether this process reports for the run."""
        return self.writes() and self.ranks.rank == 0

    def unsaved(self) -> bool:
        """Whether there is no whole save of this step."""
        return saves.problem(self.run_dir, self.step) is not None

    def save(self) -> None:
        """Save weights, optimizer and step, whole."""
        started = time.perf_counter()
        meta = {"step": self.step, "trajectory": self.trajectory(), **self.save_facts()}
        keep = self.config.checkpoint.keep_latest_k
        size = checkpoint.save(self.run_dir, self.step, self.state(), meta, keep, self.ranks)
        self._say_checkpoint("save", self.step, bytes=size, seconds=since(started))

    def save_facts(self) -> dict[str, Any]:
        """More facts to keep with a save."""
        return {"skipped_in_a_row": self.skipped_in_a_row, "ranks": self.ranks.size}

    def resume(self) -> dict[str, Any]:
        """Load the newest whole save, if there is one.

        Returns:
            What `save_facts` gave then; empty if there is none.

        Raises:
            UserError: it belongs to another trajectory.
        """
        started = time.perf_counter()
        step = self.ranks.wait_first(self.newest_save)
        if step is None:
            return {}
        saved = checkpoint.Saved.read(self.run_dir, step)
        differs = [k for k, v in self.trajectory().items() if saved.meta["trajectory"].get(k) != v]
        if differs:
            k = differs[0]
            raise UserError(
                f"{saved.path} was trained with {k} = {saved.meta['trajectory'].get(k)!r}, this run has "
                f"{self.trajectory()[k]!r}; use the same, or another --job.run_dir"
            )
        saved.load_into(self.state())
        self.step = saved.step
        self.skipped_in_a_row = saved.meta["skipped_in_a_row"]
        self._say_checkpoint("load", self.step, seconds=since(started))
        then = saved.meta["ranks"]
        other = "" if then == self.ranks.size else f"; groups had {then} ranks: the same samples, other rounding"
        self.say(f"resumed from step {self.step}, {saved.path}{other}")
        return saved.meta

    def newest_save(self) -> int | None:
        """Step of the newest whole save; what isn't whole is named and passed over."""
        for step in saves.steps_saved(self.run_dir):
            why = saves.problem(self.run_dir, step)
            if why is None:
                return step
            self.say(f"the save of step {step} isn't whole and is passed over: {why}")
            self._say_checkpoint("skip", step, why=why)
        return None

    def _say_checkpoint(self, action: str, step: int, **fields: Any) -> None:
        path = str(saves.save_path(self.run_dir, step))
        self.events.emit("checkpoint", action=action, step=step, path=path, **fields)

    def trajectory(self) -> dict[str, Any]:
        """Everything that decides which weights come out."""
        return {
            **trajectory_fields(self.config),
            **self.data_facts(),
            "torch": str(torch.__version__),
            "outlast": __version__,
        }

    def write_config(self) -> None:
        """Keep the run's config beside its weights, for those that read them later."""
        path = self.run_dir / "config.toml"
        if self.ranks.rank == 0 and not path.exists():
            saves.write_whole(path, to_toml(self.config))
