"""Fast paths of models on a CPU: attention of single tokens over the blocks in place, and packed linear layers.

Code that also runs on other devices does not belong here.
"""
