"""How a command ends: a user's mistake is one sentence and exit code 2, Ctrl-C is 130, a reader that went away is no error."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from typing import ParamSpec

import typer

from ..errors import LongspoolError

P = ParamSpec("P")
MISTAKE, INTERRUPTED, UNREAD = 2, 128 + signal.SIGINT, 128 + 13  # as shells count what SIGINT and SIGPIPE end


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """A command whose errors are told in a sentence."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except LongspoolError as error:
            raise _ended(f"Error: {error}", MISTAKE) from None
        except BrokenPipeError:
            # What is still buffered would fail again when the interpreter closes stdout.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(UNREAD) from None
        except OSError as error:
            raise _ended(f"Error: {_sentence(error)}", MISTAKE) from None
        except KeyboardInterrupt:
            raise _ended("Interrupted.", INTERRUPTED) from None

    return run


def _ended(sentence: str, code: int) -> typer.Exit:
    typer.echo(sentence, err=True)
    return typer.Exit(code)


def _sentence(error: OSError) -> str:
    what = (error.strerror or str(error)).rstrip(".")
    return f"{error.filename}: {what}." if error.filename else f"{what}."
