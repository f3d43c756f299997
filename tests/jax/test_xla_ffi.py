"""The structures of XLA's foreign function interface, and what a handler does with them."""

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402 - JAX may be absent

from tileattn.jax import xla_ffi  # noqa: E402 - as above
from tileattn.jax.host_call import call_host  # noqa: E402 - as above

HEADER = Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text(encoding="utf-8")

STRUCTS = {
    "Api_Version": xla_ffi.Version,
    "Buffer": xla_ffi.Buffer,
    "Args": xla_ffi.Buffers,
    "Rets": xla_ffi.Buffers,
    "Scalar": xla_ffi.Scalar,
    "Attrs": xla_ffi.Attributes,
    "Metadata": xla_ffi.Metadata,
    **{f"{name}_Args": struct for name, struct in xla_ffi._STRUCTS.items()},
}
KINDS = {"size_t": 8, "int64_t": 8, "int32_t": 4, "int": 4, "uint32_t": 4}
ENUMS = {"DataType": 4, "Error_Code": 4, "ExecutionStage": 4, "Handler_Traits": 4}
INSIDE = {"Api_Version": 24, "TypeId": 8, "Args": 40, "Rets": 40, "Attrs": 48}


def fields_of(name: str) -> list[int]:
    """Return the sizes of a structure's fields in the header."""
    found = re.search(rf"struct XLA_FFI_{name} \{{(.*?)\n\}}", HEADER, re.DOTALL)
    assert found, name
    lines = re.sub(r"//.*", "", found[1]).split(";")
    sizes = KINDS | {f"XLA_FFI_{kind}": n for kind, n in (ENUMS | INSIDE).items()}
    kinds = [re.sub(r"^(const|struct) ", "", line.strip()) for line in lines if line.strip()]
    return [8 if "*" in kind else sizes[kind.split()[0]] for kind in kinds]


@pytest.mark.parametrize("name", STRUCTS)
def test_structures_have_the_fields_of_the_header(name: str) -> None:
    struct = STRUCTS[name]
    sizes = [getattr(struct, field).size for field, _ in struct._fields_]
    assert sizes == fields_of(name)[: len(sizes)]
    assert len(sizes) == len(fields_of(name))


def test_functions_are_those_of_the_header() -> None:
    functions = re.findall(r"_XLA_FFI_API_STRUCT_FIELD\(XLA_FFI_(\w+)\);", HEADER)
    assert functions[: len(xla_ffi.FUNCTIONS)] == list(xla_ffi.FUNCTIONS)
    major, minor = (int(x) for x in re.findall(r"#define XLA_FFI_API_M(?:AJ|IN)OR (\d+)", HEADER))
    assert (major, minor) >= xla_ffi.VERSION


def test_a_call_frame_has_the_fields_of_the_header() -> None:
    sizes = [getattr(xla_ffi.CallFrame, name).size for name, _ in xla_ffi.CallFrame._fields_]
    assert sizes == fields_of("CallFrame")[: len(sizes)]
    assert ctypes.sizeof(xla_ffi.CallFrame) == 168


def test_arrays_are_the_program_s_memory() -> None:
    seen = []

    class Function:
        def __call__(self, given: tuple[object, ...]) -> object:
            x, y = given
            assert isinstance(x, np.ndarray)
            assert isinstance(y, np.ndarray)
            seen.append((x.dtype, x.shape, y.dtype, y.shape))
            return x + 1, ~y

    x, y = jnp.arange(6.0, dtype=jnp.bfloat16).reshape(2, 3), jnp.array([True, False])
    shapes = tuple(jax.ShapeDtypeStruct(z.shape, z.dtype) for z in (x, y))
    more, other = jax.jit(lambda *given: call_host(Function(), shapes, given))(x, y)
    assert seen == [(x.dtype, x.shape, y.dtype, y.shape)]
    assert jnp.array_equal(more, x + 1)
    assert jnp.array_equal(other, ~y)


def test_errors_of_functions_are_errors_of_the_program() -> None:
    class Function:
        def __call__(self, *_: object) -> object:
            raise ZeroDivisionError("of the function: ä")

    shape = jax.ShapeDtypeStruct((3,), np.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="ZeroDivisionError: of the function: ä"):
        call_host(Function(), shape, jnp.zeros(3)).block_until_ready()


def test_a_program_outlives_what_made_it() -> None:
    """It needs a new process, which has compiled no program yet."""
    code = """
import jax, jax.numpy as jnp
from tileattn.jax import attention
x = jnp.ones((2, 5, 8))
compiled = jax.jit(attention).lower(x, x, x).compile()
jax.clear_caches()
print(compiled(x, x, x).sum())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout.strip() == "80.0", done.stderr
