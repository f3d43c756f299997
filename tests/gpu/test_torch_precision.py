"""PyTorch's settings for float32 matmuls on a GPU: they change no result."""

import pytest

from tests.on_gpu import needs_gpu

torch = pytest.importorskip("torch", reason="it sets PyTorch's flags: pip install torch")

from tests.gpu.test_torch_cuda import both, check, drawn, same  # noqa: E402 - PyTorch may be absent
from tests.torch.precision import FOR_ALL, precision, settings  # noqa: E402 - as above

pytestmark = [
    *needs_gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU"),
    pytest.mark.usefixtures("one_blas_thread"),
]

SETTINGS = [
    *(("torch.backends.cuda.matmul", value) for value in ("ieee", "tf32", "none")),
    *(("torch.backends", value) for value in ("ieee", "tf32", "none")),
    *((FOR_ALL, value) for value in ("highest", "high", "medium")),
]


@pytest.mark.parametrize(("place", "value"), SETTINGS)
def test_settings_change_no_bit_and_stay(place: str, value: str) -> None:
    """The rows are enough for the kernels that split numbers."""
    given = drawn(torch.float32, (2, 4, 2, 150, 260, 64))
    expected = both(given, causal=True, deterministic=True)
    with precision(place, value):
        before = settings()
        same(both(given, causal=True, deterministic=True), expected)
        check(given, causal=True)
        bias = torch.randn(4, 150, 260, device="cuda", requires_grad=True)
        check(given, bias=bias, softcap=5.0)
        assert settings() == before
