"""The endpoint for LMCache's multiprocess protocol, at which an unmodified vLLM attaches. Needs no torch or lmcache."""
