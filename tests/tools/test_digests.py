"""The digests of results tell changed bits, and nothing else."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tileattn
from tileattn.call.options import Options
from tileattn.dtypes import DTYPES
from tools import digests

pytestmark = pytest.mark.usefixtures("one_blas_thread")


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "DTYPES", DTYPES[1:3])
    monkeypatch.setattr(digests, "SIZES", digests.SIZES[:1])


def test_the_same_bits_have_the_same_digests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "before.json")
    assert digests.main(["--record", file]) == 0
    assert digests.main(["--compare", file]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(" digests, of which 0 differ")


def test_one_changed_bit_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "before.json")
    digests.main(["--record", file])
    true = tileattn.backward

    def wrong(*arrays: Any, **given: Any) -> Any:
        grads = true(*arrays, **given)
        if "softcap" in given and grads.dbias is not None and grads.dq.dtype == np.float32:
            grads.dbias[0, 0, 0, 0] = np.nextafter(grads.dbias[0, 0, 0, 0], 9)
        return grads

    monkeypatch.setattr(tileattn, "backward", wrong)
    assert digests.main(["--compare", file]) == 1
    first, last = capsys.readouterr().out.splitlines()[-2:]
    assert first == "differs: float32 2x4x2x37x71x24x40 6 bias softcap: dbias"
    assert last.endswith(" 1 differ")


def test_every_option_is_among_them() -> None:
    drawn = digests.options(np.random.default_rng(0), digests.SIZES[0])
    used = {name for given in drawn for name in given}
    # Not every backend takes all.
    others = {"score_mod", "mask_mod", "aux", "cu_seqlens_q", "cu_seqlens_k", "block_table"}
    others |= {"tree_mask", "prefix", "origin", "k_descale", "v_descale", "invariant"}
    assert used == set(Options.__annotations__) - others
