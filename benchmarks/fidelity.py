"""What codecs do to vectors and to runs: error against octets, refinement on live QuAFL, accuracy with few bits."""

import warnings
from statistics import mean, median, stdev
from typing import Any

import entropy
import torch
import updates
from torch import Tensor

from quafl import QuAFL, World, sgd
from quafl.codec import QSGD, Codecs, Difference, Identity, Lattice, wire
from quafl.codec.coders import coders_for
from quafl.codec.seams import Codec, Packet
from quafl.sim import Plan, Simulation
from quafl.tasks import Supervised, digits, fashion_mnist, mnist, models, partition

Result = dict[str, Any]


class Watched:
    """A codec that keeps what passes through it."""

    def __init__(self, codec: Lattice) -> None:
        self.codec, self.bits, self.keyed, self.difference = codec, codec.bits, codec.keyed, codec.difference
        self.whole, self.feedback = codec.whole, codec.feedback
        self.sent: dict[int, Tensor] = {}  # the latest vectors, by the seeds of their messages
        self.log: list[Result] = []

    def encode(self, x: Tensor, rng: torch.Generator, **given: Any) -> Packet:
        packet = self.codec.encode(x, rng, **given)
        for seed, vector in zip(torch.atleast_1d(packet.seed).tolist(), torch.atleast_2d(x), strict=True):
            self.sent[seed] = vector
        for old in list(self.sent)[:-20]:
            del self.sent[old]
        return packet

    def refine(self, x: Tensor, request: Packet) -> Packet:
        return self.codec.refine(x, request)

    def noise(self, packet: Packet) -> Tensor:
        return self.codec.noise(packet)

    def decode(self, packet: Packet, *, key: Tensor, refine: Any = None) -> Tensor:
        x = torch.stack([self.sent[seed] for seed in torch.atleast_1d(packet.seed).tolist()])
        octets = [
            packet[0].nbytes if packet.side.dim() else packet.nbytes
            for _ in range(max(1, len(torch.atleast_2d(x + key))))
        ]
        asked: set[int] = set()

        def counted(row: int, request: Packet) -> Packet:
            reply: Packet = refine(row, request)
            octets[row] += request.nbytes + reply.nbytes
            asked.add(row)
            return reply

        decoded = self.codec.decode(packet, key=key, refine=counted)
        gaps = torch.atleast_2d(x - key).square().sum(dim=-1)
        errors = torch.atleast_2d(decoded - x).square().sum(dim=-1)
        expected = (self.codec.noise(packet) * 12 / packet.dim).sqrt() * (2**self.bits - 1) / (2 * self.codec.spread)
        estimate = (expected * packet.dim**0.5).expand(len(gaps))
        for row, (gap, error, guess) in enumerate(zip(gaps.tolist(), errors.tolist(), estimate.tolist(), strict=True)):
            self.log.append(
                {
                    "octets": octets[row],
                    "refined": row in asked,
                    "error": error / gap if gap > 0 else None,
                    "actual / estimate": gap**0.5 / guess,
                }
            )
        return decoded


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        *(torch.nn.Linear(64, 1200), torch.nn.ReLU(), torch.nn.Linear(1200, 1100), torch.nn.ReLU()),
        torch.nn.Linear(1100, 10),
    )


def live_run(codec: Codec, until: float, lr: float) -> tuple[Any, list[Result]]:
    clients = partition.by_class(digits().train, 20)
    task = Supervised(network(), clients, test=digits().test, batch_size=16)
    plan = Plan(until=until, every=until / 4)
    run = Simulation(task, 20, World(), QuAFL(sampled=5, local_steps=5), codec, sgd(lr), plan)
    for _ in run:
        pass
    return run.server, run.rows


def live() -> Result:
    """Both directions through the codec, the client decoding with X^i, its base."""
    rows = []
    for bits in (4, 3, 2):
        for spread in (3.5, 4.0, 4.5, 6.0):
            watched = Watched(Lattice(bits=bits, spread=spread))
            _, scores = live_run(watched, 160 * 10 * bits / 32, lr=0.2)
            log = watched.log[20:]  # without the first two rounds, in which nobody knows a distance
            dim = len(next(iter(watched.sent.values())))
            ratios = sorted(entry["actual / estimate"] for entry in log)
            rows.append(
                {
                    "bits": bits,
                    "spread": spread,
                    "rounds": int(scores[-1]["round"]),
                    "bits / coordinate on the wire": round(8 * sum(e["octets"] for e in log) / len(log) / dim, 3),
                    "messages refined": f"{sum(e['refined'] for e in log)} of {len(log)}",
                    "median error / distance²": round(median(e["error"] for e in log if e["error"] is not None), 3),
                    "actual / estimated distance: median": round(median(ratios), 2),
                    "p99": round(ratios[int(0.99 * len(ratios))], 2),
                    "max": round(ratios[-1], 2),
                    "accuracy": round(scores[-1]["accuracy"], 3),
                }
            )
            print(rows[-1], flush=True)
    return {"task": "digits, perceptron, d=1,410,110, SGD 0.2, 20 clients with few labels, 5 contacted", "rows": rows}


