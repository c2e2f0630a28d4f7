"""The server's machine: who is believed, who is waited for, who is left out, and what is remembered of them."""

import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from math import inf, isfinite, nan
from typing import Any

import pytest
import torch
from parties import resident_mb
from stages import (
    DIM,
    PATIENT,
    Heard,
    Stage,
    contact_codecs,
    hello,
    packet,
    problem,
    repair_of,
    reply_to,
)
from torch import nn

from quafl import FedAvg, Lattice, Local, QuAFL, sgd
from quafl.codec import Identity
from quafl.codec.coders import Parcel, coders_for
from quafl.codec.seams import WireError
from quafl.core.quafl import Down
from quafl.core.seams import Task
from quafl.protocol import messages
from quafl.protocol.judge import Judge
from quafl.protocol.layout import beginning
from quafl.protocol.members import LONGEST_EXCLUSION
from quafl.protocol.messages import (
    LONGEST_TEXT,
    Accepted,
    Broken,
    Contact,
    Finished,
    Hello,
    Received,
    Refinement,
    Refused,
    Rejected,
    Repair,
    Reply,
    Welcome,
    to_bytes,
)
from quafl.protocol.repairs import replay
from quafl.protocol.speech import Spoken

FOUR = Lattice(bits=4)
ZERO = packet(torch.zeros(DIM), FOUR)


def stage(sampled: int = 1, limits: Any = PATIENT, **more: Any) -> Stage:
    return Stage(QuAFL(sampled=sampled, local_steps=3, patience=60.0, **more), FOUR, sgd(0.2), limits)


def honest(contact: bytes) -> bytes:
    """Somebody who has nothing to tell."""
    return reply_to(contact, ZERO)


def ticket_of(octets: bytes) -> bytes:
    message = messages.from_bytes(octets)
    assert isinstance(message, Contact)
    return message.ticket


# Trust


LIES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "garbage": (lambda contact: b"\x80\x04\x95nonsense", "message begins with"),
    "cut off": (lambda contact: honest(contact)[:-10], "message has"),
    "too long": (lambda contact: honest(contact) + b"more", "message has"),
    "another contact": (lambda contact: reply_to(contact, ZERO, ticket=b"t" * 16), "answered a contact with a Reply"),
    "more steps than allowed": (lambda contact: reply_to(contact, ZERO, steps=500), "says that it took 500"),
    "fewer steps than none": (lambda contact: reply_to(contact, ZERO, steps=-2), "says that it took -2"),
    "a speed that cannot be": (lambda contact: reply_to(contact, ZERO, speed=1e9), "says that its speed"),
    "a distance that is none": (lambda contact: reply_to(contact, ZERO, distance=nan), "measured a distance of nan"),
    "a distance that cannot be": (lambda contact: reply_to(contact, ZERO, distance=1e300), "its model is 1e+300 away"),
    "half precision": (
        lambda contact: reply_to(contact, packet(torch.zeros(DIM).half(), FOUR)),
        f"sent a message of the form ('base', 4, torch.float16, {DIM})",
    ),
    "another dimension": (
        lambda contact: reply_to(contact, packet(torch.zeros(10), FOUR)),
        "sent a message of the form ('base', 4, torch.float32, 10)",
    ),
    "another codec": (
        lambda contact: reply_to(contact, packet(torch.zeros(DIM), Identity())),
        f"sent a message of the form ('base', 32, torch.float32, {DIM})",
    ),
    "another number of vectors": (
        lambda contact: reply_to(
            contact, ZERO, body=b"".join(messages.parcel_parts(Parcel((ZERO, ZERO), (torch.tensor(nan),)), [0.5]))
        ),
        "message has 2 vectors and 2 numbers, expected (1, 2)",
    ),
    "too far": (
        lambda contact: reply_to(contact, packet(torch.full((DIM,), 100.0), FOUR, 3e4)),
        "its model is",
    ),
    "a question": (lambda contact: contact, "answered a contact with a Contact"),
    "the end": (lambda contact: to_bytes(Finished(b"")), "answered a contact with a Finished"),
}


