"""Filters for jobs of NVIDIA FLARE, beside its own quantizer."""

import re
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install 'quafl[flare]'")

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.filter import Filter, FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.decomposers import common_decomposers
from nvflare.fuel.utils import fobs

from quafl.bridges.flare import META, QuAFLDecoder, QuAFLEncoder
from quafl.bridges.records import LostError
from quafl.codec.seams import DecodeError, WireError

common_decomposers.register()
EXAMPLE = Path(__file__).parents[1] / "examples" / "flare"
NAMES = "north", "south", "east", "west"
SITES = ("server", *NAMES)
WEIGHTS = {"layer.weight": np.ones((40, 50), np.float32), "layer.bias": np.zeros(40, np.float32), "seen": np.array(3)}


class Site:
    """A server or a client: its contexts, and filters in its four chains, as FLARE's configuration makes them."""

    def __init__(self, name: str, **chains: Filter) -> None:
        self.contexts = FLContextManager(engine=self, identity_name=name, job_id="job")
        self.name, self.chains = name, chains
        for chain, one in chains.items():
            one.set_prop(FilterContextKey.CHAIN_TYPE, getattr(FilterChainType, chain.upper() + "_CHAIN"))

    def context(self, peer: str) -> FLContext:
        made = self.contexts.new_context()
        made.set_peer_context(FLContextManager(identity_name=peer, job_id="job").new_context())
        return made

    def through(self, chain: str, peer: str, shareable: Shareable) -> Shareable:
        """As they come out of the chain; as they are, where there is no filter."""
        if chain not in self.chains:
            return shareable
        passed: Shareable = self.chains[chain].process(shareable, self.context(peer))
        return passed

    def fire_event(self, *_: Any) -> None:
        """FLARE's audit asks the engine for it."""


def ours(name: str, bits: int = 4) -> Site:
    encoder, decoder = QuAFLEncoder(bits), QuAFLDecoder()
    at_server = name == "server"
    return Site(name, task_data=encoder if at_server else decoder, task_result=decoder if at_server else encoder)


def task(weights: dict[str, Any], kind: str = DataKind.WEIGHTS) -> Shareable:
    return DXO(kind, dict(weights)).to_shareable()


def weights_of(shareable: Shareable) -> dict[str, Any]:
    return dict(from_shareable(shareable).data)


def wired(shareable: Shareable) -> tuple[Shareable, int]:
    """By FLARE's own serializer."""
    octets = fobs.dumps(shareable)
    return fobs.loads(octets), len(octets)


def moved(weights: dict[str, Any], by: float = 0.01, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        name: (value + by * rng.standard_normal(value.shape)).astype(value.dtype) if value.dtype.kind == "f" else value
        for name, value in weights.items()
    }


def contact(server: Site, client: Site, weights: dict[str, Any], seed: int = 0) -> tuple[dict[str, Any], int, int]:
    """A task and its result; what the server gets, and the octets down and up."""
    told, down = wired(server.through("task_data", client.name, task(weights)))
    heard = weights_of(client.through("task_data", "server", told))
    said, up = wired(client.through("task_result", "server", task(moved(heard, seed=seed))))
    return weights_of(server.through("task_result", client.name, said)), down, up


def test_the_first_model_comes_in_full_and_the_next_ones_in_an_eighth_both_ways() -> None:
    server, client = ours("server"), ours("north")
    full = wired(task(WEIGHTS))[1]
    _, first, _ = contact(server, client, WEIGHTS)
    back, down, up = contact(server, client, moved(WEIGHTS))
    assert first >= full
    assert down < full / 4  # of 2,040 parameters
    assert up < full / 4
    assert list(back) == list(WEIGHTS)
    assert {name: (value.shape, value.dtype) for name, value in back.items()} == {
        name: (value.shape, value.dtype) for name, value in WEIGHTS.items()
    }
    assert back["seen"] == 3


def test_the_task_that_others_are_sent_too_is_left_as_it_is() -> None:
    server = ours("server")
    shared = task(WEIGHTS)
    for name in NAMES:
        server.through("task_data", name, shared)
    assert META not in from_shareable(shared).meta
    np.testing.assert_array_equal(weights_of(shared)["layer.weight"], WEIGHTS["layer.weight"])


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_tensors_come_back_as_tensors_in_their_dtype(kind: torch.dtype) -> None:
    server, client = ours("server"), ours("north")
    weights = {"w": torch.randn(1000).to(kind)}
    for _ in range(2):
        weights = {"w": weights["w"] + torch.tensor(0.5, dtype=kind)}
        told = server.through("task_data", "north", task(weights))
        heard = weights_of(client.through("task_data", "server", told))
        assert heard["w"].dtype == kind
        said = client.through("task_result", "server", task({"w": heard["w"] + torch.ones((), dtype=kind)}))
        back = weights_of(server.through("task_result", "north", said))["w"]
        assert back.dtype == kind
        assert float((back.float() - heard["w"].float() - 1).norm()) < 0.2 * 1000**0.5


def test_differences_that_a_client_sends_are_encoded_as_they_are() -> None:
    server, client = ours("server"), ours("north")
    heard = weights_of(client.through("task_data", "server", server.through("task_data", "north", task(WEIGHTS))))
    change = {name: moved(WEIGHTS)[name] - heard[name] for name in ("layer.weight", "layer.bias")}
    said = client.through("task_result", "server", task(change, DataKind.WEIGHT_DIFF))
    back = from_shareable(server.through("task_result", "north", said))
    assert back.data_kind == DataKind.WEIGHT_DIFF
    error = np.linalg.norm(back.data["layer.weight"] - change["layer.weight"])
    assert error < 0.11 * np.linalg.norm(change["layer.weight"])


# What does not fit


