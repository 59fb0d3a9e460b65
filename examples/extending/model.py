"""A model of one's own on the usual text: token ids in, logits out."""

from torch import Tensor, nn

from outlast.trainer import Trainer


class Recurrent(nn.Module):
    """Two GRUs, one after the other."""

    def __init__(self, vocabulary: int, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.GRU(width, width, batch_first=True) for _ in range(2))  # a ModuleList is sharded
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        for layer in self.layers:
            h = h + layer(h)[0]
        return self.head(h)


class RecurrentTrainer(Trainer):
    """`outlast train --trainer examples.extending.model:RecurrentTrainer`."""

    def build_model(self) -> nn.Module:
        return Recurrent(self.corpus.vocab_size)  # torch's generator has the run's seed here
