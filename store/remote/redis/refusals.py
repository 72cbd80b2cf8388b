"""Meaning of a server's errors and timeouts, and what can be done about them."""

from redis.exceptions import AskError, AuthenticationError, NoPermissionError, OutOfMemoryError, RedisError

from kvtier.store.remote.redis.command import Reply

_NO_CLUSTER = "cluster support disabled"
_NO_CERTIFICATE = "CERTIFICATE_VERIFY_FAILED"
_RIGHTS = "+get +getrange +set +exists +unlink +scan +ping +cluster|slots +asking"


def is_wrong_type(reply: Reply) -> bool:
    """Return whether the key holds something that was never put there, such as a list of another client."""
    return isinstance(reply, RedisError) and str(reply).startswith("WRONGTYPE")


def is_answer(reply: Reply) -> bool:
    """Return whether the server handled the command. A full server that rejects a value has handled it too."""
    return not isinstance(reply, Exception) or isinstance(reply, OutOfMemoryError) or is_wrong_type(reply)


def describe(error: Exception, where: str, prefix: str) -> str:
    """Describe in one line, without secrets, what happened at *where* and what to do."""
    said = " ".join(str(error).split())
    if isinstance(error, AuthenticationError):
        return f"{where}: refuses the user or the password ({said}); give one that ACL LIST shows"
    if isinstance(error, NoPermissionError):
        return f"{where}: the user lacks a permission ({said}); run ACL SETUSER name ~{prefix}* {_RIGHTS}"
    if isinstance(error, AskError):
        return f"{where}: is a node of a cluster; write redis+cluster:// instead of redis://"
    if _NO_CLUSTER in said:
        return f"{where}: is not a cluster; write redis:// instead of redis+cluster://"
    if _NO_CERTIFICATE in said:
        return f"{where}: its certificate is not signed by a trusted CA, or not for that name; give the CA's file"
    return f"{where}: {said}"
