"""How good is the model where the data are? The server has none; each client judges by what it keeps apart.

    python examples/evaluation.py

Eight clients have handwritten digits of few classes each (scikit-learn's). A client does not learn from a fifth of its
examples. Five local steps of its own make the model personal, which is judged, too.
"""

from torch import nn

import quafl
from quafl.tasks import digits, partition

clients = partition.by_class(digits().train, 8)
result = quafl.simulate(
    model=nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
    clients=clients,
    held_out=0.2,
    personal_steps=5,
    algorithm=quafl.Calibrated(sampled=3),
    optimizer=quafl.sgd(lr=0.3),
    until=300,
    evaluations=5,
)
last = result.rows[-1]
print(f"accuracy {last['accuracy']:.2f} over all examples, {last['accuracy_clients_worst']:.2f} at the worst client")
print(f"made personal: {last['accuracy_personal_mean']:.2f} in the mean")
for client, score in result.clients[0].items():
    print(f"  client {client}: {score['accuracy']:.2f}, personal {score['personal_accuracy']:.2f}")
