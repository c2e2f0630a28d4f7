"""One client after another, one step after another: what all other executors must agree with."""

from dataclasses import replace

from quafl.core.client import local_step
from quafl.core.seams import ClientState, Counts, Ids, Optimizer, Task


class Sequential:
    """For every task, on every device."""

    name = "sequential"

    def __init__(self, task: Task, optimizer: Optimizer) -> None:
        self._task = task
        self._optimizer = optimizer

    def __call__(self, clients: ClientState, ids: Ids, counts: Counts) -> ClientState:
        """The clients after `counts` more steps each."""
        rows = []
        for row, (client_id, count) in enumerate(zip(ids.tolist(), counts.tolist(), strict=True)):
            client = clients[row]
            first = int(client.steps)
            for step in range(first, first + count):
                client = local_step(client, self._task, self._task.batch(client_id, step), self._optimizer)
            rows.append(replace(client, base=client.base.new_empty(0)))  # it has not changed: nothing to copy
        if len(rows) == 1:
            return replace(rows[0].each(lambda tensor: tensor.unsqueeze(0)), base=clients.base)
        return replace(ClientState.stack(rows), base=clients.base) if rows else clients
