"""wgmma_sm90.cuh is up to date, and each of its products is the right instruction."""

import re
from itertools import product
from pathlib import Path

import pytest

from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.jit.compile import SOURCES, compiled
from tools import wgmma_header

COLUMNS = (16, 32, 64, 80, 96, 112, 128, 160, 192, 256)
IN_SHARED = ("Descriptor<false>{1}", "Descriptor<true>{1}")


def test_the_header_is_up_to_date() -> None:
    assert wgmma_header.main(["--check"]) == 0


def test_a_stale_header_is_found_and_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = tmp_path / wgmma_header.HEADER.name
    fresh = wgmma_header.HEADER.read_text(encoding="utf-8")
    header.write_text(fresh.replace("m64n96k16", "m64n88k16"), encoding="utf-8")
    monkeypatch.setattr(wgmma_header, "HEADER", header)
    assert wgmma_header.main(["--check"]) == 1
    assert wgmma_header.main(["--write"]) == 0
    assert header.read_text(encoding="utf-8") == fresh


def products(element: str, columns: int) -> str:
    """Write a kernel that calls all the products of a type and number of columns."""
    calls = "\n".join(
        f"    wgmma({element}{{}}, d, {a}, {b}, add);"
        for a, b in product((*IN_SHARED, "a"), IN_SHARED)
    )
    return f"""
extern "C" __global__ void {element}_{columns}(float* out, bool add, int i) {{
    const u32 a[4] = {{1, 2, 3, 4}};
    float d[{columns // 2}] = {{}};
    wgmma_fence();
{calls}
    wgmma_commit();
    wgmma_wait<0>();
    fence_operand(d);
#pragma unroll
    for (int n = 0; n < {columns // 2}; ++n) out[i * n] = d[n];
}}"""


INSTRUCTION = re.compile(
    r"setp\.ne\.b32\s+p, %r\d+, 0;\s*wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(\w+)"
    r"\.(\w+)\s+\{([^}]*)\}, (\{[^}]*\}|%rd\d+), %rd\d+, p, 1, 1, ([01, ]+);"
)


@pytest.mark.usefixtures("nvrtc")
def test_each_product_is_the_instruction_that_was_asked_for(tmp_path: Path) -> None:
    asked = list(product(("float16", "bfloat16"), COLUMNS))
    text = ['#include "wgmma_sm90.cuh"', *(products(*one) for one in asked)]
    (tmp_path / "products.cu").write_text("\n".join(text), encoding="utf-8")
    key, folders = KernelKey("products", "bfloat16"), (SOURCES, tmp_path)
    assert compiled(key, "sm_90a", folders).image.startswith(b"\x7fELF")  # ptxas takes them
    ptx = compiled(key, "compute_90a", folders).image.decode()
    made = []
    for columns, left, right, sums, a, flags in INSTRUCTION.findall(ptx):
        assert left == right
        assert len(set(sums.split(","))) == int(columns) // 2
        made.append((left, int(columns), len(a.split(",")), flags))
    short = {"float16": "f16", "bfloat16": "bf16"}
    tails = [(1, "0, 0"), (1, "0, 1"), (1, "1, 0"), (1, "1, 1"), (4, "0"), (4, "1")]
    assert made == [(short[element], n, *tail) for element, n in asked for tail in tails]
