"""The contracts catch what breaks them: an outside codec, algorithm and task, right and with planted mistakes."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from test_codecs import Halves
from test_own_algorithm import FedProxPush, Server
from torch import Tensor

from quafl.codec.seams import Codec, Packet, Refine
from quafl.core.conversation import Round
from quafl.core.messages import Buffers, Model
from quafl.core.randomness import Generators
from quafl.core.seams import Algorithm, Score, Task
from quafl.testing import check_algorithm, check_codec, check_task

# Codecs


class Truncating(Halves):
    """Rounds towards zero instead of at random."""

    def encode(
        self, x: Tensor, rng: torch.Generator, *, distance: Tensor | float | None = None, exact: Tensor | None = None
    ) -> Packet:
        rounded = (x.float().view(torch.int32) & -(1 << 16)).view(torch.float32).to(x.dtype)
        return super().encode(rounded if bool(x.isfinite().all()) else x, rng, exact=exact)


class Boasting(Halves):
    """Tells a tenth of its noise."""

    def noise(self, packet: Packet) -> Tensor:
        return 0.1 * super().noise(packet)


class Sequential(Halves):
    """What it draws for one row depends on how many others there are."""

    def encode(
        self, x: Tensor, rng: torch.Generator, *, distance: Tensor | float | None = None, exact: Tensor | None = None
    ) -> Packet:
        torch.rand(x.shape[:-1].numel(), generator=rng)
        return super().encode(x, rng, distance=distance, exact=exact)


class Credulous(Halves):
    """Decodes what is not for this key."""

    def decode(self, packet: Packet, *, key: Tensor, refine: Refine | None = None) -> Tensor:
        return self.values(packet).to(packet.dtype).expand((*key.shape[:-1], packet.dim)[-max(key.dim(), 1) :])


class Careless(Halves):
    """Sends what is not finite."""

    def encode(
        self, x: Tensor, rng: torch.Generator, *, distance: Tensor | float | None = None, exact: Tensor | None = None
    ) -> Packet:
        return super().encode(x.nan_to_num(), rng, distance=distance, exact=exact)


def test_a_codec_from_elsewhere_keeps_the_contract() -> None:
    check_codec(Halves(), noise=0.1)


@pytest.mark.parametrize(
    ("codec", "sentence"),
    [
        (Truncating(), "it is biased: over 2000 seeds"),
        (Boasting(), "noise says"),
        (Sequential(), "of a stack is not the message of that vector alone"),
        (Credulous(), "a packet of another codec must be refused"),
        (Careless(), "a vector with nan in it must not be encoded"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_codec_breaks_is_said(codec: Codec, sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_codec(codec)


# Algorithms


@dataclass(frozen=True, slots=True)
class Forgetful(FedProxPush):
    """Its push grows with rounds that it counts in itself, not in the state."""

    seen: list[int] = field(default_factory=list)

    def round(self, server: Server, rng: Generators) -> Round[Server]:
        self.seen.append(server.round)
        after = yield from FedProxPush.round(self, server, rng)
        return replace(after, push=after.push * min(len(self.seen), 10) / 10)


@dataclass(frozen=True, slots=True)
class Moody(FedProxPush):
    """Draws from the global generator."""

    def round(self, server: Server, rng: Generators) -> Round[Server]:
        after = yield from FedProxPush.round(self, server, rng)
        return replace(after, model=after.model + 0.01 * torch.rand(()))


@dataclass(frozen=True, slots=True)
class Idle(FedProxPush):
    """Learns nothing."""

    def round(self, server: Server, rng: Generators) -> Round[Server]:
        after = yield from FedProxPush.round(self, server, rng)
        return replace(after, model=server.model)


def test_an_algorithm_from_elsewhere_keeps_the_contract() -> None:
    check_algorithm(FedProxPush())


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        (Forgetful(), "was left after round .* must be in the state that `round` returns"),
        (Moody(), "two runs with the same seed differ; draw from the generators"),
        (Idle(), "it does not learn: from a distance of"),
        (FedProxPush(sampled=9), "sampled is 9, to be checked it must be 2 to 6"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_an_algorithm_breaks_is_said(algorithm: Algorithm, sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_algorithm(algorithm)


# Tasks


class Line:
    """A line through points of its own: y = w·x + b."""

    def initial(self) -> tuple[Model, Buffers]:
        return torch.zeros(2), torch.empty(0)

    def batch(self, client: int, step: int) -> Tensor:
        return torch.randn(4, generator=torch.Generator().manual_seed(1000 * client + step))

    def gradient(self, model: Model, buffers: Buffers, batch: Any) -> tuple[Model, Buffers]:
        off = model[0] * batch + model[1] - (2 * batch + 1)
        return torch.stack(((off * batch).mean(), off.mean())), buffers

    def evaluate(self, model: Model, buffers: Buffers) -> Score:
        return {"loss": float((model - torch.tensor([2.0, 1.0])).square().sum())}

    def export(self, model: Model, buffers: Buffers) -> dict[str, Tensor]:
        return {"slope": model[0], "offset": model[1]}


class Streaming(Line):
    """A batch is the next of a stream."""

    def __init__(self) -> None:
        self.stream = torch.Generator().manual_seed(0)

    def batch(self, client: int, step: int) -> Tensor:
        return torch.randn(4, generator=self.stream)


class Drawing(Line):
    """Its batches are right, and drawn from the global generator."""

    def batch(self, client: int, step: int) -> Tensor:
        torch.manual_seed(1000 * client + step)
        return torch.randn(4)


class InPlace(Line):
    """Takes the step itself."""

    def gradient(self, model: Model, buffers: Buffers, batch: Any) -> tuple[Model, Buffers]:
        gradient, buffers = super().gradient(model, buffers, batch)
        model -= 0.1 * gradient
        return gradient, buffers


class Moving(Line):
    """Begins where it was left."""

    def __init__(self) -> None:
        self.at = torch.zeros(2)

    def initial(self) -> tuple[Model, Buffers]:
        return self.at, torch.empty(0)

    def gradient(self, model: Model, buffers: Buffers, batch: Any) -> tuple[Model, Buffers]:
        self.at = model.clone()
        return super().gradient(model, buffers, batch)


class Precise(Line):
    """In float64."""

    def initial(self) -> tuple[Model, Buffers]:
        return torch.zeros(2, dtype=torch.float64), torch.empty(0)


class Lossless(Line):
    """Says how good, not how bad."""

    def evaluate(self, model: Model, buffers: Buffers) -> Score:
        return {"accuracy": 1.0}


class Stubborn(Line):
    """Exports what it began with."""

    def export(self, model: Model, buffers: Buffers) -> dict[str, Tensor]:
        return super().export(*self.initial())


class Misplaced(Line):
    """Speaks of three numbers, and has two."""

    def layout(self) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
        return {"slope": (2,), "offset": ()}, {}


def test_a_task_from_elsewhere_keeps_the_contract() -> None:
    check_task(Line())


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (Streaming, "client 0, step 0: asked again, in another order, the gradient is another one"),
        (Drawing, "it draws from torch's global generator"),
        (InPlace, "`gradient` changes the model or the buffers"),
        (Moving, "`initial` gives another model after training"),
        (Precise, r"the initial model must be a float32 vector, is torch.float64 of shape \(2,\)"),
        (Lossless, "a score must have a loss, has accuracy"),
        (Stubborn, "`export` gives the same for two different models"),
        (Misplaced, "`layout` has 3 numbers in the model, `initial` gives 2"),
    ],
)
def test_what_a_task_breaks_is_said(make: Callable[[], Task], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_task(make())
