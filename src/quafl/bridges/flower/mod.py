"""The client's end: a mod."""

from logging import getLogger
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import Tensor

from quafl.bridges.contact import Answer, Kept, arrive, check_runs_here, depart, up_coder
from quafl.bridges.flower.arrays import (
    ALGORITHM,
    IN_FULL,
    LOCAL_STEPS,
    NEAR,
    OCTETS,
    PRECONDITION,
    RECEIPT,
    RECORD,
    STEPS,
    STYPE,
    VERSION,
    encoded_record,
    floats_of,
    layout_in,
    numbers_of,
    octets_of,
    others_of,
    record_like,
    stating_answer,
    without_ours,
)
from quafl.bridges.records import FULL, LostError, Sent, check_bits, check_layout, fingerprint, hear, short, tell
from quafl.codec.coders import Coder
from quafl.codec.difference import Difference
from quafl.codec.messages import flattened, name_of
from quafl.codec.seams import DecodeError, WireError
from quafl.core.randomness import derive
from quafl.core.seams import Algorithm

_log = getLogger(__name__)

Shown = dict[str, tuple[ArrayRecord, dict[str, Tensor]]]  # by key: what a client has heard, and its floats


def quafl_mod(algorithm: Algorithm | None = None, *, bits: int = 4) -> Mod:
    """A mod that decodes what the server's strategy has encoded, and encodes the answer in `bits` a parameter.

    It goes first among the mods, so that the others see models. With an `algorithm`, the one of the server's
    `Federated`, it plays that one's client. What it keeps is in the Context's state: the model that was heard last, and
    what the algorithm remembers.
    """
    check_bits(bits)
    coder = None
    if algorithm is not None:
        check_runs_here(algorithm)
        coder = up_coder(algorithm, Difference(bits=bits))

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if not message.has_content() or not (message.content.array_records or RECORD in message.content):
            return call_next(message, context)
        try:
            said = _heard_said(message, algorithm)
            before = _held(context)
            shown = _shown(message.content, said, before)
        except LostError as lost:
            _log.warning("this client asks for the model in full: %s", lost)
            return Message(RecordDict({RECORD: ConfigRecord({IN_FULL: str(lost)})}), reply_to=message)
        except (WireError, DecodeError, ValueError) as error:
            return _failed(message, error)
        for key, (record, _) in shown.items():
            context.state[f"{RECORD} {key}"] = record
        message.content = RecordDict(
            {**without_ours(message.content), **{key: record for key, (record, _) in shown.items()}}
        )
        try:
            if algorithm is None or coder is None or ALGORITHM not in said:
                reply = call_next(message, context)
                return reply if reply.has_error() else _answered(reply, shown, bits, context.node_id)
            return _taken_part(message, context, call_next, algorithm, coder, said, shown, before)
        except (WireError, DecodeError, ValueError) as error:
            return _failed(message, error)

    return mod


def _heard_said(message: Message, algorithm: Algorithm | None) -> ConfigRecord:
    """What the server says beside its records."""
    said = message.content.config_records.get(RECORD)
    if said is None:
        raise ValueError(
            "the server sent a model without saying that it reads quantized answers; wrap its strategy in "
            "quafl.bridges.flower.Compressed, or take quafl_mod away"
        )
    if said.get("version") != VERSION:
        raise ValueError(
            f"the server's messages have version {said.get('version')!r}, expected {VERSION}; upgrade the older end"
        )
    mine = type(algorithm).__name__ if algorithm is not None else "no algorithm"
    theirs = str(said.get(ALGORITHM, "no algorithm"))
    if mine != theirs and (theirs != "no algorithm" or message.metadata.message_type == MessageType.TRAIN):
        raise ValueError(f"the server runs {theirs}, quafl_mod has {mine}; give both the same algorithm")
    return said


def _held(context: Context) -> Shown:
    """What was heard before."""
    mine = {
        key.removeprefix(f"{RECORD} "): record
        for key, record in context.state.array_records.items()
        if key.startswith(f"{RECORD} ")
    }
    return {key: (record, floats_of(record)) for key, record in mine.items()}


def _shown(content: RecordDict, said: ConfigRecord, held: Shown) -> Shown:
    """The server's records, decoded."""
    shown = {}
    for key, record in content.array_records.items():
        how, name, layout = _strings(said, f"record {key}")
        if how == FULL:
            floats = floats_of(record)
            if fingerprint(floats) != name:
                raise WireError(f"record {key!r} is not what the server says that it is; was it changed on the way?")
            shown[key] = (record, floats)
            continue
        mine, before = held.get(key, (None, None))
        if mine is not None and short(layout_in(mine)) != layout:
            raise LostError(f"the model held here for {key!r} has other arrays")
        octets = octets_of(record) if OCTETS in record else b""
        floats = hear(Sent(how, name, octets), before)
        assert mine is not None
        shown[key] = (record_like(mine, floats, record), floats)
    return shown


def _strings(said: ConfigRecord, key: str) -> tuple[str, str, str]:
    told = said.get(key)
    if not isinstance(told, list) or len(told) != 3:
        raise WireError(f"nothing is said about {key!r}; does another mod or strategy add records after ours?")
    return str(told[0]), str(told[1]), str(told[2])


