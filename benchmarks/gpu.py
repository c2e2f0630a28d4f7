"""Speed of the simulator on a GPU: `make bench-gpu`, or the parts named.

pfl       pfl-research's CIFAR-10 job (see pfl_job.py) as FedAvg
in pfl    the same in pfl itself, where that can be imported
fashion-300, fashion-20
          Fashion-MNIST CNN, K=10, batches of 100, QuAFL with 4 bits: n=300, s=30, and n=20, s=5
resnet    CIFAR-10 ResNet20, n=20, s=10, K=10, batches of 64, augmentation, QuAFL with 4 bits, bfloat16
group     fashion-300 and resnet with group norm, and ResNet20 with n=300, s=30
first     how long `quafl run` takes until its first evaluation beyond time 0, with empty caches and with warm ones
memory    GPU memory of n=300 ResNet20 clients, and how many fit
accuracy 0, accuracy 1
          pfl's job for 1,500 rounds, with those seeds

Local steps a second are steps that were drawn, in whole rounds: clients, codec, server. Beside them the executor alone,
a bare loop over a single model in torch, and whole rounds on a slow host: the process is held to one core, which it
shares with one that spins. All settings are compiled at once, each in a process of its own, and then measured one after
another.
"""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from signal import SIGINT
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any

import pfl_job
import torch
from torch import nn
from torch.nn import functional

from quafl import FedAvg, Lattice, QuAFL, World
from quafl.codec import Identity
from quafl.codec.coders import Coder
from quafl.codec.seams import Codec
from quafl.core.client import newcomers
from quafl.core.optim import adam, sgd
from quafl.core.seams import Algorithm, Optimizer
from quafl.sim import Plan, Simulation
from quafl.sim.store import Store
from quafl.tasks import Supervised, cifar10, fashion_mnist, models, partition
from quafl.tasks.augment import crop_and_flip
from quafl.tasks.precision import Precision, arithmetic, mixed
from quafl.tasks.supervised import Data

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "simulator-gpu.json"
IN_PFL = RESULTS.with_name("pfl-cpu.json")  # what `pfl_job.py` says, with command and date
DEVICE = torch.device("cuda")


@dataclass
class Bench:
    """A setting whose speed is asked for."""

    title: str
    module: Callable[[], nn.Module]
    data: Callable[[], tuple[Data, Data]]
    clients: int
    algorithm: Algorithm
    codec: Codec
    optimizer: Optimizer
    bare: Callable[[nn.Module], torch.optim.Optimizer]
    batch: int
    rounds: int
    asked: float
    executor: str
    augment: Any = None
    precision: Precision = "float32"

    def task(self, seed: int = 0) -> Supervised:
        train, test = self.data()
        hands = partition.iid(train, self.clients, seed=seed)
        settings = {"batch_size": self.batch, "augment": self.augment, "device": DEVICE, "precision": self.precision}
        return Supervised(self.module(), hands, test=test, seed=seed, **settings)

    def simulation(self, task: Supervised, seed: int = 0) -> Simulation:
        plan = Plan(until=1e9, every=1e9, seed=seed)
        parts = task, self.clients, World(slow=0.25), self.algorithm, self.codec, self.optimizer, plan
        return Simulation(*parts, executor=self.executor)


def both(data: Any) -> tuple[Data, Data]:
    """All that is not for testing, to learn from."""
    train = torch.cat((data.train[0], data.validation[0])), torch.cat((data.train[1], data.validation[1]))
    return train, data.test


def fashion(
    clients: int,
    sampled: int,
    asked: float,
    precision: Precision,
    executor: str = "graph",
    norm: models.Norm = "batch",
) -> Bench:
    return Bench(
        title=f"Fashion-MNIST CNN, {norm} norm, n={clients}, s={sampled}, K=10, batch 100, QuAFL b=4, {precision}",
        module=partial(models.cnn, norm=norm),
        data=lambda: both(fashion_mnist()),
        clients=clients,
        algorithm=QuAFL(sampled=sampled, local_steps=10, wait=10.0),
        codec=Lattice(bits=4),
        optimizer=adam(0.001),
        bare=lambda module: torch.optim.Adam(module.parameters(), lr=0.001),
        batch=100,
        rounds=1200 // sampled,
        asked=asked,
        executor=executor,
        precision=precision,
    )


