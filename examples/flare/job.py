"""QuAFL as a job of NVIDIA FLARE: docs/flare.md.

pip install 'quafl[flare]'
python job.py                       # in FLARE's simulator: a server and two clients, half a minute
python job.py --export jobs         # writes jobs/quafl, to be submitted: nvflare job submit -j jobs/quafl
"""

from argparse import ArgumentParser
from pathlib import Path

from quafl.record.rows import read_rows
from quafl.run.flare import make_job, simulate

if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("--export", metavar="DIR", type=Path, help="write the job there instead of simulating it")
    parser.add_argument("--workspace", metavar="DIR", type=Path, default=Path("workspace"), help="of the simulator")
    options = parser.parse_args()

    job = make_job(Path(__file__).parent / "fed.toml", task="quafl.tasks.demo:digits_of")
    # A task of your own, in a file that is not installed at the sites, travels with the job:
    # job.to_server("mine.py"), job.to_clients("mine.py")
    if options.export:
        job.export_job(str(options.export))
    else:
        folder = simulate(job, options.workspace, ["client-1", "client-2"])
        print(f"accuracy {read_rows(folder / 'rows.csv')[-1]['accuracy']:.3f}; the models are in {folder}")
