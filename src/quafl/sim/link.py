"""How long an exchange between a client and the server takes (sit)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quafl.core.seams import Ids
from quafl.sim.piecewise import Piecewise


@dataclass(frozen=True, slots=True)
class Link:
    """A fixed latency, and with bandwidths (octets per time unit) also the time that the octets take."""

    latency: float = 0.0
    down: Piecewise | None = None
    up: Piecewise | None = None

    @property
    def weightless(self) -> bool:
        """Whether octets take no time."""
        return self.down is None and self.up is None

    def transfer(self, ids: Ids, time: float, down: Tensor | int, up: Tensor | int) -> Tensor:
        """What that many octets a client take beyond the latency, at the bandwidths of that time."""
        seconds = torch.zeros(len(ids), dtype=torch.float64)
        for bandwidth, octets in (self.down, down), (self.up, up):
            if bandwidth is not None:
                seconds += octets / bandwidth.at(ids, time)
        return seconds
