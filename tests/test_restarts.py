"""The promise, machine by machine: a local step that was reported is applied once or never, whatever crashes; what the
server has taken survives; after a restart it asks the same questions again."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from stages import (
    PATIENT,
    Hand,
    Kept,
    Stage,
    contact_codecs,
    problem,
    reports_of,
    steps_task,
    through_disk,
)

from quafl import FedAvg, FedBuff, Lattice, QuAFL, sgd
from quafl.codec import QSGD, Identity, TopK
from quafl.codec.coders import coders_for
from quafl.codec.seams import Codec, Codecs
from quafl.core.fedasync import FedAsync
from quafl.core.scaffold import SCAFFOLD
from quafl.protocol import log
from quafl.protocol.carrier import SERVER
from quafl.protocol.client import ClientSide
from quafl.protocol.messages import Contact, Reply

# Clients


class Reports:
    """Which local steps are behind each thing that clients of `steps_task` have written down that they report."""

    def __init__(self) -> None:
        self.all: list[tuple[int, ...]] = []
        self.written: list[Any] = []  # clients

    def watch(self, hand: Hand) -> Hand:
        def note(client: Any) -> None:
            self.written.append(client)
            if client is not None:
                self.all.append(tuple(client.progress[0].nonzero().flatten().tolist()))

        hand.on_write = note
        return hand

    @property
    def steps(self) -> list[int]:
        return [step for report in self.all for step in report]


WAYS = ["kill -9", "clean stop", "crash", "damaged newest", "all damaged", "nothing kept"]
SMALL: dict[str, Any] = {
    "QuAFL": QuAFL(sampled=1, local_steps=3, patience=5.0),
    "FedAvg": FedAvg(sampled=1, local_steps=3, patience=5.0),
    "FedBuff": FedBuff(sampled=1, local_steps=3, patience=5.0),
    "FedAsync": FedAsync(sampled=1, local_steps=3, patience=5.0),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SMALL)
def test_a_restarted_client_never_reports_a_step_twice(name: str, way: str) -> None:
    """It once went on from its checkpoint's base and step counter, computed the same steps and sent them again: the
    same progress was applied in four rounds. So it was after a clean stop, a crash and with a damaged checkpoint."""
    made = Stage(SMALL[name], Identity(), sgd(1.0), replace(PATIENT, silence=10.0), steps_task())
    reports = Reports()
    client = reports.watch(made.join("a", step_seconds=1.0))
    saved: list[Any] = []
    for _ in range(3):
        for _ in range(2):
            made.round()
            made.run(1.5)
            if (state := client.machine.state()) is not None:
                saved.append(through_disk(state))
        if way == "crash":  # in the middle of an answer: it is written down, and nobody has heard of it
            made.carry = lambda heard: not isinstance(heard.message, Reply)
            made.begin_round()
            count = len(reports.written)
            made.until(lambda before=count: len(reports.written) > before)  # type: ignore[misc]
        if way == "clean stop":
            client.do(lambda machine: machine.stop())
            made.run(0.0)
            if (state := client.machine.state()) is not None:
                saved.append(through_disk(state))
        made.kill("a")
        made.carry = lambda heard: True
        kept = {"damaged newest": saved[-2:-1], "all damaged": [], "nothing kept": []}.get(way, saved[-1:])
        wrote = reports_of(client)
        client = reports.watch(made.join("a", step_seconds=1.0, kept=kept[0] if kept else None, reports=wrote))
        if way == "crash":
            made.until(lambda: made.machine.reached)
    for _ in range(3):
        made.round()
        made.run(3.5)
    assert len(reports.steps) == len(set(reports.steps)), reports.all
    assert len(reports.steps) >= 6
    assert made.round().replies
    if name == "FedBuff":  # w = −Σ Δ, and each Δ is a sum of unit vectors: how often each step was applied
        applied = -made.machine.server.model
        assert set(applied.tolist()) == {0.0, 1.0}
        assert {int(step) for step in applied.nonzero()} <= set(reports.steps)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", SMALL)
def test_nor_does_one_that_is_killed_anywhere(name: str, seed: int) -> None:
    random = Random(seed)
    made = Stage(SMALL[name], Identity(), sgd(1.0), replace(PATIENT, faults=10**9, silence=10.0), steps_task(400))
    reports = Reports()
    client = reports.watch(made.join("a", step_seconds=1.0))
    saved: list[Any] = [None]
    made.begin_round()
    for _ in range(25):
        for _ in range(random.randrange(40)):
            made._next()
            if made.machine.reached:
                made.begin_round()
        if (state := client.machine.state()) is not None and random.random() < 0.5:
            saved.append(through_disk(state))
        if random.random() < 0.3:
            made.kill("a")
            wrote = reports_of(client)
            kept = random.choice(saved[-3:])
            client = reports.watch(made.join("a", greet=False, step_seconds=1.0, kept=kept, reports=wrote))
            saved = [kept]
    made.run(100.0)
    assert len(reports.steps) == len(set(reports.steps)), reports.all
    assert made.machine.failure is None
    assert made.machine.totals.contacts > 0


def test_a_client_that_was_stopped_in_good_order_goes_on_with_all_that_it_had() -> None:
    made = Stage(SMALL["QuAFL"], Lattice(bits=8), sgd(0.2))
    client = made.join("a", step_seconds=1.0)
    made.round()
    made.run(2.5)
    client.do(lambda machine: machine.stop())
    made.run(0.0)
    state = client.machine.state()
    assert state is not None
    wrote = reports_of(made.kill("a"))
    again = made.join("a", step_seconds=60.0, kept=through_disk(state), reports=wrote)
    assert int(again.machine.client.steps) == int(again.machine.client.taken) == 3  # with the one that was under way
    made.round()
    assert contact_codecs(made, "a") == [1, 0, 1]  # the lattice, not the whole model: it still had its own
    assert [reply.steps for reply in made.said_by("a", Reply)] == [0, 3]


def test_a_client_that_was_killed_after_its_last_checkpoint_drops_what_it_may_have_reported() -> None:
    made = Stage(SMALL["QuAFL"], Lattice(bits=8), sgd(0.2))
    client = made.join("a", step_seconds=1.0)
    made.round()
    made.run(2.5)
    state = through_disk(client.machine.state())  # with two steps
    made.round()  # in which they are reported
    wrote = reports_of(made.kill("a"))
    again = made.join("a", step_seconds=60.0, kept=state, reports=wrote)
    assert int(again.machine.client.steps) == 2
    assert int(again.machine.client.taken) == 0
    assert not again.machine.client.progress.any()
    made.round()
    assert [reply.steps for reply in made.said_by("a", Reply)] == [0, 2, 0]


def test_a_client_that_has_lost_its_state_is_given_the_model_again() -> None:
    made = Stage(SMALL["QuAFL"], Lattice(bits=8), sgd(0.2))
    made.join("a", step_seconds=1.0)
    made.round()
    made.run(3.5)
    made.kill("a")
    made.join("a", step_seconds=60.0)
    made.round()
    assert contact_codecs(made, "a") == [1, 0, 1, 0]
    assert [reply.steps for reply in made.said_by("a", Reply)] == [0, 0]


def test_what_was_kept_of_another_run_is_left_alone() -> None:
    made = Stage(SMALL["QuAFL"], Lattice(bits=8), sgd(0.2))
    client = made.join("a", step_seconds=1.0)
    made.round()
    made.run(3.5)
    state = through_disk(client.machine.state())
    wrote = reports_of(made.kill("a"))
    other = Stage(SMALL["QuAFL"], Lattice(bits=8), sgd(0.2))
    other.text["run"] = "another"
    again = other.join("a", step_seconds=1.0, kept=state, reports=wrote)
    assert "steps" not in again.machine.status
    other.round()
    other.run(2.5)
    assert int(again.machine.client.steps) == 2


# The server

ALL: dict[str, tuple[Any, Any]] = {
    "QuAFL": (QuAFL(sampled=2, local_steps=4, wait=0.5, patience=60.0, weighted=True), Lattice(bits=4)),
    "QuAFL, many repairs": (QuAFL(sampled=2, local_steps=4, wait=0.5, patience=60.0), Lattice(bits=4, spread=2.5)),
    "FedAvg": (FedAvg(sampled=2, local_steps=4, patience=60.0), Lattice(bits=6)),
    "FedBuff": (FedBuff(sampled=2, local_steps=4, patience=60.0), QSGD(bits=8)),
    "FedBuff, top-k": (FedBuff(sampled=2, local_steps=4, patience=60.0), Codecs(up=TopK(), down=Lattice(bits=6))),
    "SCAFFOLD, lattice": (SCAFFOLD(sampled=2, local_steps=4, lr=0.1, patience=60.0), Lattice(bits=6)),
    "SCAFFOLD, QSGD": (SCAFFOLD(sampled=2, local_steps=4, lr=0.1, patience=60.0), QSGD(bits=8)),
    "FedAsync, lattice": (FedAsync(sampled=2, local_steps=4, patience=60.0), Lattice(bits=6)),
    "FedAsync, QSGD differences": (FedAsync(sampled=2, local_steps=4, patience=60.0), QSGD(bits=8, difference=True)),
}


def crowd(name: str) -> Stage:
    made = Stage(*ALL[name], sgd(0.1), replace(PATIENT, silence=1e6))
    for number in range(4):
        made.join(f"client-{number}", problem(1.0 + number / 10), step_seconds=0.4 + 0.3 * number)
    return made


def questions(made: Stage) -> list[tuple[str, bytes, int]]:
    """Who was asked what."""
    return [
        (one.receiver, one.message.ticket, one.message.round)
        for one in made.heard
        if one.sender == SERVER and isinstance(one.message, Contact)
    ]


@pytest.mark.parametrize("name", ALL)
def test_a_restart_runs_the_rounds_since_the_checkpoint_again_from_the_journal_alone(name: str) -> None:
    """Sample, dither and H_min were once drawn anew, and so were the tickets: of 255 accepted replies, the journal
    served one. Now the same questions come out of a restart, and their answers are there already."""
    made = crowd(name)
    made.round()
    made.round()
    kept = made.checkpoint()
    states = []
    for _ in range(4):
        made.round()
        states.append(through_disk(made.machine.server.tree()))
    entries = made.entries[-(len(made.server.written) - kept.number) :]
    asked, totals = len(questions(made)), replace(made.machine.totals)
    for client in range(4):
        made.parties.pop(f"client-{client}")  # nobody is there to answer once more
    made.restart_server(kept)
    for before in states:
        made.round()
        assert str(made.machine.server.tree()) == str(before)
        assert torch.equal(made.machine.server.model, before["model"])
    assert len(questions(made)) == asked  # nobody was asked anything
    assert [log.to_bytes(entry) for entry in made.entries] == [log.to_bytes(entry) for entry in entries]
    assert made.machine.totals.contacts == totals.contacts
    assert made.machine.totals.steps == totals.steps


@pytest.mark.parametrize("name", ALL)
def test_a_round_that_was_left_is_asked_again_with_the_same_tickets_and_accepted_replies_are_not(name: str) -> None:
    made = crowd(name)
    made.round()
    kept = made.checkpoint()
    made.round()
    rounds = made.machine.server.round
    made.begin_round()
    taken = sum(isinstance(entry, log.Took) for entry in made.entries)
    made.until(lambda: sum(isinstance(entry, log.Took) for entry in made.entries) > taken)
    (last,) = [entry for entry in made.entries if isinstance(entry, log.Took)][-1:]
    owed = {member.name: member.owes for member in made.machine.members if member.owes}
    sent = len(made.heard)
    clients = {name: made.parties.pop(name) for name in list(made.parties) if name != SERVER}
    made.restart_server(kept)
    made.begin_round()
    made.until(lambda: made.machine.reached)
    made.begin_round()
    made.parties.update(clients)
    made.until(lambda: made.machine.reached)
    assert made.machine.server.round == rounds + 1
    again = [one for one in made.heard[sent:] if one.sender == SERVER and isinstance(one.message, Contact)]
    for one in again:
        if owed.get(one.receiver):
            assert one.message.ticket == owed[one.receiver]  # type: ignore[union-attr]
    assert (last.name, last.ticket) in [(n, t) for given in made.given for n, t in given.replies]
    assert last.ticket not in {one.message.ticket.hex() for one in again if one.receiver == last.name}  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("seed", range(3))
def test_wherever_a_server_is_killed_nothing_is_applied_twice_and_the_run_goes_on(name: str, seed: int) -> None:
    random, made = Random(seed), crowd(name)
    kept = Kept(through_disk(made.machine.state()), len(made.server.written))
    made.begin_round()
    for _ in range(6):
        for _ in range(random.randrange(60)):
            made._next()
            if made.machine.reached:
                if random.random() < 0.3:
                    kept = made.checkpoint()
                made.begin_round()
        assert made.machine.failure is None
        made.restart_server(kept)
        made.begin_round()
    made.until(lambda: made.machine.reached)
    contacts = made.machine.totals.contacts
    for _ in range(3):
        made.round()
    assert made.machine.totals.contacts > contacts
    applied = [tuple(one) for record in made.server.written for one in replies_in(record)]
    assert len(applied) == len(set(applied))


def replies_in(record: bytes) -> list[list[str]]:
    entry = log.from_bytes(record)
    return entry.replies if isinstance(entry, log.Gave) else []


def test_a_reply_that_was_accepted_before_a_crash_is_known_to_be_applied_after_it() -> None:
    """The client is told with the next contact: its receipt is in the replayed state."""
    made = Stage(SMALL["QuAFL"], Identity(), sgd(1.0), PATIENT, steps_task())
    client = made.join("a", step_seconds=1.0)
    kept = made.checkpoint()
    made.round()
    made.run(2.5)
    made.round()
    made.restart_server(kept)
    for _ in range(2):
        made.round()
    made.run(3.5)
    for _ in range(3):
        made.round()
        made.run(1.5)
    machine = client.machine
    everybody = made.machine.server.model + machine.client.base[0] - machine.client.progress[0]
    taken = torch.zeros(len(everybody)).index_fill(0, torch.arange(int(machine.client.steps)), -1.0)
    assert torch.allclose(everybody, taken, atol=1e-5)


def test_a_full_disk_at_the_server_goes_on_applying_and_says_so_once() -> None:
    """It once applied nothing at all."""
    made = crowd("QuAFL")
    made.round()
    made.server.full = True
    for _ in range(4):
        assert len(made.round().replies) == 2
    (said,) = [said for said in made.server.said if "cannot be written" in said]
    assert "No space left on device" in said
    assert "lost in a crash" in said


def test_after_a_full_disk_a_checkpoint_closes_the_gap_and_before_it_a_crash_goes_back_to_what_was_written() -> None:
    made = crowd("QuAFL")
    made.round()
    kept = made.checkpoint()
    made.round()
    known = made.machine.server.model.clone()
    made.server.full = True
    made.round()
    made.server.full = False
    made.round()
    count = len(made.server.written)
    made.round()
    assert len(made.server.written) == count  # what stands on what is missing would only mislead
    made.restart_server(kept)
    made.round()
    assert torch.equal(made.machine.server.model, known)
    made.round()
    kept = made.checkpoint()
    made.server.do(lambda machine: machine.checkpointed())
    made.round()
    after = made.machine.server.model.clone()
    made.restart_server(kept)
    made.round()
    assert torch.equal(made.machine.server.model, after)


def test_a_journal_that_does_not_fit_is_said_and_left_out() -> None:
    made = crowd("FedAvg")
    made.round()
    kept = made.checkpoint()
    made.round()
    written = made.server.written
    written[kept.number :] = [log.to_bytes(log.Gave([], [])), *written[kept.number :]]
    made.restart_server(kept)
    made.round()
    assert any("does not fit" in said for said in made.server.said)
    assert made.machine.failure is None


@pytest.mark.parametrize("codec", [Lattice(bits=4), QSGD(bits=8)], ids=["lattice", "QSGD"])
def test_a_restarted_fedbuff_applies_what_had_arrived_and_asks_the_others_again(codec: Any) -> None:
    codecs = Codecs(up=codec, down=Identity())  # nothing is drawn for the way down
    made = Stage(FedBuff(sampled=3, local_steps=2, patience=60.0), codecs, sgd(0.2), replace(PATIENT, silence=1e6))
    made.join("fast", step_seconds=1.0)
    made.join("slow", step_seconds=4.0)
    kept = made.checkpoint()
    made.begin_round()
    made.until(lambda: made.member("fast").contacts == 1)
    owed = made.member("slow").owes
    asked = [one for one in questions(made) if one[0] == "slow"]
    made.restart_server(kept)
    made.begin_round()
    made.until(lambda: made.machine.reached)
    assert made.machine.totals.lost == 0
    assert [ticket for name, ticket, _ in questions(made) if name == "slow"][: len(asked) + 1] == [owed] * (
        len(asked) + 1
    )
    assert [one[0] for given in made.given for one in given.replies].count("slow") >= 1


def test_a_client_that_works_is_not_interrupted_by_a_server_s_restart() -> None:
    """Asked again what it works on, it says so, and answers when it is done."""
    made = Stage(FedAvg(sampled=1, local_steps=10, patience=1e4), Lattice(bits=6), sgd(0.2))
    client = made.join("a", step_seconds=1.0)
    made.round(most=50.0)
    kept = made.checkpoint()
    made.begin_round()
    made.run(5.5)
    made.restart_server(kept)
    made.begin_round()
    began = made.now
    made.until(lambda: made.machine.reached)
    assert made.now - began == pytest.approx(4.5)
    assert int(client.machine.client.steps) == 20


def test_other_settings_and_more_places_come_with_a_restart() -> None:
    made = Stage(QuAFL(sampled=1, local_steps=3, wait=0.1, patience=5.0), Lattice(bits=4), sgd(0.2))
    made.limits = replace(PATIENT, clients=1)
    made.join("a", step_seconds=0.1)
    made.round()
    made.round()
    kept = made.checkpoint()
    made.terms = made.terms._replace(coders=coders_for(made.terms.algorithm, Lattice(bits=8)))
    made.text = {"run": "test", "codec": "another"}
    made.limits = replace(PATIENT, clients=3)
    made.restart_server(kept)
    for name in ("b", "c"):
        made.join(name, step_seconds=0.1)
    made.run(3.0)  # all have said hello
    for _ in range(30):
        made.round()
    assert [member.contacts > 0 for member in made.machine.members] == [True] * 3
    assert made.machine.totals.lost <= 1


# What SCAFFOLD conserves


def informed(machine: ClientSide) -> Any:
    """A client, as it is when it hears that its last reply was applied."""
    given = machine._given
    assert given is not None
    assert given.understood is not None
    return SCAFFOLD.applied(machine.client, given.understood)


def memories(way: str, codec: Codec) -> float:
    """How far c is from the mean of all c_i, after something has gone wrong."""
    made = Stage(SCAFFOLD(sampled=2, local_steps=3, lr=0.1, patience=5.0), codec, sgd(0.1), PATIENT, problem())
    for name in ("a", "b"):
        made.join(name, problem(1.0 if name == "a" else 2.0), step_seconds=0.1)
    for _ in range(3):
        made.round()
    if way == "a reply is lost":
        lost = [True]
        made.carry = lambda heard: (
            not (lost and heard.sender == "a" and isinstance(heard.message, Reply) and lost.pop())
        )
        made.round()
    if way == "a client is killed":
        wrote = reports_of(made.kill("a"))
        made.join("a", problem(1.0), step_seconds=0.1, reports=wrote)
    made.run(10.0)
    for _ in range(5):
        made.round()
    made.run(10.0)
    server: Any = made.machine.server
    hands = [made.parties[name] for name in ("a", "b")]
    mean = sum(informed(hand.machine).control[0] for hand in hands if isinstance(hand, Hand)) / 2
    return float((server.control - mean).norm() / mean.norm())


@pytest.mark.parametrize("codec", [Identity(), Lattice(bits=3)], ids=["identity", "lattice"])
@pytest.mark.parametrize("way", ["all goes well", "a reply is lost", "a client is killed"])
def test_the_server_s_control_variate_stays_the_mean_of_the_clients(way: str, codec: Codec) -> None:
    assert memories(way, codec) < 1e-3
