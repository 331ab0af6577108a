"""Which provider is chosen, by what precedence, and what is refused with which remedy."""

import json
from pathlib import Path

import pytest

from codex_workspace.common.errors import ConfigError
from codex_workspace.config.environment import Secret
from codex_workspace.config.loading import load_settings
from codex_workspace.config.providers import CHATGPT_BASE_URL, SUBSCRIPTION, ChosenProvider, choose_provider

COMPAT = "auth_mode: openai_compat_responses, base_url: 'http://127.0.0.1:9/v1'"


def choose(
    folder: Path,
    env: dict[str, str],
    *,
    model: str = "gpt-5.5",
    provider: str | None = None,
    entries: tuple[str, ...] = (),
) -> ChosenProvider:
    lines = ["name: agent", "runtime: codex", "runtime_config:", f"  model: {model}"]
    lines += [f"  provider: {provider}"] if provider else []
    lines += ["providers:", *(f"  - {{{entry}}}" for entry in entries)] if entries else []
    (folder / "config.yaml").write_text("\n".join(lines))
    settings = load_settings({"HOME": str(folder)}, config_path=folder, cwd=folder, root=folder)
    return choose_provider(settings, env)


def test_openai_by_api_key(tmp_path: Path) -> None:
    assert choose(tmp_path, {"OPENAI_API_KEY": "sk-1"}) == ChosenProvider(
        name="openai",
        auth_mode="openai_api",
        slug="openai_api",
        base_url="https://api.openai.com/v1",
        env_key="OPENAI_API_KEY",
        credential=Secret("sk-1"),
        model="gpt-5.5",
        reason="provider openai: the model gpt-5.5 matches its prefix gpt-; credential: OPENAI_API_KEY",
    )


def test_the_first_variable_set_wins_and_files_work(tmp_path: Path) -> None:
    both = choose(tmp_path, {"CODEX_API_KEY": "b", "OPENAI_API_KEY": "a"})
    assert (both.env_key, both.credential) == ("OPENAI_API_KEY", Secret("a"))
    assert choose(tmp_path, {"CODEX_API_KEY": "b", "OPENAI_API_KEY": ""}).env_key == "CODEX_API_KEY"
    (tmp_path / "key").write_text("from-file\n")
    by_file = choose(tmp_path, {"OPENAI_API_KEY_FILE": str(tmp_path / "key")})
    assert (by_file.env_key, by_file.credential) == ("OPENAI_API_KEY", Secret("from-file"))
    assert "from-file" not in repr(by_file)


def test_openai_base_url_affects_openai_only(tmp_path: Path) -> None:
    env = {"OPENAI_API_KEY": "a", "OPENAI_BASE_URL": "http://127.0.0.1:1/v1"}
    assert choose(tmp_path, env).base_url == "http://127.0.0.1:1/v1"
    entry = f"name: local, {COMPAT}"
    assert choose(tmp_path, env, provider="local", entries=(entry,)).base_url == "http://127.0.0.1:9/v1"


def test_an_explicit_choice_wins_over_the_model_s_name(tmp_path: Path) -> None:
    entry = f"name: my gateway, {COMPAT}, auth_env: [GW_KEY], model_id_override: real-model"
    chosen = choose(tmp_path, {"OPENAI_API_KEY": "a", "GW_KEY": "g"}, provider="my gateway", entries=(entry,))
    assert (chosen.name, chosen.slug, chosen.env_key) == ("my gateway", "my_gateway", "GW_KEY")
    assert chosen.model == "real-model"
    assert chosen.reason == "provider my gateway: runtime_config.provider names it; credential: GW_KEY"


