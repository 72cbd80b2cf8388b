"""A host tier that is larger than the machine's memory is refused in one line, also by the library."""

import pytest
from small_models import build, byte_tokenizer

from kvtier import LLM
from kvtier.engine.machine_memory import refuse_more_than_memory


def test_the_library_refuses_more_host_memory_than_the_machine_has() -> None:
    config = {"device": {"capacity": "1MiB"}, "host": {"capacity": "999TiB"}}

    with pytest.raises(ValueError, match=r"^host.capacity 999.0 TiB: is more than the memory of this machine, .*"):
        LLM(build("llama"), config, byte_tokenizer())


def test_what_the_machine_has_is_let_through() -> None:
    refuse_more_than_memory("host.capacity", 1 << 20)
