"""What the Triton kernels become on an H200 (sm_90), compiled here, without a GPU: instructions a coordinate,
registers of a thread, and values that it has to write to memory for want of them.

    python benchmarks/kernels.py [REGISTERS ...]

By default with the registers that each kernel has. Fewer registers let more tiles be under way at a time.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from quafl.codec.kernels import fused

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
OCTETS = {"symbols_ptr": "*i32", "checks_ptr": "*i32", "widest_ptr": "*i32", "seed_ptr": "*i64", "failed_ptr": "*i8"}
KERNELS = {
    "_encode": ((4, 8, 14), fused.Triton.encode_registers),
    "_decode": ((4, 8, 14), fused.Triton.decode_registers),
    "_encode_difference": ((4, 8), fused.Triton.difference_registers),
    "_decode_difference": ((4, 8), fused.Triton.difference_registers),
}


def compiled(name: str, bits: int, registers: int) -> dict[str, Any]:
    lanes, kernel = fused.Triton.lanes, getattr(fused, name)
    constants = {
        "LANES": lanes,
        "BITS": bits,
        "LARGE": True,
        "COARSE": fused._layout(lanes, 1),
        "FINE": fused._layout(lanes, 32),
        "UNPACKED": fused._unpacked(lanes, bits),
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
        {(place,): [["tt.divisibility", 16]] for place, argument in arguments if kinds[argument].startswith("*")},
    )
    options = {"num_warps": lanes, "maxnreg": registers, "enable_fp_fusion": False}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        listing = subprocess.run(
            [TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z0-9]+)", listing, re.MULTILINE)
    count = Counter(found)
    return {
        "instructions a coordinate": round(len(found) / 32, 1),  # a thread has 32
        "registers": registers,
        "written": count["STL"],
        "read back": count["LDL"],
    }


def main() -> None:
    assert "TRITON_INTERPRET" not in os.environ, "compiled kernels are asked for: unset TRITON_INTERPRET"
    print(f"Triton {triton.__version__}")
    for name, (widths, usual) in KERNELS.items():
        for registers in map(int, sys.argv[1:]) if sys.argv[1:] else (usual,):
            for bits in widths:
                print(f"{name}, {bits} bits:", compiled(name, bits, registers), flush=True)


if __name__ == "__main__":
    main()
