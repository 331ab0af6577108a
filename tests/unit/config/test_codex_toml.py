"""The agent's keys are set in config.toml and removed again, the operator's are kept, and codex accepts the file."""

import json
import os
import re
import stat
import subprocess
import sys
import tempfile
import threading
import tomllib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from codex_workspace.common.errors import ConfigError
from codex_workspace.common.values import KeyPath, TomlValue
from codex_workspace.config.codex_toml import (
    Managed,
    edit,
    managed_config,
    prepare_codex_home,
    update_config,
)
from codex_workspace.config.loading import load_settings
from codex_workspace.config.providers import ChosenProvider, choose_provider
from codex_workspace.config.settings import Settings
from tests.support.paths import ROOT

ENV = {"OPENAI_API_KEY": "sk-secret-1"}


def make_settings(folder: Path, codex: str = "", model: str = "gpt-5.5") -> Settings:
    (folder / "config.yaml").write_text(
        f"name: a\nruntime: codex\nmodel: {model}\ncodex: {{conversations: main{codex}}}\n"
    )
    return load_settings({"HOME": str(folder)}, config_path=folder, cwd=folder, root=folder / "root")


def choose(settings: Settings) -> ChosenProvider:
    return choose_provider(settings, ENV)


MANAGED: Managed = {
    ("model",): "gpt-5.5",
    ("model_provider",): "gw",
    ("web_search",): "disabled",
    ("analytics", "enabled"): False,
    ("features", "goals"): False,
    ("features", "multi_agent"): False,
    ("model_providers", "gw", "name"): 'a "quoted" name',
    ("model_providers", "gw", "base_url"): "http://127.0.0.1:9/v1",
    ("model_providers", "gw", "request_max_retries"): 2,
    ("sandbox_workspace_write", "writable_roots"): ["/a b", '/q"\\[x] # no comment'],
}


def look_up(document: object, path: KeyPath) -> object:
    for key in path:
        assert isinstance(document, dict)
        document = document[key]
    return document


def parse(text: str) -> dict[str, object]:
    return tomllib.loads(text.removeprefix("\ufeff"))


def assert_holds(text: str, managed: Managed) -> None:
    document = parse(text)
    for path, value in managed.items():
        found = look_up(document, path)
        assert (type(found), found) == (type(value), value)


def without(document: object, managed: Managed) -> object:
    """`document` less our keys, and less tables that are empty then."""
    return _pruned(document, (), managed)


def _pruned(value: object, path: KeyPath, managed: Managed) -> object:
    if not isinstance(value, dict):
        return value
    inner = {k: _pruned(v, (*path, k), managed) for k, v in value.items() if (*path, k) not in managed}
    ours = {known[:length] for known in managed for length in range(1, len(known))}
    return {k: v for k, v in inner.items() if not (v == {} and (*path, k) in ours)}


def examples(count: int) -> hypothesis_settings:
    """So many examples, however slow the machine is at that moment."""
    return hypothesis_settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow])


# ── Operators' files ──────────────────────────────────────────────────────────────────────────────────────────────────

HAND_WRITTEN = [
    "",
    "\n",
    "# only a comment",
    'model = "theirs"',
    "model = 'theirs' # why\r\n[features]\r\ngoals = true\r\n",
    "\ufeff# with a byte order mark\nx = 1\n",
    "[features]",
    "[features] # last line, no line break",
    "features.goals = true\nfeatures.mine = 1",
    'model_providers.gw.name = "x"\n',
    '[model_providers]\ngw.name = "x"\nother = { }\n',
    '[model_providers.gw]\n  name="x"# tight\n\tbase_url = "y"',
    '["model_providers" . "gw"]\n"name" = "x"\n',
    "[features.sub]\nx = 1\n[tools]\ny = 2\n",
    "[features.sub]\nx = 1\n[features]\ngoals = true\n",
    '[[hooks]]\nmodel = "not ours"\n[[hooks]]\nmodel = "nor this"\n[hooks.features]\ngoals = true\n',
    'text = """\n[features]\ngoals = "\\"""\n# model = 1\n""""\nraw = \'\'\'\n[x]\n\'\'\'\'\nmodel = "t"\n',
    'list = [ # why\n  "]", { a = "}" }, # [x]\n  [1, 2,],\n]\n"a.b" = 1\n"" = 2\n',
    "at = 1979-05-27 07:32:00 # a date\nf = 1e5\n[ features ]\n\n\n[x]\n",
    "[analytics]\nenabled = true\n\n# between\n\n[analytics.more]\nx = 1\n",
    '[projects."/work dir/a"]\ntrust_level = "trusted"\n',
    "features.sub.x = 1\n",
]


