"""The clients' states, copy on write: one that was never contacted is the newcomer, and costs nothing."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quafl.core.seams import ClientState, Ids


class Store:
    """n clients between contacts. Progress is not kept: local steps are computed at the contact, and begin anew after.

    `given` are fields that the world knows of each client, whatever happens.
    """

    def __init__(self, size: int, newcomer: ClientState, **given: Tensor) -> None:
        self._size = size
        self._newcomer = _without_progress(newcomer)
        self._given = given
        self._known: dict[int, ClientState] = {}

    def __len__(self) -> int:
        return self._size

    @property
    def known(self) -> int:
        """How many clients have a state of their own."""
        return len(self._known)

    def __getitem__(self, ids: Ids) -> ClientState:
        """Those clients, a row each; nothing of the store is shared."""
        rows = self._rows(ids)
        given = {name: values[ids] for name, values in self._given.items()}
        return replace(rows, progress=torch.zeros_like(rows.base), **given)  # type: ignore[arg-type]

    def put(self, ids: Ids, clients: ClientState) -> None:
        """Keep what those clients have become."""
        for row, client in enumerate(ids.tolist()):
            self._known[client] = _without_progress(clients[row]).each(torch.clone)

    def everybody(self) -> ClientState:
        """All n, a row each."""
        return self[torch.arange(len(self))]

    def state(self) -> dict[str, Any]:
        """For `restore`."""
        ids = torch.tensor(sorted(self._known), dtype=torch.int64)
        return {"ids": ids, "clients": self._rows(ids).tree()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        self._known.clear()
        self.put(state["ids"], ClientState.from_tree(state["clients"]))

    def _rows(self, ids: Ids) -> ClientState:
        if not len(ids):
            return self._newcomer.each(lambda tensor: tensor.new_empty((0, *tensor.shape)))
        return ClientState.stack([self._known.get(client, self._newcomer) for client in ids.tolist()])


def _without_progress(client: ClientState) -> ClientState:
    return replace(client, progress=client.base.new_empty(0), taken=torch.zeros_like(client.taken))
