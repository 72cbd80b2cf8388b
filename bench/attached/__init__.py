"""What kvtier's own engine pays and gets, attached to a sidecar."""
