"""The checkout is a valid template for the platform, and its build and deployment files are well-formed."""

import ast
import importlib
import json
import re
import subprocess
import sys
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from codex_workspace.config.loading import load_settings
from codex_workspace.config.settings import TEMPLATE_DIR

ROOT: Final = TEMPLATE_DIR
DOCKERFILE: Final = (ROOT / "Dockerfile").read_text()
RUNTIME_PACKAGE: Final = "molecule-ai-workspace-runtime"

BARE_MODULES: Final = frozenset(
    {
        *("a2a_cli", "a2a_client", "a2a_executor", "a2a_mcp_server", "a2a_tools", "adapter_base", "adapters", "agent"),
        *("agents_md", "builtin_tools", "config", "configs_dir", "consolidation", "coordinator", "event_log", "events"),
        *("executor_helpers", "heartbeat", "inbox", "initial_prompt", "main", "molecule_ai_status", "platform_auth"),
        *("plugins", "policies", "preflight", "prompt", "runtime_wedge", "shared_runtime", "skill_loader"),
        *("transcript_auth", "watcher"),
    }
)
"""The runtime's own modules, which share the import path with a template's files."""

KNOWN_KEYS: Final = frozenset(
    {
        *("name", "runtime", "template_schema_version", "description", "version", "tier", "model", "models"),
        *("runtime_config", "env", "skills", "tools", "a2a", "delegation", "prompt_files", "bridge", "governance"),
    }
)
OUR_KEYS: Final = frozenset({"codex"})
"""The keys of config.yaml that are not the platform's: it warns about them."""

SECRETS: Final = {
    "a model provider's key": r"\bsk-(?!your-key|scripted-|x\b)[A-Za-z0-9_-]{20,}",
    "a code host's token": r"\b(gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,}|glpat-[A-Za-z0-9_-]{20,})",
    "a cloud's key": r"\b(AKIA[0-9A-Z]{16}|AIza[0-9A-Za-z_-]{35})\b",
    "a chat's token": r"\bxox[abprs]-[A-Za-z0-9-]{10,}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a quoted text of 40 letters and digits": r"""["'](?=[A-Za-z0-9/+=]*\d)[A-Za-z0-9/+=]{40}["']""",
}


def test_the_platform_can_build_the_dockerfile() -> None:
    stages = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert set(stages) == {"python:3.11-slim"}
    assert re.search(r"^ARG RUNTIME_VERSION=$", DOCKERFILE, re.MULTILINE)
    runs = re.findall(r"^RUN (?:.*\\\n)*.*", DOCKERFILE, re.MULTILINE)
    assert any("${RUNTIME_VERSION}" in run and RUNTIME_PACKAGE in run for run in runs)
    assert re.search(r"useradd[^\n]*--uid 1000[^\n]*\bagent\b", DOCKERFILE)


def test_the_entry_point_is_a_script_that_starts_the_platforms_runtime() -> None:
    assert re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE) == ['["/app/start.sh"]']
    assert "molecule-runtime" in (ROOT / "start.sh").read_text()
    assert (ROOT / "start.sh").stat().st_mode & 0o111


def test_the_entry_point_takes_a_command_too() -> None:
    asked = subprocess.run([str(ROOT / "start.sh"), "doctor", "--help"], capture_output=True, text=True, cwd="/")
    assert asked.returncode == 0, asked.stderr
    assert "--json" in asked.stdout


def test_the_requirements_include_the_platforms_runtime() -> None:
    assert RUNTIME_PACKAGE in (ROOT / "requirements.txt").read_text()


def test_the_configuration_has_the_platforms_keys() -> None:
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    assert {"name", "runtime", "template_schema_version"} <= set(config)
    assert type(config["template_schema_version"]) is int
    assert config["template_schema_version"] == 1
    assert set(config) - KNOWN_KEYS <= OUR_KEYS


