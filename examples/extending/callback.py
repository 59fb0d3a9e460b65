"""A callback: a line of CSV a step."""

from outlast.callbacks import Callback, Evaluation, Step


class Table(Callback):
    """`outlast train --job.callbacks examples.extending.callback:Table`."""

    def on_step(self, step: Step) -> None:
        with (self.run_dir / "steps.csv").open("a") as f:
            print(step.step, step.loss, step.lr, sep=",", file=f)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        with (self.run_dir / "evaluations.csv").open("a") as f:
            print(evaluation.step, *evaluation.values.values(), sep=",", file=f)
