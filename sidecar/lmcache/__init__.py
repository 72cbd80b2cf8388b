"""LMCache's multiprocess protocol, served: an unmodified vLLM attaches with it. No torch and no lmcache in here."""
