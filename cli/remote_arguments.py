"""The arguments that say which remote store is meant, for commands that use one without an engine."""

import argparse

from kvtier.cli.arguments import remote_url
from kvtier.engine.config import RemoteConfig, tree_from_dict

_OPTIONS = ("url", "password_file", "ca_file", "endpoint", "region")  # by their names in [remote]


def add_remote(parser: argparse.ArgumentParser) -> None:
    """Add the store's URL, and how one gets in."""
    parser.add_argument(
        "url",
        type=remote_url,
        metavar="URL",
        help="URL of the store, as in [remote]: redis://HOST:6379, s3://BUCKET/PREFIX",
    )
    parser.add_argument("--password-file", metavar="FILE", help="Redis: the password (default: that of the URL)")
    parser.add_argument(
        "--ca-file", metavar="FILE", help="Redis: who signed the server's certificate (default: the system's)"
    )
    parser.add_argument("--endpoint", metavar="URL", help="S3: a server that is not the cloud's own (default: none)")
    parser.add_argument("--region", metavar="NAME", help="S3: (default: the environment's)")


def remote_of(options: argparse.Namespace, command: str) -> RemoteConfig:
    """The store that *options* of *command* name. ValueError, with what to do, for one that cannot be."""
    tables = {name: value for name in _OPTIONS if (value := getattr(options, name)) is not None}
    return tree_from_dict(RemoteConfig, tables, command)
