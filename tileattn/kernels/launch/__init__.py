"""What a call launches: grids, parameters and workspace."""
