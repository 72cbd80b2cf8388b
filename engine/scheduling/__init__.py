"""The request queue, the scheduler of steps, and the loading of each request's cached prefix to the device."""
