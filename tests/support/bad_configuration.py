"""Configuration mistakes of operators: one entry for each kind, with the expected error message."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from codex_workspace.config.loading import PLATFORM_DEFAULT_MODEL

GOOD: Final = "name: agent\nruntime: codex\nmodel: gpt-5.5\n"

CREDENTIAL: Final = "sk-secret-1"
"""A value at a key that may hold a secret; no error message shows it."""


@dataclass(frozen=True, slots=True)
class Bad:
    """An invalid configuration.

    place: the file (or `environment`) and the key, the start of the error message; `{root}` is the root folder.
    words: a part of the rest of the message.
    env, files: further environment variables, and files below the root.
    schema: whether config.schema.json rejects it too; it cannot if the error depends on more than the file.
    command: the command that finds it; `serve` also opens the database and the port, unlike `prepare`.
    """

    config: str
    place: str
    words: str
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    schema: bool = True
    command: Literal["prepare", "serve"] = "prepare"


CONFIG: Final = "{root}/configs/config.yaml: "


def _not_yaml(text: str, where: str, words: str) -> Bad:
    return Bad(text, f"{CONFIG}{where}", words, schema=False)


def _key(text: str, key: str, words: str, schema: bool = True, **env: str) -> Bad:
    return Bad(GOOD + text, f"{CONFIG}{key}: ", words, env=env, schema=schema)


def _variable(name: str, words: str, **env: str) -> Bad:
    return Bad(GOOD, f"environment: {name}: ", words, env=env, schema=False)


def _file(path: str, content: str | bytes, place: str, words: str) -> Bad:
    return Bad(GOOD, f"{{root}}/{path}: {place}", words, files={path: content}, schema=False)


COMPAT: Final = "auth_mode: openai_compat_responses, base_url: 'http://127.0.0.1:9/v1'"


def _multiplied(item: str) -> str:
    """Return YAML with nine levels, each with nine aliases of the one before; `item` is a level's value."""
    levels = (item.format(", ".join([f"*a{level - 1}"] * 9)) for level in range(1, 10))
    return "env:\n  a0: &a0 {k: v}\n" + "".join(
        f"  a{level}: &a{level} {each}\n" for level, each in enumerate(levels, 1)
    )


