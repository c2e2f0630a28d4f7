"""The real federation's parts, without a network: what is applied once, what is dropped, what survives."""

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from threading import Event, Thread, Timer
from time import monotonic, sleep

import pytest
import torch
from federations import PROMPT, Federation, federation
from hypothesis import given
from hypothesis import strategies as st
from parties import resident_mb
from torch import Tensor

from quafl import FedAvg, FedBuff, Lattice, QuAFL, momentum, sgd
from quafl.codec import QSGD, Identity, wire
from quafl.core.seams import Algorithm, Buffers, Codec, Codecs, Model, Note, Packet, ServerState, WireError
from quafl.deploy import messages
from quafl.deploy.clock import Stopped
from quafl.deploy.coordinator import Plan
from quafl.deploy.journal import Journal
from quafl.deploy.judge import Judge
from quafl.deploy.messages import Contact, Hello, Message, Refused, Repair, Reply, WantsAll, Welcome
from quafl.deploy.worker import Rejected
from quafl.record.checkpoints import Checkpoints
from quafl.tasks import Quadratic

DIM = 3000  # three blocks of the lattice


def problem(center: float = 1.0, dim: int = DIM) -> Quadratic:
    """A single party's."""
    return Quadratic(torch.linspace(0.2, 1.0, dim), torch.full((1, dim), center))


