"""Next-token prediction: the loss and the accuracy of a language model. The targets are the tokens themselves.

A model gives outputs "b t v" for tokens "b t", as they are or as `logits`, as Hugging Face's models do. The output at
place i is compared with the token at place i + 1. Tokens that are −100 are no targets: padding, or a question of which
the answer alone is to be learned.
"""

from typing import Any

from torch import Tensor
from torch.nn import functional

IGNORED = -100  # as in torch's cross_entropy


def next_token(outputs: Any, tokens: Tensor) -> Tensor:
    """−1/N Σ log p(token i + 1 | tokens 0 … i) over the N tokens that are targets.

    >>> import torch
    >>> tokens = torch.tensor([[0, 1, 2], [0, 1, -100]])
    >>> next_token(torch.zeros(2, 3, 4), tokens).exp()  # as likely as one of 4
    tensor(4.)
    """
    logits, targets = _shifted(outputs, tokens)
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)


def next_token_accuracy(outputs: Any, tokens: Tensor) -> Tensor:
    """The share of the targets whose token is the most likely one."""
    logits, targets = _shifted(outputs, tokens)
    asked = targets != IGNORED
    right: Tensor = (logits.argmax(dim=-1) == targets) & asked
    return right.sum().double() / asked.sum()


def _shifted(outputs: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs, and the tokens that they are to predict."""
    logits: Tensor = getattr(outputs, "logits", outputs)
    return logits[:, :-1], tokens[:, 1:]
