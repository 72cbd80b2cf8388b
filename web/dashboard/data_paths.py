"""The paths of the page's data. Who may ask for them is each server's to decide."""

from kvtier.web.dashboard.assets import PAGE

STREAM, HISTORY = f"{PAGE}/stream", f"{PAGE}/history"
DOWNLOADS = (f"{PAGE}/download.csv", f"{PAGE}/download.json")
DATA_PATHS = frozenset({STREAM, HISTORY, *DOWNLOADS})
