"""Everything with an outside: models, scheduler, servers, command line, metrics, files."""