def resnet(clients: int, sampled: int, asked: float, norm: models.Norm = "batch") -> Bench:
    return Bench(
        title=f"CIFAR-10 ResNet20, {norm} norm, n={clients}, s={sampled}, K=10, batch 64, QuAFL b=4, bfloat16",
        module=partial(models.resnet20, norm=norm),
        data=lambda: both(cifar10()),
        clients=clients,
        algorithm=QuAFL(sampled=sampled, local_steps=10, wait=10.0),
        codec=Lattice(bits=4),
        optimizer=sgd(0.03),
        bare=lambda module: torch.optim.SGD(module.parameters(), lr=0.03),
        batch=64,
        rounds=400 // sampled,
        asked=asked,
        executor="vectorised",
        augment=crop_and_flip,
        precision="bfloat16",
    )


def pfl(precision: Precision, asked: float) -> Bench:
    return Bench(
        title=f"pfl-research's CIFAR-10 job, FedAvg, {precision}",
        module=lambda: pfl_job.network(0),
        data=pfl_job.data,
        clients=pfl_job.CLIENTS,
        algorithm=FedAvg(sampled=pfl_job.COHORT, local_steps=pfl_job.STEPS),
        codec=Identity(),
        optimizer=sgd(pfl_job.LR),
        bare=lambda module: torch.optim.SGD(module.parameters(), lr=pfl_job.LR),
        batch=pfl_job.BATCH,
        rounds=100,
        asked=asked,
        executor="vectorised",
        precision=precision,
    )


BENCHES: dict[str, list[Callable[[], Bench]]] = {
    "pfl": [partial(pfl, "tf32", 16_000), partial(pfl, "float32", 0)],
    "fashion-300": [
        partial(fashion, 300, 30, 7000, "bfloat16", "vectorised"),
        partial(fashion, 300, 30, 0, "float32", "vectorised"),
    ],
    "fashion-20": [partial(fashion, 20, 5, *one) for one in ((4500, "bfloat16"), (0, "tf32"), (0, "float32"))],
    "resnet": [partial(resnet, 20, 10, 2000)],
    "group": [
        partial(fashion, 300, 30, 0, "bfloat16", "vectorised", "group"),
        partial(resnet, 20, 10, 0, "group"),
        partial(resnet, 300, 30, 0, "group"),
    ],
}


PARTS = [*BENCHES, "in pfl", "first", "memory", "accuracy 0", "accuracy 1"]


def measured(parts: list[str]) -> dict[str, list[dict[str, Any]]]:
    """The speeds of all settings of those parts."""
    names = [(part, number) for part in parts for number in range(len(BENCHES[part]))]
    if not names:
        return {}
    context = get_context("spawn")
    ready, turn, found = (
        context.Barrier(len(names)),
        context.Lock(),
        context.Queue(),
    )  # no one ends beside another's turn
    workers = [context.Process(target=measure, args=(*name, ready, turn, found)) for name in names]
    for worker in workers:
        worker.start()
    results = dict(found.get(timeout=900) for _ in names)
    for worker in workers:
        worker.join()
    return {part: [results[part, number] for number in range(len(BENCHES[part]))] for part in parts}


