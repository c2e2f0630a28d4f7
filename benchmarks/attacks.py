"""Clients with a certificate that lie, against each defence.

    python benchmarks/attacks.py [honest] [one] [two] [clip] [speeds] [hasty] [page]     (20 minutes on one core)

The digits task, 20 clients, in the simulator. Attackers train like the others; then something else is sent in their
place. They know the server's model and the defence.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache, lru_cache, partial
from pathlib import Path
from statistics import mean, stdev
from textwrap import fill
from typing import Any

import torch
from liars import Attack, Attacked
from torch import Tensor, nn

from quafl import Calibrated, Change, FedAvg, FedBuff, Lattice, Plan, QuAFL, Simulation, sgd
from quafl.codec import QSGD
from quafl.codec.seams import Codec
from quafl.core.defence import Defence, Held, Reports
from quafl.core.messages import Model
from quafl.core.randomness import derive
from quafl.core.seams import Algorithm, ServerState
from quafl.run.versions import versions
from quafl.settings.defence import FederationDefence
from quafl.sim import Diverged, World
from quafl.tasks import Supervised, digits, partition
from quafl.tasks.models import mlp

RESULTS = Path(__file__).parents[1] / "docs" / "results"
RECORD = RESULTS / "attacks.json"
CLIENTS, SAMPLED, STEPS, SEEDS = 20, 5, 5, [0, 1, 2]
HIDDEN = 64
LAST = 0.8  # of the time: what comes after it counts as the end of a run
CLIPS = [1.5, 2.0, 3.0, 5.0]
DEFAULT = FederationDefence().build()
DEFENCES = {
    "none": Defence(),
    "clip": DEFAULT,
    "clip, trimmed mean": replace(DEFAULT, mean="trimmed"),
    "clip, geometric median": replace(DEFAULT, mean="geometric"),
}


BOOSTS = (10.0, 100.0)
ATTACKS = {
    "boosted update": Attack(lambda boost, model, own, chance: boost * own, BOOSTS),
    "boosted, wrong labels": Attack(lambda boost, model, own, chance: boost * own, BOOSTS, turned=True),
    "sign flip": Attack(lambda boost, model, own, chance: -boost * own, BOOSTS),
    "noise": Attack(lambda boost, model, own, chance: chance * (boost * own.norm() / chance.norm()), BOOSTS),
    "constant": Attack(
        lambda boost, model, own, chance: torch.full_like(own, boost * float(own.norm()) / len(own) ** 0.5), BOOSTS
    ),
    "scaled model": Attack(lambda boost, model, own, chance: boost * model, (1.9,)),  # sends 2.9·X_t
    "lazy zero": Attack(lambda boost, model, own, chance: torch.zeros_like(own), speed=0.0),
    "false distance": Attack(distance=1e4),
    "statistics of 9e11": Attack(statistics=9e11, batch_norm=True),
    "statistics of −9e11": Attack(statistics=-9e11, batch_norm=True),
}


# Runs


@dataclass(frozen=True)
class Setting:
    """With the demo's learning rates."""

    make: Callable[..., Algorithm]
    codec: Codec
    lr: float
    until: float


SETTINGS = {
    "Calibrated": Setting(Calibrated, Lattice(bits=4), 0.5, 200.0),
    "QuAFL": Setting(QuAFL, Lattice(bits=4), 0.5, 400.0),
    "FedAvg": Setting(FedAvg, Lattice(bits=4), 0.5, 2000.0),
    "FedBuff": Setting(lambda **more: FedBuff(server_lr=0.3, **more), QSGD(bits=8), 0.5, 600.0),
}
WEIGHTED = Setting(lambda **more: QuAFL(weighted=True, **more), Lattice(bits=4), 1.0, 400.0)


