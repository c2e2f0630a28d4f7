"""Federations for real but for the network: drivers, threads, clocks, files. What the machines themselves promise is in
`test_server_side`, `test_client_side` and `test_restarts`."""

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from threading import Event
from time import sleep

import pytest
import torch
from federations import PROMPT, Client, Federation, Server, federation, full_disk
from stages import DIM, Steps, problem, steps_task
from torch import Tensor
from waiting import wait_for

from quafl import FedAvg, FedBuff, Lattice, QuAFL, momentum, sgd
from quafl.codec import QSGD, Identity
from quafl.codec.coders import coders_for
from quafl.codec.seams import Codec
from quafl.core.fedasync import FedAsync
from quafl.core.messages import Buffers, Model
from quafl.core.scaffold import SCAFFOLD
from quafl.core.seams import Algorithm
from quafl.deploy.carrier import Loop
from quafl.deploy.client import JOURNAL, kept_in
from quafl.deploy.journal import Journal
from quafl.deploy.server import FORMAT, Coordinator, Goals
from quafl.protocol import journal, log, messages
from quafl.protocol.layout import digest_of
from quafl.protocol.messages import Contact, Refinement, Refused, Repair, Reply
from quafl.record.checkpoints import Checkpoints
from quafl.record.summary import RunError
from quafl.run.parties import ServerRun
from quafl.settings.federation import FederationSettings

TIGHT = Lattice(bits=4, spread=2.5)  # many messages need a repair
ALGORITHMS: dict[str, tuple[Algorithm, Codec]] = {
    "QuAFL": (QuAFL(sampled=2, local_steps=4, wait=0.01, patience=5.0), Lattice(bits=4)),
    "QuAFL weighted": (QuAFL(sampled=2, local_steps=4, wait=0.01, patience=5.0, weighted=True), Lattice(bits=4)),
    "QuAFL with repairs": (QuAFL(sampled=2, local_steps=4, wait=0.01, patience=5.0), TIGHT),
    "FedAvg": (FedAvg(sampled=2, local_steps=4, patience=5.0), Lattice(bits=6)),
    "FedBuff": (FedBuff(sampled=2, local_steps=4, patience=5.0), QSGD(bits=8)),
    "SCAFFOLD, lattice": (SCAFFOLD(sampled=2, local_steps=4, lr=0.3, patience=5.0), Lattice(bits=6)),
    "SCAFFOLD, QSGD": (SCAFFOLD(sampled=2, local_steps=4, lr=0.3, patience=5.0), QSGD(bits=8)),
    # without repairs: one that is under way when the run ends is nobody's
    "FedAsync, lattice": (FedAsync(sampled=2, local_steps=4, patience=5.0), Lattice(bits=6, spread=6.0)),
    "FedAsync, QSGD": (FedAsync(sampled=2, local_steps=4, patience=5.0), QSGD(bits=8)),
}
EVERY = pytest.mark.parametrize(("algorithm", "codec"), ALGORITHMS.values(), ids=ALGORITHMS.keys())
NEW = {name: pair for name, pair in ALGORITHMS.items() if name.startswith(("SCAFFOLD", "FedAsync"))}


def travelled(said: list[tuple[str, bytes]], algorithm: Algorithm) -> int:
    """Octets of the packets in these messages."""
    records, total = algorithm.records, 0
    for _, octets in said:
        match messages.from_bytes(octets):
            case Contact() as contact:
                down, body = records.down, contact.body[contact.receipts :]
                total += messages.parcel_from(body, len(down.vectors()), len(down.numbers()))[0].nbytes
            case Reply() as reply:
                up, more = records.up, len(records.down.vectors())
                total += messages.parcel_from(reply.body, len(up.vectors()), len(up.numbers()), more)[0].nbytes
            case Repair() | Refinement() as repair:
                total += len(repair.body)
    return total


