"""Compares the tables of docs/a2a.md with the code, and runs its `follow` example while the agent is killed.

Its examples are run by `tests.e2e.test_a2a_docs`.
"""

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Final, get_args

import anyio
import pytest
import yaml
from a2a.types import Task, TaskState
from a2a.utils.errors import A2A_ERROR_MAPPING, JSON_RPC_ERROR_CODE_MAP

from codex_workspace.common import errors
from codex_workspace.devkit.model import scripted_model
from codex_workspace.protocol.server_requests import (
    Approved,
    BooleanField,
    CommandQuestion,
    Declined,
    Field,
    Form,
    FormQuestion,
    PatchQuestion,
    PermissionQuestion,
    Question,
    QuestionField,
    ToolApproval,
    UrlRequest,
    UserQuestion,
)
from codex_workspace.runtimes.convert import approval_data
from codex_workspace.runtimes.events import ToolKind
from codex_workspace.server.answer_updates import KNOWN_CLIENTS, MODES
from codex_workspace.tasks.approval_answers import parse_answer
from codex_workspace.tasks.files import AttachmentsNotWritten
from tests.docs.test_docs import ROOT, names_in, sentences, table
from tests.e2e.agent_process import AgentSetup, running_agent
from tests.e2e.test_a2a_docs import DOCUMENT, SCENARIO, blocks, run_python
from tests.support.waiting import HANG_S

QUESTIONS: Final[list[Question]] = [
    CommandQuestion("ls", "/", None),
    PatchQuestion((), None, None),
    PermissionQuestion({"network": True}, None, None),
    FormQuestion("server", "a call", ToolApproval("tool", None, {}, can_last=True)),
    FormQuestion("server", "an address", UrlRequest("https://example.com")),
    FormQuestion("server", "a form", Form((Field("name", "Name", "", True, BooleanField()),), {})),
    UserQuestion((QuestionField("id", "", "Which?", (), True, False),)),
]


CLIENTS: Final = ROOT / "docs" / "clients.md"


def names(rows: list[list[str]], column: int = 0) -> set[str]:
    return {name for row in rows for name in names_in(row[column])}


def test_the_modes_of_a_stream_match_the_table() -> None:
    assert [names_in(row[0]) for row in table(DOCUMENT, "modes")] == [[mode] for mode in MODES]


def test_the_known_clients_match_the_table() -> None:
    versions = {True: "0.3", False: "1.0", None: "any"}
    known = [[f"`{each.agent}`", versions[each.is_0_3], f"`{each.mode}`"] for each in KNOWN_CLIENTS]
    assert [row[:3] for row in table(CLIENTS, "known clients")][:-1] == known


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda each: type(each).__name__)
def test_data_of_each_question_matches_the_table(question: Question) -> None:
    (row,) = [row for row in table(DOCUMENT, "questions") if names_in(row[0]) == [approval_data(question)["kind"]]]
    assert set(approval_data(question)) - {"kind"} <= set(names_in(row[1])) | {"choices"}
    assert ("choices" in approval_data(question)) == ("choices" in names_in(row[1]))


def test_documented_words_answer_a_question() -> None:
    for words, decision in zip(table(DOCUMENT, "words"), (Approved(False), None, Declined("")), strict=True):
        for word in names_in(words[1]) if decision else ():
            assert parse_answer(QUESTIONS[0], word, None) == decision
    assert parse_answer(QUESTIONS[3], "yes, for this session", None) == Approved(True)


def test_tables_list_all_kinds_of_questions_and_notes() -> None:
    assert names(table(DOCUMENT, "questions")) == {approval_data(each)["kind"] for each in QUESTIONS}
    kinds = {*re.findall(r'_note\(\s*"(\w+)"', source_of_tasks()), *get_args(ToolKind)}
    assert names(table(DOCUMENT, "kinds")) == kinds - {"patch"}


def test_table_of_failure_codes_matches_the_code() -> None:
    documented = names(table(DOCUMENT, "codes"))
    classes = {*vars(errors), AttachmentsNotWritten.__name__}
    assert {code for code in documented if code not in sentences() and code not in classes} <= {"httpStatus"}
    given = re.findall(r'(?:code\(|_failed\([^\n]*, )"(\w+)"\)', source_of_tasks())
    assert {"agentStopped", "cutOff", "inputRefused", "internal", "superseded"} <= set(given)
    assert set(given) <= documented


def source_of_tasks() -> str:
    package = ROOT / "codex_workspace"
    return "".join(file.read_text() for file in [package / "executor.py", *sorted((package / "tasks").glob("*.py"))])


def test_table_of_a2a_errors_matches_the_sdk() -> None:
    by_code = {
        code: A2A_ERROR_MAPPING[kind] for kind, code in JSON_RPC_ERROR_CODE_MAP.items() if kind in A2A_ERROR_MAPPING
    }
    rows = [row for row in table(DOCUMENT, "errors") if row[1].lstrip("-").isdigit()]
    assert len(rows) > 5
    for what, code, status, name, *_ in rows:
        assert (int(status), name) == (by_code[int(code)].http_code, by_code[int(code)].grpc_status), what


@pytest.mark.slow
async def test_follow_example_survives_a_restart_of_the_agent(tmp_path: Path) -> None:
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(yaml.safe_dump(SCENARIO))
    async with scripted_model(scenario=scenario) as model:
        setup = AgentSetup(tmp_path, model.base_url, environment={"A2A_TOKEN": "my-token"})
        reader: dict[str, object] = {"__name__": "reader"}
        async with running_agent(setup) as agent:
            await read_up_to("async def follow", agent.url, reader)
            await run_python(START_TASK, 1, reader)
            following = asyncio.create_task(follow_in(reader))
            agent.process.kill()
            await agent.ended()
        async with running_agent(replace(setup, port=port_of(agent.url))):
            with anyio.fail_after(HANG_S):
                assert (await following).status.state == TaskState.TASK_STATE_COMPLETED
        await run_python("await http.aclose()", 1, reader)


START_TASK: Final = """
request = message(Part(text="Take your time."))
request.configuration.CopyFrom(SendMessageConfiguration(return_immediately=True))
begun = await send(request)
"""


async def read_up_to(words: str, url: str, reader: dict[str, object]) -> None:
    """Run the document's Python examples, up to the one that contains `words`."""
    for line, language, code in blocks():
        if language == "python":
            await run_python(code.replace("http://127.0.0.1:8000/", url), line, reader)
        if words in code:
            return


async def follow_in(reader: dict[str, object]) -> Task:
    await run_python("followed = await follow(begun)", 1, reader)
    followed = reader["followed"]
    assert isinstance(followed, Task)
    return followed


def port_of(url: str) -> int:
    return int(url.rstrip("/").rpartition(":")[2])
