"""Checks the documents: links resolve, tables match the code, and commands work."""

import ast
import importlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import anyio
import psutil
import pytest
import yaml
from pydantic_core import PydanticUndefined

from codex_workspace.config.a2a_server import A2AConfig
from codex_workspace.config.environment import SECRETS, Environment
from codex_workspace.config.loading import load_settings
from codex_workspace.config.providers import choose_provider
from codex_workspace.config.settings import (
    TEMPLATE_DIR,
    CodexConfig,
    Config,
    LimitsConfig,
    PlatformConfig,
    PushConfig,
    RuntimeConfig,
    StorageConfig,
)
from codex_workspace.config.validation import Section
from codex_workspace.devkit.model import scripted_model
from tests.e2e.agent_process import READY, AgentSetup, running_agent
from tests.e2e.client import peer
from tests.project.test_layers import FILES, LAYERS
from tests.support.waiting import HANG_S, eventually

ROOT: Final = TEMPLATE_DIR
README: Final = ROOT / "README.md"
CONTRIBUTING: Final = ROOT / "CONTRIBUTING.md"
CLIENTS: Final = ROOT / "docs" / "clients.md"
CONFIGURATION: Final = ROOT / "docs" / "configuration.md"
OPERATING: Final = ROOT / "docs" / "operating.md"
PLATFORM: Final = ROOT / "docs" / "platform.md"
ARCHITECTURE: Final = ROOT / "docs" / "architecture.md"
RUN_BY_ITSELF: Final = ROOT / "docs" / "a2a.md"
"""tests/e2e/test_a2a_docs.py runs all of its snippets."""
DOCUMENTS: Final = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/**/*.md"), *ROOT.glob("examples/*.md")]
)
SOURCES: Final = sorted([*ROOT.glob("*.py"), *ROOT.glob("codex_workspace/**/*.py")])

RUNS: Final = "runs, prints: "
URL: Final = "http://127.0.0.1:8000"

LINK: Final = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE: Final = re.compile(r"`([^`]+)`")
QUOTED: Final = re.compile(r'(README|[\w./-]+\.md)[`)]*,\s"([^"]+)"')
HEADING: Final = re.compile(r"^#+ (.+)$", re.MULTILINE)
SNIPPET: Final = re.compile(
    r"(?:<!-- (?P<mark>[^\n]*) -->\n)?(?P<fence>`{3,})(?P<language>\w*)\n(?P<text>.*?)(?P=fence)\n", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Snippet:
    """A fenced block; `mark` is the text of the comment before it, which states its purpose."""

    document: str
    language: str
    text: str
    mark: str


def snippets_of(document: Path) -> list[Snippet]:
    found = SNIPPET.finditer(document.read_text())
    return [Snippet(document.name, each["language"], each["text"], each["mark"] or "") for each in found]


def the_snippet(document: Path, mark: str) -> str:
    (snippet,) = [each for each in snippets_of(document) if each.mark.startswith(mark)]
    return snippet.text


def table(document: Path, name: str) -> list[list[str]]:
    """Return the rows of the table after the comment `table: name`, without the header."""
    _, _, behind = document.read_text().partition(f"<!-- table: {name} -->\n")
    lines = behind[: behind.find("\n\n")].splitlines()
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines[2:]]


def names_in(cell: str) -> list[str]:
    return CODE.findall(cell)


# --- Text ---


