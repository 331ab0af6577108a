"""The contract of the image, tested in real containers by `make image-test`.

Codex, the A2A client and the sandbox are real. The model is scripted; it listens on this machine's loopback interface,
which the containers share.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import threading
import uuid
import zipfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

import psutil
import pytest
import yaml
from a2a.types import TaskState
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

import codex_workspace
from codex_workspace.devkit.model import ScriptedModel, scripted_model
from image.container import HARDENED, IMAGE, SECRET, TOKEN, AgentVolumes, Container, image_config, run_to_exit, started
from image.engine import BASE, ROOT, Engine, runner
from image.pip_settings import MARK, listed_pip_settings, read_pip_settings, write_build_secrets
from tests.e2e.client import Seen, peer, script
from tests.support.ports import free_port
from tests.support.terminal import on_terminal
from tests.support.waiting import eventually

OWN_MB_AT_MOST: Final = 620
"""The limit of what the image adds to its base image, unpacked: codex 377, Python packages 150, git with perl 85."""

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


async def send_text(container: Container, text: str) -> Seen:
    """Send a message to the agent; its task must be completed."""
    async with peer(container.url, TOKEN) as client:
        seen = await client.ask(text)
    assert seen.state == TaskState.TASK_STATE_COMPLETED, (seen.sentence, await container.log())
    return seen


def command(text: str) -> str:
    """Return a message that makes codex run a shell command."""
    return script({"run": text}, {"say": "done"})


def output(seen: Seen) -> str:
    """Return the output of the task's commands."""
    return "".join(str(dict(note.status.message.metadata).get("output", "")) for note in seen.notes)


def status_of(process: psutil.Process) -> dict[str, str]:
    """Return the lines of /proc/<pid>/status by name."""
    lines = (Path("/proc") / str(process.pid) / "status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


# --- Contents ---


def test_image_contains_no_unneeded_programs(engine: Engine) -> None:
    unwanted = "node npm sudo docker gosu su-exec curl wget pip pip3 gcc"
    found = outside(
        engine, f"for name in {unwanted}; do command -v $name || true; done; ls -d /opt/pip || true; id agent"
    )
    assert found.splitlines() == ["uid=1000(agent) gid=1000(agent) groups=1000(agent)"]


def test_image_size_stays_within_its_limit(engine: Engine) -> None:
    # The copy of the base image's interpreter has a few kilobytes, or 7 MB if it is not linked to a shared library.
    files = "find / -xdev -type f ! -path /opt/venv/bin/python -printf '%i %s\\n'"
    measure = f"{files} | sort -u | awk '{{ sum += $2 }} END {{ print sum }}'"
    whole, base = (int(outside(engine, measure, image)) / 1e6 for image in (IMAGE, BASE))
    assert whole - base < OWN_MB_AT_MOST, f"{whole:.0f} MB, including {base:.0f} MB of the base image"


def test_image_declares_entry_point_volumes_and_port(engine: Engine) -> None:
    config = image_config(engine)
    assert config["Entrypoint"] == ["/app/start.sh"]
    assert set(config["Volumes"]) == {"/configs", "/workspace"}
    assert set(config["ExposedPorts"]) == {"8000/tcp"}


def test_labels_name_the_version_and_the_commit(engine: Engine) -> None:
    prefix = "org.opencontainers.image."
    labels = {name: text for name, text in image_config(engine)["Labels"].items() if name.startswith(prefix)}
    assert labels.pop(f"{prefix}version") == codex_workspace.__version__
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True)
    assert labels.pop(f"{prefix}revision").removesuffix("-dirty") == commit.stdout.strip()
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", labels.pop(f"{prefix}created"))
    assert set(labels) == {f"{prefix}title", f"{prefix}description", f"{prefix}licenses"}


def test_arguments_of_the_container_are_a_command_of_the_agent(engine: Engine) -> None:
    ran = engine.run("run", "--rm", "--network", "host", IMAGE, "--version")
    assert ran.stdout == f"codex-workspace {codex_workspace.__version__}\n"


