"""The connection to a codex in memory, and the process around it with small programs in codex's place."""

import json
import logging
import os
import signal
import sys
import textwrap
import time
from pathlib import Path

import anyio
import pytest

from codex_workspace.app_server import (
    LAUNCH_OVERRIDES,
    MAX_IN_FLIGHT,
    Connection,
    command_line,
    open_app_server,
)
from codex_workspace.common.errors import (
    CONFIG_REJECTED,
    CodexCannotStart,
    CodexGone,
    CodexRefused,
    CodexTimeout,
)
from codex_workspace.common.processes import find_marked
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.protocol.jsonrpc import Mailbox, Notification, Request
from codex_workspace.protocol.server_requests import DECLINED_REASON
from codex_workspace.runtimes.launch import MARK, Launch, child_environment
from tests.support.memory_codex import ENDED, memory_codex, params_of

# --- Requests and their answers ---


async def test_answers_find_their_requests_by_id_in_any_order() -> None:
    got: dict[str, JsonValue] = {}

    async def ask(connection: Connection, name: str) -> None:
        got[name] = await connection.call("echo", {"name": name})

    async with memory_codex() as codex:
        async with anyio.create_task_group() as tasks:
            for name in "abc":
                tasks.start_soon(ask, codex.connection, name)
            requests = [await codex.read("echo") for _ in "abc"]
            for request in reversed(requests):
                await codex.reply(request, params_of(request)["name"])
        assert got == {"a": "a", "b": "b", "c": "c"}


async def test_an_error_is_raised_with_its_code_and_message() -> None:
    async with memory_codex() as codex, anyio.create_task_group() as tasks:

        async def ask() -> None:
            with pytest.raises(CodexRefused, match="no active turn") as raised:
                await codex.connection.call("turn/interrupt", {})
            assert (raised.value.method, raised.value.code) == ("turn/interrupt", -32600)

        tasks.start_soon(ask)
        await codex.refuse(await codex.read(), -32600, "no active turn")


async def test_a_late_response_is_ignored() -> None:
    async with memory_codex() as codex:
        with pytest.raises(CodexTimeout, match=r"did not answer slow within 0\.01 s"):
            await codex.connection.call("slow", {}, timeout_s=0.01)
        slow = await codex.read("slow")
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                assert await codex.connection.call("next", {}) == "of the next"

            tasks.start_soon(ask)
            request = await codex.read("next")
            await codex.reply(slow, "late")
            await codex.reply(request, "of the next")
            await codex.reply(request, "once more")


async def test_never_more_requests_in_flight_than_codex_can_hold() -> None:
    asked = MAX_IN_FLIGHT + 20
    async with memory_codex() as codex, anyio.create_task_group() as tasks:

        async def ask(number: int) -> None:
            assert await codex.connection.call("echo", {"n": number}) == number

        for number in range(asked):
            tasks.start_soon(ask, number)
        requests = [await codex.read("echo") for _ in range(MAX_IN_FLIGHT)]
        with anyio.move_on_after(0.05) as waiting:
            requests.append(await codex.read("echo"))
        assert waiting.cancelled_caught
        for answered in range(asked):
            await codex.reply(requests[answered], params_of(requests[answered])["n"])
            if len(requests) < asked:
                requests.append(await codex.read("echo"))
        assert not codex.unread


async def test_a_cancelled_request_gives_its_place_back() -> None:
    async with memory_codex() as codex:
        for _ in range(MAX_IN_FLIGHT + 1):
            with anyio.move_on_after(0.001):
                await codex.connection.call("slow", {})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(codex.connection.call, "last", {})
            while (request := await codex.read())["method"] != "last":
                pass
            await codex.reply(request, None)


async def test_lone_surrogates_do_not_stop_a_request() -> None:
    async with memory_codex() as codex, anyio.create_task_group() as tasks:
        params: JsonObject = {"text": "a\ud800b \ud83d\ude00"}
        tasks.start_soon(codex.connection.call, "turn/start", params)
        assert await codex.answer("turn/start", {}) == {"text": "a\ufffdb \U0001f600"}


# --- Death ---