BAD: Final[Mapping[str, Bad]] = {
    # --- config.yaml: invalid YAML, or not a configuration
    "empty": Bad("", CONFIG, "must be a mapping of keys, but is empty"),
    "a list": Bad("- a\n- b\n", CONFIG, "must be a mapping of keys, but is a list"),
    "only text": Bad("just text", CONFIG, "must be a mapping of keys, but is text"),
    "an open bracket": _not_yaml("name: [a\n", "line 2, column 1: ", "expected"),
    "a tab": _not_yaml("name: a\n\tb: c\n", "line 2, column 1: ", "cannot start any token"),
    "two colons": _not_yaml("a: b: c\n", "line 1, column 5: ", "not allowed here"),
    "two documents": _not_yaml("name: a\n---\nname: b\n", "line 2, column 1: ", "document"),
    "a tag": _not_yaml("name: !python/object:os.system x\n", "line 1, column 7: ", "could not determine a constructor"),
    "a NUL": _not_yaml("name: a\x00b\n", "", "is not YAML"),
    "not UTF-8": _file("configs/config.yaml", b"name: \xff\n", "", "is not YAML"),
    "an undefined alias": _not_yaml("name: *nobody\n", "line 1, column 7: ", "undefined alias"),
    "an invalid date": _not_yaml(GOOD + "version: 2024-99-99\n", "", "contains an invalid value"),
    "deep nesting": _not_yaml("[" * 5000, "", "nested too deeply"),
    "aliases that multiply": _not_yaml(GOOD + _multiplied("[{}]"), "line 10, ", "too many values"),
    "merge keys that multiply": _not_yaml(GOOD + _multiplied("{{<<: [{}]}}"), "line 10, ", "too many values"),
    "an alias of its own value": _not_yaml(f"{GOOD}env: &a [1, *a]\n", "line 4, column 6: ", "within its own value"),
    "more values than any configuration": _not_yaml(f"{GOOD}env: [{'1,' * 60_000}]\n", "line 4, ", "too many values"),
    "a key twice": _not_yaml(GOOD + "name: other\n", "line 4, column 1: ", "the key name is a duplicate"),
    "a key of a section twice": _not_yaml(
        GOOD + "codex:\n  sandbox: read-only\n  sandbox: container\n",
        "line 6, column 3: ",
        "the key sandbox is a duplicate",
    ),
    "a number as key": Bad(GOOD + "1: x\n", CONFIG + "line 4, column 1: ", "a key must be text"),
    "a list as key": _not_yaml(GOOD + "? [a]\n: x\n", "line 4, column 3: ", "a key must be text"),
    # --- missing and unknown keys
    "no name": Bad("runtime: codex\nmodel: x\n", CONFIG + "name: ", "is missing; it must be one line of text"),
    "no runtime": Bad("name: a\nmodel: x\n", CONFIG + "runtime: ", "is missing; it must be codex"),
    "another runtime": Bad(
        "name: a\nruntime: claude-code\nmodel: x\n", CONFIG + "runtime: ", "must be codex, but is 'claude-code'"
    ),
    "no model": Bad(
        "name: a\nruntime: codex\n",
        CONFIG + "runtime_config.model: ",
        "is missing; it must be a model such as gpt-5.5 (or set MODEL)",
        schema=False,
    ),
    "the platform's default model": Bad(
        f"name: a\nruntime: codex\nmodel: {PLATFORM_DEFAULT_MODEL}\n",
        CONFIG + "runtime_config.model: ",
        "is missing; it must be",
        schema=False,
    ),
    "a future schema version": _key("template_schema_version: 2\n", "template_schema_version", "number 1, but is 2"),
    "a schema version that is true": _key(
        "template_schema_version: true\n", "template_schema_version", "must be a whole number 1, but is true"
    ),
    "a schema version in quotes": _key("template_schema_version: '1'\n", "template_schema_version", "but is text"),
    "a misspelled key": _key("modle: x\n", "modle", "is not a known key (did you mean model?)"),
    "a misspelled key of a section": _key(
        "codex:\n  sandbx: x\n", "codex.sandbx", "is not a known key (did you mean sandbox?)"
    ),
    "a key without its unit": _key(
        "codex:\n  turn_timeout: 5\n", "codex.turn_timeout", "is not a known key (did you mean turn_timeout_s?)"
    ),
    "a misspelled platform key": _key("initial_promt: hi\n", "initial_promt", "did you mean initial_prompt?"),
    "a misspelled key of a platform section": _key(
        "runtime_config:\n  requird_env: []\n", "runtime_config.requird_env", "did you mean required_env?"
    ),
    "an unknown key": _key("qqqq: 1\n", "qqqq", "is not a known key"),
    "a key of two lines": _key('"two\\nlines": 1\n', "'two\\nlines'", "is not a known key"),
    "an unknown limit": _key("limits:\n  max_bytes: 1\n", "limits.max_bytes", "is not a known key"),
    # --- values of the wrong type
    "a number as name": Bad(
        "name: 5\nruntime: codex\nmodel: x\n",
        CONFIG + "name: ",
        "must be one line of text, not blank, but is a number; put it in quotes",
    ),
    "a no as name": Bad("name: no\nruntime: codex\nmodel: x\n", CONFIG + "name: ", "but is false; put it in quotes"),
    "a blank name": Bad("name: '  '\nruntime: codex\nmodel: x\n", CONFIG + "name: ", "must be one line of text"),
    "an unquoted version": _key("version: 1.0\n", "version", "must be text, but is a number; put it in quotes"),
    "a date as version": _key("version: 2024-01-01\n", "version", "must be text, but is a date"),
    "a description without any": _key("description: null\n", "description", "must be text, but is empty"),
    "text for a list": _key("skills: git\n", "skills", "must be a list, each item the name of a folder"),
    "a number in a list of texts": _key(
        "prompt_files: [a, 3]\n", "prompt_files[1]", "must be one line of text, not blank, but is a number"
    ),
    "text for a section": _key("codex: fast\n", "codex", "must be a mapping of keys, but is text"),
    "a section without keys": _key("codex:\n", "codex", "must be a mapping of keys, but is empty"),
    "text for a number": _key("tier: high\n", "tier", "must be a whole number from 0 to 99, but is text"),
    "true for a number": _key("tier: true\n", "tier", "must be a whole number from 0 to 99, but is true"),
    "a number for true": _key(
        "codex:\n  network_access: 1\n", "codex.network_access", "must be true or false, but is a number"
    ),
    "seconds with a unit": _key(
        "codex:\n  turn_timeout_s: 1h\n", "codex.turn_timeout_s", "must be a number from 0.1 to 604800, but is text"
    ),
    "a port in quotes": _key("a2a: {port: '8000'}\n", "a2a.port", "must be a whole number from 0 to 65535, but is"),
    "a broken port": _key("a2a: {port: 80.5}\n", "a2a.port", "must be a whole number from 0 to 65535, but is a number"),
    "a whole number with a point": _key(
        "a2a: {port: 8000.0}\n", "a2a.port", "must be a whole number from 0 to 65535, but is a number", schema=False
    ),
    "a mapping for a list": _key(
        "providers: {a: b}\n", "providers", "must be a list, each item a mapping of keys, but is a mapping"
    ),
    # --- values out of range
    "a port too high": _key("a2a: {port: 70000}\n", "a2a.port", "must be a whole number from 0 to 65535, but is 70000"),
    "a zero duration": _key(
        "codex:\n  turn_timeout_s: 0\n", "codex.turn_timeout_s", "must be a number from 0.1 to 604800"
    ),
    "a duration that is not a number": _key(
        "codex:\n  turn_timeout_s: .nan\n", "codex.turn_timeout_s", "but is nan", schema=False
    ),
    "a negative duration": _key(
        "codex:\n  turn_inactivity_timeout_s: -1\n", "codex.turn_inactivity_timeout_s", "must be a number from 0.1"
    ),
    "a duration over the maximum": _key(
        f"codex:\n  turn_timeout_s: {10**400}\n", "codex.turn_timeout_s", "but is 10000000000"
    ),
    "a grace period longer than an engine's": _key(
        "codex:\n  shutdown_grace_s: 61\n", "codex.shutdown_grace_s", "must be a number from 0 to 60"
    ),
    "more text than codex takes": _key(
        "limits: {max_text_chars: 2000000}\n", "limits.max_text_chars", "from 1 to 1048576, but is 2000000"
    ),
    "a limit of zero": _key("limits: {max_message_bytes: 0}\n", "limits.max_message_bytes", "must be a whole"),
    "a negative age": _key("storage: {keep_days: -1}\n", "storage.keep_days", "must be a number from 0 to 36500"),
    "a webhook timeout over the maximum": _key(
        "push: {timeout_s: 600}\n", "push.timeout_s", "must be a number from 0.1"
    ),
    "a sandbox with an underscore": _key(
        "codex:\n  sandbox: workspace_write\n",
        "codex.sandbox",
        "must be one of auto, read-only, workspace-write, danger-full-access, container, but is 'workspace_write' "
        "(did you mean workspace-write?)",
    ),
    "an obsolete approval policy": _key(
        "codex:\n  approval_policy: on-failure\n", "codex.approval_policy", "must be one of never, on-request"
    ),
    "an unknown value of conversations": _key(
        "codex:\n  conversations: single\n", "codex.conversations", "must be one of main, per-context"
    ),
    "an effort as a number": _key(
        "codex:\n  reasoning_effort: 3\n", "codex.reasoning_effort", "must be a word such as"
    ),
    "an unknown mid-turn policy": _key("codex:\n  mid_turn: later\n", "codex.mid_turn", "must be one of queue, steer"),
    "a web search of yes": _key("codex:\n  web_search: true\n", "codex.web_search", "must be one of disabled, cached"),
    "an unknown recovery policy": _key("codex:\n  recovery: never\n", "codex.recovery", "must be one of resume, rerun"),
    "an unknown backend": _key("codex:\n  backend: sdk\n", "codex.backend", "must be one of app-server, exec"),
    "approvals that the backend cannot ask for": _key(
        "codex: {backend: exec, approval_policy: on-request}\n",
        "codex.approval_policy",
        "cannot be on-request with codex.backend: exec",
        schema=False,
    ),
    "steering with a backend without it": _key(
        "codex: {backend: exec, mid_turn: steer}\n",
        "codex.mid_turn",
        "cannot be steer with codex.backend: exec",
        schema=False,
    ),
    "hiding secrets with a backend without it": _key(
        "codex: {backend: exec, hide_secrets: true}\n",
        "codex.hide_secrets",
        "cannot be true with codex.backend: exec",
        schema=False,
    ),
    # --- writable folders
    "a missing writable folder": _key(
        "codex: {writable_folders: [nowhere]}\n",
        "codex.writable_folders[0]",
        "must be an existing folder",
        schema=False,
    ),
    "a writable folder of the agent's": _key(
        "codex: {writable_folders: [../state]}\n",
        "codex.writable_folders[0]",
        "must not overlap with the state folder",
        schema=False,
    ),
    "writable folders without a sandbox": _key(
        "codex: {writable_folders: [.], sandbox: container}\n",
        "codex.writable_folders",
        "needs sandbox workspace-write, but the sandbox is container; remove one of them",
        schema=False,
    ),
    # --- A2A and principals
    "no A2A version": _key(
        "a2a: {protocol_versions: []}\n", "a2a.protocol_versions", "must list at least one version", schema=False
    ),
    "an A2A version twice": _key(
        'a2a: {protocol_versions: ["1.0", "1.0"]}\n',
        "a2a.protocol_versions",
        "must list at least one version",
        schema=False,
    ),
    "an obsolete A2A version": _key(
        'a2a: {protocol_versions: ["0.2"]}\n', "a2a.protocol_versions[0]", "must be one of 1.0, 0.3, but is '0.2'"
    ),
    "an unquoted A2A version": _key(
        "a2a: {protocol_versions: [1.0]}\n", "a2a.protocol_versions[0]", "must be one of 1.0, 0.3, but is a number"
    ),
    "a signature for the older protocol": _key(
        "a2a: {signing_key_file: key.pem}\n", "a2a.signing_key_file", 'needs protocol_versions: ["1.0"]', schema=False
    ),
    "a URL where a host is meant": _key("a2a: {grpc_url: 'http://x:1'}\n", "a2a.grpc_url", "must be host:port"),
    "the address of an unlisted service": _key(
        "a2a: {grpc_url: 'x:1', grpc_on_card: false}\n", "a2a.grpc_url", "is not used if grpc_on_card", schema=False
    ),
    "every host": _key(
        "a2a: {allowed_hosts: ['*']}\n", "a2a.allowed_hosts[0]", "must be a host name or an address without port"
    ),
    "a host with a port": _key("a2a: {allowed_hosts: ['agent:8000']}\n", "a2a.allowed_hosts[0]", "must be a host name"),
    "every origin": _key(
        "a2a: {allowed_origins: ['*']}\n", "a2a.allowed_origins[0]", "must be one origin in lower case without a path"
    ),
    "a principal without a token": _key(
        "principals: [{name: ada}]\n", "principals[0]", "must have either token_env or token_file", schema=False
    ),
    "a principal with two tokens": _key(
        "principals: [{name: ada, token_env: ADA, token_file: x}]\n",
        "principals[0]",
        "must have either token_env or token_file",
        schema=False,
    ),
    "a principal's variable that is not set": _key(
        "principals: [{name: ada, token_env: ADA}]\n",
        "principals[0].token_env",
        "names the variable ADA, which is not set",
        schema=False,
    ),
    "a principal with the operator's name": _key(
        "principals: [{name: operator, token_env: ADA}]\n",
        "principals[0].name",
        "must not be operator, which is the owner of A2A_TOKEN",
        ADA="a",
        schema=False,
    ),
    "two principals of one name": _key(
        "principals: [{name: ada, token_env: ADA}, {name: ada, token_env: BOB}]\n",
        "principals[1].name",
        "is a duplicate: 'ada'",
        schema=False,
        ADA="a",
        BOB="b",
    ),
    "one token for two": _key(
        "principals: [{name: ada, token_env: ADA}, {name: bob, token_env: ADA}]\n",
        "principals[1]",
        "is also the token of another principal; give each principal its own token",
        schema=False,
        ADA=CREDENTIAL,
    ),
    "an invalid webhook network": _key(
        "push: {allow: [internal, 10.0.0.0/33]}\n",
        "push.allow[1]",
        "must be a host name, an address, or a network such as 10.0.0.0/8, but is '10.0.0.0/33'",
        schema=False,
    ),
    "a peer without an address": _key("peers: [{name: a}]\n", "peers[0].url", "is missing; it must be an http://"),
    "a peer's address with a password": _key(
        "peers: [{name: a, url: 'http://u:p@b'}]\n", "peers[0].url", "must be an http:// or https:// URL without user"
    ),
    "a peer's name of two words": _key("peers: [{name: a b, url: 'http://b'}]\n", "peers[0].name", "must be 1 to 64"),
    "a peer's token that is not set": _key(
        "peers: [{name: a, url: 'http://b', token_env: ADA}]\n",
        "peers[0].token_env",
        "names the variable ADA, which is not set; set it (or ADA_FILE)",
        schema=False,
    ),
    "two peers of one name": _key(
        "peers: [{name: a, url: 'http://b'}, {name: a, url: 'http://c'}]\n",
        "peers[1].name",
        "is a duplicate: 'a'",
        schema=False,
    ),
    "an MCP server with the built-in server's name": _key(
        "agent_tools: always\nmcp_servers: [{name: agent, command: x}]\n",
        "mcp_servers[0].name",
        "must not be agent, which is the agent's own; rename it, or set agent_tools: never",
        schema=False,
    ),
    # --- providers and their credentials
    "a provider without a mode": _key(
        "providers: [{name: a}]\n", "providers[0].auth_mode", "is missing; it must be one of openai_api"
    ),
    "an unknown auth mode": _key(
        "providers: [{name: a, auth_mode: api}]\n", "providers[0].auth_mode", "must be one of openai_api"
    ),
    "an unknown key of a provider": _key(
        "providers: [{name: a, auth_mode: openai_api, url: x}]\n", "providers[0].url", "is not a known key"
    ),
    "an obsolete wire API": _key(
        f"providers: [{{name: a, {COMPAT}, wire_api: chat}}]\n",
        "providers[0].wire_api",
        "must be responses, but is 'chat'",
    ),
    "a key where its variable is meant": _key(
        f"providers: [{{name: a, {COMPAT}, auth_env: [{CREDENTIAL}]}}]\n",
        "providers[0].auth_env[0]",
        "must be the name of an environment variable, not its value",
    ),
    "the agent's own variable as a provider's": _key(
        f"providers: [{{name: a, {COMPAT}, auth_env: [A2A_TOKEN]}}]\n",
        "providers[0].auth_env[0]",
        "must be a variable of the provider, but A2A_TOKEN belongs to the agent",
        schema=False,
    ),
    "a slug with a point": _key(
        f"providers: [{{name: a, {COMPAT}, model_provider_slug: a.b}}]\n",
        "providers[0].model_provider_slug",
        "must be 1 to 64 letters, digits, _ or -",
    ),
    "a small context window": _key(
        f"providers: [{{name: a, {COMPAT}, context_window: 0}}]\n",
        "providers[0].context_window",
        "must be a whole number from 1000 to 100000000, but is 0",
    ),
    "a limit that is no number": _key(
        f"providers: [{{name: a, {COMPAT}, auto_compact_token_limit: 8k}}]\n",
        "providers[0].auto_compact_token_limit",
        "must be a whole number from 1000 to 100000000, but is text",
    ),
    "a missing model catalog": _key(
        f"runtime_config: {{provider: a}}\nproviders: [{{name: a, {COMPAT}, model_catalog_file: models.json}}]\n",
        "providers: a.model_catalog_file",
        "which cannot be read (No such file or directory); correct the path",
        schema=False,
    ),
    "a model catalog that never ends": _key(
        f"runtime_config: {{provider: a}}\nproviders: [{{name: a, {COMPAT}, model_catalog_file: /dev/zero}}]\n",
        "providers: a.model_catalog_file",
        "names /dev/zero, which cannot be read (it is a pipe or a device; write its content to a regular file)",
        schema=False,
    ),
    "a slug of codex's own": _key(
        f"providers: [{{name: a, {COMPAT}, model_provider_slug: ollama}}]\n",
        "providers[0].model_provider_slug",
        "must not be a built-in provider of codex",
        schema=False,
    ),
    "an endpoint without an address": _key(
        "providers: [{name: a, auth_mode: openai_compat_responses}]\n",
        "providers[0].base_url",
        "is missing; auth_mode openai_compat_responses needs an http(s) URL",
        schema=False,
    ),
    "an address where OpenAI's is known": _key(
        "providers: [{name: a, auth_mode: openai_api, base_url: 'http://h'}]\n",
        "providers[0].base_url",
        "has no effect with auth_mode openai_api; set OPENAI_BASE_URL instead",
        schema=False,
    ),
    **{
        f"the address {url}": _key(
            f"providers: [{{name: a, auth_mode: openai_compat_responses, base_url: '{url}'}}]\n",
            "providers[0].base_url",
            "must be an http:// or https:// URL without user name, password, query or fragment",
        )
        for url in (
            "ftp://host/v1",
            "host/v1",
            f"http://me:{CREDENTIAL}@host/v1",
            f"http://host/v1?key={CREDENTIAL}",
            "http://",
        )
    },
    "two providers of one name": _key(
        f"providers: [{{name: a, {COMPAT}}}, {{name: a, {COMPAT}}}]\n",
        "providers[1].name",
        "is a duplicate: 'a'",
        schema=False,
    ),
    "an unknown provider": _key(
        "runtime_config: {provider: opnai}\n",
        "runtime_config.provider",
        "must be one of openai, chatgpt, but is 'opnai' (did you mean openai?)",
        schema=False,
    ),
    "a provider without its credential": _key(
        "runtime_config: {provider: chatgpt}\n",
        "runtime_config.provider",
        "chatgpt has no credential; set CODEX_AUTH_JSON or CODEX_CHATGPT_AUTH_JSON",
        schema=False,
    ),
    "a provider as model": Bad(
        "name: a\nruntime: codex\nmodel: openai\n",
        CONFIG + "model: ",
        "openai is a provider, not a model; name openai as runtime_config.provider",
        schema=False,
    ),
    "no credential at all": Bad(
        GOOD,
        "environment: ",
        "no provider has a credential; set OPENAI_API_KEY or CODEX_API_KEY",
        env={"OPENAI_API_KEY": ""},
        schema=False,
    ),
    "a required variable that is not set": _key(
        "runtime_config: {required_env: [TICKETS]}\n",
        "runtime_config.required_env[0]",
        "names the variable TICKETS, which is not set; set it (or TICKETS_FILE)",
        schema=False,
    ),
    # --- MCP servers
    "a server without a program": _key(
        "mcp_servers: [{name: a}]\n", "mcp_servers[0]", "must have either command or url", schema=False
    ),
    "a server with an address and a program": _key(
        "mcp_servers: [{name: a, command: x, url: 'http://h'}]\n",
        "mcp_servers[0]",
        "must have either command or url",
        schema=False,
    ),
    "arguments for an address": _key(
        "mcp_servers: [{name: a, url: 'http://h', args: [x]}]\n",
        "mcp_servers[0].args",
        "is only valid for a server with command",
        schema=False,
    ),
    "headers for a program": _key(
        "mcp_servers: [{name: a, command: x, headers: {X: y}}]\n",
        "mcp_servers[0].headers",
        "is only valid for a server with url",
        schema=False,
    ),
    "two tokens for a server": _key(
        "mcp_servers: [{name: a, url: 'http://h', bearer_token_env: T, headers: {Authorization: x}}]\n",
        "mcp_servers[0].headers",
        "must not contain Authorization if bearer_token_env is set",
        T="t",
        schema=False,
    ),
    "an invalid variable name": _key(
        "mcp_servers: [{name: a, command: x, env: {a-b: y}}]\n",
        "mcp_servers[0].env",
        "contains the key 'a-b', but a key must be the name of an environment variable",
    ),
    "a number for a program's variable": _key(
        "mcp_servers: [{name: a, command: x, env: {X: 8080}}]\n",
        "mcp_servers[0].env.X",
        "must be text, but is a number; put it in quotes",
    ),
    "a reference without its end": _key(
        "mcp_servers: [{name: a, command: x, env: {X: '${A'}}]\n",
        "mcp_servers[0].env.X",
        "contains ${ without a variable name and }; write $${ for a plain ${",
        schema=False,
    ),
    "a required server whose variable is not set": _key(
        "mcp_servers: [{name: a, command: x, env: {X: '${A}'}, required: true}]\n",
        "mcp_servers[0].env.X",
        "names the variable A, which is not set; set it (or A_FILE)",
        schema=False,
    ),
    "two servers of one name": _key(
        "mcp_servers: [{name: a, command: x}, {name: a, command: y}]\n",
        "mcp_servers[1].name",
        "is a duplicate: 'a'",
        schema=False,
    ),
    # --- prompt files and skills
    "a missing prompt file": _key(
        "prompt_files: [how.md]\n",
        "prompt_files[0]",
        "which does not exist; create it, or remove the entry",
        schema=False,
    ),
    "a missing prompt file outside": _key(
        "prompt_files: [../state/auth.json]\n", "prompt_files[0]", "which does not exist", schema=False
    ),
    "a prompt file outside": _key("prompt_files: [/etc/passwd]\n", "prompt_files[0]", "is outside of", schema=False),
    "a missing skill": _key("skills: [notes]\n", "skills[0]", "which does not exist; create it", schema=False),
    "a skill that is a path": _key("skills: [../notes]\n", "skills[0]", "must be the name of a folder"),
    "a skill without a head": Bad(
        GOOD + "skills: [notes]\n",
        CONFIG + "skills[0]: ",
        "which must begin with front matter: a line ---, keys, and another line ---",
        files={"configs/skills/notes/SKILL.md": "Write them.\n"},
        schema=False,
    ),
    "a skill without a description": Bad(
        GOOD + "skills: [notes]\n",
        "{root}/configs/skills/notes/SKILL.md: description: ",
        "is missing; it must be a text of 1 to 1024 characters",
        files={"configs/skills/notes/SKILL.md": "---\nname: notes\n---\n"},
        schema=False,
    ),
    # --- codex's own files
    "an invalid config.toml": _file("state/codex/config.toml", "a = 1\nb = \n", "line 2, column 5: ", "Invalid value"),
    "a config.toml with a key twice": _file(
        "state/codex/config.toml", "a = 1\na = 2\n", "line 2, column 6: ", "Cannot overwrite a value; the file was not"
    ),
    "a config.toml that is not UTF-8": _file(
        "state/codex/config.toml",
        b'a = 1\nb = "\xff"\n',
        "byte 12 ",
        "is not UTF-8; the file was not changed",
    ),
    "a table where our key is": _file(
        "state/codex/config.toml", "[model]\nx = 1\n", "model: ", "the file was not changed"
    ),
    "a file where CODEX_HOME is": _file("state/codex", "", "", "cannot be used as part of CODEX_HOME"),
    "an invalid login": _variable(
        "CODEX_AUTH_JSON", "is not JSON; run `codex login`", CODEX_AUTH_JSON=f"{CREDENTIAL} {{"
    ),
    "a login without tokens": _variable("CODEX_AUTH_JSON", "has no valid tokens; run", CODEX_AUTH_JSON="{}"),
    # --- the environment
    "a port by name": _variable("A2A_PORT", "must be a whole number from 0 to 65535, but is 'http'", A2A_PORT="http"),
    "a port of two numbers": _variable("A2A_PORT", "from 0 to 65535, but is '8_0'", A2A_PORT="8_0"),
    "a port number too high": _variable("A2A_PORT", "from 0 to 65535, but is '65536'", A2A_PORT="65536"),
    "a negative port": _variable("A2A_GRPC_PORT", "must be a whole number from 0 to 65535", A2A_GRPC_PORT="-1"),
    "one port for two": _variable(
        "A2A_GRPC_PORT", "must differ from A2A_PORT, but both are 8001", A2A_PORT="8001", A2A_GRPC_PORT="8001"
    ),
    "one token for metrics and all": _variable(
        "METRICS_TOKEN", "is also a principal's token", METRICS_TOKEN=CREDENTIAL, A2A_TOKEN=CREDENTIAL
    ),
    "a token of two words": _variable("A2A_TOKEN", "must be printable ASCII without spaces", A2A_TOKEN="two words"),
    "a metrics token of two words": _variable("METRICS_TOKEN", "must be printable ASCII", METRICS_TOKEN="a b"),
    "a collector without a scheme": _variable(
        "OTEL_EXPORTER_OTLP_ENDPOINT", "must be an http://", OTEL_EXPORTER_OTLP_ENDPOINT="collector:4318"
    ),
    "an unknown OTLP protocol": _variable(
        "OTEL_EXPORTER_OTLP_PROTOCOL", "must be http/protobuf, but is", OTEL_EXPORTER_OTLP_PROTOCOL="grpc"
    ),
    "an unknown exporter": _variable(
        "OTEL_TRACES_EXPORTER", "must be one of otlp, none", OTEL_TRACES_EXPORTER="zipkin"
    ),
    "beyond loopback without a token": _variable(
        "A2A_TOKEN",
        "is missing, and A2A_HOST '0.0.0.0' is not a loopback address; set A2A_TOKEN or A2A_TOKEN_FILE",
        A2A_HOST="0.0.0.0",
    ),
    "beyond loopback, in IPv6": _variable("A2A_TOKEN", "or A2A_ALLOW_ANONYMOUS=1", A2A_HOST="::"),
    "a name that may be beyond loopback": _variable(
        "A2A_TOKEN", "is not a loopback address", A2A_HOST="agent.internal"
    ),
    "an empty token": _variable("A2A_TOKEN", "is missing", A2A_HOST="0.0.0.0", A2A_TOKEN=""),
    "a flag of maybe": _variable(
        "A2A_ALLOW_ANONYMOUS",
        "must be one of 1, true, yes, on, 0, false, no, off, but is 'maybe'",
        A2A_ALLOW_ANONYMOUS="maybe",
    ),
    "a flag of one letter": _variable("OTEL_SDK_DISABLED", "must be one of 1, true,", OTEL_SDK_DISABLED="t"),
    "a public address with a port that does not exist": _variable(
        "A2A_PUBLIC_URL", "the address or port is invalid", A2A_PUBLIC_URL="http://agent:99999/"
    ),
    "a public address of half a bracket": _variable(
        "A2A_PUBLIC_URL", "the address or port is invalid", A2A_PUBLIC_URL="http://[fd00::1/"
    ),
    "a public address without a scheme": _variable("A2A_PUBLIC_URL", "must be an http://", A2A_PUBLIC_URL="agent:80"),
    "a model of two lines": _variable("MODEL", "must be one line of text, not blank", MODEL="gpt\n-5"),
    "a provider as MODEL": _variable("MODEL", "openai is a provider, not a model", MODEL="openai"),
    "an unknown log format": _variable("LOG_FORMAT", "must be one of text, json, but is 'xml'", LOG_FORMAT="xml"),
    "an unknown log level": _variable("LOG_LEVEL", "must be one of debug, info, warning, error", LOG_LEVEL="loud"),
    "a missing workspace": _variable("WORKSPACE_DIR", "must be an existing folder", WORKSPACE_DIR="/none"),
    "a database without a scheme": _variable(
        "DATABASE_URL", "must be sqlite:////absolute/path or", DATABASE_URL=CREDENTIAL
    ),
    "a platform without an id": _variable(
        "WORKSPACE_ID", "is missing; PLATFORM_URL requires it", PLATFORM_URL="http://platform"
    ),
    "a platform without a scheme": _variable("PLATFORM_URL", "must be an http://", PLATFORM_URL="p", WORKSPACE_ID="w"),
    "a secret where its file is meant": _variable(
        "A2A_TOKEN_FILE", "names a file that cannot be read (No such file", A2A_TOKEN_FILE=CREDENTIAL
    ),
    "a missing secret file": _variable(
        "A2A_TOKEN_FILE",
        "names a file that cannot be read (No such file or directory); correct the path /nowhere/token, or create",
        A2A_TOKEN_FILE="/nowhere/token",
    ),
    "a folder as a secret file": _variable("A2A_TOKEN_FILE", "cannot be read (Is a directory)", A2A_TOKEN_FILE="/"),
    "an empty secret file": Bad(
        GOOD,
        "environment: A2A_TOKEN_FILE: ",
        "is empty",
        env={"A2A_TOKEN_FILE": "{root}/token"},
        files={"token": "\n"},
        schema=False,
    ),
    "a secret and its file": _variable(
        "A2A_TOKEN_FILE", "is set as well as A2A_TOKEN; set one of them", A2A_TOKEN_FILE="/x", A2A_TOKEN=CREDENTIAL
    ),
    "a credential and its file": _variable(
        "OPENAI_API_KEY_FILE", "is set as well as OPENAI_API_KEY; set one of them", OPENAI_API_KEY_FILE="/x"
    ),
    "a key with a line break": _variable(
        "OPENAI_API_KEY", "must be printable ASCII without spaces or line breaks", OPENAI_API_KEY=f"{CREDENTIAL}\n"
    ),
    "a base URL with a password": _variable(
        "OPENAI_BASE_URL", "must be an http://", OPENAI_BASE_URL=f"http://u:{CREDENTIAL}@h/v1"
    ),
    "a folder that is config.yaml": _variable(
        "WORKSPACE_CONFIG_PATH", "must be the folder of config.yaml", WORKSPACE_CONFIG_PATH="{root}/configs/config.yaml"
    ),
    "a folder without config.yaml": Bad(
        GOOD,
        "{root}/workspace/config.yaml: ",
        "cannot be read (No such file or directory)",
        env={"WORKSPACE_CONFIG_PATH": "{root}/workspace"},
        schema=False,
    ),
    # --- errors that only `serve` finds
    "a token that is too short": Bad(
        GOOD,
        "environment: A2A_TOKEN: ",
        "is too short to be redacted from logs and answers; use at least 6 characters",
        env={"A2A_TOKEN": "12345"},
        schema=False,
        command="serve",
    ),
    "a principal's token that is too short": Bad(
        GOOD + "principals: [{name: ada, token_env: ADA}]\n",
        CONFIG + "principals: ada: ",
        "is too short to be redacted",
        env={"ADA": "12345"},
        schema=False,
        command="serve",
    ),
    "a missing signing key": Bad(
        GOOD + 'a2a: {protocol_versions: ["1.0"], signing_key_file: key.pem}\n',
        CONFIG + "a2a.signing_key_file: ",
        "which cannot be read (No such file or directory); it must be a PEM file that this user may read",
        schema=False,
        command="serve",
    ),
    "a file that is no database": Bad(
        GOOD,
        "DATABASE_URL: {root}/state/workspace.sqlite3 ",
        "is not a SQLite database; restore a backup, or rename the file with",
        files={"state/workspace.sqlite3": "a letter"},
        schema=False,
        command="serve",
    ),
    "a database with a driver": _variable(
        "DATABASE_URL",
        "names the driver asyncpg, but the agent has its own; remove +asyncpg",
        DATABASE_URL=f"postgresql+asyncpg://u:{CREDENTIAL}@h/d",
    ),
}
"""By description."""