def test_documents_are_found() -> None:
    names = {file.name for file in DOCUMENTS}
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "architecture.md", "codex-protocol.md"} <= names
    assert SOURCES


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 120


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_linked_files_exist(document: Path) -> None:
    targets = [link.partition("#")[0] for link in LINK.findall(document.read_text()) if "://" not in link]
    missing = [target for target in targets if not (document.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_linked_headings_exist(document: Path) -> None:
    """Check links, and quoted headings after a document's name."""
    text = document.read_text()
    linked = [link.split("#") for link in LINK.findall(text) if "#" in link and "://" not in link]
    missing = [
        anchor
        for file, anchor in linked
        if anchor not in map(anchor_of, headings_of(document.parent / file if file else document))
    ]
    quoted = [(name, heading) for name, heading in QUOTED.findall(text) if heading not in headings_of(named(name))]
    assert (missing, quoted) == ([], [])


def headings_of(document: Path) -> list[str]:
    return HEADING.findall(SNIPPET.sub("", document.read_text()))


def anchor_of(heading: str) -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def named(name: str) -> Path:
    """Return the path of a document that is named relative to the repository."""
    return README if name == "README" else ROOT / name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_referenced_tests_exist(document: Path) -> None:
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", document.read_text()):
        assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}::{name}"


def test_names_in_the_architecture_document_exist() -> None:
    code = "\n".join(file.read_text() for file in SOURCES)
    prose = SNIPPET.sub("", ARCHITECTURE.read_text())
    dotted = [name for name in names_in(prose) if re.fullmatch(r"_?[A-Za-z]\w+(\._?\w+)?", name)]
    words = {word for name in dotted for word in name.removesuffix(".py").split(".")}
    missing = [
        word for word in words if not re.search(rf"\b{word}\b", code) and word not in {file.stem for file in FILES}
    ]
    assert dotted
    assert not missing


def test_files_in_the_architecture_document_exist() -> None:
    paths = [name for name in names_in(SNIPPET.sub("", ARCHITECTURE.read_text())) if re.fullmatch(r"[\w/]+\.py", name)]
    assert len(paths) > 20
    folders = (ROOT / "codex_workspace", ROOT)
    assert [path for path in paths if not any((folder / path).is_file() for folder in folders)] == []


def test_the_architecture_document_lists_every_package_in_order() -> None:
    listed = [name for row in table(ARCHITECTURE, "packages") for name in names_in(row[0])]
    assert listed == [name for layer in LAYERS for name in layer]


def test_decisions_are_numbered_in_order() -> None:
    numbers = [int(file.name[:4]) for file in sorted((ROOT / "docs" / "adr").glob("*.md"))]
    assert numbers == list(range(1, len(numbers) + 1))
    for file in (ROOT / "docs" / "adr").glob("*.md"):
        text = file.read_text()
        assert text.startswith(f"# {int(file.name[:4])}. ")
        assert [word for word in ("Context", "Decision", "Consequences") if f"**{word}.**" not in text] == []


def test_table_of_variables_matches_the_code() -> None:
    documented = {names_in(name)[0]: secret for name, _, _, secret in table(CONFIGURATION, "variables")}
    assert documented == dict.fromkeys(Environment.model_fields, "no") | dict.fromkeys(SECRETS, "yes")


SECTIONS: Final[dict[str, type[Section]]] = {
    "runtime_config": RuntimeConfig,
    "a2a": A2AConfig,
    "codex": CodexConfig,
    "limits": LimitsConfig,
    "storage": StorageConfig,
    "push": PushConfig,
    "platform": PlatformConfig,
}


def defaults_of(section: type[Section]) -> dict[str, object]:
    """Return the keys of a section with their defaults, as YAML values."""
    defaults = {name: each.get_default() for name, each in section.model_fields.items()}
    return {
        name: list(default) if isinstance(default, tuple) else default
        for name, default in defaults.items()
        if default is not PydanticUndefined
    }


def test_table_of_keys_matches_the_code() -> None:
    known = {key: value for key, value in defaults_of(Config).items() if key not in SECTIONS}
    for name, section in SECTIONS.items():
        known |= {f"{name}.{key}": value for key, value in defaults_of(section).items()}
    documented = {
        names_in(row[0])[0]: names_in(row[2]) for row in table(CONFIGURATION, "config") if row[2] != "required"
    }
    assert {key: yaml.safe_load(default) for key, (default,) in documented.items()} == {
        key: known[key] for key in documented
    }
    assert set(known) == set(documented)


@cache
def sentences() -> tuple[str, ...]:
    """Return every string of the source, with … in place of interpolated values."""
    nodes = [node for file in SOURCES for node in ast.walk(ast.parse(file.read_text()))]
    return tuple(text for node in nodes for text in texts_of(node))


def texts_of(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=values):
            yield "".join(str(each.value) if isinstance(each, ast.Constant) else "…" for each in values)
        case _:
            pass


MESSAGES: Final = [names_in(row[0])[0] for row in table(OPERATING, "messages")]


@pytest.mark.parametrize("message", MESSAGES)
def test_documented_message_occurs_in_the_code(message: str) -> None:
    fixed = re.compile(".*".join(re.escape(part) for part in message.split("…")), re.DOTALL)
    assert any(fixed.search(sentence) for sentence in sentences())


def test_table_of_messages_is_not_empty() -> None:
    assert len(MESSAGES) > 20


def test_documented_codex_version_is_the_pinned_one() -> None:
    pinned = (ROOT / "requirements-codex.txt").read_text().partition("==")[2].split()[0]
    assert f"Version {pinned} is pinned," in " ".join(OPERATING.read_text().split())
    assert f"({pinned} pinned" in (ROOT / "CHANGELOG.md").read_text()


# --- Commands ---


def test_every_snippet_has_a_purpose() -> None:
    for document in set(DOCUMENTS) - {RUN_BY_ITSELF}:
        for snippet in snippets_of(document):
            assert snippet.mark or not snippet.language, snippet


def test_documented_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in (README, CONTRIBUTING):
        targets_used = re.findall(r"^make ([a-z-]+)", the_snippet(document, "make"), re.MULTILINE)
        assert targets_used
        assert set(targets_used) <= targets
        assert set(re.findall(r"`make ([a-z-]+)`", document.read_text())) <= targets


def test_documented_configuration_is_valid(tmp_path: Path) -> None:
    documented_config = yaml.safe_load(the_snippet(CONFIGURATION, "config.yaml"))
    template = yaml.safe_load((ROOT / "config.yaml").read_text())
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(template | documented_config))
    env = {"WORKSPACE_CONFIG_PATH": str(tmp_path), "HOME": str(tmp_path), "MY_GATEWAY_KEY": "k"}
    chosen = choose_provider(load_settings(env, cwd=tmp_path, root=tmp_path), env)
    assert (chosen.name, chosen.model, chosen.env_key) == ("my-gateway", "my-model", "MY_GATEWAY_KEY")