@pytest.mark.parametrize(("lie", "complaint"), LIES.values(), ids=LIES.keys())
def test_what_is_not_to_be_believed_is_dropped_and_logged_with_name_and_reason(
    lie: Callable[[bytes], bytes], complaint: str
) -> None:
    made = stage(sampled=2, limits=replace(PATIENT, faults=2, exclusion=1000.0))
    made.puppet("honest", honest)
    made.puppet("liar", lie)
    for _ in range(2):
        given = made.round()
        assert [name for name, _ in given.replies] == ["honest"]
        assert given.failed == [1]
    assert any(said.startswith(f"liar: {complaint}") for said in made.server.said), made.server.said
    assert "liar is left out for 1000 s: 2 faults in a row" in made.server.said
    assert made.live() == ["honest"]
    assert made.machine.totals.lost == 2
    assert made.member("liar").dropped == 2


def test_a_client_that_says_it_works_is_waited_for_so_long_and_no_longer() -> None:
    """Where clients answer at once, one that says `Accepted` is no liar; but `patience` ends."""
    made = stage(sampled=2, limits=replace(PATIENT, silence=1e9))
    made.puppet("honest", honest)
    made.puppet("slow", lambda contact: to_bytes(Accepted()))
    given = made.round()
    assert [name for name, _ in given.replies] == ["honest"]
    assert made.now == pytest.approx(60.0)
    assert made.machine.totals.lost == 0
    made.round()
    assert made.machine.totals.lost == 1


def test_exclusions_end_and_grow() -> None:
    made = stage(limits=replace(PATIENT, faults=1, exclusion=2.0, silence=1e9))
    lies = [True, True, True]
    made.puppet("liar", lambda contact: b"garbage" if lies and lies.pop() else honest(contact))
    members = made.machine.members
    for expected in (2, 4, 8):
        assert made.round().replies == []
        assert f"liar is left out for {expected} s: 1 faults in a row" in made.server.said
        ends = made.member("liar").left_out_until
        assert ends == pytest.approx(made.looked[-1].now + expected, abs=0.01)
        assert not members.live(ends - 0.01)
        assert members.live(ends)
    assert len(made.round().replies) == 1  # it has waited until it was over
    assert made.now >= 2 + 4 + 8


def test_thousands_of_bad_messages_do_not_end_an_exclusion_nor_make_it_endless() -> None:
    made = stage(limits=replace(PATIENT, faults=1, exclusion=60.0))
    made.puppet("liar", honest)
    for _ in range(4000):
        made.tell_server("liar", b"garbage")
    member = made.member("liar")
    assert made.machine.members.is_left_out(member, made.now)
    assert member.left_out_until - made.now <= LONGEST_EXCLUSION
    assert member.exclusions <= 100


def test_what_a_client_calls_itself_is_not_remembered() -> None:
    made = stage()
    made.puppet("liar", honest)

    def forget(heard: Heard) -> bool:
        """This test itself remembers nothing."""
        made.heard.clear()
        return True

    made.carry = forget
    for _ in range(200):
        made.tell_server("liar", hello(session="f" * 4000))
    before = resident_mb(os.getpid())
    for number in range(5000):
        made.tell_server("liar", hello(session=f"{number:x}" * 4000))
        made.server.said.clear()
    assert resident_mb(os.getpid()) - before < 30
    assert len(made.member("liar").session) <= 32


@pytest.mark.parametrize(
    "strange",
    [{"session": "\ud800"}, {"session": ["a"]}, {"leaving": "yes"}, {"session": None}, {"session": "g"}],
    ids=str,
)
def test_a_strange_hello_is_refused_in_a_sentence(strange: dict[str, object]) -> None:
    made = stage()
    answer = made.tell_server("a", hello(**strange))
    assert isinstance(answer, Refused)
    assert b"says hello without saying which process it is" in bytes(answer.body)


@pytest.mark.parametrize("text", [b"[1]", b"{", b"[" * 60000, b" " * 70000, b"\xff"])
def test_a_hello_that_is_no_table_is_refused_in_a_sentence(text: bytes) -> None:
    answer = stage().tell_server("a", to_bytes(messages.Hello(text)))
    assert isinstance(answer, Refused)
    assert bytes(answer.body).startswith(b"message has a text")


