"""The codec, measured: speed, memory, error against bits, and refinement on live QuAFL.

    python benchmarks/codec.py cpu|gpu|quality|live|page ... [--out FOLDER]

Speeds are ratios to a copy of the same vector in the same run, on one thread. `quality` and `live` train a real network
on real data (a perceptron of 1.4 million parameters on scikit-learn's digits, clients with few labels). `page` draws
the picture of docs/codec.md from the recorded JSON.
"""

import argparse
import ctypes
import json
import platform
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch
from torch import Tensor

from quafl import QuAFL, World, sgd
from quafl.codec import QSGD, Lattice, gaussian, wire
from quafl.codec.kernels import Kernel, available
from quafl.codec.kernels.oracle import Oracle
from quafl.codec.seams import Codec, Packet
from quafl.sim import Plan, Simulation
from quafl.tasks import Supervised, digits, partition

RESULTS = Path(__file__).parents[1] / "docs" / "results"
Result = dict[str, Any]
Clock = Callable[[Callable[[], object]], float]


def fastest(work: Callable[[], object], repeats: int = 7) -> float:
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def vectors(dim: int, device: str) -> tuple[Tensor, Tensor]:
    rng = torch.Generator(device).manual_seed(0)
    x = torch.randn(1, dim, generator=rng, device=device)
    return x, x + 0.01 * torch.randn(1, dim, generator=rng, device=device)


def kernel_times(
    kernel: Kernel, x: Tensor, key: Tensor, bits: int, clock: Callable[[Callable[[], object]], float]
) -> Result:
    seed = torch.tensor([987654321987654321], device=x.device)
    side = torch.tensor([0.12 / (2**bits - 1)], device=x.device)
    message = kernel.encode(x, seed, side, bits)
    decoded = kernel.decode(message.symbols, message.checks, seed, side, bits, key)
    assert not decoded.failed.any()
    times = {
        "encode": clock(lambda: kernel.encode(x, seed, side, bits)),
        "decode": clock(lambda: kernel.decode(message.symbols, message.checks, seed, side, bits, key)),
    }
    if bits <= gaussian.MOST_BITS:
        rounded = kernel.encode_difference(x, seed, bits)
        scales = rounded.energy / rounded.match
        times["difference: encode"] = clock(lambda: kernel.encode_difference(x, seed, bits))
        parts = rounded.symbols, scales, seed, bits, x.shape[-1]
        times["difference: decode"] = clock(lambda: kernel.decode_difference(*parts))
    return times


def plain(x: Tensor, key: Tensor, bits: int) -> None:
    """Round and modulo in torch, without rotation, packing or checks: what a codec must not be slower than."""
    side, modulus = 0.12 / (2**bits - 1), 2**bits
    symbols = torch.round(x / side) % modulus
    nearest = torch.round(key / side)
    ahead = (symbols - nearest) % modulus
    _ = side * (nearest + torch.where(ahead > modulus / 2, ahead - modulus, ahead))


def cpu() -> Result:
    from quafl.codec.kernels.native import INSTRUCTION_SETS, Native

    torch.set_num_threads(1)
    kernels: dict[str, Kernel] = {"torch": Oracle()}
    if "c" in available():
        kernels |= {f"C, {name}": Native(name) for name in INSTRUCTION_SETS if Native(name).instruction_set == name}
    rows = []
    for dim in (1_500_000, 25_000_000):
        x, key = vectors(dim, "cpu")
        room = torch.empty_like(x)
        for bits in (4, 8, 14):
            for name, kernel in reversed(kernels.items()):
                if name == "torch" and (dim > 2_000_000 and bits != 4):
                    continue
                copy = fastest(lambda: ctypes.memmove(room.data_ptr(), x.data_ptr(), 4 * dim))  # noqa: B023  # called at once
                times = kernel_times(kernel, x, key, bits, fastest)
                both = fastest(lambda: plain(x, key, bits), 3)  # noqa: B023  # called at once
                rows.append(
                    {
                        "d": dim,
                        "bits": bits,
                        "kernel": name,
                        **{f"{what} / memcpy": round(took / copy, 1) for what, took in times.items()},
                        "both / plain round and modulo": round((times["encode"] + times["decode"]) / both, 2),
                    }
                )
                print(rows[-1], flush=True)
    return {"speed": rows, "memory": memory() if "c" in available() else []}


