"""Top-k, and clients that keep what their messages leave out until it has arrived."""

import pytest
import torch
from test_codecs import rng
from worlds import world

from quafl import SCAFFOLD, Calibrated, FedAvg, FedBuff, Lattice, QuAFL, sgd
from quafl.codec import Codecs, Difference, TopK
from quafl.codec.coders import coders_for
from quafl.core.buffer import Up
from quafl.settings.base import SettingsError
from quafl.settings.reading import curves_of
from quafl.sim import Plan, Simulation, World
from quafl.tasks import Quadratic


def test_the_largest_coordinates_arrive_as_they_are_and_the_others_as_zero() -> None:
    x, codec = torch.tensor([0.1, -5.0, 0.2, 3.0, -0.3, 0.0]), TopK(share=1 / 3)
    packet = codec.encode(x.expand(2, -1))
    assert packet.symbols.tolist() == [[1, 3]] * 2
    assert codec.decode(packet, key=x).tolist() == [[0, -5, 0, 3, 0, 0]] * 2
    assert codec.encode(torch.ones(1_000)).nbytes == 60 + 8 * 334
    with pytest.raises(ValueError, match=r"share is 1.5, must be above 0 and at most 1"):
        TopK(share=1.5)


@pytest.mark.parametrize("codec", [TopK(share=0.05), Difference(bits=1, feedback=True)], ids=["top-k", "difference"])
def test_what_has_arrived_and_what_is_left_out_are_what_was_said(codec: TopK | Difference) -> None:
    coder = coders_for(FedBuff(), Codecs(up=codec, down=Lattice())).up
    left, arrived, said = coder.nothing_left_out(torch.empty(2, 3000)), torch.zeros(2, 3000), torch.zeros(2, 3000)
    for number in range(5):
        up = Up(statistics=torch.empty(2, 0), displacement=torch.randn(2, 3000, generator=rng(number)))
        parcel, left = coder.pack_with(left, up, rng(number), {})
        arrived += coder.unpack(parcel, {"displacement": torch.zeros(3000)}).displacement
        said += up.displacement
    torch.testing.assert_close(arrived + left[0], said, atol=1e-5, rtol=0)
    assert left[0].norm() > 1


def away(codec: Codecs, rounds: int = 120) -> float:
    """How far FedAvg ends from the minimum of what three clients want together."""
    centers = torch.randn(3, 200, generator=rng())
    task = Quadratic(torch.ones(200), centers)
    made = world(task, 3, FedAvg(sampled=3, local_steps=2), codec=codec, lr=0.03)
    return float((made.rounds(rounds)[-1].model - centers.mean(dim=0)).norm())


def test_with_feedback_a_quarter_of_the_coordinates_leads_near_the_minimum_and_without_it_does_not() -> None:
    down = Lattice(bits=12)
    with_it, without = (away(Codecs(up=TopK(share=0.25, feedback=yes), down=down)) for yes in (True, False))
    assert with_it < 0.5
    assert without > 3


def test_what_clients_remember_as_it_arrived_is_not_given_back_to_them() -> None:
    for algorithm, count in (FedBuff(), 1), (SCAFFOLD(), 1), (Calibrated(), 0):  # SCAFFOLD: of the model, not of Δc_i
        coder = coders_for(algorithm, Codecs(up=TopK(), down=Lattice())).up
        assert len(coder.nothing_left_out(torch.empty(3))) == count


def test_a_codec_of_differences_is_refused_on_the_way_down() -> None:
    for codec in TopK(), Difference():
        with pytest.raises(ValueError, match=r"codes differences from what both ends have.*on the way up alone"):
            coders_for(QuAFL(), codec)


def test_settings_take_them_on_the_way_up_alone() -> None:
    (made,) = curves_of({"codec": {"name": "each way", "bits": 4, "up": {"name": "top-k", "share": 0.01}}})
    assert made.codec.build() == Codecs(up=TopK(share=0.01), down=Lattice(bits=4))
    (made,) = curves_of({"codec": {"bits": 2, "feedback": True}})
    assert made.codec.build() == Codecs(up=Difference(bits=2, feedback=True), down=Lattice(bits=2))
    with pytest.raises(SettingsError, match=r"codec.down.name = 'top-k': must be one of 'lattice', 'qsgd'"):
        curves_of({"codec": {"name": "each way", "down": {"name": "top-k"}}})


def test_a_run_that_is_taken_up_again_remembers_what_its_clients_have_left_out() -> None:
    task = Quadratic(torch.ones(40), torch.randn(4, 40, generator=rng()))

    def made() -> Simulation:
        codec = Codecs(up=TopK(share=0.05), down=Lattice(bits=8))
        return Simulation(task, 4, World(), QuAFL(sampled=2), codec, sgd(0.1), Plan(until=120.0, every=20.0))

    run, again, kept = made(), made(), []
    for _ in run:
        kept.append(run.state())
    again.restore(kept[len(kept) // 2])
    list(again)
    assert again.rows == run.rows
    assert torch.equal(again.server.model, run.server.model)