def network(*order: str) -> Task:
    """Two layers of the same sizes, in that order, and a batch norm."""
    layers = {"in": nn.Linear(4, 6), "norm": nn.BatchNorm1d(6), "back": nn.Linear(6, 4), "extra": nn.Linear(3, 3)}
    return Local(nn.Sequential(OrderedDict((name, layers[name]) for name in order))).build()


@pytest.mark.parametrize(
    ("order", "sentence"),
    [
        (("back", "norm", "in"), "tensor 1 of the server's model is 'in.weight 6x4', of a's 'back.weight 4x6';"),
        (("in", "back", "norm"), "tensor 3 of the server's model is 'norm.weight 6', of a's 'back.weight 4x6';"),
        (("in", "norm", "back", "extra"), "tensor 7 of the server's model is 'buffer norm.running_mean 6', of a's"),
        (("in",), "the models of the server and of a have the same first 2 tensors, and differ then"),
    ],
    ids="-".join,
)
def test_a_client_whose_tensors_are_others_or_in_another_order_is_told_which(
    order: tuple[str, ...], sentence: str
) -> None:
    made = Stage(QuAFL(patience=60.0), FOUR, sgd(0.1), task=network("in", "norm", "back"))
    client = made.join("a", network(*order), greet=False)
    made.run(5.0)
    assert sentence in str(client.machine.failure)
    assert any("a cannot take part: " + sentence in said for said in made.server.said)
    assert made.machine.members.get("a") is None
    made.join("b", network("in", "norm", "back"))  # with other weights
    assert made.live() == ["b"]


@pytest.mark.parametrize("tensors", [None, 5, {}, "model 5", [1], [["model", 5]]], ids=str)
def test_tensors_that_nobody_can_read_are_refused(tensors: Any) -> None:
    answer = stage().tell_server("a", hello(layout="another", tensors=tensors))
    assert isinstance(answer, Refused)
    assert b"says hello without saying which tensors its model has" in bytes(answer.body)


def test_what_a_peer_calls_its_tensors_is_shown_in_a_short_and_plain_sentence() -> None:
    answer = stage().tell_server("a", hello(layout="another", tensors=["\ud800\n" + "w" * 9999]))
    assert isinstance(answer, Rejected)
    assert "model is 'model 3000', of a's '\\ud800\\nwww" in bytes(answer.body).decode()
    assert len(answer.body) < 250


def test_a_greeting_has_room_for_the_tensors_of_any_model_and_brings_them_once() -> None:
    many = tuple(f"layer{number}.{'w' * 50} 3x3" for number in range(5000))
    told = beginning(many)
    assert many[: len(told)] == told
    assert 400 < len(told) < 5000
    text = messages.as_text({"tensors": told})
    assert len(text) <= LONGEST_TEXT // 2 + 20
    made = stage()
    made.join("a")
    made.run(10.0)
    said = [messages.from_text(one.body) for one in made.said_by("a", Hello)]
    assert said[0]["tensors"] == ["model 3000", "buffer buffers 0"]
    assert not any(one["tensors"] for one in said[1:])


def test_there_is_room_for_so_many_clients_and_no_more() -> None:
    made = stage(limits=replace(PATIENT, clients=2))
    answers = [made.tell_server(name, hello()) for name in ("a", "b", "a", "c")]
    assert [type(answer) for answer in answers] == [Welcome, Welcome, Welcome, Rejected]
    assert "2 clients already" in bytes(answers[-1].body).decode()  # type: ignore[union-attr]


def test_who_greets_all_the_time_is_left_out() -> None:
    made = stage()
    made.puppet("a", honest)
    for _ in range(100):
        made.tell_server("a", hello())
    assert "a: says hello too often; its message is dropped" in made.server.said
    assert made.machine.members.is_left_out(made.member("a"), made.now)


def test_who_greets_as_often_as_it_is_told_is_never_left_out() -> None:
    made = stage()
    made.puppet("a", honest)
    for _ in range(500):
        made.run(2.0)
        assert isinstance(made.tell_server("a", hello()), Welcome)
    assert made.live() == ["a"]


@pytest.mark.parametrize("octets", [to_bytes(Received()), to_bytes(Accepted()), to_bytes(Refinement(b""))])
def test_what_is_nothing_that_a_client_says_is_a_fault(octets: bytes) -> None:
    made = stage()
    made.puppet("a", honest)
    assert isinstance(made.tell_server("a", octets), Refused)
    assert made.member("a").faults == 1


