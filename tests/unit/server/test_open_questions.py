"""One answer to one question, whoever is quicker."""

from a2a.server.context import ServerCallContext
from a2a.server.tasks import InMemoryTaskStore, TaskManager
from a2a.types import Message, Task, TaskState, TaskStatus

from codex_workspace.server.open_questions import MAX_TASKS, AnsweredQuestions

ASKS = TaskState.TASK_STATE_INPUT_REQUIRED


def asking(prompt: str, task_id: str = "task", at_ms: int = 0) -> Task:
    status = TaskStatus(state=ASKS, message=Message(message_id=prompt))
    if at_ms:
        status.timestamp.FromMilliseconds(at_ms)
    return Task(id=task_id, status=status)


def as_taken_in(task: Task) -> Task:
    """Return the task as the SDK has it between an answer's coming in and the next word of the executor's."""
    taken = Task()
    taken.CopyFrom(task)
    manager = TaskManager(InMemoryTaskStore(), ServerCallContext(), task.id, None, None)
    return manager.update_with_message(Message(), taken)


def test_the_first_word_is_the_answer_until_something_else_is_asked() -> None:
    answered = AnsweredQuestions()
    assert answered.claim(asking("first"), "yes-1")
    assert not answered.claim(asking("first"), "yes-2")
    assert answered.claim(asking("first"), "yes-1"), "the same message again"
    assert answered.claim(asking("second"), "yes-2")
    assert not answered.claim(asking("second"), "yes-1")


def test_a_question_that_was_answered_is_no_rest() -> None:
    answered = AnsweredQuestions()
    answered.claim(asking("first"), "yes")
    assert answered.is_answered("task", asking("first").status)
    assert not answered.is_answered("task", asking("second").status)
    assert not answered.is_answered("another", asking("first").status)
    working = TaskStatus(state=TaskState.TASK_STATE_WORKING, message=Message(message_id="first"))
    assert not answered.is_answered("task", working)


def test_what_is_asked_without_a_message_takes_every_answer() -> None:
    answered = AnsweredQuestions()
    wordless = Task(id="task", status=TaskStatus(state=ASKS))
    assert answered.claim(wordless, "yes-1")
    assert answered.claim(wordless, "yes-2")
    assert not answered.is_answered("task", wordless.status)


def test_a_question_is_answered_too_while_the_sdk_shows_it_without_its_message() -> None:
    answered = AnsweredQuestions()
    first = asking("first", at_ms=1)
    answered.claim(first, "yes-1")
    without_words = as_taken_in(first)
    assert without_words.status.state == ASKS
    assert not without_words.status.HasField("message")
    assert answered.is_answered("task", without_words.status)
    assert not answered.claim(without_words, "yes-2")
    assert not answered.is_answered("task", asking("second", at_ms=1).status)
    later = as_taken_in(asking("third", at_ms=2))
    assert not answered.is_answered("task", later.status)
    assert answered.claim(later, "yes-2")


def test_a_message_that_was_refused_is_no_answer() -> None:
    answered = AnsweredQuestions()
    answered.claim(asking("first"), "refused")
    answered.release("task", "another")
    assert not answered.claim(asking("first"), "next")
    answered.release("task", "refused")
    assert answered.claim(asking("first"), "next")


def test_only_so_many_tasks_are_remembered() -> None:
    answered = AnsweredQuestions()
    for number in range(MAX_TASKS + 1):
        assert answered.claim(asking("q", str(number)), "m")
    assert answered.claim(asking("q", "0"), "other"), "forgotten"
    assert not answered.claim(asking("q", str(MAX_TASKS)), "other")
