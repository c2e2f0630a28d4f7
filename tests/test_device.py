"""On a GPU, where there is one: the same runs as on the CPU."""

import pytest
import torch
from torch import nn

import quafl
from quafl import Lattice, World, cosine, momentum, sgd
from quafl.codec import QSGD
from quafl.codec.seams import Codec, Codecs
from quafl.core import (
    CA2FL,
    FAVANO,
    SCAFFOLD,
    Adaptive,
    Calibrated,
    Defence,
    FedAsync,
    FedAvg,
    FedBuff,
    FedNova,
    QuAFL,
)
from quafl.core.seams import Algorithm
from quafl.tasks import digits, partition

# The algorithm, its codec, and whether it is for clients with SGD.
RATE = 0.3
ALGORITHMS: dict[str, tuple[Algorithm, Codec | Codecs, bool]] = {
    "QuAFL": (QuAFL(sampled=3, local_steps=4), Lattice(bits=6), False),
    "QuAFL weighted": (QuAFL(sampled=3, local_steps=4, weighted=True), Lattice(bits=6), False),
    "FedAvg": (FedAvg(sampled=3, local_steps=4), Lattice(bits=6), False),
    "FedAvg differences": (FedAvg(sampled=3, local_steps=4), QSGD(bits=8, difference=True), False),
    "FedBuff": (FedBuff(sampled=3, local_steps=4, server_lr=0.5), Codecs(QSGD(bits=8), Lattice(bits=6)), False),
    "FADAS": (FedBuff(3, 4, server_lr=0.1, server=Adaptive(largest=True, tau=0.1)), Lattice(bits=6), False),
    "CA2FL": (CA2FL(sampled=3, local_steps=4, server_lr=0.5), Lattice(bits=6), False),
    "Calibrated": (Calibrated(sampled=3, local_steps=4), Lattice(bits=6), True),
    "Calibrated, defended": (Calibrated(sampled=3, defence=Defence(clip=3.0)), Lattice(bits=6), True),
    "FAVANO": (FAVANO(sampled=3, local_steps=4), Lattice(bits=6), False),
    "FedAdam": (FedAvg(sampled=3, local_steps=4, server_lr=0.03, server=Adaptive()), Lattice(bits=6), False),
    "FedNova": (FedNova(sampled=3, local_steps=4), Lattice(bits=6), False),
    "SCAFFOLD": (SCAFFOLD(sampled=3, local_steps=4, lr=RATE), Lattice(bits=6), True),
    "FedAsync": (FedAsync(sampled=3, local_steps=4, proximity=0.1), Lattice(bits=6), False),
}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("algorithm", "codec", "sgd_alone"), ALGORITHMS.values(), ids=ALGORITHMS.keys())
@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batch norm"])
def test_a_run_on_the_gpu_is_the_run_on_the_cpu(
    algorithm: Algorithm, codec: Codec | Codecs, sgd_alone: bool, batch_norm: bool
) -> None:
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(32)] if batch_norm else []
    model = nn.Sequential(nn.Linear(64, 32), *middle, nn.ReLU(), nn.Linear(32, 10))

    def rows(device: str) -> list[dict[str, float]]:
        return quafl.simulate(
            model=model,
            clients=partition.iid(digits().train, 8),
            test=digits().test,
            algorithm=algorithm,
            codec=codec,
            optimizer=momentum(0.05, schedule=cosine(100)) if batch_norm and not sgd_alone else sgd(RATE),
            world=World(slow=0.25),
            until=400.0,  # FedAvg needs more than 150 for the accuracy asked for below
            evaluations=3,
            device=device,
            executor="sequential",  # the others are compared with it in test_executors.py
        ).rows

    here, there = rows("cpu"), rows("cuda")
    assert [row["local_steps"] for row in here] == [row["local_steps"] for row in there]
    assert there[-1]["accuracy"] > 0.6
    assert there[-1]["loss"] == pytest.approx(here[-1]["loss"], rel=0.1)
