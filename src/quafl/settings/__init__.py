"""Settings: what a TOML file may say, checked before anything runs, and what it builds.

A file describes one run, or, with a `[curves."name"]` table per curve, a comparison: each curve is the common part with
its own sections laid over it.
"""