@EVERY
def test_finds_the_minimum_and_counts_every_octet(tmp_path: Path, algorithm: Algorithm, codec: Codec) -> None:
    with federation(tmp_path, algorithm, codec, sgd(0.3)) as made:
        run = made.coordinator(problem(), Goals(rounds=40, every=0.2))
        for number in range(4):
            made.join(f"client-{number}", problem(), step_seconds=0.001)
        assert run.run()
        rows, totals = run.evaluations.rows, made.machine.totals
        assert rows[-1]["distance"] < 0.3 * rows[0]["distance"]
        assert totals.lost == 0
        assert totals.contacts == 40 * (1 if isinstance(algorithm, FedAsync) else 2)
        wait_for(lambda: all(client.machine.finished for client in made.clients.values()))
        assert totals.steps <= sum(client.steps for client in made.clients.values())
        assert totals.down == travelled(made.asked, algorithm)
        wait_for(lambda: totals.up == travelled(made.heard, algorithm))  # one may be on its way in when the run ends
    for name in "steps", "up", "down", "refined":
        assert sum(getattr(member, name) for member in run.members) == getattr(totals, name), name
    if codec == TIGHT:
        assert totals.refined > 0


def test_the_clients_train_with_their_own_optimizer_state(tmp_path: Path) -> None:
    with federation(tmp_path, QuAFL(sampled=2, wait=0.01, patience=5.0), Lattice(bits=8), momentum(0.05)) as made:
        run = made.coordinator(problem(), Goals(rounds=40))
        for number in range(2):
            made.join(f"client-{number}", problem(), step_seconds=0.001)
        assert run.run()
        rows = run.evaluations.rows
        assert rows[-1]["distance"] < 0.3 * rows[0]["distance"]


class Blocked(Steps):
    """A task whose later gradients take until they are let go."""

    __slots__ = ()
    gate = Event()

    def gradient(self, model: Model, buffers: Buffers, batch: tuple[int, Tensor]) -> tuple[Model, Buffers]:
        if batch[1][2]:
            self.gate.wait(20.0)
        return super().gradient(model, buffers, batch)


def test_a_contact_does_not_wait_for_a_gradient_that_is_being_computed(tmp_path: Path) -> None:
    slow = Blocked(torch.ones(200), torch.zeros(1, 200))
    with federation(
        tmp_path, QuAFL(sampled=1, local_steps=50, wait=0.05, patience=5.0), QSGD(bits=8), sgd(1.0)
    ) as made:
        run = made.coordinator(slow, Goals(rounds=10))
        client = made.join("a", slow)
        assert run.run()
        assert client.steps == 2
        slow.gate.set()
        assert made.machine.totals.lost == 0


# Restarts


def crash(made: Federation, server: Server) -> Coordinator:
    """At once; nothing more is saved."""
    made.crash()
    assert server.ends == [False]
    return server.coordinator


def test_a_stopped_server_goes_on_where_it_was(tmp_path: Path) -> None:
    with federation(tmp_path, QuAFL(sampled=1, wait=0.01, patience=5.0), Lattice(bits=4), sgd(0.2)) as made:
        server = made.serve(problem(), Goals(rounds=10**6, checkpoint_seconds=1e6))
        made.join("a", problem(), step_seconds=0.001)
        server.reach(10)
        before = crash(made, server)
        again = made.coordinator(problem(), Goals(rounds=before.server.round + 10))
        assert again.server.round < before.server.round  # its checkpoint is older
        assert again.evaluations.rows == before.evaluations.rows[:1]
        models: dict[int, Tensor] = {}
        made.machine.on_entry = lambda entry: models.update({again.server.round: again.server.model})
        assert again.run()
        assert torch.equal(models[before.server.round], before.server.model)  # from the journal, bit for bit
        assert again.server.round == before.server.round + 10
        assert made.machine.totals.contacts >= before.server.round + 10


