"""Plans: what a call launches, with which parameters and workspace; pure values."""
