"""What a call is: its options, its arrays, and what they mean."""
