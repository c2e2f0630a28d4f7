"""Bad settings get one sentence: the key, the value, what is allowed."""

import csv
import tomllib
from pathlib import Path

import pytest
import torch

from quafl.core import SCAFFOLD, Defence, FedAsync
from quafl.settings.base import SettingsError
from quafl.settings.reading import builtin, load


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("algorithm.sampled=30", "algorithm.sampled = 30: must be at most clients.count = 20"),
        ("algorithm.local_steps=0", "algorithm.local_steps = 0: must be greater than or equal to 1"),
        ("algorithm.lr=-1", "algorithm.lr = -1: must be greater than 0"),
        ("algorithm.lr=fast", "algorithm.lr = 'fast': must be a valid number"),
        ("algorithm.sampled=2.5", "algorithm.sampled = 2.5: must be a valid integer"),
        ("algorithm.weighted=1", "algorithm.weighted = 1: must be a valid boolean"),
        ("algorithm.server_averaging=2", "algorithm.server_averaging = 2: must be less than or equal to 1"),
        (
            "algorithm.name=sgd",
            "algorithm.name = 'sgd': must be one of 'quafl', 'calibrated', 'fedavg'",
        ),
        ("algorithm={name='scaffold',server_lr=0}", "algorithm.server_lr = 0: must be greater than 0"),
        ("algorithm={name='scaffold',optimizer='adam'}", "algorithm.optimizer = 'adam': must be 'sgd'"),
        ("algorithm={name='scaffold',clip=1.0}", "algorithm.clip = 1.0: must be left out here"),
        ("algorithm.weight_decay=-0.1", "algorithm.weight_decay = -0.1: must be greater than or equal to 0"),
        (
            "algorithm={name='scaffold',schedule={name='cosine',rounds=9}}",
            "algorithm.schedule = {'name': 'cosine', 'rounds': 9}: must be left out here",
        ),
        (
            "algorithm={name='scaffold',mixing=0.5}",
            "unknown key algorithm.mixing = 0.5; allowed here: sampled, local_steps, lr, optimizer",
        ),
        ("algorithm={name='fedasync',mixing=0}", "algorithm.mixing = 0: must be greater than 0"),
        ("algorithm={name='fedasync',mixing=1.5}", "algorithm.mixing = 1.5: must be less than or equal to 1"),
        ("algorithm={name='fedasync',staleness=-1}", "algorithm.staleness = -1: must be greater than or equal to 0"),
        ("algorithm={name='fedasync',staleness=true}", "algorithm.staleness = True: must be a valid number"),
        ("algorithm={name='fedasync',proximity=inf}", "algorithm.proximity = inf: must be a finite number"),
        (
            "algorithm={name='fedasync',weighted=true}",
            "unknown key algorithm.weighted = True; did you mean 'weight_decay'? allowed here: sampled, local_steps",
        ),
        ("algorithm.schedule={name='step'}", "algorithm.schedule.name = 'step': must be one of 'linear', 'cosine'"),
        (
            "algorithm.schedule={name='cosine',rounds=9,flor=1}",
            "unknown key algorithm.schedule.flor = 1; did you mean 'floor'? allowed here: name, rounds, floor",
        ),
        ("clients.changes=[{at=5}]", "clients.changes.0.step is missing"),
        (
            "clients.changes=[{at=5,step=1,who=1}]",
            "unknown key clients.changes.0.who = 1; allowed here: at, step, clients",
        ),
        (
            "clients.changes=[{at=5,step=1,clients='slowest'}]",
            "clients.changes.0.clients = 'slowest': must be 'slow', 'fast', 'all' or a list of client numbers",
        ),
        ("clients.up_bandwidth=100", "only one of up_bandwidth and down_bandwidth is given; give both, or neither"),
        ("clients.trace=nowhere.csv", "cannot read the trace nowhere.csv"),
        ("clients.step_range=[9,2]", "step_range is (9.0, 2.0), must be two positive numbers, the smaller first"),
        (
            "task.name=mnst",
            "task.name = 'mnst': did you mean 'mnist'? must be one of 'digits', 'mnist', 'fashion-mnist', 'cifar-10'",
        ),
        ("codec.bits=0", "codec.bits = 0: must be from 1 to 16, or 32 for no compression"),
        (
            "codec.name=zip",
            "codec.name = 'zip': must be one of 'difference', 'lattice', 'identity', 'bfloat16', 'qsgd'",
        ),
        ("codec.bit=3", "unknown key codec.bit = 3; did you mean 'bits'? allowed here: name, bits, spread, feedback"),
        ("run.device=abacus", "run.device = 'abacus': must be one that PyTorch can use here"),
        ("codec.bits=17", "codec.bits = 17: must be from 1 to 16, or 32 for no compression"),
        ("clients.slow=1.5", "clients.slow = 1.5: must be less than or equal to 1"),
        ("clients.count=0", "clients.count = 0: must be greater than or equal to 1"),
        ("run.until=inf", "run.until = inf: must be a finite number"),
        ("run.seeds=[1,1]", "run.seeds = [1, 1]: must be distinct"),
        ("run.seeds=[]", "run.seeds = []: List should have at least 1 item"),
        (
            "clients.cuont=3",
            "unknown key clients.cuont = 3; did you mean 'count'? allowed here: count, slow, fast_step, slow_step",
        ),
        (
            "algorithm.warmup=0.9",
            "unknown key algorithm.warmup = 0.9; allowed here: sampled, local_steps, lr, optimizer, momentum",
        ),
        ("colour=red", "unknown key colour = 'red'; allowed here: label, task, clients, algorithm, codec, run"),
        ("task=digits", "task = 'digits': must be a valid dictionary"),
        ("algorithm.lr", "--set algorithm.lr: must look like section.key=value, for example algorithm.lr=0.2"),
        ("=3", "--set =3: must look like section.key=value"),
    ],
)
def test_bad_settings_are_named_with_key_value_and_what_is_allowed(
    tmp_path: Path, override: str, sentence: str
) -> None:
    (tmp_path / "mine.toml").write_text("")
    with pytest.raises(SettingsError) as error:
        load(str(tmp_path / "mine.toml"), [override])
    assert str(error.value).startswith(sentence)
    assert "\n" not in str(error.value)


