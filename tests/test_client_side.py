"""A client's machine: what it answers to a contact, what it is told, and what it does when its disk or its server
fails."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from stages import DIM, PATIENT, Stage, contact_codecs, problem, steps_task
from torch import Tensor
from worlds import steady, world

from quafl import FedAvg, FedBuff, Lattice, QuAFL, adam, momentum, sgd
from quafl.codec import QSGD, Identity
from quafl.core.fedasync import FedAsync
from quafl.core.messages import Buffers, Model
from quafl.protocol import messages
from quafl.protocol.carrier import SERVER, Unadmitted, Unreachable
from quafl.protocol.machine import Woken
from quafl.protocol.messages import (
    Accepted,
    Broken,
    Contact,
    Finished,
    Hello,
    Received,
    Refused,
    Rejected,
    Reply,
    WantsAll,
    to_bytes,
)
from quafl.sim.speeds import Constant
from quafl.tasks import Quadratic


def stage(codec: Any = Lattice(bits=4), limits: Any = PATIENT, **more: Any) -> Stage:  # noqa: B008  # immutable
    return Stage(QuAFL(sampled=1, local_steps=3, patience=60.0, **more), codec, sgd(0.2), limits)


def steps_in(stage: Stage, name: str) -> list[int]:
    return [reply.steps for reply in stage.said_by(name, Reply)]


def asked(made: Stage, name: str, octets: bytes) -> list[Any]:
    """What a client answers to octets, as soon as it does."""
    answers: list[Any] = []
    made.parties[name].hear(SERVER, octets, answers.append)
    return answers


# A contact


def test_a_contact_does_not_wait_for_the_step_under_way_which_is_dropped() -> None:
    made = stage(Identity())
    client = made.join("a", Quadratic(torch.full((DIM,), 0.5), torch.full((1, DIM), 1.0)))
    client.work_seconds = 1.0  # of a step, and of reading and writing messages
    made.round()
    made.until(lambda: int(client.machine.client.steps) == 2)
    made.run(0.7)  # it is in the middle of its third step
    before = made.now
    client.work_seconds = 0.0
    made.round()
    assert made.now == before
    assert steps_in(made, "a") == [0, 2]
    assert int(client.machine.client.steps) == 2
    reply = made.said_by("a", Reply)[-1]
    parcel, _ = messages.parcel_from(reply.body, 1, 1, 1)
    assert torch.allclose(parcel.packets[0].symbols.view(torch.float32)[0], torch.tensor(1 - 0.9**2))
    client.work_seconds = 100.0
    made.run(10.0)  # the step that was under way is done, and counts for nothing
    assert int(client.machine.client.steps) == 2
    assert not client.machine.client.progress.any()


def test_a_client_asked_again_says_the_same_and_changes_once() -> None:
    made = stage()
    client = made.join("a", problem(), step_seconds=1.0)
    made.round()
    made.run(3.5)
    made.round()
    made.run(3.5)
    contact = [one.octets for one in made.heard if isinstance(one.message, Contact)][-1]
    state, written = client.machine.client, len(client.written)
    first, second = asked(made, "a", contact), asked(made, "a", contact)
    assert first == second == [next(one.octets for one in made.heard[::-1] if isinstance(one.message, Reply))]
    assert client.machine.client is state
    assert len(client.written) == written


def test_a_client_asked_again_while_it_answers_says_the_same_once() -> None:
    made = stage(limits=replace(PATIENT, prompt=20.0))
    client = made.join("a", problem(), step_seconds=1.0)
    made.round()
    made.run(3.5)
    client.work_seconds = 1.0
    made.begin_round()
    made.until(lambda: len(made.said_to("a", Contact)) == 3)
    made.run(0.0)
    contact = [one.octets for one in made.heard if isinstance(one.message, Contact)][-1]
    again = asked(made, "a", contact)
    made.until(lambda: made.machine.reached)
    assert again == [next(one.octets for one in made.heard[::-1] if isinstance(one.message, Reply))]
    assert len(client.written) == 2


def test_an_old_contact_is_refused() -> None:
    made = stage()
    made.join("a", problem(), step_seconds=1.0)
    made.round()
    old = [one.octets for one in made.heard if isinstance(one.message, Contact)][-1]
    made.round()
    made.round()
    (answer,) = asked(made, "a", old)
    assert isinstance(messages.from_bytes(answer), Refused)


def test_a_client_may_keep_its_speed_to_itself() -> None:
    made = stage()
    client = made.join("a", problem(), step_seconds=1.0, tell_private=False)
    for _ in range(7):
        made.round()
        made.run(3.5)
    server: Any = made.machine.server
    assert server.speeds.isnan().all()
    assert (made.machine.totals.steps, made.machine.totals.contacts) == (0, 7)
    assert int(client.machine.client.steps) == 21
    assert float(client.machine.client.expected_steps) > 2
    assert set(steps_in(made, "a")) == {messages.NOT_TOLD}


class Bad(Quadratic):
    """Whose gradients are not finite."""

    __slots__ = ()

    def gradient(self, model: Model, buffers: Buffers, batch: tuple[int, Tensor]) -> tuple[Model, Buffers]:
        return torch.full_like(model, inf), buffers


def test_a_client_whose_progress_is_not_finite_says_so_and_goes_on() -> None:
    made = stage()
    client = made.join("a", Bad(torch.ones(DIM), torch.ones(1, DIM)), step_seconds=1.0)
    made.round()
    made.run(3.5)
    given = made.round()
    assert (given.replies, given.failed) == ([], [0])
    assert made.machine.totals.broken == 1
    assert len(made.said_by("a", Broken)) == 1
    assert client.machine.client.base.isfinite().all()
    assert client.machine.client.progress.isfinite().all()
    assert client.machine.failure is None


class Raising(Quadratic):
    """Whose data is gone."""

    __slots__ = ()

    def gradient(self, model: Model, buffers: Buffers, batch: tuple[int, Tensor]) -> tuple[Model, Buffers]:
        raise FileNotFoundError("data.csv")


def test_a_task_that_raises_ends_the_client_with_its_reason() -> None:
    made = stage()
    client = made.join("a", Raising(torch.ones(DIM), torch.ones(1, DIM)))
    made.begin_round()
    made.until(lambda: client.machine.failure is not None)
    assert isinstance(client.machine.failure, FileNotFoundError)


@pytest.mark.parametrize(
    ("octets", "complaint"),
    [
        (b"garbage", "message has 7 octets"),
        (to_bytes(Received()), "a Received is nothing that a server says"),
        (to_bytes(Contact(b"t" * 16, 0, False, 0, b"x")), "body of 1 octets"),
        (to_bytes(Contact(b"t" * 16, 0, False, 5, b"x" * 40)), "5 octets of receipts|vectors"),
        (to_bytes(messages.Repair(b"t" * 16, 0, b"")), "an answer that this client no longer has"),
    ],
)
def test_what_a_server_cannot_mean_is_refused_and_changes_nothing(octets: bytes, complaint: str) -> None:
    made = stage()
    client = made.join("a", problem(), step_seconds=1.0)
    made.round()
    before = client.machine.client
    (answer,) = asked(made, "a", octets)
    refused = messages.from_bytes(answer)
    assert isinstance(refused, Refused)
    assert client.machine.client is before
    assert any(part in bytes(refused.body).decode() for part in complaint.split("|"))
    made.round()
    assert len(steps_in(made, "a")) == 2


def test_a_contact_that_overtakes_the_welcome_is_answered() -> None:
    made = stage()
    made.carry = lambda heard: not isinstance(heard.message, messages.Welcome)
    client = made.join("a", problem(), greet=False)
    made.begin_round()
    made.run(0.5)
    assert made.said_to("a", Contact)
    assert not made.said_by("a", Refused)
    client.machine._agree_to({"run": "test"})  # the welcome arrives
    client.happen(Woken())
    made.until(lambda: made.machine.reached, most=1.0)
    assert len(made.given[-1].replies) == 1


def test_a_client_without_a_model_wants_all_of_it() -> None:
    made = stage()
    made.join("a", problem())
    made.round()
    assert contact_codecs(made, "a") == [1, 0]
    assert len(made.said_by("a", WantsAll)) == 1


def test_a_stopped_client_says_goodbye_and_answers_nothing_more() -> None:
    made = stage()
    client = made.join("a", problem(), step_seconds=1.0)
    made.round()
    contact = [one.octets for one in made.heard if isinstance(one.message, Contact)][-1]
    client.do(lambda machine: machine.stop())
    made.run(0.0)
    assert made.live() == []
    steps = client.machine.client.steps
    made.run(10.0)
    assert client.machine.client.steps == steps
    old = messages.from_bytes(contact)
    assert isinstance(old, Contact)
    (answer,) = asked(made, "a", to_bytes(replace(old, ticket=b"n" * 16)))
    assert "stopping" in bytes(messages.from_bytes(answer).body).decode()  # type: ignore[union-attr]


# Greeting


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (Unadmitted("this certificate was revoked"), "this certificate was revoked"),
        (to_bytes(Rejected(b"another model")), "'another model'"),
        (to_bytes(Accepted()), "answered a Hello with a Accepted"),
    ],
    ids=str,
)
def test_a_client_that_is_not_wanted_ends_with_the_server_s_reason(answer: Any, failure: str) -> None:
    made = stage()
    made.parties[SERVER] = Telling([answer])
    client = made.join("a", problem(), greet=False)
    made.run(1.0)
    assert failure in str(client.machine.failure)


@pytest.mark.parametrize("answer", [Unreachable("cannot be reached"), to_bytes(Refused(b"too often")), b"garbage"])
def test_a_server_that_does_not_answer_is_tried_again_until_it_does(answer: Any) -> None:
    made = stage()
    server = made.parties[SERVER]
    made.parties[SERVER] = Telling([answer])
    client = made.join("a", problem(), greet=False)
    made.run(10.0)
    assert client.machine.failure is None
    made.parties[SERVER] = server
    made.run(5.0)
    assert made.live() == ["a"]


class Telling:
    """A server that answers like that."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers = answers

    def hear(self, sender: str, octets: bytes, back: Any) -> None:
        back(self.answers[0])


