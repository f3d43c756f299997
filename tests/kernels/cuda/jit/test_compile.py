"""From a key to machine code, by way of the disk cache; nothing here needs a GPU."""

import dataclasses
import pickle
import re
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kernels.cuda.jit.tiny_kernel import HEADER, KEY, SOURCE, make
from tileattn.errors import BackendUnavailableError, KernelCompileError
from tileattn.kernels import disk_cache as cache
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.jit import compile as compiling
from tileattn.kernels.cuda.jit import load as loading
from tileattn.kernels.cuda.jit.compile import best_arch, compiled, resources, sources_in
from tileattn.kernels.cuda.jit.load import load

ROOT = Path(__file__).parents[4]


pytestmark = pytest.mark.usefixtures("place")


# --- the key ------------------------------------------------------------------------------------


def test_every_field_of_the_key_is_one_define() -> None:
    defines = KEY.defines()
    names = [re.fullmatch(r"-DKEY_([A-Z0-9_]+)=\w+", define) for define in defines]
    assert [name[1].lower() for name in names if name] == [
        field.name for field in dataclasses.fields(KernelKey)
    ]
    for position, field in enumerate(dataclasses.fields(KernelKey)):
        value = getattr(KEY, field.name)
        other: Any = not value if isinstance(value, bool) else value * 2 or "float16"
        changed = dataclasses.replace(KEY, **{field.name: other}).defines()
        assert [a != b for a, b in zip(defines, changed, strict=True)] == [
            index == position for index in range(len(defines))
        ]


def test_the_source_sees_the_key(folder: Path) -> None:
    make(folder, dataclasses.replace(KEY, head_dim=96))
    with pytest.raises(KernelCompileError, match="columns come in sixteens"):
        make(folder, dataclasses.replace(KEY, head_dim=97))


# --- compiling ----------------------------------------------------------------------------------


def test_machine_code_comes_with_its_resources(folder: Path) -> None:
    made = make(folder)
    assert made.image.startswith(b"\x7fELF")
    assert made.registers is not None
    assert 4 <= made.registers <= 64
    assert made.spill_bytes == 0
    assert "for 'sm_80'" in made.log
    assert "warning" not in made.log


def test_machine_code_is_a_whole_file(folder: Path) -> None:
    """The tables of an ELF file, which its header names, end where the file ends."""
    image = make(folder).image
    assert image[4:6] == b"\2\1", "64 bits, little-endian"
    offsets = struct.unpack_from("<2Q", image, 32)  # of the programs' headers and the sections'
    sizes = struct.unpack_from("<4H", image, 54)  # bytes of one and how many there are, of either
    ends = [at + size * n for at, size, n in zip(offsets, sizes[::2], sizes[1::2], strict=True)]
    assert max(ends) == len(image)


def test_ptx_keeps_subnormal_numbers(folder: Path) -> None:
    made = make(folder, arch="compute_75")
    assert b".target sm_75" in made.image
    assert b".f32" in made.image
    assert b".ftz" not in made.image
    assert (made.registers, made.spill_bytes) == (None, None)


def test_spills_are_counted(folder: Path) -> None:
    (folder / "tiny.cu").write_text("""
        extern "C" __global__ void __launch_bounds__(1024, 2) tiny(float* x) {
            __shared__ float kept[1024];
            float own[80];
            #pragma unroll
            for (int i = 0; i < 80; ++i) own[i] = x[i * 1024 + threadIdx.x];
            kept[threadIdx.x] = own[0];
            __syncthreads();
            #pragma unroll
            for (int i = 0; i < 80; ++i) x[own[i] > 0 ? i : 80] = own[79 - i] + kept[i];
        }""")
    made = make(folder)
    assert made.registers == 32
    assert made.spill_bytes is not None
    assert made.spill_bytes > 100


