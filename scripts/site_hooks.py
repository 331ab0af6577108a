"""Hooks of mkdocs: documents outside of docs/ become pages, and links into the repository keep working.

On a git host the links between documents are relative to their own folders. In the site, a link to another document
leads to its page, and a link to any other file leads to the repository.
"""

import os
import posixpath
import re
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parent.parent

TOP_PAGES: Final = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "code_of_conduct.md",
    "examples/README.md": "examples.md",
}
"""Documents outside of docs/, and the pages that they become."""

RECORDS: Final = ROOT / "docs" / "adr"

LINK: Final = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))")
FENCE: Final = re.compile(r"^(`{3,}).*?^\1\s*$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, *, config: MkDocsConfig) -> None:
    """Add the documents outside of docs/, and a list of the decision records."""
    for name, page in TOP_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    titles = {file.name: file.read_text(encoding="utf-8").partition("\n")[0] for file in RECORDS.glob("*.md")}
    records = [f"- [{title.removeprefix('# ')}]({name})" for name, title in sorted(titles.items())]
    files.append(File.generated(config, "adr/index.md", content="\n".join(["# Decisions", "", *records, ""])))


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the page's links, except in fenced blocks."""
    sources = {page: name for name, page in TOP_PAGES.items()}
    source = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    assert config.repo_url is not None
    blob = config.repo_url.rstrip("/") + "/blob/main/"

    def replace(found: re.Match[str]) -> str:
        return found[1] + rewritten(found[2], source, page.file.src_uri, blob) + found[3]

    parts = []
    end = 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(replace, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(replace, markdown[end:])])


def rewritten(link: str, source: str, page: str, blob: str) -> str:
    """Return the site's link for `link` in the repository's file `source`, which is the site's file `page`."""
    path, hash_, anchor = link.partition("#")
    if not path or "://" in path or path.startswith("mailto:"):
        return link
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if not (ROOT / target).exists():
        raise PluginError(f"{source}: the link to {link} leads to no file")
    if target in TOP_PAGES or (target.startswith("docs/") and (ROOT / target).is_file()):
        uri = TOP_PAGES.get(target, target.removeprefix("docs/"))
        return os.path.relpath(uri, os.path.dirname(page) or ".") + hash_ + anchor
    return blob + target + hash_ + anchor
