"""Runs codex from a program, without A2A, and prints what it does in the current folder.

    OPENAI_API_KEY=sk-your-key python embedding.py "List the files here." [codex | codex-exec]

Codex keeps its sessions in CODEX_HOME, by default a new temporary folder.
"""

import os
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

import anyio

from codex_workspace.runtimes import create_runtime
from codex_workspace.runtimes.events import Done, Text, ToolResult, ToolUse
from codex_workspace.runtimes.launch import Launch, RunOptions


async def main(prompt: str, runtime_name: str, codex_home: Path) -> int:
    """Run one prompt and return the exit code: 0 if codex completed it."""
    launch = Launch(
        binary=Path(os.environ.get("CODEX_BIN") or str(files("codex_cli_bin") / "bin" / "codex")),
        codex_home=codex_home,
        cwd=Path.cwd(),
        environment=os.environ,
        api_key=os.environ["OPENAI_API_KEY"],
    )
    async with (
        create_runtime(runtime_name, launch) as runtime,
        runtime.run(prompt, RunOptions(sandbox="workspace-write")) as run,
    ):
        async for event in run:
            match event:
                case Text(text=text, replaces=False):
                    print(text, end="", flush=True)
                case ToolUse(name=name, input=arguments):
                    print(f"\n-> {name} {arguments}")
                case ToolResult(output=output, is_error=is_error):
                    print(f"<- {'failed: ' if is_error else ''}{output.rstrip()}")
                case Done(stop_reason=reason, error=error):
                    print(f"\n[{reason}] {error.message if error else ''}".rstrip())
                    return 0 if reason == "completed" else 1
    return 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        home = Path(os.environ.get("CODEX_HOME") or folder)
        sys.exit(anyio.run(main, sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "codex", home))