@pytest.mark.parametrize(
    ("model", "env", "expected"),
    [
        ("gpt-5.5", {"OPENAI_API_KEY": "a", "A": "a", "B": "b"}, "openai"),  # gpt- of both: as long, openai's own last
        ("gpt-x-1", {"OPENAI_API_KEY": "a", "A": "a", "B": "b"}, "longer"),
        ("gpt-special", {"OPENAI_API_KEY": "a", "A": "a", "B": "b"}, "alias"),
        ("gpt-special", {"OPENAI_API_KEY": "a", "B": "b"}, "openai"),  # the best match has no credential
        ("llama", {"OPENAI_API_KEY": "a", "B": "b"}, "longer"),  # no match: the first that has its credential
        ("llama", {"OPENAI_API_KEY": "a"}, "openai"),
        ("gpt-5.5", {"A": "a"}, "alias"),  # the match has no credential at all
    ],
)
def test_precedence(tmp_path: Path, model: str, env: dict[str, str], expected: str) -> None:
    entries = (
        f"name: alias, {COMPAT}, auth_env: [A], model_aliases: [gpt-special]",
        f"name: longer, {COMPAT}, auth_env: [B], model_prefixes: [gpt-x-]",
    )
    assert choose(tmp_path, env, model=model, entries=entries).name == expected


LOGIN = json.dumps({"tokens": {"id_token": "i", "access_token": "secret-access", "refresh_token": "r"}})


def test_a_login_that_is_handed_in_wins_over_models_and_keys_but_not_over_an_explicit_choice(tmp_path: Path) -> None:
    env = {"OPENAI_API_KEY": "a", "CODEX_CHATGPT_AUTH_JSON": LOGIN}
    chosen = choose(tmp_path, env)
    assert (chosen.name, chosen.auth_mode, chosen.env_key) == ("chatgpt", SUBSCRIPTION, "CODEX_CHATGPT_AUTH_JSON")
    assert chosen.base_url == CHATGPT_BASE_URL
    assert (
        chosen.reason == "provider chatgpt: a subscription's login is configured; credential: CODEX_CHATGPT_AUTH_JSON"
    )
    assert "secret-access" not in repr(chosen)
    assert choose(tmp_path, env, provider="openai").name == "openai"


def test_a_login_that_codex_holds_still_comes_last(tmp_path: Path) -> None:
    settings = load_settings({"HOME": str(tmp_path)}, config_path=_config(tmp_path), cwd=tmp_path, root=tmp_path)
    settings.codex_home.mkdir(parents=True)
    (settings.codex_home / "auth.json").write_text(LOGIN)
    assert choose_provider(settings, {"OPENAI_API_KEY": "a"}).name == "openai"
    chosen = choose_provider(settings, {})
    assert (chosen.name, chosen.env_key) == ("chatgpt", "auth.json in CODEX_HOME")
    assert choose(tmp_path, {}, provider="chatgpt").reason.startswith(
        "provider chatgpt: runtime_config.provider names it"
    )


def _config(folder: Path) -> Path:
    (folder / "config.yaml").write_text("name: agent\nruntime: codex\nruntime_config: {model: gpt-5.5}")
    return folder


def test_among_equal_matches_the_operator_s_entry_wins(tmp_path: Path) -> None:
    entry = f"name: mine, {COMPAT}, auth_env: [M], model_prefixes: [gpt-]"
    assert choose(tmp_path, {"OPENAI_API_KEY": "a", "M": "m"}, entries=(entry,)).name == "mine"


def test_no_credential_is_needed_without_a_variable(tmp_path: Path) -> None:
    chosen = choose(tmp_path, {}, model="llama", entries=(f"name: local, {COMPAT}",))
    assert (chosen.name, chosen.env_key, chosen.credential) == ("local", None, None)
    assert chosen.reason.endswith("credential: none needed")


def test_an_entry_overrides_a_built_in_of_the_same_name(tmp_path: Path) -> None:
    entry = "name: openai, auth_mode: openai_api, auth_env: [OTHER_KEY], model_prefixes: [gpt-]"
    chosen = choose(tmp_path, {"OPENAI_API_KEY": "a", "OTHER_KEY": "o"}, entries=(entry,))
    assert (chosen.env_key, chosen.slug, chosen.base_url) == ("OTHER_KEY", "openai_api", "https://api.openai.com/v1")


