"""Memory that tensors give back stays with the process while it computes."""

import platform
from resource import RUSAGE_SELF, getrusage

import pytest
import torch

from quafl.run.heap import kept

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's")


def faults() -> int:
    """Pages that the system has to find while tensors of 40 MB come and go."""
    x = torch.zeros(10_000_000)
    before = getrusage(RUSAGE_SELF).ru_minflt
    for _ in range(5):
        (x + 1).mul_(2)
    return getrusage(RUSAGE_SELF).ru_minflt - before


def test_no_page_is_asked_for_twice_inside_and_all_are_given_back_after() -> None:
    outside = faults()
    with kept():
        faults()
        inside = faults()
    assert outside > 3 * 9000  # 40 MB are 9766 pages
    assert inside < 500
    assert faults() > 3 * 9000