@dataclass(frozen=True)
class Watched(Defence):
    """Counts what it does to honest clients."""

    liars: Sequence[int] = ()
    counts: dict[str, int] = field(default_factory=dict)

    def hold(
        self, server: ServerState, heard: Reports, near: Mapping[str, Model], there: int, unit: Tensor | float = 1.0
    ) -> Held:
        held = Defence.hold(self, server, heard, near, there, unit)
        honest = torch.tensor([client not in self.liars for client in heard.senders.tolist()], dtype=torch.bool)
        cut = [(getattr(held.up, name) != getattr(heard.up, name)).any(dim=-1) for name in near]
        far = [told != heard.distances[name] for name, told in held.distances.items()]
        changed = {
            "replies": torch.stack(cut).any(dim=0),
            "statistics": held.up.statistics != heard.up.statistics,
            "distances": torch.stack(far).any(dim=0),
        }
        for name, rows in changed.items() if self.mean == "mean" else ():  # a robust mean changes all rows
            self.counts[name] = self.counts.get(name, 0) + int(rows[honest].sum())
            self.counts[f"all {name}"] = self.counts.get(f"all {name}", 0) + rows[honest].numel()
        return held


class Quick(Supervised):
    """Keeps its batches; the gradient of the network without batch norm is written down, which takes a quarter of the
    time."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.batch = lru_cache(maxsize=None)(super().batch)  # type: ignore[method-assign]
        model, buffers = self.initial()
        mine, torchs = (kind.gradient(self, model, buffers, self.batch(0, 0))[0] for kind in (Quick, Supervised))
        torch.testing.assert_close(mine, torchs)

    def gradient(self, model: Tensor, buffers: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        if len(buffers):
            return self.flat.gradient(model, buffers, batch.key, lambda module: self._loss_of(module, batch))
        into, bias, out, out_bias = model.split([64 * HIDDEN, HIDDEN, 10 * HIDDEN, 10])
        into, out, x, y = into.view(HIDDEN, 64), out.view(10, HIDDEN), batch.inputs, batch.targets
        before = torch.addmm(bias, x, into.T)
        hidden = before.relu()
        error = torch.addmm(out_bias, hidden, out.T).softmax(dim=1)
        error[torch.arange(len(y)), y] -= 1
        error /= len(y)
        back = error @ out * (before > 0)
        return torch.cat(((back.T @ x).view(-1), back.sum(0), (error.T @ hidden).view(-1), error.sum(0))), buffers


@cache
def task_of(seed: int, batch_norm: bool, by_class: bool, turned: tuple[int, ...]) -> Quick:
    """The demo's, or with batch norm; `turned` are clients with wrong labels."""
    data = digits()
    train = torch.cat((data.train[0], data.validation[0])), torch.cat((data.train[1], data.validation[1]))
    deal = partial(partition.by_class, pieces=4) if by_class else partition.iid
    dealt = deal(train, CLIENTS, seed=seed)
    hands = [(x, 9 - y) if client in turned else (x, y) for client, (x, y) in enumerate(dealt)]
    first, *rest = mlp(64, HIDDEN, 10, seed=derive(seed, "model")).children()
    layers = [first, nn.BatchNorm1d(HIDDEN), *rest] if batch_norm else [first, *rest]
    return Quick(nn.Sequential(*layers), hands, test=data.test, batch_size=16, seed=seed)


def run_one(
    setting: Setting,
    defence: Defence,
    seed: int,
    *,
    attack: Attack | None = None,
    boost: float = 1.0,
    liars: int = 0,
    batch_norm: bool = False,
    by_class: bool = False,
    hasty: bool = False,
) -> dict[str, Any]:
    who = tuple(range(CLIENTS - liars, CLIENTS))  # the slow ones are the first
    task = task_of(seed, batch_norm, by_class, who if attack is not None and attack.turned else ())
    watched = Watched(defence.clip, defence.mean, defence.trim, defence.speeds, liars=who)
    algorithm = setting.make(sampled=SAMPLED, local_steps=STEPS, defence=watched)
    plan = Plan(until=setting.until, every=setting.until / 50, seed=seed)
    world = World(changes=[Change(0.0, 0.01, list(who))]) if hasty else World()
    run = Simulation(task, CLIENTS, world, algorithm, setting.codec, sgd(setting.lr), plan, executor="sequential")
    if attack is not None:
        Attacked.into(run, who, attack, boost, seed)
    moved, before, ended = 0.0, run.server.model, True
    try:
        for _ in run:
            moved = max(moved, float((run.server.model - before).norm() / before.norm()))
            before = run.server.model
    except Diverged:
        ended = False
    end = [row["accuracy"] for row in run.rows if row["time"] >= LAST * setting.until]
    return {
        "accuracy": mean(end) if ended else 0.1,  # as good as a guess
        "lowest": min(end) if ended else 0.1,
        "moved": moved,
        "finite": ended,
        "refined": run._fleet.totals.refined / max(run._fleet.totals.contacts, 1),
        **watched.counts,
    }


