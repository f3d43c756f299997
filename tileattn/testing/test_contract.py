"""The contract of a backend: ``python -m pytest --pyargs tileattn.testing``.

The environment variable ``TILEATTN_TEST_BACKEND`` names the backend: a registered name, or
``module:attribute``, which is imported and registered. Without it, the template is tested. An
option that the backend does not support must be refused, by a sentence of its ``why_not``.
"""

import os
from functools import partial
from typing import Any

import numpy as np
import pytest

import tileattn
from tileattn import UnsupportedError, reference
from tileattn.backends import registry
from tileattn.backends.protocol import Backend
from tileattn.call.parse import parse
from tileattn.dtypes import DTYPES, QUERY_DTYPES
from tileattn.expressions.functions import read_functions
from tileattn.testing.bounds import error_bound
from tileattn.testing.compare import assert_attention_close
from tileattn.testing.functions import MASKS, SCORES, draw_functions
from tileattn.testing.options import DRAW, Choices
from tileattn.testing.quantised import quantise
from tileattn.testing.selfcheck import sender
from tileattn.testing.strategies import UNPACKED, AttentionCase, draw_case
from tileattn.validation import on_host

NAME = os.environ.get("TILEATTN_TEST_BACKEND") or "tileattn.testing.template:TemplateBackend"


@pytest.fixture(scope="module")
def backend() -> Any:
    """Return the backend that is tested; skip where it cannot run."""
    found = registry.load(NAME) if ":" in NAME else registry.get(NAME)
    if (reason := found.unavailable()) is not None:
        pytest.skip(f"{found.name}: {reason}")
    return found


def draw(seed: int, dtype: Any, options: Any = (), **limits: Any) -> AttentionCase:
    """Draw a call; the seed decides everything."""
    choices = Choices(np.random.default_rng(seed))
    D, Dv = choices.one_of(16, 20, 32, 64), choices.one_of(16, 24, 64)
    family = np.dtype(dtype), D, Dv, options
    return draw_case(choices, family, **{"max_length": 40} | limits)


def sent(backend: Any, case: AttentionCase) -> tuple[list[Any], dict[str, Any]]:
    """Copy the arrays of a call to those of the backend."""
    send = sender(backend)
    return [*map(send, case[:5])], {name: send(x) for name, x in case.options.items()}


def why_not(backend: Any, case: AttentionCase) -> str | None:
    """Return the sentence that refuses a call; None if it is supported."""
    (q, k, v, *_), options = sent(backend, case)
    reason: str | None = backend.why_not(parse(q, k, v, read_functions(options))[0])
    return reason


def run(backend: Any, case: AttentionCase) -> tuple[Any, Any]:
    """Run both passes."""
    (q, k, v, dout, dlse), options = sent(backend, case)
    given: dict[str, Any] = {"backend": backend.name, **options}
    attention = tileattn.forward(q, k, v, **given)
    grads = tileattn.backward(dout, q, k, v, *attention, dlse=dlse, deterministic=True, **given)
    return attention, grads


def check(backend: Any, case: AttentionCase) -> bool:
    """Compare a call with the oracle, or check that it is refused; return True if supported."""
    reason = why_not(backend, case)
    if reason is not None:
        assert isinstance(reason, str), "why_not must return None or a sentence"
        assert reason
        with pytest.raises(UnsupportedError):
            run(backend, case)
        return False
    attention, grads = run(backend, case)
    q, k, v, dout, dlse, options = case
    bounds = error_bound(q, k, v, dout, dlse=dlse, **options)
    assert_attention_close(attention, reference.forward(q, k, v, **options), bounds)
    expected = reference.backward(dout, q, k, v, dlse=dlse, **options)
    assert_attention_close(grads, expected, bounds)
    return True