def quality() -> Result:
    """Error against octets, on vectors as theory has them and on real updates."""
    rows = []
    for update in (updates.gaussian(), updates.cnn(), updates.resnet20(), updates.lora()):
        for bits in (1, 2, 3, 4, 6, 8):
            for codec, made in codecs(bits).items():
                error, octets = sent(made, update)
                rows.append(row(update, codec, bits, error, octets))
                print(rows[-1], flush=True)
            if bits <= 4:
                moved = update.mine - update.common
                found = entropy.at(moved, bits, seed=1)
                error = float((found.vector - moved).square().sum() / moved.square().sum())
                rows.append(row(update, "entropy-coded", bits, error, 8 * found.octets / len(moved)))
                print(rows[-1], flush=True)
    return {"rows": rows, "published": {"EDEN (Vargaftik et al., 2022)": EDEN}}


EDEN = {1: 0.571, 2: 0.133, 3: 0.036, 4: 0.0096}  # its table for a Gaussian, unbiased


def codecs(bits: int) -> dict[str, Codec]:
    return {
        "lattice, spread 4": Lattice(bits=bits),
        "lattice, spread 6": Lattice(bits=bits, spread=6.0),
        "difference": Difference(bits=bits),
        "QSGD of the difference": QSGD(bits=bits, difference=True),
    }


def sent(codec: Codec, update: updates.Update, draws: int = 5) -> tuple[float, float]:
    """The squared error over the squared distance, and the bits a coordinate on the wire, refinements included."""
    moved = update.mine - update.common
    x, key = (update.mine, update.common) if codec.keyed else (moved, torch.zeros_like(moved))
    errors, octets = 0.0, 0
    for seed in range(draws):
        packet = codec.encode(x, torch.Generator().manual_seed(seed), distance=moved.norm())
        octets += len(wire.to_bytes(packet))

        def refine(row: int, request: Packet) -> Packet:
            nonlocal octets
            reply = codec.refine(x, request)
            octets += len(wire.to_bytes(request)) + len(wire.to_bytes(reply))
            return reply

        decoded = codec.decode(packet, key=key, refine=refine)
        errors += float((decoded - x).square().sum() / moved.square().sum())
    return errors / draws, 8 * octets / draws / len(x)


def row(update: updates.Update, codec: str, bits: int, error: float, width: float) -> Result:
    return {
        "vector": update.name,
        "d": len(update.mine),
        "codec": codec,
        "bits": bits,
        "bits / coordinate on the wire": round(width, 3),
        "error / distance²": float(f"{error:.3g}"),
    }


def accuracy() -> Result:
    """QuAFL with four bits down, by lattice, and one to four up: by lattice, and by difference."""
    rows = []
    for name, data, pixels, target in (
        ("MNIST", mnist(), models.MNIST(), 0.9),
        ("Fashion-MNIST", fashion_mnist(), models.FASHION(), 0.75),
    ):
        ways: dict[str, tuple[int, Codec | Codecs]] = {"32 bits both ways": (32, Identity())}
        for bits in (1, 2, 3, 4):
            for up in Lattice(bits=bits), Difference(bits=bits):
                ways[f"{type(up).__name__.lower()}, {bits} up"] = bits, Codecs(up=up, down=Lattice(bits=4))
        for label, (bits, codec) in ways.items():
            ends, times = [], []
            for seed in range(5):
                found = one_run(data, pixels, codec, seed)
                ends.append(found[-1]["accuracy"])
                times.append(next((row["time"] for row in found if row["accuracy"] >= target), None))
            arrived = [time for time in times if time is not None]
            all_of_them = len(arrived) == len(times)
            rows.append(
                {
                    "data": f"{name}, target {target:g}",
                    "codec": label,
                    "bits": bits,
                    "final accuracy": f"{mean(ends):.4f} ± {stdev(ends):.4f}",
                    "time to target": f"{mean(arrived):.0f}"
                    if all_of_them
                    else f"{len(arrived)} of {len(times)} seeds",
                    "seeds": [round(end, 4) for end in ends],
                }
            )
            print(rows[-1], flush=True)
    return {"task": TASK, "rows": rows}


TASK = (
    "784-64-10, SGD 0.2, batches of 64, 20 clients, Dirichlet(0.3), a quarter slow, 5 contacted, until time 500, "
    "seeds 0 to 4"
)


def one_run(data: Any, pixels: torch.nn.Module, codec: Codec | Codecs, seed: int) -> list[Result]:
    """An exchange takes as long for all, so that the codes alone differ."""
    clients = partition.dirichlet(data.train, 20, alpha=0.3, seed=seed)
    model = models.mlp(784, 64, 10, seed=seed, pixels=pixels)
    task = Supervised(model, clients, test=data.test, batch_size=64, seed=seed)
    coders = coders_for(QuAFL(), codec)
    world = World(latency_at_32_bits=80 / (coders.up.total_bits + coders.down.total_bits))
    plan = Plan(until=500.0, every=20.0, seed=seed)
    run = Simulation(task, 20, world, QuAFL(sampled=5, local_steps=5), codec, sgd(0.2), plan, executor="sequential")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of one bit by lattice: that is what is measured
        for _ in run:
            pass
    return run.rows
