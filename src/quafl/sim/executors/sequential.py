"""One client after another, one step after another: what all other executors must agree with."""

from dataclasses import replace

from quafl.core.client import Client, local_step
from quafl.core.seams import Counts, Direction, Ids, Optimizer, Task


class Sequential:
    """For every task, on every device."""

    name = "sequential"

    def __init__(self, task: Task, optimizer: Optimizer, direction: Direction | None = None) -> None:
        self._task, self._optimizer, self._direction = task, optimizer, direction
        self._expect = getattr(task, "expect", None)

    def __call__(self, clients: Client, ids: Ids, counts: Counts) -> Client:
        """The clients after `counts` more steps each."""
        rows = []
        if self._expect is not None:
            self._expect(_keys(clients, ids, counts))
        for row, (client_id, count) in enumerate(zip(ids.tolist(), counts.tolist(), strict=True)):
            client = clients[row]
            first = int(client.steps)
            for step in range(first, first + count):
                batch = self._task.batch(client_id, step)
                client = local_step(client, self._task, batch, self._optimizer, self._direction)
            rows.append(replace(client, base=client.base.new_empty(0)))  # it has not changed: nothing to copy
        if len(rows) == 1:
            return replace(rows[0].each(lambda tensor: tensor.unsqueeze(0)), base=clients.base)
        return replace(type(clients).stack(rows), base=clients.base) if rows else clients


def _keys(clients: Client, ids: Ids, counts: Counts) -> list[tuple[int, int]]:
    """The batches that will be asked for, as (client, step)."""
    work = zip(ids.tolist(), clients.steps.tolist(), counts.tolist(), strict=True)
    return [(client, step) for client, first, count in work for step in range(first, first + count)]