def test_a_run_that_is_over_is_not_run_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quafl")
    with federation(tmp_path, QuAFL(sampled=1, wait=0.01, patience=5.0), Lattice(bits=4), sgd(0.2)) as made:
        run = made.coordinator(problem(), Goals(rounds=5))
        made.join("a", problem())
        assert run.run()
        again = made.coordinator(problem(), Goals(rounds=5))
        assert again.evaluations.rows == run.evaluations.rows
        assert torch.equal(again.server.model, run.server.model)
        assert again.run()
        assert "this run is over already" in caplog.text


@pytest.mark.parametrize(("algorithm", "codec"), NEW.values(), ids=NEW.keys())
def test_learns_and_resumes_after_a_server_s_crash_and_a_client_s(
    tmp_path: Path, algorithm: Algorithm, codec: Codec
) -> None:
    with federation(tmp_path, algorithm, codec, sgd(0.3)) as made:
        server = made.serve(problem(), Goals(rounds=10**6, checkpoint_seconds=0.05))
        for number in range(3):
            made.join(f"client-{number}", problem(), step_seconds=0.001, checkpoint_seconds=0.05)
        server.reach(8)
        before = crash(made, server)
        made.clients["client-0"].kill()
        again = made.serve(problem(), Goals(rounds=before.server.round + 40))
        made.join("client-0", problem(), step_seconds=0.001)
        again.join(40.0)
        assert again.ends == [True]
        rows, run = again.coordinator.evaluations.rows, again.coordinator
        biased = isinstance(algorithm, SCAFFOLD)  # `test_restarts` says why: a killed client's c_i is still in c
        assert rows[-1]["distance"] < (0.95 if biased else 0.3) * rows[0]["distance"]
        assert run.server.round == before.server.round + 40
        assert all(member.contacts > 0 for member in run.members), (run.members, before.members)
        assert applied_once(tmp_path)


def applied_once(folder: Path) -> bool:
    """What the journal has of what the algorithm was given."""
    files = sorted((folder / "journal").glob("journal-*.bin"))
    records = [record for path in files for _, record in journal._records(path.read_bytes())]
    entries = [log.from_bytes(record) for record in records]
    given = [tuple(one) for entry in entries if isinstance(entry, log.Gave) for one in entry.replies]
    assert given
    return len(given) == len(set(given))