async def test_the_death_of_codex_is_everybodys_at_once() -> None:
    ended: list[str] = []
    async with memory_codex() as codex:

        async def ask(name: str) -> None:
            with pytest.raises(CodexGone, match=ENDED):
                await codex.connection.call(name, {})
            ended.append(name)

        async def subscribe(thread_id: str) -> None:
            with codex.connection.subscribe(thread_id) as mailbox, pytest.raises(CodexGone, match=ENDED):
                await mailbox.receive()
            ended.append(thread_id)

        async with anyio.create_task_group() as tasks:
            for name in [f"call-{number}" for number in range(MAX_IN_FLIGHT + 5)]:
                tasks.start_soon(ask, name)
            for thread_id in ("thread-1", "thread-2"):
                tasks.start_soon(subscribe, thread_id)
            await codex.read()
            await codex.exit()
        assert len(ended) == MAX_IN_FLIGHT + 5 + 2
        assert codex.connection.error is not None
        await ask("later")
        await subscribe("later too")


async def test_messages_before_the_exit_are_still_read() -> None:
    async with memory_codex() as codex:
        with codex.connection.subscribe("t") as mailbox:
            await codex.tell("turn/started", threadId="t")
            await codex.exit()
            while codex.connection.error is None:
                await anyio.sleep(0.001)
            assert await mailbox.receive() == [Notification("turn/started", {"threadId": "t"})]
            with pytest.raises(CodexGone):
                await mailbox.receive()


async def test_a_codex_that_does_not_read_blocks_no_caller_after_its_exit() -> None:
    """The pipe and the outbox are full of refusals: a request waits for room in it."""
    async with memory_codex() as codex:
        # Each is quoted in its refusal: together they are more than a pipe and the outbox hold.
        unknown = "x" * 4000
        for number in range(100):
            await codex.write({"id": number, "method": unknown})
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                with pytest.raises(CodexGone):
                    await codex.connection.call("turn/start", {})

            tasks.start_soon(ask)
            await anyio.sleep(0.05)
            await codex.exit()


# --- Lines ---


async def test_lines_that_are_no_messages_are_skipped(caplog: pytest.LogCaptureFixture) -> None:
    async with memory_codex() as codex, anyio.create_task_group() as tasks:
        tasks.start_soon(codex.connection.call, "x", {})
        request = await codex.read()
        await codex.write_bytes(b'WARN not json\n\n[1,2]\n{"id":null}\n\xff\xfe\n{"params":{}}\n')
        await codex.reply({"id": 4711}, "to no request")
        await codex.reply(request, None)
    assert "WARN not json" in caplog.text


async def test_a_line_over_the_limit_is_reported_and_the_rest_is_read(caplog: pytest.LogCaptureFixture) -> None:
    async with memory_codex(max_line_bytes=100_000) as codex:
        with codex.connection.subscribe("t") as mailbox:
            await codex.tell("big", threadId="t", text="x" * 200_000)
            await codex.tell("small", threadId="t")
            assert [method_of(said) for said in await mailbox.receive()] == ["small"]
    assert "skipped a line of 2000" in caplog.text


async def test_a_message_may_arrive_byte_by_byte_without_a_final_newline() -> None:
    async with memory_codex() as codex, anyio.create_task_group() as tasks:
        with codex.connection.subscribe("t") as mailbox:
            line = json.dumps({"method": "said", "params": {"threadId": "t", "text": "é\u2028"}}, ensure_ascii=False)
            for byte in line.encode():
                await codex.write_bytes(bytes([byte]))
            await codex.exit()
            assert await mailbox.receive() == [Notification("said", {"threadId": "t", "text": "é\u2028"})]
        tasks.cancel_scope.cancel()


# --- Notifications ---


async def test_a_thread_receives_only_its_own_messages() -> None:
    async with memory_codex() as codex:
        with codex.connection.subscribe("a") as a, codex.connection.subscribe("b") as b:
            for thread_id in ("a", "b", "c", None, 7, "a"):
                await codex.tell("said", threadId=thread_id)
            await codex.tell("skills/changed")
            await codex.tell("last", threadId="b")
            heard: list[Notification | Request] = []
            while len(heard) < 2:
                heard += await b.receive()
            assert [method_of(said) for said in heard] == ["said", "last"]
            assert await a.receive() == [Notification("said", {"threadId": "a"})] * 2


async def test_threads_that_were_listened_to_are_counted_once() -> None:
    async with memory_codex() as codex:
        for thread_id in ("a", "b", "a"):
            with codex.connection.subscribe(thread_id):
                pass
        assert codex.connection.threads == 2


# --- Codex's own requests ---