def test_the_adapter_module_has_one_adapter() -> None:
    tree = ast.parse((ROOT / "adapter.py").read_text())
    classes = [each.name for each in tree.body if isinstance(each, ast.ClassDef)]
    aliases = [
        (target.id, each.value.id)
        for each in tree.body
        if isinstance(each, ast.Assign) and isinstance(each.value, ast.Name)
        for target in each.targets
        if isinstance(target, ast.Name)
    ]
    assert len(classes) == 1
    assert aliases == [("Adapter", classes[0])]


@pytest.mark.parametrize("name", ["executor", "app_server"])
def test_the_templates_modules_are_those_of_the_package(name: str) -> None:
    outside, inside = importlib.import_module(name), importlib.import_module(f"codex_workspace.{name}")
    assert outside.__all__
    assert all(getattr(outside, each) is getattr(inside, each) for each in outside.__all__)


@pytest.mark.parametrize("file", sorted(ROOT.glob("*.py")), ids=lambda file: file.name)
def test_top_level_modules_work_alone_and_shadow_no_name_of_the_runtime(file: Path) -> None:
    assert file.stem not in BARE_MODULES
    roots = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else name.name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in node.names
    }
    assert {root.split(".")[0] for root in roots} & BARE_MODULES == set()
    imported = subprocess.run([sys.executable, "-c", f"import {file.stem}"], cwd=ROOT, capture_output=True, text=True)
    assert imported.returncode == 0, imported.stderr


def test_the_manifest_has_the_templates_entry() -> None:
    manifest = json.loads((ROOT / "manifest.json").read_text())
    assert set(manifest) == {"version", "plugins", "workspace_templates", "org_templates"}
    (entry,) = manifest["workspace_templates"]
    assert entry["name"] == yaml.safe_load((ROOT / "config.yaml").read_text())["runtime"]
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", entry["repo"])
    assert entry["ref"]


