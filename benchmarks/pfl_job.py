"""pfl-research's own CIFAR-10 job (benchmarks/image_classification/configs/baseline.yaml there), in pfl and in QuAFL.

1,000 clients with 50 pictures each, 50 of them a round, one epoch of batches of 10, SGD with learning rate 0.1, a
network with two convolutions and dropout, the plain mean of what comes back.

`python benchmarks/pfl_job.py 1500 0 --device cpu` runs it in pfl: rounds and seed. pfl is not one of our dependencies.
"""

import json
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from quafl.tasks import cifar10
from quafl.tasks.models import CIFAR
from quafl.tasks.supervised import Data

CLIENTS, COHORT, BATCH, EXAMPLES, LR = 1000, 50, 10, 50, 0.1
STEPS = EXAMPLES // BATCH  # a client's, a round
ROUNDS = 1500


def network(seed: int) -> nn.Module:
    """Two convolutions, two dense layers, dropout after each pair; 1,626,442 parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(
            CIFAR(),
            *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)),
            *(nn.Flatten(), nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)),
        )
        for layer in model.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
    return model


def data() -> tuple[Data, Data]:
    """All 50,000 pictures to learn from, and the test set."""
    parts = cifar10()
    train = torch.cat((parts.train[0], parts.validation[0])), torch.cat((parts.train[1], parts.validation[1]))
    return train, parts.test


def in_pfl(rounds: int, seed: int, device: str, every: int) -> dict[str, Any]:
    """Speed and accuracy of pfl, evaluating as often as given."""
    import numpy as np
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByUser
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.internal.ops import pytorch_ops
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    torch.manual_seed(seed)
    np.random.seed(seed)
    (pictures, labels), (test_pictures, test_labels) = data()
    order = torch.randperm(len(labels))
    here = torch.device(device)
    pytorch_ops.get_default_device = lambda: here  # pfl takes a GPU whenever there is one
    hands = {
        client: [pictures[mine].to(here), labels[mine].to(here)]
        for client, mine in enumerate(order.view(CLIENTS, EXAMPLES))
    }
    module = network(seed).to(here)

    def loss(inputs: Tensor, targets: Tensor, eval: bool = False) -> Tensor:  # pfl's name
        module.train(not eval)
        return functional.cross_entropy(module(inputs), targets)

    module.loss, module.metrics = loss, lambda *_: {}
    times: list[float] = []
    accuracies: dict[int, float] = {}

    class Watch(TrainingProcessCallback):  # type: ignore[misc]  # pfl is untyped where it is not installed
        def after_central_iteration(self, aggregate: Any, model: Any, *, central_iteration: int) -> tuple[bool, Any]:
            if here.type == "cuda":
                torch.cuda.synchronize()
            times.append(perf_counter())
            done = central_iteration + 1
            if every and (done % every == 0 or done == rounds):
                accuracies[done] = accuracy(module, test_pictures.to(here), test_labels.to(here))
                print(done, accuracies[done], flush=True)
            return False, Metrics()

    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=rounds + 1, train_cohort_size=COHORT, val_cohort_size=0
        ),
        backend=SimulatedBackend(
            training_data=FederatedDataset.from_slices(hands, get_user_sampler("random", range(CLIENTS))),
            val_data=None,
            postprocessors=[WeightByUser()],
        ),
        model=PyTorchModel(
            model=module,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(module.parameters(), 1.0),
        ),
        model_train_params=NNTrainHyperParams(local_learning_rate=LR, local_num_epochs=1, local_batch_size=BATCH),
        model_eval_params=NNEvalHyperParams(local_batch_size=10_000),
        callbacks=[Watch()],
    )
    half = len(times) // 2  # the second half: warmed up
    rate = (len(times) - 1 - half) * COHORT * STEPS / (times[-1] - times[half])
    return {"local steps a second": rate, "accuracy": accuracies, "rounds": rounds, "seed": seed, "device": device}


@torch.no_grad()
def accuracy(module: Callable[[Tensor], Tensor], pictures: Tensor, labels: Tensor) -> float:
    module.eval()
    right = [(module(x).argmax(-1) == y).sum() for x, y in zip(pictures.split(2000), labels.split(2000), strict=True)]
    return float(sum(right)) / len(labels)


if __name__ == "__main__":
    rounds, seed = map(int, sys.argv[1:3])
    device = sys.argv[sys.argv.index("--device") + 1] if "--device" in sys.argv else "cpu"
    torch.set_num_threads(1)
    print(json.dumps(in_pfl(rounds, seed, device, every=100), indent=2))
