"""The simulator's overhead, as ratios of things measured side by side in one run: `make bench-sim`.

step    whole-run time of Fashion-MNIST CNN, n=20, s=5, K=5, b=4, over a bare PyTorch loop (nn.Module, torch.optim, the
        same batches, one thread) that takes the same local steps and makes the same evaluations; in turns, because the
        machine may be busy with something else. The loop runs in the same process, which keeps memory that is free
        (quafl.run.heap), and in another one, which gives it back to the system, as processes do
scale   MNIST MLP: the time of a round with 10,000 clients over that with 100, and the memory that 10,000 take
people  n = 10⁴, 10⁵, 10⁶ and 1.5·10⁷ clients with data made on demand, 1000 of them contacted in a round, a perceptron
        of MNIST's size (79,510 parameters): the time of a round over that with 10⁴, in turns; memory and checkpoints,
        each n in a process of its own. QuAFL whose clients adopt the server's model. Also draws docs/img/people.png
spill   20,000 such clients, of whom 500 are contacted in a round, with a memory of their own (Calibrated, 0.3 MB each):
        the time of a round with a budget of 0.5 GB over that without, in turns; memory, each in a process of its own
workers CIFAR-10 ResNet20, n=100, s=40 and n=300, s=100, K=5, b=4, batches of 16: local steps a second of one run with
        two workers (Ray actors, a core each) over twice those with one, in turns; octets between the processes in
        a round; and the ratio if nothing but steps took time and an idle worker took none early: one worker has more of
        those who are contacted
"""

import json
import multiprocessing
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from itertools import islice
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn
from torch.nn import functional

import quafl
from quafl.record import checkpoints
from quafl.run.heap import kept
from quafl.run.versions import versions
from quafl.run.workers import hiring
from quafl.settings.curve import Settings
from quafl.settings.reading import load
from quafl.sim import Plan, Simulation, World
from quafl.tasks.hands import Held
from quafl.tasks.supervised import Examples, Supervised

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "simulator-cpu.json"
PICTURE = RESULTS.parents[1] / "img" / "people.png"
TURNS = 8
ROUNDS = 120
SHARED = (100, 40, 14), (300, 100, 7)  # clients, those contacted in a round, rounds, with workers
SPILLED, BUDGET, SPILLING_ROUNDS = 20_000, 0.5, 20  # clients with a memory of their own, gigabytes, rounds
PEOPLE, CROWDED = (10_000, 100_000, 1_000_000, 15_000_000), 7  # clients, and rounds with them


class Listened(Supervised):
    """Remembers which batches were asked for."""

    asked: list[tuple[int, int]]

    def batch(self, client: int, step: int) -> Examples:
        self.asked.append((client, step))
        return super().batch(client, step)


