"""The engine and all that users see of it: models, scheduler, servers, command line, metrics, documents."""
