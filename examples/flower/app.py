"""A Flower app that learns handwritten digits, with 4 bits a parameter instead of 32: docs/howto/flower.md.

pip install 'quafl[flower,data]' 'flwr[simulation]'
python app.py                              # FedAvg in full and in 4 bits, then two of our algorithms: four minutes
python app.py --only compressed

The two lines that make a plain app of Flower's send an eighth of the octets are marked with "<-".
"""

import logging
from argparse import ArgumentParser
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from quafl import Calibrated, FedBuff
from quafl.bridges.flower import Compressed, Federated, quafl_mod

CLIENTS, ROUNDS, STEPS, LR = 10, 20, 10, 0.1
CALIBRATED = Calibrated(sampled=5, local_steps=STEPS)
FEDBUFF = FedBuff(sampled=5, local_steps=STEPS)


def make_model() -> nn.Module:
    """A small one."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training pictures and their digits, and those to judge by."""
    data = load_digits()
    order = torch.randperm(len(data.data), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(data.data, dtype=torch.float32)[order] / 16, torch.tensor(data.target)[order]
    return x[:1437], y[:1437], x[1437:], y[1437:]


DIGITS = digits()


def mine(client: int) -> tuple[Tensor, Tensor]:
    """A client's part: about three of the ten digits."""
    x, y, _, _ = DIGITS
    by_digit = torch.argsort(y * 2000 + torch.arange(len(y)))
    rows = torch.cat([by_digit[start::3] for start in range(3)]).tensor_split(CLIENTS)[client]
    return x[rows], y[rows]


def train(message: Message, context: Context) -> Message:
    """What a user of Flower writes."""
    model = make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = mine(int(context.node_config["partition-id"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    batches = torch.Generator().manual_seed(int(message.content["config"]["server-round"]))
    for _ in range(STEPS):
        rows = torch.randint(len(x), (32,), generator=batches)
        loss = functional.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": len(x), "loss": loss.item()})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


def client_app(*mods: Any) -> ClientApp:
    """As Flower's users make it."""
    app = ClientApp(mods=list(mods))
    app.train()(train)
    return app


def accuracy(_: int, arrays: ArrayRecord) -> MetricRecord:
    """Of a model, on the held-out pictures."""
    model = make_model()
    model.load_state_dict(arrays.to_torch_state_dict())
    _, _, x, y = DIGITS
    return MetricRecord({"accuracy": float((model(x).argmax(1) == y).float().mean())})


def server_app(strategy: Strategy, into: dict[str, Any]) -> ServerApp:
    """Likewise; what comes of it goes `into` a dictionary."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        start = ArrayRecord(make_model().state_dict())
        into["result"] = strategy.start(grid=grid, initial_arrays=start, num_rounds=ROUNDS, evaluate_fn=accuracy)

    return app


SAMPLE: dict[str, Any] = {"fraction_train": 0.5, "fraction_evaluate": 0.0, "min_available_nodes": CLIENTS}
APPS = {
    "plain": (FedAvg(**SAMPLE), client_app()),
    "compressed": (
        Compressed(FedAvg(**SAMPLE), bits=4),  # <- the server's line
        client_app(quafl_mod()),  # <- the clients' line
    ),
    "fedbuff": (Federated(FEDBUFF, **SAMPLE), client_app(quafl_mod(FEDBUFF))),
    "calibrated": (Federated(CALIBRATED, **SAMPLE), client_app(quafl_mod(CALIBRATED))),
}

if __name__ == "__main__":
    from flwr.simulation import run_simulation

    parser = ArgumentParser()
    parser.add_argument("--only", choices=APPS, help="one of them")
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    for name in [options.only] if options.only else APPS:
        strategy, app = APPS[name]
        into: dict[str, Any] = {}
        run_simulation(server_app(strategy, into), app, num_supernodes=CLIENTS)
        reached = into["result"].evaluate_metrics_serverapp[ROUNDS]["accuracy"]
        octets = f"; {strategy.traffic}" if hasattr(strategy, "traffic") else ""
        print(f"{name}: accuracy {reached:.3f}{octets}")
