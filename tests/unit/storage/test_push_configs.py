"""Push configurations: who sees them, how long they are due, and what is rejected."""

import anyio
import pytest
from a2a.server.context import ServerCallContext
from a2a.types import AuthenticationInfo, Message, Role, Task, TaskPushNotificationConfig, TaskState
from a2a.utils.errors import InternalError, InvalidParamsError

from codex_workspace.common.a2a_terms import HEADERS, AuthenticatedUser
from codex_workspace.common.errors import StoreUnavailable
from codex_workspace.storage.database import Database
from codex_workspace.storage.deliveries import Deliveries
from codex_workspace.storage.push_configs import MAX_CONFIGS_PER_TASK, PushConfigs, UndeliveredEnd
from codex_workspace.storage.tasks import TaskStore
from tests.support.databases import column, insert_task

HOOK = "https://hooks.example.com/secret-path?key=secret-query"
DUE = "select id from push_configs where due_since is not null order by id"


def by(name: str, version: str = "1.0") -> ServerCallContext:
    return ServerCallContext(user=AuthenticatedUser(name), state={HEADERS: {"a2a-version": version}})


ME = by("me")


def config_of(config_id: str = "a", url: str = HOOK) -> TaskPushNotificationConfig:
    return TaskPushNotificationConfig(id=config_id, url=url)


def ended_task(task_id: str = "t", seconds: int = 1) -> Task:
    task = Task(id=task_id, context_id="c")
    task.status.state = TaskState.TASK_STATE_COMPLETED
    task.status.timestamp.FromSeconds(seconds)
    task.status.message.CopyFrom(Message(message_id="m", role=Role.ROLE_AGENT))
    return task


@pytest.fixture
def deliveries(database: Database) -> Deliveries:
    return Deliveries(database)


@pytest.fixture
def tasks(database: Database, deliveries: Deliveries) -> TaskStore:
    return TaskStore(database, deliveries, delay_s=60.0)


@pytest.fixture
def configs(database: Database, tasks: TaskStore) -> PushConfigs:
    return PushConfigs(database, tasks)


async def after_a_restart(database: Database) -> PushConfigs:
    configs = PushConfigs(database, TaskStore(database, Deliveries(database)))
    await configs.load()
    return configs


# --- Registration ---


async def test_configurations_are_visible_to_their_owner_only(configs: PushConfigs) -> None:
    for config_id in ("b", "a"):
        await configs.set_info("t", config_of(config_id), ME)
    assert [each.id for each in await configs.get_info("t", ME)] == ["a", "b"]
    assert await configs.get_info("t", by("somebody")) == []
    await configs.delete_info("t", by("somebody"))
    await configs.delete_info("t", by("somebody"), "a")
    assert [each.id for each in await configs.get_info("t", ME)] == ["a", "b"]
    assert list(configs.watched["t"]) == ["b", "a"]
    assert [each.id for each in await configs.get_info_for_dispatch("t")] == ["b", "a"]


async def test_another_owners_configuration_is_not_replaced(configs: PushConfigs, database: Database) -> None:
    await configs.set_info("t", config_of(), by("me", "0.3"))
    with pytest.raises(InvalidParamsError, match="id: another configuration"):
        await configs.set_info("t", config_of(url="https://else.example.com/"), by("somebody"))
    assert configs.watched["t"]["a"].url == HOOK
    assert configs.expects_whole_task("t", "a")
    assert [each.url for each in await configs.get_info("t", ME)] == [HOOK]
    assert (await after_a_restart(database)).watched["t"]["a"].url == HOOK


async def test_a_configuration_without_an_id_gets_the_tasks_and_replaces_the_one_before(configs: PushConfigs) -> None:
    for url in ("https://one.example.com/", "https://two.example.com/"):
        assert (await configs.set_info("t", config_of("", url), ME)).id == "t"
    (known,) = await configs.get_info("t", ME)
    assert known.url == "https://two.example.com/"
    assert configs.watched["t"]["t"].url == "https://two.example.com/"


async def test_configurations_outlive_the_process(configs: PushConfigs, database: Database) -> None:
    authentication = AuthenticationInfo(scheme="Bearer", credentials="theirs")
    config = TaskPushNotificationConfig(id="a", task_id="t", url=HOOK, token="known", authentication=authentication)
    await configs.set_info("t", config, ME)
    again = await after_a_restart(database)
    assert await again.get_info("t", ME) == [config]
    assert again.watched == {"t": {"a": config}}


async def test_a_deleted_configuration_is_no_longer_used(configs: PushConfigs, database: Database) -> None:
    for config_id in ("a", "b", "c"):
        await configs.set_info("t", config_of(config_id), ME)
    await configs.delete_info("t", ME, "b")
    assert list(configs.watched["t"]) == ["a", "c"]
    assert await column(database, DUE) == ["a", "c"]
    await configs.delete_info("t", ME)
    assert "t" not in configs.watched
    assert await column(database, "select id from push_configs") == []


