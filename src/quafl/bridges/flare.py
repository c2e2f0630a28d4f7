"""Our messages in jobs of NVIDIA FLARE: a pair of filters in place of its quantizer (docs/flare.md).

The encoder filters task data at the server and task results at the clients, on their way out; the decoder the same on
their way in. Both know from their chain which end they are at.
"""

from collections.abc import Mapping
from copy import copy
from logging import getLogger
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.filter import FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from torch import Tensor

from quafl.bridges.records import (
    AS_IT_IS,
    FEWEST_DOWN,
    FULL,
    LostError,
    Sender,
    Sent,
    check_bits,
    check_encoded,
    check_layout,
    fingerprint,
    hear,
    layout_of,
    short,
    tell,
)
from quafl.codec.formats import DTYPES
from quafl.codec.messages import decode
from quafl.codec.seams import DecodeError, WireError
from quafl.core.randomness import derive

_log = getLogger(__name__)

VERSION = 1
META = "quafl"  # what we say beside the data
OCTETS = "quafl octets"  # in place of the arrays that are encoded
WEIGHTS = "weights"
STATE, HELD, SPARED = (
    "quafl.sender",
    "quafl.held",
    "quafl.spared",
)  # in the context of a site, private to it, for the whole job
KINDS = [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF]
_sending = Lock()  # FLARE's server serves many clients at a time


class _Entry(NamedTuple):
    """An array, for whoever gets its values only."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    tensor: bool


class QuAFLEncoder(DXOFilter):
    """Models in `bits` a parameter: from clients as differences from the model that they were sent, to clients by the
    lattice, the first time in full. Differences (WEIGHT_DIFF) are encoded as they are."""

    def __init__(self, bits: int = 4) -> None:
        check_bits(bits)
        super().__init__(supported_data_kinds=KINDS, data_kinds_to_filter=KINDS)
        self.bits = bits  # by this name FLARE finds it when it writes the job

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """A copy, encoded: the task's own data go to others, too."""
        return super().process(copy(shareable), fl_ctx)

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO:
        """Floating-point arrays become octets; the others travel as they are."""
        if META in dxo.meta:
            raise ValueError("the data are encoded already; is QuAFLEncoder in this chain twice?")
        floats, entries = _floats(dxo.data), _entries(dxo.data)
        others = {name: value for name, value in dxo.data.items() if name not in floats}
        said: dict[str, Any] = {"version": VERSION, "entries": [list(entry) for entry in entries]}
        dtypes = {entry.name: entry.dtype.removeprefix("torch.") for entry in entries}
        spared = fl_ctx.get_prop(SPARED)
        if spared is None:
            spared = {name for name in dtypes if not dtypes[name].startswith(("float", "bfloat"))}
            fl_ctx.set_prop(SPARED, spared, private=True, sticky=True)
        check_encoded(dtypes, spared)
        if not floats:
            raise ValueError("the data have no floating-point arrays; take the filters away where no model is sent")
        at_server = self.get_prop(FilterContextKey.CHAIN_TYPE) == FilterChainType.TASK_DATA_CHAIN
        held = None if at_server else fl_ctx.get_prop(HELD)
        if held is not None:
            said["heard"] = fingerprint(held)
        if dxo.data_kind == DataKind.WEIGHT_DIFF:
            zeros = {name: torch.zeros_like(value) for name, value in floats.items()}
            octets = tell(floats, zeros, self.bits, self._seed(fl_ctx, floats))
        elif at_server:
            with _sending:
                sender = _sender(fl_ctx)
                sender.bits = max(self.bits, FEWEST_DOWN)
                sent = sender.send(_peer(fl_ctx), WEIGHTS, _layout(entries), floats)
            said |= {"how": sent.how, "name": sent.name}
            if sent.how == FULL:
                return DXO(dxo.data_kind, dict(dxo.data), {**dxo.meta, META: said})
            octets = sent.octets
        elif held is None:
            raise ValueError(
                "this client has heard no model that its own would be a difference from; put QuAFLDecoder among its "
                "task data filters"
            )
        else:
            check_layout(fl_ctx.get_prop(HELD + ".layout"), _layout(entries), "the task's result")
            octets = tell(floats, held, self.bits, self._seed(fl_ctx, floats))
        before = sum(tensor.numel() * tensor.element_size() for tensor in floats.values())
        self.log_info(fl_ctx, f"{len(octets)} octets in place of {before}")
        return DXO(dxo.data_kind, {**others, OCTETS: octets}, {**dxo.meta, META: said})

    def _seed(self, fl_ctx: FLContext, floats: dict[str, Tensor]) -> int:
        """Another for every client and answer."""
        return derive("up", fl_ctx.get_identity_name(), fingerprint(floats))


