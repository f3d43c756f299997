"""Kernels of a call that overlap have the bits of those one after the other.

Whatever comes before the call, or after it.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import tileattn
from tests.on_gpu import bits, busy, needs_gpu, poisoned, random_arrays, sent
from tileattn.backends.cupy import cached_passes, executable, improvement
from tileattn.backends.cupy.driver_launch import can_overlap
from tileattn.backends.cupy.graph import Graph
from tileattn.call.prepared import CALLS
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.jit.load import load

pytestmark = [*needs_gpu, pytest.mark.usefixtures("overlapping")]

BF16 = ml_dtypes.bfloat16
ANY_ORDER = {"deterministic": False}
QUEUED = 20  # calls that are in the queue before the first of them starts


@pytest.fixture
def overlapping() -> None:
    """Skip where kernels never overlap."""
    if not can_overlap(load(KernelKey("backward_dsinks", "float16"))):
        pytest.skip("kernels overlap from compute capability 9.0 and CUDA 12.3 on")


@contextmanager
def one_after_the_other() -> Iterator[None]:
    """Launch without the attribute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executable, "can_overlap", lambda _: False)
        CALLS.clear()
        yield
    CALLS.clear()


class Case(NamedTuple):
    """Arrays that a call reads, and the call, which gives arrays."""

    given: Sequence[Any]
    call: Callable[[Sequence[Any]], Sequence[Any]]


def backward(
    sizes: tuple[int, ...],
    dtype: Any,
    spoil: Callable[..., None] | None = None,
    how: dict[str, Any] | None = None,
    **options: Any,
) -> Case:
    """Make a backward pass of B, Hq, Hkv, Nq, Nk, D, in a fixed order unless ``how`` says other."""
    B, Hq, Hkv, Nq, Nk, D = sizes
    shapes = (B, Hq, Nq, D), (B, Hkv, Nk, D), (B, Hkv, Nk, D), (B, Hq, Nq, D)
    q, k, v, dout = random_arrays(*shapes, dtype=dtype)
    if spoil is not None:
        spoil(q, k, v)
    out, lse = tileattn.forward(q, k, v, **options)
    asked = {"deterministic": True, **(how or {}), **options}

    def call(x: Sequence[Any]) -> Sequence[Any]:
        grads = tileattn.backward(*x, **asked)
        return [y for y in (*grads, *(grads.daux or ())) if y is not None]

    return Case((dout, q, k, v, out, lse), call)


def forward(*shapes: tuple[int, ...], dtype: Any = BF16, **options: Any) -> Case:
    return Case(random_arrays(*shapes, dtype=dtype), lambda x: tileattn.forward(*x, **options))


def flagged(q: Any, k: Any, v: Any) -> None:
    """Give each kernel that mostly returns at once a head to compute."""
    v[0, 0, 5, 3] = np.inf
    q[:, -1] *= 3000
    k[-1, 0, 7] = np.nan