def wait_for(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    until = monotonic() + seconds
    while not holds():
        assert monotonic() < until, "it never came to be"
        sleep(0.005)


def ask(made: Federation, model: Tensor, to: list[int], round: int = 0, *, seed: int = 0) -> None:
    """One contact with some clients, as the algorithms make it."""
    down, generator = made.terms.codecs.down, torch.Generator().manual_seed(seed)
    packet = down.encode(model, generator, distance=1.0)
    made.fleet.send(
        torch.tensor(to), packet, Note(round, sampled=len(to), slowest=inf), lambda row, r: down.refine(model, r)
    )


# Messages


@given(st.binary(max_size=300))
def test_whatever_arrives_is_a_message_or_a_wire_error(octets: bytes) -> None:
    try:
        message = messages.from_bytes(octets)
    except WireError:
        return
    assert messages.to_bytes(message) == octets


@given(st.binary(max_size=50), st.integers(0, 2**63), st.floats(allow_nan=False), st.binary(min_size=16, max_size=16))
def test_messages_come_back_as_they_were(body: bytes, number: int, value: float, ticket: bytes) -> None:
    said: list[Message] = [
        Contact(number, number, 7, value, body),
        Reply(ticket, number, -1, value, value, body),
        WantsAll(ticket),
        Repair(ticket, body),
        Refused(body),
    ]
    for message in said:
        assert messages.from_bytes(messages.to_bytes(message)) == message


@pytest.mark.parametrize(
    ("octets", "complaint"),
    [
        (b"QFED", "has 4 octets"),
        (b"XFED\x01\x02\0\0", "begins with b'XFED'"),
        (b"QFED\x09\x02\0\0", "version 9"),
        (b"QFED\x01\x63\0\0", "kind 99"),
        (b"QFED\x01\x01\0\0abc", "a Reply has 3 octets"),
        (b"QFED\x01\x02\0\0abc", "an Accepted has 3 octets"),
    ],
)
def test_malformed_messages_are_named(octets: bytes, complaint: str) -> None:
    with pytest.raises(WireError, match=complaint.replace("an Acc", "a Acc")):
        messages.from_bytes(octets)


# What is on disk


def test_a_journal_remembers_across_processes_and_cuts_off_what_was_not_finished(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    journal = Journal(path)
    journal.add("a", b"question", b"reply")
    journal.add("b", b"question", b"another")
    journal.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    journal = Journal(path)
    assert journal.get("a", b"question") == b"reply"
    assert journal.get("b", b"question") is None
    assert journal.get("a", b"other") is None
    journal.add("b", b"question", b"again")
    journal.keep([("b", b"question"), ("c", b"never")])
    journal.close()
    journal = Journal(path)
    assert journal.get("a", b"question") is None
    assert journal.get("b", b"question") == b"again"
    journal.close()


def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Checkpoints(tmp_path)
    assert kept.newest() is None
    for number in range(5):
        kept.save({"number": number, "tensor": torch.full((1000,), float(number))})
    files = sorted(tmp_path.iterdir())
    assert len(files) == Checkpoints.KEPT
    octets = bytearray(files[-1].read_bytes())
    octets[len(octets) // 2] ^= 1
    files[-1].write_bytes(octets)
    newest = kept.newest()
    assert newest is not None
    assert newest["number"] == 3
    assert "checksum" in caplog.text


# Algorithms over the fleet

TIGHT = Lattice(bits=4, spread=2.5)  # many messages need a repair
ALGORITHMS: dict[str, tuple[Algorithm, Codec]] = {
    "QuAFL": (QuAFL(sampled=2, local_steps=4, wait=0.01, patience=5.0), Lattice(bits=4)),
    "QuAFL weighted": (QuAFL(sampled=2, local_steps=4, wait=0.01, patience=5.0, weighted=True), Lattice(bits=4)),
    "QuAFL with repairs": (QuAFL(sampled=2, local_steps=4, wait=0.01, patience=5.0), TIGHT),
    "FedAvg": (FedAvg(sampled=2, local_steps=4, patience=5.0), Lattice(bits=6)),
    "FedBuff": (FedBuff(sampled=2, local_steps=4, patience=5.0), QSGD(bits=8)),
}


@pytest.mark.parametrize(("algorithm", "codec"), ALGORITHMS.values(), ids=ALGORITHMS.keys())
def test_finds_the_minimum_and_counts_every_octet(tmp_path: Path, algorithm: Algorithm, codec: Codec) -> None:
    with federation(tmp_path, algorithm, codec, sgd(0.3)) as made:
        run = made.coordinator(problem(), Plan(rounds=40, every=0.2))
        for number in range(4):
            made.join(f"client-{number}", problem(), step_seconds=0.001)
        assert run.run()
        totals = made.fleet.totals
        assert run.rows[-1]["distance"] < 0.3 * run.rows[0]["distance"]
        assert totals.lost == 0
        assert totals.contacts >= 80
        assert totals.steps <= sum(worker.status()["steps"] for worker in made.workers.values())
        wait_for(lambda: all(worker.finished for worker in made.workers.values()))
        assert totals.down == sum(worker.received for worker in made.workers.values())
        assert totals.up == sum(worker.sent for worker in made.workers.values())
    if codec == TIGHT:
        assert totals.refined > 0


def test_the_clients_train_with_their_own_optimizer_state(tmp_path: Path) -> None:
    with federation(tmp_path, QuAFL(sampled=2, wait=0.01, patience=5.0), Lattice(bits=8), momentum(0.05)) as made:
        run = made.coordinator(problem(), Plan(rounds=40))
        for number in range(2):
            made.join(f"client-{number}", problem(), step_seconds=0.001)
        assert run.run()
        assert run.rows[-1]["distance"] < 0.3 * run.rows[0]["distance"]


# A contact


class Blocked(Quadratic):
    """A task whose third gradient takes until it is let go."""

    __slots__ = ()
    gate = Event()

    def gradient(self, model: Model, buffers: Buffers, batch: tuple[int, Tensor]) -> tuple[Model, Buffers]:
        if float(model[0]) > 0.2:
            self.gate.wait(20.0)
        return super().gradient(model, buffers, batch)


def test_a_contact_does_not_wait_for_the_step_under_way_which_is_dropped(tmp_path: Path) -> None:
    slow = Blocked(torch.full((DIM,), 0.5), torch.full((1, DIM), 1.0))
    with federation(tmp_path, QuAFL(sampled=1, local_steps=50), Identity(), sgd(0.2)) as made:
        made.serve(ServerState(*slow.initial()))
        worker = made.join("a", slow)
        ask(made, torch.zeros(DIM), [0])
        assert len(made.fleet.receive(1, 5.0, 0).senders) == 1  # it has a model now
        wait_for(lambda: worker.status()["steps"] == 3)  # and is in the middle of its fourth step
        ask(made, torch.zeros(DIM), [0], round=1)
        replies = made.fleet.receive(1, 5.0, 1)
        slow.gate.set()
    assert replies.answer.steps.tolist() == [3]
    assert torch.allclose(replies.answer.packet.symbols.view(torch.float32)[0, 0], torch.tensor(1 - 0.9**3))


def test_a_client_asked_again_says_the_same_and_changes_once(tmp_path: Path) -> None:
    with federation(tmp_path, QuAFL(sampled=1, local_steps=3), Lattice(bits=4), sgd(0.2)) as made:
        made.serve(ServerState(*problem().initial()))
        worker = made.join("a", problem())
        ask(made, torch.zeros(DIM), [0])
        made.fleet.receive(1, 5.0, 0)
        wait_for(lambda: worker.status()["steps"] == 3)
        ask(made, torch.zeros(DIM), [0], round=1)
        made.fleet.receive(1, 5.0, 1)
        contact = made.asked[-1][1]
        wait_for(lambda: worker.status()["steps"] == 6)
        before = worker.status()["contacts"]
        assert worker.hear(contact) == worker.hear(contact)
        assert isinstance(messages.from_bytes(worker.hear(contact)), Reply)
        assert worker.status()["contacts"] == before


def test_a_client_that_is_far_away_is_brought_back_in_full_precision(tmp_path: Path) -> None:
    with federation(tmp_path, QuAFL(sampled=1, local_steps=3), Lattice(bits=4), sgd(0.2)) as made:
        made.serve(ServerState(*problem().initial()))
        made.join("a", problem())
        ask(made, torch.zeros(DIM), [0])
        made.fleet.receive(1, 5.0, 0)
        far = torch.full((DIM,), 1000.0)
        made.fleet.reach(ServerState(far, torch.empty(0)))
        ask(made, far, [0], round=1)
        replies = made.fleet.receive(1, 5.0, 1)
        kinds = [wire.from_bytes(messages.from_bytes(octets).packet).codec for _, octets in made.asked]  # type: ignore[union-attr]
        assert kinds == [1, 0, 1, 0]  # at the beginning, and now again
        assert len(replies.senders) == 1
        assert replies.answer.distance > 1000.0


def test_a_client_may_keep_its_speed_to_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quafl")
    with federation(tmp_path, QuAFL(sampled=1, local_steps=3), Lattice(bits=4), sgd(0.2)) as made:
        made.serve(ServerState(*problem().initial()))
        worker = made.join("a", problem(), tell_speed=False)
        for round in range(7):
            ask(made, torch.zeros(DIM), [0], round=round)
            replies = made.fleet.receive(1, 5.0, round)
            wait_for(lambda count=round: worker.status()["steps"] == 3 * (count + 1))
        assert replies.answer.speed.isnan().all()
        assert made.fleet.totals.steps == 0
        assert made.fleet.totals.idle == 0
    assert "3 steps, mean 3.00" in caplog.text


def test_speeds_are_told_and_the_slowest_travels_with_each_contact(tmp_path: Path) -> None:
    algorithm = QuAFL(sampled=2, local_steps=6, wait=0.05, patience=5.0, weighted=True)
    with federation(tmp_path, algorithm, Lattice(bits=6), sgd(0.1)) as made:
        run = made.coordinator(problem(), Plan(rounds=25))
        made.join("fast", problem(), step_seconds=0.001)
        made.join("slow", problem(), step_seconds=0.04)
        assert run.run()
        fast, slow = made.fleet.members()
        last = [messages.from_bytes(octets) for _, octets in made.asked][-3]
        assert fast.speed > 2 * slow.speed
        assert isinstance(last, Contact)
        assert last.slowest == pytest.approx(slow.speed, rel=0.2)


# Restarts


def test_a_reply_that_was_accepted_before_a_crash_is_applied_after_it_and_not_asked_for_again(tmp_path: Path) -> None:
    with federation(tmp_path, QuAFL(sampled=1, local_steps=3), Lattice(bits=4), sgd(0.2)) as made:
        start = ServerState(*problem().initial())
        made.serve(start)
        worker = made.join("a", problem())
        ask(made, torch.zeros(DIM), [0])
        made.fleet.receive(1, 5.0, 0)
        wait_for(lambda: worker.status()["steps"] == 3)
        known = made.fleet.state()
        made.fleet.forget_applied()
        ask(made, torch.zeros(DIM), [0], round=1, seed=1)
        first = made.fleet.receive(1, 5.0, 1)
        questions = len(made.asked)
        made.serve(start).restore(known)  # the server crashes before it has saved anything
        worker.say_hello()
        ask(made, torch.zeros(DIM), [0], round=1, seed=1)
        again = made.fleet.receive(1, 5.0, 1)
        assert len(made.asked) == questions
        assert torch.equal(first.answer.packet.symbols, again.answer.packet.symbols)
        assert int(first.answer.steps) == int(again.answer.steps) == 3


def test_a_reply_that_comes_twice_counts_once(tmp_path: Path) -> None:
    with federation(tmp_path, FedAvg(sampled=1, local_steps=3), Lattice(bits=4), sgd(0.2)) as made:
        made.serve(ServerState(*problem().initial()))
        said: list[bytes] = []
        through = made.to_server

        def twice(name: str, octets: bytes) -> bytes:
            if isinstance(messages.from_bytes(octets), Reply):
                said.append(octets)
            return bytes(through(name, octets))

        made.to_server = twice  # type: ignore[method-assign]
        made.join("a", problem())
        ask(made, torch.zeros(DIM), [0])
        assert len(made.fleet.receive(1, 5.0, 0).senders) == 1
        assert messages.from_bytes(through("a", said[0])) == messages.Received()
        assert made.fleet.totals.contacts == 1
        assert len(made.fleet.receive(1, 0.1, 0).senders) == 0


def test_a_stopped_server_goes_on_where_it_was(tmp_path: Path) -> None:
    with federation(tmp_path, QuAFL(sampled=1, wait=0.01, patience=5.0), Lattice(bits=4), sgd(0.2)) as made:
        run = made.coordinator(problem(), Plan(rounds=1000, checkpoint_seconds=1e6))
        worker = made.join("a", problem())
        ends: list[bool] = []
        thread = Thread(target=lambda: ends.append(run.run()))
        thread.start()
        wait_for(lambda: run.server.round >= 10)
        made.stop.set()
        thread.join(10.0)
        assert ends == [False]
        again = made.coordinator(problem(), Plan(rounds=run.server.round + 10))
        assert again.server.round == run.server.round
        assert torch.equal(again.server.model, run.server.model)
        assert again.rows == run.rows
        worker.say_hello()
        assert again.run()
        assert again.server.round == run.server.round + 10
        assert made.fleet.totals.contacts >= run.server.round + 10


@pytest.mark.parametrize("clean", [True, False], ids=["stopped", "crashed"])
def test_a_restarted_client_goes_on_and_nothing_is_applied_twice(tmp_path: Path, clean: bool) -> None:
    with federation(tmp_path, QuAFL(sampled=1, local_steps=3), Lattice(bits=8), sgd(0.2)) as made:
        made.serve(ServerState(*problem().initial()))
        worker = made.join("a", problem())
        ask(made, torch.zeros(DIM), [0])
        made.fleet.receive(1, 5.0, 0)
        wait_for(lambda: worker.status()["steps"] == 3)
        if clean:
            worker.end()
        else:
            worker._save(clean=False)  # what its saver does every now and then; then the power fails
        made.join("a", problem(), step_seconds=60.0)
        ask(made, torch.zeros(DIM), [0], round=1)
        replies = made.fleet.receive(1, 5.0, 1)
        worker.end()
        # The lattice, not the whole model: it still had its own.
        assert [wire.from_bytes(messages.from_bytes(o).packet).codec for _, o in made.asked] == [1, 0, 1]  # type: ignore[union-attr]
        # What it had done is there after a clean stop; after a crash nobody knows whether it was sent.
        assert int(replies.answer.steps) == (3 if clean else 0)


def test_a_client_that_has_lost_its_state_is_given_the_model_again(tmp_path: Path) -> None:
    with federation(tmp_path, QuAFL(sampled=1, local_steps=3), Lattice(bits=8), sgd(0.2)) as made:
        made.serve(ServerState(*problem().initial()))
        worker = made.join("a", problem())
        ask(made, torch.zeros(DIM), [0])
        made.fleet.receive(1, 5.0, 0)
        wait_for(lambda: worker.status()["steps"] == 3)
        worker.end()
        for old in (tmp_path / "a").glob("*"):
            old.unlink()
        made.join("a", problem(), step_seconds=60.0)
        ask(made, torch.zeros(DIM), [0], round=1)
        assert int(made.fleet.receive(1, 5.0, 1).answer.steps) == 0
        assert [wire.from_bytes(messages.from_bytes(o).packet).codec for _, o in made.asked] == [1, 0, 1, 0]  # type: ignore[union-attr]


def test_a_client_of_another_run_begins_anew(tmp_path: Path) -> None:
    with federation(tmp_path, QuAFL(sampled=1, local_steps=3), Lattice(bits=8), sgd(0.2)) as made:
        made.serve(ServerState(*problem().initial()))
        worker = made.join("a", problem())
        ask(made, torch.zeros(DIM), [0])
        made.fleet.receive(1, 5.0, 0)
        worker.end()
        made.run = "another"
        made.serve(ServerState(*problem().initial()))
        assert "steps" not in made.join("a", problem()).status()


def test_a_vanished_client_is_not_waited_for(tmp_path: Path) -> None:
    with federation(tmp_path, QuAFL(sampled=2, patience=60.0), Lattice(bits=4), sgd(0.2)) as made:
        made.serve(ServerState(*problem().initial()))
        made.join("a", problem())
        made.join("b", problem())
        gone = made.workers.pop("b")
        ask(made, torch.zeros(DIM), [0, 1])
        assert made.fleet.receive(2, 1e6, 0).senders.tolist() == [0]  # or it would wait for ever
        assert made.fleet.available().tolist() == [0]
        assert made.fleet.totals.lost == 1
        made.workers["b"] = gone
        gone.say_hello()
        assert made.fleet.available().tolist() == [0, 1]


def test_a_run_ends_in_time_even_if_nobody_is_there(tmp_path: Path) -> None:
    with federation(tmp_path, QuAFL(sampled=2, wait=0.01, patience=1.0), Lattice(bits=4), sgd(0.2)) as made:
        run = made.coordinator(problem(), Plan(until=2.0))
        worker = made.join("a", problem())
        Timer(0.5, lambda: worker.say_hello(leaving=True)).start()
        assert run.run()
        assert run.rows[-1]["round"] == run.server.round > 0
        again = made.coordinator(problem(), Plan(until=1.0))
        assert again.run()


def test_a_client_that_leaves_says_so(tmp_path: Path) -> None:
    with federation(tmp_path, QuAFL(sampled=2), Lattice(bits=4), sgd(0.2)) as made:
        made.serve(ServerState(*problem().initial()))
        made.join("a", problem())
        made.join("b", problem()).say_hello(leaving=True)
        assert made.fleet.available().tolist() == [0]


def test_waiting_for_clients_ends_when_asked_to_stop(tmp_path: Path) -> None:
    with federation(tmp_path, QuAFL(sampled=2), Lattice(bits=4), sgd(0.2)) as made:
        fleet = made.serve(ServerState(*problem().initial()))
        made.stop.set()
        with pytest.raises(Stopped):
            fleet.available()


def test_a_late_reply_is_no_fault_and_does_not_cost_the_next_round(tmp_path: Path) -> None:
    with federation(tmp_path, QuAFL(sampled=1, local_steps=3), Lattice(bits=4), sgd(0.2)) as made:
        made.serve(ServerState(*problem().initial()))
        worker = made.join("a", problem())
        ask(made, torch.zeros(DIM), [0])
        made.fleet.receive(1, 5.0, 0)
        gate, prompt = Event(), worker.hear

        def slow(octets: bytes) -> bytes:
            gate.wait(10.0)
            return prompt(octets)

        worker.hear = slow  # type: ignore[method-assign,assignment]
        ask(made, torch.zeros(DIM), [0], round=1)
        assert len(made.fleet.receive(1, 0.1, 1).senders) == 0
        ask(made, torch.zeros(DIM), [0], round=2)
        gate.set()
        assert len(made.fleet.receive(1, 5.0, 2).senders) == 1
        (member,) = made.fleet.members()
        assert (member.faults, member.dropped, made.fleet.totals.lost) == (0, 0, 1)


def test_a_restarted_fedbuff_applies_what_had_arrived_and_asks_the_others_again(tmp_path: Path) -> None:
    with federation(tmp_path, FedBuff(sampled=2, local_steps=2, patience=60.0), QSGD(bits=8), sgd(0.2)) as made:
        start = ServerState(*problem().initial())
        made.serve(start)
        workers = [made.join(name, problem()) for name in ("a", "b")]
        ask(made, torch.zeros(DIM), [0])
        wait_for(lambda: made.fleet.totals.contacts == 1)  # it has arrived, and nobody has taken it
        known = made.fleet.state()
        questions = len(made.asked)
        made.serve(start).restore(known)
        for worker in workers:
            worker.say_hello()
        made.fleet.replay()
        replies = made.fleet.receive(1, 5.0, 0)
        assert replies.senders.tolist() == [0]
        assert replies.failed.tolist() == [1]
        assert len(made.asked) == questions


def test_a_server_starts_again_with_other_settings_and_more_places(tmp_path: Path) -> None:
    with federation(tmp_path, QuAFL(sampled=1, wait=0.01, patience=5.0), Lattice(bits=4), sgd(0.2)) as made:
        made.limits = replace(PROMPT, clients=1)
        run = made.coordinator(problem(), Plan(rounds=10, checkpoint_seconds=0.0))
        made.join("a", problem()).finished = True
        assert run.run()
        made.terms = made.terms._replace(codecs=Codecs(up=Lattice(bits=8), down=Lattice(bits=8)))
        made.limits = replace(PROMPT, clients=3)
        made.run = "again"
        run = made.coordinator(problem(), Plan(rounds=30))
        for name in ("a", "b", "c"):
            made.join(name, problem())
        assert run.run()
        assert [member.contacts > 0 for member in made.fleet.members()] == [True] * 3


def test_a_client_that_is_told_of_another_optimizer_while_it_works_goes_on_with_that(tmp_path: Path) -> None:
    with federation(tmp_path, FedAvg(sampled=1, local_steps=20), Lattice(bits=6), sgd(0.2)) as made:
        made.serve(ServerState(*problem().initial()))
        worker = made.join("a", problem(), step_seconds=0.05)
        ask(made, torch.zeros(DIM), [0])
        wait_for(lambda: "steps" in worker.status())
        sleep(0.2)  # it works
        made.terms = made.terms._replace(optimizer=momentum(0.05))
        made.fleet._welcome = {"run": "test", "optimizer": "another"}
        worker.say_hello()
        sleep(0.2)
        assert worker.failure is None
        ask(made, torch.zeros(DIM), [0], round=1)
        assert made.fleet.receive(1, 10.0, 1).senders.tolist() == [0]


def test_a_disk_that_takes_nothing_ends_neither_server_nor_client(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with federation(tmp_path, QuAFL(sampled=1, wait=0.01, patience=5.0), Lattice(bits=4), sgd(0.2)) as made:
        run = made.coordinator(problem(), Plan(rounds=40, checkpoint_seconds=0.0))
        for name in ("checkpoints", "a"):
            (tmp_path / name).write_text("a file, where a folder should be")
        made.join("a", problem(), checkpoint_seconds=0.05)
        assert run.run()
        assert run.server.round == 40
    for part in ("coordinator", "worker"):
        assert any(part in line and "no checkpoint could be written" in line for line in caplog.text.splitlines())


# Trust


def reply_to(contact: bytes, **changes: object) -> Reply:
    """What an honest client could say, changed."""
    message = messages.from_bytes(contact)
    assert isinstance(message, Contact)
    packet = Lattice(bits=4).encode(torch.zeros(DIM), torch.Generator(), distance=1.0)
    honest = Reply(messages.ticket_of(contact), message.round, 1, 0.5, nan, wire.to_bytes(packet))
    return replace(honest, **changes)  # type: ignore[arg-type]


def repair_of(contact: bytes, packet: Packet) -> bytes:
    """A request for one more bit of its first block."""
    request = replace(
        packet,
        kind="request",
        sent=4,
        bits=1,
        symbols=torch.tensor([0], dtype=torch.int32),
        checks=packet.checks[:0],
        exact=packet.exact[:0],
    )
    return messages.to_bytes(Repair(messages.ticket_of(contact), wire.to_bytes(request)))


def packed(vector: Tensor, codec: Codec, distance: float = 1.0) -> bytes:
    return wire.to_bytes(codec.encode(vector, torch.Generator(), distance=distance))


LIES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "garbage": (lambda contact: b"\x80\x04\x95nonsense", "message begins with"),
    "cut off": (lambda contact: messages.to_bytes(reply_to(contact))[:-10], "message has"),
    "another round": (lambda contact: messages.to_bytes(reply_to(contact, round=99)), "answers round 99"),
    "another contact": (
        lambda contact: messages.to_bytes(reply_to(contact, ticket=b"t" * 16)),
        "answers something that",
    ),
    "more steps than allowed": (
        lambda contact: messages.to_bytes(reply_to(contact, steps=500)),
        "says that it took 500",
    ),
    "a speed that cannot be": (lambda contact: messages.to_bytes(reply_to(contact, speed=1e9)), "says that its speed"),
    "a distance that is none": (
        lambda contact: messages.to_bytes(reply_to(contact, distance=nan)),
        "measured a distance of nan",
    ),
    "a distance that cannot be": (
        lambda contact: messages.to_bytes(reply_to(contact, distance=1e300)),
        "its model is 1e+300 away",
    ),
    "half precision": (
        lambda contact: messages.to_bytes(reply_to(contact, packet=packed(torch.zeros(DIM).half(), Lattice(bits=4)))),
        "sent a message of the form ('base', 4, torch.float16)",
    ),
    "another dimension": (
        lambda contact: messages.to_bytes(reply_to(contact, packet=packed(torch.zeros(10), Lattice(bits=4)))),
        "packet has d=10",
    ),
    "another codec": (
        lambda contact: messages.to_bytes(reply_to(contact, packet=packed(torch.zeros(DIM), Identity()))),
        "sent a message of the form ('base', 32, torch.float32)",
    ),
    "too far": (
        lambda contact: messages.to_bytes(
            reply_to(contact, packet=packed(torch.full((DIM,), 100.0), Lattice(bits=4), 3e4))
        ),
        "its model is",
    ),
    "a question": (lambda contact: contact, "answered a contact with a Contact"),
    "patience": (lambda contact: messages.to_bytes(messages.Accepted()), "answered a contact with a Accepted"),
}


@pytest.mark.parametrize(("lie", "complaint"), LIES.values(), ids=LIES.keys())
def test_what_is_not_to_be_believed_is_dropped_and_logged_with_name_and_reason(
    tmp_path: Path, lie: Callable[[bytes], bytes], complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    limits = replace(PROMPT, faults=2, exclusion=1000.0)
    with federation(tmp_path, QuAFL(sampled=2), Lattice(bits=4), sgd(0.2), limits) as made:
        made.serve(ServerState(*problem().initial()))
        made.join("honest", problem())
        liar = made.join("liar", problem())
        liar.hear = lie  # type: ignore[method-assign,assignment]
        for round in range(2):
            ask(made, torch.zeros(DIM), [0, 1], round=round)
            assert made.fleet.receive(2, 5.0, round).senders.tolist() == [0]
        assert f"liar: {complaint}" in caplog.text
        assert "liar is left out for 1000 s" in caplog.text
        assert made.fleet.available().tolist() == [0]
        assert made.fleet.totals.lost == 2


def test_a_not_finite_packet_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    packet = bytearray(packed(torch.zeros(DIM), Identity()))
    packet[60:64] = torch.tensor([nan]).numpy().tobytes()
    with pytest.raises(WireError):
        wire.from_bytes(packet)


def test_exclusions_end_and_grow(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    limits = replace(PROMPT, faults=1, exclusion=2.0)
    with federation(tmp_path, QuAFL(sampled=1), Lattice(bits=4), sgd(0.2), limits) as made:
        made.serve(ServerState(*problem().initial()))
        liar = made.join("liar", problem())
        honest, liar.hear = liar.hear, LIES["garbage"][0]  # type: ignore[method-assign,assignment]
        for expected in (2, 4):
            ask(made, torch.zeros(DIM), [0])
            made.fleet.receive(1, 5.0, 0)
            (member,) = made.fleet.members()
            assert f"liar is left out for {expected} s" in caplog.text
            assert member.left_out_until > -inf
            assert made.fleet.available().tolist() == [0]  # waits until it is over
        liar.hear = honest  # type: ignore[method-assign]
        ask(made, torch.zeros(DIM), [0])
        assert len(made.fleet.receive(1, 5.0, 0).senders) == 1


def test_nobody_gets_bits_of_a_message_that_was_not_sent_to_them(tmp_path: Path) -> None:
    with federation(tmp_path, QuAFL(sampled=1), Lattice(bits=4), sgd(0.2)) as made:
        made.serve(ServerState(*problem().initial()))
        made.join("a", problem())
        made.join("spy", problem())
        gate = Event()
        made.workers["a"].hear = lambda octets: (gate.wait(10.0), messages.to_bytes(messages.Accepted()))[1]  # type: ignore[method-assign,assignment]
        ask(made, torch.zeros(DIM), [0])
        wait_for(lambda: bool(made.asked))
        sent = messages.from_bytes(made.asked[0][1])
        assert isinstance(sent, Contact)
        packet = wire.from_bytes(sent.packet)
        repair = repair_of(made.asked[0][1], packet)
        answers = {name: type(messages.from_bytes(made.to_server(name, repair))) for name in ("a", "spy", "nobody")}
        gate.set()
        assert answers == {"a": messages.Refinement, "spy": Refused, "nobody": Refused}


def test_a_client_with_another_model_is_told_so(tmp_path: Path) -> None:
    with federation(tmp_path, QuAFL(sampled=1), Lattice(bits=4), sgd(0.2)) as made:
        made.serve(ServerState(*problem().initial()))
        hello = {"dim": 5, "buffers": 0, "session": "0a"}
        answer = messages.from_bytes(made.to_server("a", messages.to_bytes(Hello(messages.as_text(hello)))))
        assert isinstance(answer, Refused)
        assert "3000 parameters" in bytes(answer.text).decode()


def test_there_is_room_for_so_many_clients_and_no_more(tmp_path: Path) -> None:
    with federation(tmp_path, QuAFL(sampled=1), Lattice(bits=4), sgd(0.2), replace(PROMPT, clients=2)) as made:
        made.serve(ServerState(*problem().initial()))
        hello = messages.to_bytes(Hello(messages.as_text({"dim": DIM, "buffers": 0, "session": "0a"})))
        answers = [messages.from_bytes(made.to_server(name, hello)) for name in ("a", "b", "a", "c")]
        assert [type(answer) for answer in answers] == [Welcome, Welcome, Welcome, Refused]


def test_a_client_whose_progress_is_not_finite_says_so_and_goes_on(tmp_path: Path) -> None:
    class Bad(Quadratic):
        __slots__ = ()

        def gradient(self, model: Model, buffers: Buffers, batch: tuple[int, Tensor]) -> tuple[Model, Buffers]:
            return torch.full_like(model, inf), buffers

    bad = Bad(torch.ones(DIM), torch.ones(1, DIM))
    with federation(tmp_path, QuAFL(sampled=1, local_steps=2), Lattice(bits=4), sgd(0.2)) as made:
        made.serve(ServerState(*bad.initial()))
        worker = made.join("a", bad)
        ask(made, torch.zeros(DIM), [0])
        made.fleet.receive(1, 5.0, 0)
        wait_for(lambda: worker.status()["steps"] == 2)
        ask(made, torch.zeros(DIM), [0], round=1)
        replies = made.fleet.receive(1, 5.0, 1)
        assert replies.senders.tolist() == []
        assert replies.failed.tolist() == [0]
        assert made.fleet.totals.broken == 1


# Nobody stalls the rest, and no peer decides how much is remembered


def test_thousands_of_bad_messages_do_not_end_an_exclusion(tmp_path: Path) -> None:
    limits = replace(PROMPT, faults=1, exclusion=60.0)
    with federation(tmp_path, QuAFL(sampled=1), Lattice(bits=4), sgd(0.2), limits) as made:
        made.serve(ServerState(*problem().initial()))
        made.join("liar", problem())
        for _ in range(4000):
            made.to_server("liar", b"garbage")
        (member,) = made.fleet.members()
        assert made.fleet.is_left_out(member)
        assert member.left_out_until - monotonic() <= 3600
        assert member.exclusions <= 100


def test_what_a_client_calls_itself_is_not_remembered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    with federation(tmp_path, QuAFL(sampled=1), Lattice(bits=4), sgd(0.2)) as made:
        made.serve(ServerState(*problem().initial()))
        made.join("liar", problem())
        before = resident_mb(os.getpid())
        for number in range(5000):
            said = {"dim": DIM, "buffers": 0, "session": f"{number:x}" * 4000, "leaving": False}
            made.to_server("liar", messages.to_bytes(Hello(messages.as_text(said))))
        assert resident_mb(os.getpid()) - before < 30
        (member,) = made.fleet.members()
        assert len(member.session) <= 32


@pytest.mark.parametrize(
    "hello",
    [
        {"dim": DIM, "buffers": 0, "session": "\ud800"},
        {"dim": DIM, "buffers": 0, "session": ["a"]},
        {"dim": DIM, "buffers": 0, "session": "0a", "leaving": "yes"},
        {"dim": "\ud800" * 9, "buffers": {}, "session": "0a"},
    ],
)
def test_a_strange_hello_is_refused_in_a_sentence(
    tmp_path: Path, hello: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    with federation(tmp_path, QuAFL(sampled=1), Lattice(bits=4), sgd(0.2)) as made:
        made.serve(ServerState(*problem().initial()))
        answer = messages.from_bytes(made.to_server("a", messages.to_bytes(Hello(messages.as_text(hello)))))
        assert isinstance(answer, Refused)
        assert b"something went wrong" not in bytes(answer.text)
        assert "Traceback" not in caplog.text


def test_who_greets_all_the_time_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with federation(tmp_path, QuAFL(sampled=1), Lattice(bits=4), sgd(0.2)) as made:
        made.serve(ServerState(*problem().initial()))
        worker = made.join("a", problem())
        for _ in range(100):
            with suppress(Rejected):
                worker.say_hello()
        assert "a: says hello too often" in caplog.text
        assert made.fleet.is_left_out(made.fleet.members()[0])


class Mute:
    """A client that has answered, and does not repair what it has said."""

    def __init__(self) -> None:
        self.gate = Event()

    def hear(self, octets: bytes) -> bytes:
        if isinstance(messages.from_bytes(octets), Repair):
            self.gate.wait(20.0)
            return b""
        vector = torch.randn(DIM, generator=torch.Generator().manual_seed(0))
        packet = Lattice(bits=4, spread=0.01).encode(vector, torch.Generator(), distance=1.0)
        return messages.to_bytes(reply_to(octets, packet=wire.to_bytes(packet)))

    def end(self) -> None:
        self.gate.set()


def test_replies_that_wait_for_a_repair_keep_nobody_else_waiting(tmp_path: Path) -> None:
    """However many there are: 130 of them held every thread of the server once."""
    algorithm = QuAFL(sampled=5, local_steps=3)
    with federation(tmp_path, algorithm, Lattice(bits=4), sgd(0.2), replace(PROMPT, clients=200)) as made:
        made.loop.run(wide())
        made.serve(ServerState(*problem().initial()))
        hello = messages.to_bytes(Hello(messages.as_text({"dim": DIM, "buffers": 0, "session": "0a"})))
        for number in range(130):
            made.workers[f"mute-{number}"] = Mute()  # type: ignore[assignment]
            made.to_server(f"mute-{number}", hello)
        ask(made, torch.zeros(DIM), list(range(130)))
        wait_for(lambda: sum(isinstance(messages.from_bytes(octets), Repair) for _, octets in made.asked) == 130)
        made.join("honest", problem())
        ask(made, torch.zeros(DIM), [130])
        assert made.fleet.receive(1, 5.0, 0).senders.tolist() == [130]
        for worker in made.workers.values():
            worker.end()


async def wide() -> None:
    """The carrier of these tests has a thread for every question under way; real ones have none."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(200))


def test_a_message_is_repaired_so_often_and_no_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with federation(tmp_path, QuAFL(sampled=1), Lattice(bits=4), sgd(0.2)) as made:
        made.serve(ServerState(*problem().initial()))
        greedy = made.join("greedy", problem())
        gate, asked = Event(), Event()

        def silent(octets: bytes) -> bytes:
            asked.set()
            gate.wait(10.0)
            return b""

        greedy.hear = silent  # type: ignore[method-assign,assignment]
        ask(made, torch.zeros(DIM), [0])
        assert asked.wait(5.0)
        sent = messages.from_bytes(made.asked[0][1])
        assert isinstance(sent, Contact)
        repair = repair_of(made.asked[0][1], wire.from_bytes(sent.packet))
        answers = [type(messages.from_bytes(made.to_server("greedy", repair))) for _ in range(12)]
        gate.set()
        assert answers == [messages.Refinement] * 8 + [Refused] * 4


@pytest.mark.parametrize("sampled", [2, 3])
def test_a_client_that_answers_late_again_and_again_is_left_out(
    tmp_path: Path, sampled: int, caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = QuAFL(sampled=sampled, local_steps=3, wait=0.01, patience=60.0)
    with federation(tmp_path, algorithm, Lattice(bits=4), sgd(0.2), replace(PROMPT, exclusion=1000.0)) as made:
        run = made.coordinator(problem(), Plan(rounds=60))
        for name in ("a", "b", "slow"):
            made.join(name, problem(), step_seconds=0.001)
        slow, prompt = made.workers["slow"], made.workers["slow"].hear

        def late(octets: bytes) -> bytes:
            sleep(1.0)
            return prompt(octets)

        slow.hear = late  # type: ignore[method-assign,assignment]
        assert run.run()
        assert "slow is left out for 1000 s: 3 late answers" in caplog.text
        assert [made.fleet.is_left_out(member) for member in made.fleet.members()] == [False, False, True]


def test_a_client_from_which_nothing_finite_comes_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    limits = replace(PROMPT, exclusion=1000.0)
    with federation(tmp_path, QuAFL(sampled=1, local_steps=3), Lattice(bits=4), sgd(0.2), limits) as made:
        made.serve(ServerState(*problem().initial()))
        made.join("a", problem())
        made.workers["a"].hear = lambda octets: messages.to_bytes(messages.Broken(messages.ticket_of(octets)))  # type: ignore[method-assign,assignment]
        for round in range(3):
            ask(made, torch.zeros(DIM), [0], round=round)
            made.fleet.receive(1, 5.0, round)
        assert "a is left out for 1000 s: 3 answers that were not finite" in caplog.text


def test_a_dropped_reply_is_not_waited_for(tmp_path: Path) -> None:
    """Also where it comes when the client is done."""
    with federation(tmp_path, FedAvg(sampled=1, local_steps=3), Lattice(bits=4), sgd(0.2)) as made:
        made.serve(ServerState(*problem().initial()))
        hello = messages.to_bytes(Hello(messages.as_text({"dim": DIM, "buffers": 0, "session": "0a"})))
        made.workers["liar"] = Mute()  # type: ignore[assignment]
        made.workers["liar"].hear = lambda octets: messages.to_bytes(messages.Accepted())  # type: ignore[method-assign,assignment]
        made.to_server("liar", hello)
        ask(made, torch.zeros(DIM), [0])
        wait_for(lambda: len(made.asked) == 1)
        made.to_server("liar", messages.to_bytes(reply_to(made.asked[0][1], distance=nan)))
        assert made.fleet.receive(1, 1e6, 0).failed.tolist() == [0]  # or it would wait for ever


def test_a_new_reply_is_taken_while_an_old_one_waits_for_its_repair(tmp_path: Path) -> None:
    with federation(tmp_path, FedAvg(sampled=1, local_steps=3), Lattice(bits=4), sgd(0.2)) as made:
        made.serve(ServerState(*problem().initial()))
        hello = messages.to_bytes(Hello(messages.as_text({"dim": DIM, "buffers": 0, "session": "0a"})))
        mute = Mute()
        needy = mute.hear
        made.workers["a"] = mute  # type: ignore[assignment]
        made.to_server("a", hello)

        def hear(octets: bytes) -> bytes:
            accepted = messages.to_bytes(messages.Accepted())
            return needy(octets) if isinstance(messages.from_bytes(octets), Repair) else accepted

        mute.hear = hear  # type: ignore[method-assign]
        ask(made, torch.zeros(DIM), [0])
        wait_for(lambda: len(made.asked) == 1)
        old = Thread(target=made.to_server, args=("a", needy(made.asked[0][1])))
        old.start()
        wait_for(lambda: len(made.asked) == 2)  # its repair is asked for
        ask(made, torch.zeros(DIM), [0], round=1)
        wait_for(lambda: len(made.asked) == 3)
        made.to_server("a", messages.to_bytes(reply_to(made.asked[2][1])))
        assert made.fleet.receive(1, 5.0, 1).senders.tolist() == [0]
        mute.end()
        old.join()
        assert made.fleet.members()[0].dropped == 0


def test_a_reply_repeated_many_times_has_one_vote_on_what_is_usual() -> None:
    judge = Judge(QuAFL(sampled=2, local_steps=3), Identity(), far=20.0)
    server = ServerState(torch.zeros(DIM), torch.empty(0))

    def says(name: str, size: float) -> None:
        vector = torch.full((DIM,), size / DIM**0.5)
        judge.read(name, Reply(b"t" * 16, 0, 1, 0.0, nan, packed(vector, Identity())), 0, server, lambda row, r: r)

    for name in ("a", "b", "c"):
        says(name, 1.0)
    for _ in range(64):
        says("liar", 19.0)
    with pytest.raises(WireError, match="more than 20 times the usual 1"):
        says("liar", 21.0)


def test_octets_that_must_be_zero_are_looked_at() -> None:
    with pytest.raises(WireError, match="where zeros belong"):
        messages.from_bytes(b"QFED\x01\x02\x01\0")
