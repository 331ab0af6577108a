"""The documentation site builds without warnings, loads no external resources, and has no broken links."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from mkdocs.exceptions import PluginError

from scripts.site_hooks import rewritten
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

BLOB: Final = "https://git.example/project/blob/main/"
RECORD: Final = "adr/0025-packages-and-layers.md"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a new site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


def test_every_document_is_a_page(site: Path) -> None:
    documents = [file.relative_to(ROOT / "docs").with_suffix(".html") for file in (ROOT / "docs").rglob("*.md")]
    assert [str(page) for page in documents if not (site / page).is_file()] == []
    assert (site / "index.html").is_file()


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    loads = re.compile(r"""<(?:script|img|iframe)[^>]+src=["']?(?:https?:)?//|<link[^>]+href=["']?(?:https?:)?//""")
    assert [page.name for page in site.rglob("*.html") if loads.search(page.read_text())] == []


@pytest.mark.parametrize(
    ("link", "source", "page", "wanted"),
    [
        ("docs/a2a.md#artifacts", "README.md", "index.md", "a2a.md#artifacts"),
        ("../README.md", "docs/a2a.md", "a2a.md", "index.md"),
        ("../adapter.py", "docs/platform.md", "platform.md", f"{BLOB}adapter.py"),
        ("../architecture.md", f"docs/{RECORD}", RECORD, "../architecture.md"),
        ("../../CHANGELOG.md", f"docs/{RECORD}", RECORD, "../changelog.md"),
        ("docs/adr", "README.md", "index.md", f"{BLOB}docs/adr"),
        ("https://a2a.example", "README.md", "index.md", "https://a2a.example"),
        ("#run-it", "README.md", "index.md", "#run-it"),
    ],
)
def test_links_lead_to_pages_or_into_the_repository(link: str, source: str, page: str, wanted: str) -> None:
    assert rewritten(link, source, page, BLOB) == wanted


def test_a_broken_link_fails_the_build() -> None:
    with pytest.raises(PluginError, match=r"docs/a2a\.md: the link to nothing\.md leads to no file"):
        rewritten("nothing.md", "docs/a2a.md", "a2a.md", BLOB)
