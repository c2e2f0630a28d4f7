"""What the Triton kernels become on an H200 (sm_90), compiled here, without a GPU: instructions a coordinate,
registers of a thread, values that it has to write to memory for want of them, shared memory, and how many programs fit
on a multiprocessor.

    python benchmarks/kernels.py [--set NAME=VALUE ...] [REGISTERS ...]

By default with what the class Triton says; NAME is an attribute of it (`decode_lanes=16`). Fewer registers and less
shared memory let more tiles be under way at a time.
"""

import argparse
import os
import re
import subprocess
from collections import Counter
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from quafl.codec.kernels import fused

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
OCTETS = {f"{name}_ptr": "*i32" for name in ("symbols", "checks", "widest", "apart")}
OCTETS |= {"seed_ptr": "*i64", "failed_ptr": "*i8"}
KERNELS = {  # by what its attributes begin with: the kernel, and widths that matter
    "encode": ("_encode", (4, 8, 14)),
    "decode": ("_decode", (4, 8, 14)),
    "transfer": ("_transfer", (4,)),
    "difference_encode": ("_encode_difference", (4, 8)),
    "difference_decode": ("_decode_difference", (4, 8)),
}


def compiled(what: str, bits: int, registers: int) -> dict[str, Any]:
    lanes, kernel = getattr(fused.Triton, f"{what}_lanes"), getattr(fused, KERNELS[what][0])
    apart = what == "transfer" or (what == "decode" and 32 % bits == 0)
    options = fused._options(lanes, blocks=195328, apart=apart)
    constants = {
        **{name: value for name, value in options.items() if name.isupper()},
        "BITS": bits,
        "UNPACKED": fused._unpacked(lanes, bits, apart=apart),
        "WORDS": fused._layout(lanes, bits),
        "GROUPS": fused._layout(lanes, 1),
        "SPREAD": fused._spread(lanes),
        **dict.fromkeys("ABCD", 0.5),
    }
    arguments = list(enumerate(kernel.arg_names))
    kinds = {
        argument: "constexpr"
        if argument in constants
        else OCTETS.get(argument, "*fp32" if argument.endswith("_ptr") else "i32")
        for _, argument in arguments
    }
    source = GluonASTSource(
        kernel,
        kinds,
        {(place,): constants[argument] for place, argument in arguments if argument in constants},
    )
    options = {name: value for name, value in options.items() if name.islower()} | {"maxnreg": registers}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        listing = subprocess.run(
            [TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z0-9]+)", listing, re.MULTILINE)
    count = Counter(found)
    shared, threads = made.metadata.shared, 32 * lanes
    return {
        "instructions a coordinate": round(len(found) / 32, 1),  # a thread has 32
        "registers": registers,
        "written": count["STL"],
        "read back": count["LDL"],
        "barriers": count["BAR"],
        "shared memory": shared,
        "programs": min(65536 // (-registers // 8 * -8 * threads), 2048 // threads, 228 * 1024 // (shared + 1024)),
    }


def main() -> None:
    assert "TRITON_INTERPRET" not in os.environ, "compiled kernels are asked for: unset TRITON_INTERPRET"
    parser = argparse.ArgumentParser()
    parser.add_argument("registers", nargs="*", type=int)
    parser.add_argument("--set", nargs="+", default=[], dest="settings")
    chosen = parser.parse_args()
    for setting in chosen.settings:
        name, value = setting.split("=")
        setattr(fused.Triton, name, type(getattr(fused.Triton, name))(value))
    print(f"Triton {triton.__version__}")
    for what, (name, widths) in KERNELS.items():
        for registers in chosen.registers or (getattr(fused.Triton, f"{what}_registers"),):
            for bits in widths:
                print(f"{name}, {bits} bits:", compiled(what, bits, registers), flush=True)


if __name__ == "__main__":
    main()
