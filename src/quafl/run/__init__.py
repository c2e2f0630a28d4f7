"""The runner: every (curve, seed) of an experiment, over processes, into run folders; left and taken up again."""

from quafl.run.figures import conclude, conclude_map
from quafl.run.folders import RunError, RunFolder, accumulate, prepare, reopen, share, trained_model
from quafl.run.jobs import Job, News
from quafl.run.pool import Interrupted, run
from quafl.run.tuning import choose, grid
from quafl.run.versions import versions

__all__ = [
    "Interrupted",
    "Job",
    "News",
    "RunError",
    "RunFolder",
    "accumulate",
    "choose",
    "conclude",
    "conclude_map",
    "grid",
    "prepare",
    "reopen",
    "run",
    "share",
    "trained_model",
    "versions",
]
