"""Both worlds run one algorithm: what the machines compute, the simulator computes from their history, bit for bit."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from stages import Stage

from quafl import SCAFFOLD, FedAsync, FedAvg, FedBuff, FedNova, Identity, Lattice, QuAFL, adam, adamw, momentum, sgd
from quafl.codec import QSGD, Difference, TopK
from quafl.codec.seams import Codec, Codecs
from quafl.core.seams import Algorithm, Optimizer, Task
from quafl.protocol.carrier import SERVER
from quafl.protocol.history import Line, Run, from_text, of_entry, to_text
from quafl.protocol.messages import Reply
from quafl.sim.replay import Deviation, follow
from quafl.tasks import Quadratic

DIM = 1100  # two blocks of the lattice
ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "QuAFL": partial(QuAFL, wait=0.5),
    "QuAFL weighted": partial(QuAFL, wait=0.5, weighted=True),
    "FedAvg": FedAvg,
    "FedAvg weighted": partial(FedAvg, weighted=True),
    "FedBuff": FedBuff,
    "FedNova": FedNova,
    "SCAFFOLD": SCAFFOLD,
    "FedAsync": partial(FedAsync, proximity=0.1),
}
CODECS: dict[str, Any] = {
    "identity": Identity(),
    "lattice": Lattice(bits=4),
    "narrow lattice": Lattice(bits=4, spread=2.5),  # with repairs both ways
    "QSGD": QSGD(bits=8),
    "QSGD of the difference": QSGD(bits=4, difference=True),
    "difference": Codecs(up=Difference(bits=4), down=Lattice(bits=6)),
    "top-k with feedback": Codecs(up=TopK(share=0.1), down=Lattice(bits=6)),
}
CLIENTS = {"ann": 0.1, "bob": 0.2, "eve": 0.55, "joe": 1.3}  # and how long a step takes each


class Sized(Quadratic):
    """With another number of examples for each client."""

    def examples(self, client: int) -> int:
        return 1 + self.seed % 7


def task_of(name: str) -> Quadratic:
    generator = torch.Generator().manual_seed(len(name) + ord(name[0]))
    center = torch.randn(1, DIM, generator=generator)
    return Sized(torch.linspace(0.2, 1.0, DIM), center, noise=0.2, seed=ord(name[0]))


def played(algorithm: Algorithm, codec: Codec | Codecs, optimizer: Optimizer, rounds: int = 12) -> tuple[Stage, Any]:
    """A federation of machines, and the server's states after each round."""
    stage = Stage(algorithm, codec, optimizer, task=task_of(SERVER))
    for name, seconds in CLIENTS.items():
        stage.join(name, task_of(name), step_seconds=seconds)
    states = []
    for _ in range(rounds):
        stage.round()
        states.append(stage.machine.server)
    return stage, states


def lines_of(stage: Stage) -> list[Line]:
    """Its history, through the file's format."""
    lines = [Run("test", 0), *map(of_entry, stage.entries)]
    return [from_text(to_text(line)) for line in lines]


def replayed(stage: Stage, lines: list[Line], tasks: Callable[[str], Task] = task_of) -> list[Any]:
    algorithm, coders, optimizer = stage.terms
    return list(follow(lines, tasks, stage.task.initial(), algorithm, coders, optimizer))


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
@pytest.mark.parametrize("make", ALGORITHMS.values(), ids=ALGORITHMS.keys())
def test_the_simulator_computes_the_servers_models_from_who_was_contacted_with_how_many_steps(
    make: Callable[..., Algorithm], codec: Codec | Codecs
) -> None:
    stage, states = played(make(sampled=2, local_steps=4), codec, sgd(0.1))
    again = replayed(stage, lines_of(stage))
    assert len(again) == len(states)
    for mine, theirs in zip(again, states, strict=True):
        assert torch.equal(mine.model, theirs.model)
        assert mine.round == theirs.round
        assert mine.expected == theirs.expected
    assert not torch.equal(states[0].model, states[-1].model)


@pytest.mark.parametrize(
    "optimizer", [momentum(0.05), adam(0.02), momentum(0.05, fresh=True), adamw(0.02, weight_decay=0.1, clip=1.0)]
)
def test_so_it_does_with_optimizers_that_remember(optimizer: Optimizer) -> None:
    for algorithm in QuAFL(sampled=2, local_steps=4, wait=0.5), FedBuff(sampled=2, local_steps=3):
        stage, states = played(algorithm, Lattice(bits=6), optimizer, rounds=6)
        assert torch.equal(replayed(stage, lines_of(stage))[-1].model, states[-1].model)


def disturbed(disturb: Callable[[Stage, Any], bool]) -> tuple[Stage, list[Any]]:
    """Ten rounds of QuAFL, while something happens to what bob says."""
    algorithm = QuAFL(sampled=4, local_steps=4, wait=0.5, patience=2.0)
    stage = Stage(algorithm, Lattice(bits=6), sgd(0.1), task=task_of(SERVER))
    for name, seconds in CLIENTS.items():
        stage.join(name, task_of(name), step_seconds=seconds)
    said = [0]

    def carry(heard: Any) -> bool:
        if heard.sender != "bob" or not isinstance(heard.message, Reply):
            return True
        said[0] += 1
        return said[0] % 3 != 0 or disturb(stage, heard)

    stage.carry = carry
    states = []
    for _ in range(10):
        stage.round()
        states.append(stage.machine.server)
    stage.run(5.0)
    assert any(len(gave.replies) == 3 for gave in stage.given)
    return stage, states


def test_a_reply_that_came_too_late_is_known_to_be_lost_in_both_worlds() -> None:
    """Every third reply of bob arrives by itself, when nobody waits for it any more: it goes back to its Y^i."""

    def late(stage: Stage, heard: Any) -> bool:
        stage.later(2.2, lambda: stage.ask("bob", SERVER, heard.octets, 30.0, lambda answer: None))
        return False

    stage, states = disturbed(late)
    again = replayed(stage, lines_of(stage))
    assert all(torch.equal(mine.model, theirs.model) for mine, theirs in zip(again, states, strict=True))


def test_what_the_server_never_got_cannot_be_computed_again_and_that_is_said() -> None:
    stage, _ = disturbed(lambda stage, heard: False)
    with pytest.raises(Deviation, match="was not asked that"):
        replayed(stage, lines_of(stage))


def test_another_number_of_steps_or_other_data_are_noticed() -> None:
    stage, _ = played(QuAFL(sampled=2, local_steps=4, wait=0.5), Lattice(bits=6), sgd(0.1))
    lines = lines_of(stage)
    with pytest.raises(Deviation):
        replayed(stage, lines, tasks=lambda name: task_of(name[::-1]))
