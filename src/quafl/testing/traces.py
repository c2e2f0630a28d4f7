"""Made-up traces of phones, in FedScale's format."""

import pickle
from pathlib import Path

import torch

from quafl.sim.fedscale import BEHAVIOUR, CAPACITY

DAY, DAYS = 86_400, 6


def fedscale_traces(folder: Path, phones: int, seed: int = 0) -> Path:
    """Write both files into a folder: log-normal speeds and bandwidths, and phones that are charged at night, for some
    hours of most of six days, and now and then by day. Nobody's real phones, for tests and first steps."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(phones, 2, generator=generator, dtype=torch.float64)
    speeds, bandwidths = (80 * torch.exp(0.8 * normal[:, 0])).tolist(), (5000 * torch.exp(normal[:, 1])).tolist()
    evenings = torch.randint(19 * 3600, 25 * 3600, (phones, 1), generator=generator)  # an hour of its own, more or less
    starts = evenings + torch.randint(-1800, 1800, (phones, DAYS), generator=generator) - 9 * 3600  # a day begins at 9
    nights = torch.randint(1 * 3600, 8 * 3600, (phones, DAYS), generator=generator)
    noons = torch.randint(600, 9 * 3600, (phones, DAYS), generator=generator)
    kept = torch.rand(phones, DAYS, 2, generator=generator) < torch.tensor([0.3, 0.85])
    behaviours = {}
    for phone in range(phones):
        active, inactive = [], []
        for day in range(DAYS):
            noon, night = int(noons[phone, day]), int(starts[phone, day])
            for there, start, length in (
                (kept[phone, day, 0], noon, 900),
                (kept[phone, day, 1], night, int(nights[phone, day])),
            ):
                if there:
                    active.append(day * DAY + start)
                    inactive.append(min(day * DAY + start + length, (day + 1) * DAY))
        duration = sum(inactive) - sum(active)
        behaviours[phone + 1] = {
            "duration": duration,
            "inactive": inactive,
            "finish_time": DAYS * DAY,
            "active": active,
            "model": "made up",
        }
    devices = zip(speeds, bandwidths, strict=True)
    capacities = {phone + 1: {"computation": ms, "communication": kbit} for phone, (ms, kbit) in enumerate(devices)}
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in (CAPACITY, capacities), (BEHAVIOUR, behaviours):
        with (folder / name).open("wb") as stream:
            pickle.dump(table, stream)
    return folder