def test_the_list_of_contents_is_valid_and_names_every_package(engine: Engine) -> None:
    text = (ROOT / "build" / "sbom.cdx.json").read_text()
    assert text == outside(engine, "cat /app/sbom.cdx.json")
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    document = json.loads(text)
    assert document["metadata"]["component"]["version"] == codex_workspace.__version__
    listed = {f"{each['name']} {each['version']}" for each in document["components"]}
    debian = outside(engine, "dpkg-query --show --showformat='${Package} ${Version}\\n'").splitlines()
    assert set(debian) <= listed
    pins = "".join((ROOT / name).read_text() for name in ("requirements.txt", "requirements-codex.txt"))
    pinned = re.findall(r"^(\S+)==(\S+)", pins, re.MULTILINE)
    assert len(pinned) > 50
    packages = {each["purl"] for each in document["components"]}
    assert {f"pkg:pypi/{name}@{version}" for name, version in pinned} <= packages


def test_another_build_of_the_same_commit_makes_the_same_image(engine: Engine, tmp_path: Path) -> None:
    if engine.name == "docker":
        pytest.skip("whether docker sets the times of files depends on its image store")
    tag = f"{IMAGE}-again"
    make_image(engine, tag, f"SBOM={tmp_path / 'sbom.json'}", secrets=ROOT / "build" / "image", options="--no-cache")
    try:
        ids = [engine.run("inspect", "--type", "image", "--format", "{{.Id}}", each).stdout for each in (IMAGE, tag)]
        assert ids[0] == ids[1]
    finally:
        engine.run("rmi", tag, check=False)


def make_image(engine: Engine, tag: str, *variables: str, secrets: Path, options: str = "") -> None:
    """Run `make image` with build secrets."""
    files = {"pip_conf": "pip.conf", "ca_bundle": "ca_bundle"}
    given = " ".join(f"--secret id={name},src={secrets / file}" for name, file in files.items())
    words = [f"TAG={tag}", f"ENGINE={engine.name}", *variables, f"OPTIONS=--network host {given} {options}"]
    environment = {**os.environ, "BUILDAH_ISOLATION": "chroot"}
    subprocess.run(["make", "image", *words], cwd=ROOT, env=environment, check=True)


def test_codex_git_and_agent_are_installed_and_read_only(engine: Engine) -> None:
    printed = outside(
        engine,
        """
        codex --version; git init -q /tmp/r; git -C /tmp/r status -s
        find /app /opt \\( ! -user root -o -perm -o+w \\) ! -type l
        cd /app; for file in *.py; do /opt/venv/bin/python -c "import ${file%.py}"; done
        """,
    )
    pinned = (ROOT / "requirements-codex.txt").read_text().partition("==")[2].split()[0]
    assert printed.splitlines() == [f"codex-cli {pinned}"]


def test_image_contains_no_build_settings(engine: Engine) -> None:
    variables = {each.partition("=")[0] for each in image_config(engine)["Env"]}
    base = {"PATH", "LANG", "GPG_KEY", "PYTHON_VERSION", "PYTHON_SHA256", "PYTHON_PIP_VERSION"}
    assert variables - base == {"A2A_HOST", "ADAPTER_MODULE", "CODEX_BIN", "PYTHONPATH", "SANDBOX_FALLBACK"}
    assert outside(engine, "find / -xdev \\( -name pip.conf -o -name '.netrc' -o -path '/run/secrets/*' \\)") == ""
    # Neither the mark of the build's pip settings, nor the values of this machine's settings.
    settings = read_pip_settings(listed_pip_settings())
    names = ("index-url", "extra-index-url", "trusted-host", "proxy")
    words = [MARK, *(settings[name] for name in names if name in settings)]
    words += [value for name, value in os.environ.items() if name.lower().endswith("_proxy") and "://" in value]
    patterns = " ".join(f"-e {shlex.quote(word)}" for word in words)
    assert outside(engine, f"grep -rIlF {patterns} /etc /opt /root /home /var || true") == ""
    # No certificate that this machine trusts and Debian does not.
    trusted = outside(engine, "cat /etc/ssl/certs/ca-certificates.crt")
    assert set(certificates(trusted)) <= set(
        certificates(outside(engine, "cat /etc/ssl/certs/ca-certificates.crt", BASE))
    )