def seconds(work: Callable[[], object]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


def until_row(simulation: Any) -> None:
    while next(simulation) is None:
        pass


def compared() -> Settings:
    settings = next(curve for curve in load("fashion-mnist", ["run.every=10"]) if curve.label == "QuAFL")
    assert (settings.clients.count, settings.algorithm.sampled, settings.algorithm.local_steps) == (20, 5, 5)
    return settings


def step() -> dict[str, Any]:
    torch.set_num_threads(1)
    module, optimizer, task, simulation = learner(compared())
    rounds = iter(simulation)
    until_row(rounds)  # at time 0
    bare_loop(module, optimizer, task, [])
    ours, bare, usual, steps = [], [], [], 0
    with kept(), multiprocessing.get_context("spawn").Pool(1) as other:
        other.apply(elsewhere, ([],))
        for turn in range(TURNS):
            task.asked = []
            ours.append(seconds(lambda: until_row(rounds)))
            asked = list(task.asked)
            steps += len(asked)
            bare.append(seconds(partial(bare_loop, module, optimizer, task, asked)))
            usual.append(other.apply(elsewhere, (asked,)))
            print(f"turn {turn + 1}: {len(asked)} steps, {ours[-1]:.1f} s, {bare[-1]:.1f}, {usual[-1]:.1f}", flush=True)
    ratios = [mine / theirs for mine, theirs in zip(ours, bare, strict=True)]
    return {
        "local steps": steps,
        "evaluations": TURNS,
        "whole time over a bare loop's": sum(ours) / sum(bare),
        "median of the turns": statistics.median(ratios),
        "least and most": [min(ratios), max(ratios)],
        "over a bare loop's in another process": sum(ours) / sum(usual),
    }


def learner(settings: Settings) -> tuple[nn.Module, torch.optim.Optimizer, Supervised, Any]:
    """A bare loop's parts, and the simulation of the same."""
    task, simulation = settings.simulation(0)
    task.__class__ = Listened
    assert isinstance(task, Listened)
    task.asked = []
    module = task.flat.module(*task.initial())
    return module, torch.optim.Adam(module.parameters(), lr=settings.algorithm.lr), task, simulation


@cache
def here() -> tuple[nn.Module, torch.optim.Optimizer, Supervised]:
    torch.set_num_threads(1)
    return learner(compared())[:3]


def elsewhere(asked: list[tuple[int, int]]) -> float:
    """Seconds of a bare loop in this process."""
    return seconds(lambda: bare_loop(*here(), asked))


def bare_loop(
    module: nn.Module, optimizer: torch.optim.Optimizer, task: Supervised, asked: list[tuple[int, int]]
) -> None:
    """What one would write without us: no clients, no codec, no clock."""
    module.train()
    for client, number in asked:
        inputs, targets, _ = Supervised.batch(task, client, number)
        optimizer.zero_grad()
        functional.cross_entropy(module(inputs), targets).backward()
        optimizer.step()
    module.eval()
    with torch.no_grad():
        assert isinstance(task._test, Held)
        for inputs, targets in task._test.all, task._sample:
            outputs = torch.cat([module(part) for part in inputs.split(500)])
            functional.cross_entropy(outputs, targets).item()
            (outputs.argmax(dim=-1) == targets).float().mean().item()


def mnist(clients: int, sampled: int) -> Simulation:
    """Contacts so far apart that every client has taken all its steps, on as many examples whatever n."""
    changes = [
        f"clients.count={clients}",
        f"algorithm.sampled={sampled}",
        "task.batch=6",
        "curves.QuAFL.algorithm.wait=1000",
    ]
    curve = next(c for c in load("mnist", [*changes, "run.until=1e9", "run.every=1e9"]) if c.label == "QuAFL")
    return curve.simulation(0)[1]


def resident() -> float:
    """Gigabytes of this process, at most so far."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e9


def memory(clients: int, sampled: int, rounds: int) -> tuple[float, int]:
    """Most gigabytes resident in that many rounds and a checkpoint, and how many clients then have a state of their
    own."""
    torch.set_num_threads(1)
    simulation = mnist(clients, sampled)
    for _ in islice(simulation, rounds):
        pass
    with TemporaryDirectory() as folder:
        checkpoints.save(Path(folder) / "checkpoint.pt", simulation.state())
    return resident(), simulation._fleet.clients.known


def scale() -> dict[str, Any]:
    torch.set_num_threads(1)
    sizes = 100, 10_000
    runs = {size: iter(mnist(size, 5)) for size in sizes}
    for run in runs.values():
        next(run)
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(ROUNDS):
        for size, run in runs.items():
            times[size].append(seconds(partial(next, run)))
    few, many = (statistics.median(times[size]) for size in sizes)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        first, known_first = pool.apply(memory, (10_000, 5, 100))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        last, known_last = pool.apply(memory, (10_000, 1000, 40))
    return {
        "round with 10,000 clients over one with 100": many / few,
        "GB resident": {f"{known_first} clients contacted": first, f"{known_last} clients contacted": last},
    }


def pictures_of(client: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A client's own, made when they are needed."""
    pictures = torch.rand(32, 784, generator=torch.Generator().manual_seed(client))
    return pictures, pictures[:, :10].argmax(1)


def crowd(clients: int) -> Simulation:
    network = nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    test = pictures_of(PEOPLE[-1])
    task = Supervised(network, quafl.OnDemand(clients, pictures_of), test=test, batch_size=32)
    algorithm = quafl.QuAFL(sampled=1000, local_steps=2, client_averaging=0.0)
    plan = Plan(until=1e9, every=1e9)
    return Simulation(task, clients, World(), algorithm, quafl.compressed(bits=4), quafl.sgd(0.1), plan)


def alone(clients: int) -> dict[str, float]:
    """Gigabytes resident at most, after some rounds and a checkpoint; what that takes, and what it takes to begin."""
    torch.set_num_threads(1)
    began = perf_counter()
    simulation = crowd(clients)
    made = perf_counter() - began
    for _ in islice(simulation, 1 + CROWDED):
        pass
    with TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        saving = seconds(lambda: checkpoints.save(path, simulation.state()))
        octets = path.stat().st_size
    return {
        "GB resident": round(resident(), 2),
        "seconds to begin": round(made, 1),
        "seconds of a checkpoint": round(saving, 1),
        "GB of it": round(octets / 1e9, 2),
    }


def people() -> dict[str, Any]:
    torch.set_num_threads(1)
    runs = {clients: iter(crowd(clients)) for clients in PEOPLE}
    times: dict[int, list[float]] = {clients: [] for clients in PEOPLE}
    for run in runs.values():
        next(run)  # the first evaluation
    for _ in range(CROWDED):
        for clients, run in runs.items():
            times[clients].append(seconds(partial(next, run)))
    found = {}
    for clients in PEOPLE:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            mine = pool.apply(alone, (clients,))
        ratios = [many / few for many, few in zip(times[clients], times[PEOPLE[0]], strict=True)]
        found[f"{clients}"] = {"round over that with 10,000": round(statistics.median(ratios), 2), **mine}
    draw(found)
    return found


def draw(found: dict[str, dict[str, float]]) -> None:
    """Time of a round and memory, against the number of clients."""
    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    for axes, (name, label) in zip(
        figure.subplots(1, 2),
        (("round over that with 10,000", "a round, over one with 10⁴ clients"), ("GB resident", "GB resident")),
        strict=True,
    ):
        axes.plot([int(clients) for clients in found], [mine[name] for mine in found.values()], "o-", color="#0072B2")
        axes.set(xscale="log", xlabel="clients", ylabel=label, ylim=(0, None))
        axes.grid(alpha=0.25)
    figure.savefig(PICTURE, dpi=130)


def workers() -> dict[str, Any]:
    return {f"n={clients}, s={sampled}": shared(clients, sampled, rounds) for clients, sampled, rounds in SHARED}


def shared(clients: int, sampled: int, count: int) -> dict[str, Any]:
    """A run with two workers beside the same with one: as many rounds in turns, the same steps in both."""
    settings = {
        "label": "workers",
        "task": {"name": "cifar-10", "norm": "group", "batch": 16},
        "clients": {"count": clients},
        "algorithm": {"name": "calibrated", "sampled": sampled, "local_steps": 5, "lr": 0.03, "wait": 20.0},
        "run": {"until": 1e6, "every": 1e6, "seeds": [0]},
    }
    torch.set_num_threads(1)
    with kept(), hiring("local", 3) as hire, ExitStack() as stack:
        both: dict[int, Any] = {}
        for workers in 1, 2:
            run = {**settings["run"], "workers": workers}
            experiment = Settings.model_validate({**settings, "run": run})
            spread = stack.enter_context(hire(experiment, 0, None))
            both[workers] = experiment.simulation(0, spread=spread)[1]
        rounds = {workers: iter(simulation) for workers, simulation in both.items()}
        busier = listened(both[2].crew)
        took = dict.fromkeys(both, 0.0)
        for turn in range(2 + count):
            for workers, simulation in both.items():
                before = simulation.crew.octets
                spent = seconds(partial(next, rounds[workers]))
                if turn > 1:  # neither the evaluation at 0 nor the first round, in which nobody has taken a step
                    took[workers] += spent
                octets = simulation.crew.octets - before
    steps = {workers: simulation._fleet.totals.steps for workers, simulation in both.items()}
    assert steps[1] == steps[2]
    result = {
        "local steps a second, one worker": round(steps[1] / took[1], 1),
        "two workers": round(steps[2] / took[2], 1),
        "efficiency": round(took[1] / took[2] / 2, 3),
        "efficiency if nothing but steps took time, and none were taken early": round(steps[2] / 2 / sum(busier), 3),
        "megabytes between the processes in the last round": round(octets / 1e6, 1),
        "rounds": count,
    }
    print(clients, sampled, result, flush=True)
    return result


def listened(crew: Any) -> list[int]:
    """The steps that the busier one of two workers takes at each contact."""
    busier: list[int] = []
    contact = crew.contact

    def listening(contacts: Any, *more: Any) -> Any:
        halves = [sum(int(one.steps[one.ids % 2 == half].sum()) for one in contacts) for half in (0, 1)]
        busier.append(max(halves))
        return contact(contacts, *more)

    crew.contact = listening
    return busier


def rememberers(memory: float) -> Simulation:
    network = nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    task = Supervised(network, quafl.OnDemand(SPILLED, pictures_of), test=pictures_of(SPILLED), batch_size=32)
    algorithm = quafl.Calibrated(sampled=500, local_steps=2)
    parts = algorithm, quafl.compressed(bits=4), quafl.sgd(0.1), Plan(until=1e9, every=1e9)
    return Simulation(task, SPILLED, World(), *parts, memory=1e9 * memory)


def remembering(memory: float) -> dict[str, Any]:
    """Gigabytes resident at most, with so many kept in memory, and clients with a state of their own in the end."""
    torch.set_num_threads(1)
    simulation = rememberers(memory)
    for _ in islice(simulation, 1 + SPILLING_ROUNDS):
        pass
    return {"clients": simulation._fleet.clients.known, "GB resident": round(resident(), 2)}


def spill() -> dict[str, Any]:
    torch.set_num_threads(1)
    budgets = {"without a budget": inf, f"with {BUDGET} GB": BUDGET}
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        found = {name: pool.apply(remembering, (memory,)) for name, memory in budgets.items()}
    runs = {name: iter(rememberers(memory)) for name, memory in budgets.items()}
    times: dict[str, list[float]] = {name: [seconds(partial(next, run))] for name, run in runs.items()}
    for _ in range(SPILLING_ROUNDS):
        for name, run in runs.items():
            times[name].append(seconds(partial(next, run)))
    half = SPILLING_ROUNDS // 2  # by then, there is more than the budget
    without, within = (sum(spent[half:]) for spent in times.values())
    return {"a round with it over one without": round(within / without, 3), **found}


PARTS = {"step": step, "scale": scale, "people": people, "spill": spill, "workers": workers}

if __name__ == "__main__":
    chosen = sys.argv[1:] or list(PARTS)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in chosen:
        results[name] = PARTS[name]()
        results.setdefault("versions", {})[name] = versions()
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps({name: results[name] for name in chosen}, indent=2))
