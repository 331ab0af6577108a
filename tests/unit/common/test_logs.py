"""The log's two forms, and what never shows in either."""

import json
import subprocess
import sys

import pytest

SECRETS = ["sk-1", "sk-1-longer", 'with "quotes" and \\', "ümlaut", "", "of two\nlines"]

PROGRAM = """
import logging, sys
from codex_workspace.common.logs import set_up_logging
from codex_workspace.common.redact import Redactor

secrets = {secrets!r}
set_up_logging(as_json={as_json}, level={level!r}, scrub=Redactor(secrets))
logger = logging.getLogger("ours")
logger.debug("not at this level")
logger.info("secret %s and %s", secrets[0], secrets[1])
logger.warning('quoted: %s; %r', secrets[2], secrets[3])
try:
    raise ValueError("cannot use " + secrets[2] + " or " + secrets[1])
except ValueError:
    logger.exception("failed with two\\nlines")
logger.warning("a peer says: hello\\n12:00:00 ERROR   ours: forged, and %s", secrets[5])
for chatty in ("httpx", "a2a.server", "aiosqlite", "uvicorn.error"):
    logging.getLogger(chatty).info("chatter")
    logging.getLogger(chatty).warning("%s warns", chatty)
"""


def log_of(*, as_json: bool, level: str = "INFO") -> str:
    """Return what a process writes on stderr."""
    program = PROGRAM.format(secrets=SECRETS, as_json=as_json, level=level)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=20)
    assert done.stdout == ""
    return done.stderr


def assert_clean(log: str) -> None:
    for secret in SECRETS:
        if secret:
            assert secret not in log
            assert json.dumps(secret, ensure_ascii=False)[1:-1] not in log
            assert json.dumps(secret)[1:-1] not in log


def test_the_log_for_people_shows_no_secret() -> None:
    log = log_of(as_json=False)
    assert_clean(log)
    assert "INFO    ours: secret *** and ***" in log
    assert "ValueError: cannot use *** or ***" in log
    assert "not at this level" not in log


def test_a_message_of_several_lines_is_one_record_for_people_too() -> None:
    (line,) = [line for line in log_of(as_json=False).splitlines() if "forged" in line]
    assert line.endswith(r"WARNING ours: a peer says: hello\n12:00:00 ERROR   ours: forged, and ***")


def test_the_log_for_machines_is_one_object_a_line_and_shows_no_secret() -> None:
    log = log_of(as_json=True)
    assert_clean(log)
    lines = [json.loads(line) for line in log.splitlines()]
    assert lines[0]["message"] == "secret *** and ***"
    assert (lines[0]["level"], lines[0]["logger"]) == ("info", "ours")
    assert lines[0]["time"].endswith("Z")
    assert lines[1]["message"] == "quoted: ***; '***'"
    assert lines[2]["message"] == "failed with two\nlines"
    assert lines[2]["traceback"].startswith("Traceback")
    assert "ValueError: cannot use *** or ***" in lines[2]["traceback"]


@pytest.mark.parametrize(("level", "warns"), [("DEBUG", True), ("INFO", True), ("ERROR", False)])
def test_libraries_are_heard_when_they_warn(level: str, warns: bool) -> None:
    log = log_of(as_json=False, level=level)
    assert "chatter" not in log
    assert ("a2a.server warns" in log) is warns


OF_WORK = """
import anyio, logging
from codex_workspace.common.logs import log_context, set_up_logging
from codex_workspace.common.redact import Redactor

set_up_logging(as_json={as_json}, level="INFO", scrub=Redactor(["sk-secret"]))
logger = logging.getLogger("deep.below")

async def deep(number):
    with log_context({{"thread": f"thread-{{number}}"}}):
        await anyio.to_thread.run_sync(logger.info, "from a worker thread")

async def work(number):
    with log_context({{"task": f"task-{{number}}", "context": {context!r}}}):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(deep, number)
        logger.info("back")

async def main():
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work, 1)
        tasks.start_soon(work, 2)
    logger.info("nobody's")

anyio.run(main)
"""


def log_of_work(*, as_json: bool, context: str = "ctx") -> str:
    """Return what two pieces of work side by side write on stderr."""
    program = OF_WORK.format(as_json=as_json, context=context)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=20)
    return done.stderr


def test_a_line_tells_whose_work_it_is_of_however_deep_it_is_written() -> None:
    lines = [json.loads(line) for line in log_of_work(as_json=True).splitlines()]
    for number in (1, 2):
        own = [line for line in lines if line.get("task") == f"task-{number}"]
        assert [(line["message"], line.get("thread"), line["context"]) for line in own] == [
            ("from a worker thread", f"thread-{number}", "ctx"),
            ("back", None, "ctx"),
        ]
    assert not {"task", "context", "thread"} & set(lines[-1])


def test_people_read_the_ids_behind_the_message() -> None:
    log = log_of_work(as_json=False)
    assert "INFO    deep.below: from a worker thread task=task-1 context=ctx thread=thread-1\n" in log
    assert log.endswith("deep.below: nobody's\n")


def test_an_id_that_a_client_made_up_cannot_look_like_another_line_or_hold_a_secret() -> None:
    log = log_of_work(as_json=False, context="a\n12:00:00 ERROR sk-secret")
    assert len(log.splitlines()) == 5
    assert 'context="a\\n12:00:00 ERROR ***"' in log
    assert "sk-secret" not in log_of_work(as_json=True, context="a sk-secret")
