"""The endpoint for LMCache's multiprocess protocol, at which an unmodified vLLM attaches. No torch and no lmcache."""