def test_schedules_and_changes_are_written_as_the_documentation_has_them(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        """
        [algorithm]
        schedule = { name = "linear", points = [[0, 0.1], [100, 1.0], [5000, 0.0]] }
        [clients]
        step_range = [2.0, 9.0]
        changes = [{ at = 500.0, step = 2.0, clients = "slow" }]
        absences = [{ start = 100.0, stop = 300.0, clients = [3, 4] }]
        """
    )
    (settings,) = load(str(tmp_path / "mine.toml"))
    optimizer = settings.algorithm.build_optimizer()
    assert optimizer.factor is not None
    assert optimizer.factor(torch.tensor([0, 50, 100, 9999])).tolist() == pytest.approx([0.1, 0.55, 1.0, 0.0])
    (tmp_path / "again.toml").write_text(settings.to_toml(), encoding="utf-8")
    assert load(str(tmp_path / "again.toml")) == [settings]


def test_scaffold_and_its_clients_have_the_same_learning_rate(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        "[algorithm]\nname = 'scaffold'\nsampled = 3\nlocal_steps = 4\nlr = 0.25\nserver_lr = 0.5\npatience = 90.0\n"
    )
    (settings,) = load(str(tmp_path / "mine.toml"))
    built = settings.algorithm.build(Defence(clip=3.0))
    assert built == SCAFFOLD(3, 4, lr=0.25, server_lr=0.5, patience=90.0, defence=Defence(clip=3.0))
    assert settings.algorithm.build_optimizer().rate == 0.25


