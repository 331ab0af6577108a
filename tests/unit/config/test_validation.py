"""The JSON Schema of config.yaml says what the agent does: it takes what is taken, and refuses what it can see.

Covers `config.provider_entry`.
"""

import json
import re
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, cast

import pytest
import regress
import yaml
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import extend
from pydantic import create_model

from codex_workspace.common.errors import ConfigError, ConfigLocation
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.config.a2a_server import A2AConfig
from codex_workspace.config.loading import load_settings
from codex_workspace.config.mcp_servers import McpServerEntry
from codex_workspace.config.provider_entry import ProviderEntry
from codex_workspace.config.providers import choose_provider
from codex_workspace.config.settings import (
    TEMPLATE_DIR,
    CodexConfig,
    Config,
    LimitsConfig,
    PrincipalEntry,
    PushConfig,
    RuntimeConfig,
    StorageConfig,
)
from codex_workspace.config.validation import BoundedLoader, Section, read_section, schema_text
from tests.support.bad_configuration import BAD, GOOD

COMMITTED: Final = TEMPLATE_DIR / "config.schema.json"


def _ecma_pattern(_: Validator, pattern: str, instance: object, __: object) -> Iterator[ValidationError]:
    """Read patterns as editors do; Python's differ, as in what `$` is."""
    if isinstance(instance, str) and regress.Regex(pattern, "u").find(instance) is None:
        yield ValidationError(f"{instance!r} is not {pattern}")


EditorsValidator = cast(
    "Callable[[JsonObject], Validator]",
    extend(Draft202012Validator, {"pattern": _ecma_pattern}),  # type: ignore[no-untyped-call]
)
TEXT: Final = schema_text(Config, "config.yaml of codex-workspace")
CONFIG_SCHEMA: Final[JsonObject] = json.loads(TEXT)
SCHEMA: Final = EditorsValidator(CONFIG_SCHEMA)


def is_taken_by_schema(config: JsonValue) -> bool:
    return SCHEMA.is_valid(config)


def test_it_is_a_schema() -> None:
    Draft202012Validator.check_schema(CONFIG_SCHEMA)


def test_the_committed_file_is_it_and_config_yaml_points_to_it() -> None:
    assert COMMITTED.read_text() == TEXT, (
        "run: .venv/bin/python -m codex_workspace doctor --schema > config.schema.json"
    )
    first = (TEMPLATE_DIR / "config.yaml").read_text().splitlines()[0]
    assert first == f"# yaml-language-server: $schema={COMMITTED.name}"


def test_the_doctor_prints_it_despite_an_invalid_configuration(tmp_path: Path) -> None:
    env = {"WORKSPACE_CONFIG_PATH": str(tmp_path / "nowhere"), "PYTHONPATH": str(TEMPLATE_DIR), "A2A_PORT": "no"}
    asked = subprocess.run(
        [sys.executable, "-m", "codex_workspace", "doctor", "--schema"], env=env, cwd=tmp_path, capture_output=True
    )
    assert (asked.returncode, asked.stderr) == (0, b"")
    assert asked.stdout.decode() == TEXT


def properties_of(schema: JsonObject, path: str = "") -> Iterator[tuple[str, JsonObject]]:
    """Return the schemas of all keys, by their dotted names."""
    for name, each in cast("Mapping[str, JsonObject]", schema.get("properties", {})).items():
        yield f"{path}{name}", each
        yield from properties_of(each, f"{path}{name}.")
        yield from properties_of(cast("JsonObject", each.get("items", {})), f"{path}{name}[].")


PROPERTIES: Final = dict(properties_of(CONFIG_SCHEMA))


def test_every_key_has_a_description_and_a_valid_default() -> None:
    assert len(PROPERTIES) > 100
    for name, schema in PROPERTIES.items():
        of_items = cast("JsonObject", schema.get("items", {}))
        assert schema.get("description") or of_items.get("description"), name
        if "default" in schema:
            assert EditorsValidator(schema).is_valid(schema["default"]), name
    assert PROPERTIES["a2a.port"]["default"] == 8000
    assert PROPERTIES["limits.codex_threads"]["description"] == (
        "Between turns, codex is restarted if it uses this much memory (MiB) or has this many threads."
    )
    assert str(PROPERTIES["codex.mid_turn"]["description"]).endswith("replaces it (interrupt).")


# --- What is taken


def all_keys_shown() -> str:
    """Return config.yaml with every key that is commented out made one that stands there."""
    text = (TEMPLATE_DIR / "config.yaml").read_text()
    _, _, keys = text.partition("\n")
    return re.sub(r"(?m)^( *)# ((?: |- )*[A-Za-z][\w-]*:(?: .*)?)$", r"\1\2", keys)


def test_config_yaml_is_valid_also_with_every_shown_key() -> None:
    assert is_taken_by_schema(yaml.safe_load((TEMPLATE_DIR / "config.yaml").read_text()))
    shown = yaml.safe_load(all_keys_shown())
    read_section(Config, shown, ConfigLocation("config.yaml"))
    assert set(shown) >= Config.model_fields.keys() - {"model", "role"}
    assert is_taken_by_schema(shown)


