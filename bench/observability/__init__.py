"""What it costs to see: the page, metrics, records, what-if lines and explanations."""