def decoding(B: int, heads: tuple[int, int], Nk: int, D: int, page: int = 0) -> Case:
    Hq, Hkv = heads
    rng = np.random.default_rng(0)
    lengths = rng.integers(Nk // 2, Nk, B, endpoint=True)
    options = {"kv_lengths": sent(lengths)}
    keys = (B, Hkv, Nk, D)
    if page:
        options["block_table"] = sent(rng.permutation(B * Nk // page).reshape(B, -1))
        keys = B * Nk // page, Hkv, page, D
    return forward((B, Hq, 1, D), keys, keys, causal=True, **options)


def latent() -> Case:
    q, c = random_arrays((2, 16, 1, 576), (2, 1, 3000, 576), dtype=BF16)
    return Case((q, c), lambda x: tileattn.forward(x[0], x[1], x[1][..., :512], causal=True))


def ends(*numbers: int) -> dict[str, Any]:
    return {name: sent(np.array(numbers)) for name in ("cu_seqlens_q", "cu_seqlens_k")}


def packed(kind: str, D: int) -> Case:
    heads = (4, 700, D), (2, 700, D), (2, 700, D), (4, 700, D)
    q, k, v, dout = random_arrays(*heads, dtype=BF16)
    options: dict[str, Any] = {"causal": True, **ends(0, 300, 300, 301, 700)}
    if kind == "forward":
        return Case((q, k, v), lambda x: tileattn.forward(*x, **options))
    given = dout, q, k, v, *tileattn.forward(q, k, v, **options)
    options["deterministic"] = True
    return Case(given, lambda x: tileattn.backward(*x, **options)[:3])


def documents(kind: str) -> Case:
    """Make a pass whose tiles the GPU classifies and lists, by an array."""
    ids = sent(np.repeat(np.arange(7), 100)[np.newaxis].astype(np.int32))
    options: dict[str, Any] = {
        "mask_mod": lambda b, h, i, j, ids: (ids[0, i] == ids[0, j]) & (b < 2) & (h < 9),
        "aux": (ids,),
    }
    if kind == "backward":
        return backward((2, 4, 2, 700, 700, 64), np.float16, how={"wrt": tuple("qkv")}, **options)
    return forward((2, 4, 700, 64), *2 * [(2, 2, 700, 64)], dtype=np.float16, **options)


def learned() -> Case:
    table = sent(np.random.default_rng(0).normal(size=(4, 201)).astype(np.float32))
    options: dict[str, Any] = {
        "score_mod": lambda s, b, h, i, j, t: s + t[h, i - j + 100 + 0 * b],
        "aux": (table,),
        "sinks": sent(np.linspace(-1, 1, 4)),
    }
    return backward((2, 4, 2, 90, 101, 64), BF16, **options)


def biased() -> Case:
    bias = sent(np.random.default_rng(0).normal(size=(1, 4, 1, 140)).astype(np.float32))
    return backward((2, 4, 2, 130, 140, 64), np.float16, bias=bias)


CASES: dict[str, Callable[[], Case]] = {
    "tiny": lambda: backward((1, 2, 1, 3, 5, 64), BF16),
    "one tile": lambda: backward((2, 4, 4, 64, 128, 128), BF16),
    "in any order": lambda: backward((2, 4, 2, 70, 256, 64), np.float16, how=ANY_ORDER),
    "short": lambda: backward((4, 8, 8, 512, 512, 64), BF16, causal=True),
    "middle": lambda: backward((2, 8, 2, 1030, 1100, 128), BF16),
    "wide": lambda: backward((1, 4, 2, 300, 520, 256), BF16, causal=True),
    "float32": lambda: backward((2, 4, 2, 130, 150, 64), np.float32),
    "float32, sums of dq": lambda: backward(
        (2, 4, 2, 130, 40, 64), np.float32, how=ANY_ORDER
    ),
    "naive": lambda: backward((1, 2, 1, 20, 30, 300), np.float16),
    "flagged heads": lambda: backward((2, 4, 2, 200, 300, 128), BF16, spoil=flagged),
    "flagged heads, wide": lambda: backward((2, 4, 2, 200, 300, 256), BF16, spoil=flagged),
    "flagged heads, float32": lambda: backward((2, 4, 2, 90, 110, 64), np.float32, spoil=flagged),
    "bias": biased,
    "learned": learned,
    "classified forward": lambda: documents("forward"),
    "classified backward": lambda: documents("backward"),
    **{f"packed {kind}, {D}": partial(packed, kind, D)
       for kind in ("forward", "backward") for D in (64, 128, 256)},
    "decode": lambda: forward((1, 32, 1, 128), *2 * [(1, 8, 4096, 128)], causal=True),
    "decode, lengths": lambda: decoding(3, (32, 8), 2400, 128),
    "decode, pages": lambda: decoding(3, (8, 2), 2400, 64, page=16),
    "decode, pieces": lambda: decoding(2, (128, 1), 5000, 128),
    "latent": latent,
}  # fmt: skip


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]()


def expected_of(case: Case) -> list[Any]:
    """Return the results of kernels that run one after the other."""
    import cupy

    with one_after_the_other(), poisoned():
        found = [x.copy() for x in case.call([x.copy() for x in case.given])]
        cupy.cuda.Device().synchronize()
    return found


class Repeated:
    """Calls that follow each other: inputs are written before each, and spoilt after it."""

    def __init__(self, case: Case, expected: Sequence[Any]) -> None:
        import cupy

        self._case, self._expected = case, expected
        self._inputs = [cupy.empty_like(x) for x in case.given]
        self.wrong = cupy.zeros(len(expected), bool)

    def once(self) -> None:
        """Nothing waits for the GPU."""
        for x, there in zip(self._inputs, self._case.given, strict=True):
            x[...] = there
        with poisoned():
            found = self._case.call(self._inputs)
        for x in self._inputs:
            x.view(np.uint8).fill(0xFF)
        for n, (x, y) in enumerate(zip(found, self._expected, strict=True)):
            self.wrong[n] |= (x.view(np.uint8) != y.view(np.uint8)).any()


def test_calls_one_after_the_other(case: Case) -> None:
    """The queue is full, so that a kernel starts as soon as it may."""
    repeated, wait = Repeated(case, expected_of(case)), busy(10)
    repeated.once()
    for _ in range(10):
        wait()
        for _ in range(QUEUED):
            repeated.once()
    assert not repeated.wrong.any()


def test_calls_on_two_streams(case: Case) -> None:
    import cupy

    expected, wait = expected_of(case), busy(10)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    repeated = [Repeated(case, expected) for _ in streams]
    cupy.cuda.Device().synchronize()
    for _ in range(5):
        for stream in streams:
            with stream:
                wait()
        for _ in range(QUEUED):
            for stream, each in zip(streams, repeated, strict=True):
                with stream:
                    each.once()
    cupy.cuda.Device().synchronize()
    assert not any(each.wrong.any() for each in repeated)


def test_calls_in_a_graph(case: Case) -> None:
    import cupy

    expected = expected_of(case)
    stream = cupy.cuda.Stream(non_blocking=True)
    pool = cupy.cuda.MemoryPool()
    with stream, cupy.cuda.using_allocator(pool.malloc):
        repeated = Repeated(case, expected)
        repeated.once()
        stream.synchronize()
        stream.begin_capture()
        for _ in range(3):
            repeated.once()
        graph = stream.end_capture()
        for _ in range(50):
            graph.launch(stream)
        stream.synchronize()
    assert not repeated.wrong.any()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """Take down which graphs are made, and hold them."""
    found: list[Graph] = []

    def counted(*given: Any) -> Graph:
        found.append(Graph(*given))
        return found[-1]

    monkeypatch.setattr(executable, "Graph", counted)
    return found


@pytest.mark.parametrize(
    "name", ["middle", "flagged heads", "float32", "decode", "packed forward, 64"]
)
def test_a_call_on_addresses_that_come_back_is_a_graph(name: str, made: list[Graph]) -> None:
    """It has the bits of single launches."""
    case = CASES[name]()
    repeated = Repeated(case, expected_of(case))
    launched = 0
    made.clear()
    for _ in range(8):
        repeated.once()
        improvement.finish()  # a graph is made of the plan that stays
        for graph in made:
            launch = graph.launch

            def counted(stream: int, launch: Callable[[int], None] = launch) -> None:
                nonlocal launched
                launched += 1
                launch(stream)

            graph.launch = counted
    assert not repeated.wrong.any()
    assert 1 <= len(made) < 8
    assert launched > 0


def test_other_threads_may_wait_for_the_device_while_graphs_are_made(made: list[Graph]) -> None:
    import cupy

    case = CASES["short"]()
    repeated = Repeated(case, expected_of(case))
    done = threading.Event()

    def waiting() -> int:
        waits = 0
        while not done.is_set():
            cupy.cuda.runtime.deviceSynchronize()
            waits += 1
        return waits

    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(waiting)
        try:
            for _ in range(20):
                cached_passes._met.clear()
                for _ in range(4):
                    repeated.once()
        finally:
            done.set()
        assert waits.result() > 1
    assert not repeated.wrong.any()
    assert len(made) >= 20


def test_graphs_are_made_beside_a_capture_of_another_thread(made: list[Graph]) -> None:
    import cupy

    case = CASES["short"]()
    expected = expected_of(case)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    cupy.cuda.Device().synchronize()

    def calls() -> Any:
        with streams[1]:
            for _ in range(6):
                found = case.call(case.given)
        return found

    with ThreadPoolExecutor(1) as pool:
        pool.submit(
            calls
        ).result()  # takes memory, which is not allowed during another thread's capture
        made.clear()
        cached_passes._met.clear()
        with streams[0]:
            x = cupy.zeros(10)
            x += 1  # loads the kernel
            streams[0].begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
            x += 1
            try:
                found = pool.submit(calls).result()
            finally:
                graph = streams[0].end_capture()
            graph.launch()
    cupy.cuda.Device().synchronize()
    assert made
    assert (x == 2).all()
    assert bits(found) == bits(expected)


@pytest.mark.parametrize("Nk", [64, 700])
def test_calls_in_a_graph_of_pytorch(Nk: int) -> None:
    torch = pytest.importorskip("torch")
    from tileattn.torch import attention

    shapes = (2, 4, 300, 64), (2, 2, Nk, 64), (2, 2, Nk, 64), (2, 4, 300, 64)
    rng = torch.Generator().manual_seed(0)
    there = [torch.randn(shape, generator=rng).to("cuda", torch.bfloat16) for shape in shapes]
    given = [torch.empty_like(x).requires_grad_(n < 3) for n, x in enumerate(there)]

    def both() -> list[Any]:
        with torch.no_grad():
            for x, y in zip(given, there, strict=True):
                x.copy_(y)
        *tensors, dout = given
        out = attention(*tensors, causal=True, deterministic=True)
        found = [out, *torch.autograd.grad(out, tensors, dout)]
        with torch.no_grad():
            for x in given:
                x.fill_(torch.nan)
        return [x.detach().clone() for x in found]

    with one_after_the_other():
        expected = both()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [both() for _ in range(3)]
    for _ in range(20):
        for each in found:
            for x in each:
                x.fill_(torch.nan)
        graph.replay()
        for each in found:
            for x, y in zip(each, expected, strict=True):
                assert torch.equal(x, y)


def test_a_thread_of_its_own_gets_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the launch asks for one."""
    import cupy

    CALLS.clear()  # a call of a known kind is not launched by addresses before it comes often
    case = forward((2, 4, 70, 64), *2 * [(2, 2, 90, 64)], dtype=np.float32)
    expected = [x.get() for x in case.call(case.given)]
    launched: list[tuple[Any, ...]] = []
    launch = cached_passes.Pass.launch

    def put_off(*given: Any) -> bool:
        launched.append(given)
        return True

    monkeypatch.setattr(cached_passes.Pass, "launch", put_off)
    found = case.call(case.given)
    for x in found:
        x.fill(np.nan)
    cupy.cuda.Device().synchronize()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(launch, *launched[0]).result()
    cupy.cuda.Device().synchronize()
    assert [x.get().tobytes() for x in found] == [x.tobytes() for x in expected]
