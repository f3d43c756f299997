"""The library's own errors; a plain mistake in an argument is a TypeError or ValueError."""


class BackendUnavailableError(RuntimeError):
    """A backend exists but cannot run here; the message ends with the command that mends it."""


class UnsupportedError(NotImplementedError):
    """A legal request that this backend does not serve; the message names one that does."""
