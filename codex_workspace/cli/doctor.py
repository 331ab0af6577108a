"""Diagnoses problems of this agent's setup and prints a remedy for each: `codex-workspace doctor`.

The doctor changes nothing. `CHECKS` lists the checks in their order, and the checks that each one depends on.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import anyio

from codex_workspace.cli.checks import (
    EXIT_CONFIG,
    Facts,
    Finding,
    check_access,
    check_codex_home,
    check_config,
    check_database,
    check_disk,
    check_instructions,
    check_lock,
    check_model,
    check_platform,
    check_port,
    check_provider,
    check_schema,
    check_state,
    check_workspace,
)
from codex_workspace.cli.codex_checks import check_codex, check_handshake, check_mcp, check_sandbox_finding
from codex_workspace.common.errors import ConfigError
from codex_workspace.common.files import lock_folder
from codex_workspace.config.loading import load_settings
from codex_workspace.storage.database import set_aside, sqlite_file

EXIT_OTHER: Final = 1
EXIT_CODEX: Final = 3


@dataclass(frozen=True, slots=True)
class Check:
    """One check: the checks that must have succeeded before it, and the exit code of its failure."""

    name: str
    run: Callable[[Facts], Finding]
    needs: tuple[str, ...] = ()
    exit_code: int = EXIT_OTHER


def doctor(env: Mapping[str, str], *, as_json: bool, online: bool = False) -> int:
    """Run all checks and print their findings.

    Args:
        env: the agent's environment.
        as_json: print one JSON list instead of lines.
        online: also send a request to the model's provider, with the credential.

    Returns:
        The exit code: 0 if nothing failed, 2 if the configuration is wrong, 3 if codex cannot start, else 1.
    """
    # The findings state what libraries and the connection to codex would log.
    logging.basicConfig(handlers=[logging.NullHandler()])
    findings: dict[str, Finding] = {}
    failures: set[int] = set()
    facts = Facts(env)
    for check in (*CHECKS, *(ONLINE if online else ())):
        found = _run(check, facts, findings)
        found = replace(found, finding=facts.redact(found.finding), remedy=facts.redact(found.remedy))
        findings[check.name] = found
        if found.status == "failed":
            failures.add(found.exit_code or check.exit_code)
        if not as_json:
            _print(check.name, found)
    if as_json:
        print(json.dumps([_as_json(name, found) for name, found in findings.items()], indent=2, ensure_ascii=False))
    return next((code for code in (EXIT_CONFIG, EXIT_CODEX, EXIT_OTHER) if code in failures), 0)


def _run(check: Check, facts: Facts, before: Mapping[str, Finding]) -> Finding:
    missing = [name for name in before if name in check.needs and before[name].status in ("failed", "not run")]
    if missing:
        return Finding("not run", f"needs {' and '.join(missing)}")
    return check.run(facts)


def _as_json(name: str, found: Finding) -> dict[str, str]:
    return {"check": name, **{key: value for key, value in asdict(found).items() if key != "exit_code"}}


def _print(name: str, found: Finding) -> None:
    finding = found.finding.replace("\n", f"\n{'':<22}")
    print(f"{found.status:<8} {name:<12} {finding}", flush=True)
    if found.remedy:
        print(f"{'':<21} -> {found.remedy}", flush=True)


def set_database_aside(env: Mapping[str, str]) -> int:
    """Rename a database file that is damaged or belongs to another program, print its new name, and return 0.

    Raises:
        ConfigError: the file is neither, the database is not a SQLite file, or an agent uses it.
    """
    settings = load_settings(env)
    file = sqlite_file(settings.database_url.reveal())
    if file is None:
        raise ConfigError("DATABASE_URL: only the file of a SQLite database can be set aside")
    if not settings.state_dir.is_dir():
        raise ConfigError(f"WORKSPACE_STATE_DIR: {settings.state_dir} does not exist, so there is nothing to set aside")
    print(f"{file} is now {anyio.run(_set_aside, settings.state_dir, file)}; the next start creates a new one")
    return 0


async def _set_aside(folder: Path, file: Path) -> Path:
    async with lock_folder(folder):
        return set_aside(file)


CHECKS: Final = (
    Check("config", check_config, exit_code=EXIT_CONFIG),
    Check("provider", check_provider, needs=("config",), exit_code=EXIT_CONFIG),
    Check("instructions", check_instructions, needs=("config",)),
    Check("access", check_access, needs=("config",)),
    Check("codex", check_codex, needs=("config",), exit_code=EXIT_CODEX),
    Check("state", check_state, needs=("config",)),
    Check("codex home", check_codex_home, needs=("config",)),
    Check("disk", check_disk, needs=("config",)),
    Check("workspace", check_workspace, needs=("config",)),
    Check("lock", check_lock, needs=("config",)),
    Check("schema", check_schema, needs=("config",), exit_code=EXIT_CONFIG),
    Check("database", check_database, needs=("config", "schema")),
    Check("port", check_port, needs=("config",)),
    Check("handshake", check_handshake, needs=("provider", "codex"), exit_code=EXIT_CODEX),
    Check("sandbox", check_sandbox_finding, needs=("handshake",), exit_code=EXIT_CODEX),
    Check("mcp servers", check_mcp, needs=("handshake",), exit_code=EXIT_CODEX),
    Check("platform", check_platform, needs=("config",)),
)
"""In the order in which they run."""

ONLINE: Final = (Check("model", check_model, needs=("provider",)),)
"""Checks that run with `--online` only."""