def test_the_end_of_the_run_ends_the_client_whichever_way_it_hears_of_it() -> None:
    made = stage()
    told, greeted = made.join("told", problem()), made.join("greeted", problem())
    made.parties.pop("greeted")
    made.server.do(lambda machine: machine.finish())
    made.run(0.0)
    assert (told.machine.finished, greeted.machine.finished) == (True, False)
    made.run(3.0)  # its next hello
    assert greeted.machine.finished
    assert len(made.said_by(SERVER, Finished)) >= 2


def test_signs_of_life_come_as_often_as_the_server_says() -> None:
    made = stage()
    made.join("a", problem())
    made.run(20.0)
    assert len(made.said_by("a", Hello)) == 11


# Other terms


@pytest.mark.parametrize(
    "algorithm",
    [FedAvg(local_steps=20), FedBuff(local_steps=20), QuAFL(local_steps=20)],
    ids=lambda one: type(one).__name__,
)
@pytest.mark.parametrize("after", [adam(0.01), momentum(0.05)], ids=["adam", "momentum"])
def test_a_client_that_is_told_of_another_optimizer_while_it_works_goes_on_with_that(
    algorithm: Any, after: Any
) -> None:
    """It once died: its step read the new terms with a state that was made for the old ones, and `init` of an optimizer
    had never been called for it."""
    algorithm = replace(algorithm, sampled=1, patience=1000.0)
    made = Stage(algorithm, Identity(), sgd(0.2))
    client = made.join("a", problem(), step_seconds=1.0)
    made.begin_round()
    made.run(5.5)  # it works
    steps = int(client.machine.client.steps)
    assert steps == 5
    made.terms = made.terms._replace(optimizer=after)
    made.text.update(optimizer="another")  # comes with the answer to its next hello
    made.run(3.0)
    assert client.machine.failure is None
    assert len(client.machine.client.optimizer) == len(after.init(torch.zeros(1, DIM)))
    for _ in range(2):
        made.until(lambda: made.machine.reached, most=2000.0)
        made.begin_round()
    assert client.machine.failure is None
    assert int(client.machine.client.steps) > steps
    assert made.machine.totals.contacts >= 1


