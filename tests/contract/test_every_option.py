"""Each option through each entry: its value counts, or a sentence that names it refuses it."""

import importlib.util
import itertools
from collections.abc import Collection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import REASONS
from tests.every_option import ENTRIES, EXACT, VALUES, call_with, expected, hold
from tileattn.call.options import Options
from tileattn.testing import assert_attention_close, error_bound

PAIRS = [*itertools.combinations(VALUES, 2)]


def entry_of(name: str) -> None:
    """Skip an entry whose library is not installed."""
    library = name.partition(".")[0]
    if library in REASONS and REASONS[library] is not None:
        pytest.skip(f"{library}: {REASONS[library]}")
    if library in ("torch", "jax") and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install {library}")


def holds(entry: str, names: Collection[str]) -> bool:
    """Compare the call of some options with the oracle; False if a sentence refuses one of them."""
    options = {name: x for option in names for name, x in VALUES[option].options.items()}
    call = call_with(options)
    try:
        found = ENTRIES[entry](call)
    except (TypeError, ValueError, NotImplementedError) as error:
        if not any(name in str(error) for name in names):
            raise
        return False
    hold(call, found)
    return True


def test_every_option_has_a_value() -> None:
    assert set(VALUES) == set(Options.__annotations__)


@pytest.mark.parametrize("option", [x for x in VALUES if x not in EXACT])
def test_the_value_of_an_option_changes_the_result(option: str) -> None:
    value = VALUES[option]
    call = call_with(value.options)
    bounds = error_bound(*call[:3], **value.options)
    without = expected(call._replace(options=value.without)).attention
    with pytest.raises(AssertionError):
        assert_attention_close(
            type(without)(*(x.astype("float32") for x in without)), expected(call).attention, bounds
        )


SLOW = ("llvm", "torch.compile", "jax.vmap")  # a second for each pair, which is compiled

# What an entry refuses: `holds` compares the sentence.
REFUSED = {"vjp": {"block_table", "k_descale", "v_descale"}}


# These wrap the entry beside them, which has all options in the quick tests.
WRAPPED = ("torch.compile", "torch.vmap", "jax.jit", "jax.vmap")


@pytest.mark.parametrize("option", VALUES)
@pytest.mark.parametrize(
    "entry", [pytest.param(x, marks=[pytest.mark.slow] * (x in WRAPPED)) for x in ENTRIES]
)
def test_an_option_counts_in_every_entry(entry: str, option: str) -> None:
    entry_of(entry)
    assert holds(entry, [option]) == (option not in REFUSED.get(entry, ()))


@pytest.mark.parametrize(
    "entry", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in ENTRIES]
)
def test_pairs_of_options_count_in_every_entry(entry: str) -> None:
    entry_of(entry)

    @settings(max_examples=5 if entry in SLOW else 30)
    @given(pair=st.sampled_from(PAIRS))
    def check(pair: tuple[str, str]) -> None:
        holds(entry, pair)

    check()
