"""Tries each cell of the table "Who can do what" in docs/sandbox.md. Each of `PROBES` fills one row."""

import json
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeAlias

import anyio
import httpx
import pytest
from a2a.types import TaskState

from tests.docs.test_docs import ROOT, table
from tests.e2e.agent_process import AgentProcess, AgentSetup, running_agent
from tests.e2e.client import peer, script
from tests.matrix.clients import own_client
from tests.support.waiting import HANG_S
from tests.support.webhook_server import webhook

pytestmark = pytest.mark.slow

Cells: TypeAlias = list[str]
"""The cells of a row behind the first: health, send, tasks, metrics, conversations, network."""

OPERATOR: Final = "operator-0123456789abcdef"
ADA: Final = "ada-0123456789abcdef"
MONITOR: Final = "monitor-0123456789abcdef"
HEADERS: Final = {"A2A-Version": "1.0"}
MESSAGE: Final = {"messageId": "probe", "role": "ROLE_USER", "parts": [{"text": "Hello"}]}

PROGRAM: Final = """
import json, os, sys, urllib.request

url, *files = sys.argv[1:]

def status(path, body=None):
    headers = {"A2A-Version": "1.0", "Content-Type": "application/json"}
    try:
        return urllib.request.urlopen(urllib.request.Request(url + path, body, headers)).status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0

def opened(mode):
    try:
        for file in files:
            open(file, mode).close()
        return True
    except OSError:
        return False

message = json.dumps({"message": json.loads('MESSAGE')}).encode()
found = [status("healthz"), status("message:send", message), status("tasks"), status("metrics")]
print("FOUND", json.dumps([found, opened("rb"), opened("r+b")]))
""".replace("MESSAGE", json.dumps(MESSAGE))
"""What a command or another program on the agent's machine can reach: its arguments are the URL and files."""


def secured(setup: AgentSetup, **codex: object) -> AgentSetup:
    """Return an agent with a token of each kind."""
    return replace(
        setup,
        codex=codex,
        config={"principals": [{"name": "ada", "token_env": "ADA"}]},
        environment={"A2A_TOKEN": OPERATOR, "ADA": ADA, "METRICS_TOKEN": MONITOR, "A2A_GRPC_PORT": "0"},
        push={"allow": ["127.0.0.1"]},
    )


def allowed(*statuses: int) -> str:
    """Return `yes` if all requests were answered, `no` if all were rejected for want of a right or a network."""
    assert set(statuses) <= {200} or set(statuses) <= {0, 401, 403}, statuses
    return "yes" if statuses[0] == 200 else "no"


async def try_as_caller(
    agent: AgentProcess, token: str | None, principals: Sequence[str | None] = (OPERATOR, ADA)
) -> Cells:
    """Send requests as a caller; the agent has a task of each principal."""
    owners = {}
    for owner in principals:
        async with peer(agent.url, owner) as client:
            owners[(await client.ask_blocking("Hello")).task_id] = owner
    bearer = HEADERS if token is None else HEADERS | {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(base_url=agent.url, headers=bearer, timeout=HANG_S) as http:
        public = [
            (await http.get(path)).status_code for path in ("/healthz", "/readyz", "/.well-known/agent-card.json")
        ]
        rpc = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {"message": MESSAGE}}
        sent = [
            (await http.post(path, json=body)).status_code
            for path, body in (("/", rpc), ("/message:send", rpc["params"]))
        ]
        listed = await http.get("/tasks")
        foreign = [(await http.get(f"/tasks/{task}")).status_code for task, owner in owners.items() if owner != token]
        metrics = (await http.get("/metrics")).status_code
    seen = {task["id"] for task in listed.json()["tasks"]} if listed.status_code == 200 else set()
    match allowed(listed.status_code), seen & owners.keys():
        case "no", _:
            tasks = "no"
        case _, some if some == owners.keys():
            tasks = "all"
        case _, some:
            assert {owners[task] for task in some} == {token}
            assert set(foreign) == {404}
            tasks = "own"
    can_send = allowed(*sent)
    further = ["by commands", "by commands"] if can_send == "yes" else ["no", "-"]
    return [allowed(*public), can_send, tasks, allowed(metrics), *further]


async def without_token(setup: AgentSetup) -> Cells:
    async with running_agent(secured(setup)) as agent:
        async with httpx.AsyncClient(base_url=agent.url, headers=HEADERS) as http:
            for path in ("/tasks/x", "/extendedAgentCard", "/transcript", "/tasks/x/pushNotificationConfigs", "/other"):
                assert (await http.get(path)).status_code == 401, path
        with pytest.raises(Exception, match="token is unknown"):
            async with own_client("GRPC", agent.url, "unknown") as client:
                await client.list("")
        return await try_as_caller(agent, None)


async def local_program(setup: AgentSetup) -> Cells:
    async with running_agent(setup) as agent:
        return await try_as_caller(agent, None, (None,))


async def web_page(setup: AgentSetup) -> Cells:
    """Try a page's scripts, a page whose host name has the agent's address (DNS rebinding), and images and links."""
    pages = ({"Origin": "http://evil.example"}, {"Host": "evil.example"}, {"Sec-Fetch-Site": "cross-site"})
    paths = ("/.well-known/agent-card.json", "/tasks", "/metrics", "/transcript", "/extendedAgentCard")
    async with running_agent(setup) as agent, httpx.AsyncClient(base_url=agent.url, timeout=HANG_S) as http:
        for page in pages:
            assert [(await http.get(path, headers=page)).status_code for path in ("/healthz", "/readyz")] == [200, 200]
            asked = [await http.get(path, headers=HEADERS | page) for path in paths]
            # A page can send text without a preflight request.
            sent = [HEADERS | page | {"Content-Type": kind} for kind in ("application/json", "text/plain")]
            asked += [await http.post("/message:send", json={"message": MESSAGE}, headers=each) for each in sent]
            assert {each.status_code for each in asked} <= {403, 421}, asked
        assert (await http.get("/tasks", headers=HEADERS)).json()["tasks"] == []
    return ["health only", "no", "no", "no", "no", "-"]


