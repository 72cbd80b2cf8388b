"""The check of a model's name on the Hugging Face hub, which fails within seconds if the model cannot be loaded.

Without it, transformers would ask a hub that does not answer five times for each file, for half a minute per file.
"""

import os
import re
import threading
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_TIMEOUT_S = 5.0  # for one answer of the hub; HF_HUB_ETAG_TIMEOUT overrides it
_REMEMBERED_S = 60  # an answer is not asked for again within this time
_NAME = r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_FILE = "config.json"


def source_of(name: str) -> str:
    """Return what transformers can load the hub model *name* from.

    This is the name itself, or the model's folder in the local cache if the hub does not answer. Asks the hub for the
    existence of one small file, and waits for the answer for a few seconds at most. Imports neither torch nor
    transformers.

    Raises:
        ValueError: *name* is no name on the hub, the hub has no such model, or the hub does not answer and the local
            cache does not have the model.
    """
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise _unusable(name, "there is no such folder")
    if not _is_name(name):
        raise _unusable(name, "there is no such folder, and a name on the hub has the form OWNER/MODEL")
    from huggingface_hub import constants  # imported late, because most models are folders

    cached = cached_folder(name)
    if constants.HF_HUB_OFFLINE:
        if cached is None:
            raise _not_cached(name, "HF_HUB_OFFLINE is set")
        return name
    fault = _fault_of(name, constants.ENDPOINT, int(time.monotonic()) // _REMEMBERED_S)
    if fault is None:
        return name
    if fault.is_of_model:
        raise _unusable(name, fault.what)
    if cached is None:
        raise _not_cached(name, fault.what)
    return str(cached)


def cached_folder(name: str) -> Path | None:
    """Return the folder of the hub model *name* in the local cache, or None if the cache does not have the model."""
    from huggingface_hub import try_to_load_from_cache

    if not _is_name(name):
        return None
    for file in (_FILE, "adapter_config.json"):
        found = try_to_load_from_cache(name, file)
        if isinstance(found, str):
            return Path(found).parent
    return None


@dataclass(frozen=True, slots=True)
class _Fault:
    """The reason why the hub did not confirm a model."""

    what: str
    is_of_model: bool  # true if the hub answered that the model cannot be had


@lru_cache(maxsize=64)
def _fault_of(name: str, endpoint: str, _minute: int) -> _Fault | None:
    """Ask the hub at *endpoint* for the model *name*. Return None if the hub has it."""
    answers: list[_Fault | None] = []
    # A thread, because looking up the hub's address has no time limit of its own.
    asking = threading.Thread(target=lambda: answers.append(_asked(name, endpoint)), name="kvtier-hub", daemon=True)
    asking.start()
    timeout_s = _timeout_s()
    asking.join(timeout_s)
    if not answers:
        return _Fault(f"{endpoint} did not answer within {timeout_s:g} s", is_of_model=False)
    return answers[0]


def _asked(name: str, endpoint: str) -> _Fault | None:
    from huggingface_hub import get_hf_file_metadata
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        get_hf_file_metadata(f"{endpoint}/{name}/resolve/main/{_FILE}", timeout=_timeout_s())
    except GatedRepoError:
        what = "its licence has not been accepted: accept it on the model's page, and set HF_TOKEN"
        return _Fault(what, is_of_model=True)
    except RepositoryNotFoundError:
        return _Fault("the hub has no model of this name, or it is private and HF_TOKEN is not set", is_of_model=True)
    except EntryNotFoundError:  # the repository exists; whether it can be loaded is seen later
        return None
    except HfHubHTTPError as error:
        return _Fault(f"{endpoint} answered with status {error.response.status_code}", is_of_model=False)
    except Exception as error:  # of the HTTP client: no address, no connection, no certificate
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return _Fault(f"{endpoint} cannot be reached: {why}", is_of_model=False)
    return None


def _is_name(name: str) -> bool:
    """Return whether *name* has the form of a name on the hub."""
    is_shaped = re.fullmatch(rf"({_NAME}/)?{_NAME}", name) is not None
    return is_shaped and "--" not in name and ".." not in name and not name.endswith(".git")


def _timeout_s() -> float:
    """Return the time limit for an answer of the hub."""
    text = os.environ.get("HF_HUB_ETAG_TIMEOUT", "")
    return float(text) if text.isdecimal() and int(text) else _TIMEOUT_S


def _unusable(name: str, why: str) -> ValueError:
    return ValueError(f"model {name}: cannot be loaded ({why}); give a folder, a GGUF file or a name on the hub")


def _not_cached(name: str, why: str) -> ValueError:
    return ValueError(
        f"model {name}: is not in the local cache, and {why}; download it with 'hf download {name}' while the hub can "
        "be reached, or give a folder or a GGUF file"
    )
