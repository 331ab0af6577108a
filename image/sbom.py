"""Prints the contents of the image that it runs in, as a software bill of materials (CycloneDX 1.6, JSON).

Lists Debian's packages, Python, the Python packages with the codex binary's, and the agent. The Dockerfile runs it.
Equal contents give equal output: it has no time and no random number.
"""

import json
import platform
import re
import subprocess
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Final
from urllib.parse import quote

FIELDS: Final = ("Package", "Version", "Architecture", "source:Package", "source:Version")
PATHS: Final = ("/opt/codex", *map(str, Path("/usr/local/lib").glob("python3*/site-packages")))
"""Folders with Python packages, besides those on the path: codex, and those of a Python that Debian did not package."""

Component = dict[str, object]


def main() -> None:
    """Print the document."""
    version = re.findall(r'^__version__ = "(.*)"', Path("/app/codex_workspace/__init__.py").read_text(), re.MULTILINE)[
        0
    ]
    found = {str(each["bom-ref"]): each for each in (python(), *debian_packages(), *python_packages())}
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": component("container", "codex-workspace", version, f"pkg:generic/codex-workspace@{version}")
        },
        "components": [found[reference] for reference in sorted(found)],
    }
    sys.stdout.write(json.dumps(document, indent=1) + "\n")


def component(kind: str, name: str, version: str, purl: str, **more: object) -> Component:
    return {"type": kind, "bom-ref": purl, "name": name, "version": version, "purl": purl, **more}


def python() -> Component:
    """Return the interpreter, which is not a package in the base image of the registry."""
    version = platform.python_version()
    return component("platform", "python", version, f"pkg:generic/python@{version}")


def debian_packages() -> list[Component]:
    """Return Debian's packages. Advisories name source packages, so the URL of a package does as well."""
    release = platform.freedesktop_os_release()
    shape = "\\t".join(f"${{{field}}}" for field in FIELDS) + "\\n"
    listed = subprocess.run(
        ["dpkg-query", "--show", f"--showformat={shape}"], check=True, capture_output=True, text=True
    )
    found = []
    for line in listed.stdout.splitlines():
        name, version, architecture, source, source_version = line.split("\t")
        upstream = source if source_version == version else f"{source}@{source_version}"
        where = (
            f"arch={architecture}&distro={release['ID']}-{release['VERSION_ID']}&upstream={quote(upstream, safe=':')}"
        )
        purl = f"pkg:deb/{release['ID']}/{quote(name)}@{quote(version, safe=':')}?{where}"
        found.append(component("library", name, version, purl))
    return found


def python_packages() -> list[Component]:
    """Return the Python packages on the path of this interpreter and in `PATHS`."""
    return [python_package(each) for each in distributions(path=[*sys.path, *PATHS])]


def python_package(package: Distribution) -> Component:
    name = re.sub(r"[-_.]+", "-", package.name).lower()
    licenses = package.metadata.get_all("License-Expression") or []
    stated = {"licenses": [{"expression": each} for each in licenses]} if licenses else {}
    purl = f"pkg:pypi/{name}@{quote(package.version, safe=':')}"
    return component("library", package.name, package.version, purl, **stated)


if __name__ == "__main__":
    main()
