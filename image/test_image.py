"""The image's contract, in real containers: `make image-test` builds the image and runs this.

Codex in them is the real one, and so are the A2A client and the sandbox; only the model is scripted, on this machine's
loopback, which the containers share.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import uuid
import zipfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

import anyio
import psutil
import pytest
import yaml
from a2a.types import TaskState

from codex_workspace.devkit.model import ScriptedModel, scripted_model
from image.__main__ import MARK, pip_secrets, pip_settings
from image.container import HARDENED, IMAGE, SECRET, TOKEN, Container, Place, ended, image_config, started
from image.engine import BASE, ROOT, Engine, runner
from tests.e2e.client import Seen, peer, script

OWN_MB_AT_MOST: Final = 477
"""What the image adds to its base, unpacked: 600 MB less the 123 MB of bookworm with Python 3.11."""

STOPS_WITHIN_S: Final = 5.0
BINARY: Final = "/opt/codex/codex_cli_bin/bin/codex"
NAMESPACES: Final = frozenset(("clone", "clone3", "mount", "pivot_root", "umount2", "unshare"))


@pytest.fixture
async def model() -> AsyncIterator[ScriptedModel]:
    async with scripted_model() as running:
        yield running


@pytest.fixture(scope="session")
def engine() -> Engine:
    return runner()


def outside(engine: Engine, command: str, image: str = IMAGE) -> str:
    """Run a shell command in a fresh container, as root and without the agent; return what it prints."""
    return engine.run("run", "--rm", "--network", "host", "--entrypoint", "/bin/sh", image, "-euc", command).stdout


async def said(container: Container, text: str) -> Seen:
    """Have the agent answer a message; the task must be completed."""
    async with peer(container.url, TOKEN) as client:
        seen = await client.ask(text)
    assert seen.state == TaskState.TASK_STATE_COMPLETED, (seen.sentence, await container.log())
    return seen


def command(text: str) -> str:
    """Return a message that has codex run a shell command."""
    return script({"run": text}, {"say": "done"})


def output(seen: Seen) -> str:
    """Return what the task's commands have printed."""
    return "".join(str(dict(note.status.message.metadata).get("output", "")) for note in seen.notes)


async def comes_true(what: Callable[[], Awaitable[bool]], within_s: float = 20.0) -> None:
    with anyio.fail_after(within_s):
        while not await what():
            await anyio.sleep(0.1)