def test_a_model_name_may_start_with_a_providers_prefix(tmp_path: Path) -> None:
    by_prefix = f"name: router, {COMPAT}, model_prefixes: [openai/]"
    assert choose(tmp_path, {}, model="openai/gpt-5.5", entries=(by_prefix,)).name == "router"
    by_alias = f"name: router, {COMPAT}, model_aliases: ['openai:gpt-5.5']"
    assert choose(tmp_path, {}, model="openai:gpt-5.5", entries=(by_alias,)).name == "router"


def test_an_alias_may_be_its_providers_name(tmp_path: Path) -> None:
    entry = f"name: llama, {COMPAT}, model_aliases: [llama]"
    assert choose(tmp_path, {}, model="llama", entries=(entry,)).model == "llama"


def test_a_name_of_codex_s_own_provider_is_given_another_slug(tmp_path: Path) -> None:
    assert choose(tmp_path, {}, model="m", entries=(f"name: ollama, {COMPAT}",)).slug == "ollama_api"


BAD = [
    ("gpt-5.5", None, (), {}, "environment: no provider has a credential; set OPENAI_API_KEY or CODEX_API_KEY"),
    ("gpt-5.5", None, (f"name: g, {COMPAT}, auth_env: [GW]",), {}, "set GW or OPENAI_API_KEY or CODEX_API_KEY"),
    (
        "gpt-5.5",
        "openai",
        (),
        {},
        "runtime_config.provider: openai has no credential; set OPENAI_API_KEY or CODEX_API_KEY",
    ),
    (
        "gpt-5.5",
        "opnai",
        (),
        {},
        "runtime_config.provider: must be one of openai, chatgpt, but is 'opnai' (did you mean openai?)",
    ),
    (
        "openai:gpt-5.5",
        None,
        (),
        {"OPENAI_API_KEY": "a"},
        "openai:gpt-5.5 begins with a provider's name; name openai as",
    ),
    ("openai/gpt-5.5", None, (), {"OPENAI_API_KEY": "a"}, "openai/gpt-5.5 begins with a provider's name"),
    (
        "gpt-5.5",
        "chatgpt",
        (),
        {},
        "runtime_config.provider: chatgpt has no credential; set CODEX_AUTH_JSON or CODEX_CHATGPT_AUTH_JSON",
    ),
    (
        "gpt-5.5",
        None,
        (),
        {"CODEX_AUTH_JSON": "{}", "OPENAI_API_KEY": "a"},
        "CODEX_AUTH_JSON: has no valid tokens; run `codex login`",
    ),
    (
        "openai",
        None,
        (),
        {"OPENAI_API_KEY": "a"},
        "runtime_config.model: openai is a provider, not a model; name openai as",
    ),
    ("mine", None, (f"name: mine, {COMPAT}",), {}, "runtime_config.model: mine is a provider, not a model"),
    ("m", None, ("name: g, auth_mode: openai_compat_responses",), {}, "providers[0].base_url: is missing"),
    (
        "m",
        None,
        ("name: g, auth_mode: openai_api, base_url: 'http://h'",),
        {},
        "providers[0].base_url: has no effect with auth_mode openai_api; set OPENAI_BASE_URL instead",
    ),
    ("m", None, (f"name: g, {COMPAT}", f"name: g, {COMPAT}"), {}, "providers[1].name: is a duplicate: 'g'"),
    (
        "m",
        None,
        (f"name: g 1, {COMPAT}", f"name: g_1, {COMPAT}"),
        {},
        "[1].model_provider_slug: is a duplicate: 'g_1'",
    ),
    (
        "m",
        None,
        (f"name: g, {COMPAT}, model_provider_slug: openai",),
        {},
        "providers[0].model_provider_slug: must not be a built-in provider",
    ),
    (
        "m",
        None,
        (f"name: g, {COMPAT}, auth_env: [A2A_TOKEN]",),
        {},
        "providers[0].auth_env[0]: must be a variable of the",
    ),
    ("gpt-5.5", None, (), {"OPENAI_API_KEY": "sk-secret-1\n"}, "environment: OPENAI_API_KEY: must be printable ASCII"),
    (
        "gpt-5.5",
        None,
        (),
        {"OPENAI_API_KEY": "sk-secret-1", "OPENAI_API_KEY_FILE": "/x"},
        "OPENAI_API_KEY_FILE: is set as well",
    ),
    (
        "gpt-5.5",
        None,
        (),
        {"OPENAI_API_KEY": "a", "OPENAI_BASE_URL": "http://u:sk-secret-1@h/v1"},
        "OPENAI_BASE_URL: must be an http",
    ),
]