REFUSALS: dict[str, JsonValue] = {
    "item/commandExecution/requestApproval": {"decision": "decline"},
    "item/fileChange/requestApproval": {"decision": "decline"},
    "item/permissions/requestApproval": {"permissions": {}},
    "item/tool/requestUserInput": {"answers": {}},
    "mcpServer/elicitation/request": {"action": "decline"},
    "item/tool/call": {"contentItems": [{"type": "inputText", "text": DECLINED_REASON}], "success": False},
}


@pytest.mark.parametrize("method", REFUSALS)
async def test_every_known_request_gets_its_declining_response(method: str) -> None:
    async with memory_codex() as codex:
        await codex.write({"id": 0, "method": method, "params": {"threadId": "unheard of"}})
        assert await codex.read() == {"id": 0, "result": REFUSALS[method]}


@pytest.mark.parametrize("method", ["account/chatgptAuthTokens/refresh", "item/telepathy/request"])
async def test_an_unknown_request_gets_an_error(method: str) -> None:
    async with memory_codex() as codex:
        await codex.write({"id": "r-1", "method": method, "params": {}})
        refused = {"code": -32601, "message": f"{method} is not supported"}
        assert await codex.read() == {"id": "r-1", "error": refused}


@pytest.mark.parametrize("id_", [0, "0", -1, "", 2**53 + 1])
async def test_ids_come_back_with_their_type(id_: int | str) -> None:
    async with memory_codex() as codex:
        await codex.write({"id": id_, "method": "item/fileChange/requestApproval", "params": {}})
        echoed = (await codex.read())["id"]
        assert (type(echoed), echoed) == (type(id_), id_)


async def test_a_request_may_share_an_id_with_one_of_the_agents() -> None:
    async with memory_codex() as codex, anyio.create_task_group() as tasks:

        async def ask() -> None:
            assert await codex.connection.call("x", {}) == "ours"

        tasks.start_soon(ask)
        request = await codex.read("x")
        await codex.write({"id": request["id"], "method": "item/fileChange/requestApproval", "params": {}})
        assert await codex.read() == {"id": request["id"], "result": {"decision": "decline"}}
        await codex.reply(request, "ours")


async def test_a_request_that_is_repeated_while_it_waits_is_answered_once() -> None:
    async with memory_codex() as codex:
        with codex.connection.subscribe("t") as mailbox:
            pending: JsonObject = {"id": 5, "method": "item/fileChange/requestApproval", "params": {"threadId": "t"}}
            await codex.write(pending, pending, {**pending, "id": "5"})
            asked = await all_asked(mailbox, 2)
            for each in asked:
                each.answer({"decision": "accept"})
                each.answer({"decision": "decline"})
            answered = [await codex.read(), await codex.read()]
            assert sorted(answered, key=str) == [
                {"id": "5", "result": {"decision": "accept"}},
                {"id": 5, "result": {"decision": "accept"}},
            ]
            await codex.write({**pending, "id": 6})
            for each in await all_asked(mailbox, 1):
                each.answer({"decision": "accept"})
            assert (await codex.read())["id"] == 6
        assert [each.id for each in asked] == [5, "5"]


def method_of(said: Notification | Request) -> str:
    return said.method


async def all_asked(mailbox: Mailbox, count: int) -> list[Request]:
    """Return the next `count` requests."""
    asked: list[Request] = []
    while len(asked) < count:
        asked += [each for each in await mailbox.receive() if isinstance(each, Request)]
    return asked


async def test_requests_and_notifications_keep_their_order() -> None:
    async with memory_codex() as codex:
        with codex.connection.subscribe("t") as mailbox:
            request: JsonObject = {"id": 1, "method": "item/tool/call", "params": {"threadId": "t"}}
            await codex.write({"method": "a", "params": {"threadId": "t"}}, request)
            await codex.write({"method": "b", "params": {"threadId": "t"}})
            heard: list[str] = []
            while len(heard) < 3:
                heard += [method_of(each) for each in await mailbox.receive()]
            assert heard == ["a", "item/tool/call", "b"]


async def test_a_closed_listener_declines_its_open_requests() -> None:
    async with memory_codex() as codex:
        with codex.connection.subscribe("t") as mailbox:
            await codex.write({"id": 1, "method": "item/fileChange/requestApproval", "params": {"threadId": "t"}})
            await mailbox.receive()
        assert await codex.read() == {"id": 1, "result": {"decision": "decline"}}


