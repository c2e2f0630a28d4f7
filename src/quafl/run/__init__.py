"""The runner: every (curve, seed) of an experiment, over processes, into run folders; left and taken up again. And the
parties of a real federation."""