@asynccontextmanager
async def agent_from_readme(root: Path, model_url: str) -> AsyncIterator[str]:
    """Start the agent with the README's commands and the scripted model; yield its URL."""
    code = root / "code"
    code.mkdir()
    commands = the_snippet(README, "starts the agent")
    assert "/path/to/your/code" in commands
    env = {
        **environment(),
        "OPENAI_BASE_URL": model_url,
        "WORKSPACE_CONFIG_PATH": str(ROOT),
        "WORKSPACE_STATE_DIR": str(root / "state"),
        "A2A_PORT": "0",
    }
    log = root / "agent.log"

    def url() -> str | None:
        found = READY.search(log.read_text())
        assert found or process.poll() is None, log.read_text()
        return found and found.group(1)

    with log.open("wb") as output:
        process = psutil.Popen(
            ["sh", "-ec", commands.replace("/path/to/your/code", str(code))],
            cwd=ROOT,
            env=env,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield await eventually(url)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(process.wait)


def environment() -> dict[str, str]:
    return {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}


def command_of(snippet: Snippet, url: str) -> Sequence[str]:
    """Return the command that runs a snippet against the agent at `url`."""
    text = snippet.text.replace(f"{URL}/", url).replace(URL, url.rstrip("/"))
    if snippet.language == "python":
        return [sys.executable, "-c", text]
    text = text.replace(".venv/bin/python", sys.executable)
    # `chat` uses the default address unless it gets another one.
    return ["sh", "-ec", re.sub(r"(codex_workspace chat)", rf"\1 {url}", text)]


CURL = f"""#!{sys.executable}
import sys, urllib.request
words, headers, data, url = sys.argv[1:], {{}}, None, None
while words:
    word = words.pop(0)
    if word == "-H":
        name, _, value = words.pop(0).partition(": ")
        headers[name] = value
    elif word == "-d":
        data = words.pop(0).encode()
    elif not word.startswith("-"):
        url = word
sys.stdout.write(urllib.request.urlopen(urllib.request.Request(url, data, headers)).read().decode())
"""
"""The part of curl that the documented requests use, for machines without curl."""


def path_with_curl(folder: Path) -> str:
    """Return a PATH with curl: the machine's own, or else the replacement."""
    (folder / "bin").mkdir()
    (folder / "bin" / "curl").write_text(CURL)
    (folder / "bin" / "curl").chmod(0o700)
    return f"{os.environ['PATH']}:{folder / 'bin'}"


@pytest.mark.slow
async def test_commands_in_the_documents_work_when_pasted(tmp_path: Path) -> None:
    to_run = [each for file in (README, CLIENTS) for each in snippets_of(file) if each.mark.startswith(RUNS)]
    assert len(to_run) >= 6
    path = path_with_curl(tmp_path)
    async with scripted_model() as model, agent_from_readme(tmp_path, model.base_url) as url:
        for snippet in to_run:
            env = environment() | {"OPENAI_API_KEY": "sk-your-key", "A2A_PORT": url.rstrip("/").rpartition(":")[2]}
            env |= {"WORKSPACE_STATE_DIR": str(tmp_path / "state"), "PATH": path}
            with anyio.fail_after(HANG_S):
                ran = await anyio.run_process(command_of(snippet, url), cwd=ROOT, env=env, check=False)
            assert ran.returncode == 0, (snippet, ran.stderr.decode())
            assert snippet.mark.removeprefix(RUNS) in ran.stdout.decode(), snippet


@pytest.mark.slow
async def test_documented_recorder_works(tmp_path: Path) -> None:
    recorder = tmp_path / "recorder"
    codex = Path(str(importlib.import_module("codex_cli_bin").__file__)).parent / "bin" / "codex"
    text = the_snippet(CONTRIBUTING, "runs as CODEX_BIN").replace("/path/to/codex", str(codex))
    recorder.write_text(text.replace("/usr/bin/env python3", sys.executable))
    recorder.chmod(0o700)
    async with scripted_model() as model:
        setup = AgentSetup(tmp_path, model.base_url, environment={"CODEX_BIN": str(recorder)})
        async with running_agent(setup) as agent, peer(agent.url) as client:
            assert (await client.ask("Hello")).answer == "You said: Hello"
            assert await agent.stop() == 0
    lines = [yaml.safe_load(line) for line in recorder.with_suffix(".ndjson").read_text().splitlines()]
    assert {line["dir"] for line in lines} == {"<", ">"}
    assert lines[0]["msg"]["method"] == "initialize"
    assert any(line["msg"].get("method") == "turn/completed" for line in lines)
