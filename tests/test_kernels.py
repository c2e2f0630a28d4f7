"""One format, three kernels: every pair that this machine has agrees, bit for bit."""

import re
import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest
import torch
from interpreting import check_in_interpreter
from torch import Tensor

import quafl
from quafl.codec import Lattice, gaussian
from quafl.codec.kernels import LIMIT, Decoded, Encoded, Kernel, available, kernel_for, kernel_named
from quafl.codec.kernels.oracle import Oracle

CUDA = torch.cuda.is_available()


def kernels() -> dict[str, Kernel]:
    """All that can run here; C once per instruction set."""
    found: dict[str, Kernel] = {"torch": Oracle()}
    if "c" in available():
        from quafl.codec.kernels.native import INSTRUCTION_SETS, Native

        for name in INSTRUCTION_SETS:
            kernel = Native(at_most=name)
            found[kernel.instruction_set] = kernel
    if CUDA:
        found["triton"] = kernel_named("triton")
    return found


KERNELS = kernels()


def place(name: str, *tensors: Tensor) -> list[Tensor]:
    return [tensor.cuda() if name == "triton" else tensor.cpu() for tensor in tensors]


def encode(name: str, x: Tensor, seed: Tensor, side: Tensor, bits: int) -> Encoded:
    x, seed, side = place(name, x, seed, side)
    return KERNELS[name].encode(x, seed, side, bits)


def decode(name: str, message: Encoded, seed: Tensor, side: Tensor, bits: int, key: Tensor) -> Decoded:
    symbols, checks, seed, side, key = place(name, message.symbols, message.checks, seed, side, key)
    return KERNELS[name].decode(symbols, checks, seed, side, bits, key)


def case(dim: int, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(100 * dim + bits)
    x = torch.randn(3, dim, generator=rng)
    key = x + 0.01 * torch.randn(dim, generator=rng)
    return x, key, torch.randint(2**63 - 1, (3,), generator=rng), torch.full((3,), 0.12 / (2**bits - 1))


def assert_agree(writer: str, reader: str, dim: int, bits: int) -> None:
    x, key, seed, side = case(dim, bits)
    encoded = encode(writer, x, seed, side, bits)
    expected = Oracle().encode(x, seed, side, bits)
    assert all(torch.equal(got.cpu(), right) for got, right in zip(encoded, expected, strict=True))
    for keys in key, key[:1], key + 3.0:  # a key each, one for all, and ones that are too far away
        decoded = decode(reader, encoded, seed, side, bits, keys)
        wanted = Oracle().decode(expected.symbols, expected.checks, seed, side, bits, keys)
        assert torch.equal(decoded.failed.cpu(), wanted.failed)
        moved = KERNELS[reader].transfer(*place(reader, x, seed, side, keys))
        assert torch.equal(moved.apart.cpu() >= 1 << (bits - 1), wanted.failed)
        assert torch.equal(moved.vectors.cpu(), Oracle().transfer(x, seed, side, x).vectors)  # whatever the key
        whole = ~wanted.failed.any(dim=-1)
        assert torch.equal(decoded.vectors.cpu()[whole], wanted.vectors[whole])
        assert torch.equal(moved.vectors.cpu()[whole], wanted.vectors[whole])
    shared = KERNELS[reader].transfer(*place(reader, x[:1], seed[:1], side[:1], key))  # one vector, three receivers
    each = Oracle().transfer(*(one[:1].repeat_interleave(3, dim=0) for one in (x, seed, side)), key)
    assert torch.equal(shared.vectors.cpu(), each.vectors[:1])
    assert torch.equal(shared.apart.cpu(), each.apart)
    if bits <= gaussian.MOST_BITS:
        assert_agree_on_a_difference(writer, reader, x, seed, bits)


def assert_agree_on_a_difference(writer: str, reader: str, x: Tensor, seed: Tensor, bits: int) -> None:
    made = KERNELS[writer].encode_difference(*place(writer, x, seed), bits)
    expected = Oracle().encode_difference(x, seed, bits)
    assert all(torch.equal(got.cpu(), right) for got, right in zip(made, expected, strict=True))
    parts, dim = (expected.symbols, expected.energy / expected.match, seed), x.shape[-1]
    decoded = KERNELS[reader].decode_difference(*place(reader, *parts), bits, dim)
    assert torch.equal(decoded.cpu(), Oracle().decode_difference(*parts, bits, dim))


@pytest.mark.parametrize("bits", range(1, 14))
@pytest.mark.parametrize(("writer", "reader"), list(product(KERNELS, KERNELS)))
def test_each_kernel_decodes_what_each_has_encoded(writer: str, reader: str, bits: int) -> None:
    for dim in (1, 40, 512, 1025, 5000):
        assert_agree(writer, reader, dim, bits)


@pytest.mark.parametrize("bits", [14, 16])
@pytest.mark.parametrize("name", KERNELS)
def test_widths_up_to_16_agree_within_the_range(name: str, bits: int) -> None:
    x, _, seed, side = case(5000, bits)
    message = encode(name, x / 100, seed, side, bits)
    expected = Oracle().encode(x / 100, seed, side, bits)
    assert all(torch.equal(got.cpu(), wanted) for got, wanted in zip(message, expected, strict=True))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dim", [0, 1023, 1024, 16 * 1024, 17 * 1024 + 5])
def test_any_dimension_works(name: str, dim: int) -> None:
    assert_agree(name, name, dim, 4)


def test_more_than_4096_blocks_are_laid_out_alike() -> None:
    first, *_, last = KERNELS
    assert_agree(first, last, 4096 * 1024 + 1, 4)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e9])
