"""The README's examples run."""

import re
from pathlib import Path

import pytest
import torch

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
SIMULATE, CODEC = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_the_simulation_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    exec(SIMULATE, names)
    assert float(capsys.readouterr().out.split()[0]) > 0.6
    assert len([line for line in SIMULATE.splitlines() if line]) <= 10


def test_the_codec_example_sends_what_it_says() -> None:
    names: dict[str, object] = {}
    exec(CODEC, names)
    (octets,) = re.findall(r"([\d,]+) octets", CODEC)
    message = names["message"]
    assert isinstance(message, bytes)
    assert len(message) == int(octets.replace(",", ""))


def test_the_example_of_the_codec_page_runs() -> None:
    page = (Path(__file__).parents[1] / "docs" / "codec.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names: dict[str, dict[str, torch.Tensor]] = {}
    exec(code, names)
    torch.testing.assert_close(names["received"], names["mine"], atol=0.02, rtol=0)


def test_the_two_commands_are_on_the_first_screen() -> None:
    first_screen = README.splitlines()[:25]
    assert any(line.startswith("make demo") for line in first_screen)
    assert any(line.startswith("make test") for line in first_screen)