def test_it_has_the_members_of_a_backend(backend: Any) -> None:
    assert isinstance(backend, Backend)
    assert tileattn.available_backends()[backend.name] is None
    assert backend.owns(sender(backend)(np.zeros(3)))
    assert not backend.owns([0.0])
    assert not backend.owns(np.ma.array([0.0]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_plain_call(backend: Any, dtype: Any) -> None:
    for seed in range(4):
        check(backend, draw(seed, dtype))


def test_some_calls_are_supported(backend: Any) -> None:
    assert any(why_not(backend, draw(0, dtype)) is None for dtype in DTYPES)


@pytest.mark.parametrize("option", DRAW)
def test_an_option_is_honoured_or_refused(backend: Any, option: str) -> None:
    for seed in range(6):
        check(backend, draw(seed, DTYPES[seed % len(DTYPES)], (option,)))


@pytest.mark.parametrize("name", [*SCORES, *MASKS])
def test_a_function_is_honoured_or_refused(backend: Any, name: str) -> None:
    for seed in range(2):
        case = draw(seed, np.float32, ranks=(4,), edges=())
        choices = Choices(np.random.default_rng(seed))
        score_mod, mask_mod = (name if name in names else None for names in (SCORES, MASKS))
        shape = *case.q.shape[:3], case.k.shape[2]
        options = draw_functions(choices, score_mod, mask_mod, shape)
        check(backend, case._replace(options=options))


def test_packed_sequences_are_honoured_or_refused(backend: Any) -> None:
    names = [name for name in ("causal", "kv_lengths", "window") if name not in UNPACKED]
    for seed in range(6):
        check(backend, draw(seed, np.float32, names, packed=True))


def test_pages_are_honoured_or_refused(backend: Any) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.normal(size=shape).astype("f4") for shape in ((2, 4, 3, 16), *[(5, 2, 4, 16)] * 2)
    )
    options = {"block_table": np.array([[3, 0], [4, 1]]), "kv_lengths": np.array([5, 8])}
    case = AttentionCase(q, k, v, q, None, options)
    if why_not(backend, case) is None:
        rows, given = sent(backend, case)
        found = tileattn.forward(*rows[:3], backend=backend.name, **given)
        bounds = error_bound(q, k, v, **options)
        assert_attention_close(found, reference.forward(q, k, v, **options), bounds)


@pytest.mark.parametrize("seed", range(6))
def test_caches_of_8_bits_are_honoured_or_refused(backend: Any, seed: int) -> None:
    case = draw(seed, QUERY_DTYPES[seed % len(QUERY_DTYPES)], ("causal",), packed=seed % 2 == 1)
    choices = Choices(np.random.default_rng(seed))
    k, v, descales = quantise(choices, case.k, case.v, case.options)
    case = case._replace(k=k, v=v, options=case.options | descales)
    rows, options = sent(backend, case)
    forward = partial(tileattn.forward, *rows[:3], backend=backend.name, **options)
    if why_not(backend, case) is not None:
        with pytest.raises(UnsupportedError):
            forward()
        return
    expected = reference.forward(case.q, k, v, **case.options)
    assert_attention_close(forward(), expected, error_bound(case.q, k, v, **case.options))


@pytest.mark.parametrize("seed", range(20))
def test_options_together(backend: Any, seed: int) -> None:
    dtype = DTYPES[seed % len(DTYPES)]
    supported = [x for x in DRAW if why_not(backend, draw(1, dtype, (x,), edges=())) is None]
    rng = np.random.default_rng(seed)
    check(backend, draw(seed, dtype, [x for x in supported if rng.random() < 0.5]))


def test_long_sequences(backend: Any) -> None:
    check(backend, draw(2, np.float32, ("causal",), max_length=233, edges=()))


def test_a_call_has_the_same_bits_again(backend: Any) -> None:
    case = draw(3, np.float32, edges=(), poison=False)
    for first, second in zip(run(backend, case), run(backend, case), strict=True):
        for x, y in zip(first, second, strict=True):
            np.testing.assert_array_equal(on_host(x), on_host(y))


def test_a_row_has_the_same_bits_in_any_batch(backend: Any) -> None:
    case = draw(3, np.float32, edges=(), poison=False, ranks=(4,))
    alone = case._replace(**{n: getattr(case, n)[:1] for n in ("q", "k", "v", "dout")}, dlse=None)
    whole, part = (run(backend, x)[0].out for x in (case, alone))
    np.testing.assert_array_equal(on_host(whole)[:1], on_host(part))


def test_inputs_are_not_written(backend: Any) -> None:
    case = draw(4, np.float32, edges=(), poison=False)
    (q, k, v, dout, _), _ = sent(backend, case)
    before = [on_host(x).copy() for x in (q, k, v, dout)]
    given: dict[str, Any] = {"backend": backend.name}
    out, lse = tileattn.forward(q, k, v, **given)
    tileattn.backward(dout, q, k, v, out, lse, **given)
    for x, y in zip((q, k, v, dout), before, strict=True):
        np.testing.assert_array_equal(on_host(x), y)


def test_out_is_written(backend: Any) -> None:
    case = draw(5, np.float32, edges=(), poison=False)
    (q, k, v, dout, _), _ = sent(backend, case)
    out = dout + 1  # of the right shape, dtype and library
    tileattn.forward(q, k, v, out=out, backend=backend.name)
    expected = tileattn.forward(q, k, v, backend=backend.name)
    np.testing.assert_array_equal(on_host(out), on_host(expected.out))


@pytest.mark.parametrize("axis", ["B", "Hq", "Nq", "Nk", "Dv"])
def test_an_axis_may_be_empty(backend: Any, axis: str) -> None:
    sizes = {"B": 2, "Hq": 3, "Nq": 5, "Nk": 7, "Dv": 6, axis: 0}
    B, H, Nq, Nk, Dv = sizes.values()
    rng = np.random.default_rng(0)
    shapes = (Nq, 4), (Nk, 4), (Nk, Dv), (Nq, Dv)
    q, k, v, dout = (rng.normal(size=(B, H, *shape)).astype("f4") for shape in shapes)
    check(backend, AttentionCase(q, k, v, dout, None, {}))


def test_it_explains_a_call(backend: Any) -> None:
    case = draw(6, np.float32, edges=())
    (q, k, v, *_), _ = sent(backend, case)
    found = tileattn.explain(q, k, v, backend=backend.name)
    assert found.backend == backend.name
    assert str(found)