def measured(setting: Setting, defence: Defence, attack: Attack | None = None, **more: Any) -> dict[str, Any]:
    """Over the seeds; of an attack's boosts, the one that costs most. Where there is a bound, all are cut to the same
    length."""
    boosts = attack.boosts if attack is not None else (1.0,)
    tried = {
        boost: [run_one(setting, defence, seed, attack=attack, boost=boost, **more) for seed in SEEDS]
        for boost in (boosts[:1] if defence.bounded else boosts)
    }
    boost, runs = min(tried.items(), key=lambda item: mean(run["accuracy"] for run in item[1]))
    totals = {name: sum(run[name] for run in runs) for name in runs[0] if name.startswith("all ")}
    return {
        "accuracy": mean(run["accuracy"] for run in runs),
        "deviation": stdev(run["accuracy"] for run in runs),
        "lowest": min(run["lowest"] for run in runs),
        "moved": max(run["moved"] for run in runs),
        "finite": all(run["finite"] for run in runs),
        "refined": mean(run["refined"] for run in runs),
        "boost": boost,
        "clipped": {
            name.removeprefix("all "): sum(run[name.removeprefix("all ")] for run in runs) / max(total, 1)
            for name, total in totals.items()
        },
        "seeds": [{name: run[name] for name in ("accuracy", "lowest", "moved", "finite")} for run in runs],
    }


# What is measured


def honest() -> dict[str, Any]:
    kinds: dict[str, dict[str, Any]] = {"demo": {}, "batch norm": {"batch_norm": True}, "by class": {"by_class": True}}
    return {
        kind: {
            name: {label: measured(setting, defence, **more) for label, defence in DEFENCES.items()}
            for name, setting in SETTINGS.items()
        }
        for kind, more in kinds.items()
    }


def attacked(liars: int) -> dict[str, Any]:
    return {
        name: {
            label: {
                kind: _told(
                    f"{liars} {name} {label} {kind}",
                    measured(setting, defence, attack, liars=liars, batch_norm=attack.batch_norm),
                )
                for kind, defence in DEFENCES.items()
            }
            for label, attack in ATTACKS.items()
        }
        for name, setting in SETTINGS.items()
    }


def clip() -> dict[str, Any]:
    """Different bounds, without attackers and with one that flips its sign."""
    return {
        name: {
            str(bound): {
                "honest": measured(setting, replace(DEFAULT, clip=bound)),
                **{
                    f"{liars} sign flip": measured(
                        setting, replace(DEFAULT, clip=bound), ATTACKS["sign flip"], liars=liars
                    )
                    for liars in (1, 2)
                },
            }
            for bound in CLIPS
        }
        for name, setting in SETTINGS.items()
    }


def speeds() -> dict[str, Any]:
    """Weighted QuAFL, in which the slowest client's speed counts for all."""
    lazy = ATTACKS["lazy zero"]
    return {
        kind: {str(liars): measured(WEIGHTED, defence, lazy if liars else None, liars=liars) for liars in (0, 1, 2)}
        for kind, defence in DEFENCES.items()
        if defence.mean == "mean"
    }


def hasty() -> dict[str, Any]:
    """FedBuff, where whoever answers sooner answers more often: liars whose steps take next to no time."""
    setting, attack = SETTINGS["FedBuff"], ATTACKS["sign flip"]
    return {
        str(liars): {
            kind: measured(setting, defence, attack, liars=liars, hasty=True) for kind, defence in DEFENCES.items()
        }
        for liars in (1, 2)
    }


