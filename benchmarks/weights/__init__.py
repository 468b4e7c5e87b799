"""New weights for a running vLLM engine, by each road."""
