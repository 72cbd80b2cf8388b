"""An engine's side of a sidecar: the connection to the sidecar process, and the use of its host memory and disk."""
