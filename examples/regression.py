"""Numbers from numbers: your own network, loss and metric, clients with data of their own.

    python examples/regression.py

How ill will a patient be in a year? Ten hospitals have patients of different age: scikit-learn's diabetes data, sorted
by age and cut up.
"""

import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.nn import functional

import quafl

numbers, progression = load_diabetes(return_X_y=True)
x, y = (
    torch.tensor(numbers, dtype=torch.float32) * 20,
    torch.tensor(progression, dtype=torch.float32).unsqueeze(1) / 100,
)
sites = x[:, 0].argsort().tensor_split(10)


def r_squared(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 is perfect, 0 no better than the mean."""
    return 1 - (outputs - targets).square().sum() / (targets - targets.mean()).square().sum()


result = quafl.simulate(
    model=nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1)),
    clients=[(x[site], y[site]) for site in sites],
    loss=functional.mse_loss,
    metrics={"r_squared": r_squared},
    algorithm=quafl.QuAFL(sampled=3, local_steps=5),
    optimizer=quafl.adam(lr=0.01),
    until=300,
)
print(f"R² {result.rows[-1]['r_squared']:.2f} with {result.rows[-1]['bytes_up']:,} octets sent by the clients")
