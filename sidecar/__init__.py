"""The sidecar: a process with the tiers below GPU memory, to which engines attach. It uses neither CUDA nor torch."""