async def test_a_slow_response_blocks_nothing_else() -> None:
    async with memory_codex() as codex, anyio.create_task_group() as tasks:
        with codex.connection.subscribe("t"):
            await codex.write({"id": 1, "method": "item/tool/call", "params": {"threadId": "t"}})
            tasks.start_soon(codex.connection.call, "x", {})
            await codex.answer("x", {})


# --- The process's command line, environment and version ---


def test_the_environment_is_an_allow_list() -> None:
    ours = {
        "PATH": "/bin",
        "HOME": "/home/me",
        "LC_ALL": "C.UTF-8",
        "LANG": "C",
        "https_proxy": "http://proxy",
        "SSL_CERT_FILE": "/ca.pem",
        "ANTHROPIC_API_KEY": "a",
        "MOLECULE_WORKSPACE_TOKEN": "b",
        "A2A_TOKEN": "c",
        "OPENAI_API_KEY": "d",
        "DATABASE_URL": "e",
        "CODEX_HOME": "/somewhere/else",
        "LD_PRELOAD": "/evil.so",
    }
    launch = Launch(Path("/codex"), Path("/home/codex"), Path("/w"), ours)
    passed = {"PATH", "HOME", "LC_ALL", "LANG", "https_proxy", "SSL_CERT_FILE"}
    expected = {name: ours[name] for name in passed} | {"CODEX_HOME": "/home/codex", MARK: "m"}
    assert child_environment(launch, "m") == expected
    chosen = Launch(Path("/codex"), Path("/home/codex"), Path("/w"), ours, "k", handed={"FOR_A_SERVER": "s"})
    assert child_environment(chosen, "m") == expected | {"FOR_A_SERVER": "s"}