def test_a_stranger_is_refused_and_nothing_of_it_is_remembered() -> None:
    made = stage()
    made.puppet("a", honest)
    made.round()
    answer = made.tell_server("stranger", reply_to(made.heard[-2].octets, ZERO))
    assert isinstance(answer, Refused)
    assert len(made.machine.members) == 1


# Repairs


def test_nobody_gets_bits_of_a_message_that_was_not_sent_to_them() -> None:
    made = stage()
    made.puppet("a", lambda contact: None)
    made.begin_round()
    made.until(lambda: bool(made.said_to("a", Contact)))
    made.puppet("spy", honest)
    repair = repair_of(next(one.octets for one in made.heard if isinstance(one.message, Contact)))
    answers = {name: type(made.tell_server(name, repair)) for name in ("a", "spy", "nobody")}
    assert answers == {"a": Refinement, "spy": Refused, "nobody": Refused}


@pytest.mark.parametrize(("place", "expected"), [(0, Refinement), (1, Refused), (255, Refused)])
def test_a_repair_is_of_a_vector_that_was_sent(place: int, expected: type[Any]) -> None:
    made = stage()
    made.puppet("a", lambda contact: None)
    made.begin_round()
    made.until(lambda: bool(made.said_to("a", Contact)))
    repair = repair_of(next(one.octets for one in made.heard if isinstance(one.message, Contact)), place=place)
    assert isinstance(made.tell_server("a", repair), expected)


def test_a_message_is_repaired_so_often_and_no_more() -> None:
    made = stage()
    made.puppet("greedy", lambda contact: None)
    made.begin_round()
    made.until(lambda: bool(made.said_to("greedy", Contact)))
    repair = repair_of(next(one.octets for one in made.heard if isinstance(one.message, Contact)))
    answers = [type(made.tell_server("greedy", repair)) for _ in range(12)]
    assert answers == [Refinement] * 8 + [Refused] * 4


def needy(contact: bytes) -> bytes:
    """A reply that does not decode without more bits."""
    vector = torch.randn(DIM, generator=torch.Generator().manual_seed(0))
    return reply_to(contact, packet(vector, Lattice(bits=4, spread=0.01)))


def mute(octets: bytes) -> bytes | None:
    """Somebody who has answered, and does not repair what it has said."""
    return None if isinstance(messages.from_bytes(octets), Repair) else needy(octets)


def test_replies_that_wait_for_a_repair_keep_nobody_else_waiting() -> None:
    """However many there are: 130 of them held every thread of the server once."""
    made = stage(sampled=200, limits=replace(PATIENT, clients=200, contact_seconds=1000.0))
    for number in range(130):
        made.puppet(f"mute-{number}", mute)
    made.puppet("honest", honest)
    made.begin_round()
    made.until(lambda: sum(isinstance(one.message, Repair) for one in made.heard) == 130)
    made.until(lambda: made.member("honest").contacts == 1, most=0.001)
    assert made.round(most=61.0).replies == [["honest", made.given[-1].replies[0][1]]]


def test_a_client_whose_answer_is_being_read_is_not_asked_again() -> None:
    made = stage()
    made.puppet("a", mute)
    made.begin_round()
    made.until(lambda: bool(made.said_to("a", Repair)))
    made.hello_again("a")
    made.run(1.0)
    assert len(made.said_to("a", Contact)) == 1


