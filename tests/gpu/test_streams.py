"""Streams, graphs and repeated runs on the GPU."""

import gc
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tileattn
from tests.on_gpu import bits, busy, hold, needs_gpu, random_arrays
from tileattn import Attention, BlockMask, Gradients
from tileattn.backends.cupy import streams

pytestmark = needs_gpu

ROOT = Path(__file__).parents[2]
SHAPES = ((2, 4, 333, 64), (2, 2, 517, 64), (2, 2, 517, 64), (2, 4, 333, 64))
OPTIONS: dict[str, Any] = {"causal": True, "softcap": 20.0, "dropout_p": 0.1, "seed": 3}


def both(given: list[Any], **options: Any) -> tuple[Attention, Gradients]:
    """Run both passes; ``deterministic`` is for the backward one."""
    q, k, v, dout = given
    fixed = options.pop("deterministic", False)
    attention = tileattn.forward(q, k, v, **options)
    grads = tileattn.backward(dout, q, k, v, *attention, deterministic=fixed, **options)
    return attention, grads


@pytest.fixture(scope="module")
def given() -> list[Any]:
    return random_arrays(*SHAPES, dtype=np.float16)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_current_stream_is_used(given: list[Any], deterministic: bool) -> None:
    """The inputs are written on the stream after a long wait: work elsewhere would miss them."""
    import cupy

    options = {"causal": True}
    expected = bits(both(given, **options, deterministic=deterministic)[0])
    late = [cupy.zeros_like(x) for x in given]
    wait = busy(200)
    both(late, **options, deterministic=deterministic)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        wait()
        for x, there in zip(late, given, strict=True):
            x[...] = there
        attention, grads = both(late, **options, deterministic=deterministic)
    stream.synchronize()
    assert bits(attention) == expected
    hold(given, attention, grads, options)


def test_nothing_waits_and_nothing_runs_on_the_default_stream(given: list[Any]) -> None:
    """The call returns while the wait before it still runs on the same stream."""
    import cupy

    wait = busy(300)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        both(given, **OPTIONS)  # compiles, and fills the stream's pool of memory
    waiting, idle = cupy.cuda.Event(), cupy.cuda.Event()
    cupy.cuda.Device().synchronize()
    with stream:
        wait()
        waiting.record()
        both(given, **OPTIONS)
        assert not waiting.done
    idle.record(cupy.cuda.Stream.null)
    idle.synchronize()  # the default stream has had nothing to do
    assert not waiting.done
    stream.synchronize()


@pytest.mark.parametrize("options", [{}, OPTIONS, {"kv_lengths": [517, 40]}], ids=str)
def test_a_graph_is_replayed_on_new_data(given: list[Any], options: dict[str, Any]) -> None:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        inputs = [x.copy() for x in given]
        # Memory that is taken after the capture may be what the graph writes to for a moment.
        fresh = random_arrays(*SHAPES, dtype=np.float16, seed=9)
        both(inputs, **options)  # compiles; loading a kernel cannot be captured
        stream.begin_capture()
        attention, grads = both(inputs, **options)
        graph = stream.end_capture()
        for x, new in zip(inputs, fresh, strict=True):
            x[...] = new
        graph.launch()
        stream.synchronize()
        expected, _ = both(fresh, **options)
        stream.synchronize()
    assert bits(attention) == bits(expected)
    hold(fresh, attention, grads, options)


def test_what_another_stream_reads_outlives_its_owner(given: list[Any]) -> None:
    """The default stream, on which a mask was uploaded, does not wait for the other one."""
    import cupy

    rows, other = given[:3], cupy.cuda.Stream(non_blocking=True)
    pairs = np.random.default_rng(5).random((333, 517)) < 0.4

    def called(stream: Any) -> list[bytes]:
        mask = BlockMask.from_mask(pairs, (64, 64))
        tileattn.forward(*rows, block_mask=mask)  # uploads it
        cupy.cuda.Device().synchronize()
        with stream:
            wait()
            found = tileattn.forward(*rows, block_mask=mask)
        del mask
        gc.collect()
        for nbytes in 20 * [512, 4096, 333 * 517]:
            cupy.full(nbytes, 255, np.uint8)  # in memory that is free on the default stream
        is_waiting.append(len(streams._released))
        stream.synchronize()
        return bits(found)

    wait, is_waiting = busy(200), list[int]()
    expected = called(cupy.cuda.Stream.null)
    assert called(other) == expected
    assert is_waiting[0] < is_waiting[1]
    called(other)
    assert is_waiting[2] <= is_waiting[1]  # what is complete is freed


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_the_same_bits_in_a_hundred_runs_beside_other_work(dtype: Any) -> None:
    import cupy

    given = random_arrays(*SHAPES, dtype=dtype)
    sinks, bias = random_arrays((4,), (333, 517), seed=1)
    other = cupy.cuda.Stream(non_blocking=True)
    load = cupy.ones((2048, 2048), np.float32)
    first: list[bytes] = []
    for _ in range(100):
        with other:
            load @ load
        attention, grads = both(given, deterministic=True, sinks=sinks, bias=bias)
        found = bits((*attention, *grads))
        first = first or found
        assert found == first
    other.synchronize()


def test_a_later_process_takes_kernels_from_the_cache(tmp_path: Path) -> None:
    """It writes nothing to the cache, so it has compiled nothing."""
    code = """
    import cupy, tileattn
    from tileattn.kernels.cuda.jit import load as loader

    x = cupy.zeros((1, 1, 64, 64), "float16")
    out, lse = tileattn.forward(x, x, x)
    tileattn.backward(x, x, x, x, out, lse)
    print(len(loader._loaded))
    """
    environment = {**os.environ, "TILEATTN_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def run() -> tuple[int, set[tuple[str, int]]]:
        command = [sys.executable, "-c", textwrap.dedent(code)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        files = (x for x in tmp_path.rglob("*") if x.is_file())
        return int(done.stdout), {(x.name, x.stat().st_ctime_ns) for x in files}

    kernels, written = run()
    assert 4 <= kernels <= len(written)
    assert run() == (kernels, written)
