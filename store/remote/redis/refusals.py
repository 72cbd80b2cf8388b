"""What it means that a server answers with an error, or not at all, and what can be done about that."""

from redis.exceptions import AskError, AuthenticationError, NoPermissionError, OutOfMemoryError, RedisError

from kvtier.store.remote.redis.command import Reply

_NO_CLUSTER = "cluster support disabled"
_NO_CERTIFICATE = "CERTIFICATE_VERIFY_FAILED"
_RIGHTS = "+get +getrange +set +exists +unlink +scan +ping +cluster|slots +asking"


def is_no_value(reply: Reply) -> bool:
    """Whether something is under the key that was never put there: a list, say, that somebody has made."""
    return isinstance(reply, RedisError) and str(reply).startswith("WRONGTYPE")


def is_answer(reply: Reply) -> bool:
    """Whether the server did what it can do: a full one that takes nothing more is there all the same."""
    return not isinstance(reply, Exception) or isinstance(reply, OutOfMemoryError) or is_no_value(reply)


def in_a_line(error: Exception, where: str, prefix: str) -> str:
    """What has happened at *where*, and what to do, in a line without a secret."""
    said = " ".join(str(error).split())
    if isinstance(error, AuthenticationError):
        return f"{where}: refuses the user or the password ({said}); give it those that ACL LIST shows"
    if isinstance(error, NoPermissionError):
        return f"{where}: the user may not do that ({said}); needed: ACL SETUSER name ~{prefix}* {_RIGHTS}"
    if isinstance(error, AskError):
        return f"{where}: is a node of a cluster; write redis+cluster:// for redis://"
    if _NO_CLUSTER in said:
        return f"{where}: is no cluster; write redis:// for redis+cluster://"
    if _NO_CERTIFICATE in said:
        return f"{where}: its certificate is not signed by whom we trust, or not for that name; name the CA's file"
    return f"{where}: {said}"