def measure(part: str, number: int, ready: Any, turn: Any, found: Any) -> None:
    """The speeds of one setting."""
    bench, result = BENCHES[part][number](), dict[str, Any]()
    try:
        quiet()
        result["setting"] = bench.title
        task = bench.task()
        began = perf_counter()
        simulation = bench.simulation(task)
        result["seconds to trace, compile and capture, beside the others"] = perf_counter() - began
        rounds = iter(simulation)
        for _ in range(bench.clients // bench.algorithm.sampled + 3):  # until nearly everybody has been contacted
            next(rounds)
    except Exception as error:
        result["failed"] = repr(error)
    try:
        ready.wait(600)
        if "failed" not in result:
            with turn:
                result |= speeds(bench, task, simulation, rounds)
    except Exception as error:
        result["failed"] = repr(error)
    print(json.dumps(result, indent=2), flush=True)
    found.put(((part, number), result))
    ready.wait()  # until all have had their turn


def speeds(bench: Bench, task: Supervised, simulation: Simulation, rounds: Any) -> dict[str, Any]:
    def some() -> float:
        next(rounds)
        return rate(lambda: [next(rounds) for _ in range(bench.rounds)], lambda: simulation._fleet.totals.steps)

    some()  # what is made on the way is made by then
    whole = some()
    with slow_host():
        slowly = some()
    return {
        "executor": simulation.executor,
        "local steps a second": whole,
        "on a slow host": slowly,
        "asked": bench.asked,
        "executor alone, the same steps": executor_alone(bench, task, simulation, rounds),
        "bare loop": bare_loop(bench, task),
        "milliseconds an evaluation": 1000 * seconds(lambda: [simulation._evaluate() for _ in range(5)]) / 5,
        "milliseconds of a round": profile(simulation, rounds),
        "gigabytes at most": torch.cuda.max_memory_allocated() / 1e9,
    }


@contextmanager
def slow_host() -> Iterator[None]:
    """All threads of this process share one core with a process that spins."""
    before, core = os.sched_getaffinity(0), {min(os.sched_getaffinity(0))}
    hold = f"import os; os.sched_setaffinity(0, {core})"
    spins = subprocess.Popen([sys.executable, "-c", f"{hold}\nwhile True: pass"])

    def held_to(cores: set[int]) -> None:
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores)

    try:
        held_to(core)
        sleep(0.5)  # until it spins
        yield
    finally:
        held_to(before)
        spins.kill()
        spins.wait()


FIRST = ["fashion-mnist", "--only", "QuAFL", "--set", "run.device=cuda", "--set", "run.precision=bfloat16"]


def first() -> dict[str, Any]:
    """Seconds from a command to its row at time 0, and to the first one beyond; the run is then ended."""
    found: dict[str, Any] = {"command": " ".join(["quafl", "run", *FIRST])}
    with TemporaryDirectory() as folder:
        caches = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "PYTHONPYCACHEPREFIX")
        env = os.environ | {name: str(Path(folder, name)) for name in caches}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        for cache in "empty", "warm":
            out, began, rows = Path(folder, cache), perf_counter(), list[float]()
            command = [sys.executable, "-m", "quafl.cli", "run", *FIRST, "--set", "run.until=100000", "--out", str(out)]
            with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) as run:
                while run.poll() is None and len(rows) < 2:
                    written = next(out.rglob("rows-seed0.csv"), None)
                    if written is not None and len(written.read_text().splitlines()) > len(rows) + 1:
                        rows.append(round(perf_counter() - began, 2))
                    sleep(0.02)
                while run.poll() is None and not list(Path(folder).rglob("executors.json")):  # until all is compiled
                    sleep(0.1)
                run.send_signal(SIGINT)
            assert len(rows) == 2, f"it ended with {run.returncode} before its second row"
            found[cache] = dict(zip(("row at time 0", "first row beyond"), rows, strict=True))
            print(json.dumps(found), flush=True)
    return found


def profile(simulation: Simulation, rounds: Any) -> dict[str, float]:
    """Where the time of a round goes, each part waited for."""
    fleet, spent = simulation._fleet, dict[str, float]()
    count = 10

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            torch.cuda.synchronize()
            start = perf_counter()
            result = function(*args, **kwargs)
            torch.cuda.synchronize()
            spent[name] = spent.get(name, 0.0) + 1000 * (perf_counter() - start) / count
            return result

        return run

    parts = [(fleet.crew, "execute", "local steps"), (Coder, "pack_with", "encode"), (Coder, "unpack", "decode")]
    parts += [(Store, "__getitem__", "clients' states"), (Store, "put", "clients' states")]
    before = [getattr(owner, name) for owner, name, _ in parts]
    for (owner, name, label), function in zip(parts, before, strict=True):
        setattr(owner, name, timed(label, function))
    total = 1000 * seconds(lambda: [next(rounds) for _ in range(count)]) / count
    for (owner, name, _), function in zip(parts, before, strict=True):
        setattr(owner, name, function)
    return {**spent, "everything else": total - sum(spent.values())}


def seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = perf_counter()
    work()
    torch.cuda.synchronize()
    return perf_counter() - start


def rate(work: Callable[[], object], steps: Callable[[], int]) -> float:
    before = steps()
    took = seconds(work)
    return (steps() - before) / took


