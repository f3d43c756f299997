"""A call: its options and arrays, validated."""