def certificates(bundle: str) -> list[str]:
    return re.findall(r"-----BEGIN CERTIFICATE-----[^-]+-----END", bundle)


# --- Start ---


async def test_container_started_as_root_drops_privileges(tmp_path: Path, model: ScriptedModel) -> None:
    volumes = AgentVolumes(tmp_path, model.base_url, owner=None)
    options = volumes.prepare()
    theirs, linked = volumes.workspace / "theirs.txt", volumes.workspace / "linked.txt"
    theirs.write_text("another user's")
    os.chown(theirs, 2000, 2000)
    linked.write_text("has a second name")
    (tmp_path / "second-name").hardlink_to(linked)
    async with started(options) as container:
        await container.ready()
        seen = await send_text(container, command("echo by $(id -u) > made.txt; cat made.txt"))
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
        assert (volumes.configs / "config.yaml").stat().st_uid == 1000
        assert (theirs.stat().st_uid, linked.stat().st_uid) == (2000, 0)
        assert (volumes.configs / ".codex-workspace").stat().st_mode & 0o777 == 0o700
        # A doctor run by root leaves no files that belong to root.
        doctor = await container.inside("/app/start.sh", "doctor", "--json")
        assert {each["check"]: each["status"] for each in json.loads(doctor.stdout)}["codex"] == "ok", doctor
        assert [each for each in volumes.configs.rglob("*") if each.lstat().st_uid == 0] == []


async def test_root_without_capabilities_is_rejected_with_a_remedy(tmp_path: Path, model: ScriptedModel) -> None:
    code, log = await run_to_exit([*AgentVolumes(tmp_path, model.base_url).prepare(), "--cap-drop", "ALL"])
    assert code == 2
    assert "run the container with --user 1000:1000" in log


async def test_hardened_container_runs_with_the_shipped_seccomp_profile(tmp_path: Path, model: ScriptedModel) -> None:
    volumes = AgentVolumes(tmp_path, model.base_url)
    profile = "--security-opt", f"seccomp={ROOT / 'deploy' / 'seccomp.json'}"
    async with started([*volumes.prepare(), *HARDENED, *profile]) as container:
        await container.ready()
        assert await container.healthy()
        tried = "echo inside > ok.txt; cat ok.txt; (echo x > /configs/x) 2>&1; (echo x > /x) 2>&1; env"
        printed = output(await send_text(container, command(tried)))
        assert "inside" in printed
        assert SECRET not in printed
        assert TOKEN not in printed
        assert not (volumes.configs / "x").exists()
        root = await container.inside("sh", "-c", "touch /x /app/x /opt/x /home/agent/x", user="1000")
        assert root.stderr.count("Read-only file system") == 4
        code, seconds = await container.stop()
        assert code in (0, 143)
        assert seconds < STOPS_WITHIN_S


async def test_container_runs_as_an_unknown_user_id(tmp_path: Path, model: ScriptedModel) -> None:
    volumes = AgentVolumes(tmp_path, model.base_url, owner=54321)
    async with started([*volumes.prepare(), "--user", "54321:54321", "--cap-drop", "ALL"]) as container:
        await container.ready()
        assert "54321" in output(await send_text(container, command("id -u > who.txt; cat who.txt")))
    assert (volumes.workspace / "who.txt").stat().st_uid == 54321


async def test_container_runs_as_any_user_without_configuration(model: ScriptedModel) -> None:
    environment = {"OPENAI_API_KEY": SECRET, "OPENAI_BASE_URL": model.base_url}
    async with started(["--user", "12345", "--read-only", "--tmpfs", "/tmp"], environment) as container:
        await container.ready()
        assert "12345" in output(await send_text(container, command("id -u > who.txt; cat who.txt")))


