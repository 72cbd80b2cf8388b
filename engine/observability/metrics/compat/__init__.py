"""kvtier's metrics under the names and labels of vLLM and LMCache, so that their dashboards can show them."""
