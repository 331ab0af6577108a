"""Removes the random identifiers of a build from an image in a folder, as `podman push IMAGE dir:FOLDER` writes it.

podman and buildah store the build container's name and the intermediate images in the image's configuration, so two
builds of equal files would have different digests. `image/build` runs `python3 image/without_ids.py FOLDER`.
"""

import hashlib
import json
import sys
from pathlib import Path


def main(folder: Path) -> None:
    """Rewrite the configuration and the manifest."""
    manifest = json.loads((folder / "manifest.json").read_text())
    old = folder / manifest["config"]["digest"].removeprefix("sha256:")
    config = json.loads(old.read_text())
    for name in ("container", "container_config", "parent"):
        config.pop(name, None)
    config["config"].pop("Hostname", None)
    for step in config["history"]:
        step.pop("comment", None)
    blob = json.dumps(config, sort_keys=True).encode()
    digest = hashlib.sha256(blob).hexdigest()
    (folder / digest).write_bytes(blob)
    manifest["config"] |= {"digest": f"sha256:{digest}", "size": len(blob)}
    (folder / "manifest.json").write_text(json.dumps(manifest))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