def test_headers_come_only_from_the_sources(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "elsewhere"
    here.mkdir()
    (here / "twice.cuh").write_text("#error a stranger's header")
    monkeypatch.chdir(here)
    assert make(folder).image


def test_a_second_folder_adds_to_the_first(folder: Path, tmp_path: Path) -> None:
    more = tmp_path / "more"
    more.mkdir()
    (more / "probe.cu").write_text(SOURCE.replace("tiny", "probe"))
    key = dataclasses.replace(KEY, kernel="probe")
    assert compiled(key, "sm_80", (folder, more)).registers
    with pytest.raises(KernelCompileError, match=r"there are only: tiny\.cu"):
        compiled(key, "sm_80", (folder,))


def test_a_failure_says_what_where_and_why(folder: Path, place: Path) -> None:
    (folder / "twice.cuh").write_text("inline float twice(float x) { return 2 * y; }\n")
    with pytest.raises(KernelCompileError) as caught:
        make(folder, arch="sm_90a")
    error = caught.value
    assert (error.file, error.arch, error.key) == ("tiny.cu", "sm_90a", KEY)
    assert 'twice.cuh(1): error: identifier "y" is undefined' in error.log
    for part in ("tiny.cu", "sm_90a", repr(KEY), error.log, "NVRTC", "pip install"):
        assert part in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert list(place.glob("*")) == []


@pytest.mark.parametrize("arch", ["sm_999", "sm_9", "90a", "", "sm_90 -w"])
def test_an_unknown_arch_is_named(folder: Path, arch: str) -> None:
    with pytest.raises(ValueError, match=rf"^arch must be .*NVRTC .*sm_90a.*; got '{arch}'$"):
        make(folder, arch=arch)


def test_without_nvrtc_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", None)
    monkeypatch.setitem(sys.modules, "cupy_backends", None)
    compiling._nvrtc.cache_clear()
    told = r"^CuPy is not installed; pip install 'cupy-cuda13x\[ctk\]' brings CuPy and NVRTC"
    with pytest.raises(BackendUnavailableError, match=told):
        compiled(KEY, "sm_80")
    monkeypatch.setitem(sys.modules, "cupy", None)
    loading._runtime.cache_clear()
    with pytest.raises(BackendUnavailableError, match=told):
        load(KEY)


# --- the disk cache -----------------------------------------------------------------------------


def test_the_second_time_nothing_is_compiled(folder: Path) -> None:
    first, second = make(folder), make(folder)
    assert (first.cached, second.cached) == (False, True)
    assert second == dataclasses.replace(first, cached=True)
    assert len(cache.entries()) == 1
    assert make(folder, force=True).cached is False
    assert len(cache.entries()) == 1


def test_an_edit_in_a_header_is_seen(folder: Path) -> None:
    first = make(folder)
    (folder / "twice.cuh").write_text(HEADER.replace("2 * x", "3 * x"))
    second = make(folder)
    assert not second.cached
    assert second.image != first.image
    (folder / "twice.cuh").write_text(HEADER)
    assert make(folder) == dataclasses.replace(first, cached=True)


def test_everything_that_matters_has_an_entry_of_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: list[tuple[KernelKey, str]] = [
        (KEY, "sm_80"),
        (KEY, "sm_86"),
        (KEY, "compute_80"),
        (dataclasses.replace(KEY, head_dim=128), "sm_80"),
        (dataclasses.replace(KEY, mask=True), "sm_80"),
    ]
    for count, (key, arch) in enumerate(changes, 1):
        assert not make(folder, key, arch).cached
        assert len(cache.entries()) == count
    monkeypatch.setattr(compiling, "OPTIONS", (*compiling.OPTIONS, "-fmad=false"))
    assert not make(folder).cached
    monkeypatch.undo()
    for count, name in enumerate(("compiler_name", "_build"), len(changes) + 2):
        monkeypatch.setattr(compiling, name, lambda: "another")
        monkeypatch.setenv("TILEATTN_CACHE_DIR", str(folder.parent / "cache"))
        assert not make(folder).cached
        assert len(cache.entries()) == count
        monkeypatch.undo()


@pytest.mark.parametrize("place", [0, 60_000, -60_000, -1])
def test_builds_of_one_version_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: int
) -> None:
    """Wherever the library lies: what counts is its content at both ends, and its size."""
    reason = "the library is looked for by it, which comes with the extra nvrtc"
    pathfinder = pytest.importorskip("cuda.pathfinder", reason=reason)

    def build(name: str, content: bytes) -> str:
        library = tmp_path / name
        library.write_bytes(content)
        found = SimpleNamespace(abs_path=str(library))
        monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", lambda _: found)
        return compiling._build.__wrapped__()

    content = bytes(range(256)) * 1000
    other = bytearray(content)
    other[place] ^= 1
    first = build("libnvrtc.so.13", content)
    assert build("nvrtc64_130_0.dll", content) == first
    assert build("libnvrtc.so.13", bytes(other)) != first
    assert build("libnvrtc.so.13", content[:100_000] + content[99_999:]) != first
    assert build("libnvrtc.so.13", content[:7]) != first


def test_no_text_moves_between_files_unseen(folder: Path) -> None:
    digests = set()
    for name, text in (("a.cuh", "int x;"), ("b.cuh", "int x;"), ("a.cuh", "int x; ")):
        (folder / name).write_text(text)
        sources_in.cache_clear()
        digests.add(cache.name_of("cuda", sources_in((folder,))))
        (folder / name).unlink()
    assert len(digests) == 3


