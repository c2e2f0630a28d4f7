"""python -m quafl.rehearsal: see docs/rehearsal.md."""

import sys
from argparse import ArgumentParser
from collections import Counter
from time import perf_counter

from rich.console import Console
from rich.table import Table

from quafl.rehearsal.faults import INCIDENTS, ONGOING
from quafl.rehearsal.schedules import Outcome, rehearse, rehearse_all

TOLD = 5  # violations that are printed


def main() -> int:
    """0, if all is well."""
    parser = ArgumentParser("quafl.rehearsal", description="Rehearse the protocol while things break.")
    parser.add_argument("--schedules", type=int, default=300, help="how many (300)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first one's seed (0)")
    parser.add_argument("--processes", type=int, default=1, help="side by side (1)")
    parser.add_argument("--seed", type=int, help="show this one, event by event")
    chosen = parser.parse_args()
    if chosen.seed is not None:
        return _show(rehearse(chosen.seed, keep=True))
    began, total, bad = perf_counter(), Counter[str](), list[Outcome]()
    for outcome in rehearse_all(range(chosen.first, chosen.first + chosen.schedules), chosen.processes):
        total.update(outcome.counts)
        if outcome.violation:
            bad.append(outcome)
            if len(bad) <= TOLD:
                _show(outcome)
    _print_table(total, perf_counter() - began)
    if bad:
        print(f"seeds with violations: {[outcome.seed for outcome in bad]}")
    return bool(bad)


def _show(outcome: Outcome) -> int:
    print(f"seed {outcome.seed}: {outcome.cast}", *outcome.lines, sep="\n")
    if outcome.violation:
        print(f"violation: {outcome.violation}", f"again: python -m quafl.rehearsal --seed {outcome.seed}", sep="\n")
    return bool(outcome.violation)


def _print_table(total: Counter[str], seconds: float) -> None:
    table = Table(title=f"{total['schedules']:,} schedules in {seconds:.0f} s", title_justify="left")
    table.add_column("what")
    table.add_column("number", justify="right")
    faults = [*ONGOING, *INCIDENTS]
    last = ["violations"]
    others = sorted(set(total) - set(faults) - set(last))
    for group in (others, faults, last):
        for name in group:
            table.add_row(name, f"{total[name]:,}")
        table.add_section()
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