def _answered(reply: Message, shown: Shown, bits: int, node: int) -> Message:
    """The reply with its models encoded, each as a difference from what was heard."""
    said = ConfigRecord({"version": VERSION, **{f"heard {key}": fingerprint(own) for key, (_, own) in shown.items()}})
    content = RecordDict(dict(reply.content.items()))
    for key, record in reply.content.array_records.items():
        near = (
            key if key in shown else next((one for one in shown if layout_in(shown[one][0]) == layout_in(record)), None)
        )
        if near is None:
            continue  # a record that is near to nothing travels as it is
        heard, base = shown[near]
        check_layout(layout_in(heard), layout_in(record), f"the answer's record {key!r}")
        floats = floats_of(record)
        if not floats:
            continue
        octets = tell(floats, base, bits, derive("up", node, key, fingerprint(base), fingerprint(floats)))
        content[key] = encoded_record(octets, others_of(record, floats))
        said[f"record {key}"] = near
    content[RECORD] = said
    reply.content = content
    return reply


def _taken_part(
    message: Message,
    context: Context,
    call_next: ClientAppCallable,
    algorithm: Algorithm,
    coder: Coder,
    said: ConfigRecord,
    shown: Shown,
    before: Shown,
) -> Message:
    """A contact of the algorithm's, around the user's training."""
    ((key, (record, heard)),) = shown.items()
    down = _down(algorithm, heard, numbers_of(said))
    held = before.get(key)
    earlier = None if held is None else _down(algorithm, held[1], numbers_of(said))
    kept = _kept(context)
    client = arrive(algorithm, coder, kept, str(said.get(RECEIPT, "")), down, earlier)
    reply = call_next(message, context)
    if reply.has_error():
        return reply
    trained = reply.content.array_records.get(key)
    if trained is None:
        raise ValueError(
            f"the answer has the records {sorted(reply.content)}, none of them is {key!r}; return the model under the "
            f"key that it came with"
        )
    check_layout(layout_in(record), layout_in(trained), f"the answer's record {key!r}")
    steps, floats = _steps(reply.content, algorithm.local_steps), floats_of(trained)
    seed = derive("up", context.node_id, fingerprint(heard), fingerprint(floats))
    answer, after = depart(algorithm, coder, client, down, flattened(floats), steps, name_of(down.model), seed)
    _keep(context, after)
    content = without_ours(reply.content)
    content[key] = ArrayRecord(
        {str(place): Array("uint8", (len(part),), STYPE, part) for place, part in enumerate(answer.octets)}
    )
    mine = ConfigRecord(
        {"version": VERSION, f"heard {key}": fingerprint(heard), STEPS: steps, **stating_answer(answer)}
    )
    content[RECORD] = mine
    reply.content = content
    return reply


def _down(algorithm: Algorithm, floats: dict[str, Tensor], numbers: list[float]) -> Any:
    """The server's message, as it was decoded."""
    kind = algorithm.records.down
    declared = [one.name for one in kind.numbers()]
    if len(numbers) != len(declared):
        raise WireError(
            f"the server sent {len(numbers)} numbers, {type(algorithm).__name__} has {len(declared)}; do both ends "
            f"have the same version of quafl?"
        )
    model, statistics = flattened(floats)
    told = {name: torch.tensor(value, dtype=torch.float64) for name, value in zip(declared, numbers, strict=True)}
    return kind(statistics=statistics, **{kind.vectors()[0].name: model}, **told)


def _steps(content: RecordDict, usual: int) -> int:
    """How many local steps the user says that there were; else those of the algorithm."""
    for metrics in content.metric_records.values():
        if LOCAL_STEPS in metrics:
            steps = metrics[LOCAL_STEPS]
            if not isinstance(steps, int | float) or steps < 0:
                raise ValueError(f"the metric {LOCAL_STEPS!r} is {steps!r}, must be a number of steps")
            return int(steps)
    return usual


_KEPT = f"{RECORD}.kept"


def _keep(context: Context, kept: Kept) -> None:
    assert kept.last is not None
    context.state[_KEPT] = ArrayRecord(
        {
            **{name: Array(tensor) for name, tensor in kept.tensors.items()},
            **{f"last.{i}": Array("uint8", (len(one),), STYPE, one) for i, one in enumerate(kept.last.octets)},
        }
    )
    context.state[f"{_KEPT}.numbers"] = ConfigRecord({STEPS: kept.steps, **stating_answer(kept.last)})


def _kept(context: Context) -> Kept:
    if _KEPT not in context.state:
        return Kept()
    arrays, numbers = context.state.array_records[_KEPT], context.state.config_records[f"{_KEPT}.numbers"]
    octets = tuple(arrays[name].data for name in arrays if name.startswith("last."))
    tensors = {
        name: torch.from_numpy(array.numpy().copy()) for name, array in arrays.items() if not name.startswith("last.")
    }
    last = Answer(octets, tuple(numbers_of(numbers)), int(str(numbers[NEAR]), 16))
    return Kept(int(str(numbers[STEPS])), tensors, last)


def _failed(message: Message, error: Exception) -> Message:
    _log.error("quafl_mod: %s", error)
    return Message(Error(PRECONDITION, f"quafl_mod: {error}"), reply_to=message)
