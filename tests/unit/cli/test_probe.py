"""The container's health check, asked as the container asks it: a process of its own against something that listens."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from codex_workspace.cli.probe import probe
from codex_workspace.config.settings import TEMPLATE_DIR

CARD = "/.well-known/agent-card.json"


@contextmanager
def answering(answers: dict[str, int]) -> Iterator[int]:
    """A server that answers paths with these statuses, and all others with 404; gives its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(answers.get(self.path, 404))
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        ({"/readyz": 200}, None),
        ({"/readyz": 503, CARD: 200}, "the agent is not ready (HTTP 503)"),
        ({CARD: 200}, None),
        ({}, "the agent is not ready (HTTP 404)"),
    ],
    ids=["ready", "not ready", "another host", "something else"],
)
def test_the_response_decides(answers: dict[str, int], problem: str | None) -> None:
    with answering(answers) as port:
        assert probe({"A2A_PORT": str(port)}) == problem


def test_no_server_listens() -> None:
    with answering({}) as port:
        pass
    assert str(probe({"A2A_PORT": str(port)})).startswith("the agent does not answer: ")


def test_the_port_of_config_yaml_is_the_default(tmp_path: Path) -> None:
    with answering({"/readyz": 200}) as port:
        (tmp_path / "config.yaml").write_text(f"name: a\na2a:\n  port: {port}\n")
        assert probe({"WORKSPACE_CONFIG_PATH": str(tmp_path)}) is None


@pytest.mark.parametrize("text", ["name: a\n", "a2a:\n", "a2a: [port]\n", "a2a: {port: x}\n"])
def test_an_unreadable_config_yaml_means_the_default_port(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    # Whatever listens on the default port here, it is asked, and no error comes out.
    said = probe({"WORKSPACE_CONFIG_PATH": str(tmp_path)})
    assert said is None or said.startswith("the agent ")


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_exit_code_is_the_result(status: int, code: int) -> None:
    with answering({"/readyz": status}) as port:
        script = TEMPLATE_DIR / "codex_workspace" / "cli" / "probe.py"
        asked = subprocess.run([sys.executable, "-I", script], env={"A2A_PORT": str(port)}, capture_output=True)
    assert asked.returncode == code
    assert (asked.stderr == b"") == (code == 0)
