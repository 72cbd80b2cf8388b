"""Computing on a CPU: attention over blocks where they lie, and parts of a model in fewer passes over memory."""