def test_the_command_line_holds_the_launch_recipe() -> None:
    launch = Launch(Path("/bin/codex"), Path("/h"), Path("/w"), overrides={"web_search": '"disabled"'})
    binary, subcommand, *flags = command_line(launch, "mark")
    assert (binary, subcommand) == ("/bin/codex", "app-server")
    assert flags[::2] == ["-c"] * (len(flags) // 2)
    settings = dict(flag.split("=", 1) for flag in flags[1::2])
    assert settings == {
        **LAUNCH_OVERRIDES,
        f"shell_environment_policy.set.{MARK}": '"mark"',
        "web_search": '"disabled"',
    }


# --- Programs in codex's place ---

PRELUDE = """
import json, os, signal, subprocess, sys, time

def read():
    line = sys.stdin.readline()
    return json.loads(line) if line else None

def answer(message, result):
    print(json.dumps({"id": message["id"], "result": result}), flush=True)

def greet(version="0.163.0"):
    answer(read(), {"userAgent": f"codex_workspace/{version} (test)"})
    read()
    return log_in()

def log_in():
    config = read()
    if config is None:
        return None
    assert config["method"] == "config/read", config
    answer(config, {"config": {}})
    login = read()
    if login is None:
        return None
    assert login["method"] == "account/login/start", login
    answer(login, {"type": "apiKey"})
    return login["params"]["apiKey"]

def child(code):
    # In a session of its own, with our pipes in its hands: as codex's commands are.
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
"""


def program(folder: Path, code: str, start_timeout_s: float = 20.0) -> Launch:
    """Make a program of Python code and return how it is launched in codex's place."""
    file = folder / "codex"
    file.write_text(f"#!{sys.executable}\n{PRELUDE}\n{textwrap.dedent(code)}")
    file.chmod(0o755)
    return Launch(
        file,
        folder,
        folder,
        {"PATH": os.environ["PATH"]},
        "sk-very-secret",
        ["other-secret"],
        start_timeout_s=start_timeout_s,
    )


def left_of(folder: Path) -> list[int]:
    """Return the processes that still run with `folder` as CODEX_HOME."""
    return find_marked("CODEX_HOME", str(folder))


@pytest.mark.alone
async def test_a_working_codex_is_initialized_and_stopped(tmp_path: Path) -> None:
    launch = program(
        tmp_path,
        """
        hello = read()
        answer(hello, {"userAgent": "codex_workspace/0.163.0 (test)"})
        initialized = read()
        key = log_in()
        question = read()
        answer(question, [hello, initialized, key, os.environ.get("A2A_TOKEN"), os.getcwd()])
        read()
        """,
    )
    async with open_app_server(launch) as codex:
        assert codex.version == (0, 163, 0)
        answer = await codex.call("what", {})
        assert isinstance(answer, list)
        hello, initialized, key, token, cwd = answer
        assert isinstance(hello, dict)
        params = params_of(hello)
        assert hello["method"] == "initialize"
        assert isinstance(params["clientInfo"], dict)
        assert params["clientInfo"]["name"] == "codex_workspace"
        assert isinstance(params["capabilities"], dict)
        assert params["capabilities"]["experimentalApi"] is True
        assert isinstance(initialized, dict)
        assert initialized["method"] == "initialized"
        assert (key, token, cwd) == ("sk-very-secret", None, str(tmp_path))
        began = time.monotonic()
    assert time.monotonic() - began < 1
    assert codex.error is not None
    assert left_of(tmp_path) == []


async def two_are_seen(folder: Path) -> None:
    """Wait until codex and its command are seen: at a program's start the kernel shows no environment of it yet."""
    with anyio.fail_after(5):
        while len(left_of(folder)) != 2:
            await anyio.sleep(0.01)


@pytest.mark.alone
async def test_a_codex_that_ignores_signals_is_killed_within_eight_seconds(tmp_path: Path) -> None:
    signal.setitimer(signal.ITIMER_REAL, 20)
    launch = program(
        tmp_path,
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)")
        greet()
        while True:
            time.sleep(60)
        """,
    )
    async with open_app_server(launch):
        await two_are_seen(tmp_path)
        began = time.monotonic()
    assert 4.9 < time.monotonic() - began < 8
    assert left_of(tmp_path) == []


async def test_commands_that_codex_leaves_behind_are_ended(tmp_path: Path) -> None:
    launch = program(tmp_path, "greet(); child('import time; time.sleep(60)'); answer(read(), {}); read()")
    async with open_app_server(launch) as codex:
        await codex.call("go on", {})
        await two_are_seen(tmp_path)
    assert left_of(tmp_path) == []


@pytest.mark.alone
async def test_a_death_is_noticed_although_a_grandchild_holds_the_pipes(tmp_path: Path) -> None:
    launch = program(
        tmp_path,
        """
        greet()
        child("import time; time.sleep(60)")
        read()
        print("thread panicked: sk-very-secret", file=sys.stderr, flush=True)
        os._exit(101)
        """,
    )
    async with open_app_server(launch) as codex:
        began = time.monotonic()
        with pytest.raises(CodexGone, match="ended with exit code 101") as raised:
            await codex.call("turn/start", {})
        assert time.monotonic() - began < 1
        assert raised.value.tail == "thread panicked: ***"
        assert raised.value.public == "codex ended with exit code 101"
    assert left_of(tmp_path) == []


async def test_kill_ends_codex_at_once(tmp_path: Path) -> None:
    launch = program(tmp_path, "greet(); read(); time.sleep(60)")
    async with open_app_server(launch) as codex, anyio.create_task_group() as tasks:

        async def ask() -> None:
            with pytest.raises(CodexGone, match="stopped responding"):
                await codex.call("x", {})

        tasks.start_soon(ask)
        await anyio.sleep(0.02)
        codex.kill()
    codex.kill()


async def test_a_codex_that_closes_its_output_is_of_no_more_use(tmp_path: Path) -> None:
    launch = program(tmp_path, "greet(); read(); os.close(1); time.sleep(60)")
    async with open_app_server(launch) as codex:
        with pytest.raises(CodexGone):
            await codex.call("x", {})
    assert left_of(tmp_path) == []


async def test_a_codex_that_exits_at_once_is_reported_with_its_stderr(tmp_path: Path) -> None:
    complaint = "\\x1b[31mError\\x1b[0m: bad value for sk-very-secret and other-secret"
    launch = program(tmp_path, f"sys.stderr.write('x' * 5000 + '\\n{complaint}\\n'); sys.exit(1)")
    with pytest.raises(CodexCannotStart, match="cannot start: it ended with exit code 1") as raised:
        async with open_app_server(launch):
            pytest.fail("it did not start")
    assert raised.value.tail.endswith("x\nError: bad value for *** and ***")
    assert len(raised.value.tail) <= 2048
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("filler", [2030, 2034, 2040, 2047, 2048, 2050])
async def test_a_secret_that_the_tail_cuts_through_does_not_show(tmp_path: Path, filler: int) -> None:
    launch = program(
        tmp_path, "sys.stderr.write('sk-very-secret' + 'x' * filler); sys.exit(1)".replace("filler", str(filler))
    )
    with pytest.raises(CodexCannotStart) as raised:
        async with open_app_server(launch):
            pytest.fail("it did not start")
    assert "secret" not in raised.value.tail
    assert raised.value.tail.endswith("x" * 2030)


async def test_a_configurations_values_show_neither_in_the_tail_nor_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    said = "Error loading config.toml:\\n  |\\n3 | a = {b = 'operator-value" + "x" * 3000 + "'\\n  | ^\\nunclosed"
    launch = program(tmp_path, f'sys.stderr.write("{said}"); sys.exit(1)')
    with pytest.raises(CodexCannotStart) as raised:
        async with open_app_server(launch):
            pytest.fail("it did not start")
    assert raised.value.tail == "Error loading config.toml:\nunclosed"
    assert "Error loading config.toml:" in caplog.text
    assert "operator-value" not in caplog.text


async def test_a_codex_that_is_too_old_is_named(tmp_path: Path) -> None:
    launch = program(tmp_path, "greet('0.157.9'); read()")
    with pytest.raises(CodexCannotStart, match=r"codex 0\.157\.9 is too old: this agent needs 0\.158\.0 or newer"):
        async with open_app_server(launch):
            pytest.fail("it did not start")
    assert left_of(tmp_path) == []


async def test_megabytes_on_stderr_in_one_line_block_nothing(tmp_path: Path) -> None:
    launch = program(
        tmp_path,
        """
        sys.stderr.write("x" * 3_000_000)
        sys.stderr.flush()
        greet()
        answer(read(), {})
        sys.stderr.write("y" * 3_000_000 + "the end")
        """,
    )
    async with open_app_server(launch) as codex:
        await codex.call("x", {})
        with pytest.raises(CodexGone) as raised:
            await codex.call("x", {})
        assert raised.value.tail == "y" * (2048 - 7) + "the end"


async def test_a_codex_that_never_answers_does_not_start(tmp_path: Path) -> None:
    launch = program(tmp_path, "read(); read()", start_timeout_s=0.3)
    with pytest.raises(CodexCannotStart, match=r"did not answer initialize within 0\.3 s"):
        async with open_app_server(launch):
            pytest.fail("it did not start")
    assert left_of(tmp_path) == []


async def test_a_codex_that_refuses_the_greeting_does_not_start(tmp_path: Path) -> None:
    code = 'print(json.dumps({"id": read()["id"], "error": {"code": -32600, "message": "who?"}}), flush=True); read()'
    with pytest.raises(CodexCannotStart, match="codex rejected initialize: who"):
        async with open_app_server(program(tmp_path, code)):
            pytest.fail("it did not start")


async def test_a_rejected_configuration_is_reported_without_its_values(tmp_path: Path) -> None:
    launch = program(
        tmp_path,
        """
        answer(read(), {"userAgent": "codex_workspace/0.163.0 (test)"})
        read()
        refusal = 'other words: invalid type: string "sk-operator-secret", expected a map'
        print(json.dumps({"id": read()["id"], "error": {"code": -1, "message": refusal}}), flush=True)
        read()
        """,
    )
    with pytest.raises(CodexCannotStart) as raised:
        async with open_app_server(launch):
            pytest.fail("it did not start")
    assert raised.value.public == CONFIG_REJECTED
    assert str(raised.value) == (
        f"codex rejects {tmp_path / 'config.toml'}: other words: invalid type: string …, expected a map; "
        "correct the file"
    )


async def test_a_missing_binary_is_one_sentence(tmp_path: Path) -> None:
    missing = tmp_path / "no-codex"
    with pytest.raises(CodexCannotStart, match=f"{missing}: No such file or directory"):
        async with open_app_server(Launch(missing, tmp_path, tmp_path)):
            pytest.fail("it did not start")


async def test_an_error_of_the_block_arrives_plain(tmp_path: Path) -> None:
    launch = program(tmp_path, "greet(); read()")
    with pytest.raises(KeyError, match="mine"):
        async with open_app_server(launch):
            raise KeyError("mine")
    assert left_of(tmp_path) == []


async def test_a_cancelled_block_leaves_no_process(tmp_path: Path) -> None:
    launch = program(tmp_path, "greet(); read()")
    with anyio.move_on_after(0.5):
        async with open_app_server(launch):
            await anyio.sleep_forever()
    assert left_of(tmp_path) == []