def test_a_new_reply_is_taken_while_an_old_one_waits_for_its_repair() -> None:
    made = Stage(FedAvg(sampled=1, local_steps=3, patience=2.0), FOUR, sgd(0.2))
    contacts: list[bytes] = []

    def says(octets: bytes) -> bytes | None:
        if isinstance(messages.from_bytes(octets), Repair):
            return None
        contacts.append(octets)
        return to_bytes(Accepted())

    def told(octets: bytes, made_of: Any) -> bytes:
        parts = messages.parcel_parts(Parcel((made_of,), ()), [0.5])
        return to_bytes(Reply(ticket_of(octets), 1, b"".join(parts)))

    made.puppet("a", says)
    made.begin_round()
    made.until(lambda: len(contacts) == 1)
    vector = torch.randn(DIM, generator=torch.Generator().manual_seed(0))
    answers: list[Any] = []
    made.ask("a", "server", told(contacts[0], packet(vector, Lattice(bits=4, spread=0.01))), 30.0, answers.append)
    made.until(lambda: made.machine.reached)  # patience is over
    made.begin_round()
    made.until(lambda: len(contacts) == 2)
    assert isinstance(made.tell_server("a", told(contacts[1], ZERO)), Received)
    made.until(lambda: made.machine.reached)
    assert [name for name, _ in made.given[-1].replies] == ["a"]
    made.run(30.0)
    assert made.member("a").dropped == 0
    assert made.machine.totals.contacts == 1


# Who is waited for


def test_a_vanished_client_is_not_waited_for() -> None:
    made = stage(sampled=2, limits=replace(PATIENT, silence=1e9))
    made.puppet("a", honest)
    made.puppet("b", honest)
    gone = made.parties.pop("b")
    given = made.round()
    assert [name for name, _ in given.replies] == ["a"]
    assert made.now < 1.0
    assert given.failed == [1]
    assert made.live() == ["a"]
    assert made.machine.totals.lost == 1
    made.parties["b"] = gone
    made.hello_again("b")
    assert made.live() == ["a", "b"]


def test_a_client_whose_connection_has_ended_is_not_asked_before_it_says_hello() -> None:
    made = stage(sampled=2)
    made.puppet("a", honest)
    made.puppet("b", honest)
    made.machine.gone("b")
    made.machine.gone("nobody")
    assert made.live() == ["a"]
    made.round()
    assert not made.said_to("b", Contact)
    made.hello_again("b")
    made.round()
    assert made.said_to("b", Contact)


def test_a_client_that_leaves_says_so_and_owes_nothing() -> None:
    made = stage(sampled=2)
    made.puppet("a", honest)
    made.puppet("b", lambda contact: None)
    made.begin_round()
    made.run(0.1)
    assert isinstance(made.tell_server("b", hello(leaving=True)), Welcome)
    made.until(lambda: made.machine.reached, most=0.01)
    assert made.live() == ["a"]
    assert made.given[-1].failed == [1]
    assert made.server.said[-1] == "b has left"


def test_a_client_that_is_silent_for_long_is_not_there() -> None:
    made = stage(limits=replace(PATIENT, silence=10.0))
    made.puppet("a", honest)
    made.run(9.9)
    assert made.live() == ["a"]
    made.run(0.2)
    assert made.live() == []


def test_a_dropped_reply_is_not_waited_for() -> None:
    """Also where it comes when the client is done."""
    made = Stage(FedAvg(sampled=1, local_steps=3, patience=1e6), FOUR, sgd(0.2))
    made.puppet("liar", lambda octets: to_bytes(Accepted()))
    made.begin_round()
    made.until(lambda: bool(made.said_to("liar", Contact)))
    contact = next(one.octets for one in made.heard if isinstance(one.message, Contact))
    parts = messages.parcel_parts(Parcel((ZERO,), ()), [nan])
    made.tell_server("liar", to_bytes(Reply(ticket_of(contact), 1, b"".join(parts))))
    made.until(lambda: made.machine.reached, most=1.0)  # or it would wait for ever
    assert made.given[-1].failed == [0]


def test_a_reply_that_comes_twice_counts_once() -> None:
    made = stage()
    made.puppet("a", honest)
    made.round()
    reply = next(one.octets for one in made.heard if isinstance(one.message, Reply))
    for _ in range(3):
        assert made.tell_server("a", reply) == Received()
    made.round()
    tickets = [ticket for given in made.given for _, ticket in given.replies]
    assert len(tickets) == len(set(tickets)) == made.machine.totals.contacts == 2
    assert made.member("a").faults == 0


def test_a_reply_to_what_another_was_asked_is_refused() -> None:
    made = stage()
    made.puppet("a", lambda contact: None)
    made.begin_round()
    made.until(lambda: bool(made.said_to("a", Contact)))
    contact = next(one.octets for one in made.heard if isinstance(one.message, Contact))
    made.puppet("thief", honest)
    assert isinstance(made.tell_server("thief", honest(contact)), Refused)
    assert made.member("thief").faults == 1
    assert made.machine.totals.contacts == 0


