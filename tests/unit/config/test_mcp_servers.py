"""`mcp_servers` of config.yaml: what codex's config.toml holds of them, what only its pipe carries, what is refused."""

import tomllib
from pathlib import Path

import pytest
import yaml

from codex_workspace.common.errors import ConfigError
from codex_workspace.config.codex_toml import edit, managed_config
from codex_workspace.config.loading import load_settings
from codex_workspace.config.mcp_servers import McpServers
from codex_workspace.config.providers import choose_provider
from codex_workspace.config.settings import TEMPLATE_DIR, Settings
from codex_workspace.launching import secrets_of, thread_options
from tests.docs.test_docs import CONFIGURATION, the_snippet

TOKEN = "token-0123456789"
PROGRAM = {"name": "srv", "command": "serve"}
ADDRESS = {"name": "srv", "url": "https://mcp.example/v1?tools=all"}


def load(folder: Path, *servers: object, **env: str) -> Settings:
    config = {"name": "agent", "runtime": "codex", "model": "gpt-5.5", "mcp_servers": list(servers)}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return load_settings(
        {"WORKSPACE_STATE_DIR": str(folder), "OPENAI_API_KEY": "sk-1", **env}, config_path=folder, cwd=folder
    )


def in_toml(settings: Settings) -> object:
    """What codex reads of the servers in its config.toml."""
    provider = choose_provider(settings, {"OPENAI_API_KEY": "sk-1"})
    text = edit("", managed_config(settings, provider))
    assert TOKEN not in text
    return tomllib.loads(text).get("mcp_servers", {})


def config_of(settings: Settings) -> object:
    """Return the config that codex gets with each thread."""
    provider = choose_provider(settings, {"OPENAI_API_KEY": "sk-1"})
    return thread_options(settings, provider).params().get("config")


def test_without_servers_nothing_is_configured(tmp_path: Path) -> None:
    settings = load(tmp_path)
    assert (settings.mcp, in_toml(settings), config_of(settings)) == (McpServers(), {}, None)


def test_a_stdio_server_with_all_keys(tmp_path: Path) -> None:
    entry = {
        **PROGRAM,
        "args": ["--level", "${NOT_FILLED}"],
        "env": {"PLAIN": "a $ b", "BRACES": "$${X}", "KEY": "${MY_TOKEN}", "URL": "u:${MY_TOKEN}@${HOME}"},
        "cwd": "tools",
        "startup_timeout_s": 5,
        "tool_timeout_s": 7.5,
        "enabled_tools": ["a", "b"],
        "disabled_tools": ["b"],
        "required": True,
        "trusted": True,
    }
    settings = load(tmp_path, entry, MY_TOKEN=TOKEN, HOME="/home/somebody")
    assert in_toml(settings) == {
        "srv": {
            "command": "serve",
            "args": ["--level", "${NOT_FILLED}"],
            "cwd": "tools",
            "env": {"PLAIN": "a $ b", "BRACES": "${X}"},
            "startup_timeout_sec": 5.0,
            "tool_timeout_sec": 7.5,
            "enabled_tools": ["a", "b"],
            "disabled_tools": ["b"],
            "required": True,
            "default_tools_approval_mode": "approve",
        }
    }
    assert config_of(settings) == {
        "mcp_servers": {"srv": {"env": {"KEY": TOKEN, "URL": f"u:{TOKEN}@/home/somebody"}}},
    }
    hidden = secrets_of(settings, None)
    assert TOKEN in hidden
    assert "/home/somebody" not in hidden
    assert TOKEN not in repr(settings)
    assert (settings.mcp.required, settings.mcp.patience_s) == (True, 5.0)