def memory() -> list[Result]:
    """The most that a call holds at once besides its arguments, in multiples of the vector: the process's own
    high-water mark (Linux), reset before the call."""
    dim, codec = 100_000_000, Lattice(bits=4, spread=7.0)
    x, key = vectors(dim, "cpu")

    def held(name: str) -> int:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return 1024 * int(status.split(name + ":")[1].split()[0])

    def growth(call: Callable[[], Packet | Tensor]) -> tuple[Packet | Tensor, float]:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before = held("VmRSS")
        result = call()
        return result, round((held("VmHWM") - before) / (4 * dim), 3)

    packet, encoding = growth(lambda: codec.encode(x[0], torch.Generator(), distance=0.01 * dim**0.5))
    assert isinstance(packet, Packet)
    _, decoding = growth(lambda: codec.decode(packet, key=key[0]))
    return [
        {"call": "encode", "d": dim, "output": round(packet.nbytes / (4 * dim), 3), "growth": encoding},
        {"call": "decode", "d": dim, "output": 1.0, "growth": decoding},
    ]


def gpu() -> Result:
    import triton

    from quafl.codec.kernels.fused import Triton

    def clock(work: Callable[[], object]) -> float:
        return float(triton.testing.do_bench(work, warmup=25, rep=200, return_mode="median"))

    rows = []
    for dim in (25_000_000, 100_000_000, 200_000_000):
        x, key = vectors(dim, "cuda")
        room = torch.empty_like(x)
        for bits in (4, 8, 14):
            copy = clock(lambda: room.copy_(x))  # noqa: B023  # called at once
            times = kernel_times(Triton(), x, key, bits, clock)
            rows.append(
                {
                    "d": dim,
                    "bits": bits,
                    **{f"{what} / copy": round(took / copy, 2) for what, took in times.items()},
                    "copy, TB/s": round(8 * dim / copy / 1e9, 2),
                }
            )
            print(rows[-1], flush=True)
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    packet = Lattice(bits=4, spread=7.0).encode(x[0], torch.Generator(), distance=0.01 * dim**0.5)
    grown = torch.cuda.max_memory_allocated() - base
    memory_rows = [{"call": "encode", "d": dim, "output": packet.nbytes / (4 * dim), "growth": grown / (4 * dim)}]
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    Lattice(bits=4).decode(packet, key=key[0])
    grown = torch.cuda.max_memory_allocated() - base
    memory_rows.append({"call": "decode", "d": dim, "output": 1.0, "growth": grown / (4 * dim)})
    return {"device": torch.cuda.get_device_name(), "triton": triton.__version__, "speed": rows, "memory": memory_rows}


class Watched:
    """A codec that keeps what passes through it."""

    def __init__(self, codec: Lattice) -> None:
        self.codec, self.bits, self.keyed, self.difference = codec, codec.bits, codec.keyed, codec.difference
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
        for spread in (4.5, 6.0):
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


def pair() -> tuple[Tensor, Tensor]:
    """Y^i of a client and X_t, from the end of a real run without compression."""
    from quafl.codec import Identity

    class Keep(Identity):
        __slots__ = ()
        keyed: ClassVar[bool] = True  # so that it is given a key
        kept: list[tuple[Tensor, Tensor]] = []  # noqa: RUF012  # shared on purpose

        def decode(self, packet: Packet, *, key: Tensor, refine: Any = None) -> Tensor:
            decoded = super().decode(packet, key=key, refine=refine)
            if packet.side.dim():
                self.kept.append((decoded[0], key))
            return decoded

    Keep.kept.clear()
    live_run(Keep(), 600, lr=0.2)
    return Keep.kept[-1]


