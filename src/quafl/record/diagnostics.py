"""The quantities of the paper's analysis."""

import torch

from quafl.core.messages import Model


def mean_model(server: Model, clients: Model) -> Model:
    """μ_t = (X_t + Σ X^i)/(n+1)."""
    return (server + clients.sum(dim=0)) / (len(clients) + 1)


def potential(server: Model, clients: Model) -> float:
    """Φ_t = ‖X_t − μ_t‖² + Σ ‖X^i − μ_t‖²."""
    everybody = torch.cat((server.unsqueeze(0), clients))
    return float((everybody - mean_model(server, clients)).square().sum())


def least_contraction(clients: int) -> float:
    """1/(4n): of Φ_t, a round takes away as much at least, if nobody moves (Lemma "lem:PhiBoundPerStepAsyncT")."""
    return 1 / (4 * clients)