@pytest.mark.parametrize(
    ("keys", "made"),
    [
        ("optimizer = 'adamw'", "adamw(lr=0.01, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01)"),
        (
            "optimizer = 'adamw'\nweight_decay = 0.0\nclip = 2.0",
            "adamw(lr=0.01, betas=(0.9, 0.999), eps=1e-08, clip=2.0)",
        ),
        (
            "optimizer = 'adam'\nclip = 2.0\nweight_decay = 0.1",
            "adam(lr=0.01, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.1, clip=2.0)",
        ),
        ("optimizer = 'momentum'\nclip = 2.0", "momentum(lr=0.01, beta=0.9, clip=2.0)"),
        ("weight_decay = 0.1", "sgd(lr=0.01, weight_decay=0.1)"),
        ("", "sgd(lr=0.01)"),
    ],
)
def test_weight_decay_and_clipping_reach_the_optimizer(keys: str, made: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(f"[algorithm]\nlr = 0.01\n{keys}\n")
    (settings,) = load(str(tmp_path / "mine.toml"))
    assert repr(settings.algorithm.build_optimizer()) == made


def test_fedasync_has_its_mixing_staleness_and_proximity(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        "[algorithm]\nname = 'fedasync'\nmixing = 0.9\nstaleness = 1.0\nproximity = 0.01\noptimizer = 'adam'\n"
    )
    (settings,) = load(str(tmp_path / "mine.toml"))
    assert settings.algorithm.build() == FedAsync(mixing=0.9, staleness=1.0, proximity=0.01)


@pytest.mark.parametrize("name", ["quafl", "fedavg", "fedbuff", "fednova", "scaffold", "fedasync"])
def test_every_algorithm_runs_from_its_name_and_its_complete_settings_load_again(tmp_path: Path, name: str) -> None:
    (tmp_path / "mine.toml").write_text(f"[algorithm]\nname = '{name}'\n[run]\nuntil = 200.0\nevery = 100.0\n")
    (settings,) = load(str(tmp_path / "mine.toml"))
    (tmp_path / "again.toml").write_text(settings.to_toml(), encoding="utf-8")
    assert load(str(tmp_path / "again.toml")) == [settings]
    _, run = settings.simulation(0)
    assert [row for row in run if row][-1]["local_steps"] > 0


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"cannot read settings 'nowhere.toml'.*built-in names: celeba, cifar-10, demo"
    ):
        load("nowhere.toml")
    (tmp_path / "broken.toml").write_text("[run\nuntil = 3")
    with pytest.raises(SettingsError, match=r"broken\.toml is not valid TOML"):
        load(str(tmp_path / "broken.toml"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="not a text file"):
        load(str(tmp_path / "binary.toml"))


def test_every_built_in_experiment_loads_and_its_complete_settings_load_again(tmp_path: Path) -> None:
    for name in builtin():
        for curve in load(name):
            (tmp_path / "again.toml").write_text(curve.to_toml(), encoding="utf-8")
            assert load(str(tmp_path / "again.toml")) == [curve]


def test_an_override_of_a_curve_that_there_is_not_makes_no_new_one(tmp_path: Path) -> None:
    misspelt = ["curves.FedAv.algorithm.lr=0.2"]
    with pytest.raises(
        SettingsError, match=r"^curves.FedAv: there is no such curve; did you mean 'FedAvg'\? there are"
    ):
        load("demo", misspelt)
    (tmp_path / "single.toml").write_text("")
    with pytest.raises(SettingsError, match=r"^curves\.FedAv: there is no such curve; there are none$"):
        load(str(tmp_path / "single.toml"), misspelt)


def test_curves_lay_their_sections_over_the_common_ones_and_overrides_over_all(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(
        """
        [algorithm]
        local_steps = 7
        [curves."A"]
        algorithm = { lr = 0.5 }
        [curves."B"]
        algorithm = { name = "fedavg", local_steps = 2 }
        codec = { bits = 32 }
        """
    )
    a, b = load(str(tmp_path / "two.toml"), ["algorithm.sampled=4", "run.seeds=[9]"])
    assert (a.label, a.algorithm.name, a.algorithm.local_steps, a.codec.bits) == ("A", "quafl", 7, 4)
    assert (a.algorithm.lr, b.algorithm.lr) == (0.5, 0.1)
    assert (b.label, b.algorithm.name, b.algorithm.local_steps, b.codec.bits) == ("B", "fedavg", 2, 32)
    assert [c.algorithm.sampled for c in (a, b)] == [4, 4]
    assert [c.run.seeds for c in (a, b)] == [[9], [9]]


def test_complete_settings_name_every_key() -> None:
    written = tomllib.loads(next(curve for curve in load("demo") if curve.label == "QuAFL").to_toml())
    assert {"sampled", "local_steps", "lr", "weighted", "server_averaging", "wait"} <= set(written["algorithm"])
    assert set(written) == {"label", "task", "clients", "algorithm", "codec", "run", "defence"}


def test_the_demo_is_the_setting_it_says_it_is() -> None:
    curves = {curve.label: curve for curve in load("demo")}
    names = ["Calibrated", "QuAFL", "FedAvg"]
    assert list(curves) == [*names, *(f"{name}, 32 bits" for name in names)]
    for curve in curves.values():
        assert (curve.clients.count, curve.clients.slow, curve.task.partition) == (20, 0.25, "dirichlet")
        assert (curve.algorithm.sampled, curve.clients.latency_at_32_bits) == (5, 10)
        assert curve.algorithm.local_steps == (5 if curve.algorithm.name == "fedavg" else 10)
    assert [curve.codec.bits for curve in curves.values()] == [4, 4, 4, 32, 32, 32]


def test_the_demo_uses_the_learning_rates_that_its_grid_chose() -> None:
    with (Path(__file__).parents[1] / "docs" / "results" / "demo-grid.csv").open(encoding="utf-8") as grid:
        chosen = {row["algorithm"]: float(row["lr"]) for row in csv.DictReader(grid) if row["chosen"]}
    assert {curve.label: curve.algorithm.lr for curve in load("demo")} == chosen
