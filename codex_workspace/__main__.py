"""The command line: `codex-workspace COMMAND`, or `python -m codex_workspace COMMAND` in a checkout."""

import argparse
import gc
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from codex_workspace import __version__
from codex_workspace.common.errors import CodexCannotStart, ConfigError

if TYPE_CHECKING:
    from codex_workspace.config.own_token import NewToken

EXIT_CONFIG: Final = 2
EXIT_CODEX: Final = 3
EXIT_INTERRUPTED: Final = 128 + 2
EXIT_BROKEN_PIPE: Final = 128 + 13
"""The exit codes that a shell reports for SIGINT and SIGPIPE."""


def main(arguments: Sequence[str] | None = None, env: Mapping[str, str] = os.environ) -> int:
    """Run a command and return the process's exit code: 0 done, 2 configuration, 3 codex cannot start."""
    chosen = _parser().parse_args(arguments)
    if chosen.command == "serve":
        _stop_on_signals()
    try:
        return _run(chosen, env)
    except ConfigError as error:
        _report(chosen, env, f"configuration: {error}")
        return EXIT_CONFIG
    except CodexCannotStart as error:
        _report(chosen, env, str(error))
        return EXIT_CODEX
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of the output has exited, as `head` does. Python would fail again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def _stop_on_signals() -> None:
    """Exit with 0 on SIGTERM and SIGINT until the event loop handles them, so also while modules are imported."""

    def stop(_number: int, _frame: object) -> None:
        # Nothing is started yet. An exception could be lost, or become another one, in a module that is being imported.
        os._exit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


def _report(chosen: argparse.Namespace, env: Mapping[str, str], reason: str) -> None:
    """Print why the program ends, in the format of its log."""
    if chosen.command == "serve" and env.get("LOG_FORMAT", "").lower() == "json":
        from codex_workspace.common.telemetry import json_line

        print(json_line("error", __name__, reason), file=sys.stderr)
    else:
        print(reason, file=sys.stderr)


def _run(chosen: argparse.Namespace, env: Mapping[str, str]) -> int:
    # Each command imports what it needs, so that `serve` starts fast.
    import anyio

    match chosen.command:
        case "serve":
            _serve(chosen.executor, env, _new_token(rotate=chosen.rotate_token))
            return 0
        case "prepare":
            from codex_workspace.config.codex_toml import prepare_codex_home
            from codex_workspace.config.loading import load_settings
            from codex_workspace.config.providers import choose_provider

            settings = load_settings(env)
            prepare_codex_home(settings, choose_provider(settings, env))
            return 0
        case "doctor" if chosen.schema:
            from codex_workspace.config.settings import Config
            from codex_workspace.config.validation import schema_text

            print(schema_text(Config, "config.yaml of codex-workspace"), end="")
            return 0
        case "doctor":
            from codex_workspace.cli.doctor import doctor, set_database_aside
            from codex_workspace.common.processes import protect_from_inspection

            protect_from_inspection()
            if chosen.set_aside:
                return set_database_aside(env)
            return doctor(env, as_json=chosen.json, online=chosen.online)
        case "demo" if chosen.platform:
            from codex_workspace.devkit.platform_demo import demo_platform

            return anyio.run(demo_platform, env)
        case "demo":
            from codex_workspace.devkit.demo import demo

            return anyio.run(demo, env)
        case "platform":
            from codex_workspace.devkit.platform.app import play

            return anyio.run(play, chosen.host, chosen.port, chosen.file, chosen.mode, chosen.faults)
        case _:
            from codex_workspace.cli.chat import chat

            return anyio.run(chat, chosen.url, chosen.message, env)


def _serve(executor: str | None, env: Mapping[str, str], new_token: "NewToken") -> None:
    import anyio

    # Nothing is garbage until everything is imported; `cli.server` turns collections on again.
    gc.disable()
    from codex_workspace.common.processes import protect_from_inspection
    from codex_workspace.config.loading import load_settings

    protect_from_inspection()
    if executor is not None:
        from codex_workspace.cli.server import serve_other

        anyio.run(serve_other, load_settings(env, new_token=new_token), executor)
        return
    # Another executor may use what lean imports leave out.
    from codex_workspace.common.lean_imports import make_imports_lean

    make_imports_lean(env)
    from codex_workspace.cli.serve import serve

    anyio.run(serve, load_settings(env, new_token=new_token), env)


def _new_token(*, rotate: bool) -> "NewToken":
    """Return when to generate a token; it is shown on stderr, and a file or another program must not get it."""
    on_terminal = os.isatty(0) and os.isatty(2)
    if rotate and not on_terminal:
        raise ConfigError("serve --rotate-token: needs a terminal to show the token (docker run -it), or set A2A_TOKEN")
    return "always" if rotate else "if missing" if on_terminal else "never"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="codex-workspace", description="A workspace agent for OpenAI Codex")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="run the agent until SIGTERM")
    serve.add_argument(
        "--executor", metavar="MODULE:FACTORY", help="serve the executor that this factory returns instead of codex"
    )
    serve.add_argument(
        "--rotate-token", action="store_true", help="replace the generated token; needs a terminal to show it"
    )
    commands.add_parser("prepare", help="write codex's configuration and stop")
    demo = commands.add_parser("demo", help="run the demo with a scripted model; needs no API key")
    demo.add_argument("--platform", action="store_true", help="run two agents on a local stand-in for the platform")
    platform = commands.add_parser("platform", help="run a local stand-in for the platform, for tests")
    platform.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: %(default)s)")
    platform.add_argument(
        "--port", type=int, default=8080, help="the port to listen on (default: %(default)s; 0 chooses a free port)"
    )
    platform.add_argument("--file", type=Path, help="store everything in this SQLite file instead of in memory")
    platform.add_argument(
        "--mode", choices=("push", "poll"), default="push", help="default delivery mode (default: %(default)s)"
    )
    platform.add_argument(
        "--faults", default="", metavar="NAME=SHARE,…", help="faults to inject, such as all=0.05 or 429=0.1,lost=0.1"
    )
    doctor = commands.add_parser("doctor", help="diagnose problems and show remedies")
    doctor.add_argument("--json", action="store_true", help="print the report as JSON")
    doctor.add_argument("--online", action="store_true", help="also send a request to the model's provider")
    doctor.add_argument("--schema", action="store_true", help="print the JSON Schema of config.yaml and exit")
    doctor.add_argument(
        "--set-aside", action="store_true", help="rename a damaged database; the next start creates a new one"
    )
    chat = commands.add_parser("chat", help="talk to an A2A agent")
    chat.add_argument(
        "url", nargs="?", default="http://127.0.0.1:8000", help="the agent's address (default: %(default)s)"
    )
    chat.add_argument("--message", "-m", help="send this message and exit; without it, chat prompts for messages")
    return parser


if __name__ == "__main__":
    sys.exit(main())
