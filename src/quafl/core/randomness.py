"""Randomness without global seeds: one generator per role, all derived from the run's one seed."""

from hashlib import blake2b
from operator import index
from typing import SupportsIndex

import torch
from torch import Tensor


def derive(*keys: int | str) -> int:
    """A 63-bit seed from a path of keys, such as (seed, "batches", client, epoch)."""
    digest = blake2b("/".join(map(str, keys)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Generators:
    """`generators["sampling"]` and so on; each role's stream is independent of how much the others drew."""

    def __init__(self, seed: int) -> None:
        if not isinstance(seed, SupportsIndex):
            raise TypeError(f"seed is {seed!r}, must be an integer")
        self.seed = index(seed)
        self._by_role: dict[str, torch.Generator] = {}

    def __getitem__(self, role: str) -> torch.Generator:
        if role not in self._by_role:
            self._by_role[role] = torch.Generator().manual_seed(derive(self.seed, role))
        return self._by_role[role]

    def state(self) -> dict[str, Tensor]:
        """Where every stream stands."""
        return {role: generator.get_state() for role, generator in self._by_role.items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue every stream from there; who holds a generator of mine keeps it."""
        self._by_role = {role: self[role] for role in state}
        for role, where in state.items():
            self[role].set_state(where)