def test_a_client_that_has_lost_its_state_says_so_and_is_sent_the_model_in_full() -> None:
    server, client = ours("server"), ours("north")
    contact(server, client, WEIGHTS)
    again = ours("north")
    told = server.through("task_data", "north", task(moved(WEIGHTS)))
    with pytest.raises(LostError, match="no model here"):
        again.through("task_data", "server", told)
    server.through("task_result", "north", make_reply(ReturnCode.TASK_DATA_FILTER_ERROR))
    back, _, _ = contact(server, again, WEIGHTS)
    assert set(back) == set(WEIGHTS)


def test_a_result_that_is_a_difference_from_another_model_is_an_error() -> None:
    server, north, south = ours("server"), ours("north"), ours("south")
    for site, weights in ((north, WEIGHTS), (south, moved(WEIGHTS))):
        told = server.through("task_data", site.name, task(weights))
        site.through("task_data", "server", told)
    said = south.through("task_result", "server", task(WEIGHTS))
    with pytest.raises(DecodeError, match="a difference from something else"):
        server.through("task_result", "north", said)


def test_a_result_with_other_shapes_is_refused_by_the_name_of_its_array() -> None:
    server, client = ours("server"), ours("north")
    contact(server, client, WEIGHTS)
    with pytest.raises(ValueError, match=r"'layer.weight 50x40 float32' where .* has 'layer.weight 40x50 float32'"):
        client.through("task_result", "server", task({**WEIGHTS, "layer.weight": np.ones((50, 40), np.float32)}))


def test_doubles_are_refused_by_their_name() -> None:
    with pytest.raises(ValueError, match=r"array 'layer.weight' has dtype torch.float64"):
        ours("server").through("task_data", "north", task({"layer.weight": np.ones(5)}))


def test_a_decoder_without_an_encoder_at_the_other_end_says_which_is_missing() -> None:
    with pytest.raises(WireError, match="put QuAFLEncoder among the server's task data filters"):
        ours("north").through("task_data", "server", task(WEIGHTS))
    with pytest.raises(ValueError, match="put QuAFLDecoder among its task data filters"):
        ours("north").through("task_result", "server", task(WEIGHTS))


# Beside FLARE's own


def theirs(name: str, kind: str) -> Site:
    module = pytest.importorskip("nvflare.app_opt.pt.quantization.quantizer", exc_type=ImportError)
    from nvflare.app_opt.pt.quantization.dequantizer import ModelDequantizer

    encoder, decoder = module.ModelQuantizer(kind), ModelDequantizer()
    at_server = name == "server"
    return Site(name, task_data=encoder if at_server else decoder, task_result=decoder if at_server else encoder)


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    datasets = pytest.importorskip("sklearn.datasets")
    data = datasets.load_digits()
    return torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)


def learned(sites: dict[str, Site], rounds: int = 12) -> tuple[float, int]:
    """Federated averaging over the filters; accuracy, and octets by FLARE's serializer, both ways."""
    x, y = digits()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    order, octets = torch.randperm(len(x)), 0
    test, parts = order[:360], order[360:].tensor_split(len(NAMES))
    for _ in range(rounds):
        weights = {name: value.numpy().copy() for name, value in model.state_dict().items()}
        came = []
        for name, rows in zip(NAMES, parts, strict=True):
            told, down = wired(sites["server"].through("task_data", name, task(deepcopy(weights))))
            heard = weights_of(sites[name].through("task_data", "server", told))
            model.load_state_dict({one: torch.as_tensor(value) for one, value in heard.items()})
            optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
            for batch in rows.split(40):
                optimizer.zero_grad()
                functional.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
            mine = {one: value.numpy().copy() for one, value in model.state_dict().items()}
            said, up = wired(sites[name].through("task_result", "server", task(mine)))
            came.append(weights_of(sites["server"].through("task_result", name, said)))
            octets += down + up
        mean = {one: torch.as_tensor(np.mean([each[one] for each in came], axis=0)) for one in weights}
        model.load_state_dict(mean)
    accuracy = float((model(x[test]).argmax(1) == y[test]).float().mean())
    return accuracy, octets


def test_digits_are_learned_as_well_as_in_full_in_few_of_the_octets(capsys: pytest.CaptureFixture[str]) -> None:
    mine, full = learned({name: ours(name) for name in SITES}), learned({name: Site(name) for name in SITES})
    with capsys.disabled():
        print(f"\n4 bits: accuracy {mine[0]:.3f}, {mine[1]:,} octets; in full: {full[0]:.3f}, {full[1]:,}")
    assert mine[0] > full[0] - 0.02
    assert mine[1] < full[1] / 5  # the first models go in full, the others in an eighth


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize(("kind", "least"), [("float16", 2.5), ("adaquant", 1.0)])
def test_digits_are_learned_as_well_as_with_flares_quantizer_in_fewer_octets(
    kind: str, least: float, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, other = learned({name: ours(name) for name in SITES}), learned({name: theirs(name, kind) for name in SITES})
    with capsys.disabled():
        print(f"\n4 bits: accuracy {mine[0]:.3f}, {mine[1]:,} octets; FLARE's {kind}: {other[0]:.3f}, {other[1]:,}")
    assert mine[0] > other[0] - 0.02
    assert mine[1] < other[1] / least


@pytest.mark.federation
def test_the_example_job_learns_in_flares_simulator_with_the_filters(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "filters.py"), "--workspace", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (accuracy,) = re.findall(r"^20 models heard, the best with accuracy (\S+)$", done.stdout, re.MULTILINE)
    (part,) = re.findall(r"^38 messages with .*: 1/(\S+)$", done.stdout, re.MULTILINE)  # the first two go in full
    assert float(accuracy) > 0.75
    assert float(part) > 7
