"""Whether a client's reply can be, and is to be believed."""

from collections.abc import Mapping
from math import isfinite, isnan
from statistics import median
from threading import Lock

import torch
from torch import Tensor

from quafl.codec import wire
from quafl.core.rows import distance
from quafl.core.seams import Algorithm, Codec, Packet, Refine, ServerState, WireError
from quafl.deploy.messages import NOT_TOLD, Reply

STILL = 1e-9  # the codec's own error, where nobody has moved
ENOUGH = 3  # clients, below which nobody knows what is usual


class Judge:
    """Reads replies, in any thread. What is `far` times as far away as is usual is not believed."""

    def __init__(self, algorithm: Algorithm, codec: Codec, far: float) -> None:
        self._codec, self._far = codec, far
        self._budget = int(algorithm.budget(torch.ones(1)))
        self._sends_models = algorithm.compressed == "both ways"  # else displacements, which have no key
        self._lock = Lock()
        self._votes: dict[str, float] = {}

    def votes(self) -> dict[str, float]:
        """How far the last reply of each client was that was accepted and had moved at all."""
        with self._lock:
            return dict(self._votes)

    def learn(self, votes: Mapping[str, float]) -> None:
        """What has been usual; a client has one vote."""
        with self._lock:
            self._votes.update(votes)

    def read(self, name: str, reply: Reply, asked: int, server: ServerState, refine: Refine) -> tuple[Tensor, Tensor]:
        """What it says, decoded with the server's model as the key, and its full-precision values; WireError or
        DecodeError for what cannot be, or is not to be believed."""
        self._check_words(reply, asked)
        packet = wire.from_bytes(reply.packet)
        self._check_form(packet, len(server.buffers))
        vector = self._codec.decode(packet, key=server.model, refine=refine)
        away = float(distance(vector, server.model) if self._sends_models else vector.norm())
        self._check_distance(max(away, reply.distance), server.model)
        if reply.steps != 0 and away > STILL:  # one that has just come has not gone anywhere, which says nothing
            self.learn({name: away})
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
        form, expected = (packet.kind, packet.bits, packet.dtype), ("base", self._codec.bits, torch.float32)
        if form != expected or len(packet.exact) != buffers:
            raise WireError(
                f"sent a message of the form {form} with {len(packet.exact)} exact values, expected {expected} with "
                f"{buffers}"
            )

    def _check_distance(self, away: float, key: Tensor) -> None:
        """Compare with the usual distance. A client that was away for long may well be as far as the model is large."""
        size, known = float(key.norm()), self.votes()
        usual = median(known.values()) if len(known) >= ENOUGH else max(size, len(key) ** 0.5)
        if not isfinite(away) or away > max(self._far * usual, 2 * size):
            raise WireError(f"its model is {away:.3g} away, more than {self._far:g} times the usual {usual:.3g}")
