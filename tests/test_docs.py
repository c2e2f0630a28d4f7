"""What the documentation shows is true: code runs, settings are read, commands exist, links lead somewhere."""

import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from quafl.cli import COMMANDS, loaded
from quafl.settings.reading import curves_of, federation_of

ROOT = Path(__file__).parents[1]
KEPT_OUT = "docs/results/regimes", "docs/results/paper/remarks"  # parts of generated pages
PAGES = sorted(
    page for page in (ROOT / "docs").rglob("*.md") if page.parent not in [ROOT / folder for folder in KEPT_OUT]
)
TEXTS = [*PAGES, *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md"))]
NEEDED = {  # by a page's code; extras that are not everywhere
    "docs/tutorials/lora.md": ("peft", "transformers"),
    "docs/howto/flower.md": ("flwr",),
}
FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^ *(?:\S*/bin/)?quafl +(\S.*)$", re.MULTILINE)


class Block(NamedTuple):
    """Code of a page; with a title, it is a file of that name, which stands beside what follows."""

    language: str
    title: str
    text: str
    line: int


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(found[1], found[2] or "", found[3], text.count("\n", 0, found.start())) for found in FENCE.finditer(text)
    ]


@contextmanager
def forgotten(modules: set[str]) -> Iterator[None]:
    """What a page's own files have brought into this process."""
    try:
        yield
    finally:
        for module in modules:
            sys.modules.pop(module, None)


def settings(block: Block, beside: Path) -> object:
    """What the reader makes of it; fed.toml is what a federation's server is started with."""
    raw = tomllib.loads(block.text)
    return federation_of(raw, beside) if block.title == "fed.toml" else curves_of(raw, beside=beside)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if {"python", "toml"} & {block.language for block in blocks(page)}], ids=name
)
def test_the_code_of_a_page_runs_and_its_settings_are_read(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in NEEDED.get(name(page), ()):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = blocks(page)
    names: dict[str, Any] = {"__name__": "page"}
    with forgotten({block.title.removesuffix(".py") for block in found}):
        for block in found:
            if block.title:
                (tmp_path / block.title).write_text(block.text, encoding="utf-8")
            if block.language == "python" and not block.title:
                exec(compile("\n" * (block.line + 1) + block.text, name(page), "exec"), names)
            elif block.language == "toml":
                assert settings(block, tmp_path)


def commands(page: Path) -> list[list[str]]:
    """All that begin with quafl: lines of code, and code in sentences."""
    text = page.read_text(encoding="utf-8").replace("\\\n", "")
    code = [block.text for block in blocks(page) if block.language in ("", "sh")]
    prose = FENCE.sub("", text)
    lines = [line for part in code for line in COMMAND.findall(part)]
    lines += COMMAND.findall("\n".join(line for line in prose.splitlines() if line.startswith("    ")))
    lines += re.findall(r"`quafl ([^`]+)`", prose)
    return [shlex.split(line.replace("\\|", "|"), comments=True) for line in lines]


def options(command: Any) -> set[str]:
    return {option for one in command.params for option in (*one.opts, *one.secondary_opts)} | {"--help"}


@pytest.mark.parametrize("page", [page for page in TEXTS if commands(page)], ids=name)
def test_the_commands_of_a_page_and_their_options_exist(page: Path) -> None:
    for words in commands(page):
        line = shlex.join(["quafl", *words])
        if words[0].startswith("-"):
            continue
        assert words[0] in COMMANDS, line
        command = loaded(words.pop(0))
        while hasattr(command, "commands") and words and not words[0].startswith("-"):
            assert words[0] in command.commands, line
            command = command.commands[words.pop(0)]
        used = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert used <= options(command), f"{line}: {used - options(command)}"


def prose(page: Path) -> str:
    """Without code."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    """As GitHub and the site name the headings, and what is named by hand."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ +(.*?) *$", text, flags=re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in plain} | set(
        re.findall(r'id="([^"]+)"', text)
    )


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        place, _, anchor = link.partition("#")
        target = page.parent / place if place else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_in_the_sites_navigation_or_is_a_figures() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in PAGES:
        place = page.relative_to(ROOT / "docs").as_posix()
        assert f" {place}\n" in site or place.startswith("results/paper/"), place


def test_the_table_of_all_settings_is_what_the_reader_knows() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "site" / "settings.py"))
    assert made["PAGE"].read_text(encoding="utf-8") == made["text"](), "run: python docs/site/settings.py"
    unexplained = [line for line in made["rows"]() if line.endswith("|  |")]
    assert not unexplained, "say what they are beside them, in src/quafl/settings"


def test_the_errors_of_the_faq_are_the_codes_own() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    said = re.sub(r'"\n\s+f?"', "", code)  # a text in several pieces
    titles = re.findall(r"^### `(.*)`$", (ROOT / "docs" / "faq.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert titles
    for part in (part for title in titles for part in title.split("…")):
        assert part in said, part
