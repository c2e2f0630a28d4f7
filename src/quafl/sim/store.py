"""The clients' states, copy on write: one that was never contacted is the newcomer, and costs nothing."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quafl.core.seams import ClientState, Counts, Ids


class Store:
    """n clients between contacts. Progress is not kept: local steps are computed at the contact, and begin anew after.

    `budget` and what else is `given` are fields that the world knows of each client, whatever happens.
    """

    def __init__(self, newcomer: ClientState, budget: Counts, **given: Tensor) -> None:
        self.budget = budget
        self._newcomer = _without_progress(newcomer)
        self._given = {"budget": budget, **given}
        self._known: dict[int, ClientState] = {}

    def __len__(self) -> int:
        return len(self.budget)

    @property
    def known(self) -> int:
        """How many clients have a state of their own."""
        return len(self._known)

    def __getitem__(self, ids: Ids) -> ClientState:
        """Those clients, a row each, not to be changed in place."""
        rows = self._rows(ids)
        given = {name: values[ids] for name, values in self._given.items()}
        return replace(rows, progress=torch.zeros_like(rows.base), **given)  # type: ignore[arg-type]

    def put(self, ids: Ids, clients: ClientState) -> None:
        """Keep what those clients have become."""
        for row, client in enumerate(ids.tolist()):
            self._known[client] = _without_progress(clients[row]).each(_own)

    def everybody(self) -> ClientState:
        """All n, a row each."""
        return self[torch.arange(len(self))]

    def state(self) -> dict[str, Any]:
        """For `restore`."""
        return {"clients": {client: row.tree() for client, row in self._known.items()}}  # shared, not copied

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        self._known = {client: ClientState.from_tree(tree) for client, tree in state["clients"].items()}

    def _rows(self, ids: Ids) -> ClientState:
        rows = [self._known.get(client, self._newcomer) for client in ids.tolist()]
        if not rows:
            return self._newcomer.each(lambda tensor: tensor.new_empty((0, *tensor.shape)))
        return ClientState.stack(rows) if len(rows) > 1 else rows[0].each(lambda tensor: tensor.unsqueeze(0))


def _without_progress(client: ClientState) -> ClientState:
    return replace(client, progress=client.base.new_empty(0), taken=torch.zeros_like(client.taken))


def _own(tensor: Tensor) -> Tensor:
    """A tensor that does not keep a larger one alive."""
    return tensor if tensor.untyped_storage().nbytes() <= tensor.nbytes else tensor.clone()