def comments_in(text: str) -> list[str]:
    """Return the operator's comments (in files without `#` in a value), sorted."""
    return sorted(line.partition("#")[2].strip() for line in text.splitlines() if "#" in line and OURS not in line)


OURS = "# set by codex-workspace"


def hide_digests(text: str) -> str:
    """Return `text` without the digest in each comment of the agent."""
    return re.sub(rf"({OURS}) \(\w{{8}}\)", r"\1", text)


@pytest.mark.parametrize("text", HAND_WRITTEN)
def test_keys_are_set_and_removed_again_and_the_operators_keys_and_comments_stay(text: str) -> None:
    edited = edit(text, MANAGED)
    assert_holds(edited, MANAGED)
    assert without(parse(edited), MANAGED) == without(parse(text), MANAGED)
    assert edit(edited, MANAGED) == edited
    restored = edit(edited, {})
    assert solid(parse(restored)) == solid(parse(text))
    assert comments_in(restored) == comments_in(text)
    assert OURS not in restored


KEYS = st.sampled_from(["features", "model", "model_providers", "gw", "goals", "name", "mine", "a b", 'q"', "é", ""])
COMMENTS = st.sampled_from(["", "", " # why", "# [x] = '", "\t", "# é \U0001f600"])
BREAKS = st.sampled_from(["\n", "\n", "\r\n"])
SCALARS = st.sampled_from(
    [
        *("true", "1", "-0x1F", "1.5", "inf", '"s"', "'l'", '"\\"# [x]"', "1979-05-27 07:32:00", "07:32:00"),
        *('"""a\n[features]\n"""""', "'''\r\n# x ''''", '["]", # c\n 1.5, {a = "}"}]', "[]", "[[1],\n[2] ,]"),
    ]
)


@st.composite
def spelled_keys(draw: st.DrawFn, path: KeyPath | None = None) -> str:
    path = tuple(draw(st.lists(KEYS, min_size=1, max_size=3))) if path is None else path
    parts = [draw(_spellings(part)) for part in path]
    return draw(st.sampled_from([".", " . "])).join(parts)


def _spellings(part: str) -> st.SearchStrategy[str]:
    quoted = [json.dumps(part), *([] if "'" in part else [f"'{part}'"])]
    return st.sampled_from([part, part, *quoted] if part.isascii() and part.isidentifier() else quoted)


INLINE: st.SearchStrategy[str] = st.deferred(
    lambda: st.lists(
        st.tuples(spelled_keys(), st.one_of(SCALARS.filter(lambda text: "\n" not in text), INLINE)), max_size=3
    ).map(lambda pairs: "{ " + ", ".join(f"{key}= {value}" for key, value in pairs) + " }")
)


@st.composite
def lines(draw: st.DrawFn) -> str:
    match draw(st.sampled_from(["pair", "pair", "ours", "inline", "header", "array", "comment", "blank"])):
        case "pair":
            text = f"{draw(spelled_keys())} = {draw(SCALARS)}{draw(COMMENTS)}"
        case "ours":
            path = draw(st.sampled_from(list(MANAGED)))
            text = f"{draw(spelled_keys(path))} ={draw(st.sampled_from(['1', 'true', chr(34) * 2]))}{draw(COMMENTS)}"
        case "inline":
            text = f" {draw(spelled_keys())}={draw(INLINE)}{draw(COMMENTS)}"
        case "header":
            text = f"[{draw(spelled_keys())}]{draw(COMMENTS)}"
        case "array":
            text = f"[[ {draw(spelled_keys())} ]]{draw(COMMENTS)}"
        case "comment":
            text = "# [features] = {"
        case _:
            text = draw(st.sampled_from(["", "  "]))
    return text + draw(BREAKS)


