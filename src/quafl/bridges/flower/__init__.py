"""Our messages in Flower's: a mod for a ClientApp, a strategy for a ServerApp, and our algorithms as strategies.

    app = ClientApp(mods=[quafl_mod()])                       # at the client
    strategy = Compressed(FedAvg(...), bits=4)                # at the server

Only Flower's public API is used: `flwr.app`, `flwr.clientapp`, `flwr.serverapp`. docs/howto/flower.md has the rest.
"""

from quafl.bridges.flower.federated import Federated
from quafl.bridges.flower.mod import quafl_mod
from quafl.bridges.flower.strategy import Compressed, CompressedGrid, Traffic

__all__ = ["Compressed", "CompressedGrid", "Federated", "Traffic", "quafl_mod"]