def _told(what: str, found: dict[str, Any]) -> dict[str, Any]:
    print(f"{what}: {found['accuracy']:.3f}, moved {found['moved']:.2f}", flush=True)
    return found


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "honest": honest,
    "one": lambda: attacked(1),
    "two": lambda: attacked(2),
    "clip": clip,
    "speeds": speeds,
    "hasty": hasty,
}


# The page

PAGE = """# Clients that lie, and what the server does about it

Whoever has a certificate can send what they like. The server cannot see whether a client has trained honestly; it can
compare it with the others. This page measures what one or two liars of 20 clients can do, with and without the
defences of [`core/defence.py`](../../src/quafl/core/defence.py). Raw numbers: [attacks.json](attacks.json).

{made}

## The defences

- **clip** (the default of a federation: clip = {clip:g}, speeds = {speeds:g}). A displacement is at most {clip:g}
  times as long as is usual: the median over the last 32 different clients, one vote each. A longer one is scaled
  down. Statistics of batch norm are bounded by the same rule, coordinate by coordinate, are finite, and a variance is
  never negative. The distances that clients report, which decide how fine the server's messages are, have the same
  bound. In weighted QuAFL, H_min is the speed at a tenth of all, not the smallest.
- **trimmed mean**: beside it, of each coordinate the largest and the smallest fifth of the values are left out.
- **geometric median**: beside it, the point with the least sum of distances takes the place of the mean.

Simulations have no defence unless their settings ask for one.

## How it was measured

Digits, 20 clients with iid data, {sampled} at a time, K = {steps}, the demo's network and learning rates (FedBuff
with a server's rate of 0.3; with 1 it does not converge at this learning rate). QuAFL and FedAvg use 4 bits both
ways, FedBuff QSGD with 8 bits. For statistics, the network has batch norm. Simulated time: {until}. Accuracy is the
mean over the last fifth of a run, and over {seeds} seeds, ± their standard deviation; in brackets, the largest move
of the server's model in one round, over the model's norm. A run that leaves the finite numbers counts as 0.1, a
guess.

Liars are fast clients. They train like the others, and then something else is heard in place of what they have sent.
They know the server's model and their own honest displacement:

| attack | what is sent |
|---|---|
| boosted update | 10 or 100 times the own displacement |
| boosted, wrong labels | the same, after training on 9 − y in place of y |
| sign flip | −10 or −100 times the own displacement |
| noise | a random direction, 10 or 100 times as long as the own displacement |
| constant | always the same direction, (1, …, 1), as long as that |
| scaled model | 2.9 times the server's model |
| lazy zero | the server's model itself, and a speed of 0 |
| false distance | an honest model, and a measured distance of 10,000 |
| statistics | an honest model, and all statistics of 9e11 or −9e11 |

Without a defence the worse of the two boosts is shown. With one, both are cut to the same length: a liar that knows
the bound gains nothing by keeping within it. All figures are of attacks that we thought of. One that stays within the
bounds and pushes the model slowly towards a goal of its own, on inputs that nobody tests, is not stopped by any of
this.

## One liar of 20

{one}

With the default, the attack that costs most takes {cost_one}. The aim is at most two points. **{verdict}**

These are means over the last fifth of the runs. A single evaluation can be lower, after a round with the liar in it:
the lowest of all with the default are {lowest}.

## Two liars of 20

{two}

With the default, the attack that costs most takes {cost_two}.

## Without liars

The default must not cost honest clients anything. *By class*: each client has four pieces of the sorted digits, few
classes, so that honest displacements differ most.

{honest}

What the default changes of what honest clients send:

{clipped}

Single statistics vary more than norms do, so that more of them are cut; it does not show in the accuracy. Bounded
distances make the server's lattice finer, and a client that is far away asks for a repair. Robust means are not the
default because they cost something where clients differ: the values that they leave out are then somebody's classes.

## Which bound

Honest replies that are cut, and accuracy without liars and with one or two that flip the sign (the attack that costs
FedAvg and FedBuff most).

{clips}

A bound of 2 costs a liar's victims less, and cuts more of what honest clients send. {clip:g} is the default because
it reaches the aim and leaves nearly all honest replies as they are. It was chosen by these tables, with the same seeds.

## Speeds

Weighted QuAFL damps everybody to the speed of the slowest. Liars that say 0:

{lazy}

Without liars, too, H_min is larger with the default, and fast clients are damped less: here it learns sooner.

## Liars that answer at once

In QuAFL and FedAvg the server draws whom it contacts. In FedBuff, who answers sooner answers more often. With a
bound, a client has one place in a buffer, and what it sends while it has one is added to it; a liar that does not
train can still have one in every buffer. Sign flip, in FedBuff:

{hasty}

## What is left

- While fewer than three of four or more clients have moved (fewer than two of two or three), nothing is accepted:
  nobody can tell what is usual. A federation of one client has no bounds.
- In the majority, liars decide what is usual. Of two clients, the one that goes less far does.
- A liar can go the usual way times {clip:g} in any direction in each contact, as often as it is contacted. One that
  answers at once in FedBuff costs more than two points with the default alone; a robust mean holds it.
- A client that always sends next to nothing slows the rest by its share, no more.
"""