async def test_invalid_setting_exits_with_one_sentence(tmp_path: Path, model: ScriptedModel) -> None:
    options = AgentVolumes(tmp_path, model.base_url, codex={"sandbocks": "none"}).prepare()
    code, log = await run_to_exit(options)
    assert code == 2
    assert "/configs/config.yaml: codex.sandbocks: is not a known key" in log
    code, log = await run_to_exit(options, {"A2A_TOKEN": ""})
    assert code == 2
    assert len(log.strip().splitlines()) == 1


def documented_run(document: Path, option: str) -> list[str]:
    """Return the words of the only `docker run` command that begins with this option."""
    (printed,) = re.findall(rf"^docker run {option} (?:.*\\\n)*.*", document.read_text(), re.MULTILINE)
    return shlex.split(printed.replace("\\\n", " "), comments=True)


@pytest.fixture
def hardened_options(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The options of the documented hardened command, with volumes of this test."""
    words = documented_run(ROOT / "docs" / "deployment.md", "--detach")
    assert words[:5] == ["docker", "run", "--detach", "--name", "codex-agent"]
    volumes = [name for name in words if name.startswith("codex-") and ":/" in name]
    mine = {name: f"{uuid.uuid4().hex[:8]}-{name}" for name in volumes}
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    monkeypatch.setenv("A2A_TOKEN", TOKEN)
    yield [mine.get(word, word) for word in words[5:-1]]
    engine.run("volume", "rm", *(name.partition(":")[0] for name in mine.values()), check=False)


async def test_documented_docker_run_command_starts_the_agent(
    model: ScriptedModel, hardened_options: list[str]
) -> None:
    async with started(hardened_options, {"OPENAI_BASE_URL": model.base_url}) as container:
        await container.ready()
        assert "it works" in output(await send_text(container, command("echo it works > ok.txt; cat ok.txt")))
        assert (await container.inside("/app/start.sh", "doctor", user="")).returncode == 0


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
"""The part of the platform's runtime that starts an adapter. The package index does not offer the real package."""

VERSION: Final = "0.0.1"


def runtime_wheel(folder: Path) -> None:
    """Write a wheel that resources the platform's runtime: its command, and the classes of its contract."""
    contract = (
        (ROOT / "codex_workspace" / "platform" / "runtime_contract.py").read_text().partition("\nif TYPE_CHECKING:")[0]
    )
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
    """Serve the folders under `root` as a package index, and yield its URL."""
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
    """Build the image with a version of the platform's runtime, as the platform does."""
    root, tag = tmp_path_factory.mktemp("index"), f"{IMAGE}-runtime"
    packages = root / "molecule-ai-workspace-runtime"
    packages.mkdir()
    runtime_wheel(packages)
    with package_index(root) as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_EXTRA_INDEX_URL", f"{os.environ.get('PIP_EXTRA_INDEX_URL', '')} {url}".strip())
        write_build_secrets(root / "secrets", os.environ)
        make_image(engine, tag, f"RUNTIME_VERSION={VERSION}", f"SBOM={root / 'sbom.json'}", secrets=root / "secrets")
    yield tag
    engine.run("rmi", "--force", tag, check=False)


async def test_platform_runtime_hosts_the_agent_when_the_platform_starts_the_image(
    tmp_path: Path, model: ScriptedModel, with_runtime: str
) -> None:
    options = AgentVolumes(tmp_path, model.base_url, owner=None).prepare()
    platform = {"WORKSPACE_ID": "fake-smoke", "WORKSPACE_CONFIG_PATH": "/configs", "PLATFORM_URL": "http://127.0.0.1:9"}
    code, log = await run_to_exit(options, {**platform, "A2A_TOKEN": ""}, image=with_runtime)
    assert code == 0, log
    assert json.loads(log.splitlines()[-1]) == {
        "executor": "CodexAppServerExecutor",
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
    """A seccomp profile that forbids namespaces and mounts, as Docker's default profile does."""
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


async def test_blocked_sandbox_is_rejected_unless_the_container_is_the_sandbox(
    tmp_path: Path, model: ScriptedModel, blocking: str
) -> None:
    options = [*HARDENED, "--security-opt", blocking]
    insisting = AgentVolumes(tmp_path / "1", model.base_url, codex={"sandbox": "workspace-write"})
    code, log = await run_to_exit([*insisting.prepare(), *options])
    assert code == 3, log
    assert "seccomp=deploy/seccomp.json" in log
    assert "set codex.sandbox to container in config.yaml" in log
    volumes = AgentVolumes(tmp_path / "2", model.base_url, codex={"sandbox": "container"})
    async with started([*volumes.prepare(), *options]) as container:
        await container.ready()
        look = (
            "echo it works > ok.txt; cat ok.txt; env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null; true"
        )
        printed = output(await send_text(container, command(look)))
        assert "it works" in printed
        assert SECRET not in printed
        assert TOKEN not in printed
        # The /proc files of a process that other processes cannot inspect belong to root.
        for process in await container.processes():
            assert (Path("/proc") / str(process.pid) / "environ").stat().st_uid == 0, process


async def test_documented_docker_run_command_insists_on_codex_s_sandbox(
    model: ScriptedModel, hardened_options: list[str], blocking: str
) -> None:
    options = [blocking if word.startswith("seccomp=") else word for word in hardened_options]
    code, log = await run_to_exit(options, {"OPENAI_BASE_URL": model.base_url})
    assert code == 3, log
    assert "codex's sandbox (codex.sandbox: workspace-write) cannot work" in log


@pytest.mark.parametrize("options", [(), ("--user", "1000"), HARDENED], ids=["default", "another user", "hardened"])
def test_documented_demo_runs_without_options_and_key(engine: Engine, blocking: str, options: tuple[str, ...]) -> None:
    words = documented_run(ROOT / "README.md", "--rm codex-workspace")
    assert words == ["docker", "run", "--rm", "codex-workspace", "demo"]
    ran = engine.run("run", "--rm", "--security-opt", blocking, *options, IMAGE, "demo", check=False)
    assert ran.returncode == 0, ran.stdout
    assert "sandbox container, A2A at" in ran.stdout
    assert "Completed in" in ran.stdout


async def test_documented_start_in_one_line_works_with_an_engine_s_default_settings(
    tmp_path: Path, model: ScriptedModel, engine: Engine, blocking: str
) -> None:
    words = documented_run(ROOT / "README.md", "--rm -it")
    assert words[:-1] == ["docker", "run", "--rm", "-it", "-p", "127.0.0.1:8000:8000", "-e", "OPENAI_API_KEY"]
    # The same command; this machine's network reaches the scripted model.
    name, port = f"codex-workspace-test-{uuid.uuid4().hex[:12]}", free_port()
    network = ["--network", "host", "-e", f"A2A_PORT={port}", "-e", f"OPENAI_BASE_URL={model.base_url}"]
    own = [engine.name, "run", "--rm", "-it", "--name", name, "--security-opt", blocking, *network]
    env = {**os.environ, **engine.environment, "OPENAI_API_KEY": SECRET}
    try:
        async with on_terminal([*own, "-e", "OPENAI_API_KEY", IMAGE], env, tmp_path, by_key=True) as agent:
            assert agent.url == f"http://127.0.0.1:{port}/"
            assert agent.shown.count("codex.sandbox: auto: codex's sandbox cannot work here") == 1
            async with peer(agent.url, agent.token) as client:
                seen = await client.ask(command("id -u; cat /configs/.codex-workspace/operator-token.sha256"))
            assert "1000\n" in output(seen)
            assert agent.token not in output(seen)
            code = engine.run("exec", name, "/app/start.sh", "doctor", check=False).returncode
            assert code == 0
    finally:
        engine.run("rm", "--force", "--volumes", name, check=False)


async def test_without_a_terminal_a_token_is_required() -> None:
    code, log = await run_to_exit([], {"A2A_TOKEN": "", "OPENAI_API_KEY": SECRET})
    assert code == 2
    assert "A2A_TOKEN: is missing" in log
    assert "on a terminal (docker run -it)" in log


async def test_kubernetes_manifest_starts_the_agent(tmp_path: Path, model: ScriptedModel, blocking: str) -> None:
    manifest = yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "agent.yaml").read_text())
    resources = {each["kind"]: each for each in manifest}
    (pod,) = resources["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    settings = tmp_path / "settings"
    settings.mkdir()
    (settings / "config.yaml").write_text(resources["ConfigMap"]["data"]["config.yaml"])
    sources = {"config": f"{settings}:{{}}:ro", "tmp": None}
    for name in ("state", "workspace"):
        folder = tmp_path / name
        folder.mkdir()
        os.chown(folder, 1000, 1000)
        sources[name] = f"{folder}:{{}}"
    mounts = [(sources[each["name"]], str(each["mountPath"])) for each in pod["volumeMounts"]]
    volumes = [word for source, target in mounts if source for word in ("--volume", source.format(target))]
    environment = {each["name"]: each["value"] for each in pod["env"] if "value" in each}
    environment |= {"OPENAI_API_KEY": SECRET, "OPENAI_BASE_URL": model.base_url, "LOG_FORMAT": "text"}
    environment.pop("A2A_PUBLIC_URL")
    # RuntimeDefault selects the engine's default profile.
    async with started([*HARDENED, "--security-opt", blocking, *volumes], environment) as container:
        await container.ready()
        assert "it works" in output(await send_text(container, command("echo it works > ok.txt; cat ok.txt")))
    assert (tmp_path / "state" / ".codex-workspace" / "workspace.sqlite3").exists()


# --- Health, crashes and stopping ---


async def test_health_follows_codex_and_a_restart_keeps_the_conversation(tmp_path: Path, model: ScriptedModel) -> None:
    volumes = AgentVolumes(tmp_path, model.base_url, codex={"sandbox": "container"})
    async with started(volumes.prepare()) as container:
        await container.ready()
        assert await container.healthy()
        await send_text(container, "Remember the blue door")

        codex = await container.codex()
        codex.send_signal(signal.SIGSTOP)
        assert not await container.healthy()
        codex.send_signal(signal.SIGCONT)
        await eventually(container.healthy)

        assert (await container.inside("chmod", "0", BINARY)).returncode == 0
        # Children of codex become children of PID 1, which has to collect them.
        (await container.codex()).kill()
        assert not await container.healthy()
        assert (await container.inside("chmod", "755", BINARY)).returncode == 0
        await eventually(container.healthy)

        await send_text(container, command("for i in 1 2 3; do (setsid sleep 0.1 &) ; done"))
        await eventually(lambda: no_zombies(container))

        code, seconds = await container.stop()
        assert code in (0, 143)
        assert seconds < STOPS_WITHIN_S
        await container.ask_engine("start", container.name)
        await container.ready(starts=2)
        assert "Remember the blue door" in (await send_text(container, script({"repeat": True}))).answer


async def no_zombies(container: Container) -> bool:
    return all(each.status() != psutil.STATUS_ZOMBIE for each in await container.processes())


@pytest.mark.alone
async def test_container_stops_in_time_during_a_turn(tmp_path: Path, model: ScriptedModel) -> None:
    async with started(AgentVolumes(tmp_path, model.base_url).prepare()) as container:
        await container.ready()
        async with peer(container.url, TOKEN) as client:
            await client.begin(command("sleep 60"))
            await eventually(lambda: runs(container, "sleep"))
        processes = await container.processes()
        code, seconds = await container.stop()
        assert code in (0, 143)
        assert seconds < STOPS_WITHIN_S
        assert [each for each in processes if each.is_running()] == []


async def runs(container: Container, word: str) -> bool:
    return any(each.name() == word for each in await container.processes())
