"""The inference engine: model, scheduler, sampling, stores, sidecar client, metrics and tracing."""
