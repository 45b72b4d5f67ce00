"""The network: configuration, loaders, layers, the KV cache, sampling, and the runner of one step."""
