"""The library's own errors; an invalid argument is a TypeError or ValueError."""


class BackendUnavailableError(RuntimeError):
    """A backend exists but cannot run here; the message ends with the command that fixes it."""


class UnsupportedError(NotImplementedError):
    """A valid call that this backend does not support; the message names one that does."""


class KernelCompileError(RuntimeError):
    """A CUDA source that the compiler refused: a fault of the sources, or an NVRTC too old."""

    def __init__(self, file: str, arch: str, key: object, compiler: str, log: str) -> None:
        # All of them are arguments of the exception, so that it can be pickled.
        super().__init__(file, arch, key, compiler, log)
        self.file, self.arch, self.key, self.compiler, self.log = file, arch, key, compiler, log

    def __str__(self) -> str:
        return (
            f"{self.compiler} did not compile {self.file} for {self.arch}; a newer CUDA may "
            f"(pip install --upgrade 'cupy-cuda13x[ctk]'), and backend='numpy' needs no compiler\n"
            f"key: {self.key}\nlog:\n{self.log}"
        )
