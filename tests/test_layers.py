"""Imports point downwards only: the drawing of the rooms, held to."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

LAYERS = [
    # Who puts the parts together.
    {"__main__"},
    {"adapter", "demo", "demo_platform", "doctor", "serve"},
    {"agent", "chat", "staging"},
    {"platform_host"},
    {"exec_backend"},
    {"agent_tools", "exec_standing", "hosted", "inbox", "late_answers", "platform_stand_in", "punctual"},
    # Who brings messages in, and the edges.
    {"exec_conversation", "runtimes"},
    {"app_server_runs", "exec_process"},
    {"exec_once", "exec_mcp_settings"},
    {"exec_end"},
    {"app_server", "executor", "letters", "scripted_model", "server", "stand_in_api", "terminal"},
    {
        "card",
        "errands",
        "executors",
        "grpc_server",
        "peer_calls",
        "platform_replies",
        "platform_tools",
        "recollection",
        "signing",
        "stand_in_delivery",
        "stand_in_line",
        "views",
    },
    {"inbox_rows", "stand_in_faults", "stand_in_store"},
    {"platform_api", "toolbox"},
    # Coordination.
    {"levels", "orders"},
    {"job", "wishes"},
    {"talks"},
    {"conversation", "exec_turn"},
    {"asked", "exec_files", "exec_record", "exec_servers", "handler", "recovery", "streams", "supply", "turn"},
    {"push", "sandbox"},
    {"exec_lines", "exec_login"},
    {"agent_stream"},
    # Translation.
    {"failures", "handover", "history", "items", "midturn", "replies", "snapshots"},
    {"presentation", "tool_uses"},
    {"answered", "answers", "live", "prompts", "redaction"},
    {"questions"},
    {"diffs", "exec_arguments", "exec_reader", "forms", "mailbox", "mcp_startup", "parts", "refusals", "telemetry"},
    {"events"},
    {"agent_events", "events_v1"},
    {"fields", "tool_names"},
    # What is kept.
    {"hiding", "shared_config", "store"},
    {"retention", "soundness"},
    {"deliveries", "exchanges", "mail", "memories", "migrations", "push_configs"},
    {"attachments", "codex_home", "config_schema", "delegation_results", "health", "transcript"},
    {"providers"},
    {"settings", "subscription"},
    {"mcp_servers", "peers", "skills"},
    {"instructions"},
    # Ground.
    {"callers"},
    {"parameters"},
    {"dialect", "edges"},
    {"busy", "replacing"},
    {"admission", "environment", "guards", "rates", "readers", "webhooks", "wire", "lock"},
    {"schema"},
    {
        "contract",
        "errors",
        "groups",
        "logs",
        "metrics",
        "owner",
        "pauses",
        "pipes",
        "probe",
        "processes",
        "quoting",
        "scrubbing",
        "toml_text",
        "tables",
        "task_states",
        "tracing",
        "versions",
    },
    {"config_errors"},
]
"""Every module, by its floor; it may import from the floors below its own."""

FLOOR = {module: -number for number, layer in enumerate(LAYERS) for module in layer}
FILES = {
    file.stem: file for file in (*ROOT.glob("*.py"), *ROOT.glob("codex_workspace/*.py")) if file.stem != "__init__"
}


def imports_of(file: Path) -> set[str]:
    """Return the names of the project's modules that a file imports, wherever in the file."""
    return {name.removeprefix("codex_workspace.") for name in names_in(file)} & set(FILES)


def packages_of(file: Path) -> set[str]:
    """Return the packages that a file imports from."""
    return {name.split(".")[0] for name in names_in(file)}


def names_in(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Import(names=names):
                found |= {name.name for name in names}
            case ast.ImportFrom(module=str(module), names=names):
                found |= {module} | {f"{module}.{name.name}" for name in names}
            case _:
                pass
    return found


def test_every_module_has_its_floor() -> None:
    assert set(FILES) - set(FLOOR) == set(), "name the new modules in LAYERS"


@pytest.mark.parametrize("module", sorted(FILES))
def test_imports_point_downwards(module: str) -> None:
    upwards = {name for name in imports_of(FILES[module]) if FLOOR[name] >= FLOOR[module]}
    assert not upwards, f"{module} imports {', '.join(sorted(upwards))}"


KNOWS = {
    "a2a": {
        *(
            "adapter",
            "answered",
            "asked",
            "busy",
            "callers",
            "card",
            "chat",
            "contract",
            "deliveries",
            "demo",
            "exchanges",
            "executor",
            "executors",
        ),
        *(
            "grpc_server",
            "handler",
            "handover",
            "hosted",
            "job",
            "late_answers",
            "live",
            "migrations",
            "orders",
            "push",
            "push_configs",
        ),
        *(
            "inbox_rows",
            "letters",
            "parameters",
            "parts",
            "peer_calls",
            "platform_host",
            "punctual",
            "replies",
            "retention",
            "serve",
            "server",
            "signing",
            "snapshots",
            "store",
            "streams",
            "task_states",
            "terminal",
        ),
    },
    "httpcore": {"peer_calls", "webhooks"},
    "mcp": {"agent_tools"},
    "molecule_runtime": {"contract"},
    "sqlalchemy": {
        *("agent", "deliveries", "doctor", "health", "migrations", "push_configs", "retention", "soundness", "store"),
        *("exchanges", "mail", "memories", "tables"),
    },
    "starlette": {
        *(
            "agent_tools",
            "callers",
            "dialect",
            "edges",
            "guards",
            "parameters",
            "platform_stand_in",
            "server",
            "stand_in_api",
            "stand_in_line",
            "views",
        ),
    },
    "grpc": {"callers", "grpc_server"},
    "cryptography": {"signing"},
    "opentelemetry": {"tracing"},
    "prometheus_client": {"metrics"},
    "tomlkit": {"codex_home", "exec_arguments", "hiding", "toml_text"},
}
"""Who may know an outside party."""


@pytest.mark.parametrize("package", KNOWS)
def test_only_the_named_modules_know_an_outside_party(package: str) -> None:
    known_by = {module for module, file in FILES.items() if package in packages_of(file)}
    assert known_by <= KNOWS[package]