def status_of(process: psutil.Process) -> dict[str, str]:
    """Return the lines of /proc/…/status by their names."""
    lines = (Path("/proc") / str(process.pid) / "status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


# --- What is in it ---


def test_it_is_made_of_what_is_needed_and_no_more(engine: Engine) -> None:
    unwanted = "node npm sudo docker gosu su-exec curl wget pip pip3 gcc perldoc"
    found = outside(
        engine, f"for name in {unwanted}; do command -v $name || true; done; ls -d /opt/pip || true; id agent"
    )
    assert found.splitlines() == ["uid=1000(agent) gid=1000(agent) groups=1000(agent)"]


def test_it_is_not_larger_than_it_may_be(engine: Engine) -> None:
    # The copy of the interpreter is the base's: of some kilobytes, or of 7 MB where it is not built with a library.
    files = "find / -xdev -type f ! -path /opt/venv/bin/python -printf '%i %s\\n'"
    measure = f"{files} | sort -u | awk '{{ sum += $2 }} END {{ print sum }}'"
    whole, base = (int(outside(engine, measure, image)) / 1e6 for image in (IMAGE, BASE))
    assert whole - base < OWN_MB_AT_MOST, f"{whole:.0f} MB, of which {base:.0f} are the base's"


def test_it_says_how_it_is_run(engine: Engine) -> None:
    config = image_config(engine)
    assert config["Entrypoint"] == ["/app/start.sh"]
    assert set(config["Volumes"]) == {"/configs", "/workspace"}
    assert set(config["ExposedPorts"]) == {"8000/tcp"}


def test_codex_git_and_the_agent_are_there_and_nobody_may_change_them(engine: Engine) -> None:
    told = outside(
        engine,
        """
        codex --version; git init -q /tmp/r; git -C /tmp/r status -s
        find /app /opt \\( ! -user root -o -perm -o+w \\) ! -type l
        cd /app; for file in *.py; do /opt/venv/bin/python -c "import ${file%.py}"; done
        """,
    )
    pinned = (ROOT / "requirements-codex.txt").read_text().rpartition("==")[2].strip()
    assert told.splitlines() == [f"codex-cli {pinned}"]


def test_nothing_of_the_builders_settings_is_in_it(engine: Engine) -> None:
    variables = {each.partition("=")[0] for each in image_config(engine)["Env"]}
    base = {"PATH", "LANG", "GPG_KEY", "PYTHON_VERSION", "PYTHON_SHA256", "PYTHON_PIP_VERSION"}
    assert variables - base == {"A2A_HOST", "ADAPTER_MODULE", "CODEX_BIN", "PYTHONPATH"}
    assert outside(engine, "find / -xdev \\( -name pip.conf -o -name '.netrc' -o -path '/run/secrets/*' \\)") == ""
    # The mark of the pip settings that `make image` hands in, and what stands in the machine's own.
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    told = pip_settings(listed)
    words = [MARK, *(told[name] for name in ("index-url", "extra-index-url", "trusted-host", "proxy") if name in told)]
    words += [value for name, value in os.environ.items() if name.lower().endswith("_proxy") and "://" in value]
    patterns = " ".join(f"-e {shlex.quote(word)}" for word in words)
    assert outside(engine, f"grep -rIlF {patterns} /etc /opt /root /home /var || true") == ""
    # A certificate that this machine trusts and Debian does not.
    trusted = outside(engine, "cat /etc/ssl/certs/ca-certificates.crt")
    assert set(certificates(trusted)) <= set(
        certificates(outside(engine, "cat /etc/ssl/certs/ca-certificates.crt", BASE))
    )


def certificates(bundle: str) -> list[str]:
    return re.findall(r"-----BEGIN CERTIFICATE-----[^-]+-----END", bundle)


# --- How it starts ---


async def test_it_starts_as_root_and_steps_down(tmp_path: Path, model: ScriptedModel) -> None:
    place = Place(tmp_path, model.base_url, owner=None)
    options = place.prepare()
    theirs, linked = place.workspace / "theirs.txt", place.workspace / "linked.txt"
    theirs.write_text("another user's")
    os.chown(theirs, 2000, 2000)
    linked.write_text("has a second name")
    (tmp_path / "second-name").hardlink_to(linked)
    async with started(options) as container:
        await container.ready()
        seen = await said(container, command("echo by $(id -u) > made.txt; cat made.txt"))
        assert "by 1000" in output(seen)
        first, *others = await container.processes()
        assert first.name() == "tini"
        assert others
        for process in (first, *others):
            status = status_of(process)
            assert set(status["Uid"].split()) == set(status["Gid"].split()) == {"1000"}
            assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == int(status["CapBnd"], 16) == 0
            assert status["NoNewPrivs"] == "1"
            assert status["Groups"].split() == ["1000"]
        assert (place.configs / "config.yaml").stat().st_uid == 1000
        assert (theirs.stat().st_uid, linked.stat().st_uid) == (2000, 0)
        assert (place.configs / ".codex-workspace").stat().st_mode & 0o777 == 0o700
        # A person who looks after it does not leave root's files behind.
        doctor = await container.inside("/app/start.sh", "doctor", "--json")
        assert {each["check"]: each["status"] for each in json.loads(doctor.stdout)}["codex"] == "ok", doctor
        assert [each for each in place.configs.rglob("*") if each.lstat().st_uid == 0] == []


async def test_root_that_may_not_step_down_is_told_what_to_do(tmp_path: Path, model: ScriptedModel) -> None:
    code, log = await ended([*Place(tmp_path, model.base_url).prepare(), "--cap-drop", "ALL"])
    assert code == 2
    assert "run the container with --user 1000:1000" in log


async def test_it_runs_without_any_right_under_the_shipped_profile(tmp_path: Path, model: ScriptedModel) -> None:
    place = Place(tmp_path, model.base_url)
    profile = "--security-opt", f"seccomp={ROOT / 'deploy' / 'seccomp.json'}"
    async with started([*place.prepare(), *HARDENED, *profile]) as container:
        await container.ready()
        assert await container.healthy()
        tried = "echo inside > ok.txt; cat ok.txt; (echo x > /configs/x) 2>&1; (echo x > /x) 2>&1; env"
        told = output(await said(container, command(tried)))
        assert "inside" in told
        assert SECRET not in told
        assert TOKEN not in told
        assert not (place.configs / "x").exists()
        root = await container.inside("sh", "-c", "touch /x /app/x /opt/x /home/agent/x", user="1000")
        assert root.stderr.count("Read-only file system") == 4
        code, seconds = await container.stop()
        assert code in (0, 143)
        assert seconds < STOPS_WITHIN_S


async def test_it_runs_as_a_user_whom_it_does_not_know(tmp_path: Path, model: ScriptedModel) -> None:
    place = Place(tmp_path, model.base_url, owner=54321)
    async with started([*place.prepare(), "--user", "54321:54321", "--cap-drop", "ALL"]) as container:
        await container.ready()
        assert "54321" in output(await said(container, command("id -u > who.txt; cat who.txt")))
    assert (place.workspace / "who.txt").stat().st_uid == 54321


async def test_it_runs_as_anybody_with_volumes_of_its_own_and_no_configuration(model: ScriptedModel) -> None:
    environment = {"OPENAI_API_KEY": SECRET, "OPENAI_BASE_URL": model.base_url}
    async with started(["--user", "12345", "--read-only", "--tmpfs", "/tmp"], environment) as container:
        await container.ready()
        assert "12345" in output(await said(container, command("id -u > who.txt; cat who.txt")))


async def test_a_wrong_setting_ends_it_with_one_sentence(tmp_path: Path, model: ScriptedModel) -> None:
    options = Place(tmp_path, model.base_url, codex={"sandbocks": "none"}).prepare()
    code, log = await ended(options)
    assert code == 2
    assert "/configs/config.yaml: codex.sandbocks: is not a known key" in log
    code, log = await ended(options, {"A2A_TOKEN": ""})
    assert code == 2
    assert len(log.strip().splitlines()) == 1


def documented(document: Path) -> list[str]:
    """Return the words of the `docker run` in a document."""
    (told,) = re.findall(r"^docker run --detach (?:.*\\\n)*.*", document.read_text(), re.MULTILINE)
    return shlex.split(told.replace("\\\n", " "))


async def test_the_command_of_the_documents_starts_it(
    model: ScriptedModel, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = documented(ROOT / "README.md")
    assert words == documented(ROOT / "docs" / "deployment.md")
    assert words[:5] == ["docker", "run", "--detach", "--name", "codex-agent"]
    # The same words, with volumes of this test's.
    volumes = [name for name in words if name.startswith("codex-") and ":/" in name]
    mine = {name: f"{uuid.uuid4().hex[:8]}-{name}" for name in volumes}
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    monkeypatch.setenv("A2A_TOKEN", TOKEN)
    try:
        options = [mine.get(word, word) for word in words[5:-1]]
        async with started(options, {"OPENAI_BASE_URL": model.base_url}) as container:
            await container.ready()
            assert "it works" in output(await said(container, command("echo it works > ok.txt; cat ok.txt")))
            assert (await container.inside("/app/start.sh", "doctor", user="")).returncode == 0
    finally:
        engine.run("volume", "rm", *(name.partition(":")[0] for name in mine.values()), check=False)


# --- The platform's runtime ---


RUNTIME: Final = """
import asyncio, importlib, json, os

from molecule_runtime.adapters.base import AdapterConfig, BaseAdapter


async def begin():
    adapter = importlib.import_module(os.environ["ADAPTER_MODULE"]).Adapter()
    assert isinstance(adapter, BaseAdapter)
    config = AdapterConfig(model="gpt-5.5", config_path=os.environ.get("WORKSPACE_CONFIG_PATH", "/configs"))
    await adapter.setup(config)
    executor = await adapter.create_executor(config)
    await adapter.close()
    return type(executor).__name__


def main():
    told = {"executor": asyncio.run(begin()), "uid": os.getuid(), "parent": os.getppid(), "cwd": os.getcwd()}
    told["results"] = os.environ["DELEGATION_RESULTS_FILE"]
    print(json.dumps(told), flush=True)
"""
"""What of the platform's runtime starts an adapter; the real package is not to be had from the package index."""

VERSION: Final = "0.0.1"


def runtime_wheel(folder: Path) -> None:
    """Write a wheel that stands in for the platform's runtime: its command, and the classes of its contract."""
    contract = (ROOT / "codex_workspace" / "contract.py").read_text().partition("\nif TYPE_CHECKING:")[0]
    info = f"molecule_ai_workspace_runtime-{VERSION}.dist-info"
    files = {
        "molecule_runtime/__init__.py": "",
        "molecule_runtime/main.py": RUNTIME,
        "molecule_runtime/adapters/__init__.py": "",
        "molecule_runtime/adapters/base.py": contract
        + "\nAdapterConfig, BaseAdapter = OwnAdapterConfig, OwnBaseAdapter\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: molecule-ai-workspace-runtime\nVersion: {VERSION}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\nmolecule-runtime = molecule_runtime.main:main\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / f"molecule_ai_workspace_runtime-{VERSION}-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)


@contextmanager
def package_index(root: Path) -> Iterator[str]:
    """Serve the folders under `root` as a package index has them; gives its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=root)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def with_runtime(tmp_path_factory: pytest.TempPathFactory, engine: Engine) -> Iterator[str]:
    """The image as the platform builds it, with a version of its runtime."""
    root, tag = tmp_path_factory.mktemp("index"), f"{IMAGE}-runtime"
    packages = root / "molecule-ai-workspace-runtime"
    packages.mkdir()
    runtime_wheel(packages)
    with package_index(root) as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_EXTRA_INDEX_URL", f"{os.environ.get('PIP_EXTRA_INDEX_URL', '')} {url}".strip())
        more = ("--network", "host") if engine.name == "docker" else ()
        with pip_secrets(os.environ) as secrets:
            engine.build(tag, secrets, {"RUNTIME_VERSION": VERSION}, *more)
    yield tag
    engine.run("rmi", "--force", tag, check=False)


async def test_the_platforms_runtime_is_the_host_where_the_platform_started_it(
    tmp_path: Path, model: ScriptedModel, with_runtime: str
) -> None:
    options = Place(tmp_path, model.base_url, owner=None).prepare()
    platform = {"WORKSPACE_ID": "fake-smoke", "WORKSPACE_CONFIG_PATH": "/configs", "PLATFORM_URL": "http://127.0.0.1:9"}
    code, log = await ended(options, {**platform, "A2A_TOKEN": ""}, image=with_runtime)
    assert code == 0, log
    assert json.loads(log.splitlines()[-1]) == {
        "executor": "HostedExecutor",
        "uid": 1000,
        "parent": 1,
        "cwd": "/app",
        "results": "/configs/.delegation_results.jsonl",
    }
    async with started(options, image=with_runtime) as container:
        await container.ready()


# --- Codex's sandbox ---


@pytest.fixture
def blocking(tmp_path: Path) -> str:
    """A profile that refuses a container what Docker's own does: namespaces and mounts."""
    profile = json.loads((ROOT / "deploy" / "seccomp.json").read_text())
    for rule in profile["syscalls"]:
        if set(rule["names"]) == NAMESPACES:
            rule["names"] = ["mount", "pivot_root", "umount2", "unshare"]
            rule.update(action="SCMP_ACT_ERRNO", errnoRet=1)
    flags = 0x7E020000  # CLONE_NEW…
    profile["syscalls"].append(
        {
            "names": ["clone"],
            "action": "SCMP_ACT_ALLOW",
            "args": [{"index": 0, "value": flags, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}],
        }
    )
    file = tmp_path / "blocking.json"
    file.write_text(json.dumps(profile))
    return f"seccomp={file}"


async def test_a_blocked_sandbox_is_refused_and_can_be_done_without_by_an_explicit_word(
    tmp_path: Path, model: ScriptedModel, blocking: str
) -> None:
    options = [*HARDENED, "--security-opt", blocking]
    code, log = await ended([*Place(tmp_path / "1", model.base_url).prepare(), *options])
    assert code == 3, log
    assert "seccomp=deploy/seccomp.json" in log
    assert "set codex.sandbox to container in config.yaml" in log
    place = Place(tmp_path / "2", model.base_url, codex={"sandbox": "container"})
    async with started([*place.prepare(), *options]) as container:
        await container.ready()
        look = (
            "echo it works > ok.txt; cat ok.txt; env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null; true"
        )
        told = output(await said(container, command(look)))
        assert "it works" in told
        assert SECRET not in told
        assert TOKEN not in told
        # Each of them, as long as it lives: the files of a process that nobody may look into are root's.
        for process in await container.processes():
            assert (Path("/proc") / str(process.pid) / "environ").stat().st_uid == 0, process


async def test_it_starts_as_kubernetes_is_told_to_start_it(tmp_path: Path, model: ScriptedModel, blocking: str) -> None:
    told = yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "agent.yaml").read_text())
    resources = {each["kind"]: each for each in told}
    (pod,) = resources["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    settings = tmp_path / "settings"
    settings.mkdir()
    (settings / "config.yaml").write_text(resources["ConfigMap"]["data"]["config.yaml"])
    places = {"config": f"{settings}:{{}}:ro", "tmp": None}
    for name in ("state", "workspace"):
        folder = tmp_path / name
        folder.mkdir()
        os.chown(folder, 1000, 1000)
        places[name] = f"{folder}:{{}}"
    mounts = [(places[each["name"]], str(each["mountPath"])) for each in pod["volumeMounts"]]
    volumes = [word for place, where in mounts if place for word in ("--volume", place.format(where))]
    environment = {each["name"]: each["value"] for each in pod["env"] if "value" in each}
    environment |= {"OPENAI_API_KEY": SECRET, "OPENAI_BASE_URL": model.base_url, "LOG_FORMAT": "text"}
    environment.pop("A2A_PUBLIC_URL")
    # Under RuntimeDefault an engine's own profile is in force.
    async with started([*HARDENED, "--security-opt", blocking, *volumes], environment) as container:
        await container.ready()
        assert "it works" in output(await said(container, command("echo it works > ok.txt; cat ok.txt")))
    assert (tmp_path / "state" / ".codex-workspace" / "workspace.sqlite3").exists()


# --- Health, death and stopping ---


async def test_health_goes_with_codex_and_a_restart_remembers(tmp_path: Path, model: ScriptedModel) -> None:
    place = Place(tmp_path, model.base_url, codex={"sandbox": "container"})
    async with started(place.prepare()) as container:
        await container.ready()
        assert await container.healthy()
        await said(container, "Remember the blue door")

        codex = await container.codex()
        codex.send_signal(signal.SIGSTOP)
        assert not await container.healthy()
        codex.send_signal(signal.SIGCONT)
        await comes_true(container.healthy)

        assert (await container.inside("chmod", "0", BINARY)).returncode == 0
        # What it has started becomes the first process's, which has to bury it.
        (await container.codex()).kill()
        assert not await container.healthy()
        assert (await container.inside("chmod", "755", BINARY)).returncode == 0
        await comes_true(container.healthy)

        await said(container, command("for i in 1 2 3; do (setsid sleep 0.1 &) ; done"))
        await comes_true(lambda: no_zombies(container))

        code, seconds = await container.stop()
        assert code in (0, 143)
        assert seconds < STOPS_WITHIN_S
        await container.ask_engine("start", container.name)
        await container.ready(starts=2)
        assert "Remember the blue door" in (await said(container, script({"repeat": True}))).answer


async def no_zombies(container: Container) -> bool:
    return all(each.status() != psutil.STATUS_ZOMBIE for each in await container.processes())


@pytest.mark.alone
async def test_it_stops_in_time_in_the_middle_of_a_turn(tmp_path: Path, model: ScriptedModel) -> None:
    async with started(Place(tmp_path, model.base_url).prepare()) as container:
        await container.ready()
        async with peer(container.url, TOKEN) as client:
            await client.begin(command("sleep 60"))
            await comes_true(lambda: runs(container, "sleep"))
        processes = await container.processes()
        code, seconds = await container.stop()
        assert code in (0, 143)
        assert seconds < STOPS_WITHIN_S
        assert [each for each in processes if each.is_running()] == []


async def runs(container: Container, word: str) -> bool:
    return any(each.name() == word for each in await container.processes())