def test_a_late_reply_is_no_fault_is_not_applied_and_does_not_cost_the_next_round() -> None:
    made = stage(limits=replace(PATIENT, contact_seconds=100.0))
    held: list[Heard] = []

    def carry(heard: Heard) -> bool:
        if isinstance(heard.message, Reply) and heard.message.steps == 1 and len(held) < 1:
            held.append(heard)
            return False
        return True

    made.puppet("a", honest)
    made.carry = carry
    assert made.round().replies == []  # patience is over
    made.carry = lambda heard: True
    made.hello_again("a")
    made.begin_round()
    made.run(0.0)
    assert made.tell_server("a", held[0].octets) == Received()
    made.until(lambda: made.machine.reached)
    assert [ticket for _, ticket in made.given[-1].replies] != [held[0].message.ticket.hex()]  # type: ignore[union-attr]
    assert len(made.given[-1].replies) == 1
    member = made.member("a")
    assert (member.faults, member.dropped, made.machine.totals.lost, made.machine.totals.contacts) == (0, 0, 1, 1)


@pytest.mark.parametrize("sampled", [2, 3])
def test_a_client_that_answers_late_again_and_again_is_left_out(sampled: int) -> None:
    made = stage(sampled=sampled, limits=replace(PATIENT, exclusion=1000.0, silence=1e9), wait=0.01)
    for name in ("a", "b"):
        made.puppet(name, honest)

    class Late:
        def hear(self, sender: str, octets: bytes, back: Any) -> None:
            made.later(1.0, lambda: back(honest(octets)))

    made.parties["slow"] = Late()
    made.tell_server("slow", hello())
    for _ in range(60):
        made.round()
    assert "slow is left out for 1000 s: 3 late answers" in made.server.said
    assert made.live() == ["a", "b"]


def test_a_client_from_which_nothing_finite_comes_is_left_out() -> None:
    made = stage(limits=replace(PATIENT, exclusion=1000.0))
    made.puppet("a", lambda octets: to_bytes(Broken(ticket_of(octets))))
    for _ in range(3):
        assert made.round().failed == [0]
    assert made.server.said[-1].startswith("a is left out for 1000 s: 3 answers that were not finite")
    assert made.machine.totals.broken == 3


def test_answers_without_a_step_do_not_make_up_for_steps_that_were_not_finite() -> None:
    """Such a client was contacted for ever: each of its empty answers was taken for a good one."""
    made = stage(limits=replace(PATIENT, silence=1e9, exclusion=1000.0))
    said, steps = iter(range(1000)), 0

    def says(octets: bytes) -> bytes:
        broken = next(said) % 6 == 5 and not steps
        return to_bytes(Broken(ticket_of(octets))) if broken else reply_to(octets, ZERO, steps=steps)

    made.puppet("a", says)
    for _ in range(3 * 6):
        made.round()
    assert made.live() == []
    (left_out,) = (said for said in made.server.said if said.startswith("a is left out"))
    assert left_out.startswith("a is left out for 1000 s: 3 answers that were not finite; look at its data")
    made.run(1001.0)
    for _ in range(6):
        made.round()
    assert made.server.said[-1].startswith("a is left out for 2000 s")  # at its next one
    assert made.checkpoint().state["members"]["a"]["broken"] == 4
    made.run(2001.0)
    steps = 1
    made.round()
    assert made.member("a").broken == 0


def test_a_client_that_refuses_again_and_again_is_left_out() -> None:
    made = stage(limits=replace(PATIENT, exclusion=1000.0))
    made.puppet("a", lambda octets: to_bytes(Refused(b"no")))
    for _ in range(3):
        made.hello_again("a")
        assert made.round().failed == [0]
    assert "a refused the contact: 'no'" in made.server.said
    assert "a is left out for 1000 s: 3 refusals" in made.server.said


# What is usual


