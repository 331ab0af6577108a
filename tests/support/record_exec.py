"""Record the output of `codex exec --json`: `python -m tests.support.record_exec CODEX [SCENARIO …]`.

The model is scripted; codex, its commands, patches and MCP server are real. One file per scenario is written to
`recordings/exec/<version>/`; its README describes the format. Scenarios that this codex does not support are skipped.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGTERM
from typing import Final

import anyio
import tomlkit
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from codex_workspace.devkit.model import scripted_model
from codex_workspace.devkit.model_requests import MARKER
from tests.support.paths import RECORDINGS, ROOT

FOLDER: Final = RECORDINGS / "exec"
MCP_SERVER: Final = ROOT / "tests" / "e2e" / "mcp_server.py"
SECRET: Final = "sk-scripted-0123456789"
HOME: Final = "/home/agent"
"""Replaces the temporary folder in a recording."""

RUN_TIMEOUT_S: Final = 60.0
MAX_LINE_BYTES: Final = 1 << 24

Steps = Sequence[Mapping[str, object]]

ADD: Final = "*** Begin Patch\n*** Add File: a.txt\n+one\n+two\n*** Add File: gone.txt\n+soon\n*** End Patch"
CHANGE: Final = (
    "*** Begin Patch\n*** Update File: a.txt\n@@\n one\n-two\n+three\n*** Delete File: gone.txt\n*** End Patch"
)
REFUSED: Final = "*** Begin Patch\n*** Update File: nowhere.txt\n@@\n-one\n+two\n*** End Patch"
PLAN: Final = ("look", "write", "test")


def plan(done: int) -> Mapping[str, object]:
    """Return the step that updates the plan."""
    words = ("completed", "in_progress", "pending")
    statuses = (words[0 if at < done else 1 if at == done else 2] for at in range(len(PLAN)))
    return {"plan": [{"step": step, "status": status} for step, status in zip(PLAN, statuses, strict=True)]}


def call(tool: str, **arguments: object) -> Mapping[str, object]:
    """Return the step that calls a tool of the MCP server."""
    return {"tool": {"name": tool, "namespace": "mcp__probe", "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class Scenario:
    """The prompts, one run each; later runs resume the first one's thread.

    With `stop_at`, codex is ended by SIGTERM after this output.
    """

    runs: tuple[Steps, ...]
    stop_at: str | None = None
    config: Mapping[str, object] = field(default_factory=dict)


SCENARIOS: Final[Mapping[str, Scenario]] = {
    "answer": Scenario((({"reason": ["think hard", "and again"], "say": "It is done, as you said."},),)),
    "resume": Scenario((({"say": "The word is basalt."},), ({"repeat": True},))),
    "commands": Scenario(
        (
            (
                {"say": "I look first.", "run": "echo hi; printf 'no newline'"},
                {"run": ["false", "echo to-stderr >&2; exit 3"]},
                {"say": "Both are done.", "usage": {"input_tokens": 50, "cached_tokens": 20, "output_tokens": 7}},
            ),
        )
    ),
    "files": Scenario((({"patch": ADD}, {"patch": CHANGE}, {"patch": REFUSED}, {"say": "Changed."}),)),
    "mcp": Scenario(
        (
            (
                call("echo", text="hello"),
                call("echo", wrong=1),
                call("nothing"),
                call("crash"),
                {"say": "Called."},
            ),
        ),
        config={
            "mcp_servers": {
                "probe": {
                    "command": sys.executable,
                    "args": [str(MCP_SERVER)],
                    "required": True,
                    "default_tools_approval_mode": "approve",
                }
            }
        },
    ),
    "plan": Scenario(
        ((plan(0), plan(1), {"run": "true"}, plan(3), {"say": "As planned."}),),
        config={"tools": {"update_plan": {"enabled": True}}},
    ),
    "search": Scenario((({"search": "basalt density", "say": "It is 3 g/cm3."},),), config={"web_search": "live"}),
    "messages": Scenario((({"say": "First.", "phase": "commentary"}, {"say": "Second."}),)),
    "retried": Scenario((({"say": "Cut off here and said again.", "cut": True, "times": 1},),)),
    "refused": Scenario((({"fail": 401},),)),
    "failed": Scenario((({"run": "echo before"}, {"fail": "context_length_exceeded", "message": "too long"}),)),
    "outlived": Scenario((({"run": "sleep 3", "yield_ms": 250}, {"say": "It runs on."}),)),
    "unknown_model": Scenario((({"say": "All the same."},),), config={"model": "gpt-unknown"}),
    "stopped": Scenario((({"say": "Now.", "run": "sleep 60"},),), stop_at="sleep 60"),
    "stopped_in_words": Scenario((({"reason": "hm", "say": "Some words", "stall": True},),), stop_at="hm"),
}


class Recorder:
    """Runs one codex in its own folder."""

    def __init__(self, codex: Path, root: Path, model_url: str) -> None:
        self._codex = codex
        self._root = root
        self._model_url = model_url
        self.version: Final = _version(codex)

    async def record(self, scenario: Scenario) -> list[Mapping[str, object]]:
        """Return the records of a scenario."""
        self._prepare(scenario.config)
        records: list[Mapping[str, object]] = []
        thread = None
        for steps in scenario.runs:
            output = await self._run(f"Do this.\n{MARKER}{json.dumps(steps)}", thread, scenario.stop_at)
            thread = thread or _thread_in(output)
            records += output
        return records

    def _prepare(self, config: Mapping[str, object]) -> None:
        if self.version < (0, 150, 0):
            # Enabled by default in that version, and no setting.
            config = {key: value for key, value in config.items() if key != "tools"}
        for name in ("codex", "work"):
            (self._root / name).mkdir(parents=True)
        provider = {
            "name": "scripted",
            "base_url": self._model_url,
            "wire_api": "responses",
            "env_key": "SCRIPTED_KEY",
            "request_max_retries": 0,
            "stream_max_retries": 1,
        }
        settings = {
            "model": "gpt-5.5",
            "model_provider": "scripted",
            "model_providers": {"scripted": provider},
            "features": {"plugins": False, "apps": False, "goals": False, "unbounded_connection_retries": False},
            "check_for_update_on_startup": False,
            **config,
        }
        (self._root / "codex" / "config.toml").write_text(tomlkit.dumps(settings))

    def _command(self, thread: str | None) -> list[str]:
        json_flag = "--experimental-json" if self.version < (0, 44, 0) else "--json"
        options = ["--skip-git-repo-check", "--sandbox", "danger-full-access", "--color", "never", json_flag]
        if self.version < (0, 44, 0):
            options.append("--include-plan-tool")
        return [str(self._codex), "exec", *options, *(["resume", thread] if thread else []), "-"]

    async def _run(self, prompt: str, thread: str | None, stop_at: str | None) -> list[Mapping[str, object]]:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self._root),
            "CODEX_HOME": str(self._root / "codex"),
            "SCRIPTED_KEY": SECRET,
        }
        records: list[Mapping[str, object]] = [{"prompt": prompt, "resumes": thread}]
        start = time.monotonic()
        with anyio.fail_after(RUN_TIMEOUT_S):
            async with await anyio.open_process(
                self._command(thread),
                cwd=self._root / "work",
                env=environment,
                stderr=subprocess.DEVNULL,
            ) as process:
                assert process.stdin is not None
                await process.stdin.send(prompt.encode())
                await process.stdin.aclose()
                async for line in _lines(process):
                    clean = line.replace(str(self._root), HOME)
                    records.append({"t": round(time.monotonic() - start, 3), "line": clean})
                    if stop_at is not None and stop_at in line:
                        process.send_signal(SIGTERM)
                code = await process.wait()
        return [*records, {"exit": code}]


async def _lines(process: Process) -> AsyncIterator[str]:
    assert process.stdout is not None
    stdout = BufferedByteReceiveStream(process.stdout)
    with suppress(anyio.EndOfStream, anyio.IncompleteRead):
        while True:
            yield (await stdout.receive_until(b"\n", MAX_LINE_BYTES)).decode()


def _version(codex: Path) -> tuple[int, ...]:
    output = subprocess.run([str(codex), "--version"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"(\d+)\.(\d+)\.(\d+)", output)
    if found is None:
        raise SystemExit(f"{codex} says no version: {output!r}")
    return tuple(map(int, found.groups()))


def _thread_in(records: Sequence[Mapping[str, object]]) -> str | None:
    for record in records:
        with suppress(ValueError):
            event = json.loads(str(record.get("line")))
            if isinstance(event, dict) and event.get("type") in ("thread.started", "session.created"):
                return str(event.get("thread_id") or event.get("session_id"))
    return None


async def main(codex: Path, names: Sequence[str]) -> None:
    """Record the given scenarios, or all of them."""
    for name in names or SCENARIOS:
        with tempfile.TemporaryDirectory(prefix="record-exec-") as folder:
            async with scripted_model() as model:
                recorder = Recorder(codex, Path(folder), model.base_url)
                records = await recorder.record(SCENARIOS[name])
        file = FOLDER / ".".join(map(str, recorder.version)) / f"{name}.ndjson"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records))
        sys.stdout.write(f"{file.relative_to(FOLDER)}: {len(records)} records\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("codex", type=Path)
    parser.add_argument("scenario", nargs="*", choices=[[], *SCENARIOS])
    arguments = parser.parse_args()
    anyio.run(main, arguments.codex.resolve(), arguments.scenario)
