"""The pages in docs/reference/ that are generated: `make reference` writes them anew."""

from collections.abc import Callable, Mapping

from cli_page import cli_page
from configuration_page import configuration_page
from http_page import http_page
from markdown_links import ROOT
from metrics_compat_page import metrics_compat_page
from metrics_page import metrics_page

PAGES: Mapping[str, Callable[[], str]] = {
    "docs/reference/cli.md": cli_page,
    "docs/reference/configuration.md": configuration_page,
    "docs/reference/http-api.md": http_page,
    "docs/reference/metrics.md": metrics_page,
    "docs/reference/metrics-compat.md": metrics_compat_page,
}


def main() -> None:
    """Write all pages."""
    for page, generated in PAGES.items():
        path = ROOT / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(generated())


if __name__ == "__main__":
    main()
