"""What tools/check_wheel.py says about the kernels in a wheel."""

import zipfile
from pathlib import Path

import pytest

from tileattn.kernels.cuda.jit import shipped
from tools import check_wheel


@pytest.mark.parametrize("flipped", [None, 5, -1])
def test_damaged_kernels_are_found(tmp_path: Path, flipped: int | None) -> None:
    bodies = {str(n): b"log\0" + bytes([n]) * 100 for n in range(3)}
    shipped.write(tmp_path / "cubins", "sm_80", "NVRTC", bodies)
    packed = bytearray((tmp_path / "cubins/sm_80.bin").read_bytes())
    if flipped is not None:
        packed[flipped] ^= 1
    with zipfile.ZipFile(tmp_path / "one.whl", "w") as archive:
        archive.writestr(f"{check_wheel.CUBINS}sm_80.bin", packed)
        archive.write(tmp_path / "cubins/sm_80.json", f"{check_wheel.CUBINS}sm_80.json")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shipped, "_warn_once", lambda _: None)
            count, found = check_wheel.cubins(archive)
            assert (count, len(found)) == (3, flipped is not None)
            patch.setattr(check_wheel, "MOST_BYTES", 100)
            assert len(check_wheel.cubins(archive)[1]) == 1 + (flipped is not None)
