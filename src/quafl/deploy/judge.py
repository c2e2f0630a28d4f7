"""Whether a client's reply can be, and is to be believed."""

from collections import deque
from collections.abc import Iterable
from math import isfinite, isnan
from statistics import median
from threading import Lock

import torch
from torch import Tensor

from quafl.codec import wire
from quafl.core.rows import distance
from quafl.core.seams import Algorithm, Codec, Packet, Refine, ServerState, WireError
from quafl.deploy.messages import NOT_TOLD, Reply

USUAL = 64  # accepted replies whose distances are remembered
FEW = 8  # of them, below which nobody knows what is usual
LARGEST_STATISTIC = 1e12  # of batch norm, say: far from what would spoil a mean


class Judge:
    """Reads replies, in any thread. What is `far` times as far away as is usual is not believed."""

    def __init__(self, algorithm: Algorithm, codec: Codec, far: float) -> None:
        self._codec, self._far = codec, far
        self._budget = int(algorithm.budget(torch.ones(1)))
        self._sends_models = algorithm.compressed == "both ways"  # else displacements, which have no key
        self._lock = Lock()
        self._usual: deque[float] = deque(maxlen=USUAL)

    def usual(self) -> list[float]:
        """The distances of the replies that were accepted last."""
        with self._lock:
            return list(self._usual)

    def learn(self, distances: Iterable[float]) -> None:
        """What has been usual."""
        with self._lock:
            self._usual.extend(distances)

    def read(self, reply: Reply, asked: int, server: ServerState, refine: Refine) -> tuple[Tensor, Tensor]:
        """What it says, decoded with the server's model as the key, and its full-precision values; WireError or
        DecodeError for what cannot be, or is not to be believed."""
        self._check_words(reply, asked)
        packet = wire.from_bytes(reply.packet)
        self._check_form(packet, len(server.buffers))
        vector = self._codec.decode(packet, key=server.model, refine=refine)
        away = float(distance(vector, server.model) if self._sends_models else vector.norm())
        self._check_distance(max(away, reply.distance), server.model)
        if away > 0:  # a client that has just come has not gone anywhere, which says nothing
            self.learn([away])
        return vector, packet.exact.clone()  # not a view that keeps the whole message

    def _check_words(self, reply: Reply, asked: int) -> None:
        if reply.round != asked:
            raise WireError(f"answers round {reply.round}, was asked about round {asked}")
        if not (reply.steps == NOT_TOLD or 0 <= reply.steps <= self._budget):
            raise WireError(f"says that it took {reply.steps} steps, could take at most {self._budget}")
        if not (isfinite(reply.distance) and reply.distance >= 0):
            raise WireError(f"measured a distance of {reply.distance}")
        if not (isnan(reply.speed) or 0 <= reply.speed <= self._budget):
            raise WireError(f"says that its speed is {reply.speed} steps a contact, could be at most {self._budget}")

    def _check_form(self, packet: Packet, buffers: int) -> None:
        if len(packet.exact) and float(packet.exact.abs().max()) > LARGEST_STATISTIC:
            raise WireError(f"has full-precision values of up to {float(packet.exact.abs().max()):.3g}")
        form, expected = (packet.kind, packet.bits, packet.dtype), ("base", self._codec.bits, torch.float32)
        if form != expected or len(packet.exact) != buffers:
            raise WireError(
                f"sent a message of the form {form} with {len(packet.exact)} exact values, expected {expected} with "
                f"{buffers}"
            )

    def _check_distance(self, away: float, key: Tensor) -> None:
        """Compare with the usual distance. A client that was away for long may well be as far as the model is large."""
        size, known = float(key.norm()), self.usual()
        usual = median(known) if len(known) >= FEW else max(size, len(key) ** 0.5)
        if not isfinite(away) or away > max(self._far * usual, 2 * size):
            raise WireError(f"its model is {away:.3g} away, more than {self._far:g} times the usual {usual:.3g}")
