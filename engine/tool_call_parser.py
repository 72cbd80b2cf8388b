"""ToolCallParser: the names of the families of models whose calls of tools `kvtier serve` reads."""

from typing import Literal, TypeAlias

ToolCallParser: TypeAlias = Literal[
    "hermes", "mistral_args", "mistral", "granite", "jamba", "phi4_mini_json", "llama3_json", "json"
]