def tracked() -> list[Path]:
    """Return the files of the repository, or all files outside a repository."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.split("\0") if listed.returncode == 0 else []
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


@pytest.mark.parametrize("kind", SECRETS)
def test_no_file_looks_like_it_holds_a_secret(kind: str) -> None:
    shape = re.compile(SECRETS[kind])
    # Recordings contain codex's output with made-up keys and hashes; tests contain made-up secrets.
    files = [file for file in tracked() if "tests" not in file.relative_to(ROOT).parts and file.suffix != ".json"]
    found = [str(file.relative_to(ROOT)) for file in files if shape.search(file.read_text(errors="ignore"))]
    assert found == []


# --- Build and deployment files ---


def test_the_build_context_is_exactly_what_the_dockerfile_copies() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert "*" in (ROOT / ".dockerignore").read_text().splitlines()
    copied = {
        source
        for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE)
        for source in [word for word in line.split() if not word.startswith("--")][:-1]
    }
    mounted = set(re.findall(r"--mount=type=bind,source=([^,\s]+)", DOCKERFILE))
    assert allowed == copied | mounted | {"Dockerfile"}
    assert [name for name in copied | mounted if not (ROOT / name).exists()] == []


def rules_of(profile: Path) -> dict[str, set[str]]:
    """Return the system calls that a seccomp profile lists without conditions, by action."""
    found: dict[str, set[str]] = {}
    for rule in json.loads(profile.read_text())["syscalls"]:
        if not rule.get("args"):
            found.setdefault(rule["action"], set()).update(rule["names"])
    return found


def test_the_seccomp_profile_allows_the_sandbox_and_nothing_more() -> None:
    rules = rules_of(ROOT / "deploy" / "seccomp.json")
    allowed, refused = rules["SCMP_ACT_ALLOW"], rules["SCMP_ACT_ERRNO"]
    assert allowed & refused == set()
    assert {"clone", "clone3", "unshare", "mount", "umount2", "pivot_root"} <= allowed
    assert {"setns", "bpf", "init_module", "kexec_load", "open_by_handle_at", "perf_event_open", "reboot"} <= refused
    assert {"io_uring_setup", "keyctl", "userfaultfd", "fsopen", "move_mount", "open_tree"} <= refused


KUBERNETES: Final = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "agent.yaml").read_text()))
KUBERNETES_VERSIONS: Final = ("1.30", "1.36")


def kubernetes(kind: str) -> list[dict[str, Any]]:
    """Return the objects of a kind in the manifest."""
    return [each for each in KUBERNETES if each["kind"] == kind]


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_the_kubernetes_manifest_is_valid(version: str) -> None:
    wanted = "--kubernetes-version", version, "--strict"
    file = ROOT / "deploy" / "kubernetes" / "agent.yaml"
    checked = subprocess.run(
        [sys.executable, "-m", "kubernetes_validate", *wanted, str(file)], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_kubernetes_manifest_runs_one_agent_without_privileges() -> None:
    (workload,) = kubernetes("StatefulSet")
    pod = workload["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert workload["spec"]["replicas"] == 1
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert pod["securityContext"]["runAsUser"] == 1000
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert {"name": "tmp", "emptyDir": {"sizeLimit": "2Gi"}} in pod["volumes"]


def test_the_kubernetes_manifest_lets_only_one_pod_run() -> None:
    """With claims from a template, each further pod would get folders of its own."""
    (workload,) = kubernetes("StatefulSet")
    assert "volumeClaimTemplates" not in workload["spec"]
    claims = kubernetes("PersistentVolumeClaim")
    assert all(claim["spec"]["accessModes"] == ["ReadWriteOncePod"] for claim in claims)
    volumes = workload["spec"]["template"]["spec"]["volumes"]
    claimed = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in volumes
        if "persistentVolumeClaim" in volume
    }
    assert set(claimed) == {"state", "workspace"}
    assert set(claimed.values()) == {claim["metadata"]["name"] for claim in claims}
    (headless,) = [each for each in kubernetes("Service") if each["spec"].get("clusterIP") == "None"]
    assert workload["spec"]["serviceName"] == headless["metadata"]["name"]


def test_the_kubernetes_manifest_keeps_commands_from_the_metadata_service() -> None:
    (policy,) = kubernetes("NetworkPolicy")
    (workload,) = kubernetes("StatefulSet")
    spec = policy["spec"]
    assert spec["podSelector"]["matchLabels"].items() <= workload["spec"]["template"]["metadata"]["labels"].items()
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    (ingress,) = spec["ingress"]
    assert [port["port"] for port in ingress["ports"]] == ["a2a"]
    dns, internet = spec["egress"]
    assert {port["port"] for port in dns["ports"]} == {53}
    assert [port["port"] for port in internet["ports"]] == [443]
    inside = ("10.96.0.1", "192.168.1.1", "172.20.0.1")
    for address in ("169.254.169.254", "169.254.170.2", "fd00:ec2::254", "fe80::1", *inside):
        assert not is_reachable(internet["to"], address), address
    for address in ("1.1.1.1", "2606:4700::1111"):
        assert is_reachable(internet["to"], address), address


def is_reachable(to: list[dict[str, Any]], address: str) -> bool:
    """Return whether the rules of a NetworkPolicy permit connections to an address."""
    at = ip_address(address)
    return any(
        at in ip_network(rule["ipBlock"]["cidr"])
        and not any(at in ip_network(excepted) for excepted in rule["ipBlock"]["except"])
        for rule in to
    )


def test_the_kubernetes_configuration_is_valid(tmp_path: Path) -> None:
    (settings,) = kubernetes("ConfigMap")
    (tmp_path / "config.yaml").write_text(settings["data"]["config.yaml"])
    load_settings({"WORKSPACE_CONFIG_PATH": str(tmp_path), "HOME": str(tmp_path)}, cwd=tmp_path, root=tmp_path)


def test_the_compose_file_is_valid() -> None:
    schema = "--builtin-schema", "vendor.compose-spec"
    checked = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", *schema, str(ROOT / "compose.yaml")], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_compose_file_grants_no_privileges() -> None:
    service = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["agent"]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert "seccomp=deploy/seccomp.json" in service["security_opt"]
    assert service["user"] == "1000:1000"
    assert {mount.partition(":")[2].partition(":")[0] for mount in service["volumes"]} == {"/configs", "/workspace"}