@pytest.mark.parametrize("content", [b"", b"\x7fELF from elsewhere", None])
def test_an_unsound_entry_is_compiled_again_and_replaced(
    folder: Path, content: bytes | None
) -> None:
    first = make(folder)
    entry = cache.entries()[0].path
    entry.write_bytes(entry.read_bytes()[:-7] if content is None else content)
    again = make(folder)
    assert (again.image, again.registers, again.cached) == (first.image, first.registers, False)
    assert make(folder) == dataclasses.replace(again, cached=True)
    assert [x.path for x in cache.entries()] == [entry]


def test_without_a_usable_folder_kernels_are_compiled_in_memory(folder: Path, place: Path) -> None:
    place.write_text("a file where the folder should be")
    with pytest.warns(RuntimeWarning, match="without the disk cache"):
        assert make(folder).image
    assert make(folder).cached is False


def test_several_processes_compile_the_same_kernel(folder: Path) -> None:
    code = f"""
        import sys; sys.path.insert(0, {str(ROOT)!r})
        from pathlib import Path
        from tileattn.kernels.cuda.jit.compile import compiled
        from tileattn.kernels.cuda.families.key import KernelKey
        made = compiled(KernelKey("tiny", "float32"), "sm_80", (Path({str(folder)!r}),))
        print(len(made.image), made.registers)
        """.replace("\n        ", "\n")
    command = [sys.executable, "-W", "error", "-c", code]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    answers = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], answers
    made = make(folder)
    assert made.cached
    assert {out for out, _ in answers} == {f"{len(made.image)} {made.registers}\n"}
    assert len(list(cache.folder().iterdir())) == 1


# --- which GPU ----------------------------------------------------------------------------------

KNOWN = (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)


@pytest.mark.parametrize(
    ("capability", "known", "arch"),
    [
        ((7, 5), KNOWN, "sm_75"),
        ((8, 0), KNOWN, "sm_80"),
        ((8, 6), KNOWN, "sm_86"),
        ((8, 9), KNOWN, "sm_89"),
        ((9, 0), KNOWN, "sm_90a"),
        ((10, 0), KNOWN, "sm_100"),
        ((10, 3), KNOWN, "sm_103"),
        ((12, 0), KNOWN, "sm_120"),
        ((12, 1), KNOWN, "sm_121"),
        ((12, 2), KNOWN, "sm_121"),  # newer within a generation that is known
        ((13, 0), KNOWN, "compute_121"),  # of a generation that is not
        ((11, 0), (90, 100, 103, 120), "compute_103"),
        ((10, 0), (50, 60, 70, 75, 80, 86, 89, 90), "compute_90"),
        ((8, 8), (75, 80, 86, 89, 90), "sm_86"),
    ],
)
def test_the_arch_of_a_gpu(capability: tuple[int, int], known: tuple[int, ...], arch: str) -> None:
    assert best_arch(capability, known) == arch


@pytest.mark.parametrize(
    ("capability", "message"),
    [
        ((7, 0), r"compute capability 7\.0: the kernels need 7\.5 .*backend='numpy'"),
        ((6, 1), r"compute capability 6\.1: the kernels need 7\.5"),
        (
            (7, 5),
            r"compute capability 7\.5: this CUDA supports newer.*pip install 'cupy-cuda12x\[ctk\]'",
        ),
    ],
)
def test_a_gpu_that_is_too_old(capability: tuple[int, int], message: str) -> None:
    with pytest.raises(BackendUnavailableError, match=message):
        best_arch(capability, (50, 60) if capability < (7, 5) else (80, 90))


# --- the log ------------------------------------------------------------------------------------

LOG = """a.cuh(3): warning #177-D: variable "u" was declared but never referenced
ptxas info    : 121 bytes gmem, 296 bytes cmem[4]
ptxas info    : Compiling entry function 'other' for 'sm_90a'
ptxas info    : Function properties for other
ptxas         .     0 bytes stack frame, 900 bytes spill stores, 900 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 7 bytes smem
ptxas info    : Compiling entry function 'tiny' for 'sm_90a'
ptxas info    : Function properties for tiny
ptxas         .     256 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 256 bytes cumulative stack size, 1024 bytes smem
ptxas info    : Function properties for _Z5helperv
ptxas         .     0 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
"""


def test_the_log_of_a_kernel_is_read() -> None:
    assert resources(LOG, "tiny") == (40, 32)
    assert resources(LOG, "other") == (255, 1800)
    assert resources(LOG, "tin") == (None, None)
    assert resources("", "tiny") == (None, None)
