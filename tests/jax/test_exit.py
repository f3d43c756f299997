"""Programs that end while calls are still pending: the interpreter ends, too."""

import threading

import pytest

from tests.jax.devices import run_on_devices

pytest.importorskip("jax")

from tileattn.jax import handler

SECONDS = 60  # it takes a few

# Programs of several devices run in threads of XLA's. A call in one of them must not meet an
# interpreter that ends: Python would end the thread, for which XLA waits.
PENDING = """
import sys, time
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import tileattn
from tileattn.jax import attention
calls = []
# It knows none of this module's names: what knows one of them keeps JAX's client alive.
known = {"sleep": time.sleep, "n": float(sys.argv[2]), "calls": calls, "call": tileattn.forward}
slow = "lambda *args, **options: (sleep(n), calls.append(None), call(*args, **options))[2]"
tileattn.forward = eval(slow, known)
mesh, spec = jax.make_mesh((4,), ("x",)), PartitionSpec("x")
x = jax.device_put(jnp.ones((4, 2, 8, 4)), NamedSharding(mesh, spec))
mapped = jax.shard_map(lambda x: attention(x, x, x), mesh=mesh, in_specs=spec, out_specs=spec)
call = jax.jit(mapped)
y = call(x).block_until_ready()
calls.clear()
for _ in range(3):
    y = call(y)
if sys.argv[1] == "dropped":
    del y
print("pending" if len(calls) < 12 else "over", flush=True)
"""


@pytest.mark.parametrize(("result", "seconds"), [("kept", "0.05"), ("dropped", "0.4")])
def test_the_interpreter_ends(result: str, seconds: str) -> None:
    done = run_on_devices("-c", PENDING, result, seconds, timeout=SECONDS)
    assert (done.returncode, done.stdout) == (0, "pending\n"), done.stderr


def test_a_call_that_hangs_does_not_hold_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler, "_DEADLINE", 0.05)
    monkeypatch.setattr(handler, "_running", {object()})
    finish = threading.Thread(target=handler._finish, args=("cpu",), daemon=True)
    finish.start()
    finish.join(SECONDS)
    assert not finish.is_alive()
