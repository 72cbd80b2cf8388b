"""The request queue, the scheduler of each step, and the loading of cached prefixes to the device."""