def executor_alone(bench: Bench, task: Supervised, simulation: Simulation, rounds: Any) -> float:
    """The steps of some rounds once more, without messages, clients' states and server."""
    crew, execute = simulation._fleet.crew, simulation._fleet.crew.execute
    calls: list[tuple[Any, Any]] = []

    def listen(clients: Any, ids: Any, counts: Any) -> Any:
        calls.append((ids, counts))
        return execute(clients, ids, counts)

    crew.execute = listen  # type: ignore[assignment]  # it has no name
    for _ in range(10):
        next(rounds)
    crew.execute = execute
    plain = newcomers(bench.algorithm, *task.initial(), torch.ones(bench.algorithm.sampled))
    everybody = replace(plain, optimizer=bench.optimizer.init(plain.base))

    def work() -> None:
        for ids, counts in calls:
            execute(everybody[: len(ids)], ids, counts)

    return sum(int(counts.sum()) for _, counts in calls) / seconds(work)


def bare_loop(bench: Bench, task: Supervised) -> float:
    """What one would write for a single model: nn.Module, torch.optim, the same batches, eager."""
    module = task.flat.module(*task.initial()).to(DEVICE)
    optimizer = bench.bare(module)
    batches = [task.batch(0, step) for step in range(20)]

    def work() -> None:
        for inputs, targets, _ in batches * 10:
            optimizer.zero_grad()
            with mixed(bench.precision, DEVICE):
                loss = functional.cross_entropy(module(inputs), targets)
            loss.backward()
            optimizer.step()

    with arithmetic(bench.precision, DEVICE):
        work()
        return 200 / seconds(work)


def memory() -> dict[str, Any]:
    """Of ResNet20: a run with 300 clients, all of whom have been contacted; then clients until no more fit."""
    bench = resnet(300, 30, 0)
    task = bench.task()
    torch.cuda.reset_peak_memory_stats()
    simulation = bench.simulation(task)
    rounds = iter(simulation)
    while simulation._fleet.clients.known < 300:
        next(rounds)
    result = {"gigabytes with n=300, s=30, all contacted": f"{torch.cuda.max_memory_allocated() / 1e9:.1f}"}
    del simulation, rounds
    everybody = newcomers(bench.algorithm, *task.initial(), torch.ones(500_000))
    store = Store(everybody, replace(everybody[0], optimizer=bench.optimizer.init(everybody.base[0])))
    try:
        while True:
            ids = torch.arange(store.known, store.known + 1000)
            store.put(ids, store[ids].each(torch.clone))
    except torch.cuda.OutOfMemoryError:
        size = torch.cuda.get_device_properties(DEVICE).total_memory / 1e9
        result[f"clients that fit beside the data into {size:.0f} GB"] = f"{store.known:,}"
    return result


def accuracy(seed: int) -> dict[int, float]:
    """pfl's job to its end: accuracy on the test set every 100 rounds."""
    bench = pfl("tf32", 0)  # torch's default for convolutions, and so pfl's
    simulation = bench.simulation(bench.task(seed), seed)
    rounds = iter(simulation)
    next(rounds)
    found = {}
    for number in range(1, pfl_job.ROUNDS + 1):
        next(rounds)
        if number % 100 == 0:
            found[number] = simulation._evaluate()["accuracy"]
    return found


def in_pfl() -> dict[str, Any]:
    try:
        return pfl_job.in_pfl(60, 0, "cuda", every=0)
    except ImportError as error:
        return {"not measured": str(error)}


