"""A day of a million phones, as the simulated world has it: docs/img/day.png.

    python benchmarks/day.py

Seconds are the unit of time. A phone trains and can be contacted while it is being charged: for a quarter of its day,
from an hour on that is in the same third of the day for all. Its speed and its bandwidth are log-normal. Every five
minutes 30,000 of those who are there are contacted at random: how many steps has each done since the last contact, K =
20 at most?
"""

from pathlib import Path

import torch
from matplotlib.figure import Figure

from quafl.core.randomness import Generators
from quafl.core.server import sample
from quafl.sim import World

PICTURE = Path(__file__).parents[1] / "docs" / "img" / "day.png"
PHONES, DAY, HOUR, EVERY, SAMPLED, MOST = 1_000_000, 86_400.0, 3600.0, 300.0, 30_000, 20
WORLD = World(
    slow=0.0,
    fast_step=30.0,
    step_spread=1.0,
    day=DAY,
    day_share=0.25,
    day_zones=0.33,
    up_bandwidth=250_000.0,
    down_bandwidth=1_000_000.0,
    bandwidth_spread=1.0,
)


def main() -> None:
    rng = Generators(0)
    speeds = WORLD.speeds(PHONES, rng, 2 * DAY)
    since = torch.zeros(PHONES, dtype=torch.float64)
    hours, there, steps = [], [], []
    for moment in torch.arange(0, 2 * DAY, EVERY).tolist():  # the first day is forgotten
        present = speeds.present(moment).nonzero().squeeze(-1)
        chosen = sample(present, SAMPLED, rng["sampling"])
        done = speeds.steps_within(chosen, since[chosen], moment, torch.full_like(chosen, MOST)).double()
        since[chosen] = moment
        if moment >= DAY:
            hours.append((moment - DAY) / HOUR)
            there.append(len(present))
            steps.append(done)
    figure = Figure(figsize=(8.4, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharex=True)
    left.fill_between(hours, 0, there, color="#0072B2", alpha=0.35, linewidth=0)
    left.set(xlabel="hour of the day", ylabel="phones that are there", ylim=(0, None), xlim=(0, 24))
    for level, style in ((0.9, ":"), (0.5, "-"), (0.1, "--")):
        line = [float(done.quantile(level)) if len(done) else float("nan") for done in steps]
        smooth = torch.tensor(line).unfold(0, 3, 1).nanmean(-1)
        right.plot(hours[2:], smooth, style, color="#D55E00", label=f"{level:.0%} of them have no more")
    right.set(xlabel="hour of the day", ylabel="local steps since the last contact", ylim=(0, MOST + 1))
    right.legend(frameon=False, fontsize="small")
    for axes in (left, right):
        axes.grid(alpha=0.25)
    figure.savefig(PICTURE, dpi=130)
    print(f"{max(there):,} phones at once at most, {min(there):,} at least")


if __name__ == "__main__":
    main()