def page(record: dict[str, Any]) -> str:
    found = {part: record[part]["measured"] for part in PARTS}
    costs = {liars: _largest_cost(found[liars], found["honest"]) for liars in ("one", "two")}
    within = max(cost for cost, _ in costs["one"].values()) <= 0.02
    text = PAGE.format(
        made="\n".join(f"- {part}: {_made(record[part])}" for part in PARTS),
        clip=DEFAULT.clip,
        speeds=DEFAULT.speeds,
        sampled=SAMPLED,
        steps=STEPS,
        seeds=len(SEEDS),
        until=", ".join(f"{setting.until:g} ({name})" for name, setting in SETTINGS.items()),
        one=_attacked(found["one"], found["honest"]),
        two=_attacked(found["two"], found["honest"]),
        cost_one=_said(costs["one"]),
        cost_two=_said(costs["two"]),
        lowest=_lowest(found["one"], found["honest"]),
        verdict="It is reached." if within else "It is not reached.",
        honest=_table(
            ["", "", *DEFENCES],
            [
                [kind, name, *(_accuracy(kinds[label]) for label in DEFENCES)]
                for kind, algorithms in found["honest"].items()
                for name, kinds in algorithms.items()
            ],
        ),
        clipped=_table(
            ["", "", "replies cut", "statistics cut", "distances cut", "messages repaired, none / default"],
            [
                [
                    kind,
                    name,
                    *(f"{kinds['clip']['clipped'][what]:.1%}" for what in ("replies", "statistics", "distances")),
                    f"{kinds['none']['refined']:.1%} / {kinds['clip']['refined']:.1%}",
                ]
                for kind, algorithms in found["honest"].items()
                for name, kinds in algorithms.items()
            ],
        ),
        clips=_table(
            ["", "clip", "replies cut", "no liar", "one", "two"],
            [
                [
                    name,
                    bound,
                    f"{runs['honest']['clipped']['replies']:.1%}",
                    *(_accuracy(runs[who]) for who in ("honest", "1 sign flip", "2 sign flip")),
                ]
                for name, bounds in found["clip"].items()
                for bound, runs in bounds.items()
            ],
        ),
        hasty=_table(
            ["liars", *DEFENCES],
            [[liars, *(_accuracy(runs[kind]) for kind in DEFENCES)] for liars, runs in found["hasty"].items()],
        ),
        lazy=_table(
            ["liars", *found["speeds"]],
            [[liars, *(_accuracy(runs[liars]) for runs in found["speeds"].values())] for liars in ("0", "1", "2")],
        ),
    )
    return "\n\n".join(map(_wrapped, text.split("\n\n")))


