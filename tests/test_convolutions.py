"""A stack's convolutions and pools are those of torch, client by client."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreting import check_in_interpreter
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from quafl.sim.executors import layers
from quafl.sim.executors.layers import STACKED, Layers
from quafl.tasks.precision import Precision

# batch, channels, height, width, outputs, kernel, stride, padding
SHAPES: tuple[Any, ...] = (
    (2, 1, 7, 9, 5, (3, 3), 1, 1),
    (2, 3, 8, 7, 4, (3, 3), 2, 1),
    (1, 16, 5, 6, 20, (3, 3), 1, 0),
    (1, 20, 5, 5, 16, (5, 3), (1, 2), 2),
    (3, 4, 5, 5, 8, (1, 1), 2, 0),
    (9, 2, 6, 6, 3, (5, 5), 1, (2, 0)),
    (1, 2, 4, 4, 70, (4, 4), 3, 1),
    (1, 64, 3, 4, 18, (3, 3), 1, 1),
)


def gradients(convolution: Callable[..., Tensor], *window: Any) -> Callable[..., tuple[Tensor, ...]]:
    """Of inputs, weights and bias; and the result."""

    def of(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        def value(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
            result = convolution(x, weight, bias, *window)
            return result.square().sum(), result

        found, result = grad(value, argnums=(0, 1, 2), has_aux=True)(x, weight, bias)
        return (*found, result)

    return of


def check_shapes() -> None:
    """In Triton's interpreter."""
    from quafl.sim.executors.convolutions import convolution

    for number, (batch, channels, height, width, outputs, kernel, *window) in enumerate(SHAPES):
        rng = torch.Generator().manual_seed(number)
        shapes = (batch, channels, height, width), (outputs, channels, *kernel), (outputs,)
        given = [torch.randn(2, *shape, generator=rng) for shape in shapes]
        exact = [part.double() for part in given]
        theirs = [gradients(functional.conv2d, *window)(*each) for each in zip(*exact, strict=True)]
        mine = vmap(gradients(convolution, *window))(*given)
        for one, other in zip(mine, map(torch.stack, zip(*theirs, strict=True)), strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)
        assert mine[-1].permute(0, 1, 3, 4, 2).is_contiguous(), "channels are last"
        alone = gradients(convolution, *window)(*(part[1] for part in given))
        assert all(torch.equal(one, other[1]) for one, other in zip(alone, mine, strict=True)), "the same bits"


def check_large() -> None:
    """Several tiles, several parts of the gradient, a loop that is not unrolled, and half the precision."""
    from quafl.sim.executors import convolutions

    geometry = convolutions._geometry((1, 12, 12, 66), 18, (3, 3), (1, 1), (1, 1))
    assert geometry.size > convolutions.UNROLLED
    tile = convolutions.tiles("weights", geometry, 4)
    assert convolutions._split(1, geometry, tile)[0] > 1
    assert geometry.places > convolutions.tiles("forward", geometry, 4).places
    rng = torch.Generator().manual_seed(0)
    for dtype, tolerance in (torch.float32, 1e-5), (torch.float16, 1e-2):
        x, weight, bias = (torch.randn(*shape, generator=rng) for shape in ((1, 66, 12, 12), (18, 66, 3, 3), (18,)))
        given = [part.to(dtype) for part in (x, weight / 25, bias)]
        mine = gradients(convolutions.convolution, 1, 1)(*given)
        theirs = gradients(functional.conv2d, 1, 1)(*(part.double() for part in given))
        for one, other in zip(mine, theirs, strict=True):
            assert one.dtype == dtype
            assert (one - other).abs().max() <= tolerance * other.abs().max()


def check_traced() -> None:
    """As an executor does it, and the first layer's inputs need no gradient."""
    rng = torch.Generator().manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 5, 3, 2))
    parameters = {name: torch.randn(2, *value.shape, generator=rng) for name, value in module.named_parameters()}
    x = torch.randn(2, 3, 3, 6, 6, generator=rng)

    def step(parameters: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        def loss(parameters: dict[str, Tensor]) -> Tensor:
            outputs: Tensor = torch.func.functional_call(module, parameters, (x,))
            return outputs.square().sum()

        found: dict[str, Tensor] = grad(loss)(parameters)
        return found

    layers.DEVICE = "cpu"  # the interpreter's
    with Layers(STACKED, tf32=True):
        graph = make_fx(vmap(step))(parameters, x)
    targets = [str(node.target) for node in graph.graph.nodes]
    counts = [
        targets.count(f"quafl.{name}.default") for name in ("convolution", "convolution_weights", "convolution_inputs")
    ]
    assert counts == [2, 2, 1]
    for node in graph.graph.nodes:  # an elementwise operation between convolutions keeps channels last
        if str(node.target) == "aten.relu.default":
            assert node.meta["val"].permute(0, 1, 3, 4, 2).is_contiguous()
    mine, theirs = graph(parameters, x), vmap(step)(parameters, x)
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-3, atol=1e-3)
    compiled = torch.compile(graph, fullgraph=True, dynamic=False, backend="aot_eager")(parameters, x)
    assert all(torch.equal(compiled[name], mine[name]) for name in mine)


