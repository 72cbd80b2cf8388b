"""kvtier's numbers under the metric names and labels of vLLM and LMCache, for their dashboards."""
