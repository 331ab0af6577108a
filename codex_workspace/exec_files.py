"""The files of a run of `codex exec`: what it is told by a path and not by a word."""

import json
from pathlib import Path

from codex_workspace.errors import InputRefused
from codex_workspace.exec_arguments import ExecOptions, LaidDown


def lay_down(options: ExecOptions, folder: Path) -> LaidDown:
    """Write what codex reads from files. A path with a comma would be two to it, so such an image gets another."""
    schema = None
    if options.output_schema is not None:
        schema = folder / "schema.json"
        schema.write_text(json.dumps(options.output_schema))
    return LaidDown(schema, tuple(_image(image, folder / str(at)) for at, image in enumerate(options.images)))


def _image(image: Path, link: Path) -> Path:
    if not image.is_file():
        raise InputRefused(f"The image {image.name} is no file.")
    if "," not in str(image):
        return image.absolute()
    link = link.with_suffix(image.suffix if "," not in image.suffix else "")
    link.symlink_to(image.absolute())
    return link