def damage(path: Path) -> None:
    octets = bytearray(path.read_bytes())
    octets[len(octets) // 2] ^= 1
    path.write_bytes(octets)


def stop_cleanly(client: Client, folder: Path) -> None:
    client.stop()
    assert client.well


def kill_nine(client: Client, folder: Path) -> None:
    client.kill()


def damage_newest(client: Client, folder: Path) -> None:
    client.kill()
    if files := sorted(folder.glob("checkpoint-*.pt")):
        damage(files[-1])


def damage_all(client: Client, folder: Path) -> None:
    client.kill()
    for path in folder.glob("checkpoint-*.pt"):
        damage(path)


@pytest.mark.parametrize("end", [stop_cleanly, kill_nine, damage_newest, damage_all])
def test_from_its_files_a_client_never_reports_a_step_twice(
    tmp_path: Path, end: Callable[[Client, Path], None]
) -> None:
    """In FedBuff the server's model is minus the sum of all displacements that were applied, and the gradient of step k
    is the k-th unit vector: −w_k is how often step k was applied. It was four times once."""
    task = steps_task(5000)
    algorithm = FedBuff(sampled=1, local_steps=3, patience=0.3)
    with federation(tmp_path, algorithm, Identity(), sgd(1.0)) as made:
        server = made.serve(task, Goals(rounds=10**6, checkpoint_seconds=1e6))
        for number in range(4):
            client = made.join("a", task, step_seconds=0.002, checkpoint_seconds=0.03)
            server.reach(server.round + 5)
            end(client, tmp_path / "a")
            assert any((tmp_path / "a" / JOURNAL).iterdir()), number
        applied = -crash(made, server).server.model
    assert set(applied.tolist()) == {0.0, 1.0}
    assert applied.sum() >= 50


def test_a_server_starts_again_with_other_settings_and_more_places(tmp_path: Path) -> None:
    algorithm = QuAFL(sampled=1, wait=0.01, patience=5.0)
    with federation(tmp_path, algorithm, Lattice(bits=4), sgd(0.2), replace(PROMPT, clients=1)) as made:
        server = made.serve(problem(), Goals(rounds=10**6, checkpoint_seconds=0.0))
        made.join("a", problem(), step_seconds=0.001)
        server.reach(10)
        crash(made, server)
        made.terms = made.terms._replace(coders=coders_for(algorithm, Lattice(bits=8)), optimizer=momentum(0.02))
        made.limits = replace(PROMPT, clients=3)
        made.text = {"run": "test", "codec": "another"}
        run = made.coordinator(problem(), Goals(rounds=10**6))
        known = [member.contacts for member in run.members]
        made.server = Server(run)
        for name in ("b", "c"):
            made.join(name, problem(), step_seconds=0.001)

        def answered() -> list[bool]:
            more = zip_longest([member.contacts for member in run.members], known, fillvalue=0)
            return [now > before for now, before in more]

        wait_for(lambda: answered() == [True] * 3, otherwise=lambda: str(answered()))
        assert made.clients["a"].machine.failure is None


def test_a_client_with_a_full_disk_does_not_exit_when_the_server_comes_back_with_new_settings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It once did: it wanted to save the state of the old settings, and ended with the OSError."""
    with federation(tmp_path, QuAFL(sampled=1, wait=0.01, patience=5.0), Lattice(bits=4), sgd(0.2)) as made:
        server = made.serve(problem(), Goals(rounds=10**6))
        client = made.join("a", problem(), step_seconds=0.001, checkpoint_seconds=0.02)
        server.reach(5)
        crash(made, server)
        made.text = {"run": "test", "optimizer": "another"}
        made.terms = made.terms._replace(optimizer=momentum(0.02))
        with full_disk(0):
            server = made.serve(problem(), Goals(rounds=10**6, checkpoint_seconds=1e6))
            wait_for(lambda: client.machine._text.get("optimizer") == "another")
            wait_for(lambda: "no checkpoint could be written" in caplog.text)
            assert client.is_alive()
        before = server.round
        wait_for(lambda: server.round > before + 5)
        assert made.machine.totals.contacts > 5
        assert client.machine.failure is None


def test_a_full_disk_at_the_server_goes_on_applying_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It once applied nothing at all: a reply that could not be written down was dropped."""
    with federation(tmp_path, QuAFL(sampled=1, wait=0.01, patience=5.0), Lattice(bits=4), sgd(0.2)) as made:
        server = made.serve(problem(), Goals(rounds=10**6, checkpoint_seconds=0.2))
        made.join("a", problem(), step_seconds=0.001)
        server.reach(3)
        with full_disk(8000):  # what a client has reported has less, what the server has heard has more
            wait_for(lambda: "the journal cannot be written (File too large)" in caplog.text)
            wait_for(lambda: "no checkpoint could be written" in caplog.text)
            contacts, distance = made.machine.totals.contacts, float(server.coordinator.server.model.mean())
            wait_for(lambda: made.machine.totals.contacts > contacts + 20)
            assert float(server.coordinator.server.model.mean()) > distance
        again = server.round
        server.reach(again + 30)
        sleep(0.5)  # a checkpoint is made again
        before = crash(made, server)
        run = made.coordinator(problem(), Goals(rounds=before.server.round + 5))
        assert run.server.round > again  # what was not written down is in the checkpoint
        assert run.run()
        assert applied_once(tmp_path)


def test_a_disk_that_takes_nothing_ends_neither_server_nor_client(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with federation(tmp_path, QuAFL(sampled=1, wait=0.01, patience=5.0), Lattice(bits=4), sgd(0.2)) as made:
        run = made.coordinator(problem(), Goals(rounds=40, checkpoint_seconds=0.0))
        (tmp_path / "checkpoints").write_text("a file, where a folder should be")
        client = made.join("a", problem(), checkpoint_seconds=0.05)
        for part in ("checkpoint.new", "checkpoint.new.part"):
            (tmp_path / "a" / part).mkdir()
        assert run.run()
        assert run.server.round == 40
        wait_for(lambda: not client.is_alive())
        assert client.well
    for part in ("deploy.server", "deploy.client"):
        assert any(
            part in record.name and "no checkpoint could be written" in record.message for record in caplog.records
        )


# Coming and going


def test_a_run_ends_in_time_even_if_nobody_is_there(tmp_path: Path) -> None:
    with federation(tmp_path, QuAFL(sampled=2, wait=0.01, patience=1.0), Lattice(bits=4), sgd(0.2)) as made:
        server = made.serve(problem(), Goals(until=2.0))
        client = made.join("a", problem())
        server.reach(1)
        client.stop()
        server.join(10.0)
        assert server.ends == [True]
        run = server.coordinator
        assert run.evaluations.rows[-1]["round"] == run.server.round > 0
        assert made.coordinator(problem(), Goals(until=1.0)).run()


def test_waiting_for_clients_ends_when_asked_to_stop_or_when_time_is_up(tmp_path: Path) -> None:
    with federation(tmp_path, QuAFL(sampled=2), Lattice(bits=4), sgd(0.2)) as made:
        server = made.serve(problem(), Goals())
        sleep(0.2)
        crash(made, server)
        run = made.coordinator(problem(), Goals(until=0.3))
        assert run.run()
        assert run.server.round == 0


def test_a_client_that_is_stopped_tells_the_server_and_its_carrier_is_not_kept_waiting(tmp_path: Path) -> None:
    with federation(tmp_path, QuAFL(sampled=1, wait=0.01, patience=1.0), Lattice(bits=4), sgd(0.2)) as made:
        server = made.serve(problem(), Goals(rounds=10**6))
        client = made.join("a", problem())
        server.reach(3)
        client.stop()
        wait_for(lambda: made.service.call(lambda machine: not machine.members.live(machine.now)))  # type: ignore[union-attr]
        answer = messages.from_bytes(
            client.driver.hear(made.asked[-1][1])
        )  # a thread of the carrier was stuck here once
        assert isinstance(answer, Refused)
        crash(made, server)


class Raising(Steps):
    __slots__ = ()

    def gradient(self, model: Model, buffers: Buffers, batch: tuple[int, Tensor]) -> tuple[Model, Buffers]:
        raise FileNotFoundError("data.csv")


def test_a_task_that_raises_ends_its_client_with_the_reason_and_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with federation(tmp_path, QuAFL(sampled=2, wait=0.01, patience=1.0), Lattice(bits=4), sgd(0.2)) as made:
        run = made.coordinator(problem(), Goals(rounds=30))
        made.join("good", problem())
        bad = made.join("bad", Raising(torch.ones(DIM), torch.zeros(1, DIM)))
        assert run.run()
        wait_for(lambda: not bad.is_alive())
        assert bad.well is False
        assert "this client cannot take part: data.csv" in caplog.text


# What earlier versions have left


def old_server(folder: Path) -> None:
    """As it was written before: no format, the fleet's state, no machine's."""
    state = {"model": torch.zeros(650), "buffers": torch.empty(0), "round": 3, "distance": 0.0, "extra": {}}
    Checkpoints(folder / "checkpoints").save(
        {
            "rng": {},
            "clock": {"seconds": 3.0},
            "fleet": {"totals": {}, "serial": 3, "usual": {}, "members": {}, "owing": {}},
            "made_with": {"run": "0" * 32, "algorithm": "quafl"},
            "server": state,
            "best": state,
            "best_worth": 0.1,
            "rows": [],
            "due": 10.0,
        }
    )
    (folder / "journal.bin").write_bytes(b"an old journal")


def reordered_server(folder: Path) -> None:
    """A run of as many parameters, in another order."""
    made_with = {"run": "0" * 32, "algorithm": "quafl", "layout": digest_of(("another 4810",))}
    Checkpoints(folder / "checkpoints").save({"format": FORMAT, "made_with": made_with})
    (folder / "journal.bin").write_bytes(b"its journal")


@pytest.mark.parametrize(
    ("leave", "complaint"),
    [
        (old_server, "holds a run of an earlier version of quafl; choose another --out"),
        (reordered_server, "holds a run of a model with other tensors, or with the same in another order; choose"),
    ],
)
def test_a_run_folder_that_does_not_fit_is_refused_with_one_sentence(
    tmp_path: Path, leave: Callable[[Path], None], complaint: str
) -> None:
    leave(tmp_path)
    settings = FederationSettings.model_validate(
        {"task": {"make": "quafl.tasks.demo:digits_of"}, "algorithm": {"name": "quafl", "lr": 0.1, "patience": 5.0}}
    )
    loop = Loop("carrier")
    try:
        with pytest.raises(RunError, match=complaint):
            ServerRun(Nobody(), loop, settings, tmp_path, Event())
    finally:
        loop.close()
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", "journal.bin"}  # it is left as it was


@pytest.mark.parametrize("wrong", [{"metric": "acuracy"}, {"metric": "auc", "stop_at_target": True}], ids=str)
def test_a_metric_that_the_server_does_not_measure_is_refused_before_anybody_is_heard(
    tmp_path: Path, wrong: dict[str, object]
) -> None:
    algorithm = {"name": "quafl", "lr": 0.1, "patience": 5.0}
    settings = FederationSettings.model_validate(
        {"task": {"make": "quafl.tasks.demo:digits_of"}, "algorithm": algorithm, "run": wrong}
    )
    loop = Loop("carrier")
    try:
        with pytest.raises(RunError, match=r"the metric is 'a\w+', the task measures loss, accuracy; choose one of"):
            ServerRun(Nobody(), loop, settings, tmp_path, Event())
    finally:
        loop.close()


class Nobody:
    """A carrier to nowhere."""

    async def ask(self, name: str, octets: bytes, within: float) -> bytes:
        raise AssertionError("nobody is asked")


def test_an_old_client_folder_is_warned_about_and_the_server_brings_the_client_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"base": torch.ones(1, DIM), "steps": torch.ones(1, dtype=torch.int64)}
    Checkpoints(tmp_path / "a").save(
        {"run": "test", "text": "{}", "clean": True, "state": state, "rng": {}, "given": None}
    )
    with federation(tmp_path, QuAFL(sampled=1, wait=0.01, patience=5.0), Lattice(bits=4), sgd(0.2)) as made:
        run = made.coordinator(problem(), Goals(rounds=5))
        made.join("a", problem())
        assert f"{tmp_path / 'a'} holds a checkpoint of an earlier version; the server brings" in caplog.text
        assert run.run()
        assert run.members[0].contacts == 5


@pytest.mark.parametrize("octets", [b"", b"{", b"\x07\x02\x00\x00\x00{}", b"\x63\x02\x00\x00\x00{}"])
def test_a_journal_that_cannot_be_read_is_said_and_the_server_brings_the_client_back(
    tmp_path: Path, octets: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path / JOURNAL)
    journal.append(1, octets)
    journal.close()
    Checkpoints(tmp_path).save({"run": "test", "client": {}, "reported": ""})
    assert kept_in(tmp_path) == (None, [])
    assert "cannot be read" in caplog.text
