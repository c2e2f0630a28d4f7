"""The contracts: what every algorithm, codec and task must keep, ours and those from elsewhere.

In a test of your own, with any test runner:

    from quafl.testing import check_algorithm, check_codec, check_task

    def test_my_codec_keeps_the_contract():
        check_codec(MyCodec(bits=4))

Each raises an AssertionError that says in a sentence what is not kept. `fedscale_traces` makes up traces of phones.
"""

from quafl.testing.algorithms import check_algorithm
from quafl.testing.codecs import check_codec
from quafl.testing.tasks import check_task
from quafl.testing.traces import fedscale_traces

__all__ = ["check_algorithm", "check_codec", "check_task", "fedscale_traces"]
