"""Triton's kernels without a GPU, in its interpreter."""

import os
import subprocess
import sys

import pytest


def check_in_interpreter(*program: str) -> None:
    """That program ends by saying that all agree. The interpreter is chosen before Triton is imported, so it has a
    process of its own."""
    pytest.importorskip("triton", reason="needs Triton (the extra 'cuda')")
    done = subprocess.run(
        [sys.executable, *program],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout.strip() == "agree", done.stderr[-2000:]