def caller(token: str) -> Callable[[AgentSetup], Awaitable[Cells]]:
    async def probe(setup: AgentSetup) -> Cells:
        async with running_agent(secured(setup)) as agent:
            return await try_as_caller(agent, token)

    return probe


async def webhook_target(setup: AgentSetup) -> Cells:
    async with webhook() as hook, running_agent(secured(setup)) as agent:
        bearer = HEADERS | {"Authorization": f"Bearer {OPERATOR}"}
        async with httpx.AsyncClient(base_url=agent.url, headers=bearer, timeout=HANG_S) as http:
            push = {"taskPushNotificationConfig": {"url": hook.url}}
            sent = await http.post("/message:send", json={"message": MESSAGE, "configuration": push})
        with anyio.fail_after(HANG_S):
            while not any("COMPLETED" in str(each.payload) for each in hook.received):
                await hook.heard(len(hook.received) + 1)
        as_anyone = await try_as_caller(agent, None)
        assert all(sent.json()["task"]["id"] in str(each.payload) for each in hook.received)
        assert OPERATOR not in str(hook.received)
    assert as_anyone[2] == "no"
    return [*as_anyone[:2], "its task's events", *as_anyone[3:]]


def cells_of(found: str) -> Cells:
    """Return the row of what `PROGRAM` has printed."""
    (line,) = [line for line in found.splitlines() if line.startswith("FOUND ")]
    (health, send, tasks, metrics), readable, writable = json.loads(line.removeprefix("FOUND "))
    conversations = ", ".join(word for word, can in (("read", readable), ("write", writable)) if can)
    return [allowed(health), allowed(send), allowed(tasks), allowed(metrics), conversations or "no", allowed(health)]


def conversations_in(state: Path) -> list[Path]:
    """Return the files that contain the conversations: the database, and codex's record of the only one."""
    database, (session,) = state / "workspace.sqlite3", (state / "codex" / "sessions").rglob("*.jsonl")
    return [database, session]


async def run_command(setup: AgentSetup) -> Cells:
    """Run `PROGRAM` as a command of the model, in a conversation's second turn."""
    # Commands can write to /tmp, where the tests' folders are.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as state:
        moved = replace(setup, environment={**setup.environment, "WORKSPACE_STATE_DIR": state})
        async with running_agent(moved) as agent, peer(agent.url, OPERATOR) as client:
            await client.ask("Hello")
            files = conversations_in(Path(state))
            (setup.workspace / "probe.py").write_text(PROGRAM)
            words = " ".join(map(str, [sys.executable, "probe.py", agent.url, *files]))
            seen = await client.ask(script({"run": words}, {"say": "Done."}))
            assert seen.state == TaskState.TASK_STATE_COMPLETED
    return cells_of("".join(str(dict(note.status.message.metadata).get("output", "")) for note in seen.notes))


def command(**codex: object) -> Callable[[AgentSetup], Awaitable[Cells]]:
    return lambda setup: run_command(secured(setup, **codex))


async def hidden(setup: AgentSetup) -> Cells:
    cells = []
    for number, mode in enumerate(("read-only", "workspace-write")):
        root = setup.root / str(number)
        root.mkdir()
        cells.append(await run_command(secured(replace(setup, root=root), sandbox=mode, hide_secrets=True)))
    assert cells[0] == cells[1]
    return cells[0]


async def mcp_server(setup: AgentSetup) -> Cells:
    """Run `PROGRAM` as an MCP server; codex starts it with the first conversation."""
    own = secured(setup)
    server = setup.root / "server.sh"
    # The agent's address is known after its start, and the conversation's file after the server's.
    server.write_text(
        f'cd "{setup.root}"; {sys.executable} probe.py "$(cat url)" state/workspace.sqlite3 > new; mv new found\n'
    )
    (setup.root / "probe.py").write_text(PROGRAM)
    servers = [{"name": "probe", "command": "sh", "args": [str(server)]}]
    async with running_agent(replace(own, config={**own.config, "mcp_servers": servers})) as agent:
        (setup.root / "url").write_text(agent.url)
        async with peer(agent.url, OPERATOR) as client:
            await client.ask("Hello")
        return cells_of((setup.root / "found").read_text())


PROBES: Final[Mapping[str, Callable[[AgentSetup], Awaitable[Cells]]]] = {
    "anyone who reaches the port, without a token": without_token,
    "a program on the agent's machine, if the agent has no token": local_program,
    "a web page in a browser on this machine": web_page,
    "a principal, with a token of its own": caller(ADA),
    "the operator, with `A2A_TOKEN` or the generated token": caller(OPERATOR),
    "a monitor, with `METRICS_TOKEN`": caller(MONITOR),
    "the target of a webhook": webhook_target,
    "a command, `read-only`": command(sandbox="read-only"),
    "a command, `workspace-write`": command(sandbox="workspace-write"),
    "a command, either with `hide_secrets`": hidden,
    "a command, `container`": command(sandbox="container"),
    "an MCP server's program": mcp_server,
}

ROWS: Final = {row[0]: row[1:] for row in table(ROOT / "docs" / "sandbox.md", "access")}


def test_every_row_has_a_probe() -> None:
    assert list(ROWS) == list(PROBES)


@pytest.mark.parametrize("who", PROBES)
async def test_each_row_states_what_is_possible(setup: AgentSetup, who: str) -> None:
    assert await PROBES[who](setup) == ROWS[who]
