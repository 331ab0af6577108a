"""An MCP server built with the official package, over stdio or HTTP: `python mcp_server.py [--http PORT] …`.

Its arguments make it start late or fail, or record the headers it receives.
"""

import argparse
import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Literal

import mcp.server.mcpserver as mcp
from mcp.server.elicitation import AcceptedElicitation
from mcp.types import ToolAnnotations
from pydantic import BaseModel, ConfigDict
from pydantic.config import JsonDict
from starlette.requests import Request

server = mcp.MCPServer("probe")
arguments = argparse.Namespace(headers=None)


@server.tool()
def echo(text: str) -> str:
    """Return `text` and this process's ID; not marked as read-only."""
    return f"echo {text} from process {os.getpid()}"


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def digest_of(variable: str) -> str:
    """Return the SHA-256 digest of an environment variable of this server, or `none`."""
    value = os.environ.get(variable)
    return "none" if value is None else hashlib.sha256(value.encode()).hexdigest()


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def remember_headers(context: mcp.Context) -> str:
    """Write the headers of this call's request to the file named by `--headers`."""
    request = context.request_context.request
    assert isinstance(request, Request)
    Path(arguments.headers).write_text("\n".join(f"{name}: {value}" for name, value in request.headers.items()))
    return "written"


def without_title_and_description(schema: JsonDict) -> None:
    """Remove a form's own title and description: codex 0.163 answers forms that have them with `cancel`."""
    schema.pop("title")
    schema.pop("description")


class Colour(BaseModel):
    """The form of `paint`."""

    model_config = ConfigDict(json_schema_extra=without_title_and_description)

    colour: Literal["red", "blue"]
    coats: int = 1


@server.tool()
async def paint(context: mcp.Context) -> str:
    """Ask the user for a colour and the number of coats, and report the answer."""
    match await context.elicit("Which colour shall the wall have?", Colour):
        case AcceptedElicitation(data=Colour(colour=colour, coats=coats)):
            return f"painted {colour}, {coats} coats"
        case refused:
            return f"not painted: {refused.action}"


@server.tool()
async def sign_in(context: mcp.Context) -> str:
    """Send the user to a URL, and report whether they accepted."""
    return (await context.elicit_url("Sign in, please.", "https://login.example/start", "sign-in-1")).action


@server.tool()
def crash() -> str:
    """End the server's process."""
    os._exit(7)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--http", type=int)
    parser.add_argument("--headers")
    parser.add_argument("--delay-s", type=float, default=0.0)
    parser.add_argument("--fail", action="store_true")
    parser.parse_args(namespace=arguments)
    time.sleep(arguments.delay_s)
    if arguments.fail:
        sys.exit("this server does not start")
    if arguments.http is None:
        server.run("stdio")
    else:
        server.run("streamable-http", host="127.0.0.1", port=arguments.http)


if __name__ == "__main__":
    main()
