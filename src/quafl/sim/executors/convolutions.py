# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Convolutions of a stack of models, in Triton, for CUDA: what lies under a kernel is never written to memory.

A program multiplies some places of one client's pictures, and what lies around each of them, with that client's
weights. Channels are last: pictures are "N b h w c", weights "N o kh kw c"; "k" is "kh kw c" flattened. Factors of
bfloat16 and float16 are taken as they are, those of float32 as tf32; sums are float32. They are added up in a fixed
order: the gradient of the weights comes in parts, which torch adds up.

Tiles follow from shapes by fixed rules and are never timed: the same seed has to give the same bits.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.modules.utils import _pair

PROGRAMS = 4 * 132  # wanted for the gradient of weights: some for each multiprocessor of an H200
SMALLEST = 16  # side of a product on tensor cores
UNROLLED = 9 * 64  # numbers of "k" at most, for a loop that is
Kind: TypeAlias = Literal["forward", "inputs", "weights"]  # the latter two: gradients of


class Tiles(NamedTuple):
    """What a program computes at a time, and how."""

    places: int  # of pictures
    inner: int  # of "k"
    outer: int  # channels of the result, or of its gradient
    warps: int
    stages: int  # of loads under way at a time; with 1 they go through the multiprocessor's own cache
    unrolled: bool  # the loop over "k"


class Geometry(NamedTuple):
    """Of a convolution whose every place of a result "b rows columns outer" is a sum over places of a source "b height
    width channels"."""

    places: int  # b·rows·columns
    rows: int
    columns: int
    outer: int
    height: int
    width: int
    channels: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    back: bool  # from the gradient of the result to that of the input

    @property
    def size(self) -> int:
        """Of "k"."""
        return prod(self.kernel) * self.channels