TAKEN: Final[Mapping[str, str]] = {
    "the least": GOOD,
    "keys of the platform's": "".join(f"{key}: {{any: [thing, 1]}}\n" for key in sorted(Config.IGNORED)),
    "keys of the platform's runtime": f"runtime_config: {{{', '.join(f'{key}: x' for key in RuntimeConfig.IGNORED)}}}",
    "nulls": "tier: null\nmodel: gpt-5.5\ncodex: {turn_timeout_s: null, reasoning_effort: null}\n",
    "a whole number of seconds": "codex: {turn_timeout_s: 600, shutdown_grace_s: 0}\n",
    "bounds": "a2a: {port: 65535}\nlimits: {max_parts: 1, max_text_chars: 1048576}\npush: {timeout_s: 0.1}\n",
    "a signature": 'a2a: {protocol_versions: ["1.0"], signing_key_file: key.pem}\n',
    "writable folders": "codex: {writable_folders: [build]}\n",
    "writable folders, and the sandbox named": "codex: {writable_folders: [build], sandbox: workspace-write}\n",
    "none of them in another sandbox": "codex: {writable_folders: [], sandbox: container}\n",
    "principals": "principals: [{name: ada, token_env: ADA}, {name: bob, token_file: bob, token_env: null}]\n",
    "an endpoint": "providers: [{name: a, auth_mode: openai_compat_responses, base_url: 'http://h:9/v1'}]\n",
    "OpenAI by another variable": "providers: [{name: a, auth_mode: openai_api, auth_env: [K], base_url: null}]\n",
    "a subscription elsewhere": "providers: [{name: a, auth_mode: chatgpt_subscription, base_url: 'http://h'}]\n",
    "a program": "mcp_servers: [{name: a, command: x, args: [-y], env: {A: '${ADA}-$5', B: '$${A', C: $}}]\n",
    "an address": "mcp_servers: [{name: a, url: 'https://h/mcp?a=b', headers: {X-A: 'v ${ADA}', authorization: x}}]\n",
    "an address with a token": "mcp_servers: [{name: a, url: 'https://h', bearer_token_env: ADA, args: [], env: {}}]\n",
    "no tools": "mcp_servers: [{name: a, command: x, enabled_tools: [], disabled_tools: [b]}]\n",
}


@pytest.mark.parametrize("kind", TAKEN)
def test_the_schema_accepts_valid_configurations(tmp_path: Path, kind: str) -> None:
    text = TAKEN[kind]
    config = {"name": "a", "runtime": "codex", "model": "gpt-5.5", **yaml.safe_load(text)}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "workspace" / "build").mkdir(parents=True)
    (tmp_path / "bob").write_text("b")
    env = {"ADA": "a", "OPENAI_API_KEY": "k", "WORKSPACE_STATE_DIR": str(tmp_path / "state")}
    choose_provider(load_settings(env, config_path=tmp_path, cwd=tmp_path, root=tmp_path), env)
    assert is_taken_by_schema(config)


# --- What is refused


@pytest.mark.parametrize("kind", [kind for kind, bad in BAD.items() if bad.schema])
def test_the_schema_rejects_invalid_configurations(kind: str) -> None:
    assert not is_taken_by_schema(yaml.safe_load(BAD[kind].config))


@pytest.mark.parametrize("kind", [kind for kind, bad in BAD.items() if not bad.schema])
def test_configurations_that_only_the_agent_rejects(kind: str) -> None:
    try:
        config = yaml.load(BAD[kind].config, BoundedLoader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return
    assert is_taken_by_schema(config)


# --- Key by key, over whatever may stand there

SECTIONS: Final[Mapping[str, type[Section]]] = {
    "": Config,
    "runtime_config.": RuntimeConfig,
    "a2a.": A2AConfig,
    "codex.": CodexConfig,
    "limits.": LimitsConfig,
    "storage.": StorageConfig,
    "push.": PushConfig,
    "providers[].": ProviderEntry,
    "principals[].": PrincipalEntry,
    "mcp_servers[].": McpServerEntry,
}

KINDS: Final = {
    f"{prefix}{name}": kind
    for prefix, cls in SECTIONS.items()
    for name, kind in typing.get_type_hints(cls, include_extras=True).items()
    if name in cls.model_fields and f"{prefix}{name}." not in SECTIONS and f"{prefix}{name}[]." not in SECTIONS
}
"""The plain keys, and what they are read as."""

# Two characters that count as blank for Python or for ECMA-262, and not for the other.
CHARACTERS: Final = st.characters(codec="utf-8", exclude_characters="\x85\ufeff")
WORDS: Final = sorted(
    {
        "1.0",
        "0.3",
        "codex",
        "http://h",
        "https://h/v1",
        "h:1",
        "a b",
        "A_B",
        "x" * 65,
        "a\n",
        " ",
        "sk-1",
        "${A}",
        "high",
    }
    | {str(value) for schema in PROPERTIES.values() for value in cast("list[JsonValue]", schema.get("enum", []))}
)
TEXTS: Final = st.sampled_from(WORDS) | st.text(CHARACTERS, max_size=8)
# 8000.0 is a whole number for JSON Schema, and none for the agent.
NUMBERS: Final = st.integers(-2, 1 << 31) | st.floats(allow_nan=False).filter(lambda number: not number.is_integer())
SCALARS: Final = st.none() | st.booleans() | NUMBERS | TEXTS
VALUES: Final = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(TEXTS, SCALARS, max_size=3)


@given(st.sampled_from(sorted(KINDS)), VALUES)
@hypothesis_settings(deadline=None, max_examples=3000)
def test_each_key_accepts_the_same_values_as_the_agent(key: str, value: JsonValue) -> None:
    alone = create_model("Alone", __base__=Section, key=(KINDS[key], ...))
    try:
        read_section(alone, {"key": value}, ConfigLocation("config.yaml"))
        is_taken = True
    except ConfigError:
        is_taken = False
    assert EditorsValidator(PROPERTIES[key]).is_valid(value) is is_taken