def is_toml(text: str) -> bool:
    try:
        parse(text)
    except tomllib.TOMLDecodeError:
        return False
    return True


@st.composite
def operators_files(draw: st.DrawFn) -> str:
    """Files in all spellings: lines one by one, each left out where the file would not be TOML with it."""
    text = draw(st.sampled_from(["", "", "\ufeff"]))
    for line in draw(st.lists(lines(), max_size=12)):
        if is_toml(text + line):
            text += line
    stripped = text.rstrip("\r\n")
    return stripped if draw(st.booleans()) and is_toml(stripped) else text


def try_edit(text: str, managed: Managed) -> str | None:
    """Edit the file; None if it is refused."""
    try:
        return edit(text, managed)
    except ConfigError:
        return None


@given(operators_files())
@examples(100)
def test_any_file_is_edited_and_restored_or_refused(text: str) -> None:
    done = try_edit(text, MANAGED)
    if done is not None:
        assert_holds(done, MANAGED)
        assert solid(without(parse(done), MANAGED)) == solid(without(parse(text), MANAGED))
        restored = try_edit(done, {})
        if restored is not None:
            assert solid(parse(restored)) == solid(parse(text))


@given(operators_files(), st.sampled_from(["operator_edit = 1\n", "# operator_edit\n"]), st.data())
@examples(60)
def test_changes_between_two_edits_are_kept(text: str, added: str, data: st.DataObject) -> None:
    merged = try_edit(text, MANAGED)
    if merged is None:
        return
    rows = merged.splitlines(keepends=True)
    at = data.draw(st.integers(0, len(rows)))
    edited = "".join(rows[:at]) + added + "".join(rows[at:])
    assume(is_toml(edited))
    back = try_edit(edited, {})
    if back is not None:
        assert added in back
        # A key that the operator added to a table of the agent keeps that table's header.
        assert solid(parse(back.replace(added, ""))) == solid(parse(text))


@given(operators_files())
@examples(30)
def test_a_second_start_changes_no_file_and_the_last_edit_restores_it(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "config.toml").write_bytes(text.encode())
        before = state(home)
        try:
            update_config(home, MANAGED)
        except ConfigError:
            assert state(home) == before
            return
        first = state(home)
        update_config(home, MANAGED)
        assert state(home) == first
        with suppress(ConfigError):
            update_config(home, {})
            assert solid(parse((home / "config.toml").read_bytes().decode())) == solid(parse(text))


def solid(value: object) -> object:
    """`value` without empty tables."""
    if not isinstance(value, dict):
        return value
    return {key: inner for key, each in value.items() if (inner := solid(each)) != {}}


@given(operators_files(), st.dictionaries(st.sampled_from(list(MANAGED)), st.booleans() | st.text(max_size=5)))
@examples(60)
def test_other_keys_replace_the_first_ones(text: str, other: dict[KeyPath, TomlValue]) -> None:
    first = try_edit(text, MANAGED)
    second = try_edit(first, other) if first is not None else None
    if second is not None:
        assert_holds(second, other)
        assert solid(without(parse(second), other)) == solid(without(parse(text), other))


# --- What an operator changes in the agent's part is the operator's


def test_top_level_keys_stand_before_every_table_and_comments_stay() -> None:
    merged = edit("# mine\n[tools]\nx = 1 # keep\n", {("model",): "m", ("analytics", "enabled"): False})
    assert hide_digests(merged) == (
        f'# mine\nmodel = "m" {OURS}\n\n[tools]\nx = 1 # keep\n\n[analytics]\nenabled = false {OURS}\n'
    )


def test_a_value_of_the_operator_is_in_the_comment_and_restored_later() -> None:
    merged = edit('model = "first" # why\n', {("model",): "second"})
    assert hide_digests(merged) == f'model = "second" {OURS} instead of "first" # why\n'
    merged = edit(merged, {("model",): "third"})
    assert hide_digests(merged) == f'model = "third" {OURS} instead of "first" # why\n'
    assert edit(merged, {}) == 'model = "first" # why\n'


