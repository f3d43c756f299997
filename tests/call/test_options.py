"""The table of options agrees with the type that callers see."""

from tileattn.call.options import OPTIONS, Options


def test_each_option_has_a_record_and_a_type() -> None:
    assert list(OPTIONS) == list(Options.__annotations__)
