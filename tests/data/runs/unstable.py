"""A small model that ends its process while a file `crash` lies next to it."""

import os
from pathlib import Path

from torch import Tensor, nn


class Unstable(nn.Module):
    """Token ids to logits, without a block in between."""

    def __init__(self, vocab_size: int = 200, d_model: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.head = nn.Linear(d_model, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        if Path(__file__).with_name("crash").exists():
            os._exit(3)
        logits: Tensor = self.head(self.embedding(tokens))
        return logits