@pytest.mark.parametrize(
    "theirs",
    [
        '"""\n# Style\nBe brief.\n"""',
        '"""Be brief.\n# End""" # why',
        "'''\n# Style\n# Style\n'''",
        '[\n  # the first\n  "Be brief.",\n]',
    ],
)
def test_a_replaced_value_may_have_lines_that_begin_with_a_hash(theirs: str) -> None:
    text = f"# mine\ndeveloper_instructions = {theirs}\nx = 1\n"
    merged = edit(text, {("developer_instructions",): "the agent's"})
    assert parse(merged) == {"developer_instructions": "the agent's", "x": 1}
    assert merged.startswith("# mine\n")
    assert parse(edit(merged, {})) == parse(text)


@pytest.mark.parametrize("before", ["", 'web_search = "live"\n'])
def test_a_value_that_the_operator_has_changed_is_the_operators(before: str) -> None:
    merged = edit(before, {("web_search",): "disabled"})
    changed = merged.replace('"disabled"', '"mine"')
    assert edit(changed, {}) == changed
    assert edit(changed, {("web_search",): "mine"}) == changed
    managed_again = edit(changed, {("web_search",): "cached"})
    assert parse(managed_again) == {"web_search": "cached"}
    assert parse(edit(managed_again, {})) == {"web_search": "mine"}
    back = changed.replace('"mine"', '"disabled"')
    assert parse(edit(back, {})) == parse(before)


def test_a_key_of_an_earlier_version_is_the_agents_without_a_digest() -> None:
    assert edit(f'model = "m" {OURS}\nx = 1\n', {}) == "x = 1\n"


