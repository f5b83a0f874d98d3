"""The worker process: one device, the model, KV tensors, sampling."""
