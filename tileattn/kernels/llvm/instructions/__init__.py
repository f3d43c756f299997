"""What one function of a kernel emits: instructions, parameters, elementary functions."""