class QuAFLDecoder(DXOFilter):
    """What QuAFLEncoder made at the other end, as it was, or an error: the task or its result then fails in FLARE, and
    the client is sent the model in full the next time."""

    def __init__(self) -> None:
        super().__init__(supported_data_kinds=KINDS, data_kinds_to_filter=KINDS)

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """A client whose task has failed may have lost what it held."""
        if shareable.get_return_code() != ReturnCode.OK and self._at_server():
            with _sending:
                _sender(fl_ctx).forget(_peer(fl_ctx))
        return super().process(copy(shareable), fl_ctx)

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO:
        """The arrays, in their order and kind."""
        said = dxo.meta.get(META)
        if said is None:
            end = "clients' task result" if self._at_server() else "server's task data"
            raise WireError(f"the data are not encoded; put QuAFLEncoder among the {end} filters, or take this away")
        if said.get("version") != VERSION:
            raise WireError(f"the data have version {said.get('version')}, expected {VERSION}; upgrade the older end")
        entries = [
            _Entry(str(name), tuple(shape), str(kind), bool(tensor)) for name, shape, kind, tensor in said["entries"]
        ]
        meta = {key: value for key, value in dxo.meta.items() if key != META}
        octets = dxo.data.get(OCTETS, b"")
        if not isinstance(octets, bytes):
            raise WireError(f"the octets are a {type(octets).__name__}, expected bytes")
        if self._at_server():
            floats = self._result(dxo.data_kind, said, entries, octets, fl_ctx)
        elif dxo.data_kind == DataKind.WEIGHT_DIFF:
            floats = _displacement(entries, octets)
        else:
            floats = self._task(said, entries, octets, dxo.data, fl_ctx)
        return DXO(dxo.data_kind, _restored(entries, floats, dxo.data), meta)

    def _at_server(self) -> bool:
        return bool(self.get_prop(FilterContextKey.CHAIN_TYPE) == FilterChainType.TASK_RESULT_CHAIN)

    def _result(
        self, kind: str, said: dict[str, Any], entries: list[_Entry], octets: bytes, fl_ctx: FLContext
    ) -> dict[str, Tensor]:
        with _sending:
            sender, node = _sender(fl_ctx), _peer(fl_ctx)
            sender.heard(node, WEIGHTS, str(said.get("heard", "")))
            if kind == DataKind.WEIGHT_DIFF:
                return _displacement(entries, octets)
            weights = sender.receive(node, WEIGHTS, octets)
            sender.answered(node)
            return weights

    def _task(
        self, said: dict[str, Any], entries: list[_Entry], octets: bytes, data: dict[str, Any], fl_ctx: FLContext
    ) -> dict[str, Tensor]:
        how, name = str(said.get("how")), str(said.get("name"))
        if how == FULL:
            floats = _floats(data)
            if fingerprint(floats) != name:
                raise WireError("the model is not what the server says that it is; is there a filter between the two?")
        else:
            mine = fl_ctx.get_prop(HELD + ".layout")
            if mine is not None and short(mine) != short(_layout(entries)):
                raise LostError("the model held here has other arrays; the next one comes in full")
            floats = hear(Sent(how, name, octets), fl_ctx.get_prop(HELD))
        fl_ctx.set_prop(HELD, {one: tensor.clone() for one, tensor in floats.items()}, private=True, sticky=True)
        fl_ctx.set_prop(HELD + ".layout", _layout(entries), private=True, sticky=True)
        return floats


def _floats(data: Mapping[str, Any]) -> dict[str, Tensor]:
    """The arrays that are encoded. Doubles are not: means of integers are."""
    tensors = {
        name: torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value.detach().cpu()
        for name, value in data.items()
        if isinstance(value, Tensor) or (isinstance(value, np.ndarray) and value.dtype.kind == "f")
    }
    return {name: tensor for name, tensor in tensors.items() if tensor.dtype in DTYPES}


def _entries(data: Mapping[str, Any]) -> list[_Entry]:
    return [
        _Entry(name, tuple(np.shape(value)), str(getattr(value, "dtype", type(value).__name__)), torch.is_tensor(value))
        for name, value in data.items()
    ]


def _layout(entries: list[_Entry]) -> str:
    """Whether an array is numpy's or torch's does not count."""
    kinds = {str(kind).removeprefix("torch.") for kind in DTYPES}
    named = [(one, one.dtype.removeprefix("torch.")) for one in entries]
    return layout_of((one.name, one.shape, kind) if kind in kinds else (one.name, (), AS_IT_IS) for one, kind in named)


def _restored(entries: list[_Entry], floats: dict[str, Tensor], others: dict[str, Any]) -> dict[str, Any]:
    missing = [one.name for one in entries if one.name not in floats and one.name not in others]
    if missing:
        raise DecodeError(f"array {missing[0]!r} has not come; do both ends use the same model?")
    return {
        one.name: others[one.name]
        if one.name not in floats
        else floats[one.name]
        if one.tensor
        else floats[one.name].numpy()
        for one in entries
    }


def _displacement(entries: list[_Entry], octets: bytes) -> dict[str, Tensor]:
    """A difference that stands for itself."""
    kinds = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16")}
    zeros = {
        one.name: torch.zeros(one.shape, dtype=kinds[kind])
        for one in entries
        if (kind := one.dtype.removeprefix("torch.")) in kinds
    }
    return dict(decode(octets, near=zeros))


def _sender(fl_ctx: FLContext) -> Sender:
    sender = fl_ctx.get_prop(STATE)
    if sender is None:
        sender = Sender()
        fl_ctx.set_prop(STATE, sender, private=True, sticky=True)
    assert isinstance(sender, Sender)
    return sender


def _peer(fl_ctx: FLContext) -> str:
    peer = fl_ctx.get_peer_context()
    name = peer.get_identity_name() if peer is not None else None
    if not name:
        raise ValueError("FLARE does not say which client this is about; these filters work between server and clients")
    return str(name)