def test_a_step_that_was_begun_on_the_old_terms_is_computed_on_them_and_dropped() -> None:
    made = Stage(FedAvg(sampled=1, local_steps=20, patience=1000.0), Identity(), sgd(0.2))
    client = made.join("a", problem())
    client.work_seconds = 1.0
    made.begin_round()
    made.run(5.5)
    made.terms = made.terms._replace(optimizer=momentum(0.05))
    made.text.update(optimizer="another")
    made.until(lambda: client.machine._text.get("optimizer") == "another")
    made.run(5.0)
    assert client.machine.failure is None
    assert len(client.machine.client.optimizer) == 1


def test_another_run_begins_anew() -> None:
    made = stage()
    client = made.join("a", problem(), step_seconds=1.0)
    made.round()
    made.run(3.5)
    assert int(client.machine.client.steps) == 3
    made.text.update(run="another")
    made.run(3.0)
    assert client.machine.client is None
    assert "steps" not in client.machine.status


# A full disk


@pytest.mark.parametrize("algorithm", [QuAFL(local_steps=3), FedAvg(local_steps=3)], ids=["at once", "when done"])
def test_a_client_with_a_full_disk_reports_nothing_and_goes_on_when_there_is_room(algorithm: Any) -> None:
    """A report that is not written down could be made twice: none leaves."""
    made = Stage(replace(algorithm, sampled=1, patience=5.0), Identity(), sgd(0.2), replace(PATIENT, faults=1000))
    client = made.join("a", problem(), step_seconds=0.1)
    made.round()
    made.run(1.0)
    replies, client.full = len(made.said_by("a", Reply)), True
    for _ in range(3):
        assert made.round().replies == []
        made.run(3.0)
    assert len(made.said_by("a", Reply)) == replies
    assert client.machine.failure is None
    assert any("cannot" in said and "No space left on device" in said for said in client.said)
    client.full = False
    made.run(3.0)
    made.round()
    assert made.round().replies


