"""Sentences of different length: inputs as a dictionary, a network that takes them by name.

    python examples/text.py

Which language is a sentence in? Each of eight clients has sentences of its own.
"""

import torch
from torch import Tensor, nn

import quafl

SENTENCES = {
    0: "the cat sat on the mat|we will meet them at noon|this is the house that jack built|all good things must end|"
    "there is nothing new under the sun|what have you done with it|he who laughs last laughs best|time will tell",
    1: "die katze sitzt auf der matte|wir treffen sie am mittag|das ist das haus vom nikolaus|alles hat ein ende|"
    "es gibt nichts neues unter der sonne|was hast du damit gemacht|wer zuletzt lacht lacht am besten|kommt zeit",
}
LONGEST = 48


def encode(sentence: str) -> tuple[Tensor, Tensor]:
    """Letters as numbers, and where there are any."""
    letters = torch.tensor([1 + "abcdefghijklmnopqrstuvwxyz ".index(letter) for letter in sentence[:LONGEST]])
    padded = torch.zeros(LONGEST, dtype=torch.int64)
    padded[: len(letters)] = letters
    return padded, (padded > 0).float()


class Reader(nn.Module):
    """The mean of what pairs of letters say."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Embedding(28 * 28, 16)
        self.decide = nn.Linear(16, 2)

    def forward(self, letters: Tensor, mask: Tensor) -> Tensor:
        """Called with the dictionary's entries by name."""
        said = self.pairs(28 * letters[:, :-1] + letters[:, 1:]) * mask[:, 1:, None]
        return self.decide(said.sum(dim=1) / mask[:, 1:].sum(dim=1, keepdim=True))


pairs = [(sentence, language) for language, text in SENTENCES.items() for sentence in text.split("|")]
letters, masks = map(torch.stack, zip(*(encode(sentence) for sentence, _ in pairs), strict=True))
languages = torch.tensor([language for _, language in pairs])
clients = [({"letters": letters[i::8], "mask": masks[i::8]}, languages[i::8]) for i in range(8)]

result = quafl.simulate(
    model=Reader(), clients=clients, algorithm=quafl.FedAvg(sampled=4), optimizer=quafl.adam(lr=0.03), until=600
)
print(f"accuracy {result.rows[-1]['accuracy']:.2f}")
