"""How far a command has come."""

import shutil
import time
from typing import TextIO

SECONDS = 10.0
"""Between two lines where there is no terminal."""


class Progress:
    """A bar where there is a terminal, and elsewhere a line now and then.

    Parameters
    ----------
    stream : file
        Where it is shown.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.told = stream, time.monotonic()

    def __call__(self, done: float, text: str) -> None:
        """Show that a part of all, from 0 to 1, is done."""
        if self.stream.isatty():
            bar = "#" * int(24 * min(done, 1.0))
            room = shutil.get_terminal_size().columns - 1
            line = f"[{bar:24}] {text}".ljust(room)[:room]
            print(f"\r{line}", end="", flush=True, file=self.stream)
        elif time.monotonic() - self.told >= SECONDS:
            self.told = time.monotonic()
            print(text, flush=True, file=self.stream)

    def end(self) -> None:
        """Leave the line of the bar."""
        if self.stream.isatty():
            print(file=self.stream)
