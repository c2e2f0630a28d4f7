"""What travels and what is written down, as octets: messages, entries of the log, frames of the journal."""

import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import full_disk
from hypothesis import given
from hypothesis import strategies as st

from quafl.codec import Identity, wire
from quafl.codec.coders import Parcel
from quafl.codec.seams import WireError
from quafl.deploy.journal import Journal
from quafl.protocol import journal, log, messages
from quafl.protocol.messages import Contact, Message, Refused, Rejected, Repair, Reply, WantsAll
from quafl.record.checkpoints import Checkpoints

TICKETS = st.binary(min_size=messages.TICKET, max_size=messages.TICKET)

# Messages


@given(st.binary(max_size=300))
def test_whatever_arrives_is_a_message_or_a_wire_error(octets: bytes) -> None:
    try:
        message = messages.from_bytes(octets)
    except WireError:
        return
    assert messages.to_bytes(message) == octets


@given(st.integers(0, 20), st.binary(max_size=300))
def test_so_is_whatever_begins_like_one(kind: int, rest: bytes) -> None:
    octets = struct.pack("<4sBBH", messages.MAGIC, messages.VERSION, kind, 0) + rest
    test_whatever_arrives_is_a_message_or_a_wire_error.hypothesis.inner_test(octets)  # type: ignore[attr-defined]


@given(st.binary(max_size=50), st.integers(0, 2**63), st.integers(0, 2**32 - 1), TICKETS)
def test_messages_come_back_as_they_were(body: bytes, number: int, receipts: int, ticket: bytes) -> None:
    said: list[Message] = [
        Contact(ticket, number, True, receipts, body),
        Reply(ticket, -1, body),
        WantsAll(ticket),
        Repair(ticket, 3, body),
        Refused(body),
        Rejected(body),
    ]
    for message in said:
        assert messages.from_bytes(messages.to_bytes(message)) == message


@pytest.mark.parametrize(
    ("octets", "complaint"),
    [
        (b"QFED", "has 4 octets"),
        (b"XFED\x02\x02\0\0", "begins with b'XFED'"),
        (b"QFED\x01\x02\0\0", "version 1, this end speaks 5"),
        (b"QFED\x05\x63\0\0", "kind 99"),
        (b"QFED\x05\x01\0\0abc", "a Reply has 3 octets"),
        (b"QFED\x05\x02\0\0abc", "a Accepted has 3 octets"),
        (b"QFED\x05\x02\x01\0", "where zeros belong"),
    ],
)
def test_malformed_messages_are_named(octets: bytes, complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        messages.from_bytes(octets)


def test_a_parcel_comes_back_as_it_was_and_none_that_is_cut_off_does() -> None:
    packets = tuple(Identity().encode(torch.full((5,), float(n)), torch.Generator()) for n in range(2))
    octets = b"".join(messages.parcel_parts(Parcel(packets, (torch.tensor(2.5),)), [7.0]))
    parcel, more = messages.parcel_from(octets, 2, 1, 1)
    assert [float(number) for number in parcel.numbers] == [2.5]
    assert more == [7.0]
    assert [wire.to_bytes(packet) for packet in parcel.packets] == [wire.to_bytes(packet) for packet in packets]
    for length in range(len(octets)):
        with pytest.raises(WireError):
            messages.parcel_from(octets[:length], 2, 1, 1)
    with pytest.raises(WireError, match="expected"):
        messages.parcel_from(octets + b"\0", 2, 1, 1)
    with pytest.raises(WireError, match="2 vectors and 2 numbers, expected"):
        messages.parcel_from(octets, 1, 1, 1)


def test_a_not_finite_packet_is_refused_before_it_is_decoded() -> None:
    packet = bytearray(wire.to_bytes(Identity().encode(torch.zeros(3000), torch.Generator())))
    packet[60:64] = torch.tensor([torch.nan]).numpy().tobytes()
    with pytest.raises(WireError):
        wire.from_bytes(packet)


@given(st.dictionaries(st.text(min_size=1, max_size=8), TICKETS, max_size=5))
def test_each_client_finds_its_own_receipt(receipts: dict[str, bytes]) -> None:
    octets = messages.receipts_to_bytes(receipts)
    for name, receipt in receipts.items():
        assert messages.receipt_for(name, octets) == receipt
    assert messages.receipt_for("somebody whose name is longer", octets) == b""


# The log

ENTRIES: list[log.Entry] = [
    log.Joined("a"),
    log.Looked([0, 2], 3, 1.5),
    log.Took.made("a", b"t" * 16, b"a reply", [b"a repair", b"", b"another"], whole=False),
    log.Gave([["a", "74" * 16]], [1]),
]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: type(entry).__name__)
def test_entries_come_back_as_they_were_and_none_that_is_cut_off_is_another_s(entry: log.Entry) -> None:
    octets = log.to_bytes(entry)
    again = log.from_bytes(octets)
    assert log.to_bytes(again) == octets
    assert type(again) is type(entry)
    if isinstance(again, log.Took):
        reply, repairs = again.parts
        assert (bytes(reply), [bytes(bits) for bits in repairs]) == (b"a reply", [b"a repair", b"", b"another"])
    with pytest.raises(WireError):
        log.from_bytes(octets[:5])


