"""The codecs, measured: speed, memory, error against octets, refinement on live QuAFL, accuracy with few bits.

    python benchmarks/codec.py cpu|gpu|quality|live|accuracy|compression|page ... [--out FOLDER]

Speeds are ratios to a copy of the same vector in the same run, on one thread. `quality` takes real updates (updates.py;
needs Fashion-MNIST, CIFAR-10 and the extra `bench`), `accuracy` whole runs (needs MNIST and Fashion-MNIST),
`live` a perceptron of 1.4 million parameters on scikit-learn's digits. `compression` publishes what
`quafl run benchmarks/compression.toml --out runs/compression` has left. `page` draws the pictures and fills the tables
from what was recorded.
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

import compression
import torch
from fidelity import EDEN, Result, accuracy, live, quality
from torch import Tensor

from quafl.codec import Lattice, gaussian
from quafl.codec.kernels import Kernel, available
from quafl.codec.kernels.oracle import Oracle
from quafl.codec.seams import Packet

RESULTS = Path(__file__).parents[1] / "docs" / "results"
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


def table(rows: list[Result]) -> str:
    head = list(rows[0])
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(str(row.get(name, "")) for name in head) + " |" for row in rows])


def page(out: Path) -> None:
    """The picture, error against octets, and all tables of the pages, from what was recorded."""
    from matplotlib.figure import Figure

    rows = json.loads((out / "codec-quality.json").read_text(encoding="utf-8"))["rows"]
    vectors = list(dict.fromkeys(row["vector"] for row in rows))
    figure = Figure(figsize=(9.6, 7.2), layout="constrained")
    for axes, vector in zip(figure.subplots(2, 2, sharex=True, sharey=True).flat, vectors, strict=True):
        for codec in dict.fromkeys(row["codec"] for row in rows):
            mine = [row for row in rows if (row["vector"], row["codec"]) == (vector, codec)]
            width, error = (
                [row[name] for row in mine] for name in ("bits / coordinate on the wire", "error / distance²")
            )
            axes.plot(width, error, marker="o", markersize=3.5, label=codec)
        axes.plot(list(EDEN), list(EDEN.values()), "k+", markersize=9, label="EDEN, as published")
        axes.plot(LIMIT, [4.0**-bits for bits in LIMIT], color="#444444", linestyle=":", label="the limit, 4^−bits")
        axes.axhline(1, color="#999999", linewidth=0.8, linestyle="--")
        axes.set(yscale="log", title=f"{vector}, d = {mine[0]['d']:,}", ylim=(1e-5, 30))
        axes.grid(alpha=0.25)
    figure.supxlabel("bits a coordinate on the wire, refinements included")
    figure.supylabel("squared error / squared distance")
    figure.axes[0].legend(frameon=False, fontsize="small")
    (out.parent / "img").mkdir(exist_ok=True)
    figure.savefig(out.parent / "img" / "codec.png", dpi=130)
    compression.draw(out, out.parent / "img" / "compression.png")
    text = out / "codec.md"
    filled = re.sub(
        r"<!-- (\w+) (\w+) -->\n.*?<!-- end -->",
        lambda mark: f"<!-- {mark[1]} {mark[2]} -->\n{recorded(out, mark[1], mark[2])}\n<!-- end -->",
        text.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    text.write_text(filled, encoding="utf-8")


LIMIT = range(1, 9)


def recorded(out: Path, what: str, name: str) -> str:
    """A recorded table; that of error against octets with a column for each codec."""
    if what == "compression":
        return table(compression.rows(out))
    rows = json.loads((out / f"codec-{what}.json").read_text(encoding="utf-8"))[name]
    if what != "quality":
        return table([{name: value for name, value in row.items() if name != "seeds"} for row in rows])
    found: dict[tuple[str, int], Result] = {}
    for row in rows:
        cell = f"{row['error / distance²']:g} @ {row['bits / coordinate on the wire']}"
        found.setdefault((row["vector"], row["bits"]), {})[row["codec"]] = cell
    names = list(dict.fromkeys(row["codec"] for row in rows))
    return table(
        [
            {"vector": vector, "bits": bits} | {name: cells.get(name, "") for name in names}
            for (vector, bits), cells in found.items()
        ]
    )


MEASURED = {"cpu": cpu, "gpu": gpu, "quality": quality, "live": live, "accuracy": accuracy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=[*MEASURED, "compression", "page"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for what in chosen.what:
        if what == "page":
            page(chosen.out)
            continue
        measured = compression.publish(chosen.out) if what == "compression" else MEASURED[what]()
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