def test_a_client_with_a_full_disk_does_not_exit_when_the_server_comes_back_with_new_settings() -> None:
    """It once did: it wanted to save the state of the old settings, and ended with the OSError."""
    made = stage(limits=replace(PATIENT, faults=1000))
    client = made.join("a", problem(), step_seconds=1.0)
    made.round()
    made.run(3.5)
    client.full = True
    made.terms = made.terms._replace(optimizer=momentum(0.05))
    made.text.update(optimizer="another")
    made.run(3.0)
    made.round()
    assert client.machine.failure is None
    client.full = False
    made.run(3.0)
    assert made.round().replies


# What was applied


def test_a_client_knows_that_its_reply_was_lost_and_the_mean_of_all_models_stays() -> None:
    """X + X^i, what QuAFL conserves, whether or not a reply arrives: the receipt with the next contact tells."""
    made = Stage(
        QuAFL(sampled=1, local_steps=3, patience=5.0), Identity(), sgd(1.0), replace(PATIENT, faults=99), steps_task()
    )
    client = made.join("a", made.task, step_seconds=1.0)
    made.round()
    made.run(3.5)
    lose = [True]
    made.carry = lambda heard: not (lose and isinstance(heard.message, Reply) and lose.pop())
    assert made.round(most=10.0).replies == []
    made.run(3.0)
    for _ in range(3):
        made.round()
    machine = client.machine
    everybody = made.machine.server.model + machine.client.base[0] - machine.client.progress[0]
    taken = torch.zeros(len(everybody)).index_fill(0, torch.arange(int(machine.client.steps)), -1.0)
    assert torch.allclose(everybody, taken, atol=1e-5)


LATE = pytest.mark.parametrize(
    "codec", [Lattice(bits=6), QSGD(bits=8), QSGD(bits=8, difference=True), Identity()], ids=lambda one: str(one)[:40]
)


def far_apart() -> tuple[FedAsync, Tensor]:
    """One whose server becomes what arrives last; and what a slow client makes of the first model, in four steps."""
    task, model = problem(center=-5.0), torch.zeros(DIM)
    for step in range(4):
        model = model - 0.2 * task.gradient(model, torch.empty(0), task.batch(0, step))[0]
    return FedAsync(sampled=2, local_steps=4, mixing=1.0, staleness=0.0, patience=1e4), model


@LATE
def test_a_keyed_reply_that_comes_late_is_decoded_with_the_model_that_was_sent(codec: Any) -> None:
    """As in the simulator, below."""
    algorithm, expected = far_apart()
    made = Stage(algorithm, codec, sgd(0.2))
    made.join("fast", problem(center=5.0), step_seconds=1.0)
    slow = made.join("slow", problem(center=-5.0), step_seconds=10.0)
    given: list[str] = []
    while "slow" not in given:
        made.round()
        given += [name for name, _ in made.given[-1].replies]
    assert given.count("fast") >= 9  # the server has gone far since
    assert float((made.machine.server.model - expected).norm() / expected.norm()) < 0.1
    assert slow.machine.failure is None
    assert not any("dropped" in said for said in slow.said)


@LATE
def test_so_it_is_in_the_simulator(codec: Any) -> None:
    """It once was decoded with the model of the round in which it arrived."""
    algorithm, expected = far_apart()
    both = Quadratic(problem().curvature, torch.stack((torch.full((DIM,), 5.0), torch.full((DIM,), -5.0))))
    made = world(both, 2, algorithm, codec=codec, lr=0.2, speeds=Constant(steady(torch.tensor([1.0, 10.0]))))
    states = made.states()
    for _ in range(60):
        state = next(states)
        if made.came[-1].senders.tolist() == [1]:
            break
    assert len(made.came) >= 9
    assert made.came[-1].senders.tolist() == [1]
    assert float((state.model - expected).norm() / expected.norm()) < 0.1
