"""`jaxpaged bench`: throughput, latency and sustained rate of a model, with real or random weights."""
