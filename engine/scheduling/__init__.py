"""The queue of requests, the scheduler of steps, and the way of each request's cached prefix to the device."""