@given(st.binary(max_size=80))
def test_no_octets_in_a_record_raise_anything_but_a_wire_error(octets: bytes) -> None:
    with suppress(WireError):
        log.from_bytes(octets)


# The journal


def filled(folder: Path, *segments: list[bytes]) -> None:
    """A journal of these segments; a checkpoint lies between two."""
    made, number = Journal(folder), 0
    for segment in segments:
        made.begin_segment()
        for record in segment:
            number += 1
            made.append(number, record)
    made.close()


def reread(folder: Path, after: int) -> list[bytes]:
    """What another process finds."""
    made = Journal(folder)
    made.close()
    return made.records(after)


def last_file(folder: Path) -> Path:
    """That has something in it."""
    return max(path for path in folder.iterdir() if path.stat().st_size)


def test_a_journal_remembers_across_processes_and_cuts_off_what_was_not_finished(tmp_path: Path) -> None:
    filled(tmp_path, [b"one", b"two"], [b"three", b"four"])
    assert reread(tmp_path, 0) == [b"one", b"two", b"three", b"four"]
    path = last_file(tmp_path)
    path.write_bytes(path.read_bytes()[:-2])
    again = Journal(tmp_path)
    assert again.records(after=1) == [b"two", b"three"]
    assert again.number == 3
    again.append(4, b"another")
    again.close()
    assert reread(tmp_path, 2) == [b"three", b"another"]


def test_a_torn_record_hides_nothing_before_it_and_none_after_the_gap_is_read(tmp_path: Path) -> None:
    """A record torn by a full disk once hid all those after it that were whole, without anybody noticing. Now records
    have numbers: what follows a missing one was written without what it stands on, and reading ends there."""
    filled(tmp_path, [b"one", b"two", b"three"], [b"four"])
    first = min(tmp_path.iterdir())
    octets = bytearray(first.read_bytes())
    octets[-1] ^= 1  # of "three"
    first.write_bytes(octets)
    again = Journal(tmp_path)
    assert again.records(after=0) == [b"one", b"two"]
    assert again.records(after=3) == [b"four"]  # a checkpoint at three needs no three
    assert again.number == 4  # no number is given twice
    again.close()


def test_a_torn_first_record_of_a_file_does_not_hide_what_is_written_to_it_later(tmp_path: Path) -> None:
    filled(tmp_path, [b"one"], [b"two"])
    path = last_file(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    again = Journal(tmp_path)
    again.append(2, b"again")
    again.close()
    assert reread(tmp_path, 0) == [b"one", b"again"]


@pytest.mark.parametrize("length", [2**63 + 5, 2**40, 2**64 - 1])
def test_a_garbage_length_does_not_keep_the_server_from_starting(tmp_path: Path, length: int) -> None:
    """It once was believed, and the read of so many octets failed with an OverflowError or MemoryError, at every
    start."""
    filled(tmp_path, [b"one"])
    with last_file(tmp_path).open("ab") as stream:
        stream.write(struct.pack("<QQI", 2, length, 0) + b"rest")
    again = Journal(tmp_path)
    assert again.records(after=0) == [b"one"]
    again.append(2, b"two")
    again.close()
    assert reread(tmp_path, 0) == [b"one", b"two"]


@given(st.lists(st.binary(max_size=20), max_size=4), st.integers(0, 200), st.binary(max_size=30))
def test_whatever_happens_to_the_end_of_a_file_the_records_before_it_are_read(
    records: list[bytes], keep: int, garbage: bytes
) -> None:
    frames = [journal.frame(number, record) for number, record in enumerate(records, 1)]
    octets = b"".join(frames)[:keep] + garbage
    whole = sum(keep >= len(b"".join(frames[: count + 1])) for count in range(len(frames)))
    assert journal.read([octets], after=0)[:whole] == records[:whole]


def test_a_record_that_could_not_be_written_leaves_a_gap_and_not_half_a_record(tmp_path: Path) -> None:
    made = Journal(tmp_path)
    made.append(1, b"one")
    path = last_file(tmp_path)
    size = path.stat().st_size
    with full_disk(size + 10), pytest.raises(OSError, match="File too large"):
        made.append(2, b"two")
    assert path.stat().st_size == size
    made.append(3, b"three")
    made.close()
    assert reread(tmp_path, 0) == [b"one"]
    assert reread(tmp_path, 2) == [b"three"]


def test_what_no_kept_checkpoint_needs_is_forgotten(tmp_path: Path) -> None:
    made, number = Journal(tmp_path), 0
    for _ in range(10):
        for _ in range(5):
            number += 1
            made.append(number, b"record")
        made.begin_segment()
        made.forget(number)
        for behind in (0, 5, 10)[: number // 5]:  # the last checkpoints
            assert len(made.records(after=number - behind)) == behind
    assert len(list(tmp_path.iterdir())) <= 4
    made.close()


# Checkpoints


def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Checkpoints(tmp_path)
    assert kept.newest() is None
    for number in range(5):
        kept.save({"number": number, "tensor": torch.full((1000,), float(number))})
    files = sorted(tmp_path.iterdir())
    assert len(files) == Checkpoints.KEPT
    damage(files[-1])
    newest: Any = kept.newest()
    assert newest["number"] == 3
    assert "checksum" in caplog.text


def damage(path: Path) -> None:
    octets = bytearray(path.read_bytes())
    octets[len(octets) // 2] ^= 1
    path.write_bytes(octets)
