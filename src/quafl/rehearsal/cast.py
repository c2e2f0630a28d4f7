"""Who plays in a schedule: an algorithm, a codec, a tiny task, and clients, some of whom may lie."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import exp, inf
from random import Random
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from quafl.codec.coders import Coders, coders_for
from quafl.codec.difference import Difference
from quafl.codec.hashing import BLOCK
from quafl.codec.identity import Identity
from quafl.codec.lattice import Lattice
from quafl.codec.seams import Codec, Codecs
from quafl.codec.topk import TopK
from quafl.core.ca2fl import CA2FL
from quafl.core.calibrated import Calibrated
from quafl.core.defence import Defence
from quafl.core.favano import FAVANO
from quafl.core.fedasync import FedAsync
from quafl.core.fedavg import FedAvg
from quafl.core.fedbuff import FedBuff
from quafl.core.optim import sgd
from quafl.core.quafl import QuAFL
from quafl.core.randomness import derive
from quafl.core.scaffold import SCAFFOLD
from quafl.core.seams import Algorithm, Optimizer
from quafl.protocol.client import Terms
from quafl.protocol.members import Limits
from quafl.tasks.quadratic import Quadratic

LR = 0.1
FAR = 1e4  # times the usual distance
PATIENCE = 8.0  # seconds that an algorithm waits, where it does not wait for ever


class Conserved(NamedTuple):
    """A sum over the clients of something of theirs, and of something of the server's, where replies that the server
    has not merged yet are taken for lost. It may change by what a client reports of its progress, if anything."""

    client: Callable[[Any, Any], Tensor]  # of the algorithm and a client
    server: Callable[[Any, Any, int], Tensor]  # of the algorithm, the server, and how many clients there are
    reported: Literal["nothing", "progress", "part of it"] = "nothing"
    remembered: bool = True  # it survives the end of a client's process, and does not depend on the codec


def _models(reported: Literal["progress", "part of it"]) -> Conserved:
    """The clients' and the server's."""
    return Conserved(
        lambda _, client: _double(client.base),
        lambda _, server, __: _double(server.model),
        reported=reported,
        remembered=False,
    )


MEMORIES = Conserved(  # as of the beginning: they fade
    lambda of, client: torch.exp(of.forget * client.clock).unsqueeze(-1) * _double(client.memory),
    lambda of, server, _: -exp(of.forget * server.sweeps) * _double(server.memory),
)
CONTROLS = Conserved(
    lambda _, client: _double(client.control), lambda _, server, clients: -clients * _double(server.control)
)


def _double(vector: Tensor) -> Tensor:
    return vector.double()


class Role(NamedTuple):
    """An algorithm, and what its messages and states must obey."""

    make: Any
    conserves: Conserved | None = None
    by_rounds: bool = True  # answers to earlier rounds are dropped


ALGORITHMS = {
    "QuAFL": Role(partial(QuAFL, wait=0.3), _models("progress")),
    "QuAFL, weighted": Role(partial(QuAFL, wait=0.3, weighted=True), _models("part of it")),
    "Calibrated": Role(partial(Calibrated, wait=0.3), MEMORIES),
    "Calibrated, defended": Role(partial(Calibrated, wait=0.3, defence=Defence(clip=3.0)), MEMORIES),
    "FAVANO": Role(partial(FAVANO, wait=0.3)),
    "FedAvg": Role(FedAvg),
    "FedBuff": Role(FedBuff, by_rounds=False),
    "CA2FL": Role(CA2FL, by_rounds=False),
    "SCAFFOLD": Role(partial(SCAFFOLD, lr=LR), CONTROLS),
    "SCAFFOLD, defended": Role(partial(SCAFFOLD, lr=LR, defence=Defence(clip=3.0)), CONTROLS),
    "FedAsync": Role(FedAsync, by_rounds=False),
}
CODECS: dict[str, Codec | Codecs] = {
    "Identity": Identity(),
    "Lattice": Lattice(4),
    "Lattice, narrow": Lattice(4, spread=1.2),  # which needs repairs
    "Difference": Codecs(up=Difference(4), down=Lattice(4)),
    "Top-k": Codecs(up=TopK(1 / 4), down=Lattice(4)),  # whose clients keep what they leave out
}


@dataclass(frozen=True, slots=True)
class Cast:
    """What a schedule's parties are made of."""

    algorithm_name: str
    role: Role
    codec_name: str
    algorithm: Algorithm
    coders: Coders
    optimizer: Optimizer
    tasks: dict[str, Quadratic]  # by client
    liars: tuple[str, ...]
    limits: Limits
    seed: int  # of the server's generators

    @property
    def names(self) -> list[str]:
        """Of the clients."""
        return list(self.tasks)

    @property
    def honest(self) -> list[str]:
        """Of those who do not lie."""
        return [name for name in self.tasks if name not in self.liars]

    @property
    def welcome(self) -> dict[str, Any]:
        """What a newcomer is told."""
        return {"run": f"{self.seed:x}"}

    def terms(self, text: dict[str, Any]) -> Terms:
        """Of the run."""
        return Terms(self.algorithm, self.coders, self.optimizer)


def draw(rng: Random) -> Cast:
    """A cast."""
    name, codec_name = rng.choice(list(ALGORITHMS)), rng.choice([*CODECS, "Identity"])  # more can be checked of that
    count = rng.randint(3, 6)
    liars = rng.choice((0, 0, 0, 1))
    patience = PATIENCE if liars or rng.random() < 0.5 else inf
    algorithm = ALGORITHMS[name].make(
        sampled=rng.randint(1, min(3, count)), local_steps=rng.randint(1, 3), patience=patience
    )
    # The downlink is repaired only where there are more blocks than one.
    dim = 2 * BLOCK + 40 if codec_name == "Lattice, narrow" and rng.random() < 0.5 else rng.randint(20, 40)
    seed = rng.getrandbits(48)
    generator = torch.Generator().manual_seed(seed)
    curvature = 0.5 + torch.rand(dim, generator=generator)
    tasks = {
        f"client-{number}": Quadratic(
            curvature, torch.randn(1, dim, generator=generator), noise=0.1, seed=derive(seed, number)
        )
        for number in range(count)
    }
    # A SCAFFOLD client that has lost its control variate sends a change that is large next to what is usual by then.
    far = FAR if isinstance(algorithm, SCAFFOLD) else Limits().far
    return Cast(
        algorithm_name=name,
        role=ALGORITHMS[name],
        codec_name=codec_name,
        algorithm=algorithm,
        coders=coders_for(algorithm, CODECS[codec_name]),
        optimizer=sgd(LR),
        tasks=tasks,
        liars=tuple(list(tasks)[:liars]),
        limits=Limits(start_with=count - liars, contact_seconds=4.0, exclusion=3.0, far=far),
        seed=seed,
    )