def test_an_http_server_with_all_keys(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    headers = {"X-Plain": "agent", "X-Key": "id ${PARTNER}"}
    entry = {**ADDRESS, "bearer_token_env": "MY_TOKEN", "headers": headers}
    settings = load(tmp_path, entry, MY_TOKEN_FILE=str(file), PARTNER="partner-012345")
    assert in_toml(settings) == {
        "srv": {
            "url": "https://mcp.example/v1?tools=all",
            "http_headers": {"X-Plain": "agent"},
            "startup_timeout_sec": 30.0,
            "tool_timeout_sec": 60.0,
        }
    }
    assert config_of(settings) == {
        "mcp_servers": {"srv": {"http_headers": {"Authorization": f"Bearer {TOKEN}", "X-Key": "id partner-012345"}}}
    }
    assert {TOKEN, "partner-012345"} <= set(secrets_of(settings, None))


def test_short_values_are_no_secrets_to_look_for(tmp_path: Path) -> None:
    settings = load(tmp_path, {**PROGRAM, "env": {"LEVEL": "${LEVEL}"}}, LEVEL="info")
    assert "info" not in secrets_of(settings, None)


def test_an_optional_server_is_omitted_without_its_variable(tmp_path: Path) -> None:
    settings = load(tmp_path, {**PROGRAM, "env": {"KEY": "${MISSING}"}}, {**ADDRESS, "name": "other"})
    assert list(settings.mcp.left_out) == ["srv"]
    assert settings.mcp.left_out["srv"] == (
        "mcp_servers[0].env.KEY names the variable MISSING, which is not set; set it (or MISSING_FILE)"
    )
    assert [server.name for server in settings.mcp.servers] == ["other"]


def test_without_required_servers_nothing_else_differs(tmp_path: Path) -> None:
    settings = load(tmp_path, {**PROGRAM, "required": True}, {**ADDRESS, "name": "other"})
    same = load(tmp_path, PROGRAM, {**ADDRESS, "name": "other"})
    assert settings.mcp.optional == same.mcp
    assert settings.mcp.required


def test_processes_of_all_threads_are_bounded(tmp_path: Path) -> None:
    two = load(tmp_path, PROGRAM, {**PROGRAM, "name": "other"}, {**ADDRESS, "name": "web"}).mcp
    assert [two.threads_within(processes, 400) for processes in (1, 3, 64, 1000)] == [1, 1, 32, 400]
    assert load(tmp_path, ADDRESS).mcp.threads_within(1, 400) == 400


def examples() -> list[object]:
    """What CONFIGURATION and config.yaml show of the servers."""
    commented = (TEMPLATE_DIR / "config.yaml").read_text().partition("\n# mcp_servers:\n")[2].partition("\n\n")[0]
    shown = "\n".join(["mcp_servers:", *(line.removeprefix("# ") for line in commented.splitlines())])
    return [yaml.safe_load(text)["mcp_servers"] for text in (the_snippet(CONFIGURATION, "mcp_servers"), shown)]


@pytest.mark.parametrize("servers", examples(), ids=["CONFIGURATION", "config.yaml"])
def test_documented_servers_are_accepted(tmp_path: Path, servers: list[object]) -> None:
    settings = load(tmp_path, *servers, TICKETS_TOKEN=TOKEN, DOCS_TOKEN="d", TEAM="t")
    assert [server.name for server in settings.mcp.servers] == ["tickets", "docs"]
    assert config_of(settings) == {
        "mcp_servers": {
            "tickets": {"env": {"TICKETS_TOKEN": TOKEN}},
            "docs": {"http_headers": {"Authorization": "Bearer d", "X-Team": "t"}},
        }
    }


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ([{"name": "srv"}], "mcp_servers[0]: must have either command or url"),
        ([PROGRAM | ADDRESS], "mcp_servers[0]: must have either command or url"),
        ([PROGRAM, ADDRESS], "mcp_servers[1].name: is a duplicate: 'srv'"),
        ([PROGRAM | {"name": "a b"}], "mcp_servers[0].name: must be 1 to 64 letters, digits, _ or -"),
        ([PROGRAM | {"url_": 1}], "mcp_servers[0].url_: is not a known key (did you mean url?)"),
        ([PROGRAM | {"headers": {"X": "y"}}], "mcp_servers[0].headers: is only valid for a server with url"),
        ([PROGRAM | {"bearer_token_env": "T"}], "mcp_servers[0].bearer_token_env: is only valid for a server with url"),
        ([ADDRESS | {"args": ["x"]}], "mcp_servers[0].args: is only valid for a server with command"),
        ([ADDRESS | {"env": {"X": "y"}}], "mcp_servers[0].env: is only valid for a server with command"),
        ([ADDRESS | {"cwd": "x"}], "mcp_servers[0].cwd: is only valid for a server with command"),
        ([ADDRESS | {"url": "mcp.example"}], "mcp_servers[0].url: must be an http:// or https:// URL"),
        ([ADDRESS | {"url": "https://u:p@mcp.example"}], "mcp_servers[0].url: must be an http:// or https:// URL"),
        ([PROGRAM | {"env": ["X=y"]}], "mcp_servers[0].env: must be a mapping, each value text, but is a list"),
        ([PROGRAM | {"env": {"X": 8080}}], "mcp_servers[0].env.X: must be text, but is a number; put it in quotes"),
        ([PROGRAM | {"env": {"a-b": "y"}}], "mcp_servers[0].env: contains the key 'a-b', but a key must be the name"),
        ([PROGRAM | {"env": {"X": "${A"}}], "mcp_servers[0].env.X: contains ${ without a variable name and }"),
        ([PROGRAM | {"env": {"X": "${A B}"}}], "mcp_servers[0].env.X: contains ${ without a variable name and }"),
        (
            [PROGRAM | {"env": {"X": "${NOT_SET}"}, "required": True}],
            "mcp_servers[0].env.X: names the variable NOT_SET, which is not set; set it (or NOT_SET_FILE)",
        ),
        (
            [ADDRESS | {"bearer_token_env": "NOT_SET", "required": True}],
            "mcp_servers[0].bearer_token_env: names the variable NOT_SET, which is not set",
        ),
        ([ADDRESS | {"headers": {"X": "a\nb"}}], "mcp_servers[0].headers.X: must be printable ASCII"),
        ([ADDRESS | {"headers": {"X": "${LINES}"}}], "mcp_servers[0].headers.X: must be printable ASCII"),
        (
            [ADDRESS | {"headers": {"authorization": "x"}, "bearer_token_env": "LINES"}],
            "mcp_servers[0].headers: must not contain Authorization if bearer_token_env is set",
        ),
        ([PROGRAM | {"startup_timeout_s": 0}], "mcp_servers[0].startup_timeout_s: must be a number from 0.1 to 604800"),
        ([PROGRAM | {"enabled_tools": "all"}], "mcp_servers[0].enabled_tools: must be a list"),
    ],
)
def test_errors_name_their_key(tmp_path: Path, entries: list[object], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, *entries, LINES="one\ntwo")
    assert str(caught.value).startswith(f"{tmp_path}/config.yaml: {problem}")


def test_a_bearer_token_has_no_blank_in_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="environment: MY_TOKEN: must be printable ASCII without spaces") as caught:
        load(tmp_path, ADDRESS | {"bearer_token_env": "MY_TOKEN"}, MY_TOKEN="to ken")
    assert "to ken" not in str(caught.value)
