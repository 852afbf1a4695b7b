"""One call: in one graph, or in chunks that devices take as they are idle."""
