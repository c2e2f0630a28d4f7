"""What every codec refuses."""

from torch import Tensor

from quafl.core.seams import DecodeError, Model, Packet


def check_finite(x: Model) -> None:
    """A vector with NaN or Inf is the caller's mistake; it must not reach the wire."""
    if not x.isfinite().all():
        raise ValueError("the vector to encode has NaN or infinite coordinates; did training diverge?")


def check_fits(packet: Packet, codec: int, key: Model) -> None:
    """A packet of another codec or another model is the peer's."""
    if packet.codec != codec:
        raise DecodeError(f"packet is of codec {packet.codec}, expected {codec}; do both ends use the same settings?")
    if packet.dim != key.shape[-1]:
        raise DecodeError(f"packet has d={packet.dim}, the key d={key.shape[-1]}; do both ends use the same model?")


def exact_part(exact: Tensor | None, x: Model) -> Tensor:
    """The full-precision part of a packet, empty when there is none."""
    return x.new_empty((*x.shape[:-1], 0)) if exact is None else exact