def test_a_key_put_into_a_table_of_the_agent_keeps_the_table() -> None:
    merged = edit("", MANAGED)
    with_mine = merged.replace("[analytics]\n", "[analytics]\nmine = 1\n")
    assert parse(edit(with_mine, {})) == {"analytics": {"mine": 1}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a = 1\nb = \n", "line 2, column 5: Invalid value"),
        ("[a]\n[a]\n", "line 2, column 3: Cannot declare"),
        ("a = 1\na = 2\n", "line 2, column 6: Cannot overwrite"),
        ('a = "b', "Unterminated string"),
        ("features = 3\n", "features: must be a table that begins with [features]"),
        ("[[features]]\n", "features: must be a table that begins with [features]"),
        ("[[features]]\ngoals = 1\n", "features: must be a table that begins with [features]"),
        ("[model]\nx = 1\n", "model: must be a value, but is a table; remove it, or write model = …; the file was not"),
        ("model.x = 1\n", "model: must be a value, but is a table"),
        ("[[model]]\n", "model: must be a value, but is a table"),
        (
            'model_providers."a.b".name = "x"\n',
            'model_providers."a.b".name: must be the key name in a table that begins with [model_providers."a.b"]; ',
        ),
        ("[features.goals]\n", "features.goals: must be a value, but is a table"),
        (
            "features = { mine = 1 }\n",
            "features: must be a table that begins with [features], not a value, a list or {…}; ",
        ),
    ],
)
def test_a_file_that_cannot_be_edited_is_one_sentence_and_not_changed(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        update_config(tmp_path, MANAGED)
    sentence = str(caught.value)
    assert sentence.startswith(f"{file}: {words}")
    assert "\n" not in sentence
    assert file.read_text() == text
    assert [each.name for each in tmp_path.iterdir()] == ["config.toml"]


# ── Files ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_edit_that_would_lose_a_comment_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[features.x]\na = 1\n[model_providers]\n# c\n[features]\n[model_providers.y]\nb = 1\n# d\n")
    update_config(tmp_path, MANAGED)
    before = state(tmp_path)
    with pytest.raises(
        ConfigError, match=r"config\.toml: cannot be edited without losing keys or comments; write each"
    ):
        update_config(tmp_path, {})
    assert state(tmp_path) == before


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def state(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    return {each.name: (each.read_bytes(), each.stat().st_mtime_ns, each.stat().st_ino) for each in folder.iterdir()}


def test_codex_home_is_private_and_a_second_start_writes_nothing(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    prepare_codex_home(settings, choose(settings))
    home = settings.codex_home
    assert home == tmp_path / ".local" / "state" / "codex-workspace" / "codex"
    assert [mode(home), mode(home.parent), *(mode(each) for each in home.iterdir())] == [0o700, 0o700, 0o600]
    first = state(home)
    assert not any(b"sk-secret-1" in content for content, _, _ in first.values())
    prepare_codex_home(settings, choose(settings))
    assert state(home) == first


def test_a_key_no_longer_configured_is_removed_and_codexs_keys_stay(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    theirs = "# mine\r\nmodel_reasoning_effort = 'high'\r\n[tools]\r\nx = 1"
    file.write_bytes(theirs.encode())
    update_config(tmp_path, {**MANAGED, ("model_reasoning_effort",): "low", ("model_verbosity",): "low"})
    with file.open("ab") as stream:  # as codex 0.130 does
        stream.write(b'\r\n[projects."/w"]\r\ntrust_level = "trusted"\r\n')
    update_config(tmp_path, MANAGED)
    document = parse(file.read_text())
    assert (document["model_reasoning_effort"], "model_verbosity" in document) == ("high", False)
    assert document["projects"] == {"/w": {"trust_level": "trusted"}}
    update_config(tmp_path, {})
    assert parse(file.read_text()) == parse(theirs) | {"projects": document["projects"]}
    assert file.read_text().startswith("# mine\n")


def test_readers_see_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("# mine\n" * 500)
    update_config(tmp_path, MANAGED)
    whole = {file.read_bytes()}
    update_config(tmp_path, {})
    whole.add(file.read_bytes())
    seen: set[bytes] = set()
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            seen.add(file.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(10):
            update_config(tmp_path, MANAGED)
            update_config(tmp_path, {})
    finally:
        over.set()
        reader.join()
    assert seen <= whole
    assert {each.name for each in tmp_path.iterdir()} == {"config.toml"}


UPDATE_WITHOUT_ROOM = """
import resource, signal, sys
from pathlib import Path
from codex_workspace.config.codex_toml import update_config

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
try:
    update_config(Path(sys.argv[1]), {("model",): "m"})
except RuntimeError as error:
    print(error)
"""
"""Files of this process end at 3000 bytes, as on a full disk."""


def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("# mine\n" * 1000)
    before = file.read_bytes()
    ran = subprocess.run(
        [sys.executable, "-c", UPDATE_WITHOUT_ROOM, str(tmp_path)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert "cannot be used as part of CODEX_HOME (File too large)" in ran.stdout
    assert file.read_bytes() == before
    assert {each.name for each in tmp_path.iterdir()} == {"config.toml"}
    update_config(tmp_path, {})
    assert file.read_bytes() == before


def test_a_link_stays_a_link_and_the_mode_stays(tmp_path: Path) -> None:
    home, source = tmp_path / "home", tmp_path / "mounted.toml"
    home.mkdir(mode=0o755)
    source.write_text("x = 1\n")
    source.chmod(0o640)
    (home / "config.toml").symlink_to(source)
    update_config(home, MANAGED)
    assert (home / "config.toml").is_symlink()
    assert mode(source) == 0o640
    assert_holds(source.read_text(), MANAGED)


def test_files_that_cannot_be_used_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file.*: cannot be used as part of CODEX_HOME \((File exists|Not a dir)"):
        update_config(tmp_path / "file", MANAGED)
    (tmp_path / "a" / "config.toml").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"config\.toml: cannot be used as part of CODEX_HOME \(Is a directory\)"):
        update_config(tmp_path / "a", MANAGED)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.toml").write_bytes(b"a = 1\nb = '\xff'\n")
    with pytest.raises(ConfigError, match=r"config\.toml: byte 12 is not UTF-8"):
        update_config(tmp_path / "b", MANAGED)


# ── What is ours, and whether codex takes it ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("codex", "key", "value"),
    [
        ("", ("sandbox_mode",), "workspace-write"),
        (", sandbox: container", ("sandbox_mode",), "danger-full-access"),
        (", sandbox: read-only", ("sandbox_workspace_write", "network_access"), None),
        (", network_access: true", ("sandbox_workspace_write", "network_access"), True),
        (", approval_policy: on-request", ("approval_policy",), "on-request"),
        (", approval_policy: untrusted", ("approval_policy",), None),
        ("", ("model_reasoning_effort",), None),
        (", reasoning_effort: high", ("model_reasoning_effort",), "high"),
        ("", ("model_providers", "openai_api", "requires_openai_auth"), True),
        ("", ("model_providers", "openai_api", "env_key"), None),
        ("", ("shell_environment_policy", "inherit"), "core"),
        ("", ("web_search",), "disabled"),
        (", web_search: live", ("web_search",), "live"),
        ("", ("sandbox_workspace_write", "writable_roots"), None),
    ],
)
def test_settings_become_codex_s_keys(tmp_path: Path, codex: str, key: KeyPath, value: TomlValue | None) -> None:
    settings = make_settings(tmp_path, codex)
    assert managed_config(settings, choose(settings)).get(key) == value


def test_writable_folders_reach_the_real_codex_and_leave_with_their_key(tmp_path: Path) -> None:
    for name in ("root", "build", 'odd "na\\me'):
        (tmp_path / name).mkdir()
    for folders in (["build", 'odd "na\\me'], []):
        settings = make_settings(tmp_path, f", writable_folders: {json.dumps(folders)}")
        prepare_codex_home(settings, choose(settings))
        result = ask_codex(settings)[-1]["result"]
        assert isinstance(result, dict)
        assert result["sandbox"]["writableRoots"] == [str(tmp_path / folder) for folder in folders]


def test_a_provider_without_a_credential_needs_none(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    provider = replace(choose(settings), env_key=None, credential=None)
    assert ("model_providers", "openai_api", "requires_openai_auth") not in managed_config(settings, provider)


def ask_codex(settings: Settings) -> list[dict[str, object]]:
    """Everything that the real codex says to `initialize` and `thread/start` on this CODEX_HOME."""
    assert settings.codex_bin is not None
    env = {"CODEX_HOME": str(settings.codex_home), "PATH": os.environ["PATH"], "HOME": str(settings.codex_home)}
    info = {"clientInfo": {"name": "test", "version": "1"}, "capabilities": {"experimentalApi": True}}
    requests = [
        {"id": 1, "method": "initialize", "params": info},
        {"method": "initialized"},
        {"id": 2, "method": "thread/start", "params": {"cwd": str(settings.workspace_dir)}},
    ]
    said: list[dict[str, object]] = []
    with subprocess.Popen(
        [settings.codex_bin, "app-server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=env,
    ) as codex:
        watchdog = threading.Timer(30, codex.kill)
        watchdog.start()
        assert codex.stdin is not None
        assert codex.stdout is not None
        codex.stdin.write("".join(json.dumps(request) + "\n" for request in requests).encode())
        codex.stdin.flush()
        while not (said and said[-1].get("id") == 2):
            line = codex.stdout.readline()
            assert line, "codex ended before it answered"
            said.append(json.loads(line))
        codex.stdin.close()
        assert codex.wait(10) == 0
        watchdog.cancel()
    return said


@pytest.mark.parametrize("theirs", ["", "# mine\nfeatures = { shell_tool = true }\n[model_providers]\nx.name = 'x'\n"])
@pytest.mark.parametrize("codex", ["", ", sandbox: container, reasoning_effort: low", ", network_access: true"])
def test_the_real_codex_accepts_it_without_a_warning(tmp_path: Path, theirs: str, codex: str) -> None:
    settings = make_settings(tmp_path, codex)
    settings.codex_home.mkdir(parents=True)
    (settings.codex_home / "config.toml").write_text(theirs)
    prepare_codex_home(settings, choose(settings))
    said = ask_codex(settings)
    warnings = [each["params"] for each in said if each.get("method") == "configWarning"]
    assert [each for each in warnings if "bubblewrap" not in json.dumps(each)] == []  # the sandbox's, not the file's
    result = said[-1]["result"]
    assert isinstance(result, dict)
    assert (result["model"], result["modelProvider"], result["approvalPolicy"]) == ("gpt-5.5", "openai_api", "never")
    sandbox = result["sandbox"]
    assert sandbox["type"] == ("dangerFullAccess" if "container" in codex else "workspaceWrite")
    assert sandbox.get("networkAccess", False) is ("network_access" in codex)
    merged = (settings.codex_home / "config.toml").read_text()
    prepare_codex_home(settings, choose(settings))
    assert (settings.codex_home / "config.toml").read_text() == merged