@pytest.mark.parametrize(("model", "provider", "entries", "env", "words"), BAD)
def test_an_impossible_choice_is_one_sentence_with_the_remedy(
    tmp_path: Path, model: str, provider: str | None, entries: tuple[str, ...], env: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(tmp_path, env, model=model, provider=provider, entries=entries)
    sentence = str(caught.value)
    assert words in sentence
    assert sentence.startswith(("environment: ", str(tmp_path / "config.yaml")))
    assert "\n" not in sentence
    assert ". " not in sentence
    assert "sk-secret-1" not in sentence


def test_a_provider_s_name_given_as_model_by_the_environment_names_that_variable(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: agent\nruntime: codex\n")
    env = {"HOME": str(tmp_path), "MODEL": "openai"}
    settings = load_settings(env, config_path=tmp_path, cwd=tmp_path, root=tmp_path)
    with pytest.raises(ConfigError, match="environment: MODEL: openai is a provider, not a model"):
        choose_provider(settings, env)


@pytest.mark.parametrize(
    ("names", "env", "missing"),
    [
        ("[OPENAI_API_KEY, CODEX_API_KEY]", {"OPENAI_API_KEY": "a"}, None),  # of providers, and one has its credential
        ("[TICKETS]", {"TICKETS": "t"}, None),
        ("[TICKETS]", {"TICKETS_FILE": "/run/secrets/tickets"}, None),
        ("[TICKETS]", {}, "[0]"),
        ("[HOME_URL, TICKETS]", {"HOME_URL": "h", "TICKETS": ""}, "[1]"),
    ],
)
def test_a_required_variable_that_is_not_a_provider_s_must_be_set(
    tmp_path: Path, names: str, env: dict[str, str], missing: str | None
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"name: agent\nruntime: codex\nruntime_config: {{model: gpt-5.5, required_env: {names}}}\n")
    settings = load_settings({"HOME": str(tmp_path)}, config_path=tmp_path, cwd=tmp_path, root=tmp_path)
    env = {"OPENAI_API_KEY": "a"} | env
    if missing is None:
        assert choose_provider(settings, env).name == "openai"
        return
    with pytest.raises(ConfigError) as caught:
        choose_provider(settings, env)
    assert str(caught.value) == (
        f"{file}: runtime_config.required_env{missing}: names the variable TICKETS, which is not set; "
        "set it (or TICKETS_FILE)"
    )


def test_what_an_entry_says_of_its_models_is_passed_to_codex(tmp_path: Path) -> None:
    (tmp_path / "models.json").write_text("{}")
    declared = "context_window: 50000, auto_compact_token_limit: 40000, model_catalog_file: models.json"
    own = f"name: own, {COMPAT}, model_prefixes: [my-]"
    chosen = choose(tmp_path, {}, model="my-model", entries=(f"{own}, {declared}",))
    assert chosen.overrides == {
        "model_context_window": "50000",
        "model_auto_compact_token_limit": "40000",
        "model_catalog_json": f'"{tmp_path}/models.json"',
    }
    assert choose(tmp_path, {}, model="my-model", entries=(own,)).overrides == {}