async def test_a_webhook_set_again_over_1_0_receives_1_0_after_a_restart_too(
    configs: PushConfigs, database: Database
) -> None:
    old = by("me", "0.3")
    await insert_task(database, ended_task())
    for config_id, contexts in {"stays": [old], "changes": [old, ME]}.items():
        for context in contexts:
            await configs.set_info("t", config_of(config_id), context)
    for each in (configs, await after_a_restart(database)):
        assert each.expects_whole_task("t", "stays")
        assert await each.task_for("t", "stays") == ended_task()
        assert not each.expects_whole_task("t", "changes")
        assert await each.task_for("t", "changes") is None
    await configs.delete_info("t", old, "stays")
    assert not configs.expects_whole_task("t", "stays")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (TaskPushNotificationConfig(id="x" * 256), "id: at most 255 characters"),
        (TaskPushNotificationConfig(token="a\r\nHost: b"), "token: at most"),
        (TaskPushNotificationConfig(token="a" * 9000), "token: at most"),
        (TaskPushNotificationConfig(authentication=AuthenticationInfo(credentials="a\nb")), "authentication.cred"),
        (TaskPushNotificationConfig(authentication=AuthenticationInfo(scheme="a b")), "authentication.scheme: must"),
    ],
)
async def test_an_invalid_configuration_is_rejected(
    configs: PushConfigs, config: TaskPushNotificationConfig, named: str
) -> None:
    with pytest.raises(InvalidParamsError) as refused:
        await configs.set_info("t", config, ME)
    assert named in refused.value.message
    assert "t" not in configs.watched


async def test_the_number_of_configurations_per_task_is_bounded(configs: PushConfigs) -> None:
    async with anyio.create_task_group() as clients:
        for number in range(MAX_CONFIGS_PER_TASK):
            clients.start_soon(configs.set_info, "t", config_of(str(number)), ME)
    with pytest.raises(InvalidParamsError, match="at most"):
        await configs.set_info("t", config_of("more"), ME)
    assert "more" not in configs.watched["t"]
    await configs.set_info("t", config_of("0"), ME)


async def test_a_configuration_that_cannot_be_stored_is_not_used(
    configs: PushConfigs, tasks: TaskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def flush() -> None:
        raise StoreUnavailable("The disk is full.")

    await configs.set_info("t", config_of(), ME)
    monkeypatch.setattr(tasks, "flush", flush)
    for config in (config_of(url="https://else.example.com/"), config_of("b")):
        with pytest.raises(InternalError, match=r"The disk is full\."):
            await configs.set_info("t", config, ME)
    assert configs.watched == {"t": {"a": TaskPushNotificationConfig(id="a", task_id="t", url=HOOK)}}


async def test_a_client_that_leaves_during_the_registration_stays_registered(
    configs: PushConfigs, database: Database
) -> None:
    with anyio.CancelScope() as client:
        client.cancel()
        await configs.set_info("t", config_of(), ME)
    assert list(configs.watched["t"]) == ["a"] == await column(database, DUE)


# --- The end of the task ---


async def test_the_end_is_due_until_it_is_delivered(configs: PushConfigs, database: Database) -> None:
    for config_id in ("a", "b"):
        await configs.set_info("t", config_of(config_id), ME)
    await configs.mark_delivered("t", "a")
    assert list(configs.watched["t"]) == ["b"]
    again = await after_a_restart(database)
    assert list(again.watched["t"]) == ["b"]
    assert [each.id for each in await again.get_info("t", ME)] == ["a", "b"]
    await again.set_info("t", config_of("a"), ME)
    assert await column(database, DUE) == ["a", "b"]


async def test_undelivered_ends_come_oldest_first(configs: PushConfigs, database: Database) -> None:
    for task_id in ("new", "old", "works"):
        await configs.set_info(task_id, config_of(), ME)
    await insert_task(database, ended_task("new", 2))
    old = ended_task("old", 1)
    old.metadata.update({"key": "value"})
    await insert_task(database, old)
    working = ended_task("works")
    working.status.state = TaskState.TASK_STATE_WORKING
    await insert_task(database, working)
    ends = await (await after_a_restart(database)).undelivered_ends()
    assert [(end.task_id, end.config_id) for end in ends] == [("old", "a"), ("new", "a")]
    assert (ends[0].event.task_id, ends[0].event.context_id) == ("old", "c")
    assert (ends[0].event.status, ends[0].event.metadata) == (old.status, old.metadata)
    assert not ends[1].event.HasField("metadata")


async def test_the_end_of_a_task_that_ended_before_the_registration_is_delivered_at_once(
    configs: PushConfigs, tasks: TaskStore, deliveries: Deliveries, database: Database
) -> None:
    """The task store writes an end that a delivery holds later."""
    ends: list[UndeliveredEnd] = []
    configs.on_end_due(ends.append)
    await configs.set_info("t", config_of(), ME)
    assert ends == []
    deliveries.answered_tasks.add("t")
    await tasks.save(ended_task(), ME)
    assert await column(database, "select id from tasks") == []
    await configs.set_info("t", config_of("b"), ME)
    assert [(end.task_id, end.config_id) for end in ends] == [("t", "b")]
    assert ends[0].event.status == ended_task().status