def page() -> None:
    """docs/results/simulator.md, from what was measured."""
    found = json.loads(RESULTS.read_text())
    absent = [part for part in PARTS if part not in found]
    missing = f"not measured: {', '.join(absent)}" if absent else "all parts"
    days = " and ".join(sorted(set(found["dates"].values())))
    lines = [
        "# Speed of the simulator on a GPU",
        "",
        f"`python benchmarks/gpu.py PART…` ({missing}), {days}, {found['device']};",
        "[all of it](simulator-gpu.json). Local steps a second",
        "that were drawn, in whole rounds: clients, codec, server; warmed up. Beside them the executor taking the same",
        "steps without messages, clients' states and server, and a bare loop over one model in eager torch. How it",
        "is done: [speed.md](../speed.md). On a slow host: the process is held to one core, half of whose time another",
        "one takes. What the figures mean, and how they were made where that was not by this command alone:",
        "[speed.md](speed.md).",
        "",
        "| setting | executor | steps/s | asked | of the executor alone | on a slow host | over a bare loop |",
        "|---|---|---|---|---|---|---|",
    ]
    measured = [row for name in BENCHES for row in found.get(name, []) if "executor" in row]
    for row in measured:
        whole, alone = row["local steps a second"], row["executor alone, the same steps"]
        asked = f"{row['asked']:,.0f}" if row["asked"] else ""
        lines.append(
            f"| {row['setting']} | {row['executor']} | {whole:,.0f} | {asked} | {whole / alone:.2f} | "
            f"{row['on a slow host'] / alone:.2f} | {whole / row['bare loop']:.0f}× |"
        )
    lines += ["", "Where the time of a round goes, in milliseconds, each part waited for:", ""]
    parts = list(dict.fromkeys(part for row in measured for part in row["milliseconds of a round"]))
    lines += [f"| setting | {' | '.join(parts)} |", "|---|" + "---|" * len(parts)]
    for row in measured:
        spent = (f"{row['milliseconds of a round'].get(part, 0.0):.1f}" for part in parts)
        lines.append(f"| {row['setting']} | {' | '.join(spent)} |")
    lines += ["", *_rest(found)]
    (RESULTS.parent / "simulator.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _rest(found: dict[str, Any]) -> list[str]:
    lines = []
    if "local steps a second" in found.get("in pfl", {}):
        theirs = found["in pfl"]["local steps a second"]
        ours = ", ".join(
            f"{row['local steps a second'] / theirs:.1f} times that in {row['setting'].split()[-1]}"
            for row in found["pfl"]
            if "executor" in row
        )
        lines.append(
            f"- pfl-research 0.6 itself, its job, on the same GPU: {theirs:,.0f} local steps a second. "
            f"The simulator: {ours}."
        )
    ends = {part.split()[-1]: list(rows.items())[-1] for part, rows in found.items() if part.startswith("accuracy")}
    if ends:
        ours = ", ".join(f"{value:.4f} (seed {seed})" for seed, (_, value) in ends.items())
        theirs = json.loads(IN_PFL.read_text())
        (number,) = {last for last, _ in ends.values()}
        end = theirs["accuracy"][number]
        error = (end * (1 - end) / 10_000) ** 0.5
        lines.append(
            f"- pfl's job on CIFAR-10, accuracy after {number} rounds: {ours}, in tf32. pfl itself: {end:.4f} (seed "
            f"{theirs['seed']}; `{theirs['command']}`, {theirs['date']}; [rows]({IN_PFL.name})). The standard error of "
            f"an accuracy on 10,000 pictures is {error:.4f}."
        )
    if "first" in found:
        lines += [
            f"- `{found['first']['command']}` with {cache} caches: its first evaluation beyond time 0 came "
            f"{one['first row beyond']:.1f} seconds after the command, that at time 0 {one['row at time 0']:.1f}."
            for cache, one in found["first"].items()
            if cache != "command"
        ]
    for what, value in found.get("memory", {}).items():
        lines.append(f"- ResNet20, {what}: {value}.")
    return lines


def quiet() -> None:
    torch.set_num_threads(1)  # as every run of `quafl run` has it
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("quafl").setLevel(logging.INFO)


def main(parts: list[str]) -> None:
    quiet()
    others: dict[str, Callable[[], Any]] = {
        "in pfl": in_pfl,
        "first": first,
        "memory": memory,
        "accuracy 0": partial(accuracy, 0),
        "accuracy 1": partial(accuracy, 1),
    }
    chosen = parts or [*BENCHES, *others]
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results["device"] = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"

    def keep(part: str, result: Any) -> None:
        results[part] = result
        results.setdefault("dates", {})[part] = datetime.now(UTC).date().isoformat()
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")

    for part, rows in measured([part for part in chosen if part in BENCHES]).items():
        if not any("failed" in row for row in rows):
            keep(part, rows)
    for part, work in others.items():
        if part in chosen:
            keep(part, work())
            print(json.dumps({part: results[part]}, indent=2), flush=True)
    page()


if __name__ == "__main__":
    main(sys.argv[1:])
