"""A hook of MkDocs: links from the docs to other files of the repository lead to copies of them in the site."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(?<=\]\()((?:\.\./)+[^)#\s]+)(#[^)\s]*)?(?=\))")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The page, with such links changed; each file that one leads to becomes a text of the site."""
    here = posixpath.dirname(page.file.src_uri)

    def changed(link: re.Match[str]) -> str:
        place = posixpath.normpath(posixpath.join("docs", here, link[1]))
        if place.startswith("docs/") or not (ROOT / place).exists():
            return link[0]  # MkDocs knows it, or complains
        copy = f"source/{place}.txt"
        if files.get_file_from_path(copy) is None:
            files.append(File.generated(config, copy, content=_text(ROOT / place)))
        return posixpath.relpath(copy, here or ".")

    return LINK.sub(changed, markdown)


def _text(path: Path) -> str:
    """Of a file; of a folder, what is in it."""
    if path.is_dir():
        return "".join(f"{entry.name}\n" for entry in sorted(path.iterdir()))
    return path.read_text(encoding="utf-8")
