"""The clients' states, copy on write: one that was never contacted is the newcomer, and costs nothing."""

from typing import Any, TypeAlias

import torch
from torch import Tensor

from quafl.core.seams import ClientState, Counts, Ids


class Store:
    """n clients between contacts. Progress is not kept: local steps are computed at the contact, and begin anew after.

    `budget` and what else is `given` are fields that the world knows of each client, whatever happens.
    """

    def __init__(self, newcomer: ClientState, budget: Counts, **given: Tensor) -> None:
        self.budget = budget
        self._newcomer = newcomer
        self._given = {"budget": budget, **given}
        self._counters = {name: getattr(newcomer, name).expand(len(budget)).clone() for name in _COUNTERS}
        self._known: dict[int, _Heavy] = {}

    def __len__(self) -> int:
        return len(self.budget)

    @property
    def known(self) -> int:
        """How many clients have a state of their own."""
        return len(self._known)

    def __getitem__(self, ids: Ids) -> ClientState:
        """Those clients, a row each, not to be changed in place."""
        base, buffers, *optimizer = (
            map(_stack, zip(*map(self._row, ids.tolist()), strict=True))
            if len(ids)
            else (tensor.new_empty((0, *tensor.shape)) for tensor in _heavy(self._newcomer))
        )
        counters = {name: values[ids] for name, values in (self._counters | self._given).items()}
        return ClientState(
            base=base,
            progress=base.new_zeros(()).expand_as(base),
            buffers=buffers,
            optimizer=tuple(optimizer),
            taken=torch.zeros_like(ids),
            **counters,
        )

    def put(self, ids: Ids, clients: ClientState) -> None:
        """Keep what those clients have become."""
        self._known |= zip(ids.tolist(), zip(*map(_own_rows, _heavy(clients)), strict=True), strict=True)
        self._counters = {
            name: values.index_copy(0, ids, getattr(clients, name)) for name, values in self._counters.items()
        }

    def everybody(self) -> ClientState:
        """All n, a row each."""
        return self[torch.arange(len(self))]

    def state(self) -> dict[str, Any]:
        """For `restore`."""
        return {"known": dict(self._known), "counters": dict(self._counters)}  # shared, and never changed in place

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        self._known, self._counters = dict(state["known"]), dict(state["counters"])

    def _row(self, client: int) -> "_Heavy":
        return self._known.get(client) or _heavy(self._newcomer)


_COUNTERS = "steps", "round", "contacts", "expected_steps"
_Heavy: TypeAlias = tuple[Tensor, ...]  # a client's model, buffers and optimizer


def _heavy(client: ClientState) -> _Heavy:
    return client.base, client.buffers, *client.optimizer


def _stack(tensors: tuple[Tensor, ...]) -> Tensor:
    return torch.stack(tensors) if len(tensors) > 1 else tensors[0].unsqueeze(0)


def _own_rows(tensor: Tensor) -> tuple[Tensor, ...]:
    """The rows, none of which keeps the others or anything larger alive; the same one for all, if they are the same."""
    if len(tensor) > 1 and tensor.stride(0):
        rows = tensor.unbind()
        own = tuple(map(torch.empty_like, rows))
        torch._foreach_copy_(own, rows)  # at once, on a GPU
        return own
    row = tensor[0]
    return (row if row.untyped_storage().nbytes() <= row.nbytes else row.clone(),) * len(tensor)