def test_the_kernels_compute_what_torch_does() -> None:
    check_in_interpreter(__file__)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("precision", ["float32", "tf32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_kernels_serve_on_a_gpu_where_numbers_may_be_rounded(
    device: str, precision: Precision, dtype: torch.dtype
) -> None:
    pytest.importorskip("triton", reason="needs Triton (the extra 'cuda')")
    with FakeTensorMode(), Layers(STACKED, tf32=precision == "tf32"):
        x = torch.empty(2, 4, 6, 6, device=device, dtype=dtype)
        serve = layers._kernels(x, x) is not None
        assert layers._kernels(x, x.int()) is None
        large = torch.empty(2**12, 4, 2**8, 2**7, device=device, dtype=dtype)  # 2²⁹ numbers
        assert layers._kernels(large, x) is None
    rounded = dtype in (torch.bfloat16, torch.float16) or (dtype == torch.float32 and precision == "tf32")
    assert serve == (device == "cuda" and rounded)


def test_channels_that_do_not_fit_are_refused_as_torch_does() -> None:
    with Layers(STACKED), pytest.raises(RuntimeError, match="to have 4 channels, but got 3 channels instead"):
        torch.conv2d(torch.rand(2, 3, 6, 6), torch.rand(5, 4, 3, 3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 5e-3), (torch.float32, 5e-3)])
@pytest.mark.parametrize("shape", SHAPES)
def test_so_they_do_on_a_gpu(shape: Any, dtype: torch.dtype, tolerance: float) -> None:
    from quafl.sim.executors.convolutions import convolution

    batch, channels, height, width, outputs, kernel, *window = shape
    rng = torch.Generator().manual_seed(0)
    shapes = (batch, channels, height, width), (outputs, channels, *kernel), (outputs,)
    given = [torch.randn(3, *one, generator=rng).to("cuda", dtype) for one in shapes]
    mine, again = (vmap(gradients(convolution, *window))(*given) for _ in range(2))
    exact = [part.cpu().double() for part in given]
    theirs = [gradients(functional.conv2d, *window)(*each) for each in zip(*exact, strict=True)]
    for one, twice, other in zip(mine, again, map(torch.stack, zip(*theirs, strict=True)), strict=True):
        assert torch.equal(one, twice)
        assert (one.cpu().double() - other).norm() <= tolerance * other.norm()


def pool(x: Tensor, *arguments: Any, **named: Any) -> Any:
    return layers._Largest.apply(x, *arguments, **named)[0]  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("kernel", [(2, 2), (3, 3), (2, 3), (1, 1)])
@pytest.mark.parametrize("size", [(6, 6), (7, 8), (5, 11)])
@pytest.mark.parametrize("last", [False, True])
def test_a_pool_and_its_gradient_are_those_of_torch_also_in_ties(
    kernel: tuple[int, int], size: tuple[int, int], last: bool
) -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(0, 3, (2, 3, 4, *size), generator=rng).float()  # few values: many ties
    weight = torch.randn(2, 3, 4, size[0] // kernel[0], size[1] // kernel[1], generator=rng)
    if last:
        x = x.transpose(2, 4).contiguous().transpose(2, 4)

    def both(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
        def of(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            def value(x: Tensor) -> tuple[Tensor, Tensor]:
                result = function(x, kernel)
                return (result * weight).sum(), result

            found: tuple[Tensor, Tensor] = grad(value, has_aux=True)(x)
            return found

        return of

    theirs = [both(functional.max_pool2d)(*each) for each in zip(x, weight, strict=True)]
    for mine, other in zip(vmap(both(pool))(x, weight), map(torch.stack, zip(*theirs, strict=True)), strict=True):
        assert torch.equal(mine, other)


def test_what_is_not_a_number_is_the_largest() -> None:
    x = torch.tensor([[1.0, torch.nan], [3.0, 2.0]]).expand(1, 1, 2, 2)
    assert pool(x, (2, 2)).isnan().all()


@pytest.mark.parametrize(
    ("arguments", "ours"),
    [({}, True), ({"stride": 2}, True), ({"stride": 1}, False), ({"padding": 1}, False), ({"ceil_mode": True}, False)],
)
def test_windows_side_by_side_are_pooled_so_on_a_gpu(
    arguments: dict[str, Any], ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def operations(function: Callable[..., Tensor]) -> str:
        with Layers(STACKED):
            return str(make_fx(lambda x: function(x, 2, **arguments))(torch.rand(2, 4, 6, 7)).code)

    assert "max_pool2d" in operations(functional.max_pool2d)
    monkeypatch.setattr(layers, "DEVICE", "cpu")  # as if it were one
    for function in functional.max_pool2d, torch.max_pool2d:
        assert ("max_pool2d" in operations(function)) != ours
    with Layers(STACKED):
        _, indices = functional.max_pool2d(torch.rand(2, 4, 6, 7), 2, return_indices=True)
    assert indices.shape == (2, 4, 3, 3)


if __name__ == "__main__":
    check_shapes()
    check_large()
    check_traced()
    print("agree")