def quality() -> Result:
    x, key = pair()
    distance, dim = (x - key).norm(), len(x)
    rows = []

    def add(name: str, codec: Codec, **given: Any) -> None:
        errors, octets = [], []
        for seed in range(5):
            packet = codec.encode(x, torch.Generator().manual_seed(seed), **given)
            size = len(wire.to_bytes(packet))

            def refine(row: int, request: Packet) -> Packet:
                nonlocal size
                reply = codec.refine(x, request)
                size += len(wire.to_bytes(request)) + len(wire.to_bytes(reply))
                return reply

            decoded = codec.decode(packet, key=key, refine=refine)
            errors.append(float((decoded - x).square().sum() / distance.square()))
            octets.append(size)
        rows.append(
            {
                "codec": name,
                "bits": codec.bits,
                "bits / coordinate on the wire": round(8 * sum(octets) / len(octets) / dim, 3),
                "error / distance²": float(f"{sum(errors) / len(errors):.3g}"),
            }
        )
        print(rows[-1], flush=True)

    for bits in (2, 3, 4, 6, 8):
        add("lattice, spread 6", Lattice(bits=bits, spread=6.0), distance=distance)
        add("lattice, spread 4, refined", Lattice(bits=bits, spread=4.0), distance=distance)
        add("QSGD min-max", QSGD(bits=bits, norm="min-max"))
        add("QSGD l2", QSGD(bits=bits, norm="l2"))
    return {"d": dim, "distance": float(distance), "norm": float(x.norm()), "rows": rows}


def table(rows: list[Result]) -> str:
    head = list(rows[0])
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(str(row[name]) for name in head) + " |" for row in rows])


def page(out: Path) -> None:
    """The picture of docs/codec.md, error against bits, and all tables, from what was recorded."""
    from matplotlib.figure import Figure

    measured = json.loads((out / "codec-quality.json").read_text(encoding="utf-8"))["rows"]
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row["codec"] for row in measured):
        mine = [row for row in measured if row["codec"] == name]
        axes.plot(
            [row["bits / coordinate on the wire"] for row in mine],
            [row["error / distance²"] for row in mine],
            marker="o",
            label=name,
        )
    axes.axhline(1, color="#999999", linewidth=0.8, linestyle="--")
    axes.set(yscale="log", xlabel="bits a coordinate on the wire", ylabel="error / distance²")
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    (out.parent / "img").mkdir(exist_ok=True)
    figure.savefig(out.parent / "img" / "codec.png", dpi=150)
    for text in (out.parent / "codec.md", out / "codec.md"):
        filled = re.sub(
            r"<!-- (\w+) (\w+) -->\n.*?<!-- end -->",
            lambda mark: f"<!-- {mark[1]} {mark[2]} -->\n{recorded(out, mark[1], mark[2])}\n<!-- end -->",
            text.read_text(encoding="utf-8"),
            flags=re.DOTALL,
        )
        text.write_text(filled, encoding="utf-8")


def recorded(out: Path, what: str, name: str) -> str:
    """A recorded table; that of error against bits with a column per codec."""
    rows = json.loads((out / f"codec-{what}.json").read_text(encoding="utf-8"))[name]
    if what != "quality":
        return table(rows)
    columns = {
        bits: [row for row in rows if row["bits"] == bits] for bits in dict.fromkeys(row["bits"] for row in rows)
    }
    return table(
        [
            {"bits": bits}
            | {r["codec"]: f"{r['error / distance²']:g} @ {r['bits / coordinate on the wire']}" for r in together}
            for bits, together in columns.items()
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=["cpu", "gpu", "quality", "live", "page"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    for what in chosen.what:
        if what == "page":
            page(chosen.out)
            continue
        measured = {"cpu": cpu, "gpu": gpu, "quality": quality, "live": live}[what]()
        measured = {
            "command": f"python benchmarks/codec.py {what}",
            "date": datetime.now(UTC).date().isoformat(),
            "machine": f"{platform.machine()}, torch {torch.__version__}",
            **measured,
        }
        chosen.out.mkdir(parents=True, exist_ok=True)
        (chosen.out / f"codec-{what}.json").write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
        for name, rows in measured.items():
            if isinstance(rows, list) and rows:
                print(f"\n{what}: {name}\n{table(rows)}")


if __name__ == "__main__":
    main()
