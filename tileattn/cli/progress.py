"""Progress of a command: a bar on a terminal, a line now and then elsewhere."""

import shutil
import time
from typing import TextIO

SECONDS = 10.0
"""Between two lines without a terminal."""


class Progress:
    """Shows progress on a stream."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.told = stream, time.monotonic()

    def __call__(self, done: float, text: str) -> None:
        """Show the fraction that is done, 0 to 1, and a text."""
        if self.stream.isatty():
            bar = "#" * int(24 * min(done, 1.0))
            room = shutil.get_terminal_size().columns - 1
            line = f"[{bar:24}] {text}".ljust(room)[:room]
            print(f"\r{line}", end="", flush=True, file=self.stream)
        elif time.monotonic() - self.told >= SECONDS:
            self.told = time.monotonic()
            print(text, flush=True, file=self.stream)

    def end(self) -> None:
        """End the line of the bar."""
        if self.stream.isatty():
            print(file=self.stream)