def test_a_reply_repeated_many_times_has_one_vote_on_what_is_usual() -> None:
    algorithm = QuAFL(sampled=2, local_steps=3)
    judge = Judge(algorithm, coders_for(algorithm, Identity()), far=20.0)
    told = Down(model=torch.zeros(DIM), statistics=torch.empty(0), slowest=torch.tensor(inf))

    def says(name: str, size: float) -> None:
        made = packet(torch.full((DIM,), size / DIM**0.5), Identity())
        parts = messages.parcel_parts(Parcel((made,), (torch.tensor(nan),)), [0.0])
        opinion = judge.read(
            Reply(b"t" * 16, 1, b"".join(parts)), Spoken(b"t" * 16, told, told), replay([]), judge.usual()
        )
        judge.learn(name, opinion.away)

    for name in ("a", "b", "c"):
        says(name, 1.0)
    for _ in range(64):
        says("liar", 19.0)
    with pytest.raises(WireError, match="more than 20 times the usual 1"):
        says("liar", 21.0)


def test_clients_without_a_step_say_nothing_about_what_is_usual() -> None:
    """All they send is the codec's error; who then has taken steps is not far away because of it."""
    task = replace(problem(), start=torch.full((DIM,), 0.01))
    made = Stage(QuAFL(sampled=3, local_steps=3, patience=60.0), FOUR, sgd(0.2), PATIENT, task)
    for name in ("a", "b", "c"):
        made.join(name, step_seconds=1.0)
    for _ in range(3):
        assert len(made.round().replies) == 3
    made.run(3.5)
    assert len(made.round().replies) == 3
    assert not any("away" in said for said in made.server.said)


# What goes down


def test_a_client_that_is_far_away_is_brought_back_in_full_precision() -> None:
    made = stage()
    made.join("a", problem(), step_seconds=1.0)
    made.round()
    made.run(5.0)
    made.machine.server = replace(made.machine.server, model=torch.full((DIM,), 1000.0))
    assert len(made.round().replies) == 1
    assert contact_codecs(made, "a") == [1, 0, 1, 0]  # at the beginning, and now again
    assert made.machine.server.expected["model"] > 1000.0


def test_who_asks_for_the_whole_model_again_and_again_is_a_liar() -> None:
    made = stage(limits=replace(PATIENT, faults=1, exclusion=1000.0))
    made.puppet("a", lambda octets: to_bytes(messages.WantsAll(ticket_of(octets))))
    assert made.round().failed == [0]
    assert contact_codecs(made, "a") == [1, 0]
    assert "a: asks for the whole model, which it has just been sent; its message is dropped" in made.server.said


def test_speeds_are_told_and_the_slowest_travels_with_each_contact() -> None:
    made = stage(sampled=2, weighted=True)
    made.join("fast", problem(), step_seconds=1.0)
    made.join("slow", problem(), step_seconds=2.5)
    for _ in range(12):
        made.round()
        made.run(2.6)
    server: Any = made.machine.server
    fast, slow = server.speeds.tolist()
    assert (fast, slow) == pytest.approx((2.0, 1.0), rel=0.15)  # of the first contacts, one found no step
    body = made.said_to("fast", Contact)[-1]
    parcel, _ = messages.parcel_from(body.body[body.receipts :], 1, 1)
    assert float(parcel.numbers[0]) == pytest.approx(slow, rel=0.1)


def test_room_for_what_is_said_unasked_grows_when_a_reply_is_due() -> None:
    """Whoever owes nothing may send a greeting or a request for a repair; whoever works, also its reply, twice."""
    made = Stage(FedAvg(sampled=1, local_steps=3, patience=60.0), FOUR, sgd(0.2))
    made.puppet("a", lambda octets: to_bytes(Accepted()))
    before = made.machine.room("a")
    assert made.machine.room("nobody") == before
    made.begin_round()
    made.run(0.1)
    assert made.machine.room("a") >= before + 8 * DIM
    assert isfinite(made.machine.room("a"))


def test_octets_are_counted_in_the_packets_of_both_directions() -> None:
    made = stage()
    made.puppet("a", honest)
    made.round()
    contact, reply = made.said_to("a", Contact)[-1], made.said_by("a", Reply)[-1]
    down = messages.parcel_from(contact.body[contact.receipts :], 1, 1)[0]
    up = messages.parcel_from(reply.body, 1, 1, 1)[0]
    assert (made.machine.totals.down, made.machine.totals.up) == (down.nbytes, up.nbytes)
