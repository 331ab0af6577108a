"""What a command of the model's may do here: whether codex's sandbox works at all, and what it lets through.

Where the kernel refuses codex a sandbox, as under Docker's default seccomp profile, turns still complete while every
command in them fails. So a command is run before any turn is, by the very codex that will run the model's, with the
settings of its config.toml.
"""

import hashlib
import json
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from codex_workspace.common.errors import CodexCannotStart, CodexRefused, CodexTimeout, ProtocolError
from codex_workspace.common.values import InvalidField, JsonObject, JsonValue, number, text

SECCOMP_PROFILE: Final = "deploy/seccomp.json"
"""The profile that comes with this agent, for Docker hosts: the engine's own, with namespaces and mounts allowed."""

PROBE_TIMEOUT_S: Final = 10.0
"""A command in the sandbox takes about 0.1 s; on a machine that is starting other things, several times that."""

WITHOUT: Final = frozenset(("danger-full-access", "container"))
"""The modes in which codex runs commands without a sandbox of its own."""


class SandboxClient(Protocol):
    """What is needed of the connection to codex."""

    async def call(self, method: str, params: JsonObject, *, timeout_s: float = ...) -> JsonValue:
        """Send a request and return its result."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended."""

    exit_code: int
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True)
class SandboxReport:
    """What a command could do: which folders and files it could read and write, and whether it reached our machine.

    values: digests (`digest`) of every variable's value in the environments that it could read, by process id.
    """

    readable: frozenset[Path]
    writable: frozenset[Path]
    reaches_network: bool
    values: Mapping[int, frozenset[str]]

    def holders_of(self, secrets: Iterable[str]) -> list[int]:
        """Return the ids of the processes whose environment showed one of `secrets` to the command."""
        wanted = {digest(secret) for secret in secrets}
        return sorted(process for process, seen in self.values.items() if seen & wanted)


def digest(value: str) -> str:
    """Return what stands for a variable's value, so that no secret is said to a command or by it."""
    return hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()[:16]


async def check_sandbox(codex: SandboxClient, mode: str, folder: Path, profile: str | None = None) -> None:
    """Have codex run a command in its sandbox, in `folder`; nothing where `mode` (of config.yaml) has none.

    `profile` is codex's permission profile that threads run with, if any.

    Raises:
        CodexCannotStart: the sandbox cannot work here; with codex's own words, and the two ways out.
    """
    if mode in WITHOUT:
        return
    try:
        ran = await run(codex, ["true"], folder, profile)
    except (CodexRefused, CodexTimeout) as error:
        raise sandbox_error(mode, str(error)) from error
    if ran.exit_code != 0:
        raise sandbox_error(mode, ran.stderr or ran.stdout or f"exit code {ran.exit_code}")


def sandbox_error(mode: str, said: str) -> CodexCannotStart:
    """Return the error that says that the sandbox cannot work here, and what helps."""
    why = next((line.strip() for line in said.splitlines() if line.strip()), "")
    return CodexCannotStart(
        f"codex's sandbox (codex.sandbox: {mode}) cannot work on this machine, so every command would fail: "
        f"{why.rstrip('.')}; in Docker, start the container with --security-opt seccomp={SECCOMP_PROFILE}, or, where "
        f"the container itself is sandbox enough, set codex.sandbox to container in config.yaml"
    )


async def run(codex: SandboxClient, command: list[str], folder: Path, profile: str | None = None) -> CommandResult:
    """Have codex run `command` in `folder` as it runs the model's: in the sandbox of its configuration, or `profile`.

    Raises:
        CodexRefused: it cannot be run, as the program or the folder is not there.
        CodexGone, CodexTimeout: as `SandboxClient.call`.
        ProtocolError: codex's answer is of no known shape.
    """
    params: JsonObject = {"command": [*command], "cwd": str(folder), "timeoutMs": int(PROBE_TIMEOUT_S * 1000)}
    if profile is not None:
        params["permissionProfile"] = profile
    answer = await codex.call("command/exec", params, timeout_s=PROBE_TIMEOUT_S + 1)
    try:
        if not isinstance(answer, dict):
            raise InvalidField("a result")
        return CommandResult(number(answer, "exitCode"), text(answer, "stdout"), text(answer, "stderr"))
    except InvalidField as error:
        raise ProtocolError(f"codex answered command/exec without {error}") from error


async def inspect_sandbox(
    codex: SandboxClient, folder: Path, folders: Iterable[Path], profile: str | None = None
) -> SandboxReport:
    """Have codex run a command in `folder` that tries what it may do; nothing is changed.

    Args:
        codex: the connection.
        folder: where the command works.
        folders: which folders and files it tries to read and to write.
        profile: codex's permission profile that threads run with, if any.

    Raises:
        CodexError: as `run`; or the command did not come to its end.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asked = json.dumps({"folders": [str(each) for each in folders], "port": listener.getsockname()[1]})
        ran = await run(codex, [sys.executable, "-I", "-c", _LOOK, asked], folder, profile)
    if ran.exit_code != 0:
        raise ProtocolError(f"a command that looks around ended with {ran.exit_code}: {ran.stderr.strip()[-300:]}")
    seen = json.loads(ran.stdout)
    return SandboxReport(
        readable=frozenset(Path(each) for each in seen["readable"]),
        writable=frozenset(Path(each) for each in seen["writable"]),
        reaches_network=seen["reaches_network"],
        values={int(process): frozenset(values) for process, values in seen["values"].items()},
    )


_LOOK: Final = """
import glob, hashlib, json, os, socket, sys

asked = json.loads(sys.argv[1])


def digests(file):
    try:
        with open(file, "rb") as stream:
            variables = stream.read().split(b"\\0")
    except OSError:
        return []
    return [hashlib.sha256(each.partition(b"=")[2]).hexdigest()[:16] for each in variables if b"=" in each]


def reaches(port):
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


found = {file.split("/")[2]: digests(file) for file in glob.glob("/proc/[0-9]*/environ")}
print(json.dumps({
    "readable": [each for each in asked["folders"] if os.access(each, os.R_OK | os.path.isdir(each) * os.X_OK)],
    "writable": [each for each in asked["folders"] if os.access(each, os.W_OK)],
    "reaches_network": reaches(asked["port"]),
    "values": {process: values for process, values in found.items() if values},
}))
"""
