"""Each bad call is a TypeError, ValueError or UnsupportedError that names the argument.

``TILEATTN_BAD_CALLS=3000`` draws as many for each entry.
"""

import os
import re
import warnings

import pytest

import tileattn
from tests import bad_cascades
from tests.bad_calls import ENTRIES as OF_OTHERS
from tests.bad_calls import bad_calls

ENTRIES = OF_OTHERS | bad_cascades.ENTRIES
COUNT = int(os.environ.get("TILEATTN_BAD_CALLS", "60"))


@pytest.mark.parametrize("name", ENTRIES)
def test_each_bad_call_is_refused_by_name(name: str) -> None:
    entry = ENTRIES[name]
    found: dict[str, str] = {}
    for bad in bad_calls(entry, COUNT):
        case = f"{bad.name}: {bad.way}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                entry.call(**bad.arguments)
        except (TypeError, ValueError, tileattn.UnsupportedError) as error:
            names = "rotary|cos|sin" if bad.name == "rotary" else bad.name
            if not re.search(rf"(?<!\w)({names})(?!\w)", str(error)):
                found[case] = f"{type(error).__name__}: {error}"
        except BaseException as error:
            found[case] = f"{type(error).__name__}: {error}"
        else:
            found[case] = "returned"
    assert found == {}


@pytest.mark.parametrize("name", ENTRIES)
def test_the_calls_are_valid_before_they_are_broken(name: str) -> None:
    ENTRIES[name].call(**ENTRIES[name].valid())
