"""The command `kvrelay`: finds the command, fills its settings and runs it.

A process is imported when its command runs, because a worker's affinity and thread counts must be set before torch
is imported, and because `kvrelay status` should not wait for what it does not need.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from kvrelay import logs
from kvrelay.config import (
    ChatSettings,
    DecodeSettings,
    GatewaySettings,
    PrefillSettings,
    Settings,
    StatusSettings,
    UpSettings,
    VerifySettings,
)
from kvrelay.errors import StartError
from kvrelay.options import did_you_mean, help_text, parse, refuse_unknown_variables, summary
from kvrelay.placement import place

_WRONG_USE = 2
_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Command:
    """One command: the settings that are its options, and what it does with them; gives the exit code."""

    settings_type: type[Settings]
    run: Callable[..., int]


def _up(settings: UpSettings) -> int:
    from kvrelay.up import run

    return run(settings)


def _gateway(settings: GatewaySettings) -> int:
    from kvrelay.gateway.server import run

    logs.configure(settings.log_level, settings.log_format)
    return run(settings)


def _prefill(settings: PrefillSettings) -> int:
    place(settings.core, settings.threads)
    from kvrelay.prefill.worker import run

    logs.configure(settings.log_level, settings.log_format)
    return run(settings)


def _decode(settings: DecodeSettings) -> int:
    place(settings.core, settings.threads)
    from kvrelay.decode.worker import run

    logs.configure(settings.log_level, settings.log_format)
    return run(settings)


def _status(settings: StatusSettings) -> int:
    from kvrelay.status import run

    return run(settings)


def _chat(settings: ChatSettings) -> int:
    from kvrelay.chat import run

    return run(settings)


def _verify(settings: VerifySettings) -> int:
    from kvrelay.bench.verify import run

    return run(settings)


COMMANDS = {
    "up": Command(UpSettings, _up),
    "gateway": Command(GatewaySettings, _gateway),
    "prefill": Command(PrefillSettings, _prefill),
    "decode": Command(DecodeSettings, _decode),
    "status": Command(StatusSettings, _status),
    "chat": Command(ChatSettings, _chat),
    "verify": Command(VerifySettings, _verify),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; gives 0, 1 for a check that failed, or 2 for wrong use or a start that cannot work."""
    try:
        return _dispatch(list(sys.argv[1:] if argv is None else argv))
    except StartError as error:
        sys.stderr.write(f"kvrelay: {error}\n")
        return _WRONG_USE
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # the reader of our output has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit finds no pipe
        return 0


def _dispatch(args: list[str]) -> int:
    name = args.pop(0) if args else "--help"
    if name in ("-h", "--help"):
        sys.stdout.write(_overview())
        return 0
    if name == "--version":
        sys.stdout.write(f"kvrelay {version('kvrelay')}\n")
        return 0
    if name not in COMMANDS:
        raise StartError(f"There is no command {name!r}{did_you_mean(name, COMMANDS)}. See `kvrelay --help`.")
    return _run(name, args)


def _run(name: str, args: list[str]) -> int:
    command, prog = COMMANDS[name], f"kvrelay {name}"
    if "-h" in args or "--help" in args:
        sys.stdout.write(help_text(command.settings_type, prog))
        return 0
    refuse_unknown_variables((each.settings_type for each in COMMANDS.values()), os.environ)
    return command.run(parse(command.settings_type, prog, args))


def _overview() -> str:
    rows = "".join(f"  {name:<8}  {summary(command.settings_type)}\n" for name, command in COMMANDS.items())
    head = "KVRelay serves language models with prefill and decode on separate pools of workers."
    return f"Usage: kvrelay COMMAND [OPTIONS]\n\n{head}\n\nCommands (`kvrelay COMMAND --help` says more):\n{rows}"