def tiles(kind: Kind, geometry: Geometry, octets: int) -> Tiles:
    """For numbers of so many octets."""
    outer, inner = min(_power(geometry.outer), 64), min(_power(geometry.size), 128 // octets)
    if kind == "weights":
        return Tiles(64, inner, outer, 4, 3 if octets == 2 else 2, False)
    if geometry.size <= inner:  # one step
        return Tiles(128, inner, outer, 4, 2, False)
    return Tiles(128, inner, outer, 4, 1, geometry.size <= UNROLLED)


def _power(number: int) -> int:
    return max(SMALLEST, 1 << (number - 1).bit_length())


@triton.jit
def _under(x, i, j, c, known, picture, row, column, G: tl.constexpr):
    """What place i, j of the kernel sees from a place of the result; 0 where that is nothing."""
    if G.back:
        y = row + G.padding[0] - i
        z = column + G.padding[1] - j
        known = known & (y >= 0) & (z >= 0)
        if G.stride[0] > 1:
            known = known & (y % G.stride[0] == 0)
            y = y // G.stride[0]
        if G.stride[1] > 1:
            known = known & (z % G.stride[1] == 0)
            z = z // G.stride[1]
    else:
        y = row * G.stride[0] + (i - G.padding[0])
        z = column * G.stride[1] + (j - G.padding[1])
        known = known & (y >= 0) & (z >= 0)
    known = known & (y < G.height) & (z < G.width)
    return tl.load(x + (((picture * G.height + y) * G.width + z) * G.channels + c), mask=known, other=0.0)


@triton.jit
def _step(total, x, weight, start, p, o, G: tl.constexpr, INNER: tl.constexpr):
    """`total` and the products of INNER numbers of "k"."""
    TAPS: tl.constexpr = G.kernel[0] * G.kernel[1]
    k = start + tl.arange(0, INNER)
    known = (p < G.places)[:, None]
    picture = (p // (G.rows * G.columns))[:, None]
    row = (p // G.columns % G.rows)[:, None]
    column = (p % G.columns)[:, None]
    if G.channels % INNER == 0:  # all of one place of the kernel
        tap = start // G.channels
        c = start % G.channels + tl.arange(0, INNER)
        under = _under(x, tap // G.kernel[1], tap % G.kernel[1], c[None, :], known, picture, row, column, G)
    else:
        tap = k // G.channels
        c = k % G.channels
        known = known & (k < TAPS * G.channels)[None, :]
        i = (tap // G.kernel[1])[None, :]
        j = (tap % G.kernel[1])[None, :]
        under = _under(x, i, j, c[None, :], known, picture, row, column, G)
    there = (k < TAPS * G.channels)[:, None] & (o < G.outer)[None, :]
    if G.back:
        place = (c * (TAPS * G.outer) + tap * G.outer)[:, None] + o[None, :]
    else:
        place = k[:, None] + (o * (TAPS * G.channels))[None, :]
    return tl.dot(under, tl.load(weight + place, mask=there, other=0.0), total, input_precision="tf32")


@triton.jit
def _products(
    x,
    weight,
    result,
    G: tl.constexpr,
    PLACES: tl.constexpr,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    UNROLLED: tl.constexpr,
):
    """The result at PLACES places, in OUTER channels."""
    SIZE: tl.constexpr = G.kernel[0] * G.kernel[1] * G.channels
    client = tl.program_id(1).to(tl.int64)
    x += client * (G.places // (G.rows * G.columns) * G.height * G.width * G.channels)
    weight += client * (SIZE * G.outer)
    result += client * (G.places * G.outer)
    p = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    o = tl.program_id(2) * OUTER + tl.arange(0, OUTER)
    total = tl.zeros([PLACES, OUTER], tl.float32)
    if UNROLLED:
        for start in tl.static_range(0, SIZE, INNER):
            total = _step(total, x, weight, start, p, o, G, INNER)
    else:
        for start in range(0, SIZE, INNER):
            total = _step(total, x, weight, start, p, o, G, INNER)
    there = (p < G.places)[:, None] & (o < G.outer)[None, :]
    tl.store(result + (p[:, None] * G.outer + o[None, :]), total.to(result.dtype.element_ty), mask=there)


@triton.jit
def _sums(
    x,
    gradient,
    parts,
    G: tl.constexpr,
    PART: tl.constexpr,
    PLACES: tl.constexpr,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
):
    """A part of the gradient of the weights, of PART places."""
    SIZE: tl.constexpr = G.kernel[0] * G.kernel[1] * G.channels
    client = tl.program_id(1).to(tl.int64)
    x += client * (G.places // (G.rows * G.columns) * G.height * G.width * G.channels)
    gradient += client * (G.places * G.outer)
    parts += (client * tl.num_programs(0) + tl.program_id(0)) * (SIZE * G.outer)
    k = tl.program_id(2) % tl.cdiv(SIZE, INNER) * INNER + tl.arange(0, INNER)
    o = tl.program_id(2) // tl.cdiv(SIZE, INNER) * OUTER + tl.arange(0, OUTER)
    tap = k // G.channels
    c = (k % G.channels)[None, :]
    i = (tap // G.kernel[1])[None, :]
    j = (tap % G.kernel[1])[None, :]
    total = tl.zeros([INNER, OUTER], tl.float32)
    for start in range(0, PART, PLACES):
        p = tl.program_id(0) * PART + start + tl.arange(0, PLACES)
        known = (p < G.places)[:, None]
        picture = (p // (G.rows * G.columns))[:, None]
        row = (p // G.columns % G.rows)[:, None]
        column = (p % G.columns)[:, None]
        under = _under(x, i, j, c, known & (k < SIZE)[None, :], picture, row, column, G)
        there = known & (o < G.outer)[None, :]
        factor = tl.load(gradient + (p[:, None] * G.outer + o[None, :]), mask=there, other=0.0)
        total = tl.dot(tl.trans(under), factor, total, input_precision="tf32")
    there = (k < SIZE)[:, None] & (o < G.outer)[None, :]
    tl.store(parts + (k[:, None] + (o * SIZE)[None, :]), total, mask=there)


def _stacked(x: Tensor, weight: Tensor, geometry: Geometry, kind: Kind) -> Tensor:
    """The result "N b rows columns outer"."""
    tile = tiles(kind, geometry, x.element_size())
    result = x.new_empty((*x.shape[:2], geometry.rows, geometry.columns, geometry.outer))
    grid = (triton.cdiv(geometry.places, tile.places), len(x), triton.cdiv(geometry.outer, tile.outer))
    _products[grid](
        *(x.contiguous(), weight.contiguous(), result, geometry, tile.places, tile.inner, tile.outer, tile.unrolled),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return result


def _geometry(
    shape: Sequence[int], outer: int, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Geometry:
    """Of a convolution of pictures of a shape "b h w c"."""
    batch, height, width, channels = shape
    (tall, wide), (down, across), (top, left) = kernel, stride, padding
    rows, columns = (height + 2 * top - tall) // down + 1, (width + 2 * left - wide) // across + 1
    places = batch * rows * columns
    window = (tall, wide), (down, across), (top, left)
    return Geometry(places, rows, columns, outer, height, width, channels, *window, back=False)


def _back(geometry: Geometry) -> Geometry:
    """Of the gradient of the inputs: source and result have changed places."""
    g, batch = geometry, geometry.places // (geometry.rows * geometry.columns)
    places = batch * g.height * g.width
    window = g.kernel, g.stride, g.padding
    return Geometry(places, g.height, g.width, g.channels, g.rows, g.columns, g.outer, *window, back=True)


def _split(clients: int, geometry: Geometry, tile: Tiles) -> tuple[int, int]:
    """How many parts a gradient of weights has, and of how many places each."""
    blocks = triton.cdiv(geometry.size, tile.inner) * triton.cdiv(geometry.outer, tile.outer)
    rounds = triton.cdiv(geometry.places, tile.places)
    part = triton.cdiv(rounds, triton.cdiv(PROGRAMS, clients * blocks))
    return triton.cdiv(rounds, part), part * tile.places


@torch.library.custom_op("quafl::convolution", mutates_args=())
def _convolution(x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    """Of pictures "N b h w c" with weights "N o kh kw c"."""
    geometry = _geometry(x.shape[1:], weight.shape[1], weight.shape[2:4], stride, padding)
    return _stacked(x, weight, geometry, "forward")


@torch.library.custom_op("quafl::convolution_inputs", mutates_args=())
def _inputs(
    gradient: Tensor, weight: Tensor, size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """The gradient of the pictures, which are of size "h w"."""
    outer, *kernel, channels = weight.shape[1:]
    geometry = _geometry((gradient.shape[1], *size, channels), outer, kernel, stride, padding)
    return _stacked(gradient, weight, _back(geometry), "inputs")


@torch.library.custom_op("quafl::convolution_weights", mutates_args=())
def _weights(
    x: Tensor, gradient: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """The gradient of the weights in parts "N parts o kh kw c", float32."""
    geometry = _geometry(x.shape[1:], gradient.shape[-1], kernel, stride, padding)
    tile = tiles("weights", geometry, x.element_size())
    parts, part = _split(len(x), geometry, tile)
    result = x.new_empty((len(x), parts, geometry.outer, *kernel, geometry.channels), dtype=torch.float32)
    blocks = triton.cdiv(geometry.size, tile.inner) * triton.cdiv(geometry.outer, tile.outer)
    _sums[parts, len(x), blocks](
        *(x.contiguous(), gradient.contiguous(), result, geometry, part, tile.places, tile.inner, tile.outer),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return result


@_convolution.register_fake
def _(x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    g = _geometry(x.shape[1:], weight.shape[1], weight.shape[2:4], stride, padding)
    return x.new_empty((*x.shape[:2], g.rows, g.columns, g.outer))


@_inputs.register_fake
def _(gradient: Tensor, weight: Tensor, size: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    return gradient.new_empty((*gradient.shape[:2], *size, weight.shape[-1]))


@_weights.register_fake
def _(x: Tensor, gradient: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    g = _geometry(x.shape[1:], gradient.shape[-1], kernel, stride, padding)
    parts, _ = _split(len(x), g, tiles("weights", g, x.element_size()))
    return x.new_empty((len(x), parts, g.outer, *kernel, g.channels), dtype=torch.float32)


def _vectorised(operation: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, int]]:
    """More models are a longer stack."""

    def rule(info: Any, axes: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
        size = info.batch_size
        one, other = (
            tensor.expand(size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
            for tensor, axis in zip(arguments[:2], axes, strict=False)
        )
        return operation(one.flatten(0, 1), other.flatten(0, 1), *arguments[2:]).unflatten(0, (size, -1)), 0

    return rule


for _operation in _convolution, _inputs, _weights:
    _operation.register_vmap(_vectorised(_operation))


class _Last(torch.autograd.Function):
    """An operation without a gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(operation: Callable[..., Tensor], *arguments: Any) -> Tensor:
        return operation(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass


class _Convolution(torch.autograd.Function):
    """Of pictures "b h w c" with weights "o kh kw c"."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int]) -> Tensor:
        stacked: Tensor = _convolution(x.unsqueeze(0), weight.unsqueeze(0), stride, padding)
        return stacked.squeeze(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, ctx.stride, ctx.padding = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        x, weight = (tensor.unsqueeze(0) for tensor in ctx.saved_tensors)
        gradient, window = gradient.contiguous().unsqueeze(0), (ctx.stride, ctx.padding)
        apply: Callable[..., Tensor] = _Last.apply
        parts = apply(_weights, x, gradient, weight.shape[2:4], *window).squeeze(0)
        inputs = apply(_inputs, gradient, weight, x.shape[2:4], *window).squeeze(0) if ctx.needs_input_grad[0] else None
        return inputs, parts.sum(0).to(weight.dtype), None, None


def convolution(input: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any) -> Tensor:
    """`torch.conv2d` of pictures "b c h w"; of the result, the channels are last in memory."""
    x, flat = (tensor.permute(0, 2, 3, 1).contiguous() for tensor in (input, weight))
    result: Tensor = _Convolution.apply(x, flat, _pair(stride), _pair(padding))
    return (result if bias is None else result + bias.to(result.dtype)).permute(0, 3, 1, 2)
