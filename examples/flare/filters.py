"""A job of NVIDIA FLARE's own FedAvg, with QuAFL's filters in place of FLARE's quantizer: docs/flare.md.

pip install 'quafl[flare,data]'
python filters.py                   # in FLARE's simulator: a server and two clients, half a minute
python filters.py --plain           # without the filters
"""

import re
from argparse import ArgumentParser
from pathlib import Path

from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv

from quafl.bridges.flare import QuAFLDecoder, QuAFLEncoder

HERE = Path(__file__).parent

if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("--plain", action="store_true", help="without filters")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--workspace", metavar="DIR", type=Path, default=Path("workspace"), help="of the simulator")
    options = parser.parse_args()

    recipe = FedAvgRecipe(
        name="digits",
        model={"class_path": "net.Net", "args": {}},
        min_clients=2,
        num_rounds=options.rounds,
        train_script=str(HERE / "train.py"),
    )
    recipe.add_server_file(str(HERE / "net.py"))
    recipe.add_client_file(str(HERE / "net.py"))
    if not options.plain:
        recipe.add_server_output_filter(QuAFLEncoder(bits=4), tasks=["train"])
        recipe.add_client_input_filter(QuAFLDecoder(), tasks=["train"])
        recipe.add_client_output_filter(QuAFLEncoder(bits=4), tasks=["train"])
        recipe.add_server_input_filter(QuAFLDecoder(), tasks=["train"])
    recipe.execute(SimEnv(num_clients=2, workspace_root=str(options.workspace.resolve())))
    logs = "\n".join(log.read_text(encoding="utf-8") for log in sorted(options.workspace.rglob("log.txt")))
    heard = re.findall(r"accuracy of the model heard: (\S+)", logs)
    sent = [(int(after), int(before)) for after, before in re.findall(r"(\d+) octets in place of (\d+)", logs)]
    print(f"{len(heard)} models heard, the best with accuracy {max(map(float, heard)):.3f}")
    if sent:
        after, before = map(sum, zip(*sent, strict=True))
        print(f"{len(sent)} messages with {after:,} octets in place of {before:,}: 1/{before / after:.1f}")
