"""The algorithm, written once: masks, scores, online softmax, and the loops over tiles."""
