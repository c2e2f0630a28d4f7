"""The rehearsal finds nothing wrong with the machines, and finds what is put in on purpose."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from quafl.codec.coders import Parcel
from quafl.core.client import newcomers
from quafl.protocol import journal, log, messages
from quafl.protocol.client import ClientSide
from quafl.protocol.debts import Arrival, Question
from quafl.protocol.log import Entry, Gave, Reported, Took
from quafl.protocol.machine import Do, Done, Flow, Woken
from quafl.protocol.members import Member
from quafl.protocol.server import ServerSide
from quafl.rehearsal.cast import draw
from quafl.rehearsal.schedules import added_up, rehearse
from quafl.rehearsal.world import Parts

SCHEDULES, ENOUGH = 300, 1000


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_hundreds_of_schedules_of_faults_violate_nothing() -> None:
    outcomes = [rehearse(seed) for seed in range(SCHEDULES)]
    assert [(outcome.seed, outcome.violation) for outcome in outcomes if outcome.violation] == []
    total = added_up(outcomes)
    for kind in ("lost", "late", "doubled", "cut off", "server restarted", "client restarted", "messages repaired"):
        assert total[kind] > SCHEDULES / 5, kind
    for kind in ("record torn", "record missing", "record not written", "checkpoint damaged", "clock jumped"):
        assert total[kind] > SCHEDULES / 50, kind


def test_the_same_seed_gives_the_same_history() -> None:
    first, again, other = (rehearse(seed, keep=True).lines for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_a_second_reply_to_the_same_contact_counts_after_a_crash() -> None:
    """Two processes answered one contact, and the second has a checkpoint of before: found by schedule 2474."""
    cast = next(cast for seed in range(100) if (cast := draw(Random(seed))).algorithm_name == "FedAvg")
    name, ticket = cast.names[0], bytes(messages.TICKET).hex()
    run = cast.welcome["run"]
    fresh = newcomers(cast.algorithm, *cast.tasks[name].initial(), torch.ones(1))
    reports = [Reported(run, steps, ticket, True, "lost", [], b"") for steps in (3, 6)]
    kept = {
        "run": run,
        "text": messages.as_text(cast.welcome).decode(),
        "client": replace(fresh, steps=fresh.steps + 3).tree(),
        "reported": messages.digest(log.to_bytes(reports[0])).hex(),
        "applied": False,
        "remembers": False,
        "given": None,
    }
    machine = ClientSide(name, cast.tasks[name], cast.terms, "1", kept=kept, reports=reports)
    machine.begin()
    (hello,) = (effect for effect in machine.happen(0.0, Woken()) if isinstance(effect, Do))
    machine.happen(0.1, Done(hello.number, messages.to_bytes(messages.Welcome(messages.as_text(cast.welcome)))))
    assert int(machine.client.steps) == 6


# Bugs, put in on purpose


class TookUnwritten(ServerSide):
    """A reply is taken, and acknowledged, without having been written down."""

    def _write(self, entry: Entry) -> Flow:
        if isinstance(entry, Took):
            self.on_entry(entry)
            return
        yield from super()._write(entry)


class TookLater(ServerSide):
    """A reply is taken before it is written down."""

    def _write(self, entry: Entry) -> Flow:
        if isinstance(entry, Took):
            self._spawn(super()._write(entry))
            return
        yield from super()._write(entry)


class GaveUnwritten(ServerSide):
    """What the algorithm is given is not written down."""

    def _write(self, entry: Entry) -> Flow:
        if isinstance(entry, Gave):
            self.on_entry(entry)
            return
        yield from super()._write(entry)


class AnyTicket(ServerSide):
    """A reply is taken for whatever its client owes."""

    def _settle(self, member: Member, message: Any, octets: Any) -> Flow:
        if member.owes and isinstance(message, messages.Reply):
            message = replace(message, ticket=member.owes)
        yield from super()._settle(member, message, octets)


class StillOwing(ServerSide):
    """A reply that was taken may be taken again."""

    def _take(self, member: Member, question: Question, opinion: Any, octets: Any) -> None:
        super()._take(member, question, opinion, octets)
        member.owes = question.ticket
        self._questions[question.ticket] = question


class ForgetsDebts(ServerSide):
    """A restart forgets who owes what."""

    def restore(self, state: dict[str, Any], entries: Any) -> None:
        super().restore({**state, "owes": {}}, entries)


class ForgetsArrivals(ServerSide):
    """A checkpoint leaves out replies that were taken, and wait for the algorithm."""

    def state(self) -> dict[str, Any]:
        return {**super().state(), "arrived": []}


class NoReceipts(ServerSide):
    """Clients are never told what was applied."""

    def _contact(self, question: Question, parcel: Parcel, asked: list[Member], *, whole: bool = False) -> bytes:
        receipts, made = [member.receipt for member in asked], b""
        for member in asked:
            member.receipt = b""
        made = super()._contact(question, parcel, asked, whole=whole)
        for member, receipt in zip(asked, receipts, strict=True):
            member.receipt = receipt
        return made


class EarlyReceipts(ServerSide):
    """Clients are told that a reply was applied when it has come."""

    def _take(self, member: Member, question: Question, opinion: Any, octets: Any) -> None:
        super()._take(member, question, opinion, octets)
        member.receipt = messages.digest(octets)


class OtherDraws(ServerSide):
    """A restart draws anew."""

    def restore(self, state: dict[str, Any], entries: Any) -> None:
        super().restore({**state, "rng": {}}, entries)


class SavesTooMuch(ServerSide):
    """A checkpoint while the journal of an earlier process is being read leaves out the rest of it."""

    def state(self) -> dict[str, Any]:
        return {**super().state(), "script": []}


class HearsAtOnce(ServerSide):
    """Clients are listened to while the journal of an earlier process is being read."""

    def _hear(self, event: Any) -> Flow:
        flow = super()._hear(event)
        if self._script:
            next(flow)  # it would wait
        yield from flow


class DropsWithoutCounting(ServerSide):
    """Late replies vanish."""

    def _drop(self, arrivals: list[Arrival]) -> None:
        self._arrived = [arrival for arrival in self._arrived if arrival not in arrivals]


class NoMark(ClientSide):
    """What is reported is not written down by the client."""

    def _reply(self, *args: Any, **kwargs: Any) -> Flow:
        flow, back = super()._reply(*args, **kwargs), None
        while True:
            try:
                wait = flow.send(back)
            except StopIteration as ended:
                return ended.value
            back = None if type(wait).__name__ == "Write" else (yield wait)


class TakesStepsAgain(ClientSide):
    """After a crash, steps that were reported are taken again."""

    def _restore(self, run: str, text: dict[str, Any], terms: Any) -> None:
        self._reports = tuple(replace(report, steps=0) for report in self._reports)
        super()._restore(run, text, terms)


class KeepsProgress(ClientSide):
    """After a crash, progress that may have been reported is reported again."""

    def _restore(self, run: str, text: dict[str, Any], terms: Any) -> None:
        if self._kept is not None and self._reports:
            name = messages.digest(log.to_bytes(self._reports[-1])).hex()
            self._kept = {**self._kept, "reported": name, "given": None}
        super()._restore(run, text, terms)


class NeverLost(ClientSide):
    """A client does not take back what was lost."""

    def _settled(self, receipt: bytes, terms: Any) -> Any:
        if self._given is not None:
            self._given = replace(self._given, up=None, pending=False)
        return self.client


class AlwaysLost(ClientSide):
    """A client takes everything back."""

    def _settled(self, receipt: bytes, terms: Any) -> Any:
        return super()._settled(b"", terms)


class AlwaysApplied(ClientSide):
    """A client remembers what was not applied, too."""

    def _resolved(self, client: Any, terms: Any, *, applied: bool) -> Any:
        return super()._resolved(client, terms, applied=True)


class ForgetsReplies(ClientSide):
    """What is to be remembered of a reply is not written down."""

    def _write_down(self, contact: Any, steps: int, octets: bytes, remembered: bool, repairs: Any) -> Flow:
        yield from super()._write_down(contact, steps, octets, False, repairs)


class RemembersWhatItSaid(ClientSide):
    """A client remembers its reply as it was said, and not as the server decodes it."""

    def _resolved(self, client: Any, terms: Any, *, applied: bool) -> Any:
        if self._given is not None and self._given.understood is not None and self._given.up is not None:
            self._given = replace(self._given, understood=self._given.up)
        return super()._resolved(client, terms, applied=applied)


class AnswersOldContacts(ClientSide):
    """A contact that was under way for long is answered, after newer ones."""

    def _contact(self, contact: Any) -> Flow:
        self._newest = b""
        return (yield from super()._contact(contact))


class JudgesItsOwn(ClientSide):
    def _look(self, mine: Any, terms: Any) -> Any:
        """A client judges the model that it has."""
        if self.client is not None:
            mine.model = self.client.base[0]
        yield from super()._look(mine, terms)


class WaitsForEver(ServerSide):
    def _ask_to_judge(self, member: Any, judgement: Any) -> Any:
        """A client that cannot be reached is waited for."""
        try:
            yield from super()._ask_to_judge(member, judgement)
        finally:
            if member.name not in judgement.scores:
                judgement.waiting.add(member.name)


def past_gaps(files: Iterable[bytes], after: int) -> list[bytes]:
    """Records after one that could not be written are believed."""
    found = [pair for octets in files for pair in journal._records(octets) if pair[0] > after]
    return [record for _, record in found]


BUGS = {
    **{
        bug.__name__: Parts(server=bug)
        for bug in (
            TookUnwritten,
            TookLater,
            GaveUnwritten,
            AnyTicket,
            StillOwing,
            ForgetsDebts,
            ForgetsArrivals,
            NoReceipts,
            EarlyReceipts,
            OtherDraws,
            SavesTooMuch,
            HearsAtOnce,
            DropsWithoutCounting,
            WaitsForEver,
        )
    },
    **{
        bug.__name__: Parts(client=bug)
        for bug in (
            NoMark,
            TakesStepsAgain,
            KeepsProgress,
            NeverLost,
            AlwaysLost,
            AlwaysApplied,
            ForgetsReplies,
            RemembersWhatItSaid,
            AnswersOldContacts,
            JudgesItsOwn,
        )
    },
    "past gaps": Parts(read=past_gaps),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_that_is_put_in_is_found(name: str) -> None:
    for seed in range(ENOUGH):
        found = rehearse(seed, BUGS[name])
        if found.violation:
            print(f"{name}: found after {seed + 1} schedules: {found.violation}")
            return
    pytest.fail(f"{name} was not found in {ENOUGH} schedules")