def _wrapped(paragraph: str) -> str:
    if paragraph.startswith(("|", "#")):
        return paragraph
    items = paragraph.removesuffix("\n").split("\n- ")
    marks = ["", *["- "] * (len(items) - 1)]
    lines = [
        fill(
            mark + " ".join(item.split()),
            120,
            subsequent_indent="  " if paragraph.startswith("- ") else "",
            break_on_hyphens=False,
        )
        for mark, item in zip(marks, items, strict=True)
    ]
    return "\n".join(lines) + "\n" * paragraph.endswith("\n")


def _attacked(found: dict[str, Any], honest: dict[str, Any]) -> str:
    """A table for each algorithm, with what there is without liars above it."""
    tables = []
    for name, kinds in found.items():
        quiet = {f"no liar ({kind})": honest[kind][name] for kind in ("demo", "batch norm")}
        rows = [
            [label, *(f"{_accuracy(runs[kind])} ({runs[kind]['moved']:.2f})" for kind in DEFENCES)]
            for label, runs in {**quiet, **kinds}.items()
        ]
        tables.append(_table([name, *DEFENCES], rows))
    return "\n\n".join(tables)


def _largest_cost(found: dict[str, Any], honest: dict[str, Any]) -> dict[str, tuple[float, str]]:
    """Of each algorithm: what the worst attack costs with the default, against no liar and no defence."""
    return {
        name: max((_honest(honest, name, label) - runs["clip"]["accuracy"], label) for label, runs in kinds.items())
        for name, kinds in found.items()
    }


def _lowest(found: dict[str, Any], honest: dict[str, Any]) -> str:
    """The lowest single evaluation with one liar and the default, beside that without liars and without defence."""
    demo = {label for label, attack in ATTACKS.items() if not attack.batch_norm}
    return ", ".join(
        f"{min(runs['clip']['lowest'] for label, runs in kinds.items() if label in demo):.3f} with {name} (no liar: "
        f"{honest['demo'][name]['none']['lowest']:.3f})"
        for name, kinds in found.items()
    )


def _honest(honest: dict[str, Any], name: str, label: str) -> float:
    accuracy: float = honest["batch norm" if ATTACKS[label].batch_norm else "demo"][name]["none"]["accuracy"]
    return accuracy


def _said(costs: dict[str, tuple[float, str]]) -> str:
    return ", ".join(f"{100 * cost:.1f} points from {name} ({label})" for name, (cost, label) in costs.items())


def _accuracy(found: dict[str, Any]) -> str:
    return f"{found['accuracy']:.3f} ± {found['deviation']:.3f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    above, *below = ("| " + " | ".join(cells) + " |" for cells in [head, *rows])
    return "\n".join([above, "|---" * len(head) + "|", *below])


def _made(part: dict[str, Any]) -> str:
    made, later = part["versions"], f"; {_made(part['later'])}" if "later" in part else ""
    return f"`{part['command']}`, {made['platform']}, torch {made['torch']}, {part['date']}{later}"


def _merged(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """Of one more algorithm."""
    both = {key: _merged(value, old[key]) for key, value in new.items() if isinstance(value, dict) and key in old}
    return {**old, **new, **both}


def _short(value: Any) -> Any:
    """With five digits."""
    if isinstance(value, dict):
        return {key: _short(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_short(part) for part in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main() -> None:
    torch.set_num_threads(1)
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    only = [word for word in sys.argv[1:] if word in SETTINGS]
    for name in [name for name in SETTINGS if only and name not in only]:
        del SETTINGS[name]
    for part in [word for word in sys.argv[1:] if word not in only] or [*PARTS, "page"]:
        if part == "page":
            (RESULTS / "attacks.md").write_text(page(record), encoding="utf-8")
        else:
            made = {"versions": versions(), "date": datetime.now(UTC).date().isoformat()}
            made["command"] = f"python benchmarks/attacks.py {' '.join([part, *only])}"
            found = PARTS[part]()
            if only:
                record[part] |= {"measured": _merged(found, record[part]["measured"]), "later": made}
            else:
                record[part] = {**made, "measured": found}
            RECORD.write_text(json.dumps(_short(record), separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