def test_what_is_out_of_range_or_not_finite_is_told(name: str, bad: float) -> None:
    x, _, seed, side = case(3000, 8)
    x[1, 77] = bad
    widest = encode(name, x, seed, side, 8).widest.cpu()
    assert [bool(row <= LIMIT) for row in widest] == [True, False, True]


def test_no_rows_are_no_rows() -> None:
    for name in KERNELS:
        x, key, seed, side = case(2000, 4)
        assert len(encode(name, x[:0], seed[:0], side[:0], 4).checks) == 0
        message = encode(name, x[:1], seed[:1], side[:1], 4)
        assert len(decode(name, message, seed[:1], side[:1], 4, key[:0]).vectors) == 0


def test_the_fastest_kernel_at_hand_serves_and_one_can_be_forced() -> None:
    name = type(kernel_for(torch.device("cpu"))).__name__
    assert name == ("Native" if "c" in available() else "Oracle")
    x, *_ = case(4000, 4)
    rng = torch.Generator()
    forced = [Lattice(bits=4, kernel=name).encode(x, rng.manual_seed(1), distance=1.0) for name in ("torch", None)]
    assert torch.equal(forced[0].symbols, forced[1].symbols)
    with pytest.raises(ValueError, match="must be 'torch', 'c' or 'triton'"):
        Lattice(bits=4, kernel="fortran").encode(x, rng, distance=1.0)


INTERPRET = """
import torch
from quafl.codec.kernels.fused import Triton
from quafl.codec.kernels.oracle import Oracle
rng = torch.Generator().manual_seed(0)
for dim, bits in (1, 4), (5000, 1), (1500, 3), (1024, 4), (9 * 1024 - 7, 8), (1025, 13), (31 * 1024 + 1, 2):
    x = torch.randn(2, dim, generator=rng)
    key = x + 0.01 * torch.randn(dim, generator=rng)
    seed, side = torch.randint(2**63 - 1, (2,), generator=rng), torch.full((2,), 0.12 / (2**bits - 1))
    message, expected = (kernel.encode(x, seed, side, bits) for kernel in (Triton(), Oracle()))
    assert all(torch.equal(a, b) for a, b in zip(message, expected)), (dim, bits)
    for keys in key, key[:1] + 3.0:
        got, wanted = (k.decode(*expected[:2], seed, side, bits, keys) for k in (Triton(), Oracle()))
        assert torch.equal(got.failed, wanted.failed), (dim, bits)
        whole = ~wanted.failed.any(dim=-1)
        assert torch.equal(got.vectors[whole], wanted.vectors[whole]), (dim, bits)
        for some in slice(None), slice(1):  # a vector each, and one for all
            parts = x[some], seed[some], side[some], keys
            moved, wanted = (kernel.transfer(*parts) for kernel in (Triton(), Oracle()))
            assert all(torch.equal(a, b) for a, b in zip(moved, wanted)), (dim, bits)
    if bits <= 8:
        mine, theirs = (kernel.encode_difference(x, seed, bits) for kernel in (Triton(), Oracle()))
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs)), (dim, bits)
        parts = theirs.symbols, theirs.energy / theirs.match, seed, bits, dim
        assert torch.equal(*(kernel.decode_difference(*parts) for kernel in (Triton(), Oracle()))), (dim, bits)
print("agree")
"""


def test_the_triton_kernel_agrees_in_its_interpreter() -> None:
    check_in_interpreter("-c", INTERPRET)


def test_where_numbers_begin_and_how_many_there_are_make_no_kernel_compiled_anew() -> None:
    pytest.importorskip("triton", reason="needs Triton (the extra 'cuda')")
    from quafl.codec.kernels import fused

    if fused.INTERPRETED:
        pytest.skip("nothing is compiled in the interpreter")
    for kernel in fused._encode, fused._decode, fused._transfer, fused._encode_difference, fused._decode_difference:
        given = [one for one in kernel.params if not one.is_constexpr]
        assert all(one.do_not_specialize and one.do_not_specialize_on_alignment for one in given), kernel


def test_a_library_that_was_built_from_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    if "c" not in available():
        pytest.skip("there is no C kernel here")
    from quafl.codec.kernels import native

    monkeypatch.setattr(native, "VERSION", 0)
    with pytest.raises(ImportError, match="it was built from other sources: install the package again"):
        native.Native()


def test_whatever_arrives_the_kernel_computes_nothing_undefined(tmp_path: Path) -> None:
    """Sanitizers do not look into vectors: here they are classes of one lane (lanes.hpp)."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++ and its sanitizer")
    here, kernel = Path(__file__).parent, Path(quafl.__file__).parent / "codec" / "kernels"
    source = (kernel / "kernels.c").read_text()
    one_lane = source.replace("#if defined(__x86_64__)", "#if 0 && defined(__x86_64__)").replace("LANES 4", "LANES 1")
    assert one_lane.count("LANES 1\n") == 1
    (tmp_path / "kernels.cpp").write_text(one_lane)
    for header in kernel.glob("*.h"):
        classes = re.sub(r"^(typedef .*|#define v[fiu] .*|#undef v[fiu])$", "", header.read_text(), flags=re.MULTILINE)
        (tmp_path / header.name).write_text(classes)
    assert "typedef" not in (tmp_path / "tile.h").read_text()
    flags = ["-std=c++17", "-O1", "-w", "-fsanitize=undefined,address", "-fno-sanitize-recover=all", f"-I{tmp_path}"]
    program = tmp_path / "lanes"
    subprocess.run(["g++", *flags, "-o", str(program), str(here / "lanes.cpp")], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.stdout == "sound\n", done.stderr
