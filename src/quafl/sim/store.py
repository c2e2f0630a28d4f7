"""The clients' states, copy on write: one that was never contacted is the newcomer, and costs nothing."""

from collections.abc import Mapping
from dataclasses import fields, replace
from math import inf
from typing import Any

import torch
from torch import Tensor

from quafl.core.seams import ClientState, Ids
from quafl.sim.shelf import Row, Shelf

SEVERAL = ("optimizer", "left_out")  # are tuples of vectors
MANY = 10_000  # clients, from which on memory counts for more than time
BETWEEN = ("progress", "taken")  # is none: local steps are computed at the contact, and begin anew after


class Store:
    """n clients between contacts: whatever vectors and numbers their algorithm has them keep.

    `newcomers` have a row each; their vectors are the same for all, and `one` of them is complete. What is `given` are
    numbers that the world knows of each client, whatever happens. Beyond `memory` octets, what clients keep is on disk.
    """

    def __init__(self, newcomers: Any, one: Any, memory: float = inf, /, **given: Tensor) -> None:
        tensors = {f.name: getattr(newcomers, f.name) for f in fields(newcomers) if f.name not in SEVERAL}
        self._shape: ClientState = newcomers
        self._vectors = [name for name, rows in tensors.items() if rows.dim() > 1 and name not in BETWEEN]
        self._numbers = {
            name: rows.clone() for name, rows in tensors.items() if rows.dim() == 1 and name not in BETWEEN
        }
        self._given = given
        self._optimizers = len(one.optimizer)
        # A client's vectors, those of its optimizer, and what its messages left out:
        self._newcomer: Row = (*(tensors[name][0] for name in self._vectors), *one.optimizer, *one.left_out)
        self._memory = memory
        self._known = self._nobody()

    def __len__(self) -> int:
        return len(self._shape.steps)

    @property
    def device(self) -> torch.device:
        """Where vectors are."""
        return self._newcomer[0].device

    @property
    def known(self) -> int:
        """How many clients have a state of their own."""
        return len(self._known)

    def __getitem__(self, ids: Ids) -> Any:
        """Those clients, a row each, not to be changed in place."""
        if len(ids):
            heavy = [_stack(tensors) for tensors in zip(*map(self._row, ids.tolist()), strict=True)]
        else:
            heavy = [tensor.new_empty((0, *tensor.shape)) for tensor in self._newcomer]
        return self._made(ids, heavy)

    def outline(self, ids: Ids) -> Any:
        """Those clients' numbers; their vectors have no coordinates."""
        return self._made(ids, [torch.empty(len(ids), 0) for _ in self._newcomer])

    def _made(self, ids: Ids, heavy: list[Tensor]) -> Any:
        vectors = dict(zip(self._vectors, heavy, strict=False))
        rest = tuple(heavy[len(self._vectors) :])
        return replace(
            self._shape,
            **vectors,
            **{name: values[ids] for name, values in (self._numbers | self._given).items()},
            progress=vectors["base"].new_zeros(()).expand_as(vectors["base"]),
            taken=torch.zeros_like(ids),
            optimizer=rest[: self._optimizers],
            left_out=rest[self._optimizers :],
        )

    def put(self, ids: Ids, clients: Any) -> None:
        """Keep what those clients have become."""
        heavy = (*(getattr(clients, name) for name in self._vectors), *clients.optimizer, *clients.left_out)
        own = _own_rows_of_few if len(self) >= MANY else _own_rows
        self._known.update(zip(ids.tolist(), zip(*map(own, heavy), strict=True), strict=True))
        self.put_numbers(ids, {name: getattr(clients, name) for name in self._numbers})

    def numbers_of(self, ids: Ids) -> dict[str, Tensor]:
        """What those clients count."""
        return {name: values[ids] for name, values in self._numbers.items()}

    def put_numbers(self, ids: Ids, numbers: Mapping[str, Tensor]) -> None:
        """Keep what those clients have counted."""
        for name, values in self._numbers.items():
            values.index_copy_(0, ids, numbers[name])

    def everybody(self) -> Any:
        """All n, a row each."""
        return self[torch.arange(len(self))]

    def mark(self) -> tuple[Any, ...]:
        """For `back`: of clients that are in memory."""
        return self._known.copy(), {name: values.clone() for name, values in self._numbers.items()}

    def back(self, mark: tuple[Any, ...]) -> None:
        """As they were at the mark."""
        self._known, self._numbers = mark

    def state(self) -> dict[str, Any]:
        """For `restore`."""
        numbers = {name: values.clone() for name, values in self._numbers.items()}
        return {"known": self._known.copy(), "numbers": numbers}  # vectors are shared, and never changed in place

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        device, self._known = self.device, self._nobody()
        self._known.update((client, tuple(x.to(device) for x in row)) for client, row in state["known"].items())
        self._numbers = {name: values.clone() for name, values in state["numbers"].items()}

    def _nobody(self) -> dict[int, Row] | Shelf:
        return {} if self._memory == inf else Shelf(self._memory)

    def _row(self, client: int) -> Row:
        return self._known.get(client) or self._newcomer


def _stack(tensors: tuple[Tensor, ...]) -> Tensor:
    return torch.stack(tensors) if len(tensors) > 1 else tensors[0].unsqueeze(0)


def _own_rows_of_few(tensor: Tensor) -> tuple[Tensor, ...]:
    """Likewise; whether they are the same is looked at, too. All who adopt the server's model then share one."""
    same = len(tensor) > 1 and tensor.stride(0) and bool((tensor == tensor[:1]).all())
    return _own_rows(tensor[:1].expand_as(tensor) if same else tensor)


def _own_rows(tensor: Tensor) -> tuple[Tensor, ...]:
    """The rows, none of which keeps the others or anything larger alive; the same one for all, if they are the same."""
    if len(tensor) > 1 and tensor.stride(0):
        return tuple(torch._foreach_mul(tensor.unbind(), 1))  # copies, all made by one call
    row = tensor[0]
    return (row if row.untyped_storage().nbytes() <= row.nbytes else row.clone(),) * len(tensor)
